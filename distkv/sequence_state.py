"""What a sequence is, and what an engine reads of it. How it is written: :mod:`distkv.sequence`. Sans-IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from distkv.books import Books
from distkv.chain import KeyChain
from distkv.errors import SequenceError
from distkv.keys import TOKEN_BYTES, tag_of
from distkv.pagelist import PageList
from distkv.pages import Pages
from distkv.readin import ReadIn

if TYPE_CHECKING:
    from collections.abc import Sequence as AbstractSequence

    from distkv.forks import Branch
    from distkv.request import Request, RequestRecord
    from distkv.sequence import Sequence

__all__ = ["Lifecycle", "SequenceState", "Slots"]

Slots = npt.NDArray[np.int64]
"""Flat slots, int64 [n]: page * page_size + offset."""


class Lifecycle(Protocol):
    """Who a sequence belongs to: told of its end, and asked for forks."""

    def _ended(self, sequence: Sequence) -> None: ...
    def _forks_in_flight(self, sequence: Sequence) -> bool: ...
    def fork(self, parent: Sequence, branches: int | AbstractSequence[Branch], *,
             wait: bool) -> tuple[Sequence, ...]: ...


class SequenceState:
    """Tokens, page tables and progress of one admitted request; a part of :class:`distkv.Sequence`."""

    def __init__(self, books: Books, request: Request, chain: KeyChain, lists: tuple[PageList, ...], cached: int,
                 record: RequestRecord, owner: Lifecycle, read_in: ReadIn | None = None) -> None:
        """``lists``: its page tables, that of its first label first, which have its first ``cached`` tokens.

        ``read_in``: the loads that still write some of these pages; the sequence cannot run until they have ended.
        """
        self.id = request.id
        self.request = request
        self.record = record
        self.chain = chain.branch()
        """Prompt and committed tokens. After the end, the conversation's next turn goes on from it."""
        self.prompt_tokens = len(chain)
        self.cached_tokens = cached
        """Leading tokens whose KV was in the cache at admission."""
        self.epoch = books.epoch
        self.lists = lists
        """Its page tables, one for each label. Not to be modified."""
        self.read_in = read_in
        """The loads that it waits for; None if it can run."""
        self.ended: str | None = None
        """How it ended: finished, aborted, suspended, or put back into the queue. ``kept``: see :meth:`keep`."""
        self.prefix_epoch = 0
        """Grows when pages in the middle were given up: tables and lengths that were made before are of no use."""
        self._to_release = 0  # tokens of less than a page, which rolling labels are to release
        self.forking = False
        """It waits for a fork, and opens and gives up nothing meanwhile."""
        self.parked = False
        """It has ended while the ballot in flight counts on its pages, for a fork: they are its own until that ends."""
        self.to_resume: Request | None = None
        """Of a suspended sequence: the request that goes on from here."""
        self._books = books
        self._owner = owner
        self._tag = tag_of(request.id)
        self._main = lists[0]
        self._sliding = tuple(pages for pages in lists if pages.ledger.grid) if len(lists) > 1 else ()
        self._opened = self._committed = cached
        self._names = bytearray()  # ids behind the chain's end that are named and not committed

    def __repr__(self) -> str:
        main = self._main
        return (f"Sequence({self.id!r}, {self._committed} committed of {self._opened} opened tokens, "
                f"{main.filled} pages, {main.reserved} reserved{', ' + self.ended if self.ended else ''})")

    # ---- what an engine reads

    @property
    def read_in_progress(self) -> bool:
        """True while pages of the host tier are being loaded, on any rank; the sequence must not run then."""
        return self.read_in is not None

    @property
    def reserved(self) -> int:
        """Pages of the first label that are promised and not opened yet."""
        return self._main.reserved

    @property
    def promised(self) -> int:
        """Pages of the first label that it owns or has reserved."""
        return self._main.promised

    @property
    def page_indices(self) -> Pages:
        """Page ids of the first label in order, int32 [pages]. Valid until the next call on this sequence; not to be
        modified."""
        return self._main.table

    @property
    def owned_pages(self) -> Pages:
        """``page_indices`` and the pages behind them that truncated tokens have left, int32. Not to be modified."""
        return self._main.held

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels whose pools it has pages in."""
        return tuple(pages.ledger.label for pages in self.lists)

    def pages_of(self, label: str) -> PageList:
        """Its page table in the pool of ``label``. Raises SequenceError if it has none there."""
        for pages in self.lists:
            if pages.ledger.label == label:
                return pages
        raise SequenceError(f"sequence {self.id!r} has no pages of label {label!r}; it has {', '.join(self.labels)}")

    @property
    def seq_len(self) -> int:
        """Opened tokens: ``(pages - 1) * page_size < seq_len <= pages * page_size``."""
        return self._opened

    @property
    def committed(self) -> int:
        """Tokens whose KV is real."""
        return self._committed

    @property
    def position_id_start(self) -> int:
        """Position of the first token that is not committed, where the next forward begins."""
        return self._committed

    @property
    def named(self) -> int:
        """Tokens whose ids are known: the prompt and what was appended."""
        return len(self.chain) + len(self._names) // TOKEN_BYTES

    def tokens(self, start: int, stop: int) -> Pages:
        """A copy of the ids of named tokens ``start .. stop - 1``, int32."""
        at = len(self.chain)
        if not 0 <= start <= stop <= self.named:
            raise SequenceError(f"sequence {self.id!r} has {self.named} named tokens, not {start} .. {stop - 1}")
        behind = np.frombuffer(bytes(self._names), "<i4")
        return np.concatenate([self.chain.slice(start, min(stop, at)), behind[max(0, start - at) : max(0, stop - at)]])

    def slots(self, start: int, stop: int, label: str | None = None) -> Slots:
        """Flat slots of opened tokens ``start .. stop - 1``, int64 [stop - start], in a label's pool (None: the first).

        Raises SequenceError for others, and for tokens whose pages a window has given up.
        """
        pages = self._main if label is None else self.pages_of(label)
        size = self._books.page_size
        if self.ended or not 0 <= start <= stop <= self._opened:
            raise SequenceError(f"sequence {self.id!r} has no slots {start} .. {stop - 1}: "
                                + (f"it was {self.ended}" if self.ended else f"{self._opened} tokens are opened"))
        first, last = start // size, -(-stop // size)
        if pages.gone and first < pages.first and last > pages.protected:
            raise SequenceError(f"sequence {self.id!r} has no slots {start} .. {stop - 1} of label "
                                f"{pages.ledger.label!r}: pages {pages.protected} .. {pages.first - 1} were released")
        if first * size < stop <= (first + 1) * size:  # in one page, as a decoded token is
            shift = (int(pages.pages[first]) - first) * size
            return np.arange(shift + start, shift + stop, dtype=np.int64)
        slots = pages.pages[first:last, None] * np.int64(size) + np.arange(size)
        return slots.reshape(-1)[start - first * size : stop - first * size]

    def _must_not_fork(self) -> None:
        """Ranks may be told of the fork before or after another call: it has to begin with the same pages on all."""
        if self.forking:
            raise SequenceError(f"sequence {self.id!r} waits for its fork, which is to begin where it is now; call "
                                "again when a step has told of the children")

    def _must_run(self, call: str, count: object = 0, *, reading: bool = False) -> None:
        if not isinstance(count, (int, np.integer)):
            raise SequenceError(f"{call} takes a whole number, not {count!r}")
        if self.ended:
            raise SequenceError(f"{call} on sequence {self.id!r}, which was {self.ended}")
        if self.read_in is not None and not reading:
            raise SequenceError(f"{call} on sequence {self.id!r}, whose pages are still being read in")
