"""Forks as calls: who owns what, what children need, and what happens under pressure."""

from __future__ import annotations

import numpy as np
import pytest

from distkv import Branch, CacheConfig, Config, Message, NoRoom, PoolConfig, PrefixCache, Reason, Request, SequenceError
from distkv.config import HostConfig
from distkv.host.scripted import ScriptedCopies
from tests.core.forking import Copies, cache_of, parent_of, state, writes
from tests.core.helpers import FINGERPRINT, admit, config, prefill, serve

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
