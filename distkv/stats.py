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
from distkv.request import ResetResult

if TYPE_CHECKING:
    from distkv.books import Books
    from distkv.ledger import Ledger


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
    host_tokens: int = 0
    short_read_ins: int = 0
    suspended: int = 0
    forked: int = 0


@dataclass(frozen=True, slots=True)
class LabelStats:
    """Pages of one label beside ``main``, as the fields of :class:`Stats` with these names."""

    pages_usable: int
    pages_free: int
    pages_cached: int
    pages_held: int
    pages_live: int
    pages_reserved: int
    entries: int
    stored: int
    evicted: int
    host_pages: int
    host_free: int
    loads: int
    stores: int


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
    """Those of them whose KV was in the cache, on the device or the host."""
    host_tokens: int
    """Those of the cached ones that some rank had to read in from the host."""
    short_read_ins: int
    """Times that reading in ended short on some rank, and a request was admitted again without it."""
    suspended: int
    """Times that a sequence was suspended."""
    forked: int
    """Sequences that are forks of others."""
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
    host_pages: int
    """Pages of the host tier; they are free, storing, loading or ready."""
    host_free: int
    host_storing: int
    """Host pages that a copy is filling."""
    host_loading: int
    """Host pages that copies, or the ballot in flight, read."""
    host_ready: int
    host_kept: int
    """Host pages that suspended requests count on."""
    stores: int
    """Copies to the host since start."""
    loads: int
    """Copies from the host since start, those ahead of need included."""
    prefetched: int
    """Loads that were made for requests that still waited."""
    store_failures: int
    load_failures: int
    dropped: int
    """Pages that were evicted although the host tier had no place for them: they left the index, with what continued
    them."""
    host_evicted: int
    """Pages that were on the host alone and were given up for others: they left the index."""
    copies_in_flight: int
    """Copies that have not ended."""
    labels: Mapping[str, LabelStats]
    """Pages of the labels beside ``main``."""
    reasons: Mapping[str, int]
    """Admitted requests by why their match was not longer, see :class:`distkv.Reason`."""


def free_of(books: Books) -> tuple[int, int]:
    """Free pages of the device and of the host."""
    return (sum(ledger.pool.free for ledger in books.ledgers),
            sum(tier.pages.free for tier in books.tiers))


def reset_result(books: Books, before: tuple[int, int]) -> ResetResult:
    """What became free since ``before``, and what has not yet."""
    after = free_of(books)
    return ResetResult(after[0] - before[0], after[1] - before[1],
                       sum(ledger.pool.live + int(np.count_nonzero(ledger.pool.held())) for ledger in books.ledgers),
                       sum(tier.in_flight for tier in books.tiers))


def _label_stats(ledger: Ledger) -> LabelStats:
    pool, stock, tier = ledger.pool, ledger.stock, ledger.tier
    return LabelStats(
        pages_usable=pool.usable, pages_free=pool.free, pages_cached=int(np.count_nonzero(pool.cached())),
        pages_held=int(np.count_nonzero(pool.held())), pages_live=pool.live, pages_reserved=ledger.reserved,
        entries=len(stock), stored=stock.stored, evicted=stock.evicted,
        host_pages=tier.pages.total if tier is not None else 0, host_free=tier.pages.free if tier is not None else 0,
        loads=tier.loads if tier is not None else 0, stores=tier.stores if tier is not None else 0,
    )


def stats_of(books: Books, counters: Counters, reasons: Mapping[Reason, int]) -> Stats:
    """The state of these books now. O(pages)."""
    pool, index, tier = books.pool, books.index, books.tier
    states = tier.pages.states() if tier is not None else {}
    return Stats(
        steps=counters.steps, collectives=counters.collectives, requests=counters.requests,
        refused=counters.refused, peer_failures=counters.peer_failures, prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens, host_tokens=counters.host_tokens,
        short_read_ins=counters.short_read_ins, suspended=counters.suspended, forked=counters.forked,
        pages_total=pool.total, pages_usable=pool.usable,
        pages_free=pool.free, pages_cached=int(np.count_nonzero(pool.cached())),
        pages_held=int(np.count_nonzero(pool.held())), pages_live=pool.live, pages_retiring=books.retiring,
        pages_reserved=books.reserved,
        entries=len(index), stored=index.stored, evicted=index.evicted, cascades=index.cascades,
        collisions=index.collisions, epoch=books.epoch, reasons={str(r): n for r, n in reasons.items()},
        host_pages=tier.pages.total if tier is not None else 0,
        host_free=states.get("free", 0), host_storing=states.get("storing", 0), host_loading=states.get("loading", 0),
        host_ready=states.get("ready", 0), host_kept=tier.pages.kept if tier is not None else 0,
        stores=tier.stores if tier is not None else 0, loads=tier.loads if tier is not None else 0,
        prefetched=tier.prefetched if tier is not None else 0,
        store_failures=tier.store_failures if tier is not None else 0,
        load_failures=tier.load_failures if tier is not None else 0, dropped=tier.dropped if tier is not None else 0,
        host_evicted=tier.given_up if tier is not None else 0,
        copies_in_flight=sum(each.in_flight for each in books.tiers),
        labels={ledger.label: _label_stats(ledger) for ledger in books.ledgers[1:]},
    )
