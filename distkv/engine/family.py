"""Several answers from one prompt: the sequences of a request whose next tokens are chosen together, and their forks.

Of ``n`` samples that is so once: the row of logits behind the prompt gives each its first token, the sequence is
forked, and all go their own way. Beams are chosen anew in each round, from the rows of all of them: a beam without a
successor is let go, one with several is forked. Those that go are let go first, so what the forks take was promised to
the request before: it is in the cache's leftover, or will be in the next ballot, ahead of all requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from distkv.engine.beam import BeamSearch
from distkv.engine.handoff import NewRequest
from distkv.engine.requests import FinishReason
from distkv.engine.sampling import Sampling, choose, seed_of
from distkv.engine.state import Running
from distkv.errors import NoRoom
from distkv.sequence import Sequence as CacheSequence

__all__ = ["Family", "Owner"]


class Owner(Protocol):
    """What a family asks of whoever runs its sequences."""

    def take(self, running: Running, token: int) -> None:
        """This is the next token of a sequence."""

    def born(self, parent: Running, child: Running) -> None:
        """A fork runs from now on. Neither has opened a token since; the child has its first one already."""

    def drop(self, running: Running, *, store: bool) -> None:
        """A sequence ends; ``store``: what it has computed is put into the cache."""

    def hears(self, name: str, sample: int, token: int) -> None:
        """The next token of an answer is there, and somebody may wait for it."""

    def chose(self, new: NewRequest, number: int, tokens: Iterable[int], reason: FinishReason,
              score: float | None = None) -> None:  # fmt: skip
        """An answer of a request has ended, other than with a sequence of its own; not yet its sequence."""

    def complete(self, new: NewRequest) -> None:
        """All answers of a request have ended."""

    def cannot_fork(self, new: NewRequest, error: NoRoom) -> None:
        """No pool would ever have the pages; the request ends."""


class _Next(NamedTuple):
    """A sequence of the next round."""

    parent: Running
    token: int
    sample: int
    sampling: Sampling | None


class Family:
    """The sequences of one request, as long as their next tokens are chosen together. The same on every rank."""

    def __init__(self, new: NewRequest, stop_ids: Set[int], owner: Owner) -> None:
        self.new = new
        self.search = BeamSearch(new.beams, stop_ids, new.output_limit) if new.beams is not None else None
        """None: samples."""
        self._owner = owner
        self._stop_ids = stop_ids
        self._members: list[Running] = []
        """In the order of beams, once the first row is there."""
        self._rows: dict[str, np.ndarray] = {}
        self._nexts: list[_Next] = []
        self._sequences: dict[str, list[CacheSequence]] = {}
        """Of each sequence that has successors: those that they will be."""
        self._awaited = 0
        """Forks that wait for their pages."""

    def forget(self) -> None:
        """Its only sequence was suspended: the row behind the prompt will be computed again."""
        self._members, self._awaited = [], 0
        self._rows.clear()

    def landed(self, running: Running, row: torch.Tensor) -> None:
        """The logits ``[vocab]`` behind a sequence are there. With those of the last, the next tokens are chosen."""
        self._members = self._members or [running]
        self._rows[running.sequence.id] = row.float().cpu().numpy()
        if len(self._rows) < len(self._members):
            return
        rows = [self._rows[member.sequence.id] for member in self._members]
        self._rows.clear()
        if self.search is not None:
            self._next_beams(self.search, rows)
        else:
            self._first_tokens(running, rows[0])

    def forked(self, parent: CacheSequence, children: Iterable[CacheSequence]) -> None:
        """A fork that had to wait is made."""
        self._sequences[parent.id] += children
        self._awaited -= 1
        if not self._awaited:
            self._go()

    # ---- what comes next

    def _first_tokens(self, running: Running, row: np.ndarray) -> None:
        """Of every sample, from the row behind the prompt. One that ends with it needs no sequence."""
        n, sampling = self.new.n, self.new.sampling
        samplings = [replace(sampling, seed=seed_of(sampling.seed, i)) if sampling is not None else None
                     for i in range(n)]  # fmt: skip
        asked = [(each, running.known) for each in samplings]
        nexts = []
        for i, token in enumerate(choose(torch.from_numpy(row).expand(n, -1), asked)):
            stopped = token in self._stop_ids
            if stopped or self.new.output_limit == 1:
                self._owner.hears(self.new.id, i, token)
                self._owner.chose(self.new, i, [token], "stop" if stopped else "length")
            else:
                nexts.append(_Next(running, token, i, samplings[i]))
        if nexts:
            self._branch(nexts)
        else:
            self._owner.drop(running, store=True)
            self._owner.complete(self.new)

    def _next_beams(self, search: BeamSearch, rows: list[np.ndarray]) -> None:
        successors = search.step(rows)
        members = self._members
        parents = {number for number, _ in successors}
        for number, member in enumerate(members):
            if number not in parents:
                self._owner.drop(member, store=number in search.gave)
        if successors:
            self._branch([_Next(members[number], token, 0, None) for number, token in successors])
            return
        for i, found in enumerate(search.best(self.new.n)):
            self._owner.hears(self.new.id, i, found.tokens[0])
            self._owner.chose(self.new, i, found.tokens, "stop" if found.stopped else "length", found.score)
        self._owner.complete(self.new)

    def _branch(self, nexts: list[_Next]) -> None:
        """Forks what has several successors; they all go on when the last fork is made."""
        parents: dict[str, list[Running]] = {}
        for each in nexts:
            parents.setdefault(each.parent.sequence.id, []).append(each.parent)
        self._nexts = nexts
        self._sequences = {name: [same[0].sequence] for name, same in parents.items()}
        try:
            for name, same in parents.items():
                if len(same) > 1:
                    children = same[0].sequence.fork(len(same) - 1, wait=True)
                    self._sequences[name] += children
                    self._awaited += not children
        except NoRoom as error:
            self._owner.cannot_fork(self.new, error)
            return
        if not self._awaited:
            self._go()

    def _go(self) -> None:
        nexts, self._nexts = self._nexts, []
        members = []
        for each in nexts:
            sequence = self._sequences[each.parent.sequence.id].pop(0)
            first = sequence is each.parent.sequence
            members.append(each.parent if first else each.parent.child(sequence))
        for member, each in zip(members, nexts, strict=True):
            member.sample, member.sampling = each.sample, each.sampling
            if self.search is None:
                member.family = None  # from now on it is alone
            self._owner.take(member, each.token)
        for member, each in zip(members, nexts, strict=True):
            if member is not each.parent:
                self._owner.born(each.parent, member)
        self._members = members
