"""The decision as a pure function of the minimum, against what it promises, by brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distkv import Fingerprint, Request
from distkv import ballot as ballots
from distkv.ballot import NEUTRAL, Ask, Decision, Slots, Vector, decide, encode, fault
from distkv.books import Books
from distkv.chain import Namer
from distkv.pages import PagePool
from distkv.pending import Pending
from distkv.rows import Ballot, fill
from tests.core.helpers import EXAMPLES

SLOTS = Slots(4, 2)
ROW = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 8)).map(
    lambda row: (row[0], min(row[0], row[1]), max(row[0] + 1, row[2])))  # matched, live <= matched < total


def vector(room: int, rows: list[tuple[int, int]], digest: int = 5) -> Vector:
    """A ballot with these (matched, live)."""
    made = np.full(SLOTS.size, NEUTRAL, np.int64)
    made[1:4] = (digest, -digest, room)
    for i, (matched, live) in enumerate(rows):
        made[4 + 3 * i : 7 + 3 * i] = (matched, matched, live)
    return made


def decided(minimum: Vector, totals: list[int], growths: tuple[int, ...] | list[int] = (), *, void: bool) -> Decision:
    """With one label."""
    return decide(minimum, SLOTS, [Ask((total,)) for total in totals], [(pages,) for pages in growths], void=void)


@settings(max_examples=300 * EXAMPLES, deadline=None, derandomize=EXAMPLES == 1)
@given(st.integers(0, 30), st.lists(ROW, max_size=SLOTS.queue), st.booleans())
def test_one_decision(room: int, rows: list[tuple[int, int, int]], void: bool) -> None:
    totals = [total for _, _, total in rows]
    found = decided(vector(room, [(matched, live) for matched, live, _ in rows]), totals, void=void)
    needs = [total - (0 if void else live) for _, live, total in rows]
    n = len(found.admitted)
    assert found.admitted == tuple((0, 0) if void else (matched, matched) for matched, _, _ in rows[:n])
    assert found.leftover[0] == room - sum(needs[:n]) >= 0
    if n < len(rows):
        assert found.short == needs[n] - found.leftover[0] > 0, "strictly in order: the first that does not fit ends it"
    else:
        assert found.short == 0


@settings(max_examples=300 * EXAMPLES, deadline=None, derandomize=EXAMPLES == 1)
@given(st.lists(st.tuples(st.integers(0, 30), st.lists(ROW, min_size=3, max_size=3)), min_size=1, max_size=4))
def test_the_minimum_fits_every_rank(ranks: list[tuple[int, list[tuple[int, int, int]]]]) -> None:
    """What the group admits, each rank could have admitted: its own room covers it, whatever the others have."""
    totals = [max(rows[i][2] for _, rows in ranks) for i in range(3)]
    minimum = np.minimum.reduce([vector(room, [(m, live) for m, live, _ in rows]) for room, rows in ranks])
    found = decided(minimum, totals, void=False)
    for room, rows in ranks:
        own = decided(vector(room, [(m, live) for m, live, _ in rows]), totals, void=False)
        assert len(found.admitted) <= len(own.admitted)
        assert found.leftover[0] <= room
        new = sum(total - live for total, (_, live, _) in zip(totals[: len(found.admitted)], rows, strict=False))
        assert new <= room
        for agreed, (matched, _, _) in zip(found.admitted, rows, strict=False):
            assert agreed[0] <= agreed[1] <= matched


def test_nothing_to_decide() -> None:
    assert decided(vector(7, []), [], void=False) == Decision((), 0, 0, (7,))
    assert decided(vector(0, [(0, 0)]), [1], void=False) == Decision((), 0, 1, (0,))


def test_those_that_grow_come_first() -> None:
    """In order of asking; while one of them waits, nothing is admitted."""
    free = vector(7, [(2, 0)])
    assert decided(free, [3], [1, 2], void=False) == Decision(((2, 2),), 2, 0, (1,))
    assert decided(free, [3], [5, 3], void=False) == Decision((), 1, 1, (2,))
    assert decided(free, [3], [8], void=False) == Decision((), 0, 1, (7,))
    assert decided(free, [3], [7], void=False) == Decision((), 1, 3, (0,))


def test_read_ins() -> None:
    """All ranks have to be done; then what counts is what all have."""
    def told(*pairs: tuple[int, int]) -> Vector:
        made = vector(1, [])
        made[4 + 3 * 4 : 4 + 3 * 4 + 2 * len(pairs)] = np.array(pairs).reshape(-1)
        return made

    minimum = np.minimum(told((1, 5), (1, 3)), told((0, 2), (1, 2)))
    assert ballots.restored(minimum, SLOTS, 2) == [None, 2]
    assert ballots.restored(minimum, SLOTS, 0) == []


def test_faults() -> None:
    assert ballots.failed_rank(vector(1, [])) is None
    failed = np.minimum.reduce([vector(1, []), fault(3, SLOTS), fault(2, SLOTS)])
    assert ballots.failed_rank(failed) == 2
    assert not ballots.diverged(failed), "a fault says nothing about the others' histories"
    assert (fault(0, SLOTS)[1:] == NEUTRAL).all()
    assert fault(0, SLOTS).shape == (SLOTS.size,) == vector(1, []).shape


@pytest.mark.parametrize("digests", [(1, 2), (0, 1), (2**62 - 1, 0), (5, 5, 6), (6, 5, 5), (2**62 - 1, 2**62 - 2)])
def test_different_digests_are_seen(digests: tuple[int, ...]) -> None:
    assert ballots.diverged(np.minimum.reduce([vector(1, [], digest) for digest in digests]))


@pytest.mark.parametrize("digest", [0, 1, 2**62 - 1])
def test_equal_digests(digest: int) -> None:
    assert not ballots.diverged(np.minimum.reduce([vector(1, [], digest)] * 3))


@pytest.mark.parametrize("digests", [(1, 2), (2**64 - 1, 2**64 - 2), (7, 7, 7)])
def test_a_digest_alone(digests: tuple[int, ...]) -> None:
    minimum = np.minimum.reduce([ballots.check(digest) for digest in digests])
    assert len(minimum) == 4 == len(fault(0))
    assert ballots.diverged(minimum) is (len(set(digests)) > 1)
    assert ballots.failed_rank(minimum) is None
    assert ballots.failed_rank(np.minimum(minimum, fault(1))) == 1


def books(pages: int = 16) -> Books:
    return Books(PagePool(pages), Namer(Fingerprint(model="m"), 2))


def stored(made: Books, tokens: list[int]) -> np.ndarray:
    """A chain in the index that nobody owns."""
    chain = made.namer.chain(tokens)
    made.promise(chain.pages)
    pages = made.take(chain.pages)
    made.store(chain, pages, 0)
    made.release(pages, 0)
    return pages


def pending(made: Books, tokens: list[int], limit: int = 0, cap: int | None = None, read: bool = True) -> Pending:
    chain = made.namer.chain(tokens)
    return Pending.of(Request(id="r", chain=chain, output_limit=limit, matched_cap=cap, read=read), chain, made)


def test_pending() -> None:
    made = books()
    for tokens, limit, total, most in (([1], 0, 1, 0), ([1, 2], 0, 1, 0), ([1, 2], 1, 2, 0), ([1, 2, 3], 0, 2, 1),
                                       ([1] * 4, 0, 2, 1), ([1] * 5, 3, 4, 2)):
        found = pending(made, tokens, limit)
        assert (found.total, found.limit) == (total, most)
    assert pending(made, [1] * 9, cap=2).limit == 2
    assert pending(made, [1] * 9, cap=99).limit == 4
    assert pending(made, [1] * 9, read=False).limit == 0


def test_encoding() -> None:
    made = books()
    pages = stored(made, [1] * 8)
    made.pool.own(pages[:1])
    ballot = Ballot(7, 0, (made.room,))
    fill(ballot, made, [pending(made, [1] * 7), pending(made, [2] * 7)])
    found = encode(ballot, (1 << 64) - 1, SLOTS)
    mask = (1 << 62) - 1
    assert found.dtype == np.int64
    assert found.tolist() == [NEUTRAL, mask, -mask, 15, 3, 3, 1, 0, 0, 0] + [NEUTRAL] * 10
    ballot.let_go()
    ballot.let_go()
    assert not made.pool.holds.any(), "and twice is once"


def test_the_cap_on_holds() -> None:
    """Holds that are not live never exceed the room; from the first row beyond it on, all are empty."""
    made = books(pages=8)
    one, two, three = [1] * 6, [2] * 4, [3] * 4
    for tokens in (one, two, three):
        stored(made, tokens)
    made.promise(3)  # room 5: one fits with 3 pages, two with 2, three not
    ballot = Ballot(1, 0, (made.room,))
    fill(ballot, made, [pending(made, [*t, 0]) for t in (one, two, three, one)])
    assert [len(row.parts[0].held) for row in ballot.rows] == [3, 2, 0, 0]
    assert [len(row.match) for row in ballot.rows] == [3, 2, 2, 3], "what was found is still told in the records"
    cold = int(np.count_nonzero(made.pool.indexed & (made.pool.owners == 0) & (made.pool.holds == 0)))
    assert made.pool.free + cold == made.reserved == 3, "what is promised can still be given"
    ballot.let_go()
    ballot = Ballot(2, 0, (made.room,))
    fill(ballot, made, [pending(made, [*t, 0]) for t in (one, one, one, two)])
    assert [len(row.parts[0].held) for row in ballot.rows] == [3, 3, 3, 2], "a page counts once"
    assert made.pool.holds.max() == 3
    ballot.let_go()
    made.pool.check()


def test_live_pages_need_no_room_to_be_held() -> None:
    made = books(pages=4)
    pages = stored(made, [1] * 8)
    made.pool.own(pages)
    ballot = Ballot(1, 0, (made.room,))
    assert ballot.rooms == (0,)
    fill(ballot, made, [pending(made, [1] * 9)])
    assert (len(ballot.rows[0].parts[0].held), ballot.rows[0].parts[0].live) == (4, 4)


def test_only_leading_live_pages_are_free_of_charge() -> None:
    """A hole in the middle: pages behind it may be live here, but the discount has to hold on every rank."""
    made = books(pages=8)
    pages = stored(made, [1] * 8)
    made.pool.own(pages[[0, 2, 3]])
    ballot = Ballot(1, 0, (made.room,))
    fill(ballot, made, [pending(made, [1] * 9)])
    assert (len(ballot.rows[0].parts[0].held), ballot.rows[0].parts[0].live) == (4, 1)
