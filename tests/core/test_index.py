"""What is stored, found and evicted: the reported failures of such caches, one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from distkv import Adapter, InvariantError, Message, PrefixCache, Reason, Span
from distkv.books import Books
from distkv.chain import Namer
from distkv.pages import PagePool
from tests.core.helpers import FINGERPRINT, admit, prefill, request, serve, solo
from tests.core.naive import contents

LONG = list(range(100, 140))


def state(cache: PrefixCache) -> object:
    """Everything that a lookup must not change."""
    pool, index = cache._books.pool, cache._books.index
    return (cache.stats(), pool.owners.tolist(), pool.holds.tolist(), pool.free_ids().tolist(), contents(index),
            index.recency.clock, sorted(index.recency.offered()), len(index.runs()), cache._books.digest)


def test_lookups_change_nothing() -> None:
    """E10, and rule 12: neither statistics, nor recency, nor storage; also when keys collide."""
    for hash64 in (None, lambda data, seed: 7):
        cache = solo(hash64=hash64)
        serve(cache, "1", LONG[:7])
        chains = [cache.chain(t) for t in (LONG[:7], [*LONG[:5], 1, 2, 3], [5] * 4, LONG, [], [1])]
        before = state(cache)
        for _ in range(5):
            found = [cache.peek(chain) for chain in chains]
        assert state(cache) == before
        assert found == ([3, 2, 0, 3, 0, 0] if hash64 is None else [1, 1, 0, 1, 0, 0])
        serve(cache, "2", LONG[:9])
        assert cache.peek(cache.chain(LONG)) == (4 if hash64 is None else 1)


def test_a_whole_prompt_is_never_cached_entirely() -> None:
    """F5: a prompt of exactly k pages, three times: one token is left to compute, in a page of its own."""
    cache = solo(pages=8)
    prompt = LONG[:6]
    first = serve(cache, "1", prompt)
    shared = contents(cache._books.index)
    for i in "23":
        sequence = admit(cache, i, prompt)
        assert (sequence.cached_tokens, sequence.record.reason) == (4, Reason.WHOLE)
        own = sequence.open(2) // 2
        assert set(own.tolist()).isdisjoint(page for page, _ in shared.values()), "a shared page is never written to"
        sequence.commit(2)
        sequence.finish()
        cache.check()
    assert {p: page for p, (page, _) in contents(cache._books.index).items()} == {p: n for p, (n, _) in shared.items()}
    assert serve(cache, "4", [*prompt, 1]).cached_tokens == 6, "all three pages match below a longer prompt"
    assert first.cached_tokens == 0


@pytest.mark.parametrize("index_on", ["finish", "fill"])
def test_identical_prompts_in_one_step(index_on: str) -> None:
    """F6: what is not committed is not found. F6 again: with ``fill`` a third one shares while the first still runs."""
    cache = solo(index_on=index_on)
    result = cache.step(Message(requests=tuple(request(cache, i, LONG[:5]) for i in "12")))
    one, two = result.ready
    assert (one.cached_tokens, two.cached_tokens) == (0, 0)
    one.open(5)
    assert cache.peek(cache.chain(LONG)) == 0
    one.commit(3)
    assert cache.peek(cache.chain(LONG)) == (1 if index_on == "fill" else 0)
    prefill(two)
    one.commit(2)
    assert cache.peek(cache.chain(LONG)) == (2 if index_on == "fill" else 0)
    pages = set(one.page_indices.tolist()) | set(two.page_indices.tolist())
    assert len(pages) == 6
    two.finish()
    one.finish()
    cache.check()
    stats = cache.stats()
    assert (stats.entries, stats.pages_free, stats.pages_live) == (2, 14, 0), "the duplicates are free again"


def test_first_writer_wins() -> None:
    cache = solo()
    one, two = admit(cache, "1", LONG[:5]), admit(cache, "2", LONG[:7])
    pages = prefill(two).page_indices[:2].tolist()
    prefill(one)
    two.finish()
    one.finish()
    cache.check()
    assert admit(cache, "3", LONG[:5]).page_indices.tolist() == pages


def test_a_producer_that_aborts_leaves_nothing() -> None:
    cache = solo()
    sequence = admit(cache, "1", LONG[:6], output_limit=4)
    sequence.open(6)
    sequence.commit(4)
    sequence.abort()
    cache.check()
    stats = cache.stats()
    assert (stats.entries, stats.pages_free, cache.peek(cache.chain(LONG))) == (0, 16, 0)


def test_drafted_tokens_never_reach_the_index() -> None:
    """F7: 20 opened, 17 accepted, page of 16: one page; the page behind is named by the final tokens."""
    cache = solo(page_size=16)
    sequence = admit(cache, "1", LONG[:2], output_limit=40)
    prefill(sequence)
    sequence.append(range(18))
    sequence.open(18)
    sequence.commit(15)
    assert cache.stats().entries == 0
    sequence.truncate(3)
    assert (sequence.seq_len, sequence.committed, sequence.named) == (17, 17, 17)
    final = list(range(50, 65))
    sequence.append(final)
    sequence.open(15)
    sequence.commit(15)
    sequence.finish()
    cache.check()
    wanted = LONG[:2] + list(range(15)) + final
    assert cache.peek(cache.chain([*wanted, 1])) == 2
    assert cache.peek(cache.chain([*LONG[:2], *range(18), *range(30)])) == 1
    assert sequence.chain.tokens.tolist() == wanted


def test_read_and_write_flags_do_just_that() -> None:
    """P4 and A12: a request that must not read computes everything; one that must not write leaves nothing."""
    cache = solo()
    assert serve(cache, "1", LONG[:5], write=False).cached_tokens == 0
    assert cache.stats().entries == 0
    serve(cache, "2", LONG[:5])
    unread = serve(cache, "3", LONG[:7], read=False)
    assert (unread.cached_tokens, unread.record.reason) == (0, Reason.NOT_READ)
    assert cache.stats().entries == 3, "it may write all the same"
    assert serve(cache, "4", LONG[:7], write=False).cached_tokens == 6
    assert cache.stats().entries == 3


def test_ten_thousand_requests_through_sixty_four_pages() -> None:
    """D1 and D9: it never refuses, nothing leaks, the index never outgrows the pool, and every entry is reachable."""
    cache = PrefixCacheWithoutChecks(64, 2)
    rng = random.Random(5)
    for i in range(10_000):
        prompt = [rng.randint(0, 3)] * rng.randint(1, 9) + [rng.randint(0, 50) for _ in range(rng.randint(1, 9))]
        prefill(admit(cache, "r", prompt)).finish()
        stats_live = cache._books.pool.live
        assert stats_live == 0
        assert len(cache._books.index) <= 64
        assert cache._books.pool.free + len(cache._books.index) == 64
        if i % 500 == 0:
            cache.check()
    cache.check()
    assert cache.stats().evicted > 10_000


def PrefixCacheWithoutChecks(pages: int, page_size: int) -> PrefixCache:  # noqa: N802
    from distkv import CacheConfig, Config, Fingerprint, PoolConfig

    return PrefixCache(Config(cache=CacheConfig(page_size=page_size), pool=PoolConfig(pages=pages)),
                       Fingerprint(model="tests"))


def test_states_are_disjoint_and_the_cache_filling_up_is_no_leak() -> None:
    """D6 and D8."""
    cache = solo(pages=12, scratch=2)
    for i in range(20):
        serve(cache, "r", [i, i, i, i, i])
        stats = cache.stats()
        assert (stats.pages_live, stats.pages_held, stats.pages_reserved) == (0, 0, 0)
        assert stats.pages_free + stats.pages_cached == stats.pages_usable == 10
        assert stats.pages_cached == min(2 * (i + 1), 9)
    two = [admit(cache, i, [19, 19, 19, 19, i == "b"]) for i in "ab"]
    assert [s.cached_tokens for s in two] == [4, 4]
    stats = cache.stats()
    assert (stats.pages_live, stats.pages_free + stats.pages_cached) == (2, 8), "two owners, two pages"


def test_eviction_takes_exactly_what_is_short() -> None:
    cache = solo(pages=8)
    serve(cache, "1", LONG[:8])
    serve(cache, "2", [1, 1, 2, 2, 3, 3])
    assert cache.stats().pages_free == 1
    sequence = admit(cache, "3", [9, 9, 9])
    sequence.open(1)
    assert cache.stats().evicted == 0, "a free page is taken first"
    sequence.open(2)
    assert (cache.stats().evicted, cache.stats().pages_free) == (1, 0)
    assert cache.peek(cache.chain([*LONG[:8], 0])) == 3, "the end of the coldest chain"
    assert cache.peek(cache.chain([1, 1, 2, 2, 3, 3, 0])) == 3


def test_a_hit_saves_a_chain() -> None:
    cache = solo(pages=8)
    serve(cache, "1", LONG[:6])
    serve(cache, "2", [1, 1, 2, 2, 3, 3])
    serve(cache, "3", LONG[:7])
    sequence = admit(cache, "4", [9] * 6)
    sequence.open(6)
    assert cache.peek(cache.chain([*LONG[:6], 0])) == 3
    assert cache.peek(cache.chain([1, 1, 2, 2, 3, 3, 0])) == 2


def test_a_lookup_is_no_hit() -> None:
    cache = solo(pages=6)
    serve(cache, "1", LONG[:6])
    serve(cache, "2", [1, 1, 2, 2, 3, 3])
    cache.peek(cache.chain(LONG))
    admit(cache, "4", [9] * 2).open(2)
    assert cache.peek(cache.chain([*LONG[:6], 0])) == 2


def test_the_last_matched_page_survives_the_eviction_of_everything() -> None:
    """D3."""
    cache = solo(pages=8)
    serve(cache, "1", LONG[:7])
    sequence = admit(cache, "2", LONG[:7])
    assert sequence.cached_tokens == 6
    serve(cache, "3", [1] * 8)
    assert cache._books.index.evict(100) > 0
    cache.check()
    assert cache.peek(cache.chain(LONG[:7])) == 3
    prefill(sequence).finish()
    cache.check()


def test_a_request_never_evicts_its_own_prefix() -> None:
    """G6: a pool of 4, a cached prefix of 3 that the request needs, and 2 new ones: it can never run."""
    cache = solo(pages=4)
    serve(cache, "1", LONG[:6])
    result = cache.step(Message(requests=(request(cache, "2", LONG[:6], 4),)))
    assert [r.request_id for r in result.refused] == ["2"]
    sequence = admit(cache, "3", LONG[:7], 1)
    assert (sequence.cached_tokens, cache.stats().pages_free) == (6, 1)
    prefill(sequence)
    assert cache.stats().evicted == 0
    sequence.finish()
    blocker = admit(cache, "4", [1], 1)
    result = cache.step(Message(requests=(request(cache, "5", LONG[:7], 1),)))
    assert [(w.request_id, w.why, w.pages_short) for w in result.waiting] == [("5", "no room", 1)]
    assert cache.stats().pages_held == 0
    blocker.abort()
    assert [s.cached_tokens for s in cache.step().ready] == [6]
    cache.check()


def test_a_live_child_below_a_cold_parent() -> None:
    """A duplicate's child hangs below the first writer's pages: these can go, and the child stays its owner's."""
    cache = solo(pages=8, index_on="fill")
    one, two = cache.step(Message(requests=(request(cache, "1", LONG[:4]), request(cache, "2", LONG[:6], 2)))).ready
    prefill(one)
    prefill(two)
    one.finish()
    cache.check()
    assert (cache.stats().entries, cache.stats().pages_live) == (3, 3)
    greedy = admit(cache, "3", [9] * 5, 3)
    greedy.open(8)
    cache.check()
    stats = cache.stats()
    assert (stats.cascades, stats.evicted, stats.pages_free) == (1, 1, 0)
    assert (cache.peek(cache.chain([*LONG[:6], 0])), stats.entries) == (1, 1), "the descendants left the index with it"
    two.append([7])
    two.open(1)
    two.commit(1)
    greedy.abort()
    two.finish()
    cache.check()
    assert cache.peek(cache.chain([*LONG[:6], 0])) == 3, "and its owner stores it again at its end"


def test_an_adapter_generation_and_a_salt_see_their_own() -> None:
    cache = solo(pages=64)
    roots = [{}, {"salt": "x"}, {"adapter": Adapter("x")}, {"adapter": Adapter("x", 1)},
             {"adapter": Adapter("x"), "salt": "x"}]
    for i, root in enumerate(roots):
        assert serve(cache, str(i), LONG[:5], **root).cached_tokens == 0
    for i, root in enumerate(roots):
        assert serve(cache, f"again {i}", LONG[:5], **root).cached_tokens == 4
    cache.reset()
    assert cache.stats().entries == 0
    assert serve(cache, "after", LONG[:5], salt="x").cached_tokens == 0


def test_media_of_other_digests_share_up_to_their_first_page() -> None:
    cache = solo(pages=64)
    one, two = [Span(3, 4, b"1" * 16)], [Span(3, 4, b"2" * 16)]
    serve(cache, "1", LONG[:9], spans=one)
    assert serve(cache, "2", LONG[:9], spans=one).cached_tokens == 8
    found = serve(cache, "3", LONG[:9], spans=two)
    assert (found.cached_tokens, found.record.reason) == (2, Reason.MEDIA)
    assert serve(cache, "4", LONG[:9], spans=two).cached_tokens == 8
    assert serve(cache, "5", LONG[:9]).cached_tokens == 2
    assert serve(cache, "6", LONG[:9], spans=one).cached_tokens == 8


def test_evicting_the_root_of_media_and_storing_it_again() -> None:
    cache = solo(pages=6)
    spans = [Span(0, 3, b"1" * 16)]
    for i in range(4):
        serve(cache, f"{i}", LONG[:6], spans=spans)
        serve(cache, f"x{i}", [i] * 12)
        assert cache.peek(cache.chain(LONG[:6], spans=spans)) == 0
    cache.check()


def test_check_finds_a_spoiled_index() -> None:
    for spoil in range(6):
        cache = solo()
        serve(cache, "1", LONG[:7])
        serve(cache, "2", [*LONG[:4], 1, 2, 3])
        cache.check()
        index = cache._books.index
        run = next(r for r in index.runs() if r.start == 0)
        if spoil == 0:
            index.entries.run_of_key.pop(run.keys[0])
        elif spoil == 1:
            index.entries.run_of[run.pages[0]] = -1
        elif spoil == 2:
            next(iter(run.children.values())).start += 1
        elif spoil == 3:
            index.pool.indexed[run.pages[0]] = False
        elif spoil == 4:
            index.recency.forget()
        else:
            del run.tokens[:4]
        with pytest.raises(InvariantError):
            cache.check()


def test_runs_of_long_chains_are_split_only_where_a_branch_is_stored() -> None:
    cache = solo(pages=128, page_size=1)
    serve(cache, "1", list(range(40)))
    index = cache._books.index
    for i in range(10):
        cache.peek(cache.chain([*range(i + 1), 99, 99]))
    assert len(index.runs()) == 1
    serve(cache, "2", [*range(20), 99])
    assert sorted((run.start, len(run)) for run in index.runs()) == [(0, 20), (20, 1), (20, 20)]
    serve(cache, "3", list(range(50)))
    assert sorted((run.start, len(run)) for run in index.runs()) == [(0, 20), (20, 1), (20, 30)]


# ---- why not more


def reason_of(cache: PrefixCache, tokens: list[int], **options: object) -> tuple[int, Reason]:
    sequence = admit(cache, "why", tokens, **options)
    sequence.abort()
    return sequence.cached_tokens, sequence.record.reason


def test_every_reason_is_given_and_counted() -> None:
    """N6; the group minimum between ranks is tested with the agreement, a failed load with the host tier."""
    cache = solo(pages=12)
    image, other = [Span(0, 1, b"1" * 16)], [Span(0, 1, b"2" * 16)]
    assert reason_of(cache, LONG[:5]) == (0, Reason.NEVER_SEEN)
    serve(cache, "1", LONG[:6])
    assert reason_of(cache, LONG[:7]) == (6, Reason.PARTIAL_PAGE)
    assert reason_of(cache, LONG[:6]) == (4, Reason.WHOLE)
    assert reason_of(cache, LONG[:8]) == (6, Reason.NEVER_SEEN)
    assert reason_of(cache, [*LONG[:4], 0, 0, 0]) == (4, Reason.NEVER_SEEN)
    assert reason_of(cache, LONG[:5], salt="x") == (0, Reason.SALT)
    assert reason_of(cache, LONG[:5], adapter=Adapter("x")) == (0, Reason.ADAPTER)
    assert reason_of(cache, LONG[:5], spans=image) == (0, Reason.MEDIA)
    assert reason_of(cache, LONG[:5], spans=[Span(3, 1, b"1" * 16)]) == (2, Reason.MEDIA)
    assert reason_of(cache, LONG[:7], read=False) == (0, Reason.NOT_READ)
    assert reason_of(cache, LONG[:7], matched_cap=1) == (2, Reason.GROUP_MINIMUM)
    assert reason_of(cache, [1]) == (0, Reason.PARTIAL_PAGE)
    serve(cache, "2", [5] * 20)
    assert reason_of(cache, LONG[:7]) == (4, Reason.EVICTED)
    cache.reset()
    serve(cache, "3", LONG[:6], salt="x", spans=image)
    serve(cache, "4", LONG[:6], spans=image)
    assert reason_of(cache, LONG[:5], spans=other) == (0, Reason.MEDIA), "whatever other salts have"
    assert reason_of(cache, LONG[:5], salt="y", spans=image) == (0, Reason.SALT)
    sequence_before = cache.stats().reasons
    cache.begin_step(Message(requests=(request(cache, "5", LONG[:7], spans=image),)))
    cache.reset()
    (sequence,) = cache.end_step().ready
    assert (sequence.cached_tokens, sequence.record.reason) == (0, Reason.BUMP_OR_RESET)
    assert cache.stats().reasons[str(Reason.BUMP_OR_RESET)] == sequence_before.get(str(Reason.BUMP_OR_RESET), 0) + 1
    others = {"load failed", "window", "forked", "next tokens"}
    assert set(cache.stats().reasons) == {str(r) for r in Reason} - others, (
        "which need a host tier, a sliding label, a fork, draft layers")
    assert sum(cache.stats().reasons.values()) == cache.stats().requests


def test_what_a_bump_took_is_not_said_to_be_new() -> None:
    cache = solo(pages=32)
    serve(cache, "1", LONG[:6])
    serve(cache, "2", [5, 6, 3, 4], salt="x")
    cache.bump("2")
    cache.reset()  # finds nothing more to take, and does not make the bump forgotten
    assert reason_of(cache, LONG[:6]) == (0, Reason.BUMP_OR_RESET)
    assert reason_of(cache, [5, 6, 7, 8], salt="y") == (0, Reason.BUMP_OR_RESET)
    assert reason_of(cache, [7, 8, 9]) == (0, Reason.NEVER_SEEN)
    serve(cache, "3", LONG[:6])
    assert reason_of(cache, LONG[:8]) == (6, Reason.NEVER_SEEN)
    assert reason_of(cache, LONG[:6], salt="y") == (0, Reason.SALT)


def test_what_is_stored_while_the_ballot_is_in_flight_is_no_other_media() -> None:
    cache = solo()
    writer = prefill(admit(cache, "1", LONG[:5]))
    cache.begin_step(Message(requests=(request(cache, "2", LONG[:7]),)))
    writer.finish()
    (sequence,) = cache.end_step().ready
    assert (sequence.cached_tokens, sequence.record.reason) == (0, Reason.NEVER_SEEN)


def test_tokens_are_counted_once() -> None:
    """N2 and N4: prompt tokens = cached + computed, for every request and in sum."""
    cache = solo(pages=64)
    computed = 0
    rng = random.Random(1)
    for i in range(50):
        prompt = LONG[: rng.randint(1, 12)]
        sequence = admit(cache, str(i), prompt)
        computed += len(sequence.open(len(prompt) - sequence.cached_tokens))
        sequence.commit(sequence.seq_len - sequence.committed)
        sequence.finish()
    stats = cache.stats()
    assert stats.cached_tokens > 0
    assert stats.prompt_tokens - stats.cached_tokens == computed


def test_a_match_is_the_callers() -> None:
    """Page tables do not change when the index does."""
    cache = solo(pages=32)
    serve(cache, "1", LONG[:9])
    sequence = admit(cache, "2", LONG[:9])
    pages = sequence.page_indices.copy()
    serve(cache, "3", [*LONG[:4], 1, 2, 3])
    cache.reset()
    cache.check()
    assert np.array_equal(sequence.page_indices, pages)


def test_a_cold_page_above_a_page_of_another_owner_can_be_evicted() -> None:
    """One page is computed by two, and the third who shared it all leaves last but one: nothing may be forgotten."""
    books = Books(PagePool(3), Namer(FINGERPRINT, 2), store_at_fill=True)
    books.promise(3)
    short, long = books.namer.chain([1, 2]), books.namer.chain([1, 2, 3, 4])
    first = books.take(1)
    books.store(short, first, 0)
    again = books.take(2)  # the first page of both is the same; the first writer's stays
    books.store(long, again, 0)
    shared = books.match(long, 2).pages
    assert shared.tolist() == [first[0], again[1]]
    books.pool.own(shared)
    books.release(first, 0)
    books.index.check()
    books.release(shared, 0)
    books.index.check()
    assert books.index.evict(1) == 1, "the page that was computed twice is cold, with a live page below it"
    assert (books.index.cascades, len(books.index), books.pool.free) == (1, 0, 1)
    books.index.check()
    books.release(again, 0)
    assert books.pool.free == 3
