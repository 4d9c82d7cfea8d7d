"""Each rule of labels and windows, switched off: what the negative controls run to see the simulation fail.

As in :mod:`tests.simulation.rules_off` a rule is switched off by replacing the one function that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from distkv import ballot as ballots
from distkv.books import Books
from distkv.grid import MISSING
from distkv.pagelist import NO_PAGES
from distkv.rows import Row
from distkv.window_index import NOWHERE, WindowIndex
from distkv.windows import RollingLedger, SlidingLedger, WindowedLedger, WindowMatch
from tests.simulation.rules_off import _patched


def each_boundary_by_itself() -> Any:
    """Every rank votes for its longest boundary and all below it, as if the minimum of those were on every rank."""
    honest = WindowMatch.states

    def states(self: WindowMatch, slots: int) -> list[int]:
        mine = honest(self, slots)
        longest = max((i for i, state in enumerate(mine) if state != MISSING), default=-1)
        return [mine[longest] if i <= longest else MISSING for i in range(slots)]

    return _patched(WindowMatch, "states", states)


def whole_window() -> Any:
    """A boundary is offered if the last page of its window is there."""
    return _patched(SlidingLedger, "first_needed", lambda self, boundary: max(0, boundary - 1))


def all_sliding_labels() -> Any:
    """A boundary is offered if one of two labels has its window there."""
    def elements(self: Row, slots: int) -> list[int]:
        return [max(states) for states in zip(*(window.states(slots) for window in self.windows), strict=True)]

    return _patched(Row, "elements", elements)


@contextmanager
def no_live_discount() -> Iterator[None]:
    """What running sequences own of a window costs a request nothing."""
    honest = ballots._live

    def live(row: Row, labels: int) -> list[int]:
        found = honest(row, labels)
        for number, window in zip(row.pending.labels[len(row.parts) :], row.windows, strict=False):
            places = window.places[(window.places != NOWHERE) & (window.places < window.ledger.pool.total)]
            found[number] = int(np.count_nonzero(window.ledger.pool.owners[places]))
        return found

    with _patched(ballots, "_live", live):
        yield


def room_by_claims() -> Any:
    """Of a windowed label each live page counts once, however many own it."""
    return _patched(WindowedLedger, "room",
                    property(lambda self: self.pool.usable - self.pool.live - self.reserved))  # type: ignore[arg-type]


@contextmanager
def holds_count_live_pages() -> Iterator[None]:
    """Holding a page of a windowed label that is live takes none of the room."""
    def to_hold(self: WindowedLedger, pages: Any) -> int:
        return self.pool.new_held(pages)

    with _patched(WindowedLedger, "to_hold", to_hold), _patched(RollingLedger, "to_hold", to_hold):
        yield


def counted_free() -> Any:
    """A page that slides out of a window is free, whoever else has it."""
    honest = Books.give_up

    def give_up(self: Books, pages: Any, of: Any) -> None:
        honest(self, pages, of)
        if not self.asynchronous:
            while len(shared := pages[of.ledger.pool.owners[pages] > 0]):
                of.ledger.free(shared)

    return _patched(Books, "give_up", give_up)


def given_up_until_retired() -> Any:
    """A page that slides out of a window is free at once, although passes that use it are in flight."""
    def give_up(self: Books, pages: Any, of: Any) -> None:
        of.came_back(len(pages))
        of.ledger.free(pages)

    return _patched(Books, "give_up", give_up)


@contextmanager
def protected_until_retired() -> Iterator[None]:
    """An ended sequence protects nothing, although it has its pages until its passes have retired."""
    honest = Books.release

    def release(self: Books, pages: Any, reserved: int, ledger: Any = None, protected: Any = NO_PAGES) -> None:
        if ledger is not None:
            ledger.unprotect(protected)
        honest(self, pages, reserved, ledger)

    with _patched(Books, "release", release):
        yield


def leaves_with_its_entry() -> Any:
    """A page of a window stays when the entry of main that it hangs on has left."""
    def left(self: WindowIndex, keys: Iterable[int]) -> None:
        pass

    return _patched(WindowIndex, "left", left)


def readers_of_windows() -> Any:
    """What is promised of the host tier of a window has no reader until the commit."""
    honest = WindowMatch.hold

    def hold(self: WindowMatch, *given: Any, **named: Any) -> int:
        taken = honest(self, *given, **named)
        hosts, self.hosts = self.hosts, []
        if hosts and self.ledger.tier is not None:
            self.ledger.tier.let_go(hosts)
        return taken

    return _patched(WindowMatch, "hold", hold)
