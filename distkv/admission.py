"""What becomes of a row of the ballot that was admitted: owners first, then, when all holds are gone, a sequence.

The order is the rule: own the agreed pages of all admitted requests, drop every hold, and only then open what loads are
to fill. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distkv.ballot import Row
from distkv.books import Books
from distkv.host.copies import Copy
from distkv.pages import Positions
from distkv.readin import ReadIn
from distkv.reasons import Reason
from distkv.request import RequestRecord
from distkv.sequence import Sequence

__all__ = ["Grant", "own"]


@dataclass(slots=True)
class Grant:
    """An admitted request: what this rank owns for it, and what has to be read in."""

    row: Row
    matched: int
    """Pages that every rank had on the device."""
    restorable: int
    """Pages that every rank had in either tier: what the request gets."""
    pages: Positions
    """Device pages of this rank, owned once for the request: at least ``matched``, at most ``restorable``."""
    hosts: list[int]
    """Host pages behind them, up to ``restorable``, each with a reader for the request."""

    def sequence(self, books: Books, void: bool, on_end: Callable[[Sequence], None]) -> Sequence:
        """Opens what loads have to fill, and makes the sequence. No hold is left when this is called."""
        pending = self.row.pending
        record = self._record(books, void)
        total = pending.total
        books.promise(total - len(self.pages))
        books.used(self.pages, self.hosts)
        books.index.collisions += self.row.match.collided
        read_in = None
        pages = self.pages
        if self.restorable > self.matched:
            loads = self._load(books)
            pages = np.concatenate([pages, np.array([copy.device for copy in loads], np.intp)])
            first = len(self.pages)
            read_in = ReadIn(self.matched, self.restorable, [(first + i, copy) for i, copy in enumerate(loads)])
        if books.tier is not None:
            books.tier.forget(pending.request.id)
        return Sequence(books, pending.request, pending.chain, pages, total, record, on_end, read_in)

    def _load(self, books: Books) -> list[Copy]:
        """One load for each host page; those that were prefetched are on their way already."""
        if books.tier is None or not self.hosts:
            return []
        tier = books.tier
        found = [tier.claim(host) for host in self.hosts]
        books.reserved -= sum(copy is not None for copy in found)  # what it owns is now the sequence's
        fresh = iter(books.take_for_load(found.count(None), reserved=True).tolist())
        loads = [tier.load(host, next(fresh)) if copy is None else copy
                 for host, copy in zip(self.hosts, found, strict=True)]
        tier.let_go(self.hosts)  # each load is a reader of its own
        return loads

    def _record(self, books: Books, void: bool) -> RequestRecord:
        row, size = self.row, books.page_size
        return RequestRecord(
            request_id=row.pending.request.id, prompt_tokens=len(row.pending.chain), matched=row.matched,
            restorable=len(row.match), agreed=self.restorable, cached_tokens=self.restorable * size,
            host_tokens=(self.restorable - self.matched) * size, reason=self._reason(books, void),
        )

    def _reason(self, books: Books, void: bool) -> Reason:
        match, pending, agreed = self.row.match, self.row.pending, self.restorable
        if not pending.request.read:
            return Reason.NOT_READ
        if void:
            return Reason.BUMP_OR_RESET
        if not pending.read_in:
            return Reason.LOAD_FAILED
        cap = pending.cap
        whole = (len(pending.chain) - 1) // books.page_size
        if agreed < len(match) or (cap is not None and agreed == cap < whole):
            return Reason.GROUP_MINIMUM
        return books.index.memory.explain(pending.chain, len(match), match.leaf, match.used)


def own(row: Row, matched: int, restorable: int, books: Books) -> Grant:
    """The request becomes an owner of its agreed pages, while the ballot still holds them."""
    pages = row.held[:restorable]
    books.pool.own(pages)
    hosts = row.hosts[: restorable - len(pages)]
    if hosts and books.tier is not None:
        books.tier.pages.read(np.array(hosts))
    return Grant(row, matched, restorable, pages, hosts)
