"""Prefetch: host pages of requests that still wait come back to the device before their turn. Sans-IO.

Local to a rank: it takes pages that this rank has promised to nobody, before the room is written into the ballot, and
what it brings is a longer match in a later one.
"""

from __future__ import annotations

from collections.abc import Sequence

from distkv.books import Books
from distkv.entries import Match
from distkv.pages import Ids
from distkv.pending import Pending

__all__ = ["prefetch"]


def prefetch(queue: Sequence[Pending], books: Books) -> None:
    """Starts loads for requests that have been in a ballot and did not get in.

    What the first of the queue needs is left alone, or it would have to wait longer because of it; and what requests
    ahead of one have on the device already is not taken for it, or each would bring back what the other drove out.
    """
    if books.tiered is None or books.tier is None or not queue:
        return
    under_way, need = len(books.tier.prefetches), queue[0].needs[0]
    room = books.room + under_way  # these pages come back
    spare = (room - need if room >= need else room) - under_way
    held: list[Ids] = []
    try:
        for pending in queue:
            if spare <= 0:
                return
            if 0 not in pending.labels:
                continue
            match = books.match(pending.chain, pending.limit)
            first = books.on_device(match)
            device: Ids = match.pages[:first]
            spare -= books.pool.new_held(device)
            books.hold(device)
            held.append(device)
            if pending.ballots >= 2 and pending.read_in and spare > 0:
                spare -= _load(match, first, spare, books)
    finally:
        for device in held:
            books.unhold(device)


def _load(match: Match, first: int, most: int, books: Books) -> int:
    """Loads what the match has behind its first pages, up to ``most`` of them. Returns how many loads that are."""
    assert books.tier is not None
    fresh = [h for h in books.hosts_of(match.pages[first:]) if h not in books.tier.prefetches][:most]
    if not fresh or not books.worth_loading(len(fresh)):
        return 0
    hosts = books.read(match.pages[first:])  # making place must not take them
    if not hosts:  # not worth it as a whole
        return 0
    try:
        for host, device in zip(fresh, books.take_for_load(len(fresh), reserved=False).tolist(), strict=True):
            books.tier.prefetch(host, device)
    finally:
        books.tier.let_go(hosts)
    return len(fresh)
