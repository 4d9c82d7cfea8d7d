"""What becomes of requests in the eyes of those who wait for them: tokens as they come, answers, completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distkv.cache import PrefixCache
from distkv.engine.handoff import NewRequest
from distkv.engine.requests import Completion, FinishReason
from distkv.engine.state import ConversationNames, Pending, Said, completion
from distkv.errors import DistKVError

__all__ = ["Answers"]


class Answers:
    """Owns the requests that have not ended, and what nobody has been told of yet. It knows nothing of sequences."""

    def __init__(
        self, cache: PrefixCache, tokenizer: Any, keep_conversations: int, on_end: Callable[[str], None]
    ) -> None:
        """``on_end`` is called with the id of each request that has ended."""
        self.tokenizer = tokenizer
        self.chains = ConversationNames(cache, keep_conversations)
        self.pending: dict[str, Pending] = {}
        self.news: dict[str, NewRequest] = {}
        """Those that were handed over, by id."""
        self._on_end = on_end
        self._ended: list[Completion] = []
        self._said: list[Said] = []

    def hears(self, name: str, sample: int, token: int) -> None:
        """The next token of an answer is there, and somebody may wait for it."""
        pending = self.pending[name]
        if pending.first is None:
            pending.first = time.monotonic()
        if not sample and pending.ask is not None and pending.ask.on_token is not None:
            self._said.append((pending.ask.on_token, pending, token))

    def chose(
        self, new: NewRequest, number: int, tokens: Iterable[int], reason: FinishReason, score: float | None = None
    ) -> None:
        """See :class:`~distkv.engine.family.Owner`."""
        answer = list(tokens)
        self.pending[new.id].chose(number, answer, self.tokenizer, reason, score)
        if not number and new.conversation is not None:
            self.chains.keep(new, self.chains.name(replace(new, tokens=np.append(new.tokens, answer).astype(np.int32))))

    def closed(self, name: str, reason: FinishReason, error: DistKVError | None) -> None:
        """A request has ended; :meth:`take_ended` gives its completion."""
        pending = self.pending[name]
        for number in range(pending.n if reason == "aborted" else 0):
            if number not in pending.choices:
                pending.chose(number, (), self.tokenizer, reason)
        del self.pending[name]
        self.news.pop(name, None)
        self._on_end(name)
        self._ended.append(completion(name, pending, self.tokenizer, reason, error))

    @property
    def ended(self) -> bool:
        """Whether :meth:`take_ended` would give something."""
        return bool(self._ended)

    def take_ended(self) -> list[Completion]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take_said(self) -> list[Said]:
        """Who is to be told of which token since the last call."""
        said, self._said = self._said, []
        return said

    def put_back(self, ended: Sequence[Completion]) -> None:
        """These are given by the next :meth:`take_ended`, first."""
        self._ended = [*ended, *self._ended]
