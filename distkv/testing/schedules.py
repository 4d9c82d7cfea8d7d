"""Random schedules over a simulated group: everything that requests, engines and unlucky ranks can do to the cache.

``run_schedule(seed)`` is one schedule. It raises at the first thing that is wrong: ranks that decide differently, a
reservation that cannot be met, a collective that one rank enters and another does not, books that do not add up, a
matched page with the bytes of another prefix, a request that never runs, anything left behind at the end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from distkv.cache import PrefixCache
from distkv.config import CacheConfig, Config, PoolConfig
from distkv.errors import GroupError, NoRoom, PeerFailed
from distkv.keys import Adapter, Fingerprint
from distkv.request import Message, Request, StepResult
from distkv.sequence import Sequence
from distkv.testing.group import Disagreement, SimulatedGroup

_STEMS = ([1, 2, 1, 2, 0, 0], [1, 2, 1, 1, 0, 1], [0, 0, 0, 0], [2], [1, 2, 1, 2, 0, 0, 1, 1, 2, 0, 1, 0])


@dataclass(frozen=True, slots=True)
class Plan:
    """A request as the schedule wants it; each rank makes its own chain of it."""

    id: str
    tokens: tuple[int, ...]
    output_limit: int
    salt: str | None
    adapter: Adapter | None
    cap: int | None
    read: bool
    write: bool

    def request(self, cache: PrefixCache) -> Request:
        chain = cache.chain(list(self.tokens), salt=self.salt, adapter=self.adapter)
        return Request(id=self.id, chain=chain, output_limit=self.output_limit, matched_cap=self.cap,
                       read=self.read, write=self.write)


@dataclass(slots=True)
class Bytes:
    """The modelled content of one rank's pages: the epoch and the whole prefix that each page was written for."""

    of_page: dict[int, object] = field(default_factory=dict)

    @staticmethod
    def _prefix(sequence: Sequence, page: int, size: int) -> object:
        chain = sequence.chain
        return (sequence.epoch, chain.root, tuple(chain.slice(0, (page + 1) * size).tolist()))

    def written(self, sequence: Sequence, first: int, stop: int, size: int) -> None:
        """Tokens ``first .. stop - 1`` were committed: pages that they fill have their content now."""
        pages = sequence.page_indices
        for page in range(first // size, stop // size):
            self.of_page[int(pages[page])] = self._prefix(sequence, page, size)
        if stop % size:
            self.of_page.pop(int(pages[stop // size]), None)

    def expect(self, sequence: Sequence, size: int) -> None:
        """Every page that the sequence got from the cache has the bytes of its own prefix."""
        for page in range(sequence.cached_tokens // size):
            found = self.of_page.get(int(sequence.page_indices[page]))
            if found != self._prefix(sequence, page, size):
                raise Disagreement(f"page {page} of {sequence} was matched but holds {found}")


class Schedule:
    """One run. Every draw comes from ``seed``, so a failing seed fails again."""

    def __init__(self, seed: int, steps: int = 60) -> None:
        self.rng = rng = random.Random(seed)
        self.steps = steps
        self.size = 2
        base = rng.randint(8, 32)
        self.asynchronous = rng.random() < 0.3
        cache = CacheConfig(page_size=self.size, index_on=rng.choice(["finish", "fill"]),
                            queue_slots=rng.choice([1, 2, 4, 8]), heartbeat=rng.choice([1, 4, 64]),
                            asynchronous=self.asynchronous)
        self.group = SimulatedGroup(
            [Config(cache=cache, pool=PoolConfig(pages=base + rng.randint(0, 6), scratch_pages=rng.randint(0, 1)))
             for _ in range(rng.randint(1, 8))],
            Fingerprint(model="simulated"),
        )
        self.ranks = list(range(self.group.size))
        self.bytes = [Bytes() for _ in self.ranks]
        self.counts: Counter[str] = Counter()
        self.next_id = 0
        self.step_number = 0
        self.version = 0

    # ---- draws

    def plan(self) -> Plan:
        rng = self.rng
        tokens = rng.choice(_STEMS) + [rng.randint(0, 1) for _ in range(rng.choice([0, 1, 2, 2, 4, 6]))]
        self.next_id += 1
        return Plan(
            id=str(self.next_id if rng.random() < 0.98 else max(1, self.next_id - 2)), tokens=tuple(tokens),
            output_limit=rng.randint(0, 8) if rng.random() < 0.97 else 200,
            salt=rng.choice([None] * 6 + ["s"]), adapter=rng.choice([None] * 6 + [Adapter("a")]),
            cap=rng.choice([None] * 6 + [1, 3]), read=rng.random() < 0.95, write=rng.random() < 0.95,
        )

    def known_ids(self) -> list[str]:
        cache = self.group.caches[0]
        return [*cache.waiting_ids, *cache.running]

    # ---- one step

    def step(self, requests: int, quiet: bool = False) -> None:
        rng, group = self.rng, self.group
        plans = [self.plan() for _ in range(requests)]
        known = self.known_ids()
        aborts = (rng.choice(known),) if known and rng.random() < 0.05 and not quiet else ()
        version = f"w{self.version + 1}" if rng.random() < 0.01 and not quiet else None
        self.version += version is not None
        reset = rng.random() < 0.01 and not quiet
        if not quiet:
            self.perturb()
        faulty = sorted(r for r in self.ranks if rng.random() < 0.02) if rng.random() < 0.3 and not quiet else []
        for rank in faulty:
            group.fail_next_begin(rank, rng.randint(0, 2))
        self.step_number += 1
        group.begin(lambda cache: Message(requests=tuple(p.request(cache) for p in plans), aborts=aborts,
                                          weights_version=version, reset=reset))
        faulty = [r for r in faulty if "match" not in group.caches[r]._books.__dict__]
        for rank in self.ranks:
            group.heal(rank)
        group.check()
        self.between_and_end(faulty, quiet)

    def perturb(self) -> None:
        """What single ranks lose: failed copies, timing, another policy."""
        for rank in self.ranks:
            if self.rng.random() < 0.06:
                self.counts["lost"] += self.group.lose_cached_page(rank, self.rng)
            if self.rng.random() < 0.02:
                self.counts["lost while owned"] += self.group.lose_indexed_page(rank, self.rng)
            if self.asynchronous and self.rng.random() < 0.6:
                self.group.caches[rank].retired(self.step_number - self.rng.randint(0, 3))

    def between_and_end(self, faulty: list[int], quiet: bool) -> None:
        """Calls that all ranks make in one order, some of which reach some ranks before the end of the step."""
        rng, group = self.rng, self.group
        if not quiet and rng.random() < 0.03:  # a reset in flight comes at the same moment on all ranks
            self.counts["reset in flight"] += 1
            group.each(lambda cache: cache.reset())
        calls = [self.abort_call()] if self.known_ids() and rng.random() < 0.15 and not quiet else []
        calls += self.work_calls()
        splits = [rng.randint(0, len(calls)) for _ in self.ranks]
        for rank in self.ranks:
            for call in calls[: splits[rank]]:
                call(rank)
            if not quiet and rng.random() < 0.05:
                self.counts["lost in flight"] += group.lose_indexed_page(rank, rng)
        outcomes = group.end()
        for rank in self.ranks:
            if isinstance(outcome := outcomes[rank], StepResult):
                for sequence in outcome.ready:
                    self.bytes[rank].expect(sequence, self.size)
        for rank in self.ranks:
            for call in calls[splits[rank] :]:
                call(rank)
        group.check()
        self.check_outcomes(outcomes, faulty)
        group.check_agreed()
        self.grow()

    def check_outcomes(self, outcomes: list[StepResult | GroupError], faulty: list[int]) -> None:
        first = outcomes[0]
        if faulty:
            self.counts["peer failed"] += 1
            for outcome in outcomes:
                if not isinstance(outcome, PeerFailed) or outcome.failed_rank != faulty[0]:
                    raise Disagreement(f"ranks {faulty} failed, but a rank saw {outcome!r}")
            return
        for outcome in outcomes:
            if isinstance(outcome, GroupError):
                raise outcome
            assert isinstance(first, StepResult)
            if (outcome.leftover, outcome.collective) != (first.leftover, first.collective):
                raise Disagreement(f"{first} on rank 0, {outcome} elsewhere")
        assert isinstance(first, StepResult)
        self.counts["admitted"] += len(first.ready)
        self.counts["hits"] += sum(1 for s in first.ready if s.cached_tokens)
        self.counts["refused"] += len(first.refused)
        self.counts["skipped"] += not first.collective

    # ---- what the engine does

    def abort_call(self) -> Callable[[int], None]:
        request_id = self.rng.choice(self.known_ids())
        self.counts["abort"] += 1
        return lambda rank: self.group.caches[rank].abort(request_id)

    def work_calls(self) -> list[Callable[[int], None]]:
        """One piece of work for each running sequence, drawn once and done on every rank."""
        running = list(self.group.caches[0].running)
        return [partial(self.work, request_id=request_id, seed=self.rng.random()) for request_id in running]

    def work(self, rank: int, request_id: str, seed: float) -> None:
        """Prefill, decode, speculate or finish: a function of the sequence's agreed state and of ``seed``."""
        sequence = self.group.caches[rank].running.get(request_id)
        if sequence is None:
            return
        rng = random.Random(seed)
        before = sequence.committed
        limit = sequence.prompt_tokens + sequence.request.output_limit
        if before < sequence.prompt_tokens:
            n = min(rng.randint(1, 3 * self.size), sequence.prompt_tokens - before)
            sequence.open(n)
            if before + n == sequence.prompt_tokens:
                sequence.append([rng.randint(0, 2)])
            sequence.commit(n)
        elif before < limit and rng.random() < 0.85:
            drafted = min(rng.randint(0, 3), limit - before - 1)
            sequence.append([rng.randint(0, 2) for _ in range(drafted)])
            sequence.open(1 + drafted)
            accepted = rng.randint(0, drafted)
            sequence.commit(1 + accepted)
            sequence.truncate(drafted - accepted)
            sequence.append([rng.randint(0, 2)])
        else:
            sequence.finish()
            return
        self.bytes[rank].written(sequence, before - before % self.size, sequence.committed, self.size)

    def grow(self) -> None:
        """A sequence asks for more pages than it was promised: granted from the leftover on all ranks, or on none."""
        running = list(self.group.caches[0].running)
        if not running or self.rng.random() < 0.9:
            return
        leftover = self.group.caches[0].leftover
        request_id, pages = self.rng.choice(running), self.rng.randint(1, leftover + 2)
        granted = [self._grown(cache, request_id, pages) for cache in self.group.caches]
        if len(set(granted)) > 1:
            raise Disagreement(f"{pages} more pages were granted on some ranks only: {granted}")
        self.counts["grown" if granted[0] else "not grown"] += 1
        self.group.check()

    @staticmethod
    def _grown(cache: PrefixCache, request_id: str, pages: int) -> bool:
        try:
            cache.grow(cache.running[request_id], pages)
        except NoRoom:
            return False
        return True

    # ---- the whole

    def run(self) -> Counter[str]:
        for _ in range(self.steps):
            waiting = len(self.group.caches[0].waiting_ids)
            self.step(requests=self.rng.randint(0, 2) if waiting < 6 and self.rng.random() < 0.7 else 0)
        self.drain()
        return self.counts

    def drain(self) -> None:
        """Nothing more comes in: everything runs to its end, and nothing is left."""
        for _ in range(400):
            if not self.known_ids():
                break
            self.step(requests=0, quiet=True)
            self.group.each(lambda cache: cache.retired(self.step_number))
        else:
            raise Disagreement(f"requests {self.known_ids()} did not end")
        self.group.each(lambda cache: cache.retired(self.step_number))
        for cache in self.group.caches:
            cache.check()
            stats = cache.stats()
            if stats.pages_live or stats.pages_reserved or stats.pages_free + stats.pages_cached != stats.pages_usable:
                raise Disagreement(f"pages were left behind: {stats}")
            self.counts["evicted"] += stats.evicted
            self.counts["cascades"] += stats.cascades


def run_schedule(seed: int, steps: int = 60) -> Counter[str]:
    """Runs one schedule; returns what happened in it, by name."""
    return Schedule(seed, steps).run()
