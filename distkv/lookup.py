"""The longest prefix of a chain that is indexed: the dictionary nominates, the tokens decide.

A dictionary nominates a run for a key; tokens, extras and parent links then decide. Entries are stored as runs
(:mod:`distkv.runs`), so that verifying a prefix of a thousand pages is a few memcmp calls up to the root.
"""

from __future__ import annotations

import numpy as np

from distkv.chain import KeyChain
from distkv.entries import Entries, Match
from distkv.pages import positions
from distkv.runs import Root, Run

__all__ = ["longest_match"]


def longest_match(entries: Entries, chain: KeyChain, limit: int) -> Match:
    """The longest indexed prefix of ``chain`` of at most ``limit`` pages. Changes nothing."""
    n = _nominated(entries.run_of_key, chain.keys, min(limit, chain.pages))
    if not n:
        return Match()
    found = _verified(entries, chain, n)
    if found is None:
        found = _walked(entries, chain, n)
        found.collided = True
    return found


def _nominated(known: dict[int, Run], keys: list[int], n: int) -> int:
    """How many leading keys are in the dictionary, by bisection: entries are prefix-closed."""
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


def _verified(entries: Entries, chain: KeyChain, n: int) -> Match | None:
    """The match of ``n`` pages, climbing from its last page to the root; None if anything on the way differs."""
    entry = entries.entry(chain.keys[n - 1], n - 1)
    if entry is None:
        return None
    leaf, used = entry[0], entry[1] + 1
    if not leaf.has(chain, used):
        return None
    begins, size, with_extras = chain.buffer.startswith, entries.page_bytes, chain.has_extras
    parts = [leaf.pages if used == len(leaf.pages) else leaf.pages[:used]]
    run = leaf.parent
    while isinstance(run, Run):  # as Run.has, for whole runs: this loop is what a long match costs
        if not begins(run.tokens, run.start * size):
            return None
        if (run.extras or with_extras) and not run.has_extras(chain, len(run.pages)):
            return None
        parts.append(run.pages)
        run = run.parent
    if run.identity != chain.root:
        return None
    parts.reverse()
    return Match(positions(np.frombuffer(b"".join(parts), np.int32)), leaf, used)


def _walked(entries: Entries, chain: KeyChain, n: int) -> Match:
    """The longest verified prefix, page by page from the root: after a collision of the 64-bit keys."""
    root = entries.roots.get(chain.root)
    last: Run | Root | None = root
    pages: list[int] = []
    for position in range(n):
        entry = entries.entry(chain.keys[position], position)
        if entry is None:
            break
        run, offset = entry
        follows = run.parent is last if offset == 0 else run is last
        if not follows or not _same_page(chain, run, offset, entries.page_bytes):
            break
        pages.append(run.pages[offset])
        last = run
    if not pages or not isinstance(last, Run):
        return Match()
    return Match(np.array(pages, np.intp), last, len(pages) - last.start)


def _same_page(chain: KeyChain, run: Run, offset: int, size: int) -> bool:
    at, position = offset * size, run.start + offset
    same = chain.buffer.startswith(run.tokens[at : at + size], position * size)
    return same and (run.extras or {}).get(position) == chain.extras.get(position)
