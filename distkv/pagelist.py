"""The page table of one sequence in one label's pool. Sans-IO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from distkv.entries import NO_PAGES
from distkv.pages import Ids, Pages

if TYPE_CHECKING:
    from distkv.ledger import Ledger

__all__ = ["PageList"]

class PageList:
    """Pages by position: page ``i`` has tokens ``i * page_size`` and up. Owned and changed by its sequence.

    It owns (an owner count each) the pages of positions ``0 .. protected - 1`` and ``first .. owned - 1``; what lies
    between was given up, and only in a windowed label is there such a thing. ``filled`` is the end of what the opened
    tokens fill, ``owned`` also counts what truncated tokens have left behind them, for the next ones.
    """

    __slots__ = ("filled", "first", "ledger", "owned", "pages", "protected", "reserved", "retiring", "stored", "tail",
                 "total")

    def __init__(self, ledger: Ledger, total: int, matched: Ids, *, first: int = 0, protected: int = 0) -> None:
        """Takes over one owner count of each ``matched`` page, the first of which is at position ``first``, and what
        is still promised of a sequence of ``total`` pages."""
        self.ledger = ledger
        promised = ledger.promised_for(total)
        self.total = total
        """Pages that the sequence may come to in all, given up ones included."""
        self.pages: Pages = np.empty(max(promised, first + len(matched)), np.int32)
        """By position, as far as there is room for them: :meth:`take` makes more in a label with a window."""
        self.first = first
        self.protected = protected
        self.filled = self.owned = end = first + len(matched)
        self.pages[first:end] = matched
        self.reserved = promised - len(matched)
        """Pages promised and not opened yet."""
        self.retiring = 0
        """Pages that were given up and come back as a reservation when the passes that use them have retired."""
        self.stored = end
        """So many leading pages were in the index when they were offered last."""
        self.tail = -1
        """Position of a page that was shared, partly filled, and not written since."""

    @property
    def promised(self) -> int:
        """Pages that it owns or has reserved, or will have again."""
        return self.owned - self.gone + self.reserved + self.retiring

    @property
    def gone(self) -> int:
        """Pages that were given up, or never had: those of a match in front of a window."""
        return self.first - self.protected if self.first > self.protected else 0

    @property
    def table(self) -> Pages:
        """Page ids of the opened tokens that are there, in order, int32. Not to be modified."""
        return self._between(self.filled)

    @property
    def held(self) -> Pages:
        """``table`` and the pages behind it that truncated tokens have left. Not to be modified."""
        return self._between(self.owned)

    def _between(self, end: int) -> Pages:
        if self.first <= self.protected:
            return self.pages[:end]
        if not self.protected:
            return self.pages[self.first : end]
        return np.concatenate([self.pages[: self.protected], self.pages[self.first : end]])

    def take(self, end: int) -> None:
        """It owns pages up to position ``end`` afterwards, which it does not yet, out of its reservation."""
        more = end - self.owned
        if end > len(self.pages):  # twice as many, so that a long sequence does not copy them each time
            self.pages = np.concatenate([self.pages, np.empty(min(self.total, 2 * end) - len(self.pages), np.int32)])
        self.pages[self.owned : end] = self.ledger.take(more)
        self.owned = end
        self.reserved -= more

    def own_tail(self) -> None:
        """The :attr:`tail`, which there is, is about to be written: it is this sequence's alone afterwards."""
        page = int(self.pages[self.tail])
        if page in self.ledger.tails:
            self.pages[self.tail] = self.ledger.write_tail(page)
        at, self.tail = self.tail, -1
        if at < self.protected:
            self.ledger.protect(self.pages[at : at + 1])

    def protect(self, end: int) -> None:
        """The pages in front of position ``end`` are not given up before the end: see :attr:`protected`."""
        if end > self.protected:
            self.ledger.protect(self.pages[self.protected : min(end, self.tail) if self.tail >= 0 else end])
            self.protected = end

    @property
    def guarded(self) -> Pages:
        """The protected pages that the ledger counts as such. While a tail is shared each of its owners may have to
        copy it, so it counts for each of them and is spared for none."""
        return self.pages[: min(self.protected, self.tail) if self.tail >= 0 else self.protected]

    def shared(self, total: int, end: int) -> PageList:
        """The page table of a fork of ``total`` pages, which shares the pages in front of position ``end``.

        It owns each of them once, and what is still promised of the rest is reserved.
        """
        ledger, pages = self.ledger, self._between(end)
        ledger.pool.own(pages)
        made = PageList(ledger, total, self.pages[:end], protected=self.protected)
        made.first, made.tail = self.first, self.tail
        made.reserved = ledger.promised_for(total) - len(pages)
        made.stored = min(self.stored, end)
        ledger.promise(made.reserved)
        ledger.protect(self.guarded)
        return made

    def share_tail(self, at: int, others: Sequence[PageList]) -> None:
        """The page at position ``at``, partly filled, is shared with these forks until somebody writes to it."""
        self.ledger.share_tail(int(self.pages[at]), len(others))
        for pages in (self, *others):
            if pages.tail < 0 and at < pages.protected:
                self.ledger.unprotect(pages.pages[at : at + 1])
            pages.tail = at

    def keep(self, end: int) -> tuple[Ids, int]:
        """Gives up what no fork would share: the reservation, and the pages from position ``end`` on. Returns both."""
        spare = self.pages[end : self.owned].copy()
        self.filled = self.owned = min(self.owned, end)
        reserved, self.reserved = self.reserved, 0
        self.retiring = 0
        return spare, reserved

    def grow(self, pages: int) -> None:
        """So many more positions; what has to be promised for them is reserved."""
        before = self.ledger.promised_for(self.total)
        self.total += pages
        more = self.ledger.promised_for(self.total) - before
        self.reserved += more
        self.ledger.promise(more)

    def growth(self, pages: int) -> int:
        """Pages that :meth:`grow` would reserve."""
        return self.ledger.promised_for(self.total + pages) - self.ledger.promised_for(self.total)

    def release(self, first: int) -> Ids:
        """Gives up the pages in front of position ``first`` that are not protected, and returns them: the caller gives
        back one owner of each, and then what they were promised for, by :meth:`came_back`."""
        begin, end = max(self.first, self.protected), min(first, self.owned)
        if end <= begin:
            return NO_PAGES
        self.first = end
        self.retiring += end - begin
        return self.pages[begin:end].copy()

    def came_back(self, n: int) -> None:
        """So many pages that were given up are promised again, for the next ones to open: unless it has left."""
        if self.retiring:
            self.retiring -= n
            self.reserved += n
            self.ledger.promise(n)

    def leave(self) -> tuple[Ids, int, Ids]:
        """The sequence leaves: its pages, of which the caller gives back one owner each, its reservation, and those of
        the pages that are protected until they have been given back."""
        held, protected = self.held, self.guarded.copy()
        if self.tail >= 0 and (page := int(self.pages[self.tail])) in self.ledger.tails:
            self.ledger.leave_tail(page)
        self.tail = -1
        reserved, self.reserved = self.reserved, 0
        self.first = self.protected = self.filled = self.owned = self.retiring = 0
        return held, reserved, protected
