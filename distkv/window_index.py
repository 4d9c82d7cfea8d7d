"""Where the window's state of a stored prefix lies: pages of a windowed label, hung on the entries of the main index.

A page of the main index at position i and a page of this label at position i have the KV of the same tokens, in other
layers. So what is here has no tokens of its own to compare: it is found by the key of an entry that the main index has
verified, at the same position of the same chain, and it leaves with that entry. Unlike there nothing is prefix-closed:
any page may be missing. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from distkv.errors import InvariantError
from distkv.host.copies import Copy
from distkv.host.tier import HostTier
from distkv.index import PrefixIndex
from distkv.pages import Ids, PagePool, Positions, positions
from distkv.policy import LeastRecent, Queue

__all__ = ["NOWHERE", "WindowIndex"]

NOWHERE = -1
"""No place."""


class WindowIndex:
    """One owner of its pages, told to the pool by ``enter`` and ``leave``. Evicts only pages that nobody else has.

    Owned by its :class:`distkv.windows.SlidingLedger`. A place is a page of the device pool or, counted on from there,
    one of the host tier. What is evicted goes to the host, if there is one with room; an entry has one place.
    """

    def __init__(self, pool: PagePool, main: PrefixIndex, tier: HostTier | None = None) -> None:
        hosts = tier.pages.total if tier is not None else 0
        self.pool = pool
        self.tier = tier
        self.recency = LeastRecent(pool.total + hosts)
        self.stored = self.evicted = self.cascades = self.collisions = 0
        self.base = pool.total
        self._place_of: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self._hosts = Queue(pool.total + hosts, self.recency.stamps)
        main.followers.append(self)
        if tier is not None:
            tier.broken, tier.idle = self._host_broken, self._offer_host

    def __len__(self) -> int:
        return len(self._place_of)

    def places(self, keys: Sequence[int]) -> Positions:
        """The place of each of these entries of the main index, intp ``[len(keys)]``; ``NOWHERE``: it has none."""
        if not self._place_of:
            return np.full(len(keys), NOWHERE, np.intp)
        return np.fromiter((self._place_of.get(key, NOWHERE) for key in keys), np.intp, len(keys))

    def attach(self, keys: Sequence[int], pages: Ids) -> None:
        """These entries of the main index have their window pages here. The caller owns the pages; first writer wins.

        An entry whose page is on the host alone takes the device page.
        """
        entered: list[int] = []
        there: list[int] = []
        for key, page in zip(keys, pages.tolist(), strict=True):
            place = self._place_of.get(key)
            if place is None or place >= self.base:
                if page in self.key_of:  # it came from the cache, for another entry: which cannot be
                    continue
                if place is not None:
                    self._host_left(place - self.base)
                place = self._place_of[key] = page
                self.key_of[page] = key
                entered.append(page)
            there.append(place)
        self.stored += len(entered)
        if entered:
            self.pool.enter(np.array(entered, np.intp))
        self.touch(there)

    def touch(self, places: Sequence[int]) -> None:
        """One hit of these places, in the order of their positions: of a window the first page goes first, so that what
        is left is of use at the later boundaries."""
        recency = self.recency
        recency.stamp[np.array(places, np.intp)] = np.arange(recency.clock + 1, recency.clock + 1 + len(places))
        recency.clock += len(places)

    def loaded(self, copy: Copy) -> bool:
        """What a load has brought: its entry is on the device from now on. False: there is no such entry any more."""
        assert self.tier is not None
        place = self.base + copy.host
        key = self.key_of.get(place)
        if copy.use != self.tier.pages.uses[copy.host] or key is None or copy.device in self.key_of:
            return False
        self.recency.stamp[copy.device] = self.recency.stamp[place]
        self._host_left(copy.host)
        self._place_of[key] = copy.device
        self.key_of[copy.device] = key
        self.pool.enter_one(copy.device)
        return True

    # ---- release

    def offer(self, pages: Ids) -> None:
        """The caller has let go of ``pages``: those that only this index has may be evicted."""
        at = positions(pages)
        at = at[self.pool.indexed[at]]
        for page in at[self.pool.is_cold(at)].tolist() if len(at) else ():
            self.recency.offer(page)

    def evict(self, n: int) -> int:
        """Frees ``n`` pages, or all that nobody else has: the least recently hit first. Returns how many."""
        freed = 0
        while freed < n and (page := self.recency.pop()) is not None:
            if page not in self.key_of or not self.pool.cold(page):
                continue
            host = self._host_page()
            if host is None:
                self._forget(page)
            else:
                assert self.tier is not None
                self.tier.store(page, host)
                key = self.key_of.pop(page)
                self.key_of[self.base + host] = key
                self._place_of[key] = self.base + host
                self.recency.stamp[self.base + host] = self.recency.stamp[page]
                self.pool.leave_one(page)
            freed += 1
        self.evicted += freed
        return freed

    def left(self, keys: Iterable[int]) -> None:
        """These entries have left the main index, and what hangs on them leaves this one."""
        if self._place_of:
            for key in keys:
                place = self._place_of.get(key)
                if place is not None:
                    self._forget(place)

    def drop(self, page: int) -> None:
        """The entry at this place leaves."""
        if page in self.key_of:
            self._forget(page)

    def clear(self) -> None:
        """Every entry leaves."""
        for place in list(self.key_of):
            self._forget(place)
        self.recency.forget()
        self._hosts.forget()

    def forget_device(self) -> None:
        """What is on the device leaves; what is on the host stays."""
        for place in [place for place in self.key_of if place < self.base]:
            self._forget(place)

    def forget_host(self) -> None:
        """What is on the host leaves."""
        for place in [place for place in self.key_of if place >= self.base]:
            self._forget(place)

    def _forget(self, place: int) -> None:
        if place >= self.base:
            del self._place_of[self.key_of[place]]
            self._host_left(place - self.base)
            return
        del self._place_of[self.key_of.pop(place)]
        self.pool.leave_one(place)

    # ---- the host's side of it

    def _host_page(self) -> int | None:
        """A free host page, if need be the coldest one's. None if there is none to be had."""
        if self.tier is None:
            return None
        pages = self.tier.pages
        while not pages.tier_has_room:
            place = self._hosts.pop()
            if place is None:
                self.tier.dropped += 1
                return None
            if place in self.key_of and pages.idle(place - self.base):
                self._forget(place)
                self.tier.given_up += 1
        return pages.take()

    def _host_left(self, host: int) -> None:
        assert self.tier is not None
        del self.key_of[self.base + host]
        self.tier.pages.leave(host)

    def _host_broken(self, host: int) -> None:
        if self.base + host in self.key_of:
            self._forget(self.base + host)

    def _offer_host(self, host: int) -> None:
        assert self.tier is not None
        if self.tier.pages.idle(host):
            self._hosts.push(self.base + host)

    # ---- checks

    def check(self) -> None:
        """Both directions agree, pool and tier know of the pages, every cold page is offered. Raises InvariantError."""
        if {key: place for place, key in self.key_of.items()} != self._place_of:
            raise InvariantError("window pages: keys and places disagree")
        device = {place for place in self.key_of if place < self.base}
        if device != set(np.flatnonzero(self.pool.indexed).tolist()):
            raise InvariantError("the window pool knows of indexed pages that no entry has, or the reverse")
        offered = self.recency.offered()
        lost = [place for place in device if self.pool.cold(place) and place not in offered]
        if lost:
            raise InvariantError(f"window pages {lost} are cold and not offered for eviction")
        if self.tier is not None:
            pages, waiting = self.tier.pages, self._hosts.ids()
            hosts = {place - self.base for place in self.key_of if place >= self.base}
            if hosts != {host for host in range(pages.total) if pages.indexed(host)}:
                raise InvariantError("the window label's host pages and its entries disagree")
            if any(pages.idle(host) and self.base + host not in waiting for host in hosts):
                raise InvariantError("an idle host page of a window label is not offered")
            self._hosts.check()
        self.recency.check()


