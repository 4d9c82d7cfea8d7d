"""The index and the admission as one would write them without a thought for speed: what the real ones must equal.

Entries are whole prefixes in a dictionary; every question is answered by looking at all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from distkv import KeyChain
from distkv.index import PrefixIndex
from distkv.runs import Run

Prefix = tuple[object, ...]
"""The root, then for each page its tokens and extras."""


def prefixes(chain: KeyChain, n: int | None = None) -> list[Prefix]:
    """The prefixes of the first ``n`` full pages (all by default), the shortest first."""
    size = chain.namer.page_size
    found: list[Prefix] = []
    last: Prefix = (chain.root,)
    for page in range(chain.pages if n is None else n):
        last = (*last, (tuple(chain.slice(page * size, (page + 1) * size).tolist()), chain.extras.get(page)))
        found.append(last)
    return found


class NaiveIndex:
    """Prefix to page and last hit. ``owners`` and ``held`` are set by whoever drives it."""

    def __init__(self, usable: int) -> None:
        self.usable = usable
        self.page_of: dict[Prefix, int] = {}
        self.stamp: dict[Prefix, int] = {}
        self.clock = 0
        self.owners: Counter[int] = Counter()
        self.held: set[int] = set()
        self.cascades = 0

    def match(self, chain: KeyChain, limit: int) -> list[int]:
        pages = []
        for prefix in prefixes(chain, min(limit, chain.pages)):
            if prefix not in self.page_of:
                break
            pages.append(self.page_of[prefix])
        return pages

    def hit(self, chain: KeyChain, n: int) -> None:
        self.clock += 1
        for prefix in prefixes(chain, n):
            if prefix in self.page_of:
                self.stamp[prefix] = self.clock

    def store(self, chain: KeyChain, pages: Iterable[int]) -> None:
        pages = list(pages)
        for prefix, page in zip(prefixes(chain, len(pages)), pages, strict=True):
            self.page_of.setdefault(prefix, page)
        self.hit(chain, len(pages))

    def cold(self, page: int) -> bool:
        return not self.owners[page] and page not in self.held

    @property
    def live(self) -> set[int]:
        return {page for page, n in self.owners.items() if n}

    @property
    def free(self) -> int:
        return self.usable - len(self.live | self.held | set(self.page_of.values()))

    def evict(self, n: int) -> None:
        for _ in range(n):
            parents = {prefix[:-1] for prefix in self.page_of}
            cold = [p for p in self.page_of if self.cold(self.page_of[p])]
            leaves = [p for p in cold if p not in parents]
            if not leaves:
                self.cascades += 1
                leaves = [p for p in cold if not any(q != p and q[: len(p)] == p for q in cold)]
            assert leaves, "nothing can be evicted"
            self.drop(min(leaves, key=lambda p: self.stamp[p]))

    def drop(self, prefix: Prefix) -> None:
        for gone in [p for p in self.page_of if p[: len(prefix)] == prefix]:
            del self.page_of[gone], self.stamp[gone]

    def clear(self) -> None:
        self.page_of.clear()
        self.stamp.clear()


def contents(index: PrefixIndex) -> dict[Prefix, tuple[int, int]]:
    """The real index, read from its runs: prefix to (page, last hit)."""
    found: dict[Prefix, tuple[int, int]] = {}
    for run in index.runs():
        path: list[Run] = []
        at = run
        while isinstance(at, Run):
            path.append(at)
            at = at.parent
        last: Prefix = (at.identity,)
        for part in reversed(path):
            for i, page in enumerate(part.pages):
                size = index.entries.page_bytes
                tokens = memoryview(bytes(part.tokens[i * size : (i + 1) * size])).cast("i")
                last = (*last, (tuple(tokens), (part.extras or {}).get(part.start + i)))
                found[last] = (page, int(index.recency.stamp[page]))
    return found
