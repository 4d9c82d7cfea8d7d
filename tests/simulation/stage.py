"""Directed cases: a small simulated group of which each call is written down, for what random schedules seldom come to.

Each case is quiet with all rules, and fails without the one that it is for.
"""

from __future__ import annotations

import random
from functools import partial

from distkv import CacheConfig, Config, Fingerprint, Message, PoolConfig, Request, StepResult
from distkv.config import HostConfig
from distkv.host.copies import Kind
from distkv.testing.content import Content
from distkv.testing.copies import SimulatedCopies
from distkv.testing.group import SimulatedGroup

A = [1, 2, 3, 4, 5, 6, 7, 8]
B = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32]


class Stage:
    """Ranks with ``pools`` device and ``hosts`` host pages of 2 tokens. Copies end when :meth:`copied` says so."""

    def __init__(self, pools: list[int], hosts: list[int], *, index_on: str = "finish",
                 prefetch: bool = False) -> None:
        cache = CacheConfig(page_size=2, queue_slots=4, index_on=index_on)  # type: ignore[arg-type]
        tiers = [HostConfig(pages=host or None, prefetch=prefetch) for host in hosts]
        configs = [Config(cache=cache, pool=PoolConfig(pages=pool), host=tier)
                   for pool, tier in zip(pools, tiers, strict=True)]
        self.contents = [Content(2, pool, host) for pool, host in zip(pools, hosts, strict=True)]
        self.engines = [SimulatedCopies(content, random.Random(0)) if host else None
                        for content, host in zip(self.contents, hosts, strict=True)]
        self.group = SimulatedGroup(configs, Fingerprint(model="m"), copies=self.engines)
        for cache_, engine in zip(self.group.caches, self.engines, strict=True):
            if engine is not None:
                engine.p_fail = engine.p_stall = 0.0
                engine.epoch = partial(getattr, cache_._books, "epoch")

    def begin(self, *requests: tuple[str, list[int], int]) -> None:
        """A step begins with new requests: id, prompt, output limit."""
        self.group.begin(lambda cache: Message(requests=tuple(
            Request(id=name, chain=cache.chain(prompt), output_limit=limit) for name, prompt, limit in requests)))

    def end(self) -> StepResult:
        """It ends; what is ready has the right bytes everywhere. Gives rank 0's result."""
        outcomes = self.group.end()
        for content, outcome in zip(self.contents, outcomes, strict=True):
            if not isinstance(outcome, StepResult):
                raise outcome
            for sequence in outcome.ready:
                content.expect(sequence, outcome.step)
        self.group.check()
        self.group.check_agreed()
        assert isinstance(outcomes[0], StepResult)
        return outcomes[0]

    def step(self, *requests: tuple[str, list[int], int]) -> StepResult:
        self.begin(*requests)
        return self.end()

    def computes(self, name: str, tokens: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        """The sequence of this name computes its next tokens, on every rank or on these."""
        for rank in ranks:
            cache, content = self.group.caches[rank], self.contents[rank]
            sequence = cache.running[name]
            sequence.append([3] * max(0, sequence.committed + tokens - sequence.named))
            sequence.open(tokens)
            cache.fence()
            content.launched(sequence, tokens, cache.steps)
            sequence.commit(tokens)

    def answers(self, name: str, prompt: list[int]) -> None:
        """A request comes in, is computed and finished at once."""
        ready = self.step((name, prompt, 0)).ready
        self.computes(name, len(prompt) - ready[0].cached_tokens)
        self.group.each(lambda cache: cache.running[name].finish())

    def copied(self) -> None:
        """All copies have ended, and the next step hears of it."""
        for cache, engine in zip(self.group.caches, self.engines, strict=True):
            if engine is not None:
                cache.wait_for_copies(0)
                engine.finish_all()


def tail_on_host(pool: int, host: int, more: list[int], *, prefetch: bool = False) -> Stage:
    """Of A's first 3 pages those are on the host, from the last one up, that ``more`` and its last token displace."""
    stage = Stage([pool] * 2, [host] * 2, prefetch=prefetch)
    stage.answers("x", A[:7])
    stage.answers("y", more)
    stage.copied()
    stage.step()
    return stage


def opened_behind_holds() -> None:
    """A request's loads need a page that the request behind it holds until the end of the step."""
    stage = tail_on_host(6, 8, B[:9])
    result = stage.step(("a", A[:7], 1), ("b", B[:9], 3))
    assert [s.id for s in result.loading] == ["a"]
    assert [w.request_id for w in result.waiting] == ["b"]


def given_up_in_flight() -> None:
    """While a ballot counts on the only host pages, a running sequence evicts and would have them."""
    stage = tail_on_host(8, 2, B)
    stage.step(("z", [9], 5))
    stage.begin(("a", A[:7], 1))
    stage.computes("z", 6)
    stage.copied()
    assert stage.end().loading
    stage.copied()
    assert [s.cached_tokens for s in stage.step().ready] == [6]


def read_twice() -> None:
    """Loads of an aborted request and of the next one read the only host pages; the first have ended when a running
    sequence would have these."""
    stage = tail_on_host(12, 2, list(range(40, 61)))
    stage.step(("z", [9], 5))
    assert len(stage.step(("a", A[:7], 1)).loading) == 1
    stage.group.each(lambda cache: cache.abort("a"))
    assert len(stage.step(("b", A[:7], 1)).loading) == 1
    for engine in stage.engines:
        assert engine is not None
        for copy in engine.running[:2]:
            engine.finish(copy)
    stage.begin()
    stage.computes("z", 6)
    for cache, engine in zip(stage.group.caches, stage.engines, strict=True):
        assert engine is not None
        cache.wait_for_copies(0)
        for copy in engine.running:
            if copy.kind is Kind.STORE:
                engine.finish(copy)
    stage.copied()
    assert [s.cached_tokens for s in (*stage.end().ready, *stage.step().ready)] == [6]


def reset_in_flight() -> None:
    """A reset of the host tier comes while a ballot counts on host pages."""
    stage = tail_on_host(8, 4, B)
    stage.begin(("a", A[:7], 1))
    for content in stage.contents:
        content.host_resets += 1
    stage.group.each(lambda cache: cache.reset("host"))
    result = stage.end()
    stage.copied()
    assert [s.cached_tokens for s in (*result.ready, *stage.step().ready)] == [0]


def device_reset_behind_loads() -> None:
    """The pool's pages are forgotten when loads have ended and the ranks have not agreed on that yet."""
    stage = tail_on_host(8, 4, list(range(20, 35)))  # which leaves nothing of A on the device
    assert stage.step(("a", A[:7], 1)).loading
    stage.copied()
    stage.begin()
    stage.group.each(lambda cache: cache.reset("device"))
    stage.end()
    for _ in range(3):
        stage.step()
        stage.copied()
    assert stage.group.caches[0].running["a"].cached_tokens == 6


def retaken_before_commit() -> None:
    """Between the end of a load and the commit that enters what it brought, its host page becomes another's."""
    stage = tail_on_host(8, 2, B)
    stage.step(("z", [9], 5))
    assert stage.step(("a", A[:7], 1)).loading
    stage.copied()
    stage.begin()
    stage.computes("z", 6)
    stage.copied()
    assert [s.cached_tokens for s in stage.end().ready] == [6]
    for name in "az":
        stage.group.each(lambda cache, name=name: cache.abort(name))  # type: ignore[misc]
    stage.step(("b", B, 1))
    stage.copied()
    stage.step()


def short_with_shared_pages() -> None:
    """A load ends short on one rank, and on the other one the pages are shared with a live sequence."""
    stage = Stage([10, 14], [0, 8], index_on="fill")
    small, large = stage.group.caches
    stage.answers("c", [*A, 9])
    small._books.index.evict(4)  # the smaller pool has lost them
    stage.step(("a", A, 0))
    stage.computes("a", 8)
    large._books.index.evict(4)  # and the larger one has spilled them
    stage.copied()
    assert [s.id for s in stage.step(("b", [*A, 9], 3)).loading] == ["b"]
    room = min(cache._books.room for cache in stage.group.caches)
    assert [s.id for s in stage.step(("d", [7] * (2 * room), 0)).ready] == ["d"]
    engine = stage.engines[1]
    assert engine is not None
    engine.doom(engine.running[0])
    stage.copied()
    result = stage.step()
    assert not result.ready
    assert stage.group.caches[0].waiting_ids == ("b",)
