"""Plain counters of one rank.

Counts of requests, tokens and pages are logical and equal on all ranks wherever the ranks have decided together;
read one rank's. Pages by state and evictions belong to one rank's pool and may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distkv.reasons import Reason

if TYPE_CHECKING:
    from distkv.books import Books


@dataclass(slots=True)
class Counters:
    """Running totals since start."""

    steps: int = 0
    collectives: int = 0
    requests: int = 0
    """Admitted requests."""
    refused: int = 0
    peer_failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """One moment of one rank. The page states are disjoint: free + cached + held + live = usable pages."""

    steps: int
    """Steps begun."""
    collectives: int
    """Steps that needed a collective; no other collective exists after start, and none at all in a group of one."""
    requests: int
    """Admitted requests."""
    refused: int
    """Requests that could never run."""
    peer_failures: int
    """Steps that ended in PeerFailed."""
    prompt_tokens: int
    """Prompt tokens of admitted requests."""
    cached_tokens: int
    """Those of them whose KV was in the cache."""
    pages_total: int
    """Pages of the pool, scratch pages included."""
    pages_usable: int
    """Pages without the scratch pages."""
    pages_free: int
    pages_cached: int
    """Pages that only the index has: given up as soon as a request needs them."""
    pages_held: int
    """Pages matched by requests that wait for the end of a step."""
    pages_live: int
    """Pages of running sequences, and of ended ones whose last forward has not retired."""
    pages_retiring: int
    """Those of the live ones that only wait for ``PrefixCache.retired``, with ``cache.asynchronous``."""
    pages_reserved: int
    """Pages promised and not opened yet; they lie among the free and cached ones."""
    entries: int
    """Entries in the index."""
    stored: int
    """Pages stored in the index since start."""
    evicted: int
    """Pages evicted because a running request needed them."""
    cascades: int
    """Evictions of an interior page, which take its descendants out of the index."""
    collisions: int
    """Keys that named another page: the tokens decided, and the page was not used."""
    epoch: int
    """Resets and weight bumps."""
    reasons: Mapping[str, int]
    """Admitted requests by why their match was not longer, see :class:`distkv.Reason`."""


def stats_of(books: Books, counters: Counters, reasons: Mapping[Reason, int]) -> Stats:
    """The state of these books now. O(pages)."""
    pool, index = books.pool, books.index
    return Stats(
        steps=counters.steps, collectives=counters.collectives, requests=counters.requests,
        refused=counters.refused, peer_failures=counters.peer_failures, prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens, pages_total=pool.total, pages_usable=pool.usable,
        pages_free=pool.free, pages_cached=int(np.count_nonzero(pool.cached())),
        pages_held=int(np.count_nonzero(pool.held())), pages_live=pool.live, pages_retiring=books.retiring,
        pages_reserved=books.reserved,
        entries=len(index), stored=index.stored, evicted=index.evicted, cascades=index.cascades,
        collisions=index.collisions, epoch=books.epoch, reasons={str(r): n for r, n in reasons.items()},
    )
