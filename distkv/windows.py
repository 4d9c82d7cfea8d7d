"""Labels whose running sequences give pages up: by a sliding window's layers, or when the engine says so. Sans-IO.

Here a page that a running sequence owns may come back while another one still owns it, so no request can count on
somebody else's live pages: each is promised all that its window takes, and every owner of a page counts. Only what is
protected is never given up, and counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence

import numpy as np

from distkv.chain import KeyChain
from distkv.entries import NO_PAGES
from distkv.errors import InvariantError
from distkv.grid import DEVICE, HOST, MISSING, Grid
from distkv.host.copies import Copy
from distkv.host.tier import HostTier
from distkv.ledger import CopyPage, Ledger
from distkv.pagelist import PageList
from distkv.pages import Ids, PagePool, Positions, positions
from distkv.window_index import NOWHERE, WindowIndex

__all__ = ["RollingLedger", "SlidingLedger", "WindowMatch", "WindowedLedger", "window_pages"]


def window_pages(tokens: int, page_size: int) -> int:
    """Most pages that a run of ``tokens`` tokens touches, wherever it begins."""
    return (tokens + page_size - 2) // page_size + 1


class WindowedLedger(Ledger):
    """A label in which a sequence has at most ``most`` pages at a time, however long it grows."""

    windowed = True

    def __init__(self, pool: PagePool, page_size: int, *, label: str, window: int, allowance: int, chunk: int,
                 tier: HostTier | None = None, copy_page: CopyPage | None = None) -> None:
        """``window``: tokens that attention reads; ``allowance``: tokens behind it that are kept as well; ``chunk``:
        most tokens that a sequence has opened and not committed."""
        super().__init__(pool, page_size, label=label, tier=tier, copy_page=copy_page)
        self.window = window
        self.allowance = allowance
        self.chunk = chunk
        self.most = window_pages(window + allowance + chunk, page_size)
        self.spared = 0
        """Owners that cost nothing, because they protect a page that another one protects."""

    @property
    def room(self) -> int:
        """Pages less one for each owner of each page, less reserved ones: each owner may give its page up alone."""
        return self.pool.usable - self.pool.claims + self.spared - self.reserved

    def promised_for(self, total: int) -> int:
        return min(total, self.most)

    @property
    def tail_reserve(self) -> int:
        """None: each owner of the tail counts, which is its page in reserve."""
        return 0

    def to_hold(self, pages: Ids) -> int:
        """Live pages count, too: if an owner gives one up while it is held, the owner is promised another one."""
        return int(np.count_nonzero(self.pool.holds[positions(pages)] == 0))

    def fork_needs(self, pages: PageList, total: int, shared: int, *, partial: bool) -> int:
        return self.promised_for(total) - min(pages.protected, shared - partial)


class SlidingLedger(WindowedLedger):
    """A label for the layers of a model that attend to the last ``window`` tokens alone.

    Its pages go with those of ``main``: a prefix can be used at a boundary if main has it and this label has the pages
    that the window covers there.
    """

    grid = True
    remedy = "commit what is opened first, or raise the label's chunk_tokens"

    def open_index(self) -> None:
        """It is there once the ledger of ``main`` is."""

    def follow(self, main: Ledger) -> None:
        self.stock = self.windows = WindowIndex(self.pool, main.index, self.tier)

    def first_needed(self, boundary: int) -> int:
        """Position of the first page that is read by what is computed behind ``boundary`` pages."""
        return max(0, boundary * self.page_size - self.window + 1) // self.page_size

    def first_kept(self, committed: int) -> int:
        return max(0, committed - self.window + 1 - self.allowance) // self.page_size

    def page_list(self, total: int, pages: Ids, first: int) -> PageList:
        return PageList(self, total, pages, first=first)

    def store_all(self, pages: PageList, chain: KeyChain, full: int, main: PageList) -> None:
        """Hangs the full pages that the sequence still has on the entries that main has of them.

        All of them: the entries may have left since they were offered last, and come back.
        """
        first, end = pages.first, min(full, main.stored)
        if first < end:
            self.windows.attach(chain.keys[first:end], pages.pages[first:end])
            pages.stored = end

    def used(self, pages: Ids, hosts: AbstractSequence[int] = ()) -> None:
        self.windows.touch([*positions(pages).tolist(), *(host + self.pool.total for host in hosts)])

    def loaded(self, copy: Copy) -> bool:
        return self.windows.loaded(copy)

    def forget(self, scope: str) -> None:
        if scope == "host":
            self.windows.forget_host()
        elif scope == "device" and self.tier is not None:
            self.windows.forget_device()
        else:
            self.windows.clear()


class RollingLedger(WindowedLedger):
    """A label whose sequences are told what to protect and what to release, by the engine.

    What is stored, and found, is the protected run at the beginning. Whoever matches it protects it from then on.
    """

    remedy = "release_oldest first"

    def __init__(self, pool: PagePool, page_size: int, *, label: str, window: int, allowance: int, chunk: int,
                 tier: HostTier | None = None, copy_page: CopyPage | None = None) -> None:
        super().__init__(pool, page_size, label=label, window=window, allowance=allowance, chunk=chunk, tier=tier,
                         copy_page=copy_page)
        self.protectors = np.zeros(pool.total, np.int32)
        """Sequences that protect each page, int32 [pages]."""

    def protect(self, pages: Ids) -> None:
        """One more sequence, an owner of each page, will not give it up before its end."""
        at = positions(pages)
        self.spared += int(np.count_nonzero(self.protectors[at]))
        self.protectors[at] += 1

    def unprotect(self, pages: Ids) -> None:
        """One less."""
        at = positions(pages)
        self.protectors[at] -= 1
        self.spared -= int(np.count_nonzero(self.protectors[at]))

    def to_hold(self, pages: Ids) -> int:
        at = positions(pages)
        return int(np.count_nonzero((self.pool.holds[at] == 0) & (self.protectors[at] == 0)))

    def check_protected(self, pages: AbstractSequence[Ids]) -> None:
        protectors = np.bincount(positions(np.concatenate([*pages, NO_PAGES])), minlength=self.pool.total)
        spared = int(np.maximum(protectors - 1, 0).sum())
        if not np.array_equal(protectors, self.protectors) or spared != self.spared:
            raise InvariantError(f"label {self.label}: {self.spared} owners are spared, and the sequences protect "
                                 f"pages of which {spared} are; or another page is protected than they say")

    def leading_live(self, pages: Ids) -> int:
        """How many leading pages a running sequence protects."""
        protected = self.protectors[positions(pages)] > 0
        return len(protected) if protected.all() else int((~protected).argmax())

    def page_list(self, total: int, pages: Ids, first: int) -> PageList:
        self.protect(pages)
        return PageList(self, total, pages, protected=len(pages))

    def store_all(self, pages: PageList, chain: KeyChain, full: int, main: PageList) -> None:
        n = min(full, pages.protected)
        if n:
            pages.stored = self.store(chain, pages.pages[:n], min(pages.stored, n))


class WindowMatch:
    """What one rank has of a sliding label for one waiting request, and holds while the ballot is in flight."""

    def __init__(self, ledger: SlidingLedger, keys: list[int]) -> None:
        """``keys``: of the entries of the main index that the request matches on this rank, verified there."""
        self.ledger = ledger
        self.places: Positions = ledger.windows.places(keys)
        self.hosts: list[int] = []
        """Host pages that the ballot is a reader of, each once."""
        self._held: Positions = NO_PAGES
        self._states: dict[int, int] = {}

    def hold(self, grid: Grid, limit: int, room: int, *, read_in: bool) -> int:
        """Holds what the boundaries up to ``limit`` pages need, the longest first, as far as ``room`` goes.

        Returns how much of the room that takes. Boundaries that do not fit are not offered to the group.
        """
        ledger, base = self.ledger, self.ledger.pool.total
        wanted = np.zeros(len(self.places), np.bool_)
        taken = 0
        for number, needed, on_host in self._complete(grid, limit):
            if on_host and not (read_in and ledger.worth_loading(on_host)):
                continue
            places = self.places[needed]
            more = ledger.to_hold(places[~wanted[needed] & (places < base)])
            if taken + more > room:
                continue
            taken += more
            wanted[needed] = True
            self._states[number] = HOST if on_host else DEVICE
        found = self.places[wanted]
        held, on_hosts = found[found < base], found[found >= base]
        ledger.hold(held)
        self._held = held  # not before: if it fails, there is nothing to let go
        if len(on_hosts):
            self.hosts = ledger.more_readers(on_hosts)
        return taken

    def _complete(self, grid: Grid, limit: int) -> Iterator[tuple[int, slice, int]]:
        """The boundaries of which every page is somewhere, the longest first: number, pages, and how many of these are
        on the host alone."""
        places, ledger = self.places, self.ledger
        missing = np.concatenate([[0], np.cumsum(places == NOWHERE)])
        hosts = np.concatenate([[0], np.cumsum(places >= ledger.pool.total)])
        for number in grid.below(min(limit, len(places))):
            end = grid.boundary(number)
            first = ledger.first_needed(end)
            if missing[end] == missing[first]:
                yield number, slice(first, end), int(hosts[end] - hosts[first])

    def states(self, slots: int) -> list[int]:
        """What there is at each boundary of the grid: MISSING, HOST or DEVICE."""
        return [self._states.get(number, MISSING) for number in range(1, slots + 1)]

    def let_go(self) -> None:
        """Gives back its holds, in both tiers."""
        held, self._held = self._held, NO_PAGES
        hosts, self.hosts = self.hosts, []
        self.ledger.let_go(held, hosts)


