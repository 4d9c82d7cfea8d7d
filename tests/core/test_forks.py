"""Forks as calls: who owns what, what they need and when they get it, and what is refused with nothing changed."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from distkv import (
    Branch,
    CacheConfig,
    Config,
    DuplicateRequest,
    Fingerprint,
    GroupDivergence,
    KeyNamingError,
    Message,
    NoRoom,
    PeerFailed,
    PoolConfig,
    PrefixCache,
    Reason,
    Request,
    RequestError,
    Sequence,
    SequenceError,
    Span,
    StepResult,
)
from distkv.config import HostConfig, LabelConfig
from distkv.host.kv import PagedKV
from distkv.host.scripted import ScriptedCopies
from distkv.testing.group import SimulatedGroup
from tests.core.helpers import FINGERPRINT, admit, config, prefill, serve

Copies = list[tuple[str, int, int]]


def cache_of(pages: int = 16, page_size: int = 4, copies: Copies | None = None, **cache: Any) -> PrefixCache:
    """A cache that notes what its forks copy."""
    noted = copies if copies is not None else []
    return PrefixCache(config(pages, page_size, **cache), FINGERPRINT, copy_page=lambda *given: noted.append(given))


def parent_of(cache: PrefixCache, tokens: int = 6, limit: int = 8, **options: Any) -> Sequence:
    return prefill(admit(cache, "p", range(tokens), output_limit=limit, **options))


def writes(sequence: Sequence, *ids: int) -> None:
    sequence.append(ids)
    sequence.open(len(ids))
    sequence.commit(len(ids))


def state(cache: PrefixCache) -> bytes:
    """Everything that a fork may change on this rank, byte for byte."""
    books, agreed = cache._books, cache._agreement
    return pickle.dumps((
        [(each.pool._word.tobytes(), each.pool.free_ids().tobytes(), each.pool.live, each.pool.claims, each.reserved,
          each.tails, len(each.stock), each.stock.recency.stamp.tobytes()) for each in books.ledgers],
        books.digest, books.step, agreed.leftovers, agreed.counters, list(agreed.running), list(agreed.kept),
        agreed.queue.ids, agreed.preemption.names,
        [(s.id, s.forking, s.seq_len, s.committed, s.chain.tokens.tobytes(),
          [(p.pages.tobytes()[:4 * p.owned], p.filled, p.owned, p.reserved, p.tail) for p in s.lists])
         for s in agreed.running.values()]))


# ---- what children are


def test_children_begin_where_their_parent_is() -> None:
    cache = cache_of()
    parent = parent_of(cache)
    parent.append([70])  # named and not committed: it stays the parent's own
    a, b = parent.fork(2)
    assert (a.id, b.id) == ("p/1", "p/2")
    for child in (a, b):
        assert child.page_indices.tolist() == parent.page_indices.tolist()
        assert (child.committed, child.seq_len, child.named, child.prompt_tokens, child.cached_tokens) == (6,) * 5
        assert child.request.output_limit == 8
        assert child.record.reason == Reason.FORKED
    assert list(cache.running) == ["p", "p/1", "p/2"]
    writes(a, 1)
    assert parent.named == 7
    assert [s.chain.tokens.tolist()[-1] for s in (parent, a, b)] == [5, 1, 5]
    assert cache.stats().forked == 2


def test_branches_have_suffixes_limits_and_names_of_their_own() -> None:
    cache = cache_of(32)
    parent = parent_of(cache)
    left = cache.leftover
    a, b, c = parent.fork((Branch(id="a", suffix=np.array([7, 8, 9], np.int32), output_limit=2), Branch(id="b"),
                           Branch(id="c", suffix=[1], output_limit=0)))
    assert [s.prompt_tokens for s in (a, b, c)] == [9, 6, 7]
    assert [len(s.lists[0].pages) for s in (a, b, c)] == [3, 4, 2]
    assert cache.leftover == left - (1 + 1) - (2 + 1) - (0 + 1), "what is not shared, and a page for the copy"
    prefill(a)
    prefill(c)
    cache.check()
    assert (a.chain.tokens.tolist()[-3:], c.chain.tokens.tolist()[-1:]) == ([7, 8, 9], [1])
    with pytest.raises(SequenceError, match="cannot open 2 tokens"):
        c.open(2)


def test_a_fork_in_the_midst_of_the_prompt_leaves_the_rest_of_it_to_the_parent() -> None:
    cache = cache_of()
    parent = admit(cache, "p", range(11), output_limit=2)
    parent.open(6)
    parent.commit(6)
    (child,) = parent.fork((Branch(id="a", suffix=[50, 51]),))
    assert child.prompt_tokens == 8
    assert child.request.output_limit == 5, "prompt and limit of the parent, less its own prompt"
    prefill(child)
    prefill(parent)
    assert child.chain.tokens.tolist() == [0, 1, 2, 3, 4, 5, 50, 51]
    assert parent.chain.tokens.tolist() == list(range(11))
    for sequence in (child, parent):
        sequence.finish()
    assert cache.peek(cache.chain([0, 1, 2, 3, 4, 5, 50, 51, 1])) == 2
    assert cache.peek(cache.chain(range(11))) == 2


def test_a_fork_at_the_end_of_a_page_shares_no_tail_and_copies_nothing() -> None:
    copies: Copies = []
    cache = cache_of(copies=copies)
    parent = parent_of(cache, 8, 4)
    left = cache.leftover
    a, b = parent.fork(2)
    assert cache.leftover == left - 2
    assert not cache._books.tails
    for number, sequence in enumerate((a, parent, b)):
        writes(sequence, number)
    assert not copies
    assert len({int(s.page_indices[2]) for s in (a, b, parent)}) == 3


def test_forks_of_forks_share_one_tail() -> None:
    copies: Copies = []
    cache = cache_of(32, copies=copies)
    parent = parent_of(cache)
    (a,) = parent.fork()
    (b,) = a.fork()
    (c,) = parent.fork()
    tail = int(parent.page_indices[1])
    assert [s.id for s in (a, b, c)] == ["p/1", "p/1/1", "p/2"]
    assert cache._books.tails == {tail: 4}
    writes(b, 1)  # which has a tail of its own now, and shares that one again
    (d,) = b.fork()
    assert cache._books.tails == {tail: 3, int(b.page_indices[1]): 2}
    cache.check()
    for sequence in (c, parent, a, d, b):
        writes(sequence, 2)
        cache.check()
    assert len(copies) == 4
    assert int(a.page_indices[1]) == tail


def test_tables_of_forks_are_those_of_any_sequence() -> None:
    """At every length: no page too many, and a last page with at least one token and at most all."""
    for tokens in range(1, 18):
        cache = cache_of(40)
        parent = parent_of(cache, tokens, 3)
        family = (parent, *parent.fork(2))
        for number, sequence in enumerate(family):
            sequence.append([number])
            sequence.open(1)
        tables = cache.tables([(sequence, 1) for sequence in family])
        for i in range(3):
            pages = int(tables.indptr[i + 1] - tables.indptr[i])
            assert (pages - 1) * 4 + int(tables.last_page_len[i]) == tokens + 1
            assert 1 <= int(tables.last_page_len[i]) <= 4
        assert len(set(tables.slot_mapping.tolist())) == 3


def test_truncated_tokens_after_a_fork_leave_the_copy() -> None:
    copies: Copies = []
    cache = cache_of(copies=copies)
    parent = parent_of(cache)
    (child,) = parent.fork()
    child.open(5)
    child.truncate(5)
    assert child.seq_len == 6
    assert len(copies) == 1
    writes(child, 1)
    parent.append([1, 2])
    parent.open(2)
    parent.truncate(2)
    assert len(copies) == 1
    (grandchild,) = child.fork()
    child.finish()
    parent.finish()
    writes(grandchild, 9)
    grandchild.finish()
    cache.check()
    assert len(copies) == 1, "of each tail there was one owner left"


@pytest.mark.parametrize("index_on", ["finish", "fill"])
def test_what_forks_fill_is_stored_once(index_on: str) -> None:
    cache = cache_of(index_on=index_on)
    parent = parent_of(cache)
    (child,) = parent.fork()
    for sequence in (child, parent):
        writes(sequence, 7, 8, 9)  # the same tokens, in pages of their own
        cache.check()
    first = child if index_on == "fill" else parent
    parent.finish()
    child.finish()
    cache.check()
    assert cache.stats().entries == 2
    assert cache._books.match(cache.chain([0, 1, 2, 3, 4, 5, 7, 8, 0]), 2).pages.tolist() == [
        int(first.lists[0].pages[0]), int(first.lists[0].pages[1])]
    assert cache.stats().pages_free == 14


def test_an_asynchronous_engine_forks() -> None:
    cache = cache_of(asynchronous=True)
    parent = parent_of(cache)
    a, b = parent.fork(2)
    a.finish()
    cache.check()
    b.abort()
    cache.check()
    assert not cache._books.tails, "one owner is left, and writes where it is"
    writes(parent, 1)
    parent.finish()
    cache.check()
    assert cache.stats().pages_live == 2
    cache.retired(cache.steps)
    cache.check()
    assert cache.stats().pages_live == 0


@pytest.mark.parametrize("who", ["parent", "child"])
def test_a_suspended_owner_of_a_tail_computes_it_again(who: str) -> None:
    copies: Copies = []
    cache = cache_of(copies=copies)
    parent = parent_of(cache)
    (child,) = parent.fork()
    leaving, staying = (parent, child) if who == "parent" else (child, parent)
    leaving.suspend()
    writes(staying, 4)
    assert not copies
    cache.resume(leaving.id)
    (back,) = cache.step().ready
    assert (back.id, back.cached_tokens, back.prompt_tokens) == (leaving.id, 4, 6)
    prefill(back)
    assert back.page_indices[0] == staying.page_indices[0]
    assert back.page_indices[1] != staying.page_indices[1]
    back.finish()
    staying.finish()
    cache.check()
    assert cache.stats().pages_live == cache.stats().pages_reserved == 0


# ---- pressure


def test_under_pressure_there_is_no_child_and_nothing_has_changed() -> None:
    cache = cache_of(6)
    parent = parent_of(cache, 6, 2)
    other = prefill(admit(cache, "o", [9] * 12))
    assert cache.stats().pages_free == 1
    before = state(cache)
    with pytest.raises(NoRoom) as error:
        parent.fork(3)
    assert error.value.pages_short == 2
    assert state(cache) == before
    cache.check()
    (child,) = parent.fork()
    writes(child, 1)
    assert cache.stats().pages_free == 0
    for sequence in (parent, child, other):
        sequence.finish()
    cache.check()


def test_everything_that_takes_a_page_takes_a_cached_one_if_none_is_free() -> None:
    copies: Copies = []
    cache = cache_of(12, copies=copies)

    def fill() -> None:
        """Every page that is not live is cached."""
        number = 0
        while cache.stats().pages_free:
            number += 1
            serve(cache, f"filler {cache.steps}.{number}", [200 + cache.steps] * 4 * min(cache.stats().pages_free, 3))
        cache.step()

    fill()
    assert (cache.stats().pages_free, cache.stats().pages_cached) == (0, 12)
    parent = parent_of(cache, 6, 6)  # opens
    assert cache.stats().evicted == 2
    fill()
    (child,) = parent.fork((Branch(id="c", output_limit=3),))
    fill()
    writes(child, 1)  # copies
    assert len(copies) == 1
    assert (cache.stats().pages_free, cache.stats().evicted) == (0, 3)
    cache.step(Message(requests=(Request(id="beat", chain=cache.chain([1]), output_limit=0),)))  # a fresh leftover
    cache.grow(child, 1)
    fill()
    writes(child, 2, 3, 4, 5, 6)
    assert cache.stats().evicted >= 4
    cache.check()


def test_a_copy_that_fails_gives_back_what_it_took() -> None:
    broken = True

    def copy_page(label: str, source: int, target: int) -> None:
        if broken:
            raise RuntimeError("no stream")

    cache = PrefixCache(config(8, 4), FINGERPRINT, copy_page=copy_page)
    parent = parent_of(cache, 6, 2)
    (child,) = parent.fork()
    before = state(cache)
    with pytest.raises(RuntimeError, match="no stream"):
        child.open(1)
    assert state(cache) == before
    cache.check()
    broken = False
    writes(child, 1)
    writes(parent, 2)
    child.finish()
    parent.finish()
    cache.check()


def test_a_copy_waits_for_the_store_of_what_was_there() -> None:
    """The page that the copy is written to has just been evicted, and its bytes are still to go to the host."""
    seen: list[bool] = []
    engine = ScriptedCopies()
    engine.rows = None  # type: ignore[assignment]
    settings = Config(cache=CacheConfig(page_size=4), pool=PoolConfig(pages=3, check=True), host=HostConfig(pages=8))

    def copy_page(label: str, source: int, target: int) -> None:
        seen.append(any(copy.device == target for copy in engine.running))

    cache = PrefixCache(settings, FINGERPRINT, copies=engine, copy_page=copy_page)
    serve(cache, "x", range(50, 54))
    parent = parent_of(cache, 6, 2)
    (child,) = parent.fork()
    assert cache.stats().pages_free == 0
    writes(child, 1)
    assert seen == [False]
    assert [copy.device for copy in engine.submitted] == [int(child.page_indices[1])]
    child.suspend()
    writes(parent, 1, 2)
    parent.finish()
    cache.resume("p/1")
    engine.finish_all()
    cache.settle()
    assert [s.cached_tokens for s in cache.step().ready] == [4]
    cache.check()


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


# ---- what is refused


@pytest.mark.parametrize(("branches", "error"), [
    (0, SequenceError), (-1, SequenceError), ((), SequenceError), (True, RequestError), (1.5, RequestError),
    (None, RequestError), ("ab", RequestError), ((Branch(id="p"),), DuplicateRequest),
    ((Branch(id="a"), Branch(id="a")), DuplicateRequest), ((Branch(id="w"),), DuplicateRequest),
    ((Branch(id=5),), RequestError), ((Branch(id="a", output_limit=-1),), RequestError),  # type: ignore[arg-type]
    ((Branch(id="a", suffix=["x"]),), KeyNamingError),
])
def test_wrong_branches_change_nothing(branches: Any, error: type[Exception]) -> None:
    cache = cache_of()
    parent = parent_of(cache)
    cache.step(Message(requests=(Request(id="w", chain=cache.chain([1] * 50), output_limit=0),)))
    before = state(cache)
    with pytest.raises(error):
        parent.fork(branches)
    assert state(cache) == before


def test_what_cannot_be_forked_says_why() -> None:
    cache = cache_of()
    parent = parent_of(cache)
    parent.open(1)
    with pytest.raises(SequenceError, match="1 of its tokens are opened and not committed"):
        parent.fork()
    with pytest.raises(SequenceError, match="1 of its tokens are opened and not committed"):
        parent.keep()
    parent.truncate(1)
    parent.finish()
    with pytest.raises(SequenceError, match="was finished"):
        parent.fork()
    fresh = admit(cache, "q", [50, 51], output_limit=2)
    with pytest.raises(RequestError, match="needs a suffix"):
        fresh.fork()
    (child,) = fresh.fork((Branch(id="s", suffix=[1, 2]),))
    assert (child.committed, child.prompt_tokens) == (0, 2)


def test_a_media_item_is_not_cut_in_two() -> None:
    cache = cache_of()
    span = Span(4, 6, b"x" * 16, "embedding")
    (parent,) = cache.step(Message(requests=(
        Request(id="p", chain=cache.chain(range(12), spans=[span]), output_limit=2),))).ready
    parent.open(6)
    parent.commit(6)
    with pytest.raises(SequenceError, match="end inside a span"):
        parent.fork()
    parent.open(4)
    parent.commit(4)
    (child,) = parent.fork()
    assert child.chain.spans == (span,)
    cache.check()


def test_without_memory_only_full_pages_can_be_shared() -> None:
    """Of any of its labels."""
    torch = pytest.importorskip("torch")
    settings = Config(cache=CacheConfig(page_size=4), pool=PoolConfig(pages=8, check=True),
                      labels=(LabelConfig(name="cfg", pages=8),))
    for memory, labels, able in ((None, ("main",), False), ("main", ("main",), True), ("main", ("main", "cfg"), False)):
        kv = PagedKV(torch.zeros(2, 2, 8, 4, 1, 3)) if memory else None
        cache = PrefixCache(settings, FINGERPRINT, kv=kv)
        (parent,) = cache.step(Message(requests=(
            Request(id="p", chain=cache.chain(range(10)), output_limit=2, labels=labels),))).ready
        parent.open(8)
        parent.commit(8)
        assert len(parent.fork((Branch(id="a", suffix=[1], output_limit=0),))) == 1
        parent.open(1)
        parent.commit(1)
        if able:
            assert len(parent.fork((Branch(id="b", output_limit=1),))) == 1
        else:
            with pytest.raises(SequenceError, match="nothing to copy pages with"):
                parent.fork()


# ---- rolling labels


def rolling() -> tuple[PrefixCache, Sequence]:
    label = LabelConfig(name="r", kind="rolling", pages=24, window_tokens=12, allowance_tokens=4)
    cache = PrefixCache(Config(cache=CacheConfig(page_size=4), pool=PoolConfig(pages=40, check=True), labels=(label,)),
                        FINGERPRINT, copy_page=lambda *given: None)
    return cache, prefill(admit(cache, "p", range(6), output_limit=6, labels=("main", "r")))


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_a_protected_tail_counts_for_each_of_its_owners(when: str) -> None:
    cache, parent = rolling()
    if when != "after":
        parent.protect_prefix(6)
    family = [parent, *parent.fork(2)]
    cache.check()
    if when != "before":
        for sequence in family:
            sequence.protect_prefix(6)
            cache.check()
    family += family[1].fork(1)
    for sequence in family[::-1]:
        assert sequence.pages_of("r").protected == 2
        writes(sequence, 1)
        cache.check()
    for sequence in family:
        sequence.finish()
        cache.check()
    ledger = cache._books.ledgers[1]
    assert (ledger.pool.live, ledger.reserved, ledger.spared) == (0, 0, 0)  # type: ignore[attr-defined]


def test_while_a_fork_waits_its_parent_gives_nothing_up() -> None:
    cache, parent = rolling()
    prefill(admit(cache, "o", [3] * 136, labels=("main",)))
    assert parent.fork(2, wait=True) == ()
    for call in (parent.release_oldest, parent.protect_prefix):
        with pytest.raises(SequenceError, match="waits for its fork"):
            call(4)
