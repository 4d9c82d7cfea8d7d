"""Rank 0's side of the hand-off: requests that were not handed on yet, and what else the next message will say."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from distkv.engine.beam import Beams
from distkv.engine.handoff import NewRequest, News
from distkv.engine.requests import Prompt
from distkv.engine.sampling import Sampling
from distkv.engine.state import Pending

__all__ = ["Intake", "new_request"]


def new_request(prompt: Prompt, name: str, ids: np.ndarray, limit: int, *, cache: bool) -> NewRequest:
    """A checked prompt as it goes to all ranks; ``cache=False``: without reading and without writing.

    A prompt that is to be sampled and has no seed gets one here, so that all ranks have the same.
    """
    sampling = beams = None
    if prompt.temperature:
        seed = prompt.seed if prompt.seed is not None else secrets.randbits(64)
        sampling = Sampling(temperature=prompt.temperature, top_k=prompt.top_k, top_p=prompt.top_p, seed=seed)
    if prompt.beams > 1:
        beams = Beams(width=prompt.beams, length_penalty=prompt.length_penalty, early_stopping=prompt.early_stopping)
    return NewRequest(
        id=name, tokens=ids, output_limit=limit, salt=prompt.salt, priority=prompt.priority,
        adapter=(prompt.adapter.name, prompt.adapter.generation) if prompt.adapter is not None else None,
        conversation=prompt.conversation, read=prompt.read and cache, write=prompt.write and cache,
        sampling=sampling, n=prompt.n, beams=beams,
    )  # fmt: skip


@dataclass
class Intake:
    """A queue of requests and a message in the making. Nothing leaves it before the message was sent."""

    backlog: dict[str, Pending] = field(default_factory=dict)
    """By id, in the order of their submission."""
    outgoing: News = field(default_factory=News)
    """What the next message says, but for its requests."""
    _names: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def new_name(self) -> str:
        """An id for a request that has none."""
        return f"r{next(self._names)}"

    def say(self, **changes: Any) -> None:
        """Changes fields of the next message."""
        self.outgoing = replace(self.outgoing, **changes)

    def abort(self, name: str) -> bool:
        """True if the request was still here, and is forgotten; else all ranks are told with the next message."""
        if self.backlog.pop(name, None) is not None:
            return True
        if name not in self.outgoing.aborts:
            self.say(aborts=(*self.outgoing.aborts, name))
        return False

    def suspend(self, name: str) -> bool:
        """Tells all ranks with the next message, unless the request is still here: False."""
        if name in self.backlog:
            return False
        if name not in self.outgoing.suspends:
            self.say(suspends=(*self.outgoing.suspends, name))
        return True

    def ended(self, name: str) -> None:
        """A request is over: what was not sent yet must not meet a later request with the same id."""
        for kind in ("aborts", "suspends"):
            names = getattr(self.outgoing, kind)
            if name in names:
                self.say(**{kind: tuple(n for n in names if n != name)})

    def message(self, room: int, cap: Callable[[Pending, bool], int | None]) -> News:
        """The next message with at most ``room`` requests. ``cap(pending, first)`` gives each its ``matched_cap``."""
        if self.outgoing.shutdown:
            return self.outgoing
        handed: list[NewRequest] = []
        for pending in itertools.islice(self.backlog.values(), max(0, room)):
            assert pending.new is not None
            handed.append(replace(pending.new, matched_cap=cap(pending, not handed)))
        return replace(self.outgoing, requests=tuple(handed))

    def sent(self, news: News) -> None:
        """The message is with all ranks: a new one begins."""
        for new in news.requests:
            del self.backlog[new.id]
        self.outgoing = News()
