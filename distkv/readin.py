"""Reading a sequence in: the loads that fill its pages, from its admission until all ranks have them. Sans-IO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distkv.host.copies import Copy, CopyState

if TYPE_CHECKING:
    from distkv.books import Books
    from distkv.ledger import Ledger

__all__ = ["ReadIn"]


class ReadIn:
    """This rank's loads for one sequence; there may be none, if another rank has to read.

    A page that is being loaded has one owner, the sequence, and is not in the index: what was loaded enters it when all
    ranks agree that reading has ended.
    """

    def __init__(self, first: int, pages: int, loads: Sequence[tuple[Ledger, int, Copy]]) -> None:
        """``first`` page (in the sequence) that any rank reads in, all ``pages`` that are there in the end, and which
        of them this rank loads, of each label in order."""
        self.first = first
        self.pages = pages
        self.loads = tuple(loads)

    @property
    def state(self) -> tuple[int, int]:
        """1 if all loads have ended or are overdue; how many leading pages are there, in all labels."""
        done = all(copy.ended or copy.overdue for _, _, copy in self.loads)
        there = min((at for _, at, copy in self.loads if copy.state is not CopyState.DONE), default=self.pages)
        return int(done), there

    def enter(self) -> None:
        """Pages that were loaded well enter the index, as long as those above them are there."""
        for ledger, _, copy in self.loads:
            if copy.state is CopyState.DONE:
                ledger.loaded(copy)

    def give_back(self, books: Books, *, current: bool) -> dict[str, list[int]]:
        """The sequence leaves. Returns, by label, those of its pages that copies still write, which it does not free.

        Copies that still run keep their pages until they end. Entries whose bytes did not come in time leave.
        ``current``: no reset came since it was admitted, so that what has come is of use.
        """
        if current:
            self.enter()
        writing: dict[str, list[int]] = {}
        for ledger, _, copy in self.loads:
            if not copy.ended:
                assert ledger.tier is not None
                ledger.tier.orphan(copy)
                writing.setdefault(ledger.label, []).append(copy.device)
                if copy.overdue:
                    ledger.tier.broken(copy.host)
        return writing
