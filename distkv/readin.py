"""Reading a sequence in: the loads that fill its pages, from its admission until all ranks have them. Sans-IO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from distkv.host.copies import Copy, CopyState
from distkv.pages import Ids

if TYPE_CHECKING:
    from distkv.books import Books

__all__ = ["ReadIn"]


class ReadIn:
    """This rank's loads for one sequence; there may be none, if another rank has to read.

    A page that is being loaded has one owner, the sequence, and is not in the index: what was loaded enters it when all
    ranks agree that reading has ended.
    """

    def __init__(self, first: int, pages: int, loads: Sequence[tuple[int, Copy]]) -> None:
        """``first`` page (in the sequence) that any rank reads in, all ``pages`` that are there in the end, and which
        of them this rank loads, in order."""
        self.first = first
        self.pages = pages
        self.loads = tuple(loads)

    @property
    def state(self) -> tuple[int, int]:
        """1 if all loads have ended or are overdue; how many leading pages are there."""
        done = all(copy.ended or copy.overdue for _, copy in self.loads)
        there = next((at for at, copy in self.loads if copy.state is not CopyState.DONE), self.pages)
        return int(done), there

    def enter(self, books: Books) -> None:
        """Pages that were loaded well enter the index, as long as those above them are there."""
        assert books.tiered is not None or not self.loads
        for _, copy in self.loads:
            if copy.state is CopyState.DONE and books.tiered is not None:
                books.tiered.loaded(copy)

    def give_back(self, books: Books, pages: Ids, *, current: bool) -> Ids:
        """The sequence leaves. Returns those of its ``pages`` that no copy writes any more, which it is to release.

        Copies that still run keep their pages until they end. Entries whose bytes did not come in time leave.
        ``current``: no reset came since it was admitted, so that what has come is of use.
        """
        if current:
            self.enter(books)
        writing = []
        for _, copy in self.loads:
            if not copy.ended:
                assert books.tier is not None
                books.tier.orphan(copy)
                writing.append(copy.device)
                if copy.overdue and books.tiered is not None:
                    books.tiered.host_broken(copy.host)
        return pages[~np.isin(pages, writing)] if writing else pages
