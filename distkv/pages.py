"""Owner counts, holds and the free list of one pool of pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from distkv.errors import InvariantError, NoRoom

Pages = npt.NDArray[np.int32]
"""Page ids, int32 [n]."""


class PagePool:
    """Who has which page. Owns the counts and the free list; knows nothing of tokens, keys or bytes.

    A page is *live* while a sequence (or a copy that writes it) owns it, *held* while a request that is not admitted
    yet has matched it, *indexed* while an entry of the index names it. It is free when it is none of these, and it
    comes back to the free list in the call that takes the last of them away. Counts are never clamped: a release of
    what is not owned raises InvariantError before anything changes.

    All methods take distinct page ids. Every method is vectorised over the pages that it touches.
    """

    def __init__(self, pages: int, scratch: int = 0) -> None:
        """``pages`` in all, of which ids ``0 .. scratch - 1`` are never handed out."""
        self.total = pages
        self.scratch = scratch
        self.owners: Pages = np.zeros(pages, np.int32)
        self.holds: Pages = np.zeros(pages, np.int32)
        self.indexed: npt.NDArray[np.bool_] = np.zeros(pages, np.bool_)
        self.live = 0
        self._stack: Pages = np.arange(pages - 1, scratch - 1, -1, dtype=np.int32)  # lowest ids on top
        self._top = pages - scratch

    @property
    def usable(self) -> int:
        """Pages that can be handed out at all."""
        return self.total - self.scratch

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return self._top

    def free_ids(self) -> Pages:
        """A copy of the free list."""
        return self._stack[: self._top].copy()

    def take(self, n: int) -> Pages:
        """``n`` free pages, owned once by the caller. Raises NoRoom, with nothing taken, if fewer are free."""
        if n > self._top:
            raise NoRoom(n - self._top, "the free list")
        self._top -= n
        pages = self._stack[self._top : self._top + n][::-1].copy()
        self.owners[pages] = 1
        self.live += n
        return pages

    def own(self, pages: Pages) -> None:
        """One more owner of each page, which must be indexed, held or owned already."""
        before = self.owners[pages]
        self.live += len(pages) - int(np.count_nonzero(before))
        self.owners[pages] = before + 1

    def disown(self, pages: Pages) -> None:
        """One owner less of each page."""
        if not len(pages):
            return
        left = self.owners[pages] - 1
        if left.min() < 0:
            raise InvariantError(f"pages {pages[left < 0].tolist()} are released but have no owner")
        self.owners[pages] = left
        dead = pages[left == 0]
        self.live -= len(dead)
        self._free_if_unused(dead)

    def hold(self, pages: Pages) -> None:
        """One more hold on each page."""
        self.holds[pages] += 1

    def unhold(self, pages: Pages) -> None:
        """One hold less on each page."""
        if not len(pages):
            return
        left = self.holds[pages] - 1
        if left.min() < 0:
            raise InvariantError(f"pages {pages[left < 0].tolist()} are let go but are not held")
        self.holds[pages] = left
        self._free_if_unused(pages[left == 0])

    def enter(self, pages: Pages) -> None:
        """An entry of the index names each page from now on."""
        self.indexed[pages] = True

    def leave(self, pages: Pages) -> None:
        """No entry names these pages any more. Frees those without an owner and a hold, and only those."""
        self.indexed[pages] = False
        self._free_if_unused(pages)

    def is_cold(self, pages: Pages) -> npt.NDArray[np.bool_]:
        """Which of the (indexed) pages the index alone has: bool [n]."""
        cold: npt.NDArray[np.bool_] = (self.owners[pages] == 0) & (self.holds[pages] == 0)
        return cold

    def cached(self) -> npt.NDArray[np.bool_]:
        """Which pages of the pool the index alone has: bool [total]. O(pages)."""
        return np.asarray(self.indexed & (self.owners == 0) & (self.holds == 0))

    def held(self) -> npt.NDArray[np.bool_]:
        """Which pages of the pool are held and have no owner: bool [total]. O(pages)."""
        return np.asarray((self.holds > 0) & (self.owners == 0))

    def leading_live(self, pages: Pages) -> int:
        """How many leading pages have an owner."""
        owned = self.owners[pages] > 0
        return len(pages) if owned.all() else int(owned.argmin())

    def new_held(self, pages: Pages) -> int:
        """How many of the pages are neither live nor held yet."""
        return int(np.count_nonzero(self.is_cold(pages)))

    def _free_if_unused(self, pages: Pages) -> None:
        if not len(pages):
            return
        unused = pages[self.is_cold(pages) & ~self.indexed[pages]]
        n = len(unused)
        self._stack[self._top : self._top + n] = unused
        self._top += n

    def check(self) -> None:
        """Every page is in exactly one state and the counts agree. O(pages). Raises InvariantError."""
        free = np.zeros(self.total, np.bool_)
        free[self._stack[: self._top]] = True
        used = (self.owners > 0) | (self.holds > 0) | self.indexed
        ids = np.arange(self.total)
        wrong = ids[(free == used) & (ids >= self.scratch)]
        if len(wrong):
            raise InvariantError(f"pages {wrong.tolist()} are both free and used, or neither")
        if int(free.sum()) != self._top or (free | used)[: self.scratch].any():
            raise InvariantError("the free list names a page twice, or a scratch page is in use")
        if self.owners.min(initial=0) < 0 or self.holds.min(initial=0) < 0:
            raise InvariantError("an owner or hold count is negative")
        if self.live != int(np.count_nonzero(self.owners)):
            raise InvariantError(f"live says {self.live}, the owner counts say {int(np.count_nonzero(self.owners))}")
