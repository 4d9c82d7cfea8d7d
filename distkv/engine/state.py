"""What the engine keeps of a request while it lasts, and of a conversation between its turns."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from distkv.cache import PrefixCache
from distkv.chain import KeyChain
from distkv.engine.handoff import NewRequest
from distkv.engine.requests import Prompt
from distkv.keys import Adapter
from distkv.sequence import Sequence as CacheSequence

__all__ = ["ConversationNames", "Pending", "Running"]


@dataclass(slots=True)
class Running:
    """An admitted request. ``tokens`` has room for prompt and answer; the first ``known`` are real."""

    sequence: CacheSequence
    tokens: np.ndarray
    known: int
    steps: int = 0


@dataclass(slots=True)
class Pending:
    """A request until it ends, on the rank where it was submitted; the others have prompt length and limit only."""

    prompt_tokens: int
    limit: int
    ask: Prompt | None = None
    new: NewRequest | None = None
    chain: KeyChain | None = None
    submitted: float = 0.0
    first: float | None = None


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
