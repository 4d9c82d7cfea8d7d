"""Groups in lockstep: no messages but a digest now and then, and what becomes of a rank that departs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from distkv import (
    CacheConfig,
    Config,
    GroupDivergence,
    GroupMismatch,
    Message,
    PeerFault,
    PoolConfig,
    PrefixCache,
    StepResult,
)
from distkv.testing.group import InjectedFault, SimulatedGroup
from tests.core.helpers import FINGERPRINT, config, prefill, request, solo
from tests.core.test_agreement import CALLS, LONG, admitted, start, step, store

EVERY = 5


def group_of(n: int = 3, pages: int = 16, check_every: int = EVERY, **cache: Any) -> SimulatedGroup:
    return SimulatedGroup([config(pages, agreement="lockstep", check_every=check_every, **cache)] * n, FINGERPRINT)


def until_noticed(group: SimulatedGroup) -> list[Any]:
    """Empty steps until one does not give a result, which has to be at most ``EVERY``."""
    for _ in range(EVERY):
        outcomes = step(group)
        if not all(isinstance(outcome, StepResult) for outcome in outcomes):
            return outcomes
    pytest.fail(f"nothing was noticed in {EVERY} steps")


def test_a_group_in_lockstep_sends_a_digest_now_and_then_and_nothing_else() -> None:
    group, other = group_of(), SimulatedGroup([config(16)] * 3, FINGERPRINT)
    collectives = []
    for i in range(30):
        prompt = [i % 7] * (3 + i % 5)
        decided = []
        for each in (group, other):
            results = admitted(each, (str(i), prompt, 1))
            decided.append([(r.ready[0].cached_tokens, r.leftover) for r in results])
            each.each(lambda cache, i=i: prefill(cache.running[str(i)]).finish())  # type: ignore[misc]
            if each is group:
                collectives.append(results[0].collective)
        assert decided[0] == decided[1], "and decides what the minimum would"
    assert [step for step, sent in enumerate(collectives, 1) if sent] == list(range(EVERY, 31, EVERY))
    stats = group.caches[0].stats()
    assert (stats.steps, stats.collectives) == (30, 6)
    assert stats.cached_tokens > 0
    assert stats.evicted > 0
    assert group.members[0]._minima == 6  # so many were entered


def test_what_waits_and_what_is_refused_is_decided_alike_without_a_word() -> None:
    group = group_of(pages=8, check_every=64)
    for outcome in step(group, requests=[("a", LONG[:17]), ("b", LONG[:10]), ("c", [1] * 8), ("d", [1])]):
        assert isinstance(outcome, StepResult)
        assert [r.request_id for r in outcome.refused] == ["a"]
        assert [s.id for s in outcome.ready] == ["b"]
        assert [(w.request_id, w.why, w.pages_short) for w in outcome.waiting] == [
            ("c", "no room", 1), ("d", "behind it", 0)]
        assert (outcome.leftover, outcome.collective) == (3, False)
    group.each(lambda cache: cache.grow(cache.running["b"], 2))
    assert [cache.leftover for cache in group.caches] == [1] * 3
    group.check_agreed()


# ---- start


@pytest.mark.parametrize(("pools", "field", "values"), [
    ([(16, 0), (17, 0), (16, 0)], "pool.pages", ["16", "17", "16"]),
    ([(16, 1), (16, 1), (16, 0)], "pool.scratch_pages", ["1", "1", "0"]),
])
def test_pools_have_to_be_equal(pools: list[tuple[int, int]], field: str, values: list[str]) -> None:
    """Also if as many pages are usable: page ids decide between pages that were hit at one time."""
    cache = CacheConfig(page_size=2, agreement="lockstep")
    for error in start([Config(cache=cache, pool=PoolConfig(pages=n, scratch_pages=k)) for n, k in pools]):
        assert isinstance(error, GroupMismatch)
        assert error.values == {f"{field} (equal in lockstep)": values}


def test_all_ranks_have_to_be_in_lockstep() -> None:
    for error in start([config(), config(agreement="lockstep"), config(check_every=9)]):
        assert isinstance(error, GroupMismatch)
        assert {"cache.agreement", "cache.check_every"} <= set(error.values)


# ---- departures


DEPARTURES: dict[str, Callable[[PrefixCache], object]] = {
    "a cached page that is lost": lambda c: c._books.index.drop(int(c._books.match(c.chain(LONG[:8]), 4).pages[3])),
    "a page that was hit": lambda c: c._books.used(c._books.match(c.chain(LONG[:8]), 2).pages),
    "an eviction": lambda c: c._books.index.evict(1),
    "another order of the free pages": lambda c: c._books.pool.disown(c._books.pool.take(2)),
    "a page that leaks": lambda c: c._books.pool.take(1),
}


@pytest.mark.parametrize("departure", DEPARTURES)
@pytest.mark.parametrize("after", [0, 3])
def test_a_rank_whose_state_departs_is_noticed_within_check_every_steps(departure: str, after: int) -> None:
    cache = CacheConfig(page_size=2, agreement="lockstep", check_every=EVERY)
    group = SimulatedGroup([Config(cache=cache, pool=PoolConfig(pages=16))] * 3, FINGERPRINT)
    store(group, "1", LONG[:8])
    for _ in range(after):
        step(group)
    DEPARTURES[departure](group.caches[1])
    for _ in range(EVERY):
        group.begin(lambda cache: Message())
        outcomes = group.end()
        if not isinstance(outcomes[0], StepResult):
            break
    assert [type(outcome) for outcome in outcomes] == [GroupDivergence] * 3
    for each, outcome in zip(group.caches, outcomes, strict=True):
        with pytest.raises(GroupDivergence, match=r"; state \[[0-9a-f]{4}\]") as caught:
            each.step()
        assert caught.value is outcome


def test_a_lost_page_that_a_request_would_have_matched_is_noticed_although_the_page_is_there_again() -> None:
    """Rank 1 computes the page once more; by the next digest all ranks have the same pages of the same prefixes."""
    group = group_of(check_every=4)
    store(group, "1", LONG[:3])  # step 1: one page
    step(group)
    group.lose_cached_page(1, random.Random(0))
    found = step(group, requests=[("2", LONG[:3])])
    assert [r.ready[0].cached_tokens for r in found] == [2, 0, 2]  # type: ignore[union-attr]
    group.each(lambda cache: prefill(cache.running["2"]).finish())
    assert [len(cache._books.index) for cache in group.caches] == [1, 1, 1]
    assert [type(outcome) for outcome in step(group)] == [GroupDivergence] * 3


@pytest.mark.parametrize("call", [call for call in CALLS if call != "abort of what waits"])
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_call_that_one_rank_does_not_make_is_noticed(call: str, in_flight: bool) -> None:
    if in_flight and call.startswith("grow"):
        return
    group = group_of(pages=24)
    admitted(group, ("r", LONG[:6], 10), ("d", [7] * 3, 9))
    group.each(lambda cache: [prefill(s) for s in cache.running.values()])
    group.each(lambda cache: (cache.running["d"].append([7]), cache.running["d"].open(1)))
    right, wrong = CALLS[call]
    if in_flight:
        group.begin(lambda cache: Message())
    for rank, cache in enumerate(group.caches):
        (wrong if rank == 2 else right)(cache)
    if in_flight:
        group.end()
    assert [type(outcome) for outcome in until_noticed(group)] == [GroupDivergence] * 3


@pytest.mark.parametrize("retires", [False, True])
def test_calls_on_different_sides_of_the_end_of_a_step_are_noticed(retires: bool) -> None:
    """In the minimum mode an abort and a retirement may come at any time on each rank; here they may not."""
    group = group_of(asynchronous=True)
    admitted(group, ("1", LONG[:5]))
    if retires:
        group.each(lambda cache: cache.abort("1"))

    def call(cache: PrefixCache) -> None:
        if retires:
            cache.retired(1)
        else:
            cache.abort("1")

    group.begin(lambda cache: Message())
    call(group.caches[0])
    group.end()
    call(group.caches[1])
    call(group.caches[2])
    assert [type(outcome) for outcome in until_noticed(group)] == [GroupDivergence] * 3


# ---- faults


@pytest.mark.parametrize("before", range(EVERY))
def test_a_lookup_that_fails_on_one_rank_ends_the_group(before: int) -> None:
    """The others hear of it by the group's fault, or at a digest that happens to be due by that."""
    group = group_of()
    store(group, "1", LONG[:8])
    for _ in range(before):
        step(group)
    group.fail_next_begin(1)
    at = group.caches[0].steps + 1
    group.begin(lambda cache: Message(requests=(request(cache, "2", LONG[:9]),)))
    with pytest.raises(InjectedFault):
        group.caches[1].end_step()
    for rank in (0, 2):
        with pytest.raises(PeerFault, match="rank 1 failed") as caught:
            group.caches[rank].end_step()
        assert (caught.value.failed_rank, caught.value.step, caught.value.rank) == (1, at, rank)
        with pytest.raises(PeerFault):
            group.caches[rank].step()
    with pytest.raises(PeerFault):
        group.caches[1].step()
    for cache in group.caches:
        assert cache.stats().pages_held == 0
        cache.close()
        cache.check()
        assert cache.stats().pages_live == 0


def test_a_lookup_that_fails_on_a_rank_alone() -> None:
    cache = solo(agreement="lockstep")
    cache._books.match = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        cache.step(Message(requests=(request(cache, "1", LONG[:5]),)))
    del cache._books.match  # type: ignore[method-assign]
    assert [s.id for s in cache.step().ready] == ["1"], "nobody else's state is to be kept equal"
    cache.check()
