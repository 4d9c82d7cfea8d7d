"""What the ranks agree on in one step: the ballot, its minimum, and the decision that follows from it.

Every rank writes one vector of int64, whose size the configuration fixes. The group takes its elementwise minimum,
and every rank decides from the minimum and from the list of requests in the ballot, never from its own pool. That
the ranks decide alike needs no two of their indexes to be equal.

===============================  =================================================  ================================
field                            each rank writes                                   after the minimum
===============================  =================================================  ================================
fault                            its rank if it could not fill the ballot           lowest rank that failed
digest, -digest                  rolling digest of every call, 62 bits              equal if minimum and maximum are
room (per label)                 room before this ballot's holds                    what the whole group can promise
matched, restorable (per row)    device match; device + host match, in pages, the   agreed match, agreed read-in length
                                 minimum over the request's labels
live (per row and label)         leading matched pages that are live                agreed discount
boundaries (per row)             one element each, on an absolute grid: 0 the       the longest that no rank lacks is
                                 window's state is not there, 1 it has to be read   the hit
                                 in, 2 it is on the device
done, restored (per read-in)     1 if its loads ended or are overdue; pages there   all have ended; pages there on all
===============================  =================================================  ================================

Boundaries are there only if a label has a window. Unused fields hold ``NEUTRAL``. Sans-IO: no collective here.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distkv.grid import DEVICE, MISSING, Grid
from distkv.rows import Ballot, Row

Vector = npt.NDArray[np.int64]
"""A ballot or the minimum of ballots, int64 [size]."""

NEUTRAL = np.iinfo(np.int64).max
_FAULT, _DIGEST, _MINUS_DIGEST, _ROOM = range(4)
_LOAD_FIELDS = 2
_DIGEST_MASK = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class Slots:
    """How much a ballot can say, as the configuration fixes it: it never depends on what there is to say."""

    queue: int
    """Waiting requests."""
    loading: int
    """Sequences that are being read in."""
    labels: int = 1
    boundaries: int = 0
    """Boundaries of each waiting request; 0 without windows."""

    @property
    def rows(self) -> int:
        """Where the rows begin."""
        return _ROOM + self.labels

    @property
    def row_fields(self) -> int:
        """Elements of one row."""
        return 2 + self.labels + self.boundaries

    @property
    def loads(self) -> int:
        """Where the read-ins begin."""
        return self.rows + self.row_fields * self.queue

    @property
    def size(self) -> int:
        """Number of int64 in a ballot."""
        return self.loads + _LOAD_FIELDS * self.loading


_NO_SLOTS = Slots(0, 0)


def encode(ballot: Ballot, digest: int, slots: Slots) -> Vector:
    """The vector that this rank gives to the group."""
    vector = np.full(slots.size, NEUTRAL, np.int64)
    vector[_DIGEST] = digest & _DIGEST_MASK
    vector[_MINUS_DIGEST] = -(digest & _DIGEST_MASK)
    vector[_ROOM : slots.rows] = ballot.rooms
    at = slots.rows
    for row in ballot.rows:
        fields = [*row.held_and_hosts, *_live(row, slots.labels)]
        if slots.boundaries:
            fields += row.elements(slots.boundaries) if row.windows else [MISSING] * slots.boundaries
        vector[at : at + len(fields)] = fields
        at += slots.row_fields
    at = slots.loads
    for sequence in ballot.loads:
        assert sequence.read_in is not None
        vector[at : at + _LOAD_FIELDS] = sequence.read_in.state
        at += _LOAD_FIELDS
    return vector


def _live(row: Row, labels: int) -> list[int]:
    live = [0] * labels
    for number, part in zip(row.pending.labels, row.parts, strict=False):
        live[number] = part.live
    return live


def restored(minimum: Vector, slots: Slots, count: int) -> list[int | None]:
    """Of each of the first ``count`` read-ins: the leading pages that are there on all ranks; None: one still loads."""
    at = slots.loads
    pairs = minimum[at : at + _LOAD_FIELDS * count].reshape(-1, _LOAD_FIELDS).tolist()
    return [pages if done else None for done, pages in pairs]


def check(digest: int) -> Vector:
    """The vector of a group in lockstep: a digest and nothing to decide."""
    vector = np.full(_NO_SLOTS.size, NEUTRAL, np.int64)
    vector[_DIGEST] = digest & _DIGEST_MASK
    vector[_MINUS_DIGEST] = -(digest & _DIGEST_MASK)
    return vector


def fault(rank: int, slots: Slots | None = None) -> Vector:
    """The vector of a rank that could not fill its ballot."""
    vector = np.full((slots or _NO_SLOTS).size, NEUTRAL, np.int64)
    vector[_FAULT] = rank
    return vector


def failed_rank(minimum: Vector) -> int | None:
    """The lowest rank that could not fill its ballot."""
    return None if minimum[_FAULT] == NEUTRAL else int(minimum[_FAULT])


def diverged(minimum: Vector) -> bool:
    """Whether the ranks' digests differ."""
    return bool(minimum[_DIGEST] != -minimum[_MINUS_DIGEST])


class Ask(NamedTuple):
    """What a row asks for: the same on every rank."""

    needs: tuple[int, ...]
    """Pages of each label, before any discount."""
    grid: Grid | None = None
    """The boundaries at which a windowed prefix may be used; None: any page is one."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the group decided; equal on every rank."""

    admitted: tuple[tuple[int, int], ...]
    """Agreed match and agreed read-in length, in pages, of each admitted row: rows ``0 .. len(admitted) - 1``, strictly
    in queue order. It has to be read in on every rank if the first is smaller."""
    grown: int
    """How many of the sequences that asked for more pages get them, in order of asking."""
    short: int
    """Pages that the next one is short of, of the label that is shortest; 0 if all got what they asked for."""
    leftover: tuple[int, ...]
    """Agreed room of each label less what was granted."""


def decide(minimum: Vector, slots: Slots, asks: AbstractSequence[Ask],
           growths: AbstractSequence[tuple[int, ...]] = (), *, void: bool) -> Decision:
    """Serves growing sequences in order of asking, then rows strictly first in, first out, from the minimum alone.

    A request that uses ``T`` pages of a label needs ``T - live`` of the label's room: its live pages cost nothing, its
    cached pages cost what a free page costs, on either tier. It is admitted to all its labels or to none, with one
    length. ``growths``: pages of each label that were asked for. ``void``: a reset or new weights came since begin; no
    match counts.
    """
    rooms = tuple(minimum[_ROOM : slots.rows].tolist())
    for i, pages in enumerate(growths):
        short = short_of(pages, rooms)
        if short > 0:
            return Decision((), i, short, rooms)
        rooms = less(rooms, pages)
    admitted: list[tuple[int, int]] = []
    at = slots.rows
    for ask in asks:
        fields = [0] * slots.row_fields if void else minimum[at : at + slots.row_fields].tolist()
        at += slots.row_fields
        matched, restorable = agreed(fields, ask, slots.labels)
        needs = ask.needs
        if restorable:
            needs = tuple(max(0, need - min(live, restorable)) for need, live in zip(needs, fields[2:], strict=False))
        short = short_of(needs, rooms)
        if short > 0:
            return Decision(tuple(admitted), len(growths), short, rooms)
        rooms = less(rooms, needs)
        admitted.append((matched, restorable))
    return Decision(tuple(admitted), len(growths), 0, rooms)


def agreed(fields: list[int], ask: Ask, labels: int) -> tuple[int, int]:
    """Agreed match and read-in length of a row: with windows the longest boundary that is there on every rank."""
    matched, restorable = fields[0], fields[1]
    if ask.grid is None:
        return matched, restorable
    boundary, where = ask.grid.longest(fields[2 + labels :], restorable)
    return min(matched, boundary if where == DEVICE else boundary - 1), boundary


def short_of(needs: tuple[int, ...], rooms: tuple[int, ...]) -> int:
    """Pages that are missing of the label that is shortest, each label's need against its room; none if not above 0."""
    short: int = max(map(sub, needs, rooms))
    return short


def less(rooms: tuple[int, ...], needs: tuple[int, ...]) -> tuple[int, ...]:
    """What is left of each label's room."""
    return tuple(map(sub, rooms, needs))
