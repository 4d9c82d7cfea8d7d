"""Owner counts, holds and the free list; the eviction order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distkv import InvariantError, NoRoom
from distkv.pages import PagePool
from distkv.policy import LeastRecent
from tests.core.helpers import EXAMPLES


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def test_scratch_pages_are_never_handed_out() -> None:
    pool = PagePool(10, scratch=3)
    assert pool.usable == pool.free == 7
    taken = pool.take(7)
    assert sorted(taken.tolist()) == list(range(3, 10))
    with pytest.raises(NoRoom) as caught:
        pool.take(1)
    assert caught.value.pages_short == 1
    pool.check()


def test_take_is_all_or_nothing() -> None:
    pool = PagePool(4)
    pool.take(2)
    with pytest.raises(NoRoom) as caught:
        pool.take(5)
    assert caught.value.pages_short == 3
    assert (pool.free, pool.live) == (2, 2)
    pool.check()


def test_what_is_not_owned_cannot_be_released() -> None:
    """D5: raise, never clamp; and nothing changes."""
    pool = PagePool(4)
    pages = pool.take(2)
    pool.disown(pages[:1])
    for wrong in (pages, ids(3), pages[:1]):
        with pytest.raises(InvariantError):
            pool.disown(wrong)
        with pytest.raises(InvariantError):
            pool.unhold(wrong)
    assert (pool.live, pool.free) == (1, 3)
    pool.check()


def test_a_page_is_free_only_when_nobody_has_it() -> None:
    pool = PagePool(2)
    page = pool.take(1)
    pool.own(page)
    pool.hold(page)
    pool.enter(page)
    for release in (pool.disown, pool.leave, pool.disown):
        release(page)
        assert pool.free == 1
        pool.check()
    assert pool.live == 0
    pool.unhold(page)
    assert pool.free == 2
    pool.check()


def test_check_finds_what_is_wrong() -> None:
    for spoil in ("owners", "holds", "indexed", "live", "free"):
        pool = PagePool(4, scratch=1)
        pool.take(1)
        pool.check()
        if spoil == "live":
            pool.live += 1
        elif spoil == "free":
            pool._top -= 1
        else:
            getattr(pool, spoil)[3] = 1
        with pytest.raises(InvariantError):
            pool.check()
    pool = PagePool(4, scratch=1)
    pool.owners[0] = 1
    pool.live = 1
    with pytest.raises(InvariantError):
        pool.check()


@settings(max_examples=100 * EXAMPLES, deadline=None, derandomize=EXAMPLES == 1)
@given(st.data())
def test_against_sets(data: st.DataObject) -> None:
    n, scratch = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 2))
    pool = PagePool(n + scratch, scratch)
    owners = dict.fromkeys(range(scratch, n + scratch), 0)
    holds = dict(owners)
    indexed: set[int] = set()

    def some(of: list[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(of), unique=True)) if of else []

    for _ in range(data.draw(st.integers(1, 15))):
        call = data.draw(st.sampled_from(["take", "own", "disown", "hold", "unhold", "enter", "leave"]))
        used = [p for p in owners if owners[p] or holds[p] or p in indexed]
        if call == "take":
            k = data.draw(st.integers(0, n - len(used)))
            taken = pool.take(k).tolist()
            assert len(set(taken)) == k
            assert not set(taken) & set(used)
            owners.update(dict.fromkeys(taken, 1))
        elif call in ("own", "disown"):
            pages = some(used if call == "own" else [p for p in used if owners[p]])
            getattr(pool, call)(ids(*pages))
            for p in pages:
                owners[p] += 1 if call == "own" else -1
        elif call in ("hold", "unhold"):
            pages = some(used if call == "hold" else [p for p in used if holds[p]])
            getattr(pool, call)(ids(*pages))
            for p in pages:
                holds[p] += 1 if call == "hold" else -1
        else:
            pages = some([p for p in used if owners[p] and p not in indexed] if call == "enter" else sorted(indexed))
            getattr(pool, call)(ids(*pages))
            indexed = indexed | set(pages) if call == "enter" else indexed - set(pages)
        free = [p for p in owners if not owners[p] and not holds[p] and p not in indexed]
        assert sorted(pool.free_ids().tolist()) == free
        assert pool.live == sum(1 for p in owners if owners[p])
        every = ids(*owners)
        assert pool.is_cold(every).tolist() == [not owners[p] and not holds[p] for p in owners]
        expected = next((i for i, p in enumerate(owners) if not owners[p]), len(owners))
        assert pool.leading_live(every) == expected
        pool.check()


@settings(max_examples=100 * EXAMPLES, deadline=None, derandomize=EXAMPLES == 1)
@given(st.lists(st.tuples(st.sampled_from(["offer", "touch", "pop"]), st.integers(0, 5)), max_size=40))
def test_the_least_recent_is_offered_first(calls: list[tuple[str, int]]) -> None:
    recency = LeastRecent(6)
    stamps, offered = [0] * 6, set()
    for call, page in calls:
        if call == "offer":
            recency.offer(page)
            offered.add(page)
        elif call == "touch":
            stamps[page] = recency.tick()
            recency.touch(ids(page))
        else:
            expected = min(offered, key=lambda p: (stamps[p], p), default=None)
            bound = recency.next_stamp()
            assert (bound is None) == (expected is None)
            if bound is not None and expected is not None:
                assert bound <= stamps[expected]
            assert recency.pop() == expected
            offered.discard(expected)
        assert recency.offered() == offered
        recency.check()
    recency.forget()
    assert recency.pop() is None
    recency.check()
