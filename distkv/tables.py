"""What attention kernels ask of a batch: page tables, lengths and slots.

Two conventions in one call, because they come from the same numbers: FlashInfer's ragged ``indptr``, ``indices`` and
``last_page_len``, and the padded ``block_table`` with ``seq_lens`` of FlashAttention and vLLM. Sans-IO.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from distkv.errors import SequenceError, TableError
from distkv.ledger import MAIN
from distkv.pages import Pages
from distkv.table_buffers import TableBuffers

if TYPE_CHECKING:
    from distkv.sequence import Sequence

__all__ = ["Tables", "build"]

Lengths = npt.NDArray[np.int64]
"""Lengths, positions or slots, int64 [n]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """One batch as kernels take it. Arrays are views of the buffers they were written to, valid until the next fill.

    Row ``i`` is the i-th sequence of the batch; padded rows come last. Per row, with ``pages`` pages,
    ``(pages - 1) * page_size + last_page_len == seq_len`` and ``1 <= last_page_len <= page_size``: a page is listed
    only if one of its tokens is opened. Token rows are the new tokens of row 0, then those of row 1, and so on.
    """

    rows: int
    """Rows, padded ones included."""
    tokens: int
    """New tokens of all rows, padded ones included."""
    padded: int
    """How many rows are padding, each with one token on a scratch page. Their results mean nothing."""
    indptr: Pages
    """int32 [rows + 1]: the pages of row i are ``indices[indptr[i] : indptr[i + 1]]``."""
    indices: Pages
    """int32 [pages of all rows]: page ids, row after row. A shared page is listed by each row that has it."""
    last_page_len: Pages
    """int32 [rows]: opened tokens in a row's last page."""
    seq_lens: Pages
    """int32 [rows]: opened tokens of a row, new ones included, but for those that a window has given up."""
    query_start: Pages
    """int32 [rows + 1]: first new token of each row (``cu_seqlens_q``, ``qo_indptr``); the last is ``tokens``."""
    slot_mapping: Lengths
    """int64 [tokens]: the flat slot, ``page * page_size + offset``, to which a new token's K and V go."""
    positions: Lengths
    """int64 [tokens]: a new token's position in its sequence, tokens that a window has given up included."""
    block_table: Pages
    """int32 [rows, pages_per_row]: page ids, from the left. Behind a row's pages are zeros as far as the widest row
    of this batch goes, and behind those what an earlier batch left: kernels read no further than ``seq_lens`` says."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by name, for a loop that copies each to where the kernel runs."""
        return {field.name: value for field in dataclasses.fields(self)
                if isinstance(value := getattr(self, field.name), np.ndarray)}


def build(batch: Iterable[tuple[Sequence, int]], *, running: Mapping[str, Sequence], page_size: int, scratch: int,
          label: str = MAIN, out: TableBuffers | None = None, pad_to: int | None = None) -> Tables:
    """See :meth:`distkv.PrefixCache.tables`. Everything is checked before anything is written."""
    if out is not None and not isinstance(out, TableBuffers):
        raise TableError(f"out is a {type(out).__name__}; fixed buffers are TableBuffers.make(...) or TableBuffers("
                         "**arrays), and None makes new arrays", "out")
    pages, lengths, new, gone = _rows(batch, running, label, page_size)
    real = len(pages)
    padded = _padding(real, scratch, pad_to, label)
    if padded:
        pages += list((np.arange(padded, dtype=np.int32) % scratch)[:, None])
        lengths += [1] * padded
        new += [1] * padded
        gone += [0] * padded
    counts = np.fromiter(map(len, pages), np.int64, len(pages))
    seq_lens, fresh = np.array(lengths, np.int64), np.array(new, np.int64)
    rows, tokens, indices = len(pages), int(fresh.sum()), int(counts.sum())
    widest = int(counts.max(initial=0))
    if out is None:
        out = TableBuffers.make(rows=max(1, rows), tokens=max(1, tokens), pages_per_row=max(1, widest),
                                indices=max(1, indices))
    out.check_room(rows=rows, tokens=tokens, indices=indices, pages_per_row=widest)
    tables = _views(out, rows=rows, tokens=tokens, indices=indices, padded=padded)
    _write(tables, pages, counts, seq_lens, fresh, page_size, widest)
    if any(gone):
        tables.positions[:] += np.repeat(np.array(gone, np.int64), fresh)
    return tables


def _rows(batch: Iterable[tuple[Sequence, int]], running: Mapping[str, Sequence], label: str, page_size: int
          ) -> tuple[list[Pages], list[int], list[int], list[int]]:
    """Page tables, lengths and numbers of new tokens of a batch whose every row may run, and how many of a row's tokens
    a window has given up. Raises SequenceError."""
    pages: list[Pages] = []
    gone: list[int] = []
    lengths: list[int] = []
    new: list[int] = []
    seen: set[str] = set()
    for row in batch:
        try:
            sequence, n = row[0], operator.index(row[1])
            other = running.get(sequence.id) is not sequence
        except (TypeError, IndexError, AttributeError):
            raise SequenceError("a batch has a pair (sequence, number of its new tokens) for each row, not "
                                f"{row!r:.100}") from None
        if other:
            raise SequenceError(f"sequence {sequence.id!r} cannot be in a batch: it "
                                + (f"was {sequence.ended}" if sequence.ended else "belongs to another cache"))
        if sequence.read_in_progress:
            raise SequenceError(f"sequence {sequence.id!r} cannot be in a batch: its pages are still being read in")
        if sequence.id in seen:
            raise SequenceError(f"sequence {sequence.id!r} is in the batch twice; give all its new tokens in one row")
        seen.add(sequence.id)
        length = sequence.seq_len
        if not 1 <= n <= length - sequence.committed:
            raise SequenceError(f"sequence {sequence.id!r} cannot compute {n} new token(s): {length} are opened and "
                                f"{sequence.committed} of them committed; a row has at least one, and open comes first")
        those = sequence.pages_of(label)
        pages.append(those.table)
        gone.append(those.gone * page_size)
        lengths.append(length - gone[-1])
        new.append(n)
    return pages, lengths, new, gone


def _padding(real: int, scratch: int, pad_to: int | None, label: str) -> int:
    """How many rows of padding a batch of ``real`` rows gets. Raises TableError."""
    if pad_to is None:
        return 0
    if not isinstance(pad_to, (int, np.integer)):
        raise TableError(f"pad_to is a number of rows or None, not {pad_to!r}", "pad_to")
    padded = int(pad_to) - real
    if padded < 0:
        raise TableError(f"a batch of {real} rows cannot be padded to {pad_to}; pad it to at least its own size",
                         "pad_to", real, pad_to)
    if padded and not scratch:
        section = "pool" if label == MAIN else f"labels.{label}"
        raise TableError("padded rows need a page that no sequence has, and there is none; set "
                         f"{section}.scratch_pages to 1 or more", "scratch_pages", 1, 0)
    return padded


def _views(out: TableBuffers, *, rows: int, tokens: int, indices: int, padded: int) -> Tables:
    return Tables(
        rows=rows, tokens=tokens, padded=padded,
        indptr=out.indptr[: rows + 1], indices=out.indices[:indices], last_page_len=out.last_page_len[:rows],
        seq_lens=out.seq_lens[:rows], query_start=out.query_start[: rows + 1],
        slot_mapping=out.slot_mapping[:tokens], positions=out.positions[:tokens], block_table=out.block_table[:rows],
    )  # fmt: skip


def _write(tables: Tables, pages: list[Pages], counts: Lengths, seq_lens: Lengths, new: Lengths, page_size: int,
           widest: int) -> None:
    tables.indptr[0] = tables.query_start[0] = 0
    if not pages:
        return
    np.cumsum(counts, out=tables.indptr[1:])
    np.cumsum(new, out=tables.query_start[1:])
    np.concatenate(pages, out=tables.indices)
    tables.seq_lens[:] = seq_lens
    tables.last_page_len[:] = seq_lens - (counts - 1) * page_size
    tables.block_table[:, :widest] = 0
    for row, table in zip(tables.block_table, pages, strict=True):
        row[: len(table)] = table
    # a token's position is its number in the batch, less that of its row's first one, plus where that one stands
    first = np.repeat(seq_lens - new - tables.query_start[:-1], new)
    np.add(first, np.arange(tables.tokens), out=tables.positions)
    page, offset = np.divmod(tables.positions, page_size)
    page += np.repeat(tables.indptr[:-1], new)
    np.add(tables.indices[page] * np.int64(page_size), offset, out=tables.slot_mapping)
