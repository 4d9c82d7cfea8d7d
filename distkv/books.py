"""One rank's books: a ledger for each label, and what all of them share: steps, epochs, and the rolling digest."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np

from distkv.chain import KeyChain, Namer
from distkv.entries import NO_PAGES
from distkv.host.tier import HostTier
from distkv.keys import roll
from distkv.ledger import MAIN, CopyPage, Ledger
from distkv.pagelist import PageList
from distkv.pages import Ids, PagePool


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
    FORK = 17
    KEEP = 18
    PROTECT = 19
    RELEASE = 20
    # in lockstep only, where more has to be equal
    FOUND = 11
    END = 12
    RETIRED = 13
    STATE = 14


_OF_A_REQUEST = frozenset({Call.SUBMIT, Call.OPEN, Call.APPEND, Call.COMMIT, Call.TRUNCATE, Call.FINISH, Call.ABORT,
                           Call.GROW, Call.SUSPEND, Call.RESUME, Call.FORK, Call.KEEP, Call.PROTECT, Call.RELEASE})
Scope = Literal["all", "device", "host"]
"""Which tiers a reset empties."""
SCOPES = get_args(Scope)

_REMEMBERED = 32
"""Calls that an error about ranks that diverged can tell."""


class Owner(Protocol):
    """What the books need to know of a sequence to recount its pages."""

    @property
    def lists(self) -> tuple[PageList, ...]: ...


class _Retiring(NamedTuple):
    """Pages with an owner until the passes of a step have retired."""

    step: int
    ledger: Ledger
    pages: Ids
    protected: Ids = NO_PAGES
    """Those of them that are protected until then."""
    of: PageList | None = None
    """Who gave them up and runs on."""


class Books(Ledger):
    """The state of one rank that sequences and the agreement share. Owns a ledger for each label, and the digest.

    It is itself the ledger of the first label, ``main``, which every cache has; ``ledgers`` are all of them.
    """

    def __init__(self, pool: PagePool, namer: Namer, *, tier: HostTier | None = None, store_at_fill: bool = False,
                 asynchronous: bool = False, lockstep: bool = False, copy_page: CopyPage | None = None,
                 others: AbstractSequence[Ledger] = (), lookahead_tokens: int = 0) -> None:
        super().__init__(pool, namer.page_size, tier=tier, copy_page=copy_page)
        self.namer = namer
        self.ledgers: tuple[Ledger, ...] = (self, *others)
        """The labels, in the order of the configuration."""
        self.tiers = tuple(ledger.tier for ledger in self.ledgers if ledger.tier is not None)
        """The host tiers of those that have one."""
        for ledger in others:
            ledger.follow(self)
        self.store_at_fill = store_at_fill
        self.asynchronous = asynchronous
        self.lookahead_tokens = lookahead_tokens
        """Tokens that are drafted ahead of those that a request asks for."""
        self.epoch = 0
        """Sequences of an earlier one do not store: a reset or new weights came since."""
        self.generation = 0
        """Matches of an earlier one do not count: entries left, in a reset of either tier or for new weights."""
        self.step = 0
        self.digest = 0
        self._retiring: deque[_Retiring] = deque()
        self._last: deque[tuple[tuple[int, ...], int]] = deque(maxlen=_REMEMBERED)
        self._remember = self._last.append
        self.lockstep = lockstep

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
        self.note(Call.STATE, self.step, self.epoch, len(self._retiring))
        for ledger in self.ledgers:
            pool, index = ledger.pool, ledger.stock
            self.note(Call.STATE, ledger.reserved, len(index), index.stored, index.evicted, index.cascades,
                      index.collisions, index.recency.clock)
            for pages in (pool.owners, pool.holds, pool.indexed, index.recency.stamp, pool.free_ids()):
                self.note(Call.STATE, data=pages.tobytes())

    def total(self, tokens: int) -> int:
        """``T``: pages of a sequence that comes to so many tokens, beside those that are drafted ahead of them."""
        return -(-(tokens + self.lookahead_tokens) // self.page_size)

    def renamed(self, chain: KeyChain) -> KeyChain:
        """The chain under the current weights version: itself, unless it was made before a bump."""
        return chain if chain.namer is self.namer else chain.renamed(self.namer)

    def labels_of(self, names: AbstractSequence[str]) -> tuple[int, ...]:
        """The numbers of these labels, in the order of the configuration, with those that go with ``main``."""
        if len(self.ledgers) == 1:
            return (0,)
        return tuple(i for i, ledger in enumerate(self.ledgers)
                     if (MAIN in names if ledger.grid else ledger.label in names))

    def unknown_label(self, names: AbstractSequence[str]) -> str | None:
        """The first of these names that a request cannot ask for."""
        if len(names) == 1 and names[0] == MAIN:
            return None
        known = {ledger.label for ledger in self.ledgers if not ledger.grid}
        return next((name for name in names if name not in known), None)

    def prefill_took(self, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens in so many seconds: a moving mean."""
        new, old = seconds / tokens, self.prefill_s_per_token
        if not math.isfinite(new):  # it would stay in the mean for ever
            return
        mean = new if old is None else 0.75 * old + 0.25 * new
        for ledger in self.ledgers:
            ledger.prefill_s_per_token = mean

    def release(self, pages: Ids, reserved: int, ledger: Ledger | None = None, protected: Ids = NO_PAGES) -> None:
        """A sequence leaves: its reservation ends now, its pages when the forwards that use them have retired.

        ``ledger``: of the label (None: the first). ``protected``: those that it protects, until then.
        """
        ledger = ledger if ledger is not None else self
        ledger.reserved -= reserved
        if self.asynchronous:
            self._retiring.append(_Retiring(self.step, ledger, pages.copy(), protected))
        else:
            ledger.unprotect(protected)
            ledger.free(pages)

    def give_up(self, pages: Ids, of: PageList) -> None:
        """A running sequence has given these pages up, see :meth:`distkv.pagelist.PageList.release`: they are free, and
        promised to it again, when the forwards that use them have retired."""
        if self.asynchronous:
            self._retiring.append(_Retiring(self.step, of.ledger, pages, of=of))
        else:
            of.came_back(len(pages))
            of.ledger.free(pages)

    @property
    def retiring_sequences(self) -> int:
        """Ended sequences whose pages wait for passes to retire."""
        return sum(each.ledger is self for each in self._retiring)

    @property
    def retiring(self) -> int:
        """Pages that are live for passes that have not retired, and for nothing else. O(pages) if there are any."""
        mine = [each.pages for each in self._retiring if each.ledger is self]
        if not mine:
            return 0
        waiting = np.bincount(np.concatenate(mine), minlength=self.pool.total)
        return int(np.count_nonzero((waiting > 0) & (waiting == self.pool.owners)))

    def poll_all(self) -> None:
        """:meth:`Ledger.poll`, for every label."""
        for ledger in self.ledgers:
            ledger.poll()

    def retired(self, step: int) -> None:
        """All forwards launched up to step ``step`` have ended."""
        if self.lockstep and self.asynchronous:
            self.note(Call.RETIRED, step)
        while self._retiring and self._retiring[0].step <= step:
            each = self._retiring.popleft()
            each.ledger.unprotect(each.protected)
            if each.of is not None:
                each.of.came_back(len(each.pages))
            each.ledger.free(each.pages)

    def next_epoch(self, weights_version: str | None, scope: Scope = "all") -> None:
        """Empties the indexes, of one tier or of both. Pages with owners, holds or readers stay with them.

        Sequences of earlier epochs never store; a reset of the host tier alone begins none.
        """
        self.generation += 1
        if scope != "host":
            self.epoch += 1
        if weights_version is not None:
            self.namer = self.namer.with_weights(weights_version)
        for ledger in self.ledgers:
            ledger.forget(scope)

    def check_all(self, sequences: AbstractSequence[Owner], reading: Mapping[str, Iterable[int]] | None = None) -> None:
        """Every invariant of one rank, recounted from scratch. Raises InvariantError.

        ``sequences`` are all that are running; ``reading`` are, by label, the host pages that a ballot in flight reads.
        """
        lists = [pages for sequence in sequences for pages in sequence.lists]
        for ledger in self.ledgers:
            mine = [pages for pages in lists if pages.ledger is ledger]
            retiring = [each for each in self._retiring if each.ledger is ledger]
            owned = [pages.held for pages in mine] + [each.pages for each in retiring]
            ledger.check_protected([pages.guarded for pages in mine] + [each.protected for each in retiring])
            ledger.check(owned, sum(pages.reserved for pages in mine), (reading or {}).get(ledger.label, ()),
                         tails=[int(pages.pages[pages.tail]) for pages in mine if pages.tail >= 0])
