"""Each rule of the agreement, switched off: what the negative controls run to see the simulation fail.

A rule is switched off by replacing the one function that holds it, for the length of a ``with``. Those of the host tier
are in :mod:`tests.simulation.tier_rules_off`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from distkv import agreement, rows, start
from distkv import ballot as ballots
from distkv.agreed import Agreed
from distkv.agreement import Agreement
from distkv.books import Books, Call
from distkv.entries import NO_PAGES
from distkv.errors import NoRoom
from distkv.ledger import Ledger


@contextmanager
def _patched(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    honest = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, honest)


@contextmanager
def agreed_room() -> Iterator[None]:
    """The plain minimum of the matched lengths: each rank admits by its own room and its own live pages."""
    honest = Agreement.end

    def end(self: Agreement, minimum: Any) -> Any:
        if minimum is not None and self.ballot is not None and ballots.failed_rank(minimum) is None:
            minimum = minimum.copy()
            own = ballots.encode(self.ballot, 0, self.slots)
            minimum[ballots._ROOM] = own[ballots._ROOM]
            live = slice(self.slots.rows + 2, self.slots.loads, self.slots.row_fields)
            minimum[live] = own[live]
        return honest(self, minimum)

    decide = ballots.decide

    def without_leftover(minimum: Any, slots: Any, asks: Any, growths: Any = (), *, void: bool) -> Any:
        # which would differ at once
        return replace(decide(minimum, slots, asks, growths, void=void), leftover=(0,), short=0)

    with _patched(Agreement, "end", end), _patched(ballots, "decide", without_leftover):
        yield


def cap_on_holds() -> Any:
    """Every waiting request holds all that it matched."""
    return _patched(rows, "within_room", lambda held, more, room: True)


@contextmanager
def commit_order() -> Iterator[None]:
    """Holds are dropped before the agreed pages are owned."""

    honest = agreement.own

    def own(row: Any, matched: int, restorable: int, books: Books) -> Any:
        part = row.parts[0]
        held, part.held = part.held, NO_PAGES
        books.unhold(held)
        return honest(row, matched, restorable, books)

    with _patched(agreement, "own", own):
        yield


def rolling_digest() -> Any:
    """Ranks with different histories are not noticed."""
    return _patched(ballots, "diverged", lambda minimum: False)


@contextmanager
def admitted_on_paper() -> Iterator[None]:
    """A request aborted while the ballot is in flight passes its room to the next one, on the ranks that know."""
    honest = Agreement.abort

    def abort(self: Agreement, request_id: str) -> None:
        honest(self, request_id)
        if self.ballot is not None:
            for row in self.ballot.rows:
                if row.pending.request.id == request_id:
                    row.pending.total, row.pending.needs = 0, (0,)

    with _patched(Agreement, "abort", abort):
        yield


@contextmanager
def epoch_rule() -> Iterator[None]:
    """Matches of an older epoch count at commit."""
    honest = ballots.decide

    with _patched(ballots, "decide", lambda *given, void: honest(*given, void=False)):
        yield


@contextmanager
def agreed_leftover() -> Iterator[None]:
    """Each rank grows a sequence by its own room instead of the agreed leftover."""

    def grow(self: Agreement, sequence: Any, pages: int, *, wait: bool = False) -> bool:
        if pages > self.books.room:
            raise NoRoom(pages - self.books.room, "its own room")
        sequence._grow(pages)
        return True

    with _patched(Agreement, "grow", grow):
        yield


@contextmanager
def agreed_entry() -> Iterator[None]:
    """A rank whose own pool has no room left does not enter the collective."""
    honest = Agreement.begin

    def begin(self: Agreement, message: Any) -> Any:
        vector = honest(self, message)
        if vector is not None and self.books.room == 0:
            self.give_up()
            self._began = True
            return None
        return vector

    with _patched(Agreement, "begin", begin):
        yield


@contextmanager
def no_growth_in_flight() -> Iterator[None]:
    """The leftover of the last step may be used while a ballot is in flight, which promises the same pages again."""
    honest = Agreement._new_ballot

    def new_ballot(self: Agreement) -> Any:
        left = self._leftover
        ballot = honest(self)
        self._leftover = left
        return ballot

    with (_patched(Agreement, "_new_ballot", new_ballot),
          _patched(Agreement, "leftovers", property(lambda self: self._leftover))):  # type: ignore[arg-type]
        yield


@contextmanager
def live_until_retired() -> Iterator[None]:
    """Pages of an ended sequence are free at once, although passes that use them are in flight."""

    def release(self: Books, pages: Any, reserved: int, ledger: Any = None, *protected: Any) -> None:
        self.reserved -= reserved
        self.free(pages)

    with _patched(Books, "release", release):
        yield


def equal_pools() -> Any:
    """Pools of a group in lockstep are not compared."""
    return _patched(start, "_POOL", ())  # type: ignore[arg-type]


@contextmanager
def state_in_the_digest() -> Iterator[None]:
    """In lockstep the digest has the calls alone: neither what was found nor the state of the pages."""
    honest = Books.note

    def note(self: Books, call: Any, *numbers: int, data: bytes = b"") -> None:
        if call not in (Call.FOUND, Call.STATE):
            honest(self, call, *numbers, data=data)

    with _patched(Books, "note", note):
        yield


# ---- forks


def copy_on_write() -> Any:
    """Whoever writes first into a shared tail writes into the page that all its owners read."""

    def write_tail(self: Ledger, page: int) -> int:
        self.leave_tail(page)
        return page

    return _patched(Ledger, "write_tail", write_tail)


@contextmanager
def tail_reserve() -> Iterator[None]:
    """Nothing is reserved for the copies of a shared tail."""

    def fork_needs(self: Ledger, pages: Any, total: int, shared: int, *, partial: bool) -> int:
        return total - shared

    with (_patched(Ledger, "tail_reserve", property(lambda self: 0)),  # type: ignore[arg-type]
          _patched(Ledger, "fork_needs", fork_needs)):
        yield


def tail_owners() -> Any:
    """A tail is shared, and it is not counted by how many: the second to write takes it for its own."""

    def share_tail(self: Ledger, page: int, more: int) -> None:
        self.tails[page] = 2

    return _patched(Ledger, "share_tail", share_tail)


def fork_leftover() -> Any:
    """A fork takes what the last ballot has left over, and leaves it to the next one as well."""
    honest = Agreed.fork

    def fork(self: Agreed, parent: Any, branches: Any, *, wait: bool) -> Any:
        left = self._leftover
        children = honest(self, parent, branches, wait=wait)
        self._leftover = left
        return children

    return _patched(Agreed, "fork", fork)


def parked_parents() -> Any:
    """The fork that a ballot decides on goes with its parent, on the ranks that hear of its end before the others."""
    return _patched(Agreed, "_forks_in_flight", lambda self, sequence: False)


def fence_before_copies() -> Any:
    """A tail is copied onto a page although the store that reads what was there has not ended."""

    def write_tail(self: Ledger, page: int) -> int:
        assert self.copy_page is not None
        fresh = self._take(1)
        self.copy_page(self.label, page, int(fresh[0]))
        if self.tier is not None:
            self.tier.written_next(fresh)
        self.leave_tail(page)
        self.free(np.array([page]))
        return int(fresh[0])

    return _patched(Ledger, "write_tail", write_tail)
