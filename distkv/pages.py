"""Owner counts, holds and the free list of one pool of pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from distkv.errors import InvariantError, NoRoom

Pages = npt.NDArray[np.int32]
"""Page ids, int32 [n]."""

Positions = npt.NDArray[np.intp]
"""Page ids as numpy indexes fastest, intp [n]: with int32 ids each access costs three to five times as much."""

Ids = Pages | Positions
"""Page ids of either dtype, where both are taken."""

# One word per page, so that a call reads and writes each of its pages once: owners in bits 0 .. 31, holds in bits
# 32 .. 47, and whether an entry of the index names the page in bit 48. A page whose word is 0 is free.
_OWNER = 1
_OWNERS = (1 << 32) - 1
_HOLD = 1 << 32
_HOLDS = 0xFFFF << 32
_INDEXED = 1 << 48


def positions(pages: Ids) -> Positions:
    """Page ids as :data:`Positions`, without a copy if they are so already."""
    return pages.astype(np.intp, copy=False)


def one_by_one(array: npt.NDArray[Any]) -> memoryview[int]:
    """A view of an array of whole numbers for one element at a time, at a third of what numpy takes for it."""
    return memoryview(array)  # type: ignore[arg-type]


class PagePool:
    """Who has which page. Owns the counts and the free list; knows nothing of tokens, keys or bytes.

    A page is *live* while a sequence (or a copy that writes it) owns it, *held* while a request that is not admitted
    yet has matched it, *indexed* while an entry of the index names it. It is free when it is none of these, and it
    comes back to the free list in the call that takes the last of them away. Counts are never clamped: a release of
    what is not owned raises InvariantError before anything changes.

    All methods take distinct page ids, of any integer dtype. Every method is vectorised over the pages that it
    touches.
    """

    def __init__(self, pages: int, scratch: int = 0) -> None:
        """``pages`` in all, of which ids ``0 .. scratch - 1`` are never handed out."""
        self.total = pages
        self.scratch = scratch
        self.live = 0
        self.claims = 0
        """Owners of all pages together."""
        self._word: npt.NDArray[np.int64] = np.zeros(pages, "<i8")
        self._word_of = one_by_one(self._word)
        self._stack: Pages = np.arange(pages - 1, scratch - 1, -1, dtype=np.int32)  # lowest ids on top
        self._top = pages - scratch

    @property
    def owners(self) -> Pages:
        """Owners of each page: a view, int32 [total]."""
        return self._word.view("<i4")[::2]

    @property
    def holds(self) -> npt.NDArray[np.int16]:
        """Holds on each page: a view, int16 [total]."""
        return self._word.view("<i2")[2::4]

    @property
    def indexed(self) -> npt.NDArray[np.bool_]:
        """Whether an entry of the index names the page: a view, bool [total]."""
        return self._word.view(np.bool_)[6::8]

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
        self._word[positions(pages)] = _OWNER
        self.live += n
        self.claims += n
        return pages

    def own(self, pages: Ids) -> None:
        """One more owner of each page, which must be indexed, held or owned already."""
        at = positions(pages)
        words = self._word[at]
        self.claims += len(at)
        self.live += len(at) - int(np.count_nonzero(words & _OWNERS))
        self._word[at] = words + _OWNER

    def disown(self, pages: Ids) -> bool:
        """One owner less of each page. Returns whether the index alone has any of them now."""
        at = positions(pages)
        words = self._word[at]
        if np.count_nonzero(words & _OWNERS) < len(at):
            raise InvariantError(f"pages {at[(words & _OWNERS) == 0].tolist()} are released but have no owner")
        words -= _OWNER
        self._word[at] = words
        self.claims -= len(at)
        ended = len(at) - int(np.count_nonzero(words & _OWNERS))
        if not ended:
            return False
        self.live -= ended
        self._free_those_without(at, words)
        return bool(np.count_nonzero(words == _INDEXED))

    def hold(self, pages: Ids) -> None:
        """One more hold on each page."""
        at = positions(pages)
        self._word[at] = self._word[at] + _HOLD

    def unhold(self, pages: Ids) -> bool:
        """One hold less on each page. Returns whether the index alone has any of them now."""
        at = positions(pages)
        words = self._word[at]
        if np.count_nonzero(words & _HOLDS) < len(at):
            raise InvariantError(f"pages {at[(words & _HOLDS) == 0].tolist()} are let go but are not held")
        words -= _HOLD
        self._word[at] = words
        if np.count_nonzero(words & _OWNERS) == len(at):  # what was admitted: it has its owner already
            return False
        self._free_those_without(at, words)
        return bool(np.count_nonzero(words == _INDEXED))

    def enter(self, pages: Ids) -> None:
        """An entry of the index names each page from now on."""
        at = positions(pages)
        self._word[at] = self._word[at] | _INDEXED

    def enter_one(self, page: int) -> None:
        """:meth:`enter` for one page."""
        self._word_of[page] |= _INDEXED

    def leave(self, pages: Ids) -> None:
        """No entry names these pages any more. Frees those without an owner and a hold, and only those."""
        at = positions(pages)
        words = self._word[at] & ~_INDEXED
        self._word[at] = words
        self._free_those_without(at, words)

    def leave_one(self, page: int) -> None:
        """:meth:`leave` for one page."""
        word = self._word_of[page] & ~_INDEXED
        self._word_of[page] = word
        if not word:
            self._stack[self._top] = page
            self._top += 1

    def cold(self, page: int) -> bool:
        """Whether the index alone has this (indexed) page."""
        return self._word_of[page] == _INDEXED

    def is_cold(self, pages: Ids) -> npt.NDArray[np.bool_]:
        """Which of the (indexed) pages the index alone has: bool [n]."""
        return np.asarray(self._word[positions(pages)] & ~_INDEXED == 0)

    def cached(self) -> npt.NDArray[np.bool_]:
        """Which pages of the pool the index alone has: bool [total]. O(pages)."""
        return np.asarray(self._word == _INDEXED)

    def held(self) -> npt.NDArray[np.bool_]:
        """Which pages of the pool are held and have no owner: bool [total]. O(pages)."""
        return np.asarray((self.holds > 0) & (self.owners == 0))

    def leading_live(self, pages: Ids) -> int:
        """How many leading pages have an owner."""
        owned = self._word[positions(pages)] & _OWNERS
        n = int(np.count_nonzero(owned))
        return n if n in (0, len(owned)) else int((owned == 0).argmax())

    def new_held(self, pages: Ids) -> int:
        """How many of the pages are neither live nor held yet."""
        return len(pages) - int(np.count_nonzero(self._word[positions(pages)] & ~_INDEXED))

    def _free_those_without(self, at: Positions, words: npt.NDArray[Any]) -> None:
        """Those of the pages whose new word is 0 are free."""
        n = len(at) - int(np.count_nonzero(words))
        if n:
            self._stack[self._top : self._top + n] = at if n == len(at) else at[words == 0]
            self._top += n

    def check(self) -> None:
        """Every page is in exactly one state and the counts agree. O(pages). Raises InvariantError."""
        free = np.zeros(self.total, np.bool_)
        free[self._stack[: self._top]] = True
        used = self._word != 0
        ids = np.arange(self.total)
        wrong = ids[(free == used) & (ids >= self.scratch)]
        if len(wrong):
            raise InvariantError(f"pages {wrong.tolist()} are both free and used, or neither")
        if int(free.sum()) != self._top or (free | used)[: self.scratch].any():
            raise InvariantError("the free list names a page twice, or a scratch page is in use")
        if self.owners.min(initial=0) < 0 or self.holds.min(initial=0) < 0:
            raise InvariantError("an owner or hold count is negative")
        if self.claims != int(self.owners.sum()):
            raise InvariantError(f"claims says {self.claims}, the owner counts say {int(self.owners.sum())}")
        if self.live != int(np.count_nonzero(self.owners)):
            raise InvariantError(f"live says {self.live}, the owner counts say {int(np.count_nonzero(self.owners))}")
