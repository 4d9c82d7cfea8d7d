"""What one rank found for the waiting requests of a ballot, and holds while the ballot is in flight. Sans-IO."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field

from distkv.books import Books
from distkv.entries import NO_PAGES, Match
from distkv.grid import Grid
from distkv.ledger import Ledger
from distkv.pages import Positions
from distkv.pending import Pending
from distkv.preemption import Growth
from distkv.sequence import Sequence
from distkv.windows import SlidingLedger, WindowMatch

__all__ = ["Ballot", "Part", "Row", "fill", "within_room"]


@dataclass(slots=True)
class Part:
    """What a row has of one label whose pages are found by their prefix."""

    ledger: Ledger
    match: Match
    matched: int = 0
    """Pages of the match that are on the device."""
    held: Positions = field(default_factory=lambda: NO_PAGES)
    """Those of them that this rank holds: none if it is behind the cap on holds."""
    hosts: list[int] = field(default_factory=list)
    """The host pages behind them, in chain order, while this ballot is a reader of each: those worth reading in."""
    live: int = 0

    def let_go(self) -> None:
        """Gives back its holds, in both tiers."""
        held, self.held = self.held, NO_PAGES
        hosts, self.hosts = self.hosts, []
        self.ledger.let_go(held, hosts)


@dataclass(slots=True)
class Row:
    """One waiting request in one ballot, with what this rank found for it in each of its labels."""

    pending: Pending
    parts: list[Part] = field(default_factory=list)
    windows: list[WindowMatch] = field(default_factory=list)
    """The window's state, for layers that have one, at the boundaries of ``grid``."""
    grid: Grid | None = None

    @property
    def match(self) -> Match:
        """That of its first label."""
        return self.parts[0].match

    @property
    def matched(self) -> int:
        """Pages that this rank has on the device, in all its labels."""
        return min(part.matched for part in self.parts)

    @property
    def held_and_hosts(self) -> tuple[int, int]:
        """Leading pages that this rank offers to the group: on the device, and in either tier."""
        if len(self.parts) == 1:
            part = self.parts[0]
            return len(part.held), len(part.held) + len(part.hosts)
        return (min(len(part.held) for part in self.parts),
                min(len(part.held) + len(part.hosts) for part in self.parts))

    def look_up(self, books: Books) -> None:
        """Finds what each label has. Changes nothing."""
        pending = self.pending
        for number in pending.labels:
            ledger = books.ledgers[number]
            if not isinstance(ledger, SlidingLedger):
                match = ledger.match(pending.chain, pending.limit)
                self.parts.append(Part(ledger, match, ledger.on_device(match)))

    def hold(self, books: Books, held: list[int], rooms: AbstractSequence[int], behind: AbstractSequence[int],
             slots: int) -> bool:
        """Holds what it found, on both tiers, if it fits into the room behind what is held already. Whether it does.

        ``behind``: what the requests behind it need of each label, for labels with a window.
        """
        pending = self.pending
        fresh = []
        for number, part in zip(pending.labels, self.parts, strict=False):
            fresh.append(part.ledger.to_hold(part.match.pages[: part.matched]))
            if not within_room(held[number], fresh[-1], rooms[number]):
                return False
        for number, part, more in zip(pending.labels, self.parts, fresh, strict=False):
            pages = part.match.pages[: part.matched]
            part.live = part.ledger.leading_live(pages)
            part.ledger.hold(pages)
            part.held = pages
            held[number] += more
            if part.matched < len(part.match) and pending.read_in:
                part.hosts = part.ledger.read(part.match.pages[part.matched :])
        if len(pending.labels) > len(self.parts):
            self._hold_windows(books, held, rooms, behind, slots)
        return True

    def _hold_windows(self, books: Books, held: list[int], rooms: AbstractSequence[int], behind: AbstractSequence[int],
                      slots: int) -> None:
        """Of the layers with a window, what is needed at the boundaries of the grid, the longest first.

        As much as it may come to own, which is enough for the longest; and more, for shorter ones, if that leaves each
        request behind it as much.
        """
        pending = self.pending
        self.grid = grid = Grid(pending.limit, slots)
        _, there = self.held_and_hosts
        for number in pending.labels[len(self.parts) :]:
            ledger = books.ledgers[number]
            assert isinstance(ledger, SlidingLedger)
            window = WindowMatch(ledger, pending.chain.keys[:there])
            self.windows.append(window)
            left = rooms[number] - held[number]
            held[number] += window.hold(grid, there, min(left, max(pending.needs[number], left - behind[number])),
                                        read_in=pending.read_in)

    def elements(self, slots: int) -> list[int]:
        """What this rank has at each boundary, in all labels with a window: one element each."""
        return [min(states) for states in zip(*(window.states(slots) for window in self.windows), strict=True)]

    def let_go(self) -> None:
        """Gives back its holds, in both tiers."""
        for part in self.parts:
            part.let_go()
        for window in self.windows:
            window.let_go()


@dataclass(slots=True)
class Ballot:
    """One rank's ballot in flight, from begin to end of a step. Its holds are given back by :meth:`let_go`."""

    step: int
    generation: int
    rooms: tuple[int, ...]
    """Room of each label."""
    rows: list[Row] = field(default_factory=list)
    loads: tuple[Sequence, ...] = ()
    """The sequences that are being read in and have a slot in this ballot."""
    growths: tuple[Growth, ...] = ()
    """What running sequences asked for, more pages or a fork: served before any request."""
    victims: tuple[str, ...] = ()
    """Who is to be suspended if one of them does not get them."""
    behind: tuple[Pending, ...] = ()
    """Requests of the queue behind the rows: the first of them waits for a load of its own pages."""

    def let_go(self) -> None:
        """Gives back all holds, in both tiers."""
        for row in self.rows:
            row.let_go()

    @property
    def reading(self) -> dict[str, list[int]]:
        """By label, the host pages of which this ballot is a reader, with repetition."""
        found: dict[str, list[int]] = {}
        for row in self.rows:
            each: Iterable[Part | WindowMatch] = (*row.parts, *row.windows)
            for part in each:
                found.setdefault(part.ledger.label, []).extend(part.hosts)
        return found


def within_room(held: int, more: int, room: int) -> bool:
    """The cap on holds: what is held and not live may not exceed the room, or reservations could no longer be met."""
    return held + more <= room


def fill(ballot: Ballot, books: Books, queue: AbstractSequence[Pending], boundaries: int = 0) -> None:
    """Looks every request of ``queue`` up and holds what it matched, in queue order, up to the cap on holds.

    From the first request beyond the cap on, rows stay empty: it and all behind it cannot be admitted in this step
    anyway, because admission is strictly in order. If a lookup raises, ``ballot`` has what is to be let go.
    ``boundaries``: places of a grid in the ballot, for labels with a window.
    """
    held, capped = [0] * len(books.ledgers), False
    behind = [sum(pending.needs[i] for pending in queue) if ledger.grid else 0
              for i, ledger in enumerate(books.ledgers)]
    for pending in queue:
        if boundaries:
            behind = [more - need for more, need in zip(behind, pending.needs, strict=True)]
        row = Row(pending)
        ballot.rows.append(row)
        row.look_up(books)
        capped = capped or not row.hold(books, held, ballot.rooms, behind, boundaries)
