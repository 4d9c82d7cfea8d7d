"""The invariants of one label, recounted from scratch. Sans-IO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from distkv.errors import InvariantError
from distkv.pages import Ids

if TYPE_CHECKING:
    from distkv.ledger import Ledger

__all__ = ["recount"]


def recount(ledger: Ledger, owned: Sequence[Ids], reserved: int, reading: Iterable[int],
            tails: Sequence[int]) -> None:
    """Every invariant of one label. Raises InvariantError.

    ``owned``: the pages of each sequence and of what retires; ``reserved``: the sum of what sequences say;
    ``reading``: the host pages that a ballot in flight reads; ``tails``: the pages that sequences share as a tail.
    """
    name = "" if ledger.label == "main" else f"label {ledger.label}: "
    ledger.pool.check()
    ledger.stock.check()
    owners = np.zeros(ledger.pool.total, np.int32)
    for pages in owned:
        np.add.at(owners, pages, 1)
    if ledger.tier is not None:
        np.add.at(owners, np.array(ledger.tier.owned(), np.intp), 1)
        ledger.tier.check(reading)
    if not np.array_equal(owners, ledger.pool.owners):
        wrong = np.flatnonzero(owners != ledger.pool.owners)
        raise InvariantError(f"{name}pages {wrong.tolist()} have other owner counts than sequences that own "
                             "them")
    if reserved != ledger.reserved:
        raise InvariantError(f"{name}reserved says {ledger.reserved}, the sequences say {reserved}")
    if ledger.room < 0:
        raise InvariantError(f"{name}room is {ledger.room}: more pages are promised than there are")
    reclaimable = int(np.count_nonzero(ledger.pool.cached()))
    held = int(np.count_nonzero(ledger.pool.held()))
    if ledger.pool.free + reclaimable + held + ledger.pool.live != ledger.pool.usable:
        raise InvariantError(f"{name}free, cached, held and live pages do not sum to the pool")
    if ledger.pool.free + reclaimable < ledger.reserved + ledger.tail_reserve:
        raise InvariantError(f"{name}free and cached pages do not cover the reservations")
    sharing = {page: n for page, n in Counter(tails).items() if n > 1}  # one: the others have left it
    if sharing != ledger.tails:
        raise InvariantError(f"{name}shared tails are counted as {ledger.tails}, the sequences say {sharing}")
    for page, sharers in ledger.tails.items():
        owners_of = int(ledger.pool.owners[page])  # more, while passes of ended ones have not retired
        if sharers > owners_of or ledger.pool.indexed[page]:
            raise InvariantError(f"{name}the tail in page {page} counts {sharers} owners, but the page has "
                                 f"{owners_of}, or is indexed")
