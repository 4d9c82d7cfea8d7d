"""The entries of the index: a dictionary from keys to pages, runs, and their roots. Only structure, no policy.

How a chain is looked up among them is :mod:`distkv.lookup`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distkv.chain import KeyChain
from distkv.errors import InvariantError
from distkv.keys import TOKEN_BYTES, Adapter
from distkv.pages import Ids, Positions, one_by_one, positions
from distkv.runs import Root, Run

NO_PAGES: Positions = np.zeros(0, np.intp)
_TAIL = 4


@dataclass(slots=True, eq=False)
class Match:
    """The longest indexed prefix of a chain, verified. Owns nothing: own or hold ``pages`` before the next call."""

    pages: Positions = field(default_factory=lambda: NO_PAGES)
    """Places, intp [n], in chain order: device pages, and behind them those of the host tier. Not to be modified."""
    leaf: Run | None = None
    """The run of the last page."""
    used: int = 0
    """How many entries of ``leaf`` belong to the match."""
    collided: bool = False
    """Whether a key named a page with other content on the way."""

    def __len__(self) -> int:
        return len(self.pages)


class CachedPrefix(NamedTuple):
    """An indexed prefix that no longer one continues, from its root. Copies: they stay as they are."""

    tokens: npt.NDArray[np.int32]
    """int32 [pages * page_size]."""
    pages: Ids
    """Device pages, int32, in chain order; -1: it is on the host alone. Other prefixes may share the leading ones."""
    adapter: Adapter | None
    salt: str | None
    keys: tuple[int, ...] = ()
    """Names of the pages, in the same order."""
    hosts: Ids = NO_PAGES
    """Host pages, int32, in the same order; -1: the host has none. Empty if nobody asked for them."""


class Entries:
    """Which key names which page, and which run has it. Prefix-closed: an entry is present only if its parent is.

    Owns the structure and nothing else: who owns a page, and what is dropped when, is the business of
    :class:`distkv.index.PrefixIndex`, which alone changes it.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        """``pages``: places, those of the device and of the host tier together."""
        self.page_bytes = TOKEN_BYTES * page_size
        self.run_of_key: dict[int, Run] = {}
        self.run_of: npt.NDArray[np.int32] = np.full(pages, -1, np.int32)
        self._run_of = one_by_one(self.run_of)
        self.runs: list[Run | None] = []
        self.roots: dict[bytes, Root] = {}
        self._free_slots: list[int] = []

    def __len__(self) -> int:
        return len(self.run_of_key)

    def run_with(self, page: int) -> Run | None:
        """The run that has this page; None if the page is not indexed."""
        slot = self._run_of[page]
        return self.runs[slot] if slot >= 0 else None

    def last_indexed(self, pages: Ids) -> tuple[int, Run] | None:
        """The last of the pages that is indexed, and its run; None if none is."""
        for page in pages[: -_TAIL - 1 : -1].tolist():  # a sequence has one or few pages behind its full ones
            run = self.run_with(page)
            if run is not None:
                return page, run
        rest = positions(pages[:-_TAIL])
        known = np.flatnonzero(self.run_of[rest] >= 0)
        if not len(known):
            return None
        page = int(rest[known[-1]])
        run = self.run_with(page)
        return (page, run) if run is not None else None

    def entry(self, key: int, position: int) -> tuple[Run, int] | None:
        """The run and offset of the entry that ``key`` names, if it lies at this chain position."""
        run = self.run_of_key.get(key)
        if run is None:
            return None
        offset = position - run.start
        return (run, offset) if 0 <= offset < len(run.keys) and run.keys[offset] == key else None

    def run_to_extend(self, chain: KeyChain, found: Match) -> Run:
        """The run that the pages behind the match are appended to: the matched leaf, or a new branch."""
        leaf = found.leaf
        if leaf is None:
            root = self.roots.get(chain.root)
            if root is None:
                root = self.roots[chain.root] = Root(chain)
            return self._new_run(root, 0)
        if found.used < len(leaf):
            tail = leaf.split_off(found.used, self._new_slot())
            self.runs[tail.slot] = tail
            self._name(tail, tail.page_ids(), tail.keys)
        elif not leaf.children:
            return leaf
        return self._new_run(leaf, leaf.end)

    def _new_run(self, parent: Run | Root, start: int) -> Run:
        run = Run(self._new_slot(), parent, start)
        self.runs[run.slot] = run
        if parent.children is None:
            parent.children = {}
        parent.children[run.slot] = run
        return run

    def enterable(self, keys: list[int], pages: Ids) -> int:
        """How many leading ones of the keys name nothing yet, and name pages that no entry has."""
        named = self.run_of_key
        if not np.count_nonzero(self.run_of[positions(pages)] >= 0):
            fresh = set(keys)
            if len(fresh) == len(keys) and named.keys().isdisjoint(fresh):
                return len(keys)
        seen: set[int] = set()
        for n, (key, page) in enumerate(zip(keys, pages.tolist(), strict=True)):
            if self._run_of[page] >= 0 or key in named or key in seen:
                return n
            seen.add(key)
        return len(keys)

    def append(self, chain: KeyChain, found: Match, pages: Ids) -> Run:
        """Enters the chain's pages behind the match, whose bytes lie in ``pages``: all of them are enterable."""
        run, first = self.run_to_extend(chain, found), len(found)
        run.append(chain, first, pages)
        self._name(run, pages, chain.keys[first : first + len(pages)])
        return run

    def _name(self, run: Run, pages: Ids, keys: list[int]) -> None:
        self.run_of_key.update(dict.fromkeys(keys, run))
        self.run_of[positions(pages)] = run.slot

    def _new_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self.runs.append(None)
        return len(self.runs) - 1

    def remove(self, run: Run, keep: int) -> tuple[Ids, list[int], Run | Root]:
        """Takes the entries behind the first ``keep`` off a run without children, and the run too if none is left.

        Returns their pages and keys, and the run (or root) that ends here now.
        """
        pages, keys = run.page_ids(keep), run.keys[keep:]
        for key in keys:
            del self.run_of_key[key]
        self.run_of[positions(pages)] = -1
        if keep:
            run.cut(keep)
            return pages, keys, run
        run.set_resident(0)
        return pages, keys, self._without(run)

    def remove_last(self, run: Run) -> tuple[int, int, Run | Root]:
        """:meth:`remove` for the last entry of a run without children: its page and key, and what ends here now."""
        page, key = run.pop()
        del self.run_of_key[key]
        self._run_of[page] = -1
        return page, key, run if run.pages else self._without(run)

    def remove_all(self) -> Positions:
        """Takes every entry away. Returns their pages."""
        pages = np.flatnonzero(self.run_of >= 0)
        self.run_of[pages] = -1
        self.run_of_key.clear()
        self.runs.clear()
        self.roots.clear()
        self._free_slots.clear()
        return pages

    def _without(self, run: Run) -> Run | Root:
        """Takes an empty run off its parent, which is returned."""
        parent = run.parent
        assert parent.children is not None
        del parent.children[run.slot]
        self.runs[run.slot] = None
        self._free_slots.append(run.slot)
        if isinstance(parent, Root) and not parent.children:
            del self.roots[parent.identity]
        return parent

    def prefixes(self, *, hosts: bool = False) -> Iterator[CachedPrefix]:
        """The longest prefixes on the device, or with ``hosts`` on either tier: then ``pages`` has places.

        Together they have every entry there. O(sum of their lengths).
        """
        for leaf in self.runs:
            if leaf is None or (leaf.children if hosts else leaf.warm or not leaf.resident):
                continue
            used = len(leaf) if hosts else leaf.resident
            parts, keys = [leaf.tokens[: used * self.page_bytes]], [leaf.keys[:used]]
            above = leaf.parent
            while isinstance(above, Run):
                parts.append(above.tokens)
                keys.append(above.keys)
                above = above.parent
            tokens = np.frombuffer(b"".join(reversed(parts)), "<i4").astype(np.int32)
            yield CachedPrefix(tokens, path_to(leaf, used), above.adapter, above.salt,
                               tuple(key for part in reversed(keys) for key in part))

    def check(self) -> list[Run]:
        """Indexed = reachable, keys and pages agree both ways, parents and children agree. Returns all runs."""
        reached: dict[int, Run] = {}
        found: list[Run] = []
        stack: list[Run] = []
        for root in self.roots.values():
            stack.extend(root.children.values())
            if not root.children or any(run.start or run.parent is not root for run in root.children.values()):
                raise InvariantError("a root without runs, or a first run that does not begin at 0")
        while stack:
            run = stack.pop()
            found.append(run)
            children = (run.children or {}).values()
            stack.extend(children)
            misplaced = any(c.parent is not run or c.start != run.end for c in children)
            if self.runs[run.slot] is not run or not len(run) or misplaced:
                raise InvariantError(f"{run} is empty, unregistered, or a child disagrees")
            if run.warm != sum(c.resident > 0 for c in children) or not 0 <= run.resident <= len(run):
                raise InvariantError(f"{run} miscounts its warm children, or its resident entries")
            if run.warm and run.resident < len(run):
                raise InvariantError(f"a page below {run} is on the device, but not all of its own are")
            if len(run.tokens) != len(run) * self.page_bytes or len(run.keys) != len(run):
                raise InvariantError(f"{run} has tokens, keys and pages of different lengths")
            for key, page in zip(run.keys, run.pages, strict=True):
                reached[key] = run
                if self.run_of[page] != run.slot:
                    raise InvariantError(f"page {page} of {run} does not know its run")
        if reached != self.run_of_key:
            raise InvariantError("the dictionary and the reachable entries differ")
        if int(np.count_nonzero(self.run_of >= 0)) != len(reached):
            raise InvariantError("a page knows a run that does not have it")
        return found


def path_to(leaf: Run, used: int) -> Positions:
    """The pages from the root to entry ``used - 1`` of ``leaf``."""
    parts = [leaf.pages[:used]]
    above = leaf.parent
    while isinstance(above, Run):
        parts.append(above.pages)
        above = above.parent
    return positions(np.frombuffer(b"".join(reversed(parts)), np.int32))
