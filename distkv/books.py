"""One rank's books: pages, index and reservations, with one entry for every allocation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from enum import IntEnum
from typing import Literal, Protocol, get_args

import numpy as np

from distkv.chain import KeyChain, Namer
from distkv.entries import Match
from distkv.errors import InvariantError, NoRoom
from distkv.host.tier import HostTier
from distkv.index import PrefixIndex
from distkv.keeping import KeepingIndex
from distkv.keys import roll
from distkv.pages import Ids, PagePool, Pages, positions


class Call(IntEnum):
    """The calls that change what the ranks have agreed on; each enters the rolling digest."""

    SUBMIT = 1
    OPEN = 2
    APPEND = 3
    COMMIT = 4
    TRUNCATE = 5
    FINISH = 6
    ABORT = 7
    GROW = 8
    NEXT_EPOCH = 9
    STEP = 10
    SUSPEND = 15
    RESUME = 16
    # in lockstep only, where more has to be equal
    FOUND = 11
    END = 12
    RETIRED = 13
    STATE = 14


_OF_A_REQUEST = frozenset({Call.SUBMIT, Call.OPEN, Call.APPEND, Call.COMMIT, Call.TRUNCATE, Call.FINISH, Call.ABORT,
                           Call.GROW, Call.SUSPEND, Call.RESUME})
Scope = Literal["all", "device", "host"]
"""Which tiers a reset empties."""
SCOPES = get_args(Scope)

_REMEMBERED = 32
"""Calls that an error about ranks that diverged can tell."""


class Owner(Protocol):
    """What the books need to know of a sequence to recount its pages."""

    @property
    def owned_pages(self) -> Pages: ...
    @property
    def reserved(self) -> int: ...


class Books:
    """The state of one rank that sequences and the agreement share. Owns pool, index, reservations and the digest.

    ``room`` is what this rank can still promise: pages - live - reserved. As long as every promise came out of it,
    ``take`` inside a reservation cannot fail: free and cached-only pages are at least the reserved ones, whatever the
    index holds, and holds are kept within the room by the agreement.
    """

    def __init__(self, pool: PagePool, namer: Namer, *, tier: HostTier | None = None, store_at_fill: bool = False,
                 asynchronous: bool = False, lockstep: bool = False) -> None:
        self.namer = namer
        self.page_size = page_size = namer.page_size
        self.pool = pool
        self.tier = tier
        self.index: PrefixIndex
        self.tiered: KeepingIndex | None = None
        """The index, if it has two tiers."""
        if tier is None:
            self.index = PrefixIndex(pool, page_size)
        else:
            self.index = self.tiered = KeepingIndex(pool, page_size, tier)
        self.store_at_fill = store_at_fill
        self.asynchronous = asynchronous
        self.reserved = 0
        self.epoch = 0
        """Sequences of an earlier one do not store: a reset or new weights came since."""
        self.generation = 0
        """Matches of an earlier one do not count: entries left, in a reset of either tier or for new weights."""
        self.step = 0
        self.digest = 0
        self._retiring: deque[tuple[int, Ids]] = deque()
        self._last: deque[tuple[tuple[int, ...], int]] = deque(maxlen=_REMEMBERED)
        self._remember = self._last.append
        self.lockstep = lockstep
        self.prefill_s_per_token: float | None = None
        """What computing a token of a prompt takes, as the engine has measured; None: unknown, every load is made."""

    @property
    def room(self) -> int:
        """Pages that are neither live nor reserved."""
        return self.pool.usable - self.pool.live - self.reserved

    def note(self, *call: int, data: bytes = b"") -> None:
        """Rolls the digest over one call that changed agreed state: a :class:`Call`, and numbers."""
        self.digest = digest = roll(self.digest, call, data)
        self._remember((call, digest))

    def history(self, names: Mapping[int, str]) -> str:
        """The last calls, the newest last, each with the digest behind it. ``names``: request ids by their tags."""
        lines = []
        for (call, *numbers), digest in self._last:
            parts: list[object] = [Call(call).name.lower().replace("_", " ")]
            if call in _OF_A_REQUEST:
                tag = numbers.pop(0)
                parts.append(names.get(tag, f"{tag:016x}"))
            parts += [] if call == Call.STATE else map(int, numbers[:2])
            lines.append(" ".join(map(str, parts)) + f" [{digest & 0xFFFF:04x}]")
        return "; ".join(lines)

    def note_state(self) -> None:
        """Rolls the digest over what the next decisions depend on beside the calls: every page's state. O(pages).

        With the counters an entry that one rank dropped shows even after its page got the same state on all again.
        """
        pool, index = self.pool, self.index
        self.note(Call.STATE, self.step, self.epoch, self.reserved, len(index), index.stored, index.evicted,
                  index.cascades, index.collisions, index.recency.clock, len(self._retiring))
        for pages in (pool.owners, pool.holds, pool.indexed, index.recency.stamp, pool.free_ids()):
            self.note(Call.STATE, data=pages.tobytes())

    def renamed(self, chain: KeyChain) -> KeyChain:
        """The chain under the current weights version: itself, unless it was made before a bump."""
        return chain if chain.namer is self.namer else chain.renamed(self.namer)

    def match(self, chain: KeyChain, limit: int) -> Match:
        """The verified match of at most ``limit`` pages, in both tiers. Changes nothing."""
        return self.index.match(chain, limit)

    def on_device(self, match: Match) -> int:
        """How many leading pages of the match are on the device."""
        return len(match) if self.tiered is None else self.tiered.on_device(match)

    def promise(self, n: int) -> None:
        """Reserves ``n`` pages out of the room. The agreement has made sure that they are there."""
        self.reserved += n

    def take(self, n: int) -> Pages:
        """``n`` pages out of a reservation: free ones first, then evicted ones, exactly as many as are short.

        The caller owns them and lowers its reservation. Raises NoRoom, with nothing taken, if the pool cannot give
        them, which a reservation rules out.
        """
        pages = self._take(n)
        self.reserved -= n
        if self.tier is not None:
            self.tier.written_next(pages)
        return pages

    def take_for_load(self, n: int, *, reserved: bool) -> Pages:
        """:meth:`take` for pages that copies will write; ``reserved``: out of a reservation, and not of the room."""
        pages = self._take(n)
        self.reserved -= n if reserved else 0
        return pages

    def _take(self, n: int) -> Pages:
        short = n - self.pool.free
        if short > 0:
            self.index.evict(short)
            if self.pool.free < n:
                raise NoRoom(n - self.pool.free, "opening pages inside a reservation")
        return self.pool.take(n)

    def read(self, places: Ids) -> list[int]:
        """One more reader of each of these host places; none if reading them in would take longer than computing them.

        Returns the host pages, of which the caller lets go by ``HostTier.let_go``.
        """
        if self.tiered is None or self.tier is None or not self.worth_loading(len(places)):
            return []
        hosts = self.tiered.hosts_of(places)
        self.tier.pages.read(np.array(hosts))
        return hosts

    def worth_loading(self, pages: int) -> bool:
        """Whether so many pages are read in faster than they are computed, as far as either has been measured."""
        if self.prefill_s_per_token is None or self.tier is None:
            return True
        seconds = self.tier.engine.load_s(pages)
        return seconds is None or seconds <= self.prefill_s_per_token * pages * self.page_size

    def prefill_took(self, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens in so many seconds: a moving mean."""
        new, old = seconds / tokens, self.prefill_s_per_token
        if not math.isfinite(new):  # it would stay in the mean for ever
            return
        self.prefill_s_per_token = new if old is None else 0.75 * old + 0.25 * new

    def used(self, pages: Ids, hosts: AbstractSequence[int] = ()) -> None:
        """A match was used, of device and of host pages: one hit."""
        self.index.recency.tick()
        self.index.recency.touch(pages)
        if hosts:
            self.index.recency.touch(np.array(hosts) + self.pool.total)

    def store(self, chain: KeyChain, pages: Ids, known: int) -> int:
        """Offers committed full pages to the index as one hit. Returns how many of them are in the index now."""
        self.index.recency.tick()
        return self.index.store(chain, pages, known)

    def release(self, pages: Ids, reserved: int) -> None:
        """A sequence leaves: its reservation ends now, its pages when the forwards that use them have retired."""
        self.reserved -= reserved
        if self.asynchronous:
            self._retiring.append((self.step, pages.copy()))
        else:
            self.free(pages)

    @property
    def retiring_sequences(self) -> int:
        """Ended sequences whose pages wait for passes to retire."""
        return len(self._retiring)

    @property
    def retiring(self) -> int:
        """Pages that are live for passes that have not retired, and for nothing else. O(pages) if there are any."""
        if not self._retiring:
            return 0
        waiting = np.bincount(np.concatenate([pages for _, pages in self._retiring]), minlength=self.pool.total)
        return int(np.count_nonzero((waiting > 0) & (waiting == self.pool.owners)))

    def poll(self) -> None:
        """Takes note of the copies that have ended: prefetched pages are in the index from now on.

        One that is there before the page ahead of it stays with its copy, as long as another prefetch is under way.
        """
        tier, tiered = self.tier, self.tiered
        if tier is None or tiered is None:
            return
        tier.poll()
        if not tier.prefetches:
            return
        under_way = tier.prefetching
        for copy in tier.arrived():
            if tiered.loaded(copy):
                del tier.prefetches[copy.host]
                self.free(np.array([copy.device]))
            elif not under_way or not tiered.awaits(copy):
                tier.drop_prefetch(copy)

    def retired(self, step: int) -> None:
        """All forwards launched up to step ``step`` have ended."""
        if self.lockstep and self.asynchronous:
            self.note(Call.RETIRED, step)
        while self._retiring and self._retiring[0][0] <= step:
            self.free(self._retiring.popleft()[1])

    def free(self, pages: Ids) -> None:
        """One owner less of each page, which no pass uses on its account any more."""
        pages = positions(pages)
        if self.pool.disown(pages):
            self.index.offer(pages)

    def hold(self, pages: Ids) -> None:
        """Keeps matched pages from eviction until ``unhold``."""
        self.pool.hold(pages)

    def unhold(self, pages: Ids) -> None:
        """Lets go of held pages; those that nobody else has may be evicted again."""
        if self.pool.unhold(pages):
            self.index.offer(pages)

    def next_epoch(self, weights_version: str | None, scope: Scope = "all") -> None:
        """Empties the index, of one tier or of both. Pages with owners, holds or readers stay with them.

        Sequences of earlier epochs never store; a reset of the host tier alone begins none.
        """
        self.generation += 1
        if self.tier is not None and scope != "device":
            self.tier.forget_all()
        if scope == "host":
            if self.tiered is not None:
                self.tiered.forget_host()
            return
        self.epoch += 1
        if self.tier is not None:
            self.tier.drop_prefetches()  # or the device would have pages from before
        if weights_version is not None:
            self.namer = self.namer.with_weights(weights_version)
        if scope == "device" and self.tiered is not None:
            self.tiered.forget_device()
        else:
            self.index.clear()

    def check(self, sequences: list[Owner], reading: Iterable[int] = ()) -> None:
        """Every invariant of one rank, recounted from scratch. Raises InvariantError.

        ``sequences`` are all that are running; ``reading`` are the host pages that a ballot in flight reads.
        """
        self.pool.check()
        self.index.check()
        owners = np.zeros(self.pool.total, np.int32)
        for pages in [s.owned_pages for s in sequences] + [pages for _, pages in self._retiring]:
            np.add.at(owners, pages, 1)
        if self.tier is not None:
            np.add.at(owners, np.array(self.tier.owned(), np.intp), 1)
            self.tier.check(reading)
        if not np.array_equal(owners, self.pool.owners):
            wrong = np.flatnonzero(owners != self.pool.owners)
            raise InvariantError(f"pages {wrong.tolist()} have other owner counts than sequences that own them")
        reserved = sum(s.reserved for s in sequences)
        if reserved != self.reserved:
            raise InvariantError(f"reserved says {self.reserved}, the sequences say {reserved}")
        if self.room < 0:
            raise InvariantError(f"room is {self.room}: more pages are promised than there are")
        reclaimable = int(np.count_nonzero(self.pool.cached()))
        held = int(np.count_nonzero(self.pool.held()))
        if self.pool.free + reclaimable + held + self.pool.live != self.pool.usable:
            raise InvariantError("free, cached, held and live pages do not sum to the pool")
        if self.pool.free + reclaimable < self.reserved:
            raise InvariantError("free and cached pages do not cover the reservations")
