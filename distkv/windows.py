"""Labels whose running sequences give pages up: by a sliding window's layers, or when the engine says so. Sans-IO.

Here a page that a running sequence owns may come back while another one still owns it, so no request can count on
somebody else's live pages: each is promised all that its window takes, and every owner of a page counts. Only what is
protected is never given up, and counts once.
"""

from __future__ import annotations

import numpy as np

from distkv.chain import KeyChain
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

    def fork_needs(self, pages: PageList, total: int, shared: int, *, partial: bool) -> int:
        return self.promised_for(total) - pages.protected


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
        """Hangs the full pages that the sequence still has on the entries that main has of them."""
        end = min(full, main.stored)
        first = max(pages.first, pages.stored)
        if first < end:
            self.stock.recency.tick()
            self.windows.attach(chain.keys[first:end], pages.pages[first:end])
            pages.stored = end

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
        self._held: Positions = np.zeros(0, np.intp)
        self._states: dict[int, int] = {}

    def hold(self, grid: Grid, limit: int, room: int, *, read_in: bool) -> int:
        """Holds what the boundaries up to ``limit`` pages need, the longest first, as far as ``room`` goes.

        Returns how much of the room that takes. Boundaries that do not fit are not offered to the group.
        """
        ledger, base = self.ledger, self.ledger.pool.total
        wanted = np.zeros(len(self.places), np.bool_)
        taken = 0
        for number in grid.below(min(limit, len(self.places))):
            boundary = number * grid.step
            needed = slice(ledger.first_needed(boundary), boundary)
            places = self.places[needed]
            if (places == NOWHERE).any():
                continue
            on_host = places >= base
            if on_host.any() and not (read_in and ledger.worth_loading(int(on_host.sum()))):
                continue
            fresh = places[~wanted[needed] & ~on_host]
            more = ledger.pool.new_held(fresh)
            if taken + more > room:
                continue
            taken += more
            wanted[needed] = True
            self._states[number] = HOST if on_host.any() else DEVICE
        found = self.places[wanted]
        self._held, hosts = found[found < base], found[found >= base]
        ledger.hold(self._held)
        if len(hosts) and ledger.tier is not None:
            self.hosts = ledger.hosts_of(hosts)
            ledger.tier.pages.read(np.array(self.hosts))
        return taken

    def states(self, slots: int) -> list[int]:
        """What there is at each boundary of the grid: MISSING, HOST or DEVICE."""
        return [self._states.get(number, MISSING) for number in range(1, slots + 1)]

    def let_go(self) -> None:
        """Gives back its holds, in both tiers."""
        held, self._held = self._held, self._held[:0]
        if len(held):
            self.ledger.unhold(held)
        hosts, self.hosts = self.hosts, []
        if hosts and self.ledger.tier is not None:
            self.ledger.tier.let_go(hosts)


