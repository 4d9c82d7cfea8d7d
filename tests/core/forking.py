"""What the tests of forks share: a cache that notes its copies, a parent, and the whole state of a rank."""

from __future__ import annotations

import pickle
from typing import Any

from distkv import PrefixCache, Sequence
from tests.core.helpers import FINGERPRINT, admit, config, prefill

Copies = list[tuple[str, int, int]]


def cache_of(pages: int = 16, page_size: int = 4, copies: Copies | None = None, **cache: Any) -> PrefixCache:
    """A cache that notes what its forks copy."""
    noted = copies if copies is not None else []
    return PrefixCache(config(pages, page_size, **cache), FINGERPRINT, copy_page=lambda *given: noted.append(given))


def parent_of(cache: PrefixCache, tokens: int = 6, limit: int = 8, **options: Any) -> Sequence:
    return prefill(admit(cache, "p", range(tokens), output_limit=limit, **options))


def writes(sequence: Sequence, *ids: int) -> None:
    sequence.append(ids)
    sequence.open(len(ids))
    sequence.commit(len(ids))


def state(cache: PrefixCache) -> bytes:
    """Everything that a fork may change on this rank, byte for byte."""
    books, agreed = cache._books, cache._agreement
    return pickle.dumps((
        [(each.pool._word.tobytes(), each.pool.free_ids().tobytes(), each.pool.live, each.pool.claims, each.reserved,
          each.tails, len(each.stock), each.stock.recency.stamp.tobytes()) for each in books.ledgers],
        books.digest, books.step, agreed.leftovers, agreed.counters, list(agreed.running), list(agreed.kept),
        agreed.queue.ids, agreed.preemption.names,
        [(s.id, s.forking, s.seq_len, s.committed, s.chain.tokens.tobytes(),
          [(p.pages.tobytes()[:4 * p.owned], p.filled, p.owned, p.reserved, p.tail) for p in s.lists])
         for s in agreed.running.values()]))
