"""The kernels' tables, compared with a reference that walks token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distkv import PrefixCache, Sequence, SequenceError, TableBuffers, TableError, TableRing, Tables
from tests.core.helpers import admit, prefill, serve, solo


def by_hand(cache: PrefixCache, batch: list[tuple[Sequence, int]], pad_to: int = 0) -> dict[str, Any]:
    """What a kernel must be told, one token after the other."""
    size, scratch = cache.config.cache.page_size, cache.config.pool.scratch_pages
    rows = [(list(map(int, s.page_indices)), s.seq_len, n) for s, n in batch]
    rows += [([i % scratch], 1, 1) for i in range(pad_to - len(batch))]
    found: dict[str, Any] = {"indptr": [0], "indices": [], "last_page_len": [], "seq_lens": [], "query_start": [0],
                             "slot_mapping": [], "positions": [], "block_table": []}
    for pages, length, n in rows:
        in_pages: dict[int, int] = {}  # pages that have a token -> how many of its slots
        for token in range(length):
            page = pages[token // size]
            in_pages[page] = in_pages.get(page, 0) + 1
            if token >= length - n:
                found["slot_mapping"].append(page * size + token % size)
                found["positions"].append(token)
        assert list(in_pages) == pages, "a page without a token is listed"
        found["indices"] += pages
        found["indptr"].append(len(found["indices"]))
        found["last_page_len"].append(in_pages[pages[-1]])
        found["seq_lens"].append(length)
        found["query_start"].append(found["query_start"][-1] + n)
        found["block_table"].append(pages)
    return found


def same(tables: Tables, wanted: dict[str, Any], page_size: int) -> None:
    for name, array in tables.arrays().items():
        assert array.dtype == (np.int64 if name in ("slot_mapping", "positions") else np.int32), name
        if name != "block_table":
            assert array.tolist() == wanted[name], name
    widest = max(map(len, wanted["block_table"]), default=0)
    table = tables.block_table[:, :widest]
    assert table.tolist() == [row + [0] * (widest - len(row)) for row in wanted["block_table"]]
    assert (tables.rows, tables.tokens) == (len(wanted["seq_lens"]), len(wanted["slot_mapping"]))
    last, pages = tables.last_page_len, np.diff(tables.indptr)
    assert ((pages - 1) * page_size + last == tables.seq_lens).all()
    assert ((last >= 1) & (last <= page_size)).all()


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_every_length_from_one_to_four_pages_and_one(page_size: int) -> None:
    """Each length as a whole prompt in one forward, then a decode step, all lengths in one batch, padded or not."""
    lengths = range(1, 4 * page_size + 2)
    cache = solo(pages=8 * len(lengths) + 16, page_size=page_size, scratch=2, queue_slots=4)
    out = TableBuffers.make(rows=len(lengths) + 3, tokens=sum(lengths) + 3, pages_per_row=7)
    sequences = [admit(cache, str(n), [n] * n, output_limit=page_size + 1) for n in lengths]
    for sequence, n in zip(sequences, lengths, strict=True):
        sequence.open(n)
        same(cache.tables([(sequence, n)], out=out), by_hand(cache, [(sequence, n)]), page_size)
    whole = list(zip(sequences, lengths, strict=True))
    same(cache.tables(whole), by_hand(cache, whole), page_size)
    for sequence, n in whole:
        sequence.commit(n)
        sequence.open(1)
    decode = [(sequence, 1) for sequence in sequences]
    for pad_to in (len(lengths), len(lengths) + 3):
        tables = cache.tables(decode, out=out, pad_to=pad_to)
        same(tables, by_hand(cache, decode, pad_to), page_size)
        assert tables.padded == pad_to - len(lengths)


def test_mixed_batches_of_any_history_over_one_set_of_buffers() -> None:
    """Cached prefixes, chunks, several uncommitted tokens, truncation to and over page boundaries, decode."""
    rng = np.random.default_rng(3)
    size, ends = 4, 0
    cache = solo(pages=400, page_size=size, scratch=3)
    serve(cache, "first", [7] * 18)
    out = TableBuffers.make(rows=24, tokens=400, pages_per_row=20)
    running: list[Sequence] = []
    for turn in range(120):
        if len(running) < 12:
            prompt = [7] * int(rng.integers(0, 18)) + rng.integers(8, 20, int(rng.integers(1, 20))).tolist()
            running.append(admit(cache, f"r{turn}", prompt, output_limit=24))
        batch = []
        for sequence in list(rng.permutation(np.array(running, object))):
            room = sequence.prompt_tokens + 24 - sequence.seq_len
            if room > 0:
                sequence.open(int(rng.integers(1, min(room, 9) + 1)))
            open_tokens = sequence.seq_len - sequence.committed
            if open_tokens > 1 and rng.random() < 0.4:
                sequence.truncate(int(rng.integers(1, open_tokens)))
                open_tokens = sequence.seq_len - sequence.committed
            if open_tokens:
                batch.append((sequence, int(rng.integers(1, open_tokens + 1))))
        pad_to = len(batch) + int(rng.integers(0, 5))
        same(cache.tables(iter(batch), out=out, pad_to=pad_to), by_hand(cache, batch, pad_to), size)
        for sequence in list(running):
            unnamed = sequence.seq_len - sequence.named
            if unnamed > 0:
                sequence.append(rng.integers(8, 20, unnamed).tolist())
            sequence.commit(int(rng.integers(0, sequence.seq_len - sequence.committed + 1)))
            if rng.random() < 0.1:
                sequence.finish()
                running.remove(sequence)
                ends += 1
    assert ends > 10
    assert cache.stats().cached_tokens > 100


def test_a_wholly_cached_prompt_still_writes_only_a_page_of_its_own() -> None:
    cache = solo(page_size=4)
    serve(cache, "a", [5] * 8)
    again = admit(cache, "b", [5] * 8)
    assert again.cached_tokens == 4, "one token at least is left to compute"
    again.open(4)
    tables = cache.tables([(again, 4)])
    written = set((tables.slot_mapping // 4).tolist())
    assert written.isdisjoint(set(np.flatnonzero(cache._books.pool.indexed).tolist()))


def test_an_empty_batch_may_be_all_padding() -> None:
    cache = solo(page_size=4, scratch=1)
    out = TableBuffers.make(rows=4, tokens=4, pages_per_row=1)
    same(cache.tables([], out=out, pad_to=4), by_hand(cache, [], 4), 4)
    empty = cache.tables([], out=out)
    assert (empty.rows, empty.tokens, empty.indptr.tolist(), empty.query_start.tolist()) == (0, 0, [0], [0])


def test_scratch_pages_are_never_a_sequences() -> None:
    cache = solo(pages=8, page_size=2, scratch=2)
    sequence = prefill(admit(cache, "a", [1] * 11, output_limit=1))
    sequence.open(1)
    assert not set(sequence.page_indices.tolist()) & {0, 1}
    tables = cache.tables([(sequence, 1)], pad_to=6)
    assert (tables.slot_mapping[1:] // 2).tolist() == [0, 1, 0, 1, 0]


def filled(out: TableBuffers) -> dict[str, Any]:
    for name in Tables.__dataclass_fields__:
        if name not in ("rows", "tokens", "padded"):
            getattr(out, name)[:] = 77
    return {name: getattr(out, name).copy() for name in TableBuffers.__dataclass_fields__}


@pytest.mark.parametrize(("name", "sizes", "needed", "has"), [
    ("indptr", {"rows": 2}, 4, 3), ("indices", {"indices": 8}, 9, 8), ("slot_mapping", {"tokens": 10}, 18, 10),
    ("block_table", {"pages_per_row": 2, "indices": 20}, 3, 2),
])  # fmt: skip
def test_a_small_buffer_is_named_and_nothing_is_written(name: str, sizes: dict[str, int], needed: int,
                                                        has: int) -> None:
    cache = solo(page_size=2, scratch=1, pages=32)
    batch = [(admit(cache, str(i), [i] * 6), 6) for i in range(3)]
    for sequence, n in batch:
        sequence.open(n)
    out = TableBuffers.make(**{"rows": 3, "tokens": 18, "pages_per_row": 3, **sizes})
    before = filled(out)
    with pytest.raises(TableError, match=rf"the buffer {name}.* has {has} .* needs {needed}, {needed - has} more") as e:
        cache.tables(batch, out=out)
    assert (e.value.buffer, e.value.needed, e.value.has) == (name, needed, has)
    for field, array in before.items():
        assert np.array_equal(getattr(out, field), array), field


def test_rows_that_cannot_run_are_refused_before_anything_is_written() -> None:
    cache, other = solo(page_size=2, pages=32), solo(page_size=2)
    sequence, ended, foreign = (admit(c, i, [1, 2, 3], 2) for c, i in ((cache, "a"), (cache, "b"), (other, "a")))
    for each in (sequence, ended, foreign):
        each.open(3)
    ended.abort()
    out = TableBuffers.make(rows=4, tokens=8, pages_per_row=4)
    before = filled(out)
    for batch, text in [
        ([sequence], "pair .sequence, number of its new tokens. for each row, not Sequence"),
        ([(sequence, 1.5)], "not .Sequence"), ([(1, sequence)], "pair"), ([(sequence,)], "pair"), ([("a", 1)], "pair"),
        ([(sequence, 3), (ended, 3)], "'b' cannot be in a batch: it was aborted"),
        ([(foreign, 3)], "'a' cannot be in a batch: it belongs to another cache"),
        ([(sequence, 1), (sequence, 1)], "in the batch twice"),
        ([(sequence, 0)], "cannot compute 0 new"), ([(sequence, 4)], "cannot compute 4 new"),
        ([(sequence, -1)], "cannot compute -1 new"),
    ]:  # fmt: skip
        with pytest.raises(SequenceError, match=text):
            cache.tables(batch, out=out)
    sequence.commit(2)
    with pytest.raises(SequenceError, match="3 are opened and 2 of them committed"):
        cache.tables([(sequence, 2)], out=out)
    with pytest.raises(TableError, match=r"set pool\.scratch_pages"):
        cache.tables([(sequence, 1)], out=out, pad_to=2)
    again = admit(cache, "c", [9])
    again.open(1)
    with pytest.raises(TableError, match=r"out is a dict; fixed buffers are TableBuffers\.make"):
        cache.tables([(sequence, 1)], out={})  # type: ignore[arg-type]
    with pytest.raises(TableError, match=r"pad_to is a number of rows or None, not 2\.5"):
        cache.tables([(sequence, 1)], pad_to=2.5)  # type: ignore[arg-type]
    with pytest.raises(TableError, match="2 rows cannot be padded to 1"):
        cache.tables([(sequence, 1), (again, 1)], out=out, pad_to=1)
    for field, array in before.items():
        assert np.array_equal(getattr(out, field), array), field


class Copying:
    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.zeros(3, np.int32)


def test_buffers_may_be_tensors_and_are_written_in_place() -> None:
    cache = solo(page_size=2)
    sequence = admit(cache, "a", [1, 2, 3])
    sequence.open(3)
    tensors = {name: torch.zeros(shape, dtype=getattr(torch, dtype))
               for name, (shape, dtype) in TableBuffers.shapes(rows=2, tokens=4, pages_per_row=3).items()}
    tables = cache.tables([(sequence, 3)], out=TableBuffers(**tensors))
    for name, array in tables.arrays().items():
        assert tensors[name].data_ptr() == array.ctypes.data, name
    assert tensors["seq_lens"].tolist() == [3, 0]
    assert tensors["slot_mapping"][:3].tolist() == sequence.slots(0, 3).tolist()
    for wrong, text in [
        (torch.zeros(3, dtype=torch.int64), "writable int32 array"), (torch.zeros(6, dtype=torch.int32)[::2], "contig"),
        (torch.zeros(3, 1, dtype=torch.int32), "with 1 axis"), (torch.zeros(3, device="meta"), "written from the host"),
        ([0, 0, 0], "writable int32"), (Copying(), "can only copy"),
    ]:  # fmt: skip
        with pytest.raises(TableError, match=text) as caught:
            TableBuffers(**{**tensors, "indptr": wrong})
        assert caught.value.buffer == "indptr"
    with pytest.raises(TableError, match="0 rows"):
        TableBuffers.make(rows=0, tokens=1, pages_per_row=1)


class Copy:
    """An event that was recorded behind a copy: whoever waits for it sees what the copy read."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def synchronize(self) -> None:
        self.log.append(self.name)


def test_the_ring_waits_for_the_copy_that_read_a_buffer_and_for_no_other() -> None:
    log: list[str] = []
    ring = TableRing(TableBuffers.make(rows=1, tokens=1, pages_per_row=1) for _ in range(3))
    used = []
    for turn in range(7):
        used.append(ring.acquire())
        assert log == [f"copy {i}" for i in range(turn - 2)]
        ring.release(Copy(log, f"copy {turn}"))
    assert used[:3] == used[3:6]
    assert len({id(buffers) for buffers in used}) == len(ring) == 3
    ring.acquire()
    with pytest.raises(TableError, match="not released"):
        ring.acquire()
    ring.release()
    with pytest.raises(TableError, match="no buffer is acquired"):
        ring.release()
    with pytest.raises(TableError, match="at least one"):
        TableRing([])
