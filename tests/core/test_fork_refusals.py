"""What cannot be forked, with nothing changed by asking; and tails that a rolling label protects."""

from __future__ import annotations

from typing import Any

import pytest

from distkv import (
    Branch,
    CacheConfig,
    Config,
    DuplicateRequest,
    KeyNamingError,
    Message,
    PoolConfig,
    PrefixCache,
    Request,
    RequestError,
    Sequence,
    SequenceError,
    Span,
)
from distkv.config import LabelConfig
from distkv.host.kv import PagedKV
from tests.core.forking import cache_of, parent_of, state, writes
from tests.core.helpers import FINGERPRINT, admit, prefill

# ---- what is refused


@pytest.mark.parametrize(("branches", "error"), [
    (0, SequenceError), (-1, SequenceError), (10**12, RequestError), ((), SequenceError), (True, RequestError),
    (1.5, RequestError), (None, RequestError), ("ab", RequestError), ((Branch(id="p"),), DuplicateRequest),
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


def test_a_copy_that_fails_in_one_label_opens_nothing_in_any() -> None:
    broken = ["s"]

    def copy_page(label: str, source: int, target: int) -> None:
        if label in broken:
            raise RuntimeError("no copy")

    cache = PrefixCache(Config(cache=CacheConfig(page_size=2), pool=PoolConfig(pages=20),
                               labels=(LabelConfig(name="s", pages=20),)), FINGERPRINT, copy_page=copy_page)
    parent = prefill(admit(cache, "p", range(3), output_limit=8, labels=("main", "s")))
    (child,) = parent.fork()
    with pytest.raises(RuntimeError, match="no copy"):
        child.open(5)
    cache.check()
    assert child.seq_len == 3
    assert [len(pages.table) for pages in child.lists] == [2, 2]
    broken.clear()
    child.append([7])
    child.open(1)
    assert [cache.tables([(child, 1)], label=label).last_page_len.tolist() for label in ("main", "s")] == [[2], [2]]
    child.abort()
    parent.finish()
    cache.check()
    assert [ledger.pool.live for ledger in cache._books.ledgers] == [0, 0]
