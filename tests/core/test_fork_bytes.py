"""Forks over real memory: who writes to a shared page first writes to a copy of it, and nobody else's bytes change."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from distkv import PrefixCache, Sequence
from distkv.host.kv import PagedKV
from distkv.ledger import Ledger
from tests.core.helpers import FINGERPRINT, admit, config

PAGES, SIZE = 24, 64
GUARD = -7.0


def _kv(make: Callable[[int], torch.Tensor], axes: str) -> tuple[PagedKV, torch.Tensor]:
    tensor = make(PAGES)
    names = axes.split()
    return PagedKV(tensor, axes=axes), tensor.movedim((names.index("page"), names.index("token")), (0, 1))


LAYOUTS: dict[str, Callable[[], tuple[PagedKV, torch.Tensor]]] = {
    "keys and values": lambda: _kv(lambda n: torch.full((2, 2, n, SIZE, 1, 3), GUARD),
                                   "layer plane page token head dim"),
    "heads first": lambda: _kv(lambda n: torch.full((n, 2, 3, SIZE, 5), GUARD), "page plane head token dim"),
    "one latent plane": lambda: _kv(lambda n: torch.full((n, 2, SIZE, 7), GUARD), "page layer token dim"),
}


class Engine:
    """A cache over real tensors, and a model whose KV of a token is a number that stands for the prefix up to it."""

    def __init__(self, layout: str) -> None:
        self.kv, self.slots = LAYOUTS[layout]()
        """``slots``: the same memory, [pages, page_size, ...]."""
        self.cache = PrefixCache(config(PAGES, SIZE), FINGERPRINT, kv=self.kv)

    def computes(self, sequence: Sequence, ids: list[int] | None = None) -> None:
        """The sequence computes the rest of its prompt, or these tokens behind it."""
        if ids is not None:
            sequence.append(ids)
        n = sequence.named - sequence.committed
        for slot, value in zip(sequence.open(n), self.values(sequence)[-n:], strict=True):
            self.slots[int(slot) // SIZE, int(slot) % SIZE] = value
        sequence.commit(n)

    @staticmethod
    def values(sequence: Sequence) -> list[float]:
        values, last = [], 1
        for token in sequence.tokens(0, sequence.named).tolist():
            last = (last * 31 + token) % 65_521
            values.append(float(last))
        return values

    def bytes_of(self, sequence: Sequence) -> torch.Tensor:
        """The KV of its committed tokens, as attention would read it: [tokens, ...]."""
        at = torch.from_numpy(sequence.slots(0, sequence.committed))
        return self.slots.flatten(0, 1)[at].clone()

    def pool(self) -> list[bytes]:
        return [self.kv.page_bytes(page).tobytes() for page in range(PAGES)]


def alone(layout: str, tokens: list[int]) -> torch.Tensor:
    """What a request of these tokens has that shares nothing."""
    engine = Engine(layout)
    sequence = admit(engine.cache, "alone", tokens)
    engine.computes(sequence)
    return engine.bytes_of(sequence)


@pytest.mark.parametrize("tail", [1, 31, 32, 33, SIZE - 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forks_that_write_other_tokens_in_turn_have_the_bytes_of_unshared_runs(layout: str, tail: int) -> None:
    engine = Engine(layout)
    prompt = list(range(SIZE + tail))
    parent = admit(engine.cache, "p", prompt, output_limit=SIZE + 9)
    engine.computes(parent)
    family = [parent, *parent.fork(4)]
    engine.cache.check()
    shared = int(parent.page_indices[1])
    assert engine.cache.stats().pages_live == 2
    generated: dict[str, list[int]] = {sequence.id: [] for sequence in family}
    for turn, n in enumerate([1, 2, SIZE - tail, 5]):
        for number, sequence in enumerate(family[::-1] if turn % 2 else family):
            ids = [1000 * turn + 7 * number + i for i in range(n)]
            before = engine.pool()
            sequence.append(ids)
            sequence.open(n)
            after = engine.pool()
            copied = int(sequence.page_indices[1])
            if turn == 0 and sequence is not family[-1]:
                assert after[copied] == after[shared] == before[shared]
                assert [i for i in range(PAGES) if after[i] != before[i]] == [copied], "every other page is as it was"
            else:
                assert after == before, "nobody else copies, not even the last owner of the tail"
            sequence.truncate(n)
            engine.computes(sequence, ids)
            generated[sequence.id] += ids
    assert shared == int(family[-1].page_indices[1])
    for sequence in family:
        expected = alone(layout, prompt + generated[sequence.id])
        assert torch.equal(engine.bytes_of(sequence), expected), sequence
    engine.cache.check()


@pytest.mark.parametrize("copies", [True, False], ids=["copy-on-write", "without-the-copy"])
def test_the_copy_is_what_keeps_them_apart(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not copies:
        def write_tail(self: Ledger, page: int) -> int:
            self.leave_tail(page)
            return page

        monkeypatch.setattr(Ledger, "write_tail", write_tail)
    engine = Engine("keys and values")
    parent = admit(engine.cache, "p", range(40), output_limit=8)
    engine.computes(parent)
    family = [parent, *parent.fork(4)]
    for number, sequence in enumerate(family):
        engine.computes(sequence, [number] * 3)
    same = [torch.equal(engine.bytes_of(sequence), alone("keys and values", [*range(40), *[number] * 3]))
            for number, sequence in enumerate(family)]
    assert same == ([True] * 5 if copies else [False] * 4 + [True])


def test_a_copy_does_not_depend_on_its_source_any_more() -> None:
    engine = Engine("heads first")
    parent = admit(engine.cache, "p", range(5), output_limit=4)
    engine.computes(parent)
    (child,) = parent.fork()
    shared = int(parent.page_indices[0])
    engine.computes(child, [9])
    before = engine.bytes_of(child)
    parent.abort()
    engine.slots[shared] = 0
    assert torch.equal(engine.bytes_of(child), before)


def test_pages_of_a_fork_serve_the_next_request() -> None:
    """What parent and child store is found, with the right bytes; of two equal pages the first that was stored."""
    engine = Engine("one latent plane")
    parent = admit(engine.cache, "p", range(SIZE + 10), output_limit=SIZE)
    engine.computes(parent)
    (child,) = parent.fork()
    own = {sequence.id: [100 * i + t for t in range(SIZE - 10)] for i, sequence in enumerate((parent, child))}
    for sequence in (child, parent):
        engine.computes(sequence, own[sequence.id])
        sequence.finish()
    for name, ids in own.items():
        hit = admit(engine.cache, f"again {name}", [*range(SIZE + 10), *ids, 1])
        assert hit.cached_tokens == 2 * SIZE
        at = torch.from_numpy(hit.slots(0, hit.cached_tokens))
        assert torch.equal(engine.slots.flatten(0, 1)[at], alone("one latent plane", [*range(SIZE + 10), *ids]))


@pytest.mark.parametrize("writers", [0, 3, 5])
def test_released_in_every_order_nothing_is_left(writers: int) -> None:
    copies: list[Any] = []
    cache = PrefixCache(config(32, 4), FINGERPRINT, copy_page=lambda *given: copies.append(given))
    ends = ("finish", "abort", "suspend", "finish", "keep")
    for order in itertools.permutations(range(5)):
        parent = admit(cache, "p", range(6), output_limit=3, read=False, write=False)
        parent.open(6)
        parent.commit(6)
        family = [parent, *parent.fork(4)]
        copies.clear()
        for sequence in [family[i] for i in order][:writers]:
            sequence.append([1])
            sequence.open(1)
            sequence.commit(1)
        assert len(copies) == min(writers, 4), "the last writer does not copy"
        assert len({int(sequence.page_indices[1]) for sequence in family}) == max(1, min(5, writers + (writers < 5)))
        for i in order:
            getattr(family[i], ends[i])()
            cache.abort(family[i].id)  # what was suspended or kept goes, too
            cache.check()
        stats = cache.stats()
        assert (stats.pages_free, stats.pages_live, stats.pages_reserved) == (32, 0, 0)
        assert not cache._books.tails
        assert cache._books.room == 32
