"""distkv for ``bench_sglang.py``: ``--plugin distkv/bench/sglang_peer.py --peer distkv,distkv-cold``.

That harness drives a prefix tree below the scheduler, so this adapter drives distkv's index and page pool, which lie
below the step. Token containers are int32 arrays; keys are always made inside the harness's clock. ``distkv`` keeps a
conversation's chain, as distkv is meant to be used: a new turn names its new tokens alone. ``distkv-cold`` names the
whole prompt in every call. Every match compares all tokens in both.
"""

from __future__ import annotations

import numpy as np
from bench_sglang import Peer, peer  # type: ignore[import-not-found]

from distkv.bench.workloads import FINGERPRINT
from distkv.books import Books
from distkv.chain import KeyChain, Namer
from distkv.entries import Match
from distkv.pages import Ids, PagePool, Pages


class Tokens:
    """Token ids, and the chain that names them once it was asked for. ``kept`` is a chain that they begin with."""

    __slots__ = ("chain", "ids", "kept")

    def __init__(self, ids: Pages, kept: KeyChain | None = None) -> None:
        self.ids = ids
        self.kept = kept
        self.chain: KeyChain | None = None

    def __len__(self) -> int:
        return len(self.ids)


@peer("distkv")
class DistKV(Peer):  # type: ignore[misc]
    """Index and page pool of one rank. Places are pages, one id for ``page`` tokens."""

    input_type = "int32 ndarray of token ids; int32 ndarray of pages"
    keeps_chains = True

    def __init__(self, page: int, capacity: int) -> None:
        self.page = page
        self.books = Books(PagePool(capacity // page), Namer(FINGERPRINT, page))

    @staticmethod
    def native(ids: object) -> Tokens:
        """int32, which is what a tokenizer's array costs to convert; the chain is made in ``match``."""
        return Tokens(np.asarray(ids, dtype=np.int32))

    @staticmethod
    def concat(a: Tokens, b: Tokens) -> Tokens:
        return Tokens(np.concatenate([a.ids, b.ids]), a.chain)

    @staticmethod
    def head(a: Tokens, n: int) -> Tokens:
        return Tokens(a.ids[:n])

    def _named(self, tokens: Tokens) -> KeyChain:
        if not self.keeps_chains:
            return self.books.namer.chain(tokens.ids)
        if tokens.chain is None:
            if tokens.kept is None:
                tokens.chain = self.books.namer.chain(tokens.ids)
            else:
                tokens.chain = tokens.kept.branch()
                tokens.chain.extend(tokens.ids[len(tokens.kept) :])
        return tokens.chain

    def match(self, tokens: Tokens) -> tuple[int, Match]:
        chain = self._named(tokens)
        found = self.books.match(chain, chain.pages)
        return len(found) * self.page, found

    def locs_of(self, found: Match, n: int) -> Ids:
        return found.pages[: n // self.page]

    def lock(self, found: Match) -> Ids:
        self.books.pool.own(found.pages)
        self.books.used(found.pages)
        return found.pages

    def unlock(self, pages: Ids) -> None:
        self.books.release(pages, 0)

    def alloc(self, n: int) -> Pages | None:
        pages, pool = n // self.page, self.books.pool
        if pool.free < pages:
            self.books.index.evict(pages - pool.free)
            if pool.free < pages:
                return None
        return pool.take(pages)

    @staticmethod
    def cat(a: Ids, b: Ids) -> Ids:
        return np.concatenate([a, b])

    def insert(self, tokens: Tokens, pages: Ids) -> tuple[int, None]:
        return self.insert_owned(tokens, pages, 0)

    def insert_owned(self, tokens: Tokens, pages: Ids, prev: int) -> tuple[int, None]:
        """The full pages go to the index, which alone has them then; duplicates become free."""
        chain, known, index = self._named(tokens), prev // self.page, self.books.index
        before = index.stored
        there = self.books.store(chain, pages[: chain.pages], known)
        if chain.pages > known:
            self.books.release(pages[known : chain.pages], 0)
        return (there - (index.stored - before)) * self.page, None

    def free(self, pages: Ids, start: int, end: int) -> None:
        """Gives back what lies behind the full pages. ``end`` is the harness's ``len(pages)``: all of it."""
        if len(pages) > start // self.page:
            self.books.release(pages[start // self.page :], 0)

    def evict(self, n: int) -> int:
        return self.books.index.evict(-(-n // self.page)) * self.page

    def available(self) -> int:
        return self.books.pool.free * self.page

    def evictable(self) -> int:
        return int(np.count_nonzero(self.books.pool.cached())) * self.page


@peer("distkv-cold")
class DistKVCold(DistKV):
    """Names the whole prompt in every match and insert."""

    keeps_chains = False
