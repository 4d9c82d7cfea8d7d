"""What random schedules have found, in as few calls as show it. The bytes are modelled: see tests.simulation.stage."""

from __future__ import annotations

import threading

import pytest
import torch

from distkv import (
    HostMemoryError,
    InvariantError,
    Message,
    PagedKV,
    PeerFailed,
    PrefixCache,
    RequestError,
    SequenceError,
    SoloGroup,
)
from distkv.host import opening
from distkv.host.opening import open_on_all
from distkv.start import Start
from tests.core import test_tiers
from tests.core.helpers import FINGERPRINT, prefill, request
from tests.core.test_read_in import Group
from tests.simulation.stage import A, B, Stage, tail_on_host


def test_growth_granted_by_a_step_commutes_with_the_calls_in_flight() -> None:
    stage = Stage([8, 8], [0, 0])
    stage.step(("a", [1], 7), ("b", [2], 7))
    assert stage.group.each(lambda cache: cache.grow(cache.running["a"], 2, wait=True)) == [False, False]
    stage.group.each(lambda cache: cache.abort("b"))
    stage.begin()
    stage.computes("a", 2, ranks=(0,))
    outcomes = stage.group.end()
    assert [[s.id for s in outcome.grown] for outcome in outcomes] == [["a"], ["a"]]  # type: ignore[union-attr]
    stage.computes("a", 2, ranks=(1,))
    assert not stage.step(("c", [3], 1)).waiting  # the digests are equal


@pytest.mark.parametrize("lookups", [0, 1, 2])
def test_the_group_goes_on_after_a_lookup_that_failed_while_prefetching(lookups: int) -> None:
    stage = tail_on_host(8, 8, B, prefetch=True)
    stage.step(("z", [9], 12))
    for asked in (("a", A[:7], 1), ("b", B, 1)):
        assert stage.step(asked).waiting[0].request_id == "a"
    stage.group.fail_next_begin(0, lookups)
    stage.begin()
    assert [type(outcome) for outcome in stage.group.end()] == [PeerFailed, PeerFailed]
    assert [w.request_id for w in stage.step().waiting] == ["a", "b"]


def test_prefetched_pages_may_arrive_in_any_order() -> None:
    """A page that arrived ahead of the one above it was given back, to be loaded again."""
    group = Group(pages=(16,), hosts=(16,), host={"prefetch": True})
    (cache,), (copies,) = group.caches, group.copies
    group.serve("1", test_tiers.A)
    cache._books.index.evict(16)
    group.settle()
    group.step(("big", [7] * 19))
    group.step(("huge", [8] * 20), ("next", test_tiers.A))
    group.step()
    loads = group.loads(0)
    assert len(loads) == 4
    for load in reversed(loads):
        copies.finish(load)
    group.step()
    assert cache.stats().pages_cached == 4


def test_nobody_hears_of_copies_while_a_ballot_counts_on_them() -> None:
    """A load would read what a store that has failed meanwhile was to write."""
    tiers = test_tiers.Tiers()
    tiers.serve("1", test_tiers.A)
    tiers.cache._books.index.evict(4)
    tiers.cache._books.tier.flush()  # type: ignore[union-attr]
    for store in tiers.copies.running:
        tiers.copies.doom(store)
    tiers.cache.begin_step(Message(requests=(request(tiers.cache, "2", test_tiers.A),)))
    tiers.copies.finish_all()
    with pytest.raises(SequenceError, match="between two steps"):
        tiers.cache.settle()
    assert tiers.cache.end_step().loading
    assert not tiers.settle().ready, "it waits again"
    assert tiers.settle().ready[0].cached_tokens == 0


def suspended() -> test_tiers.Tiers:
    tiers = test_tiers.Tiers(pages=8, host={"preemption_pages": 4})
    prefill(tiers.ready("1", test_tiers.A, output_limit=6)).suspend()
    tiers.settle()
    return tiers


@pytest.mark.parametrize("limit", [-1, 1.5])
def test_a_request_that_is_not_resumed_stays_suspended(limit: int) -> None:
    tiers = suspended()
    with pytest.raises(RequestError, match="output_limit is"):
        tiers.cache.resume("1", output_limit=limit)
    assert (list(tiers.cache.suspended), tiers.cache.stats().host_kept) == (["1"], 4)
    tiers.cache.resume("1", output_limit=1)
    tiers.cache.step()
    assert tiers.settle().ready[0].cached_tokens == 8
    assert tiers.cache.stats().host_kept == 0


def test_a_cache_whose_books_are_broken_ends_its_copies() -> None:
    """An interrupt may have broken them."""
    tiers = suspended()
    tiers.cache._books.tier.pages.unkeep(tiers.cache._books.tier.kept["1"][0])  # type: ignore[union-attr]
    with pytest.raises(InvariantError, match="nobody kept it"):
        tiers.cache.close()
    assert tiers.copies._closed


class Breaking(SoloGroup):
    """What is exchanged last never comes."""

    def __init__(self, exchanges: int = 1) -> None:
        super().__init__()
        self.left = exchanges
        self.told = b""

    def exchange(self, data: bytes) -> list[bytes]:
        self.told = data
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return super().exchange(data)


def test_no_tier_is_left_if_the_others_are_not_heard_of() -> None:
    before = threading.enumerate()
    with pytest.raises(KeyboardInterrupt):
        PrefixCache(test_tiers.config(4, 8), FINGERPRINT, Breaking(), kv=PagedKV(torch.zeros(1, 2, 4, 2, 1, 8)))
    assert threading.enumerate() == before


def test_no_tier_is_left_if_its_books_find_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(pages: int, preemption: int) -> None:
        raise MemoryError

    monkeypatch.setattr(opening, "HostPages", none_left)
    before = threading.enumerate()
    with pytest.raises(HostMemoryError, match=r"books of 8 host pages; lower host\.pages"):
        PrefixCache(test_tiers.config(4, 8), FINGERPRINT, kv=PagedKV(torch.zeros(1, 2, 4, 2, 1, 8)))
    assert threading.enumerate() == before


@pytest.mark.parametrize("error", [MemoryError(), ValueError("so")])
def test_whatever_keeps_a_rank_from_its_tier_is_told(error: Exception) -> None:
    def fails() -> None:
        raise error

    group = Breaking()
    with pytest.raises(type(error)):
        open_on_all(group, Start(smallest_pools=(4,), host_pages=8, ranks_on_node=1, plan=("a tier",)), fails)
    assert group.told == (str(error) or "MemoryError").encode()
