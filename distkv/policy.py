"""What to drop first: least recently used, one page at a time, leaves only."""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

from distkv.errors import InvariantError
from distkv.pages import Ids, one_by_one, positions

_PAGE_BITS = 31
_PAGE = (1 << _PAGE_BITS) - 1


class LeastRecent:
    """When each page was last hit, and the candidates for eviction in that order. Time is a logical clock.

    Owns one stamp per page and a heap with at most one entry per page: ``stamp << 31 | page``, one int, which is
    smaller than a pair and compared faster. The index offers a page when it becomes the end of a run without children
    and nobody but the index has it. Entries are not kept up to date: the index looks at what :meth:`pop` gives, and
    offers it again or lets it go.
    """

    def __init__(self, pages: int) -> None:
        self.stamp: npt.NDArray[np.int64] = np.zeros(pages, np.int64)
        self.clock = 0
        self._stamp_of = one_by_one(self.stamp)
        self._queued = bytearray(pages)
        self._heap: list[int] = []

    def tick(self) -> int:
        """The next moment. Called once per use of the index that counts as a hit."""
        self.clock += 1
        return self.clock

    def touch(self, pages: Ids) -> None:
        """The pages were hit now."""
        self.stamp[positions(pages)] = self.clock

    def offer(self, page: int) -> None:
        """The page may be evicted from now on."""
        if not self._queued[page]:
            self._queued[page] = 1
            heappush(self._heap, self._stamp_of[page] << _PAGE_BITS | page)

    def pop(self) -> int | None:
        """The offered page with the oldest stamp, which is no longer offered. None if there is none.

        Pages that were hit after they were offered are put back under their new stamp first.
        """
        heap = self._heap
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

    def next_stamp(self) -> int | None:
        """A lower bound of the stamp of the next page that :meth:`pop` gives."""
        return self._heap[0] >> _PAGE_BITS if self._heap else None

    def forget(self) -> None:
        """Nothing is offered any more."""
        for entry in self._heap:
            self._queued[entry & _PAGE] = 0
        self._heap.clear()

    def offered(self) -> set[int]:
        """Ids of the offered pages, for checks."""
        return {entry & _PAGE for entry in self._heap}

    def check(self) -> None:
        """The heap and its flags agree. Raises InvariantError."""
        ids = [entry & _PAGE for entry in self._heap]
        if len(ids) != len(set(ids)) or set(ids) != set(np.flatnonzero(np.frombuffer(self._queued, np.uint8)).tolist()):
            raise InvariantError("the eviction heap and its flags disagree")
