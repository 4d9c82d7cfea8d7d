"""A whole group of ranks in one process, with what real ranks do to each other: for tests of the cache and of engines.

Every rank is a real :class:`distkv.PrefixCache`; only the transport is in-process. Nothing ever waits: a rank that
would wait for another one that does not come raises GroupTimeout at once, where real ranks would hang.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from distkv.cache import PrefixCache
from distkv.config import Config
from distkv.errors import GroupError
from distkv.group import LocalGroup
from distkv.host.copies import CopyEngine
from distkv.keys import Fingerprint, Hash64
from distkv.ledger import CopyPage
from distkv.request import Message, StepResult

T = TypeVar("T")


class InjectedFault(RuntimeError):
    """The error that :meth:`SimulatedGroup.fail_next_begin` plants."""


class Disagreement(AssertionError):
    """Ranks decided differently, or one is in a state that the others are not in."""


class SimulatedGroup:
    """``len(configs)`` ranks. ``caches[r]`` is rank r's cache; local fields of its configuration may differ."""

    def __init__(self, configs: Sequence[Config], fingerprint: Fingerprint, hash64: Hash64 | None = None,
                 copies: Sequence[CopyEngine | None] = (), copy_pages: Sequence[CopyPage] = ()) -> None:
        """``copies``: each rank's copy engine, where the configurations ask for a host tier. ``copy_pages``: what each
        rank's forks copy pages with.

        Raises what the caches raise at start, such as GroupMismatch.
        """
        members = LocalGroup.make(len(configs), timeout_s=0)
        engines = copies or [None] * len(configs)
        copiers: Sequence[CopyPage | None] = copy_pages or [None] * len(configs)
        with ThreadPoolExecutor(len(configs)) as pool:  # the exchange at start is the one moment that waits
            self.caches = list(
                pool.map(lambda given: PrefixCache(given[0], fingerprint, given[1], copies=given[2],
                                                   copy_page=given[3], hash64=hash64),
                         zip(configs, members, engines, copiers, strict=True))
            )
        self.size = len(configs)
        self.members = members

    # ---- perturbations of single ranks

    def lose_cached_page(self, rank: int, rng: random.Random) -> bool:
        """Rank ``rank`` loses one page that only its index has, and the entries below it. False if it has none."""
        books = self.caches[rank]._books
        cold = np.flatnonzero(books.pool.cached())
        if len(cold):
            books.index.drop(int(rng.choice(cold.tolist())))
        return bool(len(cold))

    def lose_indexed_page(self, rank: int, rng: random.Random) -> bool:
        """Rank ``rank`` loses the index entry of any page, owned and held ones included (their owners keep them)."""
        books = self.caches[rank]._books
        indexed = np.flatnonzero(books.pool.indexed)
        if len(indexed):
            books.index.drop(int(rng.choice(indexed.tolist())))
        return bool(len(indexed))

    def fail_next_begin(self, rank: int, after_lookups: int = 0) -> None:
        """The next ``begin_step`` of this rank raises InjectedFault in its lookups, after so many good ones."""
        books = self.caches[rank]._books
        honest, left = books.match, after_lookups

        def failing(*args: object) -> object:
            nonlocal left
            if left <= 0:
                del books.match
                raise InjectedFault(f"planted on rank {rank}")
            left -= 1
            return honest(*args)  # type: ignore[arg-type]

        books.match = failing  # type: ignore[assignment,method-assign]

    def heal(self, rank: int) -> None:
        """Takes back a planted fault that did not go off."""
        self.caches[rank]._books.__dict__.pop("match", None)

    # ---- the same calls on all ranks

    def each(self, call: Callable[[PrefixCache], T]) -> list[T]:
        """``call(cache)`` for every rank, in rank order."""
        return [call(cache) for cache in self.caches]

    def begin(self, message: Callable[[PrefixCache], Message]) -> None:
        """``begin_step`` on every rank; ``message(cache)`` builds the message with that rank's chains."""
        self.each(lambda cache: cache.begin_step(message(cache)))

    def end(self) -> list[StepResult | GroupError | InjectedFault]:
        """``end_step`` on every rank: the result, or the group error or planted fault that it raised."""
        outcomes: list[StepResult | GroupError | InjectedFault] = []
        for cache in self.caches:
            try:
                outcomes.append(cache.end_step())
            except (GroupError, InjectedFault) as error:
                outcomes.append(error)
        return outcomes

    # ---- what must hold

    def check(self) -> None:
        """The invariants of every rank."""
        self.each(lambda cache: cache.check())

    def check_agreed(self) -> None:
        """Everything that the ranks have agreed on is equal. Raises Disagreement."""
        states = [_agreed_state(cache) for cache in self.caches]
        for rank, state in enumerate(states):
            if state != states[0]:
                raise Disagreement(f"rank 0 has {states[0]}, rank {rank} has {state}")


def _agreed_state(cache: PrefixCache) -> dict[str, object]:
    running = [
        (s.id, s.cached_tokens, s.seq_len, s.committed, s.promised, len(s.page_indices),
         s.read_in_progress, s.forking, [pages.tail for pages in s.lists], s.chain.tokens.tolist())
        for s in cache.running.values()
    ]
    counters = cache._agreement.counters
    state = {"running": running, "waiting": cache.waiting_ids, "suspended": list(cache.suspended),
             "kept": {name: (s.committed, len(s.page_indices)) for name, s in cache.kept.items()},
             "leftover": cache.leftover, "steps": counters.steps,
             "collectives": counters.collectives, "epoch": cache._books.epoch}
    if cache._books.lockstep:
        state["pages"] = [s.page_indices.tolist() for s in cache.running.values()]
        state["indexed"] = cache._books.pool.indexed.tobytes()
    return state
