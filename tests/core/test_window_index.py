"""Window pages that hang on main's entries: random stores, evictions, loads, losses, against a plain dictionary."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest

from distkv.errors import InvariantError
from distkv.grid import DEVICE, HOST, MISSING, Grid
from distkv.host.copies import Copy
from distkv.host.pages import HostPages
from distkv.host.scripted import ScriptedCopies
from distkv.host.tier import HostTier
from distkv.index import PrefixIndex
from distkv.pages import PagePool
from distkv.window_index import NOWHERE, WindowIndex
from distkv.windows import SlidingLedger, window_pages
from tests.core.helpers import solo


def made(pages: int = 8, hosts: int = 0) -> WindowIndex:
    pool = PagePool(pages)
    engine = ScriptedCopies(read=lambda copy: None, write=lambda copy, data: None)
    tier = HostTier(HostPages(hosts), engine, pool) if hosts else None
    return WindowIndex(pool, PrefixIndex(PagePool(100), 2), tier)


def with_hosts() -> tuple[WindowIndex, HostTier, ScriptedCopies]:
    """An index with two host pages, its tier, and the script of its copies."""
    index = made(hosts=2)
    assert index.tier is not None
    assert isinstance(index.tier.engine, ScriptedCopies)
    return index, index.tier, index.tier.engine


def stored(index: WindowIndex, keys: Iterable[int]) -> list[int]:
    """These keys have window pages that nobody else has."""
    keys = list(keys)
    pages = index.pool.take(len(keys))
    index.attach(keys, pages)
    index.pool.disown(pages)
    index.offer(pages)
    index.check()
    return pages.tolist()


def test_first_writer_wins_and_the_second_stays_its_owners() -> None:
    index = made()
    first = stored(index, [1, 2])
    again = index.pool.take(2)
    index.attach([1, 2], again)
    assert index.places([1, 2, 3]).tolist() == [*first, NOWHERE]
    assert not index.pool.indexed[again].any()
    index.pool.disown(again)
    index.check()
    assert index.pool.free == 6


def test_the_front_of_a_window_is_evicted_first() -> None:
    index = made()
    stored(index, [1, 2, 3])
    stored(index, [7, 8])
    index.touch(index.places([1, 2, 3]).tolist())
    gone = []
    for _ in range(5):
        before = {key for key in (1, 2, 3, 7, 8) if index.places([key])[0] != NOWHERE}
        assert index.evict(1) == 1
        index.check()
        gone += [key for key in before if index.places([key])[0] == NOWHERE]
    assert gone == [7, 8, 1, 2, 3]
    assert index.evict(1) == 0
    assert index.pool.free == 8


def test_what_is_owned_or_held_is_not_evicted() -> None:
    index = made()
    one, two, three = stored(index, [1, 2, 3])
    index.pool.own(np.array([one]))
    index.pool.hold(np.array([two]))
    assert index.evict(9) == 1
    assert index.places([1, 2, 3]).tolist() == [one, two, NOWHERE]
    index.left([1, 2])  # their owners keep them
    assert index.pool.free == 6
    assert not index.pool.indexed[[one, two, three]].any()
    index.pool.unhold(np.array([two]))
    index.pool.disown(np.array([one]))
    index.check()
    assert index.pool.free == 8


def test_a_host_page_is_given_up_for_a_newer_one() -> None:
    index = made(hosts=2)
    tier = index.tier
    assert tier is not None
    stored(index, [1, 2, 3])
    assert index.evict(2) == 2
    assert index.places([1, 2, 3]).min() >= 0
    tier.poll()
    engine = tier.engine
    assert isinstance(engine, ScriptedCopies)
    engine.finish_all()
    tier.poll()
    assert index.evict(1) == 1
    assert index.places([1]).tolist() == [NOWHERE]
    assert (index.places([2, 3]) >= index.base).all()
    assert tier.given_up == 1
    index.check()
    index.left([2, 3])
    tier.flush()
    engine.finish_all()
    tier.poll()
    assert tier.pages.free == 2
    index.check()


def test_what_a_load_brings_enters_once() -> None:
    index, tier, engine = with_hosts()
    stored(index, [1])
    index.evict(1)
    tier.poll()
    engine.finish_all()
    tier.poll()
    host = int(index.places([1])[0]) - index.base
    copies: list[Copy] = [tier.load(host, int(page)) for page in index.pool.take(2)]
    tier.poll()
    engine.finish_all()
    tier.poll()
    assert [index.loaded(copy) for copy in copies] == [True, False]
    assert index.places([1]).tolist() == [copies[0].device]
    assert tier.pages.free == 2
    index.check()
    index.clear()
    assert not len(index)
    index.check()


def test_a_store_that_fails_takes_its_entry() -> None:
    index, tier, engine = with_hosts()
    stored(index, [1])
    index.evict(1)
    tier.flush()
    engine.doom(engine.running[0])
    engine.finish_all()
    tier.poll()
    assert index.places([1]).tolist() == [NOWHERE]
    assert tier.pages.free == 2
    index.check()


@pytest.mark.parametrize("seed", range(12))
def test_random_calls(seed: int) -> None:
    rng = random.Random(seed)
    index = made(10, hosts=rng.choice([0, 3, 8]))
    engine = index.tier.engine if index.tier is not None else None
    owned: list[int] = []
    for _ in range(150):
        what = rng.random()
        if what < 0.35 and index.pool.free:
            n = rng.randint(1, min(3, index.pool.free))
            pages, first = index.pool.take(n), rng.randint(0, 20)
            index.attach(list(range(first, first + n)), pages)
            owned += pages.tolist()
        elif what < 0.6 and owned:
            page = np.array([owned.pop(rng.randrange(len(owned)))])
            index.pool.disown(page)
            index.offer(page)
        elif what < 0.75:
            free = index.pool.free
            evicted = index.evict(rng.randint(1, 3))
            assert index.pool.free == free + evicted
        elif what < 0.85:
            index.left([rng.randint(0, 23) for _ in range(2)])
        elif what < 0.9 and len(index):
            index.drop(rng.choice(sorted(index.key_of)))
        elif what < 0.92:
            rng.choice([index.clear, index.forget_device, index.forget_host])()
        elif index.tier is not None:
            index.tier.poll()
            assert isinstance(engine, ScriptedCopies)
            engine.tick(rng, 0.5, 0.2)
            index.tier.poll()
        index.check()
        index.pool.check()
        if index.tier is not None:
            index.tier.check(())
    assert index.stored > 20


def test_the_checks_see_what_is_wrong() -> None:
    index = made()
    page, = stored(index, [1])
    index.key_of[page] = 2
    with pytest.raises(InvariantError, match="keys and places disagree"):
        index.check()
    index.key_of[page] = 1
    index.pool.leave_one(page)
    with pytest.raises(InvariantError, match="knows of indexed pages"):
        index.check()
    index = made()
    stored(index, [1])
    index.recency.pop()
    with pytest.raises(InvariantError, match="not offered for eviction"):
        index.check()


# ---- grid and window


def test_the_grid_is_fine_enough_and_nests() -> None:
    for slots in (1, 2, 3, 64):
        boundaries: dict[int, set[int]] = {}
        for limit in range(200):
            grid = Grid(limit, slots)
            found = [grid.boundary(number) for number in grid.below(limit)]
            assert len(found) == grid.count <= slots
            assert found == sorted(range(grid.step, limit + 1, grid.step), reverse=True)
            assert grid.step == 1 or grid.step // 2 * slots < limit
            boundaries[grid.step] = boundaries.get(grid.step, set()) | set(found)
        steps = sorted(boundaries)
        assert all(coarse % fine == 0 for fine, coarse in pairwise(steps))


def test_the_longest_boundary_within_what_the_full_labels_have() -> None:
    grid = Grid(8, 4)
    assert grid.longest([DEVICE, HOST, MISSING, DEVICE], 8) == (8, DEVICE)
    assert grid.longest([DEVICE, HOST, MISSING, DEVICE], 7) == (4, HOST)
    assert grid.longest([DEVICE, HOST, MISSING, DEVICE], 3) == (2, DEVICE)
    assert grid.longest([MISSING] * 4, 8) == (0, DEVICE)
    assert grid.longest([DEVICE] * 4, 0) == (0, DEVICE)


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_what_a_window_needs_and_keeps(size: int) -> None:
    """Against counting tokens one by one."""
    main = solo()._books
    for window in (1, 2, 3, 5, 16, 33):
        for allowance in (0, 1, 7):
            for chunk in (1, 4):
                ledger = SlidingLedger(PagePool(4), size, label="w", window=window, allowance=allowance, chunk=chunk)
                ledger.follow(main)
                for tokens in range(60):
                    seen = max(0, tokens - window + 1)
                    if tokens % size == 0:
                        assert ledger.first_needed(tokens // size) == seen // size
                    kept = ledger.first_kept(tokens)
                    assert kept == max(0, seen - allowance) // size or kept <= seen // size
                    assert -(-(tokens + chunk) // size) - kept <= ledger.most
                    for back in range(allowance + 1):  # every boundary that far in front of the end is still there
                        if (tokens - back) % size == 0 and tokens >= back:
                            assert kept <= ledger.first_needed((tokens - back) // size)
                assert ledger.most <= window_pages(window + allowance + chunk, size)
