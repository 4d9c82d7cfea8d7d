"""The books of one label's pool: its pages, what is stored in them, and what of them is promised. Sans-IO."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence
from typing import Protocol

import numpy as np

from distkv.chain import KeyChain
from distkv.entries import Match
from distkv.errors import NoRoom
from distkv.host.copies import Copy
from distkv.host.tier import HostTier
from distkv.index import PrefixIndex
from distkv.keeping import KeepingIndex
from distkv.pagelist import PageList
from distkv.pages import Ids, PagePool, Pages, positions
from distkv.policy import LeastRecent
from distkv.recount import recount

__all__ = ["MAIN", "CopyPage", "Ledger"]

MAIN = "main"
"""The label that every cache has."""

CopyPage = Callable[[str, int, int], None]
"""``copy_page(label, source, target)``: copies one page's bytes onto another page of the label's pool, all layers, in
the order of what the engine's compute does with them."""


class Stock(Protocol):
    """What every index of a label is to its ledger."""

    recency: LeastRecent
    stored: int
    evicted: int
    cascades: int
    collisions: int

    def __len__(self) -> int: ...
    def evict(self, n: int) -> int: ...
    def offer(self, pages: Ids) -> None: ...
    def check(self) -> None: ...


class Ledger:
    """What one label has on this rank. Owns pool, index, tier and reservations; knows nothing of other ranks.

    ``room`` is what this rank can still promise: pages - live - reserved - the reserves of shared tails. As long as
    every promise came out of it, ``take`` inside a reservation cannot fail: free and cached-only pages are at least
    the reserved ones, whatever the index holds, and holds are kept within the room by the agreement.

    A *tail* is a partly filled page that several sequences share after a fork. With s owners it carries s - 1 reserved
    pages, one for each owner but the last to write: whoever writes first takes one of them and copies, and an owner
    that leaves gives one back.
    """

    windowed = False
    """Whether running sequences give pages up."""
    grid = False
    """Whether a prefix can be used at the boundaries of a grid only."""
    remedy = ""
    """What to do if a sequence has no page left to open."""

    def __init__(self, pool: PagePool, page_size: int, *, label: str = MAIN, tier: HostTier | None = None,
                 copy_page: CopyPage | None = None) -> None:
        self.label = label
        self.pool = pool
        self.page_size = page_size
        self.tier = tier
        self.copy_page = copy_page
        self.index: PrefixIndex
        """What is found by its prefix. A label of sliding layers has none of its own."""
        self.stock: Stock
        """What is stored, and may be evicted."""
        self.tiered: KeepingIndex | None = None
        """The index, if it has two tiers."""
        self.open_index()
        self.reserved = 0
        self.tails: dict[int, int] = {}
        """Owners of each shared tail, two or more."""
        self.prefill_s_per_token: float | None = None
        """What computing a token of a prompt takes, as the engine has measured; None: unknown, every load is made."""

    @property
    def tail_reserve(self) -> int:
        """Pages reserved for the writers of shared tails."""
        return sum(self.tails.values()) - len(self.tails) if self.tails else 0

    @property
    def room(self) -> int:
        """Pages that are neither live nor reserved."""
        return self.pool.usable - self.pool.live - self.reserved - self.tail_reserve

    def open_index(self) -> None:
        """Makes the empty index."""
        if self.tier is None:
            self.stock = self.index = PrefixIndex(self.pool, self.page_size)
        else:
            self.stock = self.index = self.tiered = KeepingIndex(self.pool, self.page_size, self.tier)

    def page_list(self, total: int, pages: Ids, first: int) -> PageList:
        """The page table of a sequence of ``total`` pages that has these, of which the caller owns each once."""
        return PageList(self, total, pages)

    def follow(self, main: Ledger) -> None:
        """Told once of the ledger of the first label, when all are there."""

    def first_kept(self, committed: int) -> int:
        """Position of the first page that a sequence keeps when so many tokens are committed: here all."""
        return 0

    def promised_for(self, total: int) -> int:
        """Pages that a sequence of ``total`` pages has to be promised."""
        return total

    def fork_needs(self, pages: PageList, total: int, shared: int, *, partial: bool) -> int:
        """Pages that a child of ``total`` pages costs, of which it shares the first ``shared`` with ``pages``.

        ``partial``: the last of them is partly filled, so one more for the copy of it.
        """
        return total - shared + partial

    def protect(self, pages: Ids) -> None:
        """One more sequence, an owner of each page, will not give it up before its end: here none does."""

    def unprotect(self, pages: Ids) -> None:
        """One less."""

    def check_protected(self, pages: AbstractSequence[Ids]) -> None:
        """What is protected, by all who protect pages. Raises InvariantError if that is counted otherwise."""

    # ---- looking

    def match(self, chain: KeyChain, limit: int) -> Match:
        """The verified match of at most ``limit`` pages, in both tiers. Changes nothing."""
        return self.index.match(chain, limit)

    def on_device(self, match: Match) -> int:
        """How many leading pages of the match are on the device."""
        return len(match) if self.tiered is None else self.tiered.on_device(match)

    def hosts_of(self, places: Ids) -> list[int]:
        """Host pages of places that are on the host alone."""
        return (positions(places) - self.pool.total).tolist()  # type: ignore[no-any-return]

    # ---- taking and giving back

    def promise(self, n: int) -> None:
        """Reserves ``n`` pages out of the room. The agreement has made sure that they are there."""
        self.reserved += n

    def take(self, n: int) -> Pages:
        """``n`` pages out of a reservation: free ones first, then evicted ones, exactly as many as are short.

        The caller owns them and lowers its reservation. Raises NoRoom, with nothing taken, if the pool cannot give
        them, which a reservation rules out.
        """
        pages = self._take(n)
        self.reserved -= n
        if self.tier is not None:
            self.tier.written_next(pages)
        return pages

    def take_for_load(self, n: int, *, reserved: bool) -> Pages:
        """:meth:`take` for pages that copies will write; ``reserved``: out of a reservation, and not of the room."""
        pages = self._take(n)
        self.reserved -= n if reserved else 0
        return pages

    def _take(self, n: int) -> Pages:
        short = n - self.pool.free
        if short > 0:
            self.stock.evict(short)
            if self.pool.free < n:
                raise NoRoom(n - self.pool.free, "opening pages inside a reservation")
        return self.pool.take(n)

    def free(self, pages: Ids) -> None:
        """One owner less of each page, which no pass uses on its account any more."""
        pages = positions(pages)
        if self.pool.disown(pages):
            self.stock.offer(pages)

    def hold(self, pages: Ids) -> None:
        """Keeps matched pages from eviction until ``unhold``."""
        self.pool.hold(pages)

    def to_hold(self, pages: Ids) -> int:
        """How much of the room holding these pages takes: nothing for those that are live, or held already."""
        return self.pool.new_held(pages)

    def unhold(self, pages: Ids) -> None:
        """Lets go of held pages; those that nobody else has may be evicted again."""
        if self.pool.unhold(pages):
            self.stock.offer(pages)

    # ---- shared tails

    def share_tail(self, page: int, more: int) -> None:
        """``more`` owners of a partly filled page, each with a page in reserve. The owners are counted apart."""
        self.tails[page] = self.tails.get(page, 1) + more

    def write_tail(self, page: int) -> int:
        """The caller, an owner of a shared tail, is about to write: its copy, which it owns instead of the page.

        Taken out of the tail's reserve, so it cannot fail. The last owner needs none and keeps the page.
        """
        assert self.copy_page is not None
        fresh = self._take(1)
        target = int(fresh[0])
        try:
            if self.tier is not None:  # the copy is the first to write there
                self.tier.written_next(fresh)
                self.tier.fence()
            self.copy_page(self.label, page, target)
        except BaseException:
            self.free(fresh)
            raise
        self.leave_tail(page)
        self.free(np.array([page]))
        return target

    def leave_tail(self, page: int) -> None:
        """One owner less of a shared tail; its reserve shrinks by one page."""
        owners = self.tails[page] - 1
        if owners > 1:
            self.tails[page] = owners
        else:
            del self.tails[page]

    # ---- the host tier

    def read(self, places: Ids) -> list[int]:
        """One more reader of each of these host places; none if reading them in would take longer than computing them.

        Returns the host pages, of which the caller lets go by ``HostTier.let_go``.
        """
        return self.more_readers(places) if self.tier is not None and self.worth_loading(len(places)) else []

    def more_readers(self, places: Ids) -> list[int]:
        """:meth:`read` in any case. There is a tier."""
        assert self.tier is not None
        hosts = self.hosts_of(places)
        self.tier.pages.read(np.array(hosts))
        return hosts

    def let_go(self, pages: Ids, hosts: AbstractSequence[int]) -> None:
        """One hold less of each of the pages, one reader less of each of the host pages, as a ballot had them."""
        if len(pages):
            self.unhold(pages)
        if hosts and self.tier is not None:
            self.tier.let_go(hosts)

    def worth_loading(self, pages: int) -> bool:
        """Whether so many pages are read in faster than they are computed, as far as either has been measured."""
        if self.prefill_s_per_token is None or self.tier is None:
            return True
        seconds = self.tier.engine.load_s(pages)
        return seconds is None or seconds <= self.prefill_s_per_token * pages * self.page_size

    def poll(self) -> None:
        """Takes note of the copies that have ended: prefetched pages are in the index from now on.

        One that is there before the page ahead of it stays with its copy, as long as another prefetch is under way.
        """
        tier, tiered = self.tier, self.tiered
        if tier is None:
            return
        tier.poll()
        if not tier.prefetches or tiered is None:
            return
        under_way = tier.prefetching
        for copy in tier.arrived():
            if tiered.loaded(copy):
                del tier.prefetches[copy.host]
                self.free(np.array([copy.device]))
            elif not under_way or not tiered.awaits(copy):
                tier.drop_prefetch(copy)

    # ---- what the index has

    def leading_live(self, pages: Ids) -> int:
        """How many leading pages cost a new owner nothing, because a running sequence has them to its end."""
        return self.pool.leading_live(pages)

    def used(self, pages: Ids, hosts: AbstractSequence[int] = ()) -> None:
        """A match was used, of device and of host pages: one hit."""
        recency = self.stock.recency
        recency.tick()
        recency.touch(pages)
        if hosts:
            recency.touch(np.array(hosts) + self.pool.total)

    def store_all(self, pages: PageList, chain: KeyChain, full: int, main: PageList) -> None:
        """Stores what of a sequence's ``full`` committed full pages belongs into the index, and notes how much is.

        ``main`` is the page table of its first label, which was stored before.
        """
        pages.stored = self.store(chain, pages.pages[:full], min(pages.stored, full))

    def loaded(self, copy: Copy) -> bool:
        """What a load has brought enters the index. False: it is of no use there."""
        return self.tiered is not None and self.tiered.loaded(copy)

    def store(self, chain: KeyChain, pages: Ids, known: int) -> int:
        """Offers committed full pages to the index as one hit. Returns how many of them are in the index now."""
        self.index.recency.tick()
        return self.index.store(chain, pages, known)

    def forget(self, scope: str) -> None:
        """Empties the index, of one tier or of both. Pages with owners, holds or readers stay with them."""
        if self.tier is not None and scope != "device":
            self.tier.forget_all()
        if scope == "host":
            if self.tiered is not None:
                self.tiered.forget_host()
            return
        if self.tier is not None:
            self.tier.drop_prefetches()  # or the device would have pages from before
        if scope == "device" and self.tiered is not None:
            self.tiered.forget_device()
        else:
            self.index.clear()

    def check(self, owned: AbstractSequence[Ids], reserved: int, reading: Iterable[int] = (),
              tails: AbstractSequence[int] = ()) -> None:
        """Every invariant of this label, recounted from scratch; see :func:`distkv.recount.recount`."""
        recount(self, owned, reserved, reading, tails)
