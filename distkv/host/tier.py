"""One rank's host tier: its pages, and the copies between it and the pool that are under way. Sans-IO.

The tier gives orders and hears of their ends; what moves bytes is a :class:`~distkv.host.copies.CopyEngine`. Orders are
collected and handed over together, at the latest where the engine's compute is told to wait (``fence``), so that pages
that leave one by one go in few large copies. No decision waits for a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import numpy as np

from distkv.errors import InvariantError
from distkv.host.copies import Copy, CopyEngine, CopyState, Kind
from distkv.host.pages import HostPages
from distkv.pages import Ids, PagePool

__all__ = ["HostTier", "close_all"]


class HostTier:
    """Owns the host pages and every copy from its order to its end.

    While a load writes a device page, that page is owned: by the sequence that is being read in, or, if nobody waits
    for it, by the copy (an *orphan* of an aborted request, or a *prefetch*). A store owns nothing on the device: the
    page that it reads is free at once in the books, and whoever writes it next waits for the store, by ``fence`` or,
    if it is a load, by ``Copy.after``.
    """

    def __init__(self, pages: HostPages, engine: CopyEngine, pool: PagePool, *, write_ahead: bool = False) -> None:
        """``write_ahead``: a page is stored when it enters the index, not when it is evicted."""
        self.pages = pages
        self.engine = engine
        self.write_ahead = write_ahead
        self.broken: Callable[[int], None] = lambda host: None
        """``broken(host)``: what the page holds is of no use; its entry leaves the index. Set by the index."""
        self.idle: Callable[[int], None] = lambda host: None
        """``idle(host)``: nobody has the page but the index. Set by the index."""
        self.ordered: Callable[[Copy], None] = lambda copy: None
        """``ordered(copy)``: a copy was ordered, and no byte of it has moved yet. For whoever follows the bytes."""
        self.prefetches: dict[int, Copy] = {}
        """Loads that nobody waits for yet, by host page; their device pages are owned by them, until the index has
        them. One that has ended waits here for those of the pages ahead of it."""
        self.kept: dict[str, list[int]] = {}
        """Host pages that suspended requests count on, by request id."""
        self.stores = self.loads = self.store_failures = self.load_failures = self.dropped = self.prefetched = 0
        self.given_up = 0
        self._pool = pool
        self._orders: list[Copy] = []
        self._storing: dict[int, Copy] = {}  # the store that fills a host page
        self._leaving: dict[int, Copy] = {}  # the store that reads a device page
        self._loading: set[Copy] = set()
        self._orphans: set[Copy] = set()
        self._fence: list[Copy] = []

    # ---- orders

    def store(self, device: int, host: int) -> None:
        """Copies a committed device page to a host page that was just taken. Until it ends the host page is storing."""
        copy = Copy(Kind.STORE, device, host)
        self._storing[host] = self._leaving[device] = copy
        self._orders.append(copy)
        self.stores += 1
        self.ordered(copy)

    def load(self, host: int, device: int) -> Copy:
        """Copies a host page to a device page that the caller owns. The host page has a reader until it ends."""
        leaving = self._leaving.get(device)
        copy = Copy(Kind.LOAD, device, host, after=() if leaving is None else (leaving,),
                    source=self._storing.get(host), use=self.pages.uses[host])
        self.pages.read_one(host)
        self._loading.add(copy)
        self._orders.append(copy)
        self.loads += 1
        self.ordered(copy)
        return copy

    def written_next(self, pages: Ids) -> None:
        """The engine's compute may write these device pages from the next fence on."""
        if self._leaving:
            self._fence += [copy for page in pages.tolist() if (copy := self._leaving.get(page)) is not None]

    def flush(self) -> None:
        """Hands all orders over to the copy engine: loads, and what they wait for, ahead of all other stores."""
        if not self._orders:
            return
        orders, self._orders = self._orders, []
        loads = [copy for copy in orders if copy.kind is Kind.LOAD]
        first = {other for copy in loads for other in (*copy.after, copy.source)}
        stores = [copy for copy in orders if copy.kind is Kind.STORE]
        self.engine.submit([*(s for s in stores if s in first), *loads, *(s for s in stores if s not in first)])

    def fence(self) -> None:
        """What the engine's compute launches from now on waits for the stores that read the pages it may write."""
        self.flush()
        self._fence = [copy for copy in self._fence if not copy.ended]
        if self._fence:
            self.engine.fence(self._fence)
            self._fence = []  # not before: one that was interrupted has not waited

    # ---- loads that nobody waits for

    def orphan(self, copy: Copy) -> None:
        """Whoever waited for this load is gone: its device page is the copy's own until it ends."""
        self._orphans.add(copy)

    def prefetch(self, host: int, device: int) -> None:
        """A load that nobody waits for yet. The device page, owned by the caller, is the copy's own from now on."""
        self.prefetches[host] = self.load(host, device)
        self.prefetched += 1

    def drop_prefetch(self, copy: Copy) -> None:
        """What it brings is of no use any more: its device page is free, or will be when the copy has ended."""
        del self.prefetches[copy.host]
        if copy in self._loading:
            self.orphan(copy)
        else:
            self._pool.disown(np.array([copy.device]))

    def drop_prefetches(self) -> None:
        """:meth:`drop_prefetch`, for all."""
        for copy in list(self.prefetches.values()):
            self.drop_prefetch(copy)

    def claim(self, host: int) -> Copy | None:
        """The prefetch of this host page, whose device page is the caller's from now on; None if there is none."""
        copy = self.prefetches.get(host)
        if copy is None:
            return None
        if copy.use != self.pages.uses[host]:  # it brought what the host page held before
            self.drop_prefetch(copy)
            return None
        return self.prefetches.pop(host)

    def arrived(self) -> list[Copy]:
        """Prefetches that have ended well, in the order in which they were asked for."""
        return [copy for copy in self.prefetches.values() if copy not in self._loading]

    @property
    def prefetching(self) -> bool:
        """Whether one is still under way, and not overdue."""
        return any(copy in self._loading and not copy.overdue for copy in self.prefetches.values())

    # ---- readers and keeps

    def let_go(self, hosts: Sequence[int]) -> None:
        """One reader less of each host page, none of which comes twice."""
        for host in self.pages.unread_all(hosts):
            self.idle(host)

    def forget(self, request_id: str) -> None:
        """The suspended request of this name needs its host pages no longer: it runs, or never will."""
        for host in self.kept.pop(request_id, ()):
            if self.pages.unkeep(host):
                self.idle(host)

    def forget_all(self) -> None:
        """:meth:`forget`, for every suspended request."""
        for request_id in list(self.kept):
            self.forget(request_id)

    # ---- ends

    def poll(self) -> None:
        """Takes note of copies that have ended."""
        self.flush()
        for copy in self.engine.poll():
            if copy.kind is Kind.STORE:
                self._stored(copy)
            else:
                self._loaded(copy)

    def _stored(self, copy: Copy) -> None:
        del self._storing[copy.host]
        if self._leaving.get(copy.device) is copy:
            del self._leaving[copy.device]
        idle = self.pages.stored(copy.host)
        if copy.state is CopyState.FAILED:
            self.store_failures += 1
            self.broken(copy.host)
        elif idle:
            self.idle(copy.host)

    def _loaded(self, copy: Copy) -> None:
        self._loading.discard(copy)
        if copy.state is CopyState.FAILED:
            self.load_failures += 1
            self.broken(copy.host)
            if self.prefetches.get(copy.host) is copy:
                self.drop_prefetch(copy)
        if copy in self._orphans:
            self._orphans.discard(copy)
            self._pool.disown(np.array([copy.device]))
        if self.pages.unread(copy.host):
            self.idle(copy.host)

    def close(self) -> None:
        """Waits for the copies that run, within their engine's time limit, and gives its memory back."""
        try:
            self.flush()
        finally:
            self.engine.close()

    # ---- for checks and reports

    @property
    def in_flight(self) -> int:
        """Copies that have not ended."""
        return len(self._storing) + len(self._loading)

    def owned(self) -> list[int]:
        """Device pages that copies own: each has one owner on that account."""
        return [copy.device for copy in (*self._orphans, *self.prefetches.values())]

    def readers(self) -> list[int]:
        """Host pages that running loads read, with repetition."""
        return [copy.host for copy in self._loading]

    def check(self, held: Iterable[int]) -> None:
        """The states agree with the copies under way. ``held``: host pages that a ballot reads, with repetition."""
        self.pages.check()
        readers = np.bincount(np.array([*self.readers(), *held], np.intp), minlength=self.pages.total)
        if not np.array_equal(readers, self.pages.readers()):
            raise InvariantError("readers of host pages: their counts and the copies under way disagree")
        keeps = np.bincount(np.array([h for hosts in self.kept.values() for h in hosts], np.intp),
                            minlength=self.pages.total)
        if not np.array_equal(keeps, self.pages.keeps()):
            raise InvariantError("kept host pages: their counts and the suspended requests disagree")
        if {h for h in range(self.pages.total) if self.pages.storing(h)} != set(self._storing):
            raise InvariantError("a host page is storing without a copy, or the other way round")


def close_all(tiers: Iterable[HostTier]) -> None:
    """:meth:`HostTier.close`, for each, also behind one that raises."""
    with ExitStack() as stack:
        for tier in tiers:
            stack.callback(tier.close)
