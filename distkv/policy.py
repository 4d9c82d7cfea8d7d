"""What to drop first: least recently used, one page at a time, leaves only."""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

from distkv.errors import InvariantError
from distkv.pages import Ids, one_by_one, positions

_PAGE_BITS = 31
_PAGE = (1 << _PAGE_BITS) - 1


class Queue:
    """Pages in the order of their last hit, each at most once. Stamps may grow behind its back: :meth:`pop` looks."""

    def __init__(self, pages: int, stamp_of: memoryview[int]) -> None:
        """``stamp_of``: when each of so many pages was last hit."""
        self._stamp_of = stamp_of
        self._queued = bytearray(pages)
        self.heap: list[int] = []  # stamp << 31 | page: one int is smaller than a pair and compared faster

    def push(self, page: int) -> None:
        """The page is in the queue, under its stamp of now if it was not there."""
        if not self._queued[page]:
            self._queued[page] = 1
            heappush(self.heap, self._stamp_of[page] << _PAGE_BITS | page)

    def pop(self) -> int | None:
        """The page with the oldest stamp, which leaves the queue; None if it is empty."""
        heap = self.heap
        while heap:
            top = heap[0]
            page = top & _PAGE
            now = self._stamp_of[page] << _PAGE_BITS | page
            if now == top:
                heappop(heap)
                self._queued[page] = 0
                return page
            heapreplace(heap, now)
        return None

    def forget(self) -> None:
        """Empties it."""
        for entry in self.heap:
            self._queued[entry & _PAGE] = 0
        self.heap.clear()

    def ids(self) -> set[int]:
        """What is in it."""
        return {entry & _PAGE for entry in self.heap}

    def check(self) -> None:
        """The heap and its flags agree. Raises InvariantError."""
        ids = self.ids()
        if len(ids) != len(self.heap) or ids != set(np.flatnonzero(np.frombuffer(self._queued, np.uint8)).tolist()):
            raise InvariantError("an eviction heap and its flags disagree")


class LeastRecent:
    """When each page was last hit, and the candidates for eviction in that order. Time is a logical clock.

    Owns one stamp per page and two queues: *tails*, the ends of runs without children, and *interiors*, cold pages
    with something below them. The index offers a page when it becomes a candidate. Queues are not kept up to date:
    the index looks at what :meth:`pop` gives, and offers it again or lets it go.
    """

    def __init__(self, pages: int) -> None:
        self.stamp: npt.NDArray[np.int64] = np.zeros(pages, np.int64)
        self.clock = 0
        self.stamps = one_by_one(self.stamp)
        """``stamp``, for one element at a time."""
        self._tails = Queue(pages, self.stamps)
        self._interiors = Queue(pages, self.stamps)
        self.offer = self._tails.push
        """``offer(page)``: the tail may be evicted from now on."""
        self.pop = self._tails.pop
        """``pop()``: the offered tail with the oldest stamp, which is no longer offered. None if there is none.
        Pages that were hit after they were offered are put back under their new stamp first."""
        self.offer_interior = self._interiors.push
        """``offer_interior(page)``: the page may be evicted, with what lies below it, once there are no tails."""
        self.pop_interior = self._interiors.pop
        """``pop_interior()``: likewise for interiors."""

    def tick(self) -> int:
        """The next moment. Called once per use of the index that counts as a hit."""
        self.clock += 1
        return self.clock

    def touch(self, pages: Ids) -> None:
        """The pages were hit now."""
        self.stamp[positions(pages)] = self.clock

    def next_stamp(self) -> int | None:
        """A lower bound of the stamp of the next page that :meth:`pop` gives."""
        return self._tails.heap[0] >> _PAGE_BITS if self._tails.heap else None

    def forget(self) -> None:
        """Nothing is offered any more."""
        self._tails.forget()
        self._interiors.forget()

    def offered(self) -> set[int]:
        """Ids of the offered tails, for checks."""
        return self._tails.ids()

    def offered_interiors(self) -> set[int]:
        """Ids of the offered interiors, for checks."""
        return self._interiors.ids()

    def check(self) -> None:
        """The heaps and their flags agree. Raises InvariantError."""
        self._tails.check()
        self._interiors.check()
