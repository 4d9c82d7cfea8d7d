"""What a second tier costs the books: each operation beside the same one without it, by turns in one run.

Copies move nothing here and have ended when they are asked for, so that what is timed is bookkeeping alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import thread_time_ns

import numpy as np

from distkv.bench.rows import Row
from distkv.bench.timing import Sample, settled
from distkv.bench.workloads import FINGERPRINT, Conversation, MakeBooks, Sizes, store, tokens, with_tails
from distkv.books import Books
from distkv.chain import Namer
from distkv.errors import InvariantError
from distkv.host._engine import TrackedCopies
from distkv.host.copies import Copy
from distkv.host.pages import HostPages
from distkv.host.tier import HostTier
from distkv.pages import PagePool
from distkv.runs import Run
from distkv.tiered import TieredIndex

__all__ = ["InstantCopies", "rows", "tiered_books"]

WITHOUT = "without a tier"


class InstantCopies(TrackedCopies):
    """Copies that move nothing and have ended at the next poll."""

    def __init__(self) -> None:
        super().__init__()
        self._over: list[Copy] = []

    def _start(self, copies: list[Copy]) -> None:
        self._over += copies

    def _collect(self) -> Iterable[tuple[Copy, BaseException | None]]:
        over, self._over = self._over, []
        return [(copy, None) for copy in over]

    def _fence(self, copies: list[Copy]) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        """Nothing ever has to be waited for."""

    def close(self) -> None:
        """There is nothing to give back."""


def tiered_books(host_pages: int, *, write_ahead: bool = False) -> MakeBooks:
    """What makes books with a host tier of so many pages."""
    def make(pages: int, page_size: int) -> Books:
        pool = PagePool(pages)
        tier = HostTier(HostPages(host_pages), InstantCopies(), pool, write_ahead=write_ahead)
        return Books(pool, Namer(FINGERPRINT, page_size), tier=tier)

    return make


def rows(sizes: Sizes) -> Iterator[Row]:
    """Eviction into the tier, the way back, and a match that lies in both."""
    yield from _evicting(sizes)
    yield from _promoting(sizes)
    yield from _matching(sizes)


_BLOCK = 32  # calls of one kind in a row: memory that only the others touch is in the processor's caches again


def _by_turns(calls: Sequence[tuple[Callable[[], object], Callable[[], object]]], n: int) -> list[Sample]:
    """Times the first of each pair ``n`` times, by turns of some calls each; the second follows it and is not timed."""
    times: list[list[int]] = [[] for _ in calls]
    while len(times[0]) < n:
        for (call, after), mine in zip(calls, times, strict=True):
            for _ in range(min(_BLOCK, n - len(mine))):
                start = thread_time_ns()
                kept = call()
                end = thread_time_ns()
                del kept
                after()
                mine.append(end - start)
    return [Sample.of(mine) for mine in times]


def _nothing() -> None:
    pass


def _row(name: str, sample: Sample, without: Sample | None = None, note: str = "", per: int = 1) -> Row:
    value = sample.median / per
    floor = without.median / per if without is not None else None
    return Row(name=name, unit="us", value=value, sample=sample if per == 1 else None, floor=WITHOUT if without else "",
               floor_value=floor, note=note)


def _evicting(sizes: Sizes) -> Iterator[Row]:
    """One page among many tails: to a host with room, to a full one, and one that the host has already."""
    n = min(sizes.repeats * 4, sizes.tails // 2)
    pages = sizes.tails * (sizes.new // sizes.page_size)
    plain = with_tails(sizes.tails, sizes)
    roomy = with_tails(sizes.tails, sizes, make=tiered_books(pages))
    full = with_tails(sizes.tails, sizes, make=tiered_books(max(1, n // 4)))
    full.index.evict(n // 4)
    ahead = with_tails(sizes.tails, sizes, make=tiered_books(pages, write_ahead=True))
    every = (plain, roomy, full, ahead)
    ended: list[int] = []
    with settled():
        found = _by_turns([(lambda b=books: b.index.evict(1), _Ends(books, ended))  # type: ignore[misc]
                           for books in every], n)  # fmt: skip
    without, *with_tier = found
    name = f"evict one page among {sizes.tails} tails"
    yield _row(f"{name}, {WITHOUT}", without)
    for what, sample in zip(("into the tier", "into a full tier", "that the tier has"), with_tier, strict=True):
        yield _row(f"{name}, {what}", sample, without)
    yield _row("hand one spill over and note its end", Sample.of(ended), note="submit and poll; once a page")
    counts = [_tiers(roomy)[1].stores, _tiers(full)[1].stores - n // 4]
    yield Row(name="pages freed when one is short, in every tier", unit="pages", value=1, target=1, exactly=True,
              note=f"spills ordered: {counts[0]} with room, {counts[1]} with a full host")


class _Ends:
    """After an eviction: exactly one page was freed, and the copies end, in time of their own."""

    def __init__(self, books: Books, times: list[int]) -> None:
        self.books, self.times = books, times
        if books.tier is not None:
            books.tier.poll()
        self.free = books.pool.free

    def __call__(self) -> None:
        self.free += 1
        if self.books.pool.free != self.free:
            raise InvariantError(f"one page was short, and {self.books.pool.free - self.free + 1} were freed")
        if self.books.tier is not None:
            orders = self.books.tier.in_flight
            start = thread_time_ns()
            self.books.tier.poll()
            end = thread_time_ns()
            if orders:
                self.times.append(end - start)


def _promoting(sizes: Sizes) -> Iterator[Row]:
    """A page that was loaded is on the device again: runs of one page, and pages of one long run in order."""
    n = sizes.repeats
    for name, prompts, each in (("a run of one page", n, 1), (f"a run of {sizes.pages} pages", 1, sizes.pages)):
        books = tiered_books(prompts * each)(prompts * each, sizes.page_size)
        rng = np.random.default_rng(41)
        for _ in range(prompts):
            store(books, books.namer.chain(tokens(rng, each * sizes.page_size)), np.zeros(0, np.int32))
        tiered, _ = _tiers(books)
        places = [run.page_ids(0, len(run)) for run in _evicted(books, prompts * each)]
        hosts = iter(np.concatenate(places) - tiered.base)
        books.promise(prompts * each)
        device = iter(books.take(prompts * each).tolist())

        def promote(tiered: TieredIndex = tiered, hosts: Iterator[int] = hosts, device: Iterator[int] = device) -> None:
            if not tiered.promote(next(device), int(next(hosts))):
                raise InvariantError("a page that is on the host cannot be promoted: nothing to measure")

        with settled():
            [sample] = _by_turns([(promote, _nothing)], prompts * each)
        yield _row(f"promote a page of {name}", sample)


def _tiers(books: Books) -> tuple[TieredIndex, HostTier]:
    if books.tiered is None or books.tier is None:
        raise InvariantError("these books have one tier")
    return books.tiered, books.tier


def _evicted(books: Books, pages: int) -> list[Run]:
    """Evicts so many pages into the tier; the runs that the index has then."""
    books.index.evict(pages)
    _tiers(books)[1].poll()
    return books.index.runs()


def _matching(sizes: Sizes) -> Iterator[Row]:
    """The lookup of a long prompt whose second half is on the host, and what a step does with those pages."""
    limit = (sizes.prompt - 1) // sizes.page_size
    plain = Conversation(sizes)
    both = Conversation(sizes, make=tiered_books(plain.books.pool.total))
    tiered, tier = _tiers(both.books)
    books = both.books
    while tiered.on_device(books.match(both.chain, limit)) > limit // 2:
        books.index.evict(1)
    tier.poll()
    match = books.match(both.chain, limit)
    if len(match) != limit or tiered.on_device(match) != limit // 2:
        raise InvariantError("the lookup that is timed does not find half of its pages in each tier")
    places = match.pages[limit // 2 :]
    hosts = books.read(places)

    def lookup(state: Conversation) -> int:
        found = state.books.match(state.chain, limit)
        return state.books.on_device(found)

    with settled():
        without, found, read, gone = _by_turns([
            (lambda: lookup(plain), _nothing), (lambda: lookup(both), _nothing),
            (lambda: books.read(places), lambda: tier.let_go(hosts)),
            (lambda: tier.let_go(hosts), lambda: books.read(places)),
        ], sizes.repeats)  # fmt: skip
    name = f"match + page table, {sizes.turns} turns"
    yield _row(f"{name}, half of {limit} pages on the host", found, without)
    held = len(places)
    yield _row(f"readers of {held} host pages, taken", read)
    yield _row(f"readers of {held} host pages, let go", gone, note="both once a step for a request that waits")
