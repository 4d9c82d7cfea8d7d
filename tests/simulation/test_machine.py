"""A group of simulated ranks as a hypothesis state machine: what fails is shrunk to the calls that matter."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distkv import CacheConfig, Config, Fingerprint, Message, PeerFailed, PoolConfig, PrefixCache, Request, StepResult
from distkv.testing.group import SimulatedGroup

PROMPTS = st.sampled_from([(1,), (1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6, 7), (7,) * 9, (8,) * 9, (9,) * 5])


class GroupMachine(RuleBasedStateMachine):
    """Calls reach all ranks in one order; ``late`` ranks get those made in a step only after its end."""

    @initialize(pools=st.lists(st.integers(4, 12), min_size=1, max_size=4), slots=st.integers(1, 3),
                index_on=st.sampled_from(["finish", "fill"]))
    def start(self, pools: list[int], slots: int, index_on: str) -> None:
        cache = CacheConfig(page_size=2, queue_slots=slots, index_on=index_on, heartbeat=3)
        self.group = SimulatedGroup(
            [Config(cache=cache, pool=PoolConfig(pages=pages)) for pages in pools], Fingerprint(model="m")
        )
        self.requests: list[tuple[str, tuple[int, ...], int]] = []
        self.delayed: list[list[Callable[[PrefixCache], None]]] = [[] for _ in pools]
        self.late: set[int] = set()
        self.faulty: int | None = None
        self.in_flight = False
        self.next_id = 0

    def call(self, function: Callable[[PrefixCache], None]) -> None:
        for rank, cache in enumerate(self.group.caches):
            if self.in_flight and rank in self.late:
                self.delayed[rank].append(function)
            else:
                function(cache)

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
        self.group.begin(lambda cache: Message(reset=reset, requests=tuple(
            Request(id=i, chain=cache.chain(list(prompt)), output_limit=limit) for i, prompt, limit in requests)))
        planted = faulty is not None and faulty < self.group.size
        self.faulty = faulty if planted and "match" not in self.group.caches[faulty or 0]._books.__dict__ else None
        for rank in range(self.group.size):
            self.group.heal(rank)
        self.in_flight = True

    @precondition(lambda self: self.in_flight)
    @rule()
    def end(self) -> None:
        outcomes = self.group.end()
        self.in_flight = False
        for cache, calls in zip(self.group.caches, self.delayed, strict=True):
            for function in calls:
                function(cache)
            calls.clear()
        for outcome in outcomes:
            if self.faulty is not None:
                assert isinstance(outcome, PeerFailed)
                assert outcome.failed_rank == self.faulty
            else:
                assert isinstance(outcome, StepResult), outcome
        self.group.check_agreed()

    @rule(number=st.integers(1, 12))
    def abort(self, number: int) -> None:
        self.call(lambda cache: cache.abort(str(number)))

    @rule(number=st.integers(1, 12), tokens=st.sampled_from([1, 3, 9]), finish=st.booleans())
    def run(self, number: int, tokens: int, finish: bool) -> None:
        def work(cache: PrefixCache) -> None:
            sequence = cache.running.get(str(number))
            if sequence is None or str(number) in started:
                return
            room = sequence.prompt_tokens + sequence.request.output_limit - sequence.committed
            if finish or not room:
                sequence.finish()
                return
            n = min(tokens, room)
            sequence.append([3] * max(0, sequence.committed + n - sequence.named))
            sequence.open(n)
            sequence.commit(n)

        # A sequence that some ranks admit at the end of this step cannot be asked to run before it.
        started = set() if not self.in_flight else {i for c in self.group.caches for i in c.waiting_ids}
        self.call(work)

    @rule(rank=st.integers(0, 3), randoms=st.randoms(use_true_random=False))
    def lose(self, rank: int, randoms: object) -> None:
        if rank < self.group.size:
            self.group.lose_indexed_page(rank, randoms)  # type: ignore[arg-type]

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "group"):
            self.group.check()

    def teardown(self) -> None:
        if not hasattr(self, "group"):
            return
        if self.in_flight:
            self.end()
        for _ in range(200):
            if not self.group.caches[0].waiting_ids and not self.group.caches[0].running:
                break
            for request_id in list(self.group.caches[0].running):
                self.call(lambda cache, i=request_id: cache.running[i].finish())  # type: ignore[misc]
            self.faulty = None
            self.group.begin(lambda cache: Message())
            self.end()
        for cache in self.group.caches:
            stats = cache.stats()
            assert not cache.waiting_ids
            assert stats.pages_live == stats.pages_reserved == 0


GroupMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestGroupMachine = GroupMachine.TestCase
