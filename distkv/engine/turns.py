"""Prompts of a conversation, one after the other: each is known when the answer to the one before is."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkv.engine.conversation import Conversation, Message, chat_tokens
from distkv.engine.requests import Completion

__all__ = ["Talk", "Turns", "chats", "random_talks"]

Turns = Generator[np.ndarray, Completion, None]
"""Yields a prompt (int32 ``[n]``), is sent its completion, yields the next one."""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation by name, and its prompts to come."""

    name: str
    turns: Turns


def chats(tokenizer: Any, conversations: list[Conversation]) -> Iterator[Talk]:
    """The user messages of conversations; the history has the file's answers, else the model's."""
    for conversation in conversations:
        yield Talk(conversation.name, _chat(tokenizer, conversation))


def _chat(tokenizer: Any, conversation: Conversation) -> Turns:
    history: list[Message] = []
    for number, at in enumerate(conversation.turns()):
        history += conversation.added(number)
        done = yield chat_tokens(tokenizer, history)
        given = conversation.given_answer(at)
        history.append({"role": "assistant", "content": given if given is not None else done.text or ""})


def random_talks(seed: int, *, vocab: int, page_size: int, longest: int, answer: int) -> Iterator[Talk]:
    """Four conversations of up to three turns of random token ids; two begin alike, with more than one full page.

    ``longest``: tokens that prompt and answer (at most ``answer``) may have. Needs no tokenizer.
    """
    random = np.random.default_rng([seed, 0])
    shared = random.integers(0, vocab, page_size + int(random.integers(1, page_size + 1)), dtype=np.int32)
    for number in range(4):
        begin = shared if number < 2 else shared[:0]
        yield Talk(f"random {number + 1}", _random(random, begin, vocab, page_size, longest - answer))


def _random(random: np.random.Generator, begin: np.ndarray, vocab: int, page_size: int, longest: int) -> Turns:
    history = begin
    for _ in range(3):
        new = random.integers(0, vocab, int(random.integers(1, 3 * page_size // 2 + 1)), dtype=np.int32)
        if len(history) + len(new) > longest:
            return
        history = np.concatenate([history, new])
        done = yield history
        history = np.concatenate([history, np.array(done.token_ids, np.int32)])
