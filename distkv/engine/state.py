"""What the engine keeps of a request while it lasts, and of a conversation between its turns."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distkv.cache import PrefixCache
from distkv.chain import KeyChain
from distkv.engine.handoff import NewRequest
from distkv.engine.requests import Choice, Completion, FinishReason, Prompt
from distkv.engine.sampling import Sampling
from distkv.engine.schedule import Chunk
from distkv.errors import DistKVError, SequenceError
from distkv.keys import Adapter
from distkv.sequence import Sequence as CacheSequence

if TYPE_CHECKING:
    from distkv.engine.family import Family

__all__ = ["ConversationNames", "Pending", "Running", "Said", "check_plan", "completion", "tell"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Running:
    """An admitted request, or one sequence of it. ``tokens`` has room for prompt and answer, ``known`` are real.

    ``promised``: those, and the ones that passes in flight will give. They can be computed on before they are known.
    """

    sequence: CacheSequence
    tokens: np.ndarray
    known: int
    promised: int
    sampling: Sampling | None = None
    steps: int = 0
    suspended: int = 0
    """How many times it was suspended."""
    growing: bool = False
    """It waits for more pages, and is in no batch until it has them."""
    request: str = ""
    """The id of the request; that of the sequence is another one for all but one sequence of a request."""
    sample: int = 0
    turn: int = 0
    """In which order requests were admitted, the last time that each was."""
    family: Family | None = None
    """Of a sequence whose next token is chosen together with those of others: who chooses it."""

    @property
    def held(self) -> bool:
        """Whether it waits for its next token, and is in no batch until it has it."""
        return self.family is not None and self.promised > self.known

    def child(self, sequence: CacheSequence) -> Running:
        """A fork of it, with the same known tokens and one more promised."""
        return replace(self, sequence=sequence, tokens=self.tokens.copy(), suspended=0)


@dataclass(slots=True)
class Pending:
    """A request until it ends, on the rank where it was submitted; the others have not what only rank 0 knows."""

    prompt_tokens: int
    limit: int
    ask: Prompt | None = None
    new: NewRequest | None = None
    chain: KeyChain | None = None
    submitted: float = 0.0
    first: float | None = None
    deaf: bool = False
    """Its ``on_token`` raised and is not called again."""
    choices: dict[int, Choice] = field(default_factory=dict)
    """The answers that have ended, by number."""
    cached_tokens: int = 0
    """Those of the prompt that the cache had when it was first admitted."""
    host_tokens: int = 0
    """Those of them that some rank had to read in from the host."""
    steps: int = 0
    suspended: int = 0
    """These two: of the sequences that have ended, as in the completion."""

    @property
    def n(self) -> int:
        """Answers wanted."""
        return self.new.n if self.new is not None else 1

    def admitted(self, sequence: CacheSequence) -> None:
        """It runs for the first time."""
        self.cached_tokens, self.host_tokens = sequence.cached_tokens, sequence.record.host_tokens

    def count(self, running: Running) -> None:
        """One of its sequences has ended."""
        self.steps = max(self.steps, running.steps)
        self.suspended += running.suspended

    def answer(self, running: Running) -> list[int]:
        """What a sequence of it has of the answer."""
        return [int(token) for token in running.tokens[self.prompt_tokens : running.known]]

    def chose(self, number: int, tokens: Iterable[int], tokenizer: Any, reason: FinishReason,
              score: float | None = None) -> None:  # fmt: skip
        """One answer has ended."""
        out = tuple(tokens)
        text = tokenizer.decode(list(out), skip_special_tokens=True) if tokenizer is not None else None
        self.choices[number] = Choice(index=number, token_ids=out, text=text, finish_reason=reason, score=score)


Said = tuple[Callable[[int], None], Pending, int]
"""Whom to tell of which token."""


def tell(said: Sequence[Said]) -> None:
    """Calls the prompts' own functions; to be called when the batch is over and nothing is left half done."""
    for on_token, pending, token in said:
        if pending.deaf:
            continue
        try:
            on_token(token)
        except Exception:
            pending.deaf = True
            name = pending.new.id if pending.new is not None else "?"
            logger.exception("on_token of request %r raised; it is not called again, the request goes on", name)


def check_plan(chunks: Sequence[Chunk], running: Mapping[str, Running], *, ahead: bool = False) -> None:
    """Raises ``SequenceError`` unless each chunk is the next one of a request, and its only one.

    Slots are handed out in order: any other chunk would put its KV in wrong places.
    """
    if len({chunk.request_id for chunk in chunks}) < len(chunks):
        raise SequenceError("the scheduler planned two chunks of one request in one batch")
    for chunk in chunks:
        request = running.get(chunk.request_id)
        if request is None:
            raise SequenceError(f"the scheduler planned {chunk}, but the request is not running")
        committed, opened = request.sequence.committed, request.sequence.seq_len
        if opened != chunk.start or not 0 < chunk.n <= request.promised - opened:
            raise SequenceError(
                f"the scheduler planned {chunk}, but of its request {committed} tokens are computed, {opened} opened "
                f"and {request.known} known" + f", {request.promised - request.known} more in flight" * ahead
            )


def completion(
    name: str, pending: Pending, tokenizer: Any, reason: FinishReason, error: DistKVError | None
) -> Completion:
    """The end of a request as the caller gets it."""
    choices = tuple(pending.choices[number] for number in sorted(pending.choices))
    timed = pending.ask is not None and pending.first is not None
    return Completion(
        id=name, token_ids=choices[0].token_ids if choices else (),
        text=choices[0].text if choices else "" if tokenizer is not None else None,
        prompt_tokens=pending.prompt_tokens, cached_tokens=pending.cached_tokens, host_tokens=pending.host_tokens,
        suspended=pending.suspended, steps=pending.steps, finish_reason=reason, error=error, choices=choices,
        ttft_s=pending.first - pending.submitted if timed and pending.first is not None else None,
    )  # fmt: skip


@dataclass
class ConversationNames:
    """The names of recent conversations: a new turn is hashed from where it departs from the last one."""

    cache: PrefixCache
    limit: int
    kept: OrderedDict[tuple[str, str | None, tuple[str, int] | None], KeyChain] = field(default_factory=OrderedDict)

    def name(self, new: NewRequest) -> KeyChain:
        """The chain of a prompt."""
        old = self.kept.get((new.conversation, new.salt, new.adapter)) if new.conversation is not None else None
        if old is not None:
            return old.follow(new.tokens)
        adapter = Adapter(*new.adapter) if new.adapter is not None else None
        return self.cache.chain(new.tokens, adapter=adapter, salt=new.salt)

    def keep(self, new: NewRequest, chain: KeyChain) -> None:
        """Remembers a finished turn."""
        if new.conversation is None or not self.limit:
            return
        key = (new.conversation, new.salt, new.adapter)
        self.kept[key] = chain
        self.kept.move_to_end(key)
        while len(self.kept) > self.limit:
            self.kept.popitem(last=False)
