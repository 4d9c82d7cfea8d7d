"""Forks that wait, prefixes that are kept, and groups whose ranks hear of the same at other times."""

from __future__ import annotations

from typing import Any

import pytest

from distkv import (
    Branch,
    CacheConfig,
    Config,
    DuplicateRequest,
    Fingerprint,
    GroupDivergence,
    Message,
    NoRoom,
    PeerFailed,
    PoolConfig,
    PrefixCache,
    Request,
    Sequence,
    SequenceError,
    StepResult,
)
from distkv.testing.group import SimulatedGroup
from tests.core.forking import Copies, cache_of, parent_of, writes
from tests.core.helpers import admit, prefill

# ---- kept prefixes


def test_a_kept_prefix_is_forked_until_it_is_let_go() -> None:
    copies: Copies = []
    cache = cache_of(copies=copies)
    parent = parent_of(cache, 6, 8)
    parent.keep()
    assert list(cache.kept) == ["p"]
    assert "p" not in cache.running
    cache.step()
    stats = cache.stats()
    assert (stats.pages_live, stats.pages_reserved, stats.entries) == (2, 0, 1)
    for call in (parent.keep, parent.finish, parent.suspend, lambda: parent.open(1), lambda: parent.append([1])):
        with pytest.raises(SequenceError, match="was kept"):
            call()
    assert [str(r.error) for r in cache.step(Message(requests=(
        Request(id="p", chain=cache.chain([1]), output_limit=0),))).refused] == [str(DuplicateRequest("p"))]
    answers = []
    for turn in range(3):
        (child,) = cache.kept["p"].fork((Branch(id=f"turn {turn}", suffix=[turn], output_limit=1),))
        prefill(child)
        answers.append(child.chain.tokens.tolist()[-1])
        child.finish()
        cache.check()
    assert answers == [0, 1, 2]
    assert len(copies) == 3, "the prefix is never written to"
    (child,) = parent.fork()
    cache.abort("p")
    assert not cache.kept
    with pytest.raises(SequenceError, match="was aborted"):
        parent.fork()
    writes(child, 3)
    assert len(copies) == 3
    child.finish()
    cache.check()
    assert cache.stats().pages_live == 0


@pytest.mark.parametrize("scope", ["all", "device", "host", "bump", "abort", "message"])
def test_resets_let_kept_prefixes_go(scope: str) -> None:
    cache = cache_of()
    parent_of(cache).keep()
    (child,) = cache.kept["p"].fork()
    if scope == "bump":
        cache.bump("2")
    elif scope == "abort":
        cache.reset("host", "abort")
    elif scope == "message":
        cache.step(Message(reset="device"))
    else:
        cache.reset(scope)  # type: ignore[arg-type]
    assert bool(cache.kept) == (scope == "host")
    assert bool(child.ended) == (scope == "abort")
    cache.check()


def test_what_is_of_before_a_reset_cannot_be_kept() -> None:
    cache = cache_of()
    parent = parent_of(cache)
    cache.bump("2")
    with pytest.raises(SequenceError, match="finish it"):
        parent.keep()
    (child,) = parent.fork()  # the same answer goes on
    writes(child, 1, 2)
    child.finish()
    parent.finish()
    assert cache.stats().entries == 0


@pytest.mark.parametrize("in_flight", [False, True])
def test_closing_lets_everything_go(in_flight: bool) -> None:
    cache = cache_of(8)
    parent_of(cache).keep()
    prefill(admit(cache, "o", [4] * 12))
    assert cache.kept["p"].fork(2, wait=True) == ()
    if in_flight:
        cache.begin_step()
    cache.close()
    assert cache.stats().pages_live == cache.stats().pages_reserved == 0


# ---- waiting


def waiting_fork(children: int = 1) -> tuple[PrefixCache, Sequence, Sequence]:
    """A parent that waits for its fork until another request ends."""
    cache = cache_of(8)
    parent = parent_of(cache, 6, 2)
    other = prefill(admit(cache, "o", [9] * 24))
    assert cache.leftover == 0
    assert parent.fork(children, wait=True) == ()
    return cache, parent, other


def test_a_fork_that_waits_is_served_ahead_of_requests() -> None:
    cache, parent, other = waiting_fork(3)
    result = cache.step(Message(requests=(Request(id="new", chain=cache.chain([1] * 8), output_limit=0),)))
    assert (result.forked, result.ready, result.to_preempt) == ((), (), ("o",))
    for call in (lambda: parent.open(1), lambda: parent.fork(1)):
        with pytest.raises(SequenceError, match="waits for"):
            call()
    with pytest.raises(DuplicateRequest):
        other.fork((Branch(id="p/2"),))
    other.suspend()
    result = cache.step()
    assert [(f.parent.id, [s.id for s in f.children]) for f in result.forked] == [("p", ["p/1", "p/2", "p/3"])]
    assert [s.id for s in result.ready] == ["new"]
    for sequence in (parent, *result.forked[0].children):
        writes(sequence, 1)
        cache.check()


@pytest.mark.parametrize("how", ["finish", "abort", "suspend"])
def test_a_fork_that_waits_goes_with_its_parent(how: str) -> None:
    cache, parent, other = waiting_fork()
    getattr(parent, how)()
    other.finish()
    result = cache.step()
    assert (result.forked, list(cache.running)) == ((), [])
    (again,) = cache.step(Message(requests=(Request(id="p/1", chain=cache.chain([1]), output_limit=0),))).ready
    again.finish()


def test_a_fork_that_waits_stays_with_a_kept_parent() -> None:
    cache, parent, other = waiting_fork()
    parent.keep()
    other.finish()
    ((forked),) = cache.step().forked
    assert [s.id for s in forked.children] == ["p/1"]
    cache.abort("p")
    writes(forked.children[0], 1)
    cache.check()


def test_what_can_never_fit_does_not_wait() -> None:
    cache = cache_of(8)
    parent = parent_of(cache, 8, 0)
    prefill(admit(cache, "o", [7] * 16))
    with pytest.raises(NoRoom, match="beyond the smallest pool"):
        parent.fork((Branch(id="a", output_limit=28),), wait=True)
    assert not cache.grow(parent, 5, wait=True)
    with pytest.raises(NoRoom, match="beyond the smallest pool"):
        parent.fork((Branch(id="a", output_limit=8),), wait=True)  # beside what the parent waits for
    assert parent.fork((Branch(id="a", output_limit=4),), wait=True) == ()


# ---- groups


def group_of(ranks: int = 2, pages: int = 8, **cache: Any) -> SimulatedGroup:
    settings = Config(cache=CacheConfig(page_size=4, **cache), pool=PoolConfig(pages=pages, check=True))
    return SimulatedGroup([settings] * ranks, Fingerprint(model="forks"),
                          copy_pages=[lambda label, source, target: None] * ranks)


def begin(group: SimulatedGroup, *requests: tuple[str, list[int], int]) -> None:
    group.begin(lambda cache: Message(requests=tuple(
        Request(id=name, chain=cache.chain(prompt), output_limit=limit) for name, prompt, limit in requests)))


def test_ranks_that_fork_differently_are_told_apart() -> None:
    for ways in ((1, 2), (1, (Branch(id="p/1", suffix=[3]),)), ((Branch(id="a"),), (Branch(id="b"),)),
                 ((Branch(id="a", output_limit=2),), (Branch(id="a", output_limit=1),)), (1, None)):
        group = group_of()
        begin(group, ("p", [0, 1, 2, 3, 4, 5], 4))
        group.end()
        for cache, branches in zip(group.caches, ways, strict=True):
            prefill(cache.running["p"])
            if branches is not None:
                cache.running["p"].fork(branches)  # type: ignore[arg-type]
        begin(group, ("n", [1], 0))
        assert all(isinstance(outcome, GroupDivergence) for outcome in group.end()), ways


@pytest.mark.parametrize("how", ["abort", "finish", "suspend", "keep"])
@pytest.mark.parametrize("fits", [True, False])
def test_a_parent_may_end_before_or_after_its_fork_is_made(how: str, fits: bool) -> None:
    """One rank's engine ends it while the ballot is in flight, the other one's behind the step."""
    group = group_of()
    begin(group, ("p", [0, 1, 2, 3, 4, 5], 2), ("o", [5] * 20, 4))
    group.end()
    for cache in group.caches:
        prefill(cache.running["p"])
        assert cache.running["p"].fork(wait=True) == ()
        if fits:
            cache.running["o"].abort()
    begin(group)
    early, late = (cache.running["p"] for cache in group.caches)
    getattr(early, how)()
    group.check()
    outcomes = group.end()
    getattr(late, how)()
    group.check()
    group.check_agreed()
    for outcome in outcomes:
        assert isinstance(outcome, StepResult)
        assert [s.id for forked in outcome.forked for s in forked.children] == (["p/1"] if fits else [])
    for cache in group.caches:
        if fits:
            writes(cache.running["p/1"], 1)
            cache.running["p/1"].finish()
        else:
            cache.running["o"].abort()
        cache.abort("p")
    begin(group)
    for outcome in group.end():
        assert isinstance(outcome, StepResult)
        assert not outcome.forked
    for cache in group.caches:
        assert cache.stats().pages_live == cache.stats().pages_reserved == 0


def test_a_parent_may_end_in_a_step_that_a_rank_cannot_vote_in() -> None:
    group = group_of()
    begin(group, ("p", [0, 1, 2, 3, 4, 5], 2), ("o", [5] * 20, 4))
    group.end()
    for cache in group.caches:
        prefill(cache.running["p"])
        assert cache.running["p"].fork(wait=True) == ()
    group.fail_next_begin(1)
    begin(group, ("n", [1], 0))
    group.caches[0].running["p"].finish()
    assert all(isinstance(outcome, PeerFailed) or rank for rank, outcome in enumerate(group.end()))
    group.caches[1].running["p"].finish()
    group.check()
    for cache in group.caches:
        cache.running["o"].finish()
    begin(group)
    for outcome in group.end():
        assert isinstance(outcome, StepResult)
        assert (outcome.forked, [s.id for s in outcome.ready]) == ((), ["n"])
    group.check_agreed()


@pytest.mark.parametrize("running", ["finish", "abort"])
def test_a_reset_in_flight_makes_no_fork_of_what_it_ended(running: str) -> None:
    group = group_of()
    begin(group, ("p", [0, 1, 2, 3, 4, 5], 2), ("o", [5] * 20, 4))
    group.end()
    for cache in group.caches:
        prefill(cache.running["p"])
        assert cache.running["p"].fork(wait=True) == ()
        cache.running["o"].abort()
    begin(group)
    group.each(lambda cache: cache.reset("all", running))  # type: ignore[arg-type]
    for outcome in group.end():
        assert isinstance(outcome, StepResult)
        assert not outcome.forked
    begin(group)
    for outcome in group.end():
        assert isinstance(outcome, StepResult)
        assert len(outcome.forked) == (running == "finish")
    group.check()
