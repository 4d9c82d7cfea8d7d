"""The index over two tiers: cold tails leave the device for the host tier, and come back.

An entry's place is its device page or, behind the device's numbers, its host page. An entry on the device may have its
bytes on the host as well, its *backup*: then it can leave the device without a copy. Device residency is prefix-closed,
and a host page leaves leaf first, so what is indexed can always be reached.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from distkv.chain import KeyChain
from distkv.entries import CachedPrefix, Match
from distkv.errors import InvariantError
from distkv.host.copies import Copy
from distkv.host.tier import HostTier
from distkv.index import PrefixIndex
from distkv.pages import Ids, PagePool, positions
from distkv.policy import Queue
from distkv.runs import Root, Run

__all__ = ["NONE", "TieredIndex"]

NONE = -1
"""No page."""


class TieredIndex(PrefixIndex):
    """A :class:`PrefixIndex` whose cold tails go to a :class:`HostTier` instead of being dropped.

    When host pages are short, backups are given up first, which costs a copy later and no content: so the tiers add up.
    Then tails that are on the host alone, in the order of their last hit. If there is none, the page that was to be
    stored is dropped, and its descendants with it.
    """

    def __init__(self, pool: PagePool, page_size: int, tier: HostTier) -> None:
        super().__init__(pool, page_size, tier.pages.total)
        self.tier = tier
        self.base = pool.total
        self._backup = np.full(pool.total, NONE, np.int32)  # of a device page: its host page
        self._original = np.full(tier.pages.total, NONE, np.int32)  # and the other way round
        self._resident = 0
        places = self.base + tier.pages.total
        self._host_tails = Queue(places, self.recency.stamps)
        self._idle_backups = Queue(places, self.recency.stamps)
        tier.broken, tier.idle = self.host_broken, self._offer_host

    @property
    def resident(self) -> int:
        return self._resident

    def on_device(self, match: Match) -> int:
        """How many leading pages of the match are on the device."""
        if not len(match) or match.pages[-1] < self.base:
            return len(match)
        return int(np.count_nonzero(match.pages < self.base))

    def prefixes(self) -> Iterator[CachedPrefix]:
        """The longest prefixes of both tiers; together they have every entry."""
        for found in self.entries.prefixes(hosts=True):
            on_device = found.pages < self.base
            pages = np.where(on_device, found.pages, NONE)
            hosts = np.where(on_device, self._backup[pages], found.pages - self.base)
            yield found._replace(pages=pages.astype(np.int32), hosts=hosts.astype(np.int32))

    # ---- storing

    def _append(self, chain: KeyChain, pages: Ids, found: Match) -> int:
        m = super()._append(chain, pages, found)
        self._resident += m - len(found)
        if self.tier.write_ahead:
            self._write_ahead(pages[len(found) : m].tolist())
        return m

    def _adopt(self, chain: KeyChain, pages: Ids, found: Match) -> int:
        """The caller computed pages that the index has on the host alone: it takes these, and lets the host's go."""
        first = self.on_device(found)
        for position in range(first, len(found)):
            host = int(found.pages[position]) - self.base
            if not self.promote(int(pages[position]), host):
                return position
            self._drop_backup(host)  # computed in another batch: an entry has one set of bits
        found.pages = np.concatenate([found.pages[:first], positions(pages[first : len(found)])])
        return len(found)

    def promote(self, device: int, host: int) -> bool:
        """The entry that is on the host alone, in page ``host``, is on the device as well from now on: in ``device``.

        The caller owns that page, and it has the host page's bytes. False, with nothing changed: there is no such
        entry any more, the entry above it is not on the device, or the device page has an entry already.
        """
        run = self.entries.run_with(self.base + host)
        if run is None or self.entries.run_of[device] >= 0:
            return False
        offset, above = run.resident, run.parent
        if run.pages[offset] != self.base + host:
            return False
        if not (offset or isinstance(above, Root) or above.resident == len(above)):
            return False
        self._place(run, offset, device)
        self._backup[device], self._original[host] = host, device
        run.set_resident(offset + 1)
        self._resident += 1
        self.pool.enter_one(device)
        self._offer_host(host)
        return True

    def loaded(self, copy: Copy) -> bool:
        """:meth:`promote` for what a load has brought, unless its host page holds something else by now."""
        return copy.use == self.tier.pages.uses[copy.host] and self.promote(copy.device, copy.host)

    def awaits(self, copy: Copy) -> bool:
        """Whether what the load has brought may still enter, once the entry above it is on the device."""
        current = copy.use == self.tier.pages.uses[copy.host]
        return current and self.entries.run_with(self.base + copy.host) is not None

    def _place(self, run: Run, offset: int, place: int) -> None:
        """The entry's place is another one from now on; its last hit stays what it was."""
        old = run.pages[offset]
        run.pages[offset] = place
        self.entries.run_of[old] = NONE
        self.entries.run_of[place] = run.slot
        self.recency.stamp[place] = self.recency.stamp[old]

    def _write_ahead(self, pages: list[int]) -> None:
        """Stores device pages, as long as host pages can be had: they can leave later without a copy."""
        for page in pages:
            if not self.tier.pages.tier_has_room:  # nothing is given up for what is on the device anyway
                return
            host = self.tier.pages.take()
            assert host is not None
            self._backup[page], self._original[host] = host, page
            self.tier.store(page, host)

    # ---- release

    def _release_tail(self, run: Run, take: int) -> None:
        """The last ``take`` device pages go to the host tier, the first of them first; from one that cannot on, all go.

        They are free at once: the next writer of each waits for the copy that reads it.
        """
        stop = run.resident
        hosts = self._hosts_for(run.page_ids(stop - take, stop).tolist())
        if len(hosts) < take:
            self.tier.dropped += take - len(hosts)
            self._drop_subtree(run, stop - take + len(hosts))
            if not hosts:
                return
        self._demote(run, hosts)

    def _hosts_for(self, pages: list[int]) -> list[int]:
        """A host page for each device page, its backup or a new one, up to the first for which there is none."""
        tier, hosts, backups = self.tier, [], []
        for page in pages:
            host = int(self._backup[page])
            if host != NONE:
                tier.pages.read_one(host)  # or it would be given up for one of the others
                backups.append(host)
            else:
                taken = self._host_page()
                if taken is None:
                    break
                host = taken
                tier.store(page, host)
            hosts.append(host)
        for host in backups:
            if tier.pages.unread(host):
                self._offer_host(host)
        return hosts

    def _demote(self, run: Run, hosts: list[int]) -> None:
        """The last device pages of the run leave the device; these host pages have or will have their bytes."""
        for host in reversed(hosts):
            offset = run.resident - 1
            page = run.pages[offset]
            self._place(run, offset, self.base + host)
            self._backup[page] = self._original[host] = NONE
            run.set_resident(offset)
            self._resident -= 1
            self.pool.leave_one(page)
        self._offer_above(run)
        self._offer_host_tail(run)

    def _ends_at(self, run: Run | Root) -> None:
        if isinstance(run, Run) and run.resident < len(run):  # so all that has left was on the host alone
            self._offer_host_tail(run)
        else:
            super()._ends_at(run)

    # ---- the host's side of it

    def _host_page(self) -> int | None:
        """A free host page of the tier's share, if need be the coldest tail's. None if there is none to be had."""
        pages = self.tier.pages
        if not pages.tier_has_room and not self._give_up_coldest():
            return None
        return pages.take()

    def _give_up_coldest(self) -> bool:
        """One idle host page is free afterwards: a backup's, or that of a tail on the host alone. False: there is none.

        What is passed over is offered again when it becomes idle, a backup or a tail.
        """
        while (place := self._idle_backups.pop()) is not None:
            host = place - self.base
            if self.tier.pages.idle(host) and self._original[host] != NONE:
                self._drop_backup(host)
                return True
        while (place := self._host_tails.pop()) is not None:
            run = self.entries.run_with(place)
            if run is None or not self.tier.pages.idle(place - self.base):
                continue
            if not run.children and run.pages[-1] == place:
                self._drop_last(run)
                self.tier.given_up += 1
                return True
        return False

    def _offer_host(self, host: int) -> None:
        """Nobody but the index has the host page."""
        if self.tier.pages.idle(host):
            (self._host_tails if self._original[host] == NONE else self._idle_backups).push(self.base + host)

    def _offer_host_tail(self, run: Run) -> None:
        if not run.children and run.resident < len(run):
            self._offer_host(run.pages[-1] - self.base)

    def _drop_backup(self, host: int) -> None:
        self._backup[self._original[host]] = NONE
        self._original[host] = NONE
        self.tier.pages.leave(host)

    def host_broken(self, host: int) -> None:
        """The host page holds nothing of use: a backup is forgotten, an entry leaves with its descendants."""
        if not self.tier.pages.indexed(host):
            return
        if self._original[host] != NONE:
            self._drop_backup(host)
        else:
            self.drop(self.base + host)

    def _left(self, places: Ids) -> None:
        at = positions(places)
        device = at[at < self.base]
        self._resident -= len(device)
        for host in (*self._backup[device].tolist(), *(at[at >= self.base] - self.base).tolist()):
            if host != NONE:
                self._host_left(host)
        self._backup[device] = NONE
        self.pool.leave(device)

    def _left_one(self, place: int) -> None:
        if place >= self.base:
            self._host_left(place - self.base)
            return
        self._resident -= 1
        host = int(self._backup[place])
        if host != NONE:
            self._host_left(host)
            self._backup[place] = NONE
        self.pool.leave_one(place)

    def _host_left(self, host: int) -> None:
        self._original[host] = NONE
        self.tier.pages.leave(host)

    # ---- checks

    def check(self) -> None:
        super().check()
        pages, tails, backups = self.tier.pages, self._host_tails.ids(), self._idle_backups.ids()
        resident = 0
        named: set[int] = set(self._original[np.flatnonzero(self._original != NONE)].tolist())
        if named != set(np.flatnonzero(self._backup != NONE).tolist()):
            raise InvariantError("backups and their originals disagree")
        hosts = set(np.flatnonzero(self._original != NONE).tolist())
        for run in self.runs():
            resident += run.resident
            places = run.pages[run.resident :]
            if any(place < self.base for place in places):
                raise InvariantError(f"{run} has a device page behind its first host page")
            hosts.update(place - self.base for place in places)
            tail = run.pages[-1]
            if tail >= self.base and not run.children and pages.idle(tail - self.base) and tail not in tails:
                raise InvariantError(f"host page {tail - self.base}, the idle tail of {run}, is not offered")
        for host in np.flatnonzero(self._original != NONE).tolist():
            if pages.idle(host) and self.base + host not in backups:
                raise InvariantError(f"host page {host}, an idle backup, is not offered")
        if resident != self._resident:
            raise InvariantError(f"{resident} entries are on the device, counted were {self._resident}")
        if hosts != {h for h in range(pages.total) if pages.indexed(h)}:
            raise InvariantError("the host tier knows of indexed pages that the index does not have, or the reverse")
        self._host_tails.check()
        self._idle_backups.check()
