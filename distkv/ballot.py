"""What the ranks agree on in one step: the ballot, its minimum, and the decision that follows from it.

Every rank writes one vector of int64, whose size the configuration fixes. The group takes its elementwise minimum,
and every rank decides from the minimum and from the list of requests in the ballot, never from its own pool. That
the ranks decide alike needs no two of their indexes to be equal.

===============================  =================================================  ================================
field                            each rank writes                                   after the minimum
===============================  =================================================  ================================
fault                            its rank if it could not fill the ballot           lowest rank that failed
digest, -digest                  rolling digest of every call, 62 bits              equal if minimum and maximum are
room                             room before this ballot's holds                    what the whole group can promise
matched, restorable (per row)    device match; device + host match, in pages        agreed match, agreed read-in length
live (per row)                   leading matched pages that are live                agreed discount
done, restored (per read-in)     1 if its loads ended or are overdue; pages there   all have ended; pages there on all
===============================  =================================================  ================================

Unused fields hold ``NEUTRAL``. Sans-IO: no collective here.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from distkv.books import Books, Call
from distkv.chain import KeyChain
from distkv.encoding import encode as encoded
from distkv.entries import NO_PAGES, Match
from distkv.keys import TOKEN_BYTES, tag_of
from distkv.pages import Positions
from distkv.request import Request
from distkv.sequence import Sequence

Vector = npt.NDArray[np.int64]
"""A ballot or the minimum of ballots, int64 [size]."""

NEUTRAL = np.iinfo(np.int64).max
_FAULT, _DIGEST, _MINUS_DIGEST, _ROOM, _ROWS = range(5)
_ROW_FIELDS = 3
_LOAD_FIELDS = 2
_DIGEST_MASK = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class Slots:
    """How much a ballot can say, as the configuration fixes it: it never depends on what there is to say."""

    queue: int
    """Waiting requests."""
    loading: int
    """Sequences that are being read in."""

    @property
    def size(self) -> int:
        """Number of int64 in a ballot."""
        return _ROWS + _ROW_FIELDS * self.queue + _LOAD_FIELDS * self.loading


_NO_SLOTS = Slots(0, 0)


@dataclass(slots=True, eq=False)
class Pending:
    """A request in the waiting queue."""

    request: Request
    chain: KeyChain
    total: int
    """``T``: pages for prompt and output limit."""
    tag: int
    ballots: int = 0
    """How many ballots it has been in, that in flight included."""
    aborted: bool = False
    """Aborted while the ballot was in flight: decided upon as if it were not, then let go."""
    read_in: bool = True
    """False: it takes what is on the device alone, because reading it in ended short."""

    @classmethod
    def of(cls, request: Request, chain: KeyChain, page_size: int) -> Pending:
        """The queue's entry for a new request, whose prompt ``chain`` names."""
        total = -(-(len(chain) + request.output_limit) // page_size)
        return cls(request, chain, total, tag_of(request.id))

    def note(self, books: Books) -> None:
        """Rolls the digest over everything that the others' request of this name has to have in common with it."""
        chain = self.chain
        at = chain.pages * chain.namer.page_size
        tail = bytes(chain.buffer[TOKEN_BYTES * at : TOKEN_BYTES * len(chain)])
        behind = [s for s in chain.spans if s.end > at]  # the last key has the others
        tail += encoded(*(x for s in behind for x in (s.start, s.length, s.digest, s.kind)))
        last_key = chain.keys[chain.pages - 1] if chain.pages else chain.seed
        books.note(Call.SUBMIT, self.tag, self.total, len(chain), self.limit, self.request.write, last_key, data=tail)

    @property
    def limit(self) -> int:
        """Most pages that may be matched: at least one prompt token is always left to compute.

        Rank 0's cap is from when the request was handed over, so it holds for the first ballot only.
        """
        if not self.request.read:
            return 0
        whole = (len(self.chain) - 1) // self.chain.namer.page_size
        return whole if self.cap is None else min(whole, self.cap)

    @property
    def cap(self) -> int | None:
        """Rank 0's cap, while it holds."""
        return self.request.matched_cap if self.ballots <= 1 else None


@dataclass(slots=True)
class Row:
    """One waiting request in one ballot, with what this rank found for it."""

    pending: Pending
    match: Match
    matched: int = 0
    """Pages of the match that are on the device."""
    held: Positions = field(default_factory=lambda: NO_PAGES)
    """Those of them that this rank holds: none if it is behind the cap on holds."""
    hosts: list[int] = field(default_factory=list)
    """The host pages behind them, in chain order, while this ballot is a reader of each: those worth reading in."""
    live: int = 0

    def let_go(self, books: Books) -> None:
        """Gives back its holds, in both tiers."""
        held, self.held = self.held, NO_PAGES
        if len(held):
            books.unhold(held)
        hosts, self.hosts = self.hosts, []
        if hosts and books.tier is not None:
            books.tier.let_go(hosts)


@dataclass(slots=True)
class Ballot:
    """One rank's ballot in flight, from begin to end of a step. Its holds are given back by :meth:`let_go`."""

    step: int
    generation: int
    room: int
    rows: list[Row] = field(default_factory=list)
    loads: tuple[Sequence, ...] = ()
    """The sequences that are being read in and have a slot in this ballot."""
    growths: tuple[tuple[Sequence, int], ...] = ()
    """Running sequences that asked for more pages, and how many: served before any request."""
    victims: tuple[str, ...] = ()
    """Who is to be suspended if one of them does not get them."""
    behind: tuple[Pending, ...] = ()
    """Requests of the queue behind the rows: the first of them waits for a load of its own pages."""

    def let_go(self, books: Books) -> None:
        """Gives back all holds, in both tiers."""
        for row in self.rows:
            row.let_go(books)

    @property
    def reading(self) -> list[int]:
        """Host pages of which this ballot is a reader, with repetition."""
        return [host for row in self.rows for host in row.hosts]


def within_room(held: int, more: int, room: int) -> bool:
    """The cap on holds: what is held and not live may not exceed the room, or reservations could no longer be met."""
    return held + more <= room


def fill(ballot: Ballot, books: Books, queue: AbstractSequence[Pending]) -> None:
    """Looks every request of ``queue`` up and holds what it matched, in queue order, up to the cap on holds.

    From the first request beyond the cap on, rows stay empty: it and all behind it cannot be admitted in this step
    anyway, because admission is strictly in order. If a lookup raises, ``ballot`` has what is to be let go.
    """
    held, capped = 0, False
    for pending in queue:
        match = books.match(pending.chain, pending.limit)
        row = Row(pending, match, books.on_device(match))
        ballot.rows.append(row)
        pages = match.pages[: row.matched]
        more = books.pool.new_held(pages)
        capped = capped or not within_room(held, more, ballot.room)
        if capped:
            continue
        row.live = books.pool.leading_live(pages)
        books.hold(pages)
        row.held = pages
        held += more
        if row.matched < len(match) and pending.read_in:
            row.hosts = books.read(match.pages[row.matched :])


def encode(ballot: Ballot, digest: int, slots: Slots) -> Vector:
    """The vector that this rank gives to the group."""
    vector = np.full(slots.size, NEUTRAL, np.int64)
    vector[_DIGEST] = digest & _DIGEST_MASK
    vector[_MINUS_DIGEST] = -(digest & _DIGEST_MASK)
    vector[_ROOM] = ballot.room
    for i, row in enumerate(ballot.rows):
        at = _ROWS + _ROW_FIELDS * i
        vector[at : at + _ROW_FIELDS] = (len(row.held), len(row.held) + len(row.hosts), row.live)
    for i, sequence in enumerate(ballot.loads):
        at = _ROWS + _ROW_FIELDS * slots.queue + _LOAD_FIELDS * i
        assert sequence.read_in is not None
        vector[at : at + _LOAD_FIELDS] = sequence.read_in.state
    return vector


def restored(minimum: Vector, slots: Slots, count: int) -> list[int | None]:
    """Of each of the first ``count`` read-ins: the leading pages that are there on all ranks; None: one still loads."""
    at = _ROWS + _ROW_FIELDS * slots.queue
    pairs = minimum[at : at + _LOAD_FIELDS * count].reshape(-1, _LOAD_FIELDS).tolist()
    return [pages if done else None for done, pages in pairs]


def check(digest: int) -> Vector:
    """The vector of a group in lockstep: a digest and nothing to decide."""
    vector = np.full(_NO_SLOTS.size, NEUTRAL, np.int64)
    vector[_DIGEST] = digest & _DIGEST_MASK
    vector[_MINUS_DIGEST] = -(digest & _DIGEST_MASK)
    return vector


def fault(rank: int, slots: Slots = _NO_SLOTS) -> Vector:
    """The vector of a rank that could not fill its ballot."""
    vector = np.full(slots.size, NEUTRAL, np.int64)
    vector[_FAULT] = rank
    return vector


def failed_rank(minimum: Vector) -> int | None:
    """The lowest rank that could not fill its ballot."""
    return None if minimum[_FAULT] == NEUTRAL else int(minimum[_FAULT])


def diverged(minimum: Vector) -> bool:
    """Whether the ranks' digests differ."""
    return bool(minimum[_DIGEST] != -minimum[_MINUS_DIGEST])


@dataclass(frozen=True, slots=True)
class Decision:
    """What the group decided; equal on every rank."""

    admitted: tuple[tuple[int, int], ...]
    """Agreed match and agreed read-in length, in pages, of each admitted row: rows ``0 .. len(admitted) - 1``, strictly
    in queue order."""
    grown: int
    """How many of the sequences that asked for more pages get them, in order of asking."""
    short: int
    """Pages that the next one is short of; 0 if all got what they asked for."""
    leftover: int
    """Agreed room less what was granted."""


def decide(minimum: Vector, totals: AbstractSequence[int], growths: AbstractSequence[int] = (), *,
           void: bool) -> Decision:
    """Serves growing sequences in order of asking, then rows strictly first in, first out, from the minimum alone.

    A request that uses ``T`` pages needs ``T - live`` of the room: its live pages cost nothing, its cached pages cost
    what a free page costs, on either tier. ``totals`` are the rows' T, ``growths`` the pages asked for. ``void``: a
    reset or new weights came since begin; no match counts.
    """
    room = int(minimum[_ROOM])
    for i, pages in enumerate(growths):
        if pages > room:
            return Decision((), i, pages - room, room)
        room -= pages
    admitted: list[tuple[int, int]] = []
    for i, total in enumerate(totals):
        at = _ROWS + _ROW_FIELDS * i
        matched, restorable, live = (0, 0, 0) if void else minimum[at : at + _ROW_FIELDS].tolist()
        need = total - live
        if need > room:
            return Decision(tuple(admitted), len(growths), need - room, room)
        room -= need
        admitted.append((matched, restorable))
    return Decision(tuple(admitted), len(growths), 0, room)
