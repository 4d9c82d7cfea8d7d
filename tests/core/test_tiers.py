"""Two tiers on one rank: what spills, what is found again, what is given up first. Copies end when the test says."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from distkv import (
    Adapter,
    Config,
    ConfigError,
    HostConfig,
    LocalGroup,
    Message,
    MessageError,
    PagedKV,
    PoolConfig,
    PrefixCache,
    Sequence,
    StepResult,
)
from distkv.errors import CopyFailed
from distkv.host.copies import Copy, Kind
from distkv.host.scripted import ScriptedCopies
from tests.core.helpers import FINGERPRINT, admit, prefill, request, serve
from tests.core.helpers import config as plain

A, B, C = ([base + i for i in range(9)] for base in (10, 20, 30))  # four full pages and a token each
OTHERS = [[base + i for i in range(5)] for base in range(100, 200, 10)]  # two full pages and a token each


def config(pages: int, hosts: int, host: dict[str, Any] | None = None, **cache: Any) -> Config:
    made = plain(pages, **cache)
    return Config(cache=made.cache, pool=PoolConfig(pages=pages, check=True),
                  host=HostConfig(**{"pages": hosts, "prefetch": False, **(host or {})}))


class Tiers:
    """A cache of one rank with a host tier, and the script of its copies."""

    def __init__(self, pages: int = 6, hosts: int = 8, **options: Any) -> None:
        self.copies = ScriptedCopies()
        self.cache = PrefixCache(config(pages, hosts, **options), FINGERPRINT, copies=self.copies)

    def serve(self, name: str, tokens: list[int], **options: Any) -> int:
        """One request to its end, all copies with it. How much of it was cached."""
        sequence = self.ready(name, tokens, **options)
        cached = sequence.cached_tokens
        self.cache.fence()
        prefill(sequence).finish()
        self.settle()
        return cached

    def ready(self, name: str, tokens: list[int], **options: Any) -> Sequence:
        cache = self.cache
        result = cache.step(Message(requests=(request(cache, name, tokens, **options),)))
        if not result.ready:
            assert [s.id for s in result.loading] == [name]
            result = self.settle()
        assert [s.id for s in result.ready] == [name]
        return result.ready[0]

    def settle(self, error: BaseException | None = None) -> StepResult:
        """All copies end, and the cache hears of it."""
        self.cache._books.tier.flush()  # type: ignore[union-attr]
        if error is not None:
            for copy in self.copies.running:
                self.copies.doom(copy, error)
        self.copies.finish_all()
        result = self.cache.step()
        self.cache.check()
        return result

    def matched(self, tokens: list[int], **names: Any) -> int:
        return self.cache.peek(self.cache.chain(tokens, **names))


def test_what_is_evicted_comes_back() -> None:
    tiers = Tiers()
    assert tiers.serve("1", A) == 0
    assert tiers.serve("2", B) == 0
    stats = tiers.cache.stats()
    assert (stats.evicted, stats.stores, stats.host_ready, stats.entries) == (3, 3, 3, 8), "exactly what was short"
    assert (tiers.matched(A), tiers.matched(B)) == (4, 4)
    assert tiers.serve("3", A) == 8
    stats = tiers.cache.stats()
    assert (stats.loads, stats.host_tokens, stats.cached_tokens) == (3, 6, 8)


def test_nothing_is_ready_before_its_bytes_are() -> None:
    tiers = Tiers()
    tiers.serve("1", A)
    tiers.serve("2", B)
    cache = tiers.cache
    result = cache.step(Message(requests=(request(cache, "3", A),)))
    (sequence,) = result.loading
    assert not result.ready and sequence.read_in_progress and cache.running["3"] is sequence
    assert sequence.record.agreed == 4 and sequence.record.host_tokens == 6
    for copy in tiers.copies.running:
        if copy.kind is Kind.STORE:
            tiers.copies.finish(copy)
    for copy in [copy for copy in tiers.copies.running if copy.kind is Kind.LOAD][:-1]:
        tiers.copies.finish(copy)
        assert not cache.step().ready
        cache.check()
    tiers.copies.finish_all()
    assert [s.id for s in cache.step().ready] == ["3"] and not sequence.read_in_progress
    prefill(sequence).finish()
    cache.check()


def test_backups_leave_without_a_copy() -> None:
    """What was read in has its bytes on the host still: giving it up again copies nothing."""
    tiers = Tiers(hosts=16)
    for name, tokens in (("1", A), ("2", B), ("3", A)):
        tiers.serve(name, tokens)
    before = tiers.cache.stats().stores
    tiers.serve("4", C)
    tiers.serve("5", B)
    stored = tiers.cache.stats().stores
    tiers.serve("6", A)
    assert tiers.cache.stats().stores - stored <= 4
    assert stored - before <= 5, "the first page of A, and C; A's other pages and B's had backups"
    assert {tiers.matched(tokens) for tokens in (A, B, C)} == {4}


def test_write_policy_finish() -> None:
    """Stored ahead; eviction then only takes note."""
    tiers = Tiers(host={"write_policy": "finish"})
    tiers.serve("1", A)
    assert tiers.cache.stats().stores == 4
    before = len(tiers.copies.submitted)
    sequence = tiers.ready("2", B)
    prefill(sequence)
    tiers.cache.fence()
    assert len(tiers.copies.submitted) == before, "three pages were evicted, none was copied for it"
    sequence.finish()
    assert tiers.cache.stats().stores == 8
    tiers.settle()
    assert (tiers.matched(A), tiers.matched(B)) == (4, 4)


@pytest.mark.parametrize("policy", ["evict", "finish"])
def test_the_tiers_add_up(policy: str) -> None:
    """What is on the device gives up its place on the host first: prompts that come round in turn, in as many pages as
    both tiers and the one that runs need, are never computed again. With less, in such an order, some are."""
    for hosts, given_up in ((17, False), (12, True)):
        tiers = Tiers(pages=6, hosts=hosts, host={"write_policy": policy})
        for turn in range(3):
            cached = [tiers.serve(f"{turn}.{i}", tokens) for i, tokens in enumerate(OTHERS)]
            assert turn == 0 or given_up or cached == [4] * len(OTHERS), "20 pages, in 6 + 17 less 3 that one takes"
        stats = tiers.cache.stats()
        assert (stats.host_evicted > 0, stats.dropped) == (given_up, 0)


def test_the_host_gives_up_its_coldest_tail() -> None:
    """G4, D7: one page at a time, leaves first, and every count within its tier."""
    tiers = Tiers(pages=4, hosts=4)
    for i, tokens in enumerate(OTHERS):
        tiers.serve(str(i), tokens)
        stats = tiers.cache.stats()
        assert stats.host_free + stats.host_ready + stats.host_storing + stats.host_loading == 4
        assert stats.pages_free + stats.pages_cached == 4
        assert stats.entries <= 8
    assert stats.dropped == 0 and stats.host_free == 0
    assert tiers.matched(OTHERS[-1]) == tiers.matched(OTHERS[-2]) == 2
    assert tiers.matched(OTHERS[0]) == 0


def test_a_tail_that_cannot_be_stored_is_dropped() -> None:
    """E6: the host is full of what may not go; the page leaves the index, and a lookup is shorter, nothing more."""
    tiers = Tiers(pages=6, hosts=2)
    tiers.serve("1", A)
    sequence = tiers.ready("2", B)  # takes 3 of A's pages: two are being stored, the last has no place
    prefill(sequence)
    stats = tiers.cache.stats()
    assert (stats.host_storing, stats.dropped, tiers.matched(A)) == (2, 1, 3)
    sequence.finish()
    extra = prefill(tiers.ready("3", C))
    assert tiers.cache.stats().dropped > 1, "stores that run are nobody's to give up"
    extra.abort()
    tiers.settle()
    tiers.serve("4", A)


def test_every_allocation_finds_what_can_be_evicted() -> None:
    """G1: free is 0 and everything is cached: prefill, growth and load targets evict; C8: with a full host, too."""
    tiers = Tiers(pages=4, hosts=2)
    for i in range(8):
        tiers.serve(str(i), OTHERS[i % 4])
    sequence = tiers.ready("grows", OTHERS[7][:2], output_limit=0)
    prefill(sequence)
    tiers.cache.step()
    tiers.cache.grow(sequence, 3)
    sequence.append([1] * 6)
    sequence.open(6)
    sequence.commit(6)
    assert len(sequence.page_indices) == 4
    sequence.finish()
    tiers.settle()


@pytest.mark.parametrize("ok", [True, False])
def test_a_store_ends(ok: bool) -> None:
    """What a failed store was to save leaves the index, descendants included; the rest stays."""
    tiers = Tiers()
    tiers.serve("1", A)
    prefill(tiers.ready("2", B)).finish()
    tiers.settle(None if ok else CopyFailed("disk on fire"))
    assert tiers.matched(A) == (4 if ok else 1)
    assert tiers.cache.stats().store_failures == (0 if ok else 3)
    assert tiers.cache.stats().host_ready == (3 if ok else 0)
    assert tiers.serve("3", A) == (8 if ok else 2)


def test_a_load_waits_for_the_store_of_its_page_and_falls_with_it() -> None:
    tiers = Tiers(pages=8)
    tiers.serve("1", A)
    prefill(tiers.ready("2", B)).finish()
    prefill(tiers.ready("3", C[:5])).finish()
    result = tiers.cache.step(Message(requests=(request(tiers.cache, "4", A),)))
    (sequence,) = result.loading
    loads = [copy for copy in tiers.copies.running if copy.kind is Kind.LOAD]
    assert loads and all(copy.source is not None for copy in loads), "nothing has ended yet"
    tiers.settle(CopyFailed("no"))
    result = tiers.cache.step()  # admitted again
    assert sequence.ended == "put back" and [s.id for s in result.ready] == ["4"]
    assert str(result.ready[0].record.reason) == "load failed"
    prefill(result.ready[0]).finish()
    tiers.settle()


def test_a_page_is_one_owners_and_unknown_until_it_is_read_in() -> None:
    """E7: what is being loaded is neither matched on the device nor spilled."""
    tiers = Tiers(pages=8)
    for name, tokens in (("1", A), ("2", B), ("3", C)):
        tiers.serve(name, tokens)
    cache = tiers.cache
    (sequence,) = cache.step(Message(requests=(request(cache, "4", A),))).loading
    pages = sequence.owned_pages.tolist()
    targets = [copy.device for copy in tiers.copies.running if copy.kind is Kind.LOAD]
    pool = cache._books.pool
    assert set(targets) <= set(pages)
    assert not pool.indexed[targets].any() and (pool.owners[targets] == 1).all()
    tiers.copies.finish_all()
    cache.step()
    assert pool.indexed[targets].all()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_abort_with_copies_under_way(order: tuple[int, ...]) -> None:
    """F2: a store and loads are pending on the pages of an aborted request; each page is free once, at its own end."""
    tiers = Tiers(pages=6)
    tiers.serve("1", A)
    tiers.serve("2", B)
    cache, copies = tiers.cache, tiers.copies
    cache.step(Message(requests=(request(cache, "3", A),)))
    cache.fence()
    loads = [copy for copy in copies.running if copy.kind is Kind.LOAD]
    stores = [copy for copy in copies.running if copy.kind is Kind.STORE]
    assert len(loads) == 3
    before = cache._books.pool.live
    cache.abort("3")
    cache.check()
    assert cache._books.pool.live == before - 1, "the one page that was there is free; three are being written"
    assert cache.stats().copies_in_flight == len(loads) + len(stores)
    for store in stores:
        copies.finish(store)
    for i in order:
        copies.finish(loads[i])
        cache.step()
        cache.check()
    stats = cache.stats()
    assert (stats.pages_live, stats.copies_in_flight, stats.host_loading) == (0, 0, 0)
    assert tiers.serve("4", A) == 8, "the host has them still"


def test_a_lookup_changes_nothing() -> None:
    """E10: five lookups before the request is served; what was stored has no hole."""
    tiers = Tiers(pages=6, hosts=16)
    tiers.serve("1", A)
    before = tiers.cache.stats()
    for _ in range(5):
        assert tiers.matched([*A, 1, 2, 3]) == 4
    assert tiers.cache.stats() == before
    tiers.serve("2", [*A, 1, 2])
    tiers.serve("3", B)
    assert tiers.matched([*A, 1, 2, 3]) == 5
    assert tiers.serve("4", [*A, 1, 2, 3]) == 10


def test_a_tier_knows_salts_and_adapters() -> None:
    """A7: one name in both tiers."""
    tiers = Tiers()
    tiers.serve("1", A, adapter=Adapter("x"))
    tiers.serve("2", B)
    tiers.serve("3", C)
    assert tiers.cache.stats().host_ready > 4
    assert tiers.matched(A) == tiers.matched(A, adapter=Adapter("y")) == tiers.matched(A, salt="x") == 0
    assert tiers.matched(A, adapter=Adapter("x")) == 4


def test_a_page_that_was_computed_again_is_on_the_device_again() -> None:
    """A request that may not read stores what it computed: entries on the host alone take its pages."""
    tiers = Tiers(pages=8)
    for name, tokens in (("1", A), ("2", B), ("3", C)):
        tiers.serve(name, tokens)
    books = tiers.cache._books
    before = books.match(tiers.cache.chain(A), 4)
    assert (len(before), books.on_device(before)) == (4, 0)
    assert tiers.serve("4", A, read=False) == 0
    after = books.match(tiers.cache.chain(A), 4)
    assert (len(after), books.on_device(after), tiers.cache.stats().loads) == (4, 4, 0)
    assert books.tiered is not None
    assert (books.tiered._backup[after.pages] == -1).all(), "bits of another batch are no copy of them"


def test_slow_loads_are_not_made() -> None:
    """P5: computing again takes 1 ms a page here, loading it 2 ms."""
    tiers = Tiers()
    tiers.serve("1", A)
    tiers.serve("2", B)
    tiers.copies.page_s = 2e-3
    assert tiers.matched(A) == 4
    tiers.cache.prefill_took(1000, 0.5)
    assert tiers.serve("3", A) == 2
    assert tiers.cache.stats().loads == 0
    tiers.cache.prefill_took(1000, 50.0)
    assert tiers.serve("4", B) == 8


def test_a_prefill_without_end_is_no_measurement() -> None:
    tiers = Tiers()
    for seconds in (math.inf, math.nan, 0.001):
        tiers.cache.prefill_took(1, seconds)
    assert tiers.cache._books.prefill_s_per_token == 0.001


def test_a_fence_that_was_interrupted_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever catches the interrupt and goes on calls it again, and the page that is stored must not be written yet."""
    tiers = Tiers()
    tiers.serve("1", A)
    tiers.ready("2", B).open(9)

    def interrupted(copies: list[Copy]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as ctrl_c:
        ctrl_c.setattr(tiers.copies, "_fence", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiers.cache.fence()
    assert tiers.copies.running
    tiers.cache.fence()
    assert not tiers.copies.running


def test_resets_tell_the_truth() -> None:
    """L2 and the like: what is freed, what is still held, what is in flight."""
    tiers = Tiers(pages=6)
    tiers.serve("1", A)
    tiers.serve("2", B)
    running = prefill(tiers.ready("3", OTHERS[0]))
    tiers.cache.fence()
    found = tiers.cache.reset()
    stats = tiers.cache.stats()
    assert (stats.entries, stats.pages_live, found.still_held) == (0, 3, 3)
    assert found.freed == 3 == stats.pages_free
    assert found.in_flight == stats.copies_in_flight == stats.host_storing > 0
    assert found.host_freed + found.in_flight + 2 > 3
    tiers.settle()
    assert tiers.cache.stats().host_free == 8
    running.finish()
    assert tiers.cache.stats().entries == 0, "it began before the reset"
    tiers.settle()
    assert tiers.cache.stats().pages_free == 6


def test_a_reset_of_one_tier() -> None:
    tiers = Tiers(pages=6)
    for name, tokens in (("1", A), ("2", B), ("3", A)):
        tiers.serve(name, tokens)
    on_device = tiers.cache._books.on_device
    assert (tiers.matched(A), tiers.matched(B)) == (4, 4)
    tiers.cache.reset("device", "abort")
    tiers.cache.check()
    match = tiers.cache._books.match(tiers.cache.chain(A), 4)
    assert on_device(match) == 0 and tiers.cache.stats().pages_free == 6
    kept = tiers.matched(A), tiers.matched(B)
    assert max(kept) == 0 or tiers.serve("4", A if kept[0] else B) > 0
    tiers.serve("5", C)
    before = tiers.cache.stats()
    found = tiers.cache.reset("host")
    tiers.cache.check()
    stats = tiers.cache.stats()
    assert stats.host_ready == 0 and found.host_freed == before.host_ready
    assert stats.entries == stats.pages_cached and tiers.matched(C) == 4
    tiers.cache.step(Message(reset="device"))
    assert tiers.cache.stats().pages_free == 6
    with pytest.raises(MessageError, match="True, False or one of all, device, host"):
        Message(reset="disk")  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="scope is all, device or host"):
        tiers.cache.reset("disk")  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="bump takes the version of the new weights, a str, not 2"):
        tiers.cache.bump(2)  # type: ignore[arg-type]


def test_a_bump_makes_both_tiers_unreachable_at_once() -> None:
    tiers = Tiers()
    tiers.serve("1", A)
    tiers.serve("2", B)
    loading = tiers.cache.step(Message(requests=(request(tiers.cache, "3", A),))).loading
    tiers.cache.bump("2")
    tiers.cache.check()
    assert loading[0].ended == "put back" and tiers.matched(A) == 0
    stats = tiers.cache.stats()
    loads = [copy for copy in tiers.copies.running if copy.kind is Kind.LOAD]
    assert stats.pages_live == stats.host_loading == len(loads) == 3, "copies under way keep their pages"
    assert not tiers.cache.step().ready, "and need the room"
    result = tiers.settle()
    assert [s.cached_tokens for s in result.ready] == [0], "the request runs without"
    prefill(result.ready[0]).finish()
    tiers.settle()
    assert tiers.matched(A) == 4


def test_a_tier_needs_memory() -> None:
    with pytest.raises(ConfigError, match="kv=PagedKV"):
        PrefixCache(config(6, 8), FINGERPRINT)
    with pytest.raises(MessageError, match="copies must be"):
        PrefixCache(config(6, 8), FINGERPRINT, copies=7)  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="kv must be"):
        PrefixCache(plain(), FINGERPRINT, kv=7)  # type: ignore[arg-type]


def test_memory_that_does_not_fit_is_told_to_all_ranks() -> None:
    """Nobody waits for a rank that cannot start."""
    members = LocalGroup.make(2, timeout_s=20)
    kv = PagedKV(torch.zeros(1, 2, 6, 4, 1, 2))

    def start(rank: int) -> str:
        made = config(6, 8, page_size=4)
        wrong = Config(cache=made.cache, pool=PoolConfig(pages=7), host=made.host)
        with pytest.raises(ConfigError) as caught:
            PrefixCache(made if rank else wrong, FINGERPRINT, members[rank], kv=kv)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(start, range(2)))
    assert texts[0] == texts[1]
    assert "pool.pages: is 7, but the engine's tensors have 6 pages (seen on rank 0" in texts[0]


def test_the_end_of_a_cache_ends_its_copies() -> None:
    tiers = Tiers()
    tiers.serve("1", A)
    prefill(tiers.ready("2", B))
    tiers.cache.step()
    running: list[Copy] = tiers.copies.running
    assert running
    tiers.cache.close()
    assert not tiers.copies.running
    assert serve(admit_free(), "1", A).cached_tokens == 0


def admit_free() -> PrefixCache:
    """Another cache, which has nothing to do with the closed one."""
    cache = PrefixCache(plain(), FINGERPRINT)
    prefill(admit(cache, "0", B)).finish()
    return cache
