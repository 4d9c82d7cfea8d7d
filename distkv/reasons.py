"""Why a request was not served more pages from the cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import StrEnum
from itertools import islice

import numpy as np
import xxhash

from distkv.chain import KeyChain
from distkv.runs import Root, Run

_LOOKED_AT = 64
"""Most entries that are looked at to find a reason: thousands of salts may share a first page."""


class Reason(StrEnum):
    """Why a match is not longer than it is."""

    WHOLE = "whole"
    """Nothing is missing: every full page but for the last token, which is always computed, was served."""
    PARTIAL_PAGE = "partial page"
    """All full pages were served; what follows does not fill a page, or ends before the next tokens that the page's
    name needs (``cache.next_token_depth``)."""
    NEVER_SEEN = "never seen"
    """No entry with these tokens."""
    EVICTED = "evicted"
    """The entry was here and left the index."""
    SALT = "salt"
    """The first page is here under another salt."""
    ADAPTER = "adapter"
    """The first page is here under another adapter or another generation of it."""
    MEDIA = "media"
    """The page is here with the same token ids but with other media or embeddings."""
    NEXT_TOKENS = "next tokens"
    """The page is here with the same token ids but with others behind it, which its KV depends on."""
    GROUP_MINIMUM = "group minimum"
    """This rank has more, another rank has not."""
    WINDOW = "window"
    """More was here, but not what the layers with a sliding window need there."""
    LOAD_FAILED = "load failed"
    """More was on the host, but on some rank it could not be read in, or not in time."""
    BUMP_OR_RESET = "bump or reset"
    """The first page was here before a weights bump or a reset. Or one came while the ballot was in flight, and what
    had matched does not count."""
    FORKED = "forked"
    """It is a fork: all that its parent had committed is its own."""
    NOT_READ = "not read"
    """The request asked not to read the cache."""


class Memory:
    """What the index remembers to explain misses: keys that left it, and which chains begin with which tokens.

    The keys that left are kept in a table of one slot per page of the pool, where a newer key may overwrite an
    older one: then the reason reads "never seen". So are the first pages that a bump or a reset took. Reasons are for
    people; nothing is decided by them.
    """

    def __init__(self, pages: int) -> None:
        self._left = array("Q", bytes(8 * pages))
        self._taken = np.zeros(0, np.uint64)  # of as many as there are pages; most groups never need it
        self._first: dict[int, Run | dict[int, Run]] = {}  # mostly one, and a dictionary for one takes 200 bytes

    def evicted(self, keys: Iterable[int]) -> None:
        """These keys left the index."""
        left, size = self._left, len(self._left)
        for key in keys:
            left[key % size] = key

    def first_page(self, run: Run, page_bytes: int) -> None:
        """A run that begins a chain was made."""
        digest = _digest(run, page_bytes)
        there = self._first.setdefault(digest, run)
        if isinstance(there, Run):
            if there is not run:
                self._first[digest] = {there.slot: there, run.slot: run}
        else:
            there[run.slot] = run

    def forget_first_page(self, run: Run) -> None:
        """Such a run is about to go; it still has its tokens and pages."""
        digest = _digest(run, len(run.tokens) // len(run))
        there = self._first[digest]
        if isinstance(there, dict):
            del there[run.slot]
        if not isinstance(there, dict) or not there:
            del self._first[digest]

    def forget_first_pages(self) -> None:
        """All runs are about to go."""
        digests = np.fromiter(self._first, np.uint64, len(self._first))
        if not len(self._taken):
            self._taken = np.zeros(len(self._left), np.uint64)
        self._taken[digests % len(self._taken)] = digests
        self._first.clear()

    def explain(self, chain: KeyChain, matched: int, leaf: Run | None, used: int) -> Reason:
        """Why ``chain`` matched ``matched`` pages, ending at entry ``used - 1`` of ``leaf``, and not more."""
        if matched == chain.pages:
            exact = len(chain) == matched * chain.namer.page_size
            return Reason.WHOLE if exact else Reason.PARTIAL_PAGE
        last = matched + 1 == chain.pages and len(chain) == chain.pages * chain.namer.page_size
        if last and self._indexed(chain, leaf, used):
            return Reason.WHOLE
        key = chain.keys[matched]
        if self._left[key % len(self._left)] == key:
            return Reason.EVICTED
        if matched == 0:
            return self._explain_first(chain)
        return self._twin(chain, matched, self._followers(leaf, used)) or Reason.NEVER_SEEN

    def _explain_first(self, chain: KeyChain) -> Reason:
        page_bytes = 4 * chain.namer.page_size
        other = Reason.NEVER_SEEN
        for run in islice(self._first_runs(chain, page_bytes), _LOOKED_AT):
            root = run.parent
            assert isinstance(root, Root)
            if root.identity != chain.root:
                other = Reason.ADAPTER if root.adapter != chain.adapter else Reason.SALT
            elif (twin := self._twin(chain, 0, ((run, 0),))) is not None:
                return twin
        digest = xxhash.xxh3_64_intdigest(bytes(chain.buffer[:page_bytes]))
        size = len(self._taken)
        taken = other is Reason.NEVER_SEEN and size > 0 and self._taken[digest % size] == digest
        return Reason.BUMP_OR_RESET if taken else other

    def _first_runs(self, chain: KeyChain, page_bytes: int) -> Iterable[Run]:
        there = self._first.get(xxhash.xxh3_64_intdigest(bytes(chain.buffer[:page_bytes])), {})
        return (there,) if isinstance(there, Run) else there.values()

    def _indexed(self, chain: KeyChain, leaf: Run | None, used: int) -> bool:
        """Whether the page behind the match is indexed too: then only the one token to compute was kept back."""
        position = chain.pages - 1
        key = chain.keys[position]
        if leaf is None:
            page_bytes = 4 * chain.namer.page_size
            return any(run.keys[0] == key for run in islice(self._first_runs(chain, page_bytes), _LOOKED_AT))
        return any(run.keys[at] == key for run, at in islice(self._followers(leaf, used), _LOOKED_AT))

    @staticmethod
    def _followers(leaf: Run | None, used: int) -> Iterable[tuple[Run, int]]:
        """The entries behind the match: (run, offset)."""
        if leaf is None:
            return ()
        if used < len(leaf):
            return ((leaf, used),)
        return ((child, 0) for child in (leaf.children or {}).values())

    @staticmethod
    def _twin(chain: KeyChain, position: int, entries: Iterable[tuple[Run, int]]) -> Reason | None:
        """What is other if an entry has the same token ids at this position and another key; None: there is none."""
        naming, found = chain.namer.naming, None
        size, spans = naming.page_bytes, naming.next_bytes  # in the extras the spans begin behind the next tokens
        mine = chain.extras.get(position, b"")
        for run, at in islice(entries, _LOOKED_AT):
            if run.keys[at] == chain.keys[position]:  # it was stored since the lookup
                continue
            if chain.buffer.startswith(run.tokens[at * size : (at + 1) * size], position * size):
                if naming.next_bytes and (run.extras or {}).get(run.start + at, b"")[spans:] == mine[spans:]:
                    return Reason.NEXT_TOKENS
                found = Reason.MEDIA
        return found


def _digest(run: Run, page_bytes: int) -> int:
    return xxhash.xxh3_64_intdigest(bytes(run.tokens[:page_bytes]))
