"""What becomes of a row of the ballot that was admitted: owners first, then, when all holds are gone, a sequence.

The order is the rule: own the agreed pages of all admitted requests, drop every hold, and only then open what loads are
to fill. Sans-IO.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkv.books import Books
from distkv.host.copies import Copy
from distkv.ledger import Ledger
from distkv.pagelist import PageList
from distkv.pages import Positions
from distkv.readin import ReadIn
from distkv.reasons import Reason
from distkv.request import RequestRecord
from distkv.rows import Row
from distkv.sequence import Lifecycle, Sequence

__all__ = ["Grant", "Owned", "own"]


@dataclass(slots=True)
class Owned:
    """What an admitted request owns of one label on this rank."""

    ledger: Ledger
    first: int
    """Position of the first of them."""
    places: Positions
    """Places of its agreed pages: device pages, owned once for the request, and host pages, each with a reader."""
    hosts: list[int]
    """The host pages among them, in order."""

    @classmethod
    def of(cls, ledger: Ledger, first: int, places: Positions) -> Owned:
        """Takes an owner of each device page and a reader of each host page, while the ballot still holds them."""
        if ledger.tier is None or not len(places) or places.max() < ledger.pool.total:
            ledger.pool.own(places)
            return cls(ledger, first, places, [])
        on_device = places < ledger.pool.total
        ledger.pool.own(places[on_device])
        return cls(ledger, first, places, ledger.more_readers(places[~on_device]))

    def opened(self, total: int) -> tuple[PageList, list[tuple[Ledger, int, Copy]]]:
        """Its page table, with the pages that loads are to fill opened, and these loads. No hold is left by now."""
        ledger, n = self.ledger, len(self.places)
        ledger.promise(ledger.promised_for(total) - (n - len(self.hosts)))
        loads: list[tuple[Ledger, int, Copy]] = []
        pages = self.places
        if self.hosts:
            copies = self.load()
            at = np.flatnonzero(pages >= ledger.pool.total)
            pages = pages.copy()
            pages[at] = [copy.device for copy in copies]
            loads = [(ledger, self.first + i, copy) for i, copy in zip(at.tolist(), copies, strict=True)]
        return ledger.page_list(total, pages, self.first), loads

    def load(self) -> list[Copy]:
        """One load for each host page; those that were prefetched are on their way already."""
        ledger, tier = self.ledger, self.ledger.tier
        assert tier is not None
        found = [tier.claim(host) for host in self.hosts]
        ledger.reserved -= sum(copy is not None for copy in found)  # what it owns is now the sequence's
        fresh = iter(ledger.take_for_load(found.count(None), reserved=True).tolist())
        loads = [tier.load(host, next(fresh)) if copy is None else copy
                 for host, copy in zip(self.hosts, found, strict=True)]
        tier.let_go(self.hosts)  # each load is a reader of its own
        return loads


@dataclass(slots=True)
class Grant:
    """An admitted request: what this rank owns for it, and what has to be read in."""

    row: Row
    matched: int
    """Pages that every rank had on the device."""
    restorable: int
    """Pages that every rank had in either tier: what the request gets."""
    owned: list[Owned]
    """One for each of its labels."""

    def sequence(self, books: Books, void: bool, owner: Lifecycle) -> Sequence:
        """Opens what loads have to fill, and makes the sequence. No hold is left when this is called."""
        pending = self.row.pending
        record = self._record(books, void)
        lists: list[PageList] = []
        loads: list[tuple[Ledger, int, Copy]] = []
        for owned in self.owned:
            if owned.first + len(owned.places):
                devices = owned.places[owned.places < owned.ledger.pool.total] if owned.hosts else owned.places
                owned.ledger.used(devices, owned.hosts)
            pages, its = owned.opened(pending.total)
            lists.append(pages)
            loads += its
            if owned.ledger.tier is not None:
                owned.ledger.tier.forget(pending.request.id)
        read_in = ReadIn(self.matched, self.restorable, loads) if self.restorable > self.matched else None
        return Sequence(books, pending.request, pending.chain, tuple(lists), self.restorable * books.page_size, record,
                        owner, read_in)

    def _record(self, books: Books, void: bool) -> RequestRecord:
        row, size = self.row, books.page_size
        return RequestRecord(
            request_id=row.pending.request.id, prompt_tokens=len(row.pending.chain), matched=row.matched,
            restorable=min(len(part.match) for part in row.parts), agreed=self.restorable,
            cached_tokens=self.restorable * size, host_tokens=(self.restorable - self.matched) * size,
            reason=self._reason(books, void),
        )

    def _reason(self, books: Books, void: bool) -> Reason:
        row, pending, agreed = self.row, self.row.pending, self.restorable
        if not pending.request.read:
            return Reason.NOT_READ
        if void:
            return Reason.BUMP_OR_RESET
        if not pending.read_in:
            return Reason.LOAD_FAILED
        shortest = min(row.parts, key=lambda part: len(part.match))
        found = len(shortest.match)
        if row.grid is not None and agreed < found:
            mine, _ = row.grid.longest(row.elements(row.grid.count), found)
            if agreed == mine:
                return Reason.WINDOW
        cap = pending.cap
        whole = min((len(pending.chain) - 1) // books.page_size, pending.chain.pages)
        if agreed < found or (cap is not None and agreed == cap < whole):
            return Reason.GROUP_MINIMUM
        match = shortest.match
        return shortest.ledger.index.memory.explain(pending.chain, found, match.leaf, match.used)


def own(row: Row, matched: int, restorable: int, books: Books) -> Grant:
    """The request becomes an owner of its agreed pages, while the ballot still holds them."""
    owned = [Owned.of(part.ledger, 0, part.match.pages[:restorable]) for part in row.parts]
    for window in row.windows:
        first = window.ledger.first_needed(restorable)
        owned.append(Owned.of(window.ledger, first, window.places[first:restorable]))
    return Grant(row, matched, restorable, owned)
