"""Labels of sliding layers: which boundaries are hit, what is freed while running, both tiers, and what ranks lose."""

from __future__ import annotations

from typing import Any

import pytest

from distkv import Branch, NoRoom, PrefixCache, SequenceError, Span
from distkv.errors import PeerFailed, RequestTooLarge
from distkv.testing.group import SimulatedGroup
from tests.core.helpers import FINGERPRINT, admit, request
from tests.core.label_caches import Ranks, config, full, grown, sliding
from tests.simulation import window_rules_off as off

A = list(range(100, 140))


def solo(*labels: Any, **options: Any) -> PrefixCache:
    return PrefixCache(config(*labels, **options), FINGERPRINT, copy_page=lambda label, source, target: None)


# ---- which boundaries


@pytest.mark.parametrize(("lost", "hit"), [
    ((), 5), ((0,), 5), ((0, 1), 5), ((0, 1, 2), 5), ((3,), 3), ((4,), 4), ((3, 4), 3), ((1, 3), 1), ((0, 1, 3), 0),
    ((2, 4), 2), ((0, 2, 4), 0),
])
def test_a_hit_needs_the_window_and_no_more(lost: tuple[int, ...], hit: int) -> None:
    """Pages A to E, window 2 pages: with A to C gone D and E still carry a hit of 5."""
    ranks = Ranks(config(sliding(window=4), full(), index_on="fill"))
    ranks.serve("a", A[:10], labels=("main", "cfg"))
    ranks.lose(0, lost, A[:10])
    assert ranks.serve("b", [*A[:10], 1], labels=("main", "cfg")) == 2 * hit


def test_of_a_full_label_every_page_is_needed() -> None:
    ranks = Ranks(config(sliding(window=4), full(), index_on="fill"))
    ranks.serve("a", A[:10], labels=("main", "cfg"))
    cache = ranks.caches[0]
    cache._ledger("cfg").index.drop(int(cache._ledger("cfg").index.match(cache.chain(A[:10]), 5).pages[0]))
    assert cache.peek(cache.chain([*A[:10], 1])) == 5
    assert ranks.serve("b", [*A[:10], 1], labels=("main", "cfg")) == 0
    assert ranks.serve("c", [*A[:10], 1]) == 10


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 7])
def test_every_boundary_is_hit_that_was_filled(window: int) -> None:
    """With ``index_on: fill`` each page's window is stored on its way."""
    ranks = Ranks(config(sliding(window=window), index_on="fill"))
    ranks.serve("a", A)
    for cut in range(1, 20):
        assert ranks.serve(f"b{cut}", [*A[: 2 * cut], 1]) == 2 * cut


@pytest.mark.parametrize("end", range(20, 26))
@pytest.mark.parametrize("window", [1, 4, 5])
def test_the_last_full_page_is_hit_wherever_the_end_lies(end: int, window: int) -> None:
    ranks = Ranks(config(sliding(window=window, allowance=None)))
    ranks.serve("a", A[:end])
    assert ranks.serve("b", [*A[:end], 1, 2]) == end // 2 * 2


@pytest.mark.parametrize("allowance", [0, 2, 6, 9])
def test_the_allowance_is_how_far_an_edit_may_go_back(allowance: int) -> None:
    ranks = Ranks(config(sliding(window=4, allowance=allowance)))
    ranks.serve("a", A)
    for back in range(2, 16, 2):
        wanted = 40 - back if back <= allowance else 0
        got = ranks.step(("b", [*A[: 40 - back], 1, 2], 0)).ready[0]
        assert got.cached_tokens == wanted, back
        assert str(got.record.reason) == ("never seen" if wanted else "window")
        assert got.record.restorable == (40 - back) // 2
        ranks.group.each(lambda cache: cache.abort("b"))


def test_boundaries_on_a_coarse_grid() -> None:
    """4 elements for 19 pages: every eighth page."""
    ranks = Ranks(config(sliding(window=4), index_on="fill", window_boundaries=4))
    ranks.serve("a", A)
    assert ranks.serve("b", [*A[:38], 1, 2]) == 32
    assert ranks.serve("c", [*A[:30], *[1] * 10]) == 16
    assert ranks.serve("d", [*A[:14], *[1] * 26]) == 0
    assert ranks.serve("e", [*A[:14], 1, 1]) == 12  # 7 pages: every second one


def test_two_windows_are_both_needed() -> None:
    def served(rank_loses: tuple[int, ...], label: str) -> int:
        ranks = Ranks(config(sliding(window=4), sliding(window=8, name="wide"), index_on="fill"))
        ranks.serve("a", A[:20])
        ranks.lose(0, rank_loses, A[:20], label)
        return ranks.serve("b", [*A[:20], 1])

    assert served((), "win") == 20
    assert served((8,), "win") == 16
    assert served((6,), "wide") == 12
    assert served((5,), "win") == 20  # behind that window
    assert served((9,), "wide") == 18


# ---- ranks that differ


def lost_apart() -> Ranks:
    """Rank 0 has the boundaries 2 and 5, rank 1 has 3 and 4 as well as 2, and not 5."""
    ranks = Ranks(config(sliding(window=2), index_on="fill"), config(sliding(30, window=2), index_on="fill"))
    ranks.serve("a", A[:10])
    ranks.lose(0, (2, 3), A[:10])
    ranks.lose(1, (4,), A[:10])
    return ranks


def test_the_boundary_that_all_ranks_have() -> None:
    ranks = lost_apart()
    for cache, mine in zip(ranks.caches, (5, 4), strict=True):
        ledger: Any = cache._ledger("win")
        found = ledger.windows.places(cache.chain(A[:10]).keys)
        assert max(i + 1 for i in range(5) if found[i] >= 0) == mine
    ranks.begin(("b", [*A[:10], 1], 0))
    outcomes = ranks.group.end()
    assert [outcome.ready[0].cached_tokens for outcome in outcomes] == [4, 4]  # type: ignore[union-attr]
    assert {str(outcome.ready[0].record.reason) for outcome in outcomes} == {"group minimum"}  # type: ignore[union-attr]


def test_without_an_element_for_each_boundary_a_rank_is_to_use_what_it_has_not() -> None:
    ranks = lost_apart()
    with off.each_boundary_by_itself(), pytest.raises(Exception, match=r"was matched but|free and used|other owner"):
        ranks.serve("b", [*A[:10], 1])


def test_pools_of_other_sizes() -> None:
    """What the smallest pool has evicted counts for all."""
    ranks = Ranks(config(sliding(8, window=4), index_on="fill"), config(sliding(40, window=4), index_on="fill"))
    ranks.serve("a", A[:20])
    ranks.serve("b", [*range(20)])
    small, large = (cache.stats().labels["win"] for cache in ranks.caches)
    assert (small.pages_cached, large.pages_cached) == (8, 20)
    assert ranks.serve("c", [*range(20), 1]) == 20
    assert ranks.serve("d", [*A[:20], 1]) == 0


# ---- what a running sequence has


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize(("window", "allowance", "chunk"), [(1, 0, 1), (4, 0, 4), (5, 3, 4), (16, 1, 2), (33, 0, 16)])
def test_a_sequence_stays_within_window_allowance_and_chunk(size: int, window: int, allowance: int, chunk: int) -> None:
    cache = solo(sliding(200, window, allowance=allowance, chunk=chunk), pages=300, size=size)
    ledger: Any = cache._ledger("win")
    most = -(-(window + allowance + chunk) // size) + 1
    assert ledger.most <= most
    sequence = admit(cache, "a", [1] * 40, output_limit=60)
    pages = sequence.pages_of("win")
    promised = pages.promised
    assert promised == ledger.most or promised == sequence.pages_of("main").total <= most
    for end in range(0, 100, chunk):
        grown(cache, sequence, min(chunk, 100 - end), chunk)
        assert pages.promised == promised
        assert cache.stats().labels["win"].pages_live == len(pages.table) <= most
        first = max(0, sequence.committed - window + 1)
        sequence.slots(first, sequence.committed, "win")  # what the next token reads is there
    assert cache.leftovers["win"] == 200 - promised
    sequence.finish()
    cache.check()
    assert cache.stats().labels["win"].pages_live == 0


def test_more_than_a_chunk_cannot_be_opened() -> None:
    cache = solo(sliding(window=4, chunk=4))
    sequence = grown(cache, admit(cache, "a", A[:30]), 20)
    with pytest.raises(SequenceError, match=r"label 'win'; commit what is opened first, or raise the label's chunk"):
        sequence.open(9)
    cache.check()
    assert sequence.seq_len == 20
    with pytest.raises(SequenceError, match=r"no slots 0 \.\. 19 of label 'win': pages 0 \.\. 7 were released"):
        sequence.slots(0, 20, "win")
    with pytest.raises(SequenceError, match="has no pages of label 'cfg'; it has main, win"):
        sequence.slots(0, 2, "cfg")


def test_truncated_tokens_leave_no_hole() -> None:
    """Drafts in the last page of the window are taken back, and the next tokens find their place."""
    cache = solo(sliding(window=4, chunk=4))
    sequence = grown(cache, admit(cache, "a", A[:8], output_limit=20), 8)
    for _ in range(8):
        sequence.append([1])
        sequence.open(4)
        sequence.commit(1)
        sequence.truncate(3)
        cache.check()
        assert sequence.pages_of("win").promised == cache._ledger("win").promised_for(99)


def test_an_exact_hit_counts_no_token_twice() -> None:
    """The prompt is all there: its last page is computed again, behind a window that is one page shorter."""
    ranks = Ranks(config(sliding(window=4), index_on="fill"))
    ranks.serve("a", A[:12])
    assert ranks.serve("b", A[:12]) == 10
    assert ranks.serve("c", A[:11]) == 10


def test_too_large_for_the_window_pool() -> None:
    cache = solo(sliding(5, window=8, chunk=4))
    cache.submit(request(cache, "a", A))
    refused = cache.step().refused[0]
    assert isinstance(refused.error, RequestTooLarge)
    assert "label 'win'" in str(refused.error)
    assert grown(cache, admit(cache, "b", A[:10]), 10).pages_of("win").promised == 5  # T is less than the window takes


# ---- holds and promises


def held_and_given_up() -> PrefixCache:
    """The only pages that a ballot holds are live, and their owner gives them up before it ends."""
    cache = solo(sliding(12, window=4, chunk=4), index_on="fill")
    a = grown(cache, admit(cache, "a", A[:36]), 8)
    b = admit(cache, "b", [3] * 30)
    cache.submit(request(cache, "c", [*A[:8], 1, 2]))
    cache.begin_step()
    cache.check()
    grown(cache, a, 8)
    grown(cache, b, 12)
    cache.end_step()
    return cache


def test_what_is_held_and_given_up_is_counted() -> None:
    cache = held_and_given_up()
    assert cache.waiting_ids == ("c",)
    cache.running["b"].finish()
    assert [sequence.id for sequence in cache.step().ready] == ["c"]


def test_without_counting_live_pages_among_the_held_a_reservation_breaks() -> None:
    with off.holds_count_live_pages(), pytest.raises(Exception, match=r"do not cover the reservations|opening pages"):
        held_and_given_up()


def test_the_first_row_leaves_room_for_the_windows_behind_it() -> None:
    """Two long cached prompts come in one step, and the pool has not the room to hold all boundaries of both."""
    ranks = Ranks(config(sliding(40, window=4, chunk=4), pages=300, index_on="fill"))
    ranks.serve("a", A)
    ranks.serve("b", A[::-1])
    ranks.step(("big", [5] * 70, 0), ("big2", [6] * 70, 0), ("big3", [8] * 70, 0), ("big4", [9] * 70, 0),
               ("big5", [4] * 70, 0))
    ready = ranks.step(("c", [*A, 1], 0), ("d", [*A[::-1], 1], 0)).ready
    assert [sequence.cached_tokens for sequence in ready] == [40, 40]


def test_a_shared_window_page_is_promised_to_each_owner() -> None:
    """Nobody may count on the pages of another one, who may give them up alone (no live discount)."""
    cache = solo(sliding(10, window=2, chunk=4), index_on="fill")
    a = grown(cache, admit(cache, "a", A[:30]), 20)
    most = cache._ledger("win").promised_for(99)
    assert most == 4
    b = admit(cache, "b", [*A[:20], 1, 2, 3, 4, 5, 6, 7])
    assert b.cached_tokens == 20
    assert b.pages_of("win").table.tolist() == a.pages_of("win").table.tolist()
    assert cache.leftovers["win"] == 10 - 2 * most
    grown(cache, a, 10)
    grown(cache, b, 7)
    cache.check()


# ---- asynchronous


def test_pages_that_slide_out_wait_for_their_passes() -> None:
    cache = solo(sliding(8, window=2, allowance=0, chunk=8), asynchronous=True)
    sequence = admit(cache, "a", A)
    grown(cache, sequence, 8)
    pages = sequence.pages_of("win")
    assert (pages.first, pages.retiring, pages.promised) == (3, 3, cache._ledger("win").promised_for(99))
    assert cache.stats().labels["win"].pages_live == 4
    cache.step()
    grown(cache, sequence, 4)
    with pytest.raises(SequenceError, match="more when their passes have retired"):
        sequence.open(6)
    cache.retired(1)
    assert pages.retiring == 2
    sequence.open(6)
    cache.check()
    sequence.abort()
    cache.retired(2)
    cache.check()
    assert cache.stats().labels["win"].pages_free == 8


def test_forks_and_kept_prefixes_of_a_window() -> None:
    ranks = Ranks(config(sliding(30, window=4, chunk=4)))
    ranks.step(("a", A[:21], 9))
    ranks.computes("a", 21)
    cache = ranks.caches[0]
    most = cache._ledger("win").promised_for(99)
    left = cache.leftovers["win"]
    parent = cache.running["a"]
    children = parent.fork((Branch(id="x", suffix=[1, 2]), Branch(id="y", output_limit=5)))
    ranks.contents[0].forked(parent, children, 0)
    ranks.check()
    assert left - cache.leftovers["win"] == 2 * most
    pool = cache._ledger("win").pool
    tail = int(parent.pages_of("win").table[-1])
    assert pool.owners[tail] == 3
    for name in ("y", "a", "x"):
        ranks.computes(name, 5)
    assert len({int(s.pages_of("win").table[-1]) for s in (parent, *children)}) == 3
    assert pool.owners[tail] == 0  # two copied it, the last wrote to it, and it slid out of all windows
    parent.keep()
    ranks.check()
    child, = cache.kept["a"].fork((Branch(id="z", suffix=[4]),)) if cache.step() else ()
    ranks.contents[0].forked(parent, (child,), 0)
    ranks.computes("z", 1)
    for name in ("x", "z", "y"):
        cache.running[name].finish()
        cache.check()
    cache.abort("a")
    cache.check()
    assert cache.stats().labels["win"].pages_live == 0


def test_a_fork_that_the_window_pool_has_no_room_for() -> None:
    cache = solo(sliding(8, window=4, chunk=4))
    parent = grown(cache, admit(cache, "a", A), 21)
    before = cache.stats()
    with pytest.raises(NoRoom):
        parent.fork(2)
    assert cache.stats() == before


# ---- both tiers


def spilled(on: tuple[int, ...] = (0, 1)) -> Ranks:
    """Two ranks; on these A's window has left the device for the host."""
    ranks = Ranks(*[config(sliding(9, window=4, allowance=None, host=20), pages=80, host=60)] * 2)
    ranks.serve("a", A[:20])
    for rank in on:
        assert ranks.caches[rank]._ledger("win").stock.evict(9) == 3
    ranks.copied()
    ranks.step()
    return ranks


def test_a_window_comes_back_from_the_host() -> None:
    ranks = spilled()
    result = ranks.step(("c", [*A[:20], 1], 0))
    sequence, = result.loading
    assert sequence.read_in_progress
    assert ranks.step().loading == (sequence,)
    ranks.copied()
    assert [(s.cached_tokens, s.record.host_tokens) for s in ranks.step().ready] == [(20, 2)]
    ranks.computes("c", 1)
    ranks.group.each(lambda cache: cache.running["c"].finish())
    ranks.check()
    assert ranks.caches[0].stats().labels["win"].loads == 2
    assert ranks.serve("d", [*A[:20], 1]) == 20


def test_a_load_that_fails_on_one_rank_is_computed_on_all() -> None:
    ranks = spilled()
    assert ranks.step(("c", [*A[:20], 1], 0)).loading
    engine = ranks.engines[1]["win"]
    engine.doom(engine.running[0])
    ranks.copied()
    assert not ranks.step().ready
    ready = ranks.step().ready
    assert [(s.cached_tokens, str(s.record.reason)) for s in ready] == [(0, "load failed")]
    ranks.computes("c", 21)
    ranks.group.each(lambda cache: cache.running["c"].finish())
    assert ranks.serve("d", [*A[:20], 1]) == 20
    assert not any(cache.stats().labels["win"].pages_live for cache in ranks.caches)


def test_an_abort_while_a_window_is_read_in() -> None:
    ranks = spilled()
    assert ranks.step(("c", [*A[:20], 1], 0)).loading
    ranks.group.each(lambda cache: cache.abort("c"))
    ranks.check()
    assert ranks.caches[0].stats().labels["win"].pages_live == 2  # the copies' own, until they end
    ranks.copied()
    ranks.step()
    ranks.group.each(lambda cache: cache._books.poll_all())
    ranks.check()
    assert ranks.caches[0].stats().labels["win"].pages_live == 0


def test_a_late_load_is_given_up_on_all_ranks() -> None:
    ranks = spilled()
    assert ranks.step(("c", [*A[:20], 1], 0)).loading
    engine = ranks.engines[0]["win"]
    late = engine.running[0]
    engine.expire(late)
    for other in (each for engines in ranks.engines for each in engines.values()):
        for copy in other.running:
            if copy is not late:
                other.finish(copy)
    assert not ranks.step().ready
    assert [s.cached_tokens for s in ranks.step().ready] == [0]
    ranks.check()


def test_a_boundary_that_one_rank_has_on_the_device() -> None:
    """What one rank has to read in is read in on all, and the other waits for it."""
    ranks = spilled(on=(1,))
    result = ranks.step(("c", [*A[:20], 1], 0))
    assert [s.record.host_tokens for s in result.loading] == [2]
    assert [cache.stats().labels["win"].loads for cache in ranks.caches] == [0, 2]
    ranks.copied()
    assert [s.cached_tokens for s in ranks.step().ready] == [20]


def given_up_in_flight() -> Ranks:
    """While a ballot counts on the only host pages of the window, a running sequence evicts and would have them."""
    ranks = Ranks(config(sliding(12, window=4, host=2), pages=200))
    ranks.serve("a", A[:20])
    for n in range(5):
        ranks.serve(f"y{n}", [n] * 20)
    ranks.step(("z", [9] * 30, 0))
    ranks.computes("z", 4)
    cache = ranks.caches[0]
    ledger: Any = cache._ledger("win")
    assert ledger.stock.evicted == 2
    ranks.copied()
    assert (ledger.windows.places(cache.chain(A[:20]).keys)[8:] >= 12).all()
    ranks.begin(("c", [*A[:20], 1], 0))
    ranks.computes("z", 12)
    assert ledger.stock.evicted > 2
    ranks.copied()
    assert ranks.end().loading
    ranks.copied()
    assert [s.cached_tokens for s in ranks.step().ready] == [20]
    return ranks


def test_host_pages_of_a_window_are_read_from_the_begin_of_the_ballot() -> None:
    given_up_in_flight()
    with off.readers_of_windows(), pytest.raises(Exception, match=r"was matched but|none|disagree"):
        given_up_in_flight()


def test_host_full_of_what_is_read_drops_and_goes_on() -> None:
    ranks = Ranks(config(sliding(9, window=4, host=1), pages=80, host=60))
    for n in range(6):
        ranks.serve(f"a{n}", [n] * 20)
    stats = ranks.caches[0].stats().labels["win"]
    assert stats.host_free == 0
    ranks.copied()
    ranks.step()
    ranks.serve("b", [9] * 20)
    ranks.check()


def test_a_window_page_leaves_with_the_entry_of_main_in_both_tiers() -> None:
    ranks = spilled()
    cache = ranks.caches[0]
    ledger: Any = cache._ledger("win")
    chain = cache.chain(A[:20])
    host_before = cache.stats().labels["win"].host_free
    assert (ledger.windows.places(chain.keys)[7:] >= 0).all()
    index = cache._books.index
    index.drop(int(index.match(chain, 10).pages[8]))  # and what continues it
    assert (ledger.windows.places(chain.keys)[8:] < 0).all()
    assert cache.stats().labels["win"].host_free == host_before + 2
    cache.check()


def test_with_a_broken_hash_no_window_of_another_content_is_used() -> None:
    def case() -> int:
        ranks = Ranks(config(sliding(window=2), index_on="fill"), hash64=lambda data, seed=0: 7)
        ranks.serve("a", [1, 2])
        index = ranks.caches[0]._books.index
        index.drop(int(index.match(ranks.caches[0].chain([1, 2]), 1).pages[0]))
        ranks.step(("b", [3, 4, 5], 0))
        content, cache = ranks.contents[0], ranks.caches[0]
        sequence = cache.running["b"]
        sequence.open(2)
        content.launched(sequence, 2, 1)
        sequence.commit(2)
        sequence.abort()
        return ranks.serve("c", [3, 4, 6])

    assert case() == 2
    with off.leaves_with_its_entry(), pytest.raises(Exception, match=r"was matched but|disagree|no entry"):
        case()


@pytest.mark.parametrize("scope", ["all", "device", "host"])
def test_resets_forget_windows_of_that_tier(scope: Any) -> None:
    ranks = spilled()
    ranks.serve("n", [*range(20)])
    for content in ranks.contents if scope != "device" else ():
        content.host_was_reset()
    ranks.group.each(lambda cache: cache.reset(scope))
    ranks.check()
    stats = ranks.caches[0].stats().labels["win"]
    if scope != "host":
        assert stats.pages_free == stats.pages_usable
    if scope != "device":
        assert stats.host_free == stats.host_pages
    for engines in ranks.engines:
        for engine in engines.values():
            engine.epoch = lambda: ranks.caches[0]._books.epoch
    assert ranks.serve("d", [*range(20), 1]) == (20 if scope == "host" else 0)


def test_new_weights() -> None:
    ranks = Ranks(config(sliding(), index_on="fill"))
    ranks.serve("a", A[:20])
    ranks.group.each(lambda cache: cache.bump("2"))
    assert ranks.serve("b", [*A[:20], 1]) == 0
    assert ranks.serve("c", [*A[:20], 1, 2]) == 20


def test_suspended_sequences_find_their_window_again() -> None:
    ranks = Ranks(config(sliding(allowance=None), host=20))
    ranks.step(("a", A[:21], 9))
    ranks.computes("a", 24)
    ranks.group.each(lambda cache: cache.running["a"].suspend())
    ranks.check()
    assert ranks.caches[0].stats().labels["win"].pages_live == 0
    ranks.group.each(lambda cache: cache.resume("a"))
    ranks.copied()
    ready = ranks.step().ready or (ranks.copied(), ranks.step())[1].ready  # type: ignore[func-returns-value]
    assert [s.cached_tokens for s in ready] == [22]
    ranks.computes("a", 5)


def test_growth_costs_a_window_nothing() -> None:
    cache = solo(sliding(8, window=4, chunk=4))
    sequence = grown(cache, admit(cache, "a", A), 20)
    before = cache.leftovers
    assert cache.grow(sequence, 3)
    assert {"main": before["main"] - 3, "win": before["win"]} == cache.leftovers
    grown(cache, sequence, 26)
    cache.check()


def test_tables_of_a_window() -> None:
    cache = solo(sliding(window=4, allowance=0, chunk=4))
    sequence = grown(cache, admit(cache, "a", A), 20)
    slots = sequence.open(3)
    main, win = cache.tables([(sequence, 3)]), cache.tables([(sequence, 3)], label="win")
    assert main.seq_lens.tolist() == [23]
    assert win.positions.tolist() == main.positions.tolist() == [20, 21, 22]
    assert win.seq_lens.tolist() == [23 - 2 * sequence.pages_of("win").first] == [7]
    assert win.indices.tolist() == sequence.pages_of("win").table.tolist()
    assert win.slot_mapping.tolist() == sequence.slots(20, 23, "win").tolist() != slots.tolist()


def test_lockstep_with_a_window() -> None:
    same = config(sliding(12, window=4), agreement="lockstep", check_every=1, index_on="fill")
    ranks = Ranks(same, same, same)
    for n in range(4):
        ranks.serve(f"a{n}", [*A[:20], n])
    ranks.lose(1, (9,), A[:20])
    ranks.begin(("x", [*A[:20], 5], 0))
    assert {type(outcome).__name__ for outcome in ranks.group.end()} == {"GroupDivergence"}


def test_pools_of_other_sizes_are_no_lockstep() -> None:
    configs = [config(sliding(pages, window=4), agreement="lockstep") for pages in (12, 13)]
    with pytest.raises(Exception, match=r"labels\.win\.pages \(equal in lockstep\)"):
        SimulatedGroup(configs, FINGERPRINT)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_last_page_with_known_next_tokens_is_hit(depth: int) -> None:
    """Draft layers back off: the last full page may have no name, and the default allowance covers that."""
    for end in range(20, 24):
        ranks = Ranks(config(sliding(allowance=None), next_token_depth=depth))
        ranks.serve("a", A[:end])
        assert ranks.serve("b", [*A[:end], 1, 2]) == (end - depth) // 2 * 2


@pytest.mark.parametrize("depth", [0, 1])
def test_where_the_pages_of_a_cached_prefix_are(depth: int) -> None:
    """Also of one whose pages are not named by its tokens alone: by a media item, by the tokens behind it."""
    cache = PrefixCache(config(sliding(window=6), next_token_depth=depth), FINGERPRINT)
    sequence = admit(cache, "a", A[:9], spans=[Span(start=1, length=2, digest=b"an image's bytes")])
    grown(cache, sequence, 9)
    sequence.finish()
    (prefix,) = cache.cached_prefixes()
    device, host = cache.window_pages(prefix, "win")
    there = device >= 0
    assert there.tolist() == [False, False, True, True]
    assert device[there].tolist() == cache._books.ledgers[1].pool.cached().nonzero()[0].tolist()
    assert (host < 0).all()


@pytest.mark.parametrize("call", ["hold", "to_hold", "hosts_of"])
def test_a_lookup_that_fails_at_the_window_holds_nothing(call: str) -> None:
    """On one rank, when the holds in main are there: no rank admits, and the group goes on."""
    ranks = Ranks(*[config(sliding(6, allowance=None, host=9))] * 2)
    for number in range(3):
        ranks.serve(str(number), [token + 9 * number for token in A])
    ranks.copied()
    ranks.step()

    def failing(*_given: object) -> object:
        raise RuntimeError("planted")

    ledger: Any = ranks.caches[1]._ledger("win")
    setattr(ledger, call, failing)
    ranks.begin(("b", [*A, 1], 0))
    outcomes = ranks.group.end()
    delattr(ledger, call)
    assert [type(outcome) for outcome in outcomes] == [PeerFailed] * 2
    ranks.check()
    (sequence,) = ranks.step().loading
    assert sequence.cached_tokens == len(A)
    ranks.copied()
    assert len(ranks.step().ready) == 1
