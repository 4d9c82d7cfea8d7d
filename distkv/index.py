"""The index: which page has the KV of which prefix, what is stored, and what is dropped when pages are short."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from distkv.chain import KeyChain
from distkv.entries import Entries, Match, path_to
from distkv.errors import InvariantError
from distkv.lookup import longest_match
from distkv.pages import Ids, PagePool, positions
from distkv.policy import LeastRecent
from distkv.reasons import Memory
from distkv.runs import Root, Run


class Follower(Protocol):
    """An index whose entries hang on those of another one."""

    def left(self, keys: Iterable[int]) -> None:
        """The entries of these keys have left the other index."""


class PrefixIndex:
    """The index of one pool. Only committed full pages enter it; the first writer of a prefix wins.

    The index is one owner of its pages, told to the pool by ``enter`` and ``leave``. It evicts only pages that
    nobody else has, and leaving the index frees no page that has an owner or a hold.
    """

    def __init__(self, pool: PagePool, page_size: int, host_pages: int = 0) -> None:
        """``host_pages``: of a host tier, whose places are numbered behind the device's pages."""
        self.pool = pool
        places = pool.total + host_pages
        self.entries = Entries(places, page_size)
        self.recency = LeastRecent(places)
        self.memory = Memory(places)
        self.followers: list[Follower] = []
        """Indexes of other labels whose entries hang on those of this one."""
        self.collisions = 0
        self.evicted = 0
        self.cascades = 0
        self.stored = 0

    def __len__(self) -> int:
        return len(self.entries)

    def match(self, chain: KeyChain, limit: int) -> Match:
        """The longest indexed prefix of ``chain`` of at most ``limit`` pages, verified. Changes nothing."""
        return longest_match(self.entries, chain, limit)

    # ---- storing

    def store(self, chain: KeyChain, pages: Ids, known: int = 0) -> int:
        """Offers the chain's first ``len(pages)`` pages; first writer wins. Returns how many are in the index then.

        ``known``: so many leading pages were in the index when the caller last looked, which saves verifying them
        again if the last of them is still the same page. The pages must be owned by the caller, full and committed.
        """
        n, pages = len(pages), positions(pages)
        found = self._still_known(chain, pages, known) or longest_match(self.entries, chain, n)
        self.collisions += found.collided
        m = self._adopt(chain, pages, found)
        if m < len(found):  # cannot be continued
            self.recency.touch(found.pages[:m])
            return m
        if m < n:
            m = self._append(chain, pages, found)
        self.recency.touch(found.pages)
        self.recency.touch(pages[len(found) : m])
        return m

    def _adopt(self, chain: KeyChain, pages: Ids, found: Match) -> int:
        """Entries of ``found`` that are not on the device take the offered pages. How many leading ones are there."""
        return len(found)

    def _still_known(self, chain: KeyChain, pages: Ids, known: int) -> Match | None:
        """The caller owns ``pages``, so an entry that still names the last known one has the caller's content."""
        if not known or (known < len(pages) and chain.keys[known] in self.entries.run_of_key):
            return None
        entry = self.entries.entry(chain.keys[known - 1], known - 1)
        if entry is None or entry[0].pages[entry[1]] != pages[known - 1]:
            return None
        return Match(path_to(entry[0], entry[1] + 1), entry[0], entry[1] + 1)

    def _append(self, chain: KeyChain, pages: Ids, found: Match) -> int:
        """Enters the pages behind the match, up to the first key that names another page already."""
        first = len(found)
        new = pages[first:]
        n = self.entries.enterable(chain.keys[first : len(pages)], new)
        if n < len(new):
            self.collisions += 1
            new = new[:n]
        if not n:
            return first
        run = self.entries.append(chain, found, new)
        self.pool.enter(new)
        self.stored += n
        if run.start == 0 and first == 0:
            self.memory.first_page(run, self.entries.page_bytes)
        return first + n

    # ---- release

    def offer(self, pages: Ids) -> None:
        """The caller has let go of ``pages`` of one chain: the last of them that is cold now may be evicted."""
        last = self.entries.last_indexed(pages)
        if last is None:
            return
        page, run = last
        if self.pool.cold(page):
            self._offer_at(page, run)
        else:  # somebody else has it, who computed what is above it a second time
            self._offer_above(run)

    def _offer_at(self, page: int, run: Run) -> None:
        if not self.pool.cold(page):
            return
        if not run.warm and run.pages[run.resident - 1] == page:
            self.recency.offer(page)
        else:
            self.recency.offer_interior(page)

    def _offer_above(self, run: Run | Root) -> None:
        """Nothing behind the end of ``run`` is a candidate on its account: the nearest cold page from there up is."""
        while isinstance(run, Run):
            if not run.resident:
                run = run.parent
                continue
            page = run.pages[run.resident - 1]
            if self.pool.cold(page):
                self._offer_at(page, run)
                return
            at = run.page_ids(0, run.resident)
            cold = np.flatnonzero(self.pool.is_cold(at))
            if len(cold):
                self.recency.offer_interior(int(at[cold[-1]]))
                return
            run = run.parent

    def evict(self, n: int) -> int:
        """Frees ``n`` pages, or all that can be: cold tails, least recently hit first; then interiors.

        Never more than ``n``. Returns how many were freed.
        """
        freed = 0
        while freed < n:
            page = self.recency.pop()
            if page is None:
                if not self.evict_interior():
                    break
                freed += 1
                continue
            run = self.entries.run_with(page)
            if run is None or not self.pool.cold(page):
                continue
            if run.warm or run.pages[run.resident - 1] != page:  # a page was stored below it since it was offered
                self.recency.offer_interior(page)
                continue
            take = self._cold_suffix(run, n - freed)
            self._release_tail(run, take)
            freed += take
        self.evicted += freed
        return freed

    def _release_tail(self, run: Run, take: int) -> None:
        """The last ``take`` device pages of the run, which are cold and have nothing below them there, become free."""
        if take == 1:
            self._drop_last(run)
        else:
            self._drop_entries(run, len(run) - take)

    def _cold_suffix(self, run: Run, want: int) -> int:
        """How many of its last device pages, at most ``want``, are cold and not newer than the next candidate."""
        if want == 1 or run.resident == 1:
            return 1
        at = positions(run.page_ids(max(0, run.resident - want), run.resident))
        takeable = self.pool.is_cold(at)
        bound = self.recency.next_stamp()
        if bound is not None:
            takeable &= self.recency.stamp[at] <= bound
        n = int(np.count_nonzero(takeable))
        return n if n == len(at) else max(1, int(takeable[::-1].argmin()))

    def evict_interior(self) -> bool:
        """Drops one cold page that has no cold descendant, and its descendants from the index. False: there is none.

        Such a page exists if a live child hangs below a cold parent: its owner computed the parent's pages a second
        time and lost to the first writer. Only the one page is freed, since its descendants all have owners or holds.
        """
        while (page := self.recency.pop_interior()) is not None:
            run = self.entries.run_with(page)
            if run is None or not self.pool.cold(page):
                continue
            at = run.pages.index(page)
            if self._cold_below(run, at + 1):
                continue  # offered again when that has gone
            self.cascades += 1
            self._drop_subtree(run, at)
            return True
        return False

    def _cold_below(self, run: Run, first: int) -> bool:
        """Whether an entry on the device, from ``first`` of the run on or below the run, is cold."""
        stack = [run]
        while stack:
            below = stack.pop()
            ids = below.pages[first if below is run else 0 : below.resident]
            if len(ids) and np.count_nonzero(self.pool.is_cold(np.frombuffer(ids, np.int32))):
                return True
            if below.warm:
                stack.extend((below.children or {}).values())
        return False

    def drop(self, page: int) -> None:
        """The entry of ``page`` and all its descendants leave the index; pages that nobody else has become free."""
        run = self.entries.run_with(page)
        if run is not None:
            self._drop_subtree(run, run.pages.index(page))

    def clear(self) -> None:
        """Every entry leaves the index."""
        self.memory.forget_first_pages()
        self._forget_keys(self.entries.run_of_key)
        self._left(self.entries.remove_all())
        self.recency.forget()

    def _forget_keys(self, keys: Iterable[int]) -> None:
        """The entries of these keys are leaving."""
        self.memory.evicted(keys)
        for follower in self.followers:
            follower.left(keys)

    def _left(self, places: Ids) -> None:
        """No entry names these places any more."""
        self.pool.leave(places)

    def _drop_subtree(self, run: Run, keep: int) -> None:
        """Descendants first, then the entries behind the first ``keep`` of the run."""
        below: list[Run] = []
        stack = list((run.children or {}).values())
        while stack:
            child = stack.pop()
            below.append(child)
            stack.extend((child.children or {}).values())
        for child in reversed(below):
            self._drop_entries(child, 0)
        self._drop_entries(run, keep)

    def _drop_entries(self, run: Run, keep: int) -> None:
        """Entries behind the first ``keep`` of a run without children leave the index; an empty run goes too."""
        if not keep and run.start == 0:
            self.memory.forget_first_page(run)
        pages, keys, end = self.entries.remove(run, keep)
        self._forget_keys(keys)
        self._left(pages)
        self._ends_at(end)

    def _drop_last(self, run: Run) -> None:
        """:meth:`_drop_entries` for the last entry, as eviction of one page needs it."""
        if run.start == 0 and len(run.pages) == 1:
            self.memory.forget_first_page(run)
        page, key, end = self.entries.remove_last(run)
        self._forget_keys((key,))
        self._left_one(page)
        self._ends_at(end)

    def _ends_at(self, run: Run | Root) -> None:
        """What was behind the end of ``run``, or a branch there, has left the index."""
        self._offer_above(run)

    def _left_one(self, place: int) -> None:
        """:meth:`_left` for one."""
        self.pool.leave_one(place)

    def runs(self) -> list[Run]:
        """All runs, for checks and reports."""
        return [run for run in self.entries.runs if run is not None]

    def check(self) -> None:
        """The entries are sound, the pool knows of them, and every candidate is offered. Raises InvariantError."""
        offered, interiors = self.recency.offered(), self.recency.offered_interiors()
        for run in self.entries.check():
            if not run.resident:
                continue
            tail, at = run.pages[run.resident - 1], run.page_ids(0, run.resident)
            if at.max() >= self.pool.total or not self.pool.indexed[at].all():
                raise InvariantError(f"a page of {run} is not known to the pool as indexed")
            if not run.warm and self.pool.cold(tail) and tail not in offered:
                raise InvariantError(f"page {tail}, the cold tail of {run}, is not offered for eviction")
            cold = np.flatnonzero(self.pool.is_cold(at))
            if len(cold) and not self._cold_below(run, int(cold[-1]) + 1):
                candidate = run.pages[int(cold[-1])]
                if candidate not in offered and candidate not in interiors:
                    raise InvariantError(f"page {candidate} of {run}, with nothing cold below it, is not offered")
        if int(self.pool.indexed.sum()) != self.resident:
            raise InvariantError("the pool knows of indexed pages that the index does not have")
        self.recency.check()

    @property
    def resident(self) -> int:
        """Entries on the device."""
        return len(self.entries)
