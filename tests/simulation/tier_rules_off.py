"""Each rule of the host tier, switched off: see :mod:`tests.simulation.rules_off`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from distkv import ballot as ballots
from distkv import rows
from distkv.admission import Owned
from distkv.agreement import Agreement
from distkv.ballot import Decision
from distkv.books import Books
from distkv.host import pages as host_pages
from distkv.host import scripted
from distkv.host.copies import Copy
from distkv.host.pages import HostPages
from distkv.host.tier import HostTier
from distkv.pages import Ids, positions
from distkv.readin import ReadIn
from distkv.rows import Ballot
from distkv.sequence import Sequence as Running
from distkv.tiered import TieredIndex
from tests.simulation.rules_off import _patched

# ---- the order of bytes


def fence() -> Any:
    """A pass may write a device page although the store that reads it has not ended."""
    return _patched(HostTier, "written_next", lambda self, pages: None)


def spill_event() -> Any:
    """A store reads before the kernels that wrote the page have run, a load writes before those that read it have."""
    return _patched(scripted, "Rules", partial(scripted.Rules, barrier=False))


def _loads_that(**changes: Any) -> Any:
    honest = HostTier.load

    def load(self: HostTier, host: int, device: int) -> Copy:
        copy = honest(self, host, device)
        for name, value in changes.items():
            setattr(copy, name, value)
        return copy

    return _patched(HostTier, "load", load)


def load_after_spill() -> Any:
    """A load writes a device page although the store that reads it has not ended."""
    return _loads_that(after=())


def load_after_store() -> Any:
    """A load reads a host page although the store that fills it has not ended, or has failed."""
    return _loads_that(source=None)


# ---- host pages


@contextmanager
def reader_count() -> Iterator[None]:
    """A host page knows that it is read, and not by how many: the first to leave takes the mark away."""

    def read(self: HostPages, pages: Ids) -> None:
        at = positions(pages)
        self._word[at] = self._word[at] | host_pages._READER

    def unread(self: HostPages, page: int) -> bool:
        return bool(self._word_of[page] & host_pages._READERS) and self._less(page, host_pages._READER)

    def unread_all(self: HostPages, pages: Sequence[int]) -> list[int]:
        return [page for page in pages if unread(self, page)]

    with (_patched(HostPages, "read", read), _patched(HostPages, "unread", unread),
          _patched(HostPages, "read_one", lambda self, page: read(self, np.array([page]))),
          _patched(HostPages, "unread_all", unread_all), no_recount_of_readers()):
        yield


def no_recount_of_readers() -> Any:
    """So that what comes of wrong counts is seen, and not that they are wrong."""
    return _patched(HostTier, "check", lambda self, held: None)


@contextmanager
def readers_at_begin() -> Iterator[None]:
    """Host pages promised in a ballot get their reader at commit, and none from begin on."""
    honest = Ballot.let_go
    fill = rows.fill

    def filled(ballot: Ballot, books: Books, queue: Any, boundaries: int) -> None:
        fill(ballot, books, queue, boundaries)
        for row in ballot.rows:
            if row.parts[0].hosts:
                assert books.tier is not None
                books.tier.let_go(row.parts[0].hosts)

    def let_go(self: Ballot) -> None:
        for row in self.rows:
            row.parts[0].hosts = []
        honest(self)

    with _patched(rows, "fill", filled), _patched(Ballot, "let_go", let_go), no_recount_of_readers():
        yield


def same_use() -> Any:
    """What a load has brought enters the index whatever its host page holds by now."""
    return _patched(TieredIndex, "loaded", lambda self, copy: self.promote(copy.device, copy.host))


def preemption_split() -> Any:
    """Suspended requests may keep as many host pages as there are."""
    return _patched(HostPages, "may_keep", property(lambda self: self.total))  # type: ignore[arg-type]


# ---- the commit


@contextmanager
def drop_before_open() -> Iterator[None]:
    """What loads are to fill is opened while the ballot's holds are still there."""
    commit = Agreement._commit

    def committed(self: Agreement, ballot: Ballot, minimum: Any) -> Any:
        with _patched(Ballot, "let_go", lambda ballot: None):
            return commit(self, ballot, minimum)

    with _patched(Agreement, "_commit", committed):
        yield


@contextmanager
def not_indexed_while_loading() -> Iterator[None]:
    """A page that a load is to fill is in the index from its admission on."""
    honest = Owned.load

    def load(self: Owned) -> list[Copy]:
        copies = honest(self)
        for copy in copies:
            self.ledger.loaded(copy)
        return copies

    with _patched(Owned, "load", load):
        yield


@contextmanager
def generation_rule() -> Iterator[None]:
    """A reset of the host tier alone does not void the matches of the ballot in flight."""
    honest = Books.next_epoch

    def next_epoch(self: Books, weights_version: str | None, scope: Any = "all") -> None:
        honest(self, weights_version, scope)
        self.generation -= scope == "host"

    with _patched(Books, "next_epoch", next_epoch):
        yield


# ---- read-ins


@contextmanager
def nothing_from_before_a_reset() -> Iterator[None]:
    """What loads brought enters the index although the device was reset since."""
    honest = ReadIn.give_back

    def give_back(self: ReadIn, books: Books, *, current: bool) -> dict[str, list[int]]:
        return honest(self, books, current=True)

    with _patched(ReadIn, "give_back", give_back):
        yield


@contextmanager
def orphans_live() -> Iterator[None]:
    """Pages of an aborted read-in are free at once, although copies still write them."""

    def give_back(self: ReadIn, books: Books, *, current: bool) -> dict[str, list[int]]:
        if current:
            self.enter()
        return {}

    with _patched(ReadIn, "give_back", give_back):
        yield


@contextmanager
def readmission() -> Iterator[None]:
    """A read-in that ended short runs on with what has come, and gives back the rest."""
    honest = Agreement._read_in

    def read_in(self: Agreement, ballot: Ballot, minimum: Any) -> list[Running]:
        counts = ballots.restored(minimum, self.slots, len(ballot.loads))
        for sequence, pages in zip(ballot.loads, counts, strict=True):
            if pages is not None and sequence.read_in is not None and pages < sequence.read_in.pages:
                _goes_on(sequence, pages)
                sequence.read_in.pages = pages
        return honest(self, ballot, minimum)

    with _patched(Agreement, "_read_in", read_in):
        yield


def _goes_on(sequence: Running, pages: int) -> None:
    books, read_in = sequence._books, sequence.read_in
    assert read_in is not None
    surplus, main = sequence.owned_pages[pages:].copy(), sequence.lists[0]
    main.filled = main.owned = main.stored = pages
    sequence._opened = sequence._committed = sequence.cached_tokens = pages * books.page_size
    main.reserved += len(surplus)
    books.promise(len(surplus))
    writing = read_in.give_back(books, current=True).get("main", [])
    books.free(surplus[~np.isin(surplus, writing)])


@contextmanager
def agreed_wait_for_loads() -> Iterator[None]:
    """A request waits for a load of its own keys on the ranks that have to load, and not on the others."""
    honest = Agreement._being_read_in

    def being_read_in(self: Agreement, pending: Any) -> bool:
        return honest(self, pending) and any(s.read_in is not None and s.read_in.loads for s in self.loading.values())

    with _patched(Agreement, "_being_read_in", being_read_in):
        yield


# ---- growth and suspension


@contextmanager
def growth_first() -> Iterator[None]:
    """Requests are served before sequences that have to grow."""
    honest = ballots.decide

    def decide(minimum: Any, slots: Any, asks: Any, growths: Any = (), *, void: bool) -> Decision:
        found = honest(minimum, slots, asks, (), void=void)
        (room,), grown = found.leftover, 0
        for (pages,) in growths:
            if pages > room:
                break
            room, grown = room - pages, grown + 1
        return replace(found, grown=grown, leftover=(room,))

    with _patched(ballots, "decide", decide):
        yield


@contextmanager
def committed_only() -> Iterator[None]:
    """What is suspended or finished stores all pages that are opened and named, committed or not."""
    honest = Running._store

    def store(self: Running) -> None:
        committed, self._committed = self._committed, min(self._opened, len(self.chain))
        try:
            honest(self)
        finally:
            self._committed = committed

    with _patched(Running, "_store", store):
        yield
