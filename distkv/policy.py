"""What to drop first: least recently used, one page at a time, leaves only."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from distkv.errors import InvariantError
from distkv.pages import Pages


class LeastRecent:
    """When each page was last hit, and the candidates for eviction in that order. Time is a logical clock.

    Owns one stamp per page and a heap of ``(stamp, page)`` with at most one entry per page. The index offers a page
    when it becomes the end of a run without children and nobody but the index has it. Entries are not kept up to
    date: the index looks at what :meth:`pop` gives, and offers it again or lets it go.
    """

    def __init__(self, pages: int) -> None:
        self.stamp: npt.NDArray[np.int64] = np.zeros(pages, np.int64)
        self.clock = 0
        self._queued: npt.NDArray[np.bool_] = np.zeros(pages, np.bool_)
        self._heap: list[tuple[int, int]] = []

    def tick(self) -> int:
        """The next moment. Called once per use of the index that counts as a hit."""
        self.clock += 1
        return self.clock

    def touch(self, pages: Pages) -> None:
        """The pages were hit now."""
        self.stamp[pages] = self.clock

    def offer(self, page: int) -> None:
        """The page may be evicted from now on."""
        if not self._queued[page]:
            self._queued[page] = True
            heappush(self._heap, (int(self.stamp[page]), page))

    def pop(self) -> int | None:
        """The offered page with the oldest stamp, which is no longer offered. None if there is none.

        Pages that were hit after they were offered are put back under their new stamp first.
        """
        while self._heap:
            stamp, page = heappop(self._heap)
            now = int(self.stamp[page])
            if now == stamp:
                self._queued[page] = False
                return page
            heappush(self._heap, (now, page))
        return None

    def next_stamp(self) -> int | None:
        """A lower bound of the stamp of the next page that :meth:`pop` gives."""
        return self._heap[0][0] if self._heap else None

    def forget(self) -> None:
        """Nothing is offered any more."""
        self._heap.clear()
        self._queued[:] = False

    def offered(self) -> set[int]:
        """Ids of the offered pages, for checks."""
        return {page for _, page in self._heap}

    def check(self) -> None:
        """The heap and its flags agree. Raises InvariantError."""
        ids = [page for _, page in self._heap]
        if len(ids) != len(set(ids)) or set(ids) != set(np.flatnonzero(self._queued).tolist()):
            raise InvariantError("the eviction heap and its flags disagree")
