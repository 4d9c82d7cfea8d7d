"""The index: which page has the KV of which prefix.

A dictionary nominates a page for a key; tokens, extras and parent links then decide. Entries are stored as runs
(:mod:`distkv.runs`), so that verifying a prefix of a thousand pages is a few memcmp calls up to the root.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from distkv.errors import InvariantError
from distkv.keys import TOKEN_BYTES, KeyChain
from distkv.pages import PagePool, Pages
from distkv.policy import LeastRecent
from distkv.reasons import Memory
from distkv.runs import Root, Run

NO_PAGES: Pages = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest indexed prefix of a chain, verified. Owns nothing: own or hold ``pages`` before the next call."""

    pages: Pages = field(default_factory=lambda: NO_PAGES)
    """Device pages, int32 [n], in chain order. Read-only."""
    leaf: Run | None = None
    """The run of the last page."""
    used: int = 0
    """How many entries of ``leaf`` belong to the match."""
    collided: bool = False
    """Whether a key named a page with other content on the way."""

    def __len__(self) -> int:
        return len(self.pages)


class PrefixIndex:
    """The entries of one pool. Prefix-closed: an entry is present only if its parent is.

    The index is one owner of its pages, told to the pool by ``enter`` and ``leave``. It evicts only pages that
    nobody else has, and leaving the index frees no page that has an owner or a hold. First writer wins.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_bytes = TOKEN_BYTES * page_size
        self.recency = LeastRecent(pool.total)
        self.memory = Memory(pool.total)
        self.collisions = 0
        self.evicted = 0
        self.cascades = 0
        self.stored = 0
        self._page_of: dict[int, int] = {}
        self._run_of: npt.NDArray[np.int32] = np.full(pool.total, -1, np.int32)
        self._runs: list[Run | None] = []
        self._free_slots: list[int] = []
        self._roots: dict[bytes, Root] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    # ---- lookup

    def match(self, chain: KeyChain, limit: int) -> Match:
        """The longest indexed prefix of ``chain`` of at most ``limit`` pages. Changes nothing."""
        n = self._nominated(chain.keys, min(limit, chain.pages))
        if not n:
            return Match()
        return self._verified(chain, n) or replace(self._walked(chain, n), collided=True)

    def _nominated(self, keys: list[int], n: int) -> int:
        """How many leading keys are in the dictionary, by bisection: entries are prefix-closed."""
        known = self._page_of
        if not n or keys[0] not in known:
            return 0
        if keys[n - 1] in known:
            return n
        low, high = 1, n - 1
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in known:
                low = middle
            else:
                high = middle - 1
        return low

    def _entry(self, key: int, position: int) -> tuple[Run, int] | None:
        """The run and offset of the entry that ``key`` names, if it lies at this chain position."""
        page = self._page_of.get(key)
        if page is None:
            return None
        run = self._runs[self._run_of[page]]
        assert run is not None
        offset = position - run.start
        return (run, offset) if 0 <= offset < len(run) and run.pages[offset] == page else None

    def _verified(self, chain: KeyChain, n: int) -> Match | None:
        """The match of ``n`` pages, climbing from its last page to the root; None if anything on the way differs."""
        entry = self._entry(chain.keys[n - 1], n - 1)
        if entry is None:
            return None
        leaf, used = entry[0], entry[1] + 1
        parts = []
        run, take = leaf, used
        while True:
            if not run.has(chain, take):
                return None
            parts.append(run.pages if take == len(run) else run.pages[:take])
            parent = run.parent
            if isinstance(parent, Root):
                break
            run, take = parent, len(parent)
        if parent.identity != chain.root:
            return None
        parts.reverse()
        return Match(np.frombuffer(b"".join(parts), np.int32), leaf, used)

    def _walked(self, chain: KeyChain, n: int) -> Match:
        """The longest verified prefix, page by page from the root: after a collision of the 64-bit keys."""
        root = self._roots.get(chain.root)
        last: Run | Root | None = root
        pages: list[int] = []
        for position in range(n):
            entry = self._entry(chain.keys[position], position)
            if entry is None:
                break
            run, offset = entry
            follows = run.parent is last if offset == 0 else run is last
            if not follows or not self._same_page(chain, run, offset):
                break
            pages.append(run.pages[offset])
            last = run
            if offset + 1 < len(run):
                continue
        if not pages or not isinstance(last, Run):
            return Match()
        return Match(np.array(pages, np.int32), last, len(pages) - last.start)

    def _same_page(self, chain: KeyChain, run: Run, offset: int) -> bool:
        at, position = offset * self.page_bytes, run.start + offset
        same = chain.buffer.startswith(run.tokens[at : at + self.page_bytes], position * self.page_bytes)
        return same and (run.extras or {}).get(position) == chain.extras.get(position)

    # ---- storing

    def store(self, chain: KeyChain, pages: Pages, known: int = 0) -> int:
        """Offers the chain's first ``len(pages)`` pages; first writer wins. Returns how many are in the index then.

        ``known``: so many leading pages were in the index when the caller last looked, which saves verifying them
        again if the last of them is still the same page. The pages must be owned by the caller, full and committed.
        """
        n = len(pages)
        found = self._still_known(chain, pages, known) or self.match(chain, n)
        m = len(found)
        self.collisions += found.collided
        if m < n:
            m = self._append(chain, pages, found)
        self.recency.touch(found.pages)
        self.recency.touch(pages[len(found) : m])
        return m

    def _still_known(self, chain: KeyChain, pages: Pages, known: int) -> Match | None:
        """The caller owns ``pages``, so an entry that still names the last known one has the caller's content."""
        if not known or (known < len(pages) and chain.keys[known] in self._page_of):
            return None
        entry = self._entry(chain.keys[known - 1], known - 1)
        if entry is None or entry[0].pages[entry[1]] != pages[known - 1]:
            return None
        return Match(_path(entry[0], entry[1] + 1), entry[0], entry[1] + 1)

    def _append(self, chain: KeyChain, pages: Pages, found: Match) -> int:
        """Enters the pages behind the match, up to the first key that names another page already."""
        first, stop = len(found), len(found)
        for key, page in zip(chain.keys[first : len(pages)], pages[first:].tolist(), strict=True):
            if self._run_of[page] >= 0 or self._page_of.setdefault(key, page) != page:
                self.collisions += 1
                break
            stop += 1
        new = pages[first:stop]
        if not len(new):
            return first
        run = self._run_to_extend(chain, found)
        run.append(chain, first, new)
        self._run_of[new] = run.slot
        self.pool.enter(new)
        self.stored += len(new)
        if run.start == 0 and first == 0:
            self.memory.first_page(run, self.page_bytes)
        return stop

    def _run_to_extend(self, chain: KeyChain, found: Match) -> Run:
        """The run that the pages behind the match are appended to: the matched leaf, or a new branch."""
        leaf = found.leaf
        if leaf is None:
            root = self._roots.get(chain.root)
            if root is None:
                root = self._roots[chain.root] = Root(chain)
            return self._new_run(root, 0)
        if found.used < len(leaf):
            tail = leaf.split_off(found.used, self._new_slot())
            self._runs[tail.slot] = tail
            self._run_of[tail.page_ids()] = tail.slot
        elif not leaf.children:
            return leaf
        return self._new_run(leaf, leaf.end)

    def _new_run(self, parent: Run | Root, start: int) -> Run:
        run = Run(self._new_slot(), parent, start)
        self._runs[run.slot] = run
        if parent.children is None:
            parent.children = {}
        parent.children[run.slot] = run
        return run

    def _new_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._runs.append(None)
        return len(self._runs) - 1

    # ---- release

    def offer(self, pages: Pages) -> None:
        """The caller has let go of ``pages`` of one chain: if the last indexed one ends a run, it may be evicted."""
        slots = self._run_of[pages]
        known = np.flatnonzero(slots >= 0)
        if len(known):
            self._offer_tail(self._runs[slots[known[-1]]])

    def _offer_tail(self, run: Run | Root | None) -> None:
        if isinstance(run, Run) and not run.children:
            page = run.pages[-1]
            if not self.pool.owners[page] and not self.pool.holds[page]:
                self.recency.offer(page)

    def evict(self, n: int) -> int:
        """Frees ``n`` pages, or all that can be: cold tails, least recently hit first; then interiors.

        Never more than ``n``. Returns how many were freed.
        """
        freed = 0
        while freed < n:
            page = self.recency.pop()
            if page is None:
                if not self._evict_interior():
                    break
                freed += 1
                continue
            slot = self._run_of[page]
            run = self._runs[slot] if slot >= 0 else None
            if run is None or run.children or run.pages[-1] != page or self.pool.owners[page] or self.pool.holds[page]:
                continue
            take = self._cold_suffix(run, n - freed)
            self._drop_entries(run, len(run) - take)
            freed += take
        self.evicted += freed
        return freed

    def _cold_suffix(self, run: Run, want: int) -> int:
        """How many entries at the end of the run, at most ``want``, are cold and not newer than the next candidate."""
        if want == 1 or len(run) == 1:
            return 1
        pages = run.page_ids(max(0, len(run) - want))
        takeable = self.pool.is_cold(pages)
        bound = self.recency.next_stamp()
        if bound is not None:
            takeable &= self.recency.stamp[pages] <= bound
        takeable[-1] = True
        return len(pages) if takeable.all() else int(takeable[::-1].argmin())

    def _evict_interior(self) -> bool:
        """Drops one cold page that has no cold descendant, and its descendants from the index. Rare, O(pool).

        Such a page exists if a live child hangs below a cold parent: its owner computed the parent's pages a second
        time and lost to the first writer. Only the one page is freed, since its descendants all have owners or holds.
        """
        cold = np.flatnonzero(self.pool.indexed & (self.pool.owners == 0) & (self.pool.holds == 0))
        slots = self._run_of[cold]
        above: set[int] = set()
        for slot in np.unique(slots).tolist():
            run = self._runs[slot]
            parent = run.parent if run else None
            while isinstance(parent, Run) and parent.slot not in above:
                above.add(parent.slot)
                parent = parent.parent
        lowest = [(int(self.recency.stamp[p]), p) for p, s in zip(cold.tolist(), slots.tolist(), strict=True)
                  if s not in above]
        if not lowest:
            return False
        page = min(lowest)[1]
        run = self._runs[self._run_of[page]]
        assert run is not None
        last_cold = int(np.flatnonzero(self.pool.is_cold(run.page_ids()))[-1])
        self.cascades += 1
        self._drop_subtree(run, last_cold)
        return True

    def drop(self, page: int) -> None:
        """The entry of ``page`` and all its descendants leave the index; pages that nobody else has become free."""
        run = self._runs[self._run_of[page]] if self._run_of[page] >= 0 else None
        if run is not None:
            self._drop_subtree(run, run.pages.index(page))

    def clear(self) -> None:
        """Every entry leaves the index."""
        for root in list(self._roots.values()):
            for run in list(root.children.values()):
                self._drop_subtree(run, 0)
        self.recency.forget()

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
        pages, keys = run.page_ids(keep), run.keys[keep:]
        for key in keys:
            del self._page_of[key]
        self.memory.evicted(keys)
        self._run_of[pages] = -1
        if keep:
            run.cut(keep)
            left: Run | Root = run
        else:
            if run.start == 0:
                self.memory.forget_first_page(run)
            left = run.parent
            assert left.children is not None
            del left.children[run.slot]
            self._runs[run.slot] = None
            self._free_slots.append(run.slot)
            if isinstance(left, Root) and not left.children:
                del self._roots[left.identity]
        self.pool.leave(pages)
        self._offer_tail(left)

    # ---- for reports and checks

    def runs(self) -> list[Run]:
        """All runs, for checks and reports."""
        return [run for run in self._runs if run is not None]

    def check(self) -> None:
        """Indexed = reachable, keys and pages agree both ways, parents and children agree, tails are offered."""
        reached: dict[int, int] = {}
        stack: list[Run] = []
        for root in self._roots.values():
            stack.extend(root.children.values())
            if not root.children or any(run.start or run.parent is not root for run in root.children.values()):
                raise InvariantError("a root without runs, or a first run that does not begin at 0")
        offered = self.recency.offered()
        while stack:
            run = stack.pop()
            children = (run.children or {}).values()
            stack.extend(children)
            misplaced = any(c.parent is not run or c.start != run.end for c in children)
            if self._runs[run.slot] is not run or not len(run) or misplaced:
                raise InvariantError(f"{run} is empty, unregistered, or a child disagrees")
            if len(run.tokens) != len(run) * self.page_bytes or len(run.keys) != len(run):
                raise InvariantError(f"{run} has tokens, keys and pages of different lengths")
            for key, page in zip(run.keys, run.pages, strict=True):
                reached[key] = page
                if self._run_of[page] != run.slot or not self.pool.indexed[page]:
                    raise InvariantError(f"page {page} of {run} does not know its run")
            tail = run.pages[-1]
            if not run.children and self.pool.is_cold(run.page_ids(len(run) - 1))[0] and tail not in offered:
                raise InvariantError(f"page {tail}, the cold tail of {run}, is not offered for eviction")
        if reached != self._page_of or int(self.pool.indexed.sum()) != len(reached):
            raise InvariantError("the dictionary and the reachable entries differ")
        if int(np.count_nonzero(self._run_of >= 0)) != len(reached):
            raise InvariantError("a page knows a run that does not have it")
        self.recency.check()


def _path(leaf: Run, used: int) -> Pages:
    """The pages from the root to entry ``used - 1`` of ``leaf``."""
    parts = [leaf.pages[:used]]
    above = leaf.parent
    while isinstance(above, Run):
        parts.append(above.pages)
        above = above.parent
    return np.frombuffer(b"".join(reversed(parts)), np.int32)
