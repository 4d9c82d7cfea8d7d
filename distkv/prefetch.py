"""Prefetch: host pages of requests that still wait come back to the device before their turn. Sans-IO.

Local to a rank: it takes pages that this rank has promised to nobody, before the room is written into the ballot, and
what it brings is a longer match in a later one.
"""

from __future__ import annotations

from collections.abc import Sequence

from distkv.ballot import Pending
from distkv.books import Books

__all__ = ["prefetch"]


def prefetch(queue: Sequence[Pending], books: Books) -> None:
    """Starts loads for requests that have been in a ballot and did not get in.

    What the first of the queue needs is left alone, or it would have to wait longer because of it.
    """
    if books.tiered is None or books.tier is None or not queue:
        return
    need = queue[0].total
    spare = books.room - need if books.room >= need else books.room
    for pending in queue:
        if pending.ballots < 2 or not pending.read_in or spare <= 0:
            continue
        match = books.match(pending.chain, pending.limit)
        first = books.on_device(match)
        fresh = [h for h in books.tiered.hosts_of(match.pages[first:]) if h not in books.tier.prefetches]
        # what is held meanwhile, or making place could take it, cannot make place
        fresh = fresh[: max(0, spare - books.pool.new_held(match.pages[:first]))]
        if not fresh or not books.worth_loading(len(fresh)):
            continue
        spare -= len(fresh)
        books.hold(match.pages[:first])
        hosts = books.read(match.pages[first:])
        try:
            for host, device in zip(fresh, books.take_for_load(len(fresh), reserved=False).tolist(), strict=True):
                books.tier.prefetch(host, device)
        finally:
            books.unhold(match.pages[:first])
            books.tier.let_go(hosts)
