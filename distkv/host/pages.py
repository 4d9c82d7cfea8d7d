"""Host pages and their states. Sans-IO: who has which page, nothing of bytes.

::

    FREE -> STORING -> READY -> LOADING (n readers) -> READY ... -> FREE

A page is *storing* while a copy fills it, *read* while copies read it, or a ballot may make them read it, *indexed*
while an entry of the index names it, *kept* while a suspended request counts on it. It is free when it is none of
these. Only an idle page (indexed and nothing else) may be given to somebody else; readers are counted, never flagged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from distkv.errors import InvariantError
from distkv.pages import Ids, one_by_one, positions

__all__ = ["HostPages"]

# One word per page, as in distkv.pages: readers in bits 0 .. 31, keeps in 32 .. 47, and two flags.
_READER = 1
_READERS = (1 << 32) - 1
_KEEP = 1 << 32
_KEEPS = 0xFFFF << 32
_INDEXED = 1 << 48
_STORING = 1 << 49


class HostPages:
    """The pages of one rank's host tier, ``0 .. total - 1``. Owns the counts and the free list.

    ``preemption`` of them are the share of suspended requests: *kept* pages are never more than that, and pages that
    are not kept never more than the rest, but for what requests kept until they were resumed.
    """

    def __init__(self, pages: int, preemption: int = 0) -> None:
        self.total = pages
        self.preemption = preemption
        self.kept = 0
        """Pages that suspended requests count on."""
        self._word: npt.NDArray[np.int64] = np.zeros(pages, "<i8")
        self._word_of = one_by_one(self._word)
        self._stack = list(range(pages - 1, -1, -1))
        self.uses = [0] * pages
        """How often each page was taken: who has ended reading one knows by it whether the page is another one now."""

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return len(self._stack)

    @property
    def tier_has_room(self) -> bool:
        """Whether :meth:`take` gives a page without making the tier larger than its share."""
        return bool(self._stack) and self.total - self.free - self.kept < self.total - self.preemption

    @property
    def may_keep(self) -> int:
        """How many more pages suspended requests may keep."""
        return self.preemption - self.kept

    def take(self) -> int | None:
        """A free page, which is storing and indexed from now on; None if there is none."""
        if not self._stack:
            return None
        page = self._stack.pop()
        self._word_of[page] = _STORING | _INDEXED
        self.uses[page] += 1
        return page

    def stored(self, page: int) -> bool:
        """The copy that fills it has ended. Whether the page is idle now."""
        if not self._word_of[page] & _STORING:
            raise InvariantError(f"host page {page} was stored, but nothing is storing it")
        return self._less(page, _STORING)

    def read(self, pages: Ids) -> None:
        """One more reader of each page."""
        self._word[positions(pages)] += _READER

    def read_one(self, page: int) -> None:
        """:meth:`read` for one page."""
        self._word_of[page] += _READER

    def unread(self, page: int) -> bool:
        """One reader less. Whether the page is idle now."""
        if not self._word_of[page] & _READERS:
            raise InvariantError(f"host page {page} is let go by a reader, but has none")
        return self._less(page, _READER)

    def unread_all(self, pages: Sequence[int]) -> list[int]:
        """:meth:`unread` for pages of which none comes twice. Those that are idle now."""
        at = np.array(pages, np.intp)
        words = self._word[at]
        if not (words & _READERS).all():
            without = at[words & _READERS == 0].tolist()
            raise InvariantError(f"host pages {without} are let go by a reader, but have none")
        words -= _READER
        self._word[at] = words
        self._stack += at[words == 0].tolist()
        return at[words == _INDEXED].tolist()  # type: ignore[no-any-return]

    def keep(self, page: int) -> None:
        """A suspended request counts on the page."""
        self.kept += not self._word_of[page] & _KEEPS
        self._word_of[page] += _KEEP

    def unkeep(self, page: int) -> bool:
        """A suspended request does not count on it any more. Whether the page is idle now."""
        if not self._word_of[page] & _KEEPS:
            raise InvariantError(f"host page {page} is no longer kept, but nobody kept it")
        idle = self._less(page, _KEEP)
        self.kept -= not self._word_of[page] & _KEEPS
        return idle

    def leave(self, page: int) -> None:
        """No entry names the page any more. Free at once, unless a copy or a suspended request still has it."""
        if not self._word_of[page] & _INDEXED:
            raise InvariantError(f"host page {page} leaves the index, but is not in it")
        self._less(page, _INDEXED)

    def idle(self, page: int) -> bool:
        """Whether an entry names the page and nobody else has it."""
        return self._word_of[page] == _INDEXED

    def storing(self, page: int) -> bool:
        """Whether a copy is filling it."""
        return bool(self._word_of[page] & _STORING)

    def is_kept(self, page: int) -> bool:
        """Whether a suspended request counts on it."""
        return bool(self._word_of[page] & _KEEPS)

    def indexed(self, page: int) -> bool:
        """Whether an entry names it."""
        return bool(self._word_of[page] & _INDEXED)

    def _less(self, page: int, what: int) -> bool:
        word = self._word_of[page] - what
        self._word_of[page] = word
        if not word:
            self._stack.append(page)
        return word == _INDEXED

    # ---- for checks and reports

    def readers(self) -> npt.NDArray[np.int64]:
        """Readers of each page: int64 [total]."""
        return self._word & _READERS

    def keeps(self) -> npt.NDArray[np.int64]:
        """Keeps of each page: int64 [total]."""
        return (self._word & _KEEPS) >> 32

    def states(self) -> dict[str, int]:
        """Pages by state, disjoint: free, storing, loading (with readers), ready; they sum to the total. O(pages)."""
        storing = (self._word & _STORING) != 0
        loading = ~storing & ((self._word & _READERS) != 0)
        ready = (self._word != 0) & ~storing & ~loading
        counts = {name: int(np.count_nonzero(is_so)) for name, is_so in
                  (("storing", storing), ("loading", loading), ("ready", ready))}
        return {"free": self.total - sum(counts.values()), **counts}

    def check(self) -> None:
        """The free list and the words agree. Raises InvariantError."""
        free = set(self._stack)
        if len(free) != len(self._stack) or free != set(np.flatnonzero(self._word == 0).tolist()):
            raise InvariantError("the host tier's free list and its pages disagree")
        if self.kept != int(np.count_nonzero(self.keeps())) or self.kept > max(0, self.preemption):
            raise InvariantError(f"{self.kept} host pages are kept, of a share of {self.preemption}")
        if self._word.min(initial=0) < 0:
            raise InvariantError("a count of a host page is negative")
