"""A group of simulated ranks as a hypothesis state machine: what fails is shrunk to the calls that matter."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distkv import (
    CacheConfig,
    Config,
    Fingerprint,
    Message,
    NoRoom,
    PeerFailed,
    PoolConfig,
    PrefixCache,
    Request,
    StepResult,
)
from distkv.config import HostConfig
from distkv.testing.content import Content
from distkv.testing.copies import SimulatedCopies
from distkv.testing.group import SimulatedGroup

PROMPTS = st.sampled_from([(1,), (1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6, 7), (7,) * 9, (8,) * 9, (9,) * 5])
NUMBERS = st.integers(0, 5)


class GroupMachine(RuleBasedStateMachine):
    """Calls reach all ranks in one order; ``late`` ranks get those made in a step only after its end."""

    @initialize(pools=st.lists(st.integers(6, 9), min_size=1, max_size=3), slots=st.integers(1, 3),
                hosts=st.lists(st.sampled_from([20, 8, 3, 1, 0]), min_size=3, max_size=3), kept=st.integers(0, 4),
                index_on=st.sampled_from(["finish", "fill"]), write_policy=st.sampled_from(["evict", "finish"]),
                prefetch=st.booleans(), loading_slots=st.integers(1, 3))
    def start(self, pools: list[int], slots: int, hosts: list[int], kept: int, index_on: str, write_policy: str,
              prefetch: bool, loading_slots: int) -> None:
        cache = CacheConfig(page_size=2, queue_slots=slots, index_on=index_on, heartbeat=3)  # type: ignore[arg-type]
        configs = [Config(cache=cache, pool=PoolConfig(pages=pages), host=HostConfig(
            pages=host or None, preemption_pages=max(0, min(kept, host - 1)), write_policy=write_policy,  # type: ignore[arg-type]
            prefetch=prefetch, loading_slots=loading_slots)) for pages, host in zip(pools, hosts, strict=False)]
        self.contents = [Content(2, pool, host) for pool, host in zip(pools, hosts, strict=False)]
        self.engines = [SimulatedCopies(content, random.Random(0)) if host else None
                        for content, host in zip(self.contents, hosts, strict=False)]
        self.group = SimulatedGroup(configs, Fingerprint(model="m"), copies=self.engines, copy_pages=[
            lambda label, source, target, content=content: content.copied(source, target, 0)
            for content in self.contents])
        for rank_cache, engine in zip(self.group.caches, self.engines, strict=True):
            if engine is not None:
                engine.p_stall, engine.epoch = 0.0, partial(getattr, rank_cache._books, "epoch")
        self.requests: list[tuple[str, tuple[int, ...], int]] = []
        self.delayed: list[list[Callable[[int], None]]] = [[] for _ in pools]
        self.late: set[int] = set()
        self.frozen: set[str] = set()
        self.faulty: int | None = None
        self.in_flight = False
        self.next_id = 0
        for prompt in ((7,) * 9, (8,) * 9, (1, 2, 3, 4, 5, 6, 7)):  # the first of them goes to the host
            self.answer(prompt, 0)

    def call(self, function: Callable[[int], None]) -> None:
        for rank in range(self.group.size):
            if self.in_flight and rank in self.late:
                self.delayed[rank].append(function)
            else:
                function(rank)

    def one_of(self, number: int) -> str | None:
        """A sequence that can run, and could when the step began: its state does not depend on the end of it."""
        able = [i for i, s in self.group.caches[0].running.items()
                if not s.read_in_progress and not s.forking and i not in self.frozen]
        return able[number % len(able)] if able else None

    @precondition(lambda self: not self.in_flight)
    @rule(prompt=PROMPTS, limit=st.sampled_from([0, 2]))
    def answer(self, prompt: tuple[int, ...], limit: int) -> None:
        """A request that comes in, and is computed and finished at once if it gets in."""
        self.arrive(prompt, limit)
        self.begin(set(), None, reset=False)
        self.end()
        if str(self.next_id) in self.group.caches[0].running:
            at = len(self.group.caches[0].running) - 1
            self.run(at, 99, finish=False)
            self.run(at, 1, finish=True)

    @precondition(lambda self: not self.in_flight)
    @rule(prompt=PROMPTS, limit=st.sampled_from([0, 6]))
    def ask(self, prompt: tuple[int, ...], limit: int) -> None:
        """A request that comes in."""
        self.arrive(prompt, limit)
        self.begin(set(), None, reset=False)
        self.end()

    @precondition(lambda self: not self.in_flight)
    @rule()
    def copied(self) -> None:
        """All copies end well, and are heard of."""
        for cache, engine in zip(self.group.caches, self.engines, strict=True):
            if engine is not None:
                cache.wait_for_copies(0)
                engine.finish_all()
        self.begin(set(), None, reset=False)
        self.end()

    @rule(prompt=PROMPTS, limit=st.sampled_from([0, 1, 2, 6, 20]))
    def arrive(self, prompt: tuple[int, ...], limit: int) -> None:
        self.next_id += 1
        self.requests.append((str(self.next_id), prompt, limit))

    @precondition(lambda self: not self.in_flight)
    @rule(late=st.sets(st.integers(0, 3)), faulty=st.none() | st.none() | st.integers(0, 3),
          reset=st.sampled_from([False] * 9 + [True]))
    def begin(self, late: set[int], faulty: int | None, reset: bool) -> None:
        requests, self.requests, self.late = self.requests, [], late
        if faulty is not None and faulty < self.group.size:
            self.group.fail_next_begin(faulty)
        if reset:
            self.was_reset("all")
        self.group.begin(lambda cache: Message(reset=reset, requests=tuple(
            Request(id=i, chain=cache.chain(list(prompt)), output_limit=limit) for i, prompt, limit in requests)))
        planted = faulty is not None and faulty < self.group.size
        self.faulty = faulty if planted and "match" not in self.group.caches[faulty or 0]._books.__dict__ else None
        for rank in range(self.group.size):
            self.group.heal(rank)
        self.in_flight = True
        cache = self.group.caches[0]
        self.frozen = {*cache.waiting_ids, *(i for i, s in cache.running.items() if s.read_in_progress or s.forking)}

    @precondition(lambda self: self.in_flight)
    @rule()
    def end(self) -> None:
        outcomes = self.group.end()
        self.to_preempt = outcomes[0].to_preempt if isinstance(outcomes[0], StepResult) else ()
        for content, outcome in zip(self.contents, outcomes, strict=True):
            if isinstance(outcome, StepResult):
                for sequence in outcome.ready:
                    content.expect(sequence, outcome.step)
                for forked in outcome.forked:
                    content.forked(forked.parent, forked.children, 0)
        self.in_flight, self.frozen = False, set()
        for rank, calls in enumerate(self.delayed):
            for function in calls:
                function(rank)
            calls.clear()
        for outcome in outcomes:
            if self.faulty is not None:
                assert isinstance(outcome, PeerFailed)
                assert outcome.failed_rank == self.faulty
            else:
                assert isinstance(outcome, StepResult), outcome
        self.group.check_agreed()

    @rule(number=NUMBERS)
    def abort(self, number: int) -> None:
        cache = self.group.caches[0]
        known = [*cache.waiting_ids, *cache.running, *cache.suspended, *cache.kept, "unknown"]
        name = known[number % len(known)]
        self.call(lambda rank: self.group.caches[rank].abort(name))

    @rule(number=NUMBERS, tokens=st.sampled_from([1, 3, 9]), finish=st.booleans())
    def run(self, number: int, tokens: int, finish: bool) -> None:
        name = self.one_of(number)

        def work(rank: int) -> None:
            sequence = self.group.caches[rank].running.get(name or "")
            if sequence is None:
                return
            room = sequence.prompt_tokens + sequence.request.output_limit - sequence.committed
            if finish or not room:
                sequence.finish()
                return
            n = min(tokens, room)
            sequence.append([3] * max(0, sequence.committed + n - sequence.named))
            sequence.open(n)
            self.group.caches[rank].fence()
            self.contents[rank].launched(sequence, n, 0)
            sequence.commit(n)

        self.call(work)

    @rule(number=NUMBERS)
    def suspend(self, number: int) -> None:
        name = self.one_of(number)

        def work(rank: int) -> None:
            sequence = self.group.caches[rank].running.get(name or "")
            if sequence is not None:
                sequence.suspend()

        self.call(work)

    @rule(number=NUMBERS)
    def keep(self, number: int) -> None:
        name = self.one_of(number)

        def work(rank: int) -> None:
            cache = self.group.caches[rank]
            sequence = cache.running.get(name or "")
            if sequence is not None and sequence.epoch == cache._books.epoch:
                sequence.keep()

        self.call(work)

    @precondition(lambda self: not self.in_flight)
    @rule(number=NUMBERS, children=st.integers(1, 3), wait=st.booleans())
    def fork(self, number: int, children: int, wait: bool) -> None:
        cache = self.group.caches[0]
        parents = [i for i, s in (*cache.running.items(), *cache.kept.items())
                   if s.committed and not s.forking and not s.read_in_progress]
        if not parents:
            return
        name = parents[number % len(parents)]

        def forked(rank: int) -> tuple[str, ...] | None:
            cache = self.group.caches[rank]
            parent = cache.running.get(name) or cache.kept[name]
            try:
                made = parent.fork(children, wait=wait)
            except NoRoom:
                return None
            self.contents[rank].forked(parent, made, 0)
            return tuple(child.id for child in made)

        assert len({forked(rank) for rank in range(self.group.size)}) == 1

    @rule(number=NUMBERS, limit=st.none() | st.integers(0, 4))
    def resume(self, number: int, limit: int | None) -> None:
        known = [*self.group.caches[0].suspended, "unknown"]
        name = known[number % len(known)]
        self.call(lambda rank: self.group.caches[rank].resume(name, output_limit=limit))

    @precondition(lambda self: not self.in_flight)
    @rule(number=NUMBERS, pages=st.integers(1, 6))
    def grow(self, number: int, pages: int) -> None:
        name = self.one_of(number)

        def grown(cache: PrefixCache) -> bool | None:
            try:
                return cache.grow(cache.running[name], pages, wait=True) if name else None
            except NoRoom:
                return None

        assert len(set(self.group.each(grown))) == 1

    @precondition(lambda self: not self.in_flight)
    @rule(scope=st.sampled_from(["all", "device", "host"]), running=st.sampled_from(["finish", "abort"]))
    def reset(self, scope: str, running: str) -> None:
        self.was_reset(scope)
        self.group.each(lambda cache: cache.reset(scope, running))  # type: ignore[arg-type]

    def was_reset(self, scope: str) -> None:
        for content in self.contents if scope != "device" else ():
            content.host_resets += 1

    @rule(rank=st.integers(0, 3), p_end=st.sampled_from([0.4, 1.0]), p_fail=st.sampled_from([0.0, 1.0]),
          overdue=st.booleans(), randoms=st.randoms(use_true_random=False))
    def copy(self, rank: int, p_end: float, p_fail: float, overdue: bool, randoms: random.Random) -> None:
        engine = self.engines[rank] if rank < self.group.size else None
        if engine is not None:
            engine.tick(randoms, p_end, p_fail)
            if overdue and engine.running:
                engine.expire(engine.running[0])

    @rule(rank=st.integers(0, 3), randoms=st.randoms(use_true_random=False))
    def lose(self, rank: int, randoms: random.Random) -> None:
        if rank < self.group.size:
            self.group.lose_indexed_page(rank, randoms)

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "group"):
            self.group.check()

    def teardown(self) -> None:
        if not hasattr(self, "group"):
            return
        if self.in_flight:
            self.end()
        caches = self.group.caches
        for _ in range(200):
            if not (caches[0].waiting_ids or caches[0].running or caches[0].suspended or caches[0].kept):
                break
            for name in list(caches[0].kept):
                self.group.each(lambda cache, name=name: cache.abort(name))  # type: ignore[misc]
            for _ in list(caches[0].suspended):
                self.resume(0, None)
            for _ in list(caches[0].running):
                self.run(0, 1, finish=True)
            for cache, engine in zip(caches, self.engines, strict=True):
                cache.wait_for_copies(0)
                if engine is not None:
                    engine.finish_all()
            self.faulty = None
            self.group.begin(lambda cache: Message())
            self.end()
            for name in self.to_preempt:  # two parents that wait for their forks would wait for ever
                self.group.each(lambda cache, name=name: cache.running[name].suspend())  # type: ignore[misc]
        for cache, engine in zip(caches, self.engines, strict=True):
            cache.wait_for_copies(0)
            if engine is not None:
                engine.finish_all()
            cache._books.poll()
            stats = cache.stats()
            assert not cache.waiting_ids
            assert stats.pages_live == stats.pages_reserved == stats.copies_in_flight == stats.host_kept == 0
            assert stats.host_free + stats.host_ready == stats.host_pages


GroupMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestGroupMachine = GroupMachine.TestCase
