"""The calls of a cache that may differ from rank to rank: looking, waiting for copies, what kernels ask for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from distkv.agreement import Agreement
from distkv.books import Books
from distkv.chain import KeyChain
from distkv.config import Config
from distkv.entries import CachedPrefix
from distkv.errors import HostMemoryError, InvariantError, MessageError, SequenceError
from distkv.host.copies import Copy
from distkv.ledger import MAIN, Ledger
from distkv.pages import Ids
from distkv.sequence import Sequence
from distkv.stats import Stats, stats_of
from distkv.table_buffers import TableBuffers
from distkv.tables import Tables, build
from distkv.windows import SlidingLedger

__all__ = ["LocalCalls"]


class LocalCalls:
    """What one rank may do alone, at its own time; a part of :class:`distkv.PrefixCache`, which owns the state.

    None of it changes what the ranks have agreed on. (In lockstep ``retired`` does, and all ranks call it alike.)
    """

    config: Config
    _books: Books
    _agreement: Agreement

    # ---- looking

    def peek(self, chain: KeyChain) -> int:
        """How many pages of ``main`` a request with this prompt would match on this rank now, in both tiers.

        Its other labels may have fewer. Changes nothing.
        """
        limit = max(0, len(chain) - 1) // self._books.page_size
        return len(self._books.match(self._books.renamed(chain), limit))

    @property
    def steps(self) -> int:
        """Steps begun. A forward pass belongs to the step that was begun last when it was launched."""
        return self._books.step

    @property
    def asynchronous(self) -> bool:
        """Whether pages of an ended sequence stay in use until :meth:`retired`."""
        return self._books.asynchronous

    def cached_prefixes(self, *, hosts: bool = False) -> Iterator[CachedPrefix]:
        """Tokens and pages of every indexed prefix of this rank that no longer one continues. Changes nothing.

        Those on the device, or with ``hosts`` those of both tiers. For looking at what is cached, such as the check of
        the pages' bytes; do not call the cache between two of them.
        """
        tiered = self._books.tiered
        return tiered.prefixes() if hosts and tiered is not None else self._books.index.entries.prefixes()

    @property
    def host_memory(self) -> str | None:
        """What this rank's host pages lie in: ``pinned`` memory, or ``pageable`` and why; None if it has none."""
        rows = self._books.tier.engine.rows if self._books.tier is not None else None
        return rows.kind if rows is not None else None

    def window_pages(self, prefix: CachedPrefix, label: str) -> tuple[Ids, Ids]:
        """Where a sliding label has its pages of a cached prefix: on the device and on the host, int32 ``[pages]``.

        -1: not there; a page is in one place, or in none. Changes nothing.
        """
        ledger = self._ledger(label)
        if not isinstance(ledger, SlidingLedger):
            raise MessageError(f"label {label!r} has no pages of its own for a prefix: it is no sliding one")
        places, base = ledger.windows.places(prefix.keys), ledger.pool.total
        return (np.where(places < base, places, -1).astype(np.int32),
                np.where(places >= base, places - base, -1).astype(np.int32))

    def host_row(self, page: int, label: str = MAIN) -> torch.Tensor:
        """The bytes of a host page of a label: uint8 ``[bytes_per_page]``, a view, whose order is ``kv.layout.order``.

        What it holds is of use once the copy that fills it has ended, see :meth:`settle`. Raises HostMemoryError
        without a host tier that has memory.
        """
        tier = self._ledger(label).tier
        rows = tier.engine.rows if tier is not None else None
        if rows is None:
            raise HostMemoryError("this rank has no host pages to look at", asked=0, got=0)
        return rows.row(page)

    def stats(self) -> Stats:
        """Counters and page states of this rank, at this moment."""
        return stats_of(self._books, self._agreement.counters, self._agreement.reasons)

    def check(self) -> None:
        """Recounts every invariant from scratch; O(pages). Raises InvariantError."""
        ballot = self._agreement.ballot
        agreed = self._agreement
        self._books.check_all([*agreed.running.values(), *agreed.kept.values(), *agreed.parked],
                              ballot.reading if ballot is not None else None)
        if ballot is None and any(ledger.pool.holds.any() for ledger in self._books.ledgers):
            raise InvariantError("pages are held although no ballot is in flight")

    # ---- passes

    def retired(self, step: int) -> None:
        """All forward passes launched up to step ``step`` have ended on this rank: pages that waited for them are free.

        For ``cache.asynchronous``; a synchronous engine has no use for it. A pass belongs to the step that
        :attr:`steps` says at its launch. On CUDA: record an event behind the passes of a step, and call this once
        the event has been reached (``event.query()``). Each rank calls it at its own time; in lockstep all call it
        alike, at one place of the step, so there the place has to be one where the event is waited for. Raises
        SequenceError for what is no step that was begun.
        """
        if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or not 0 <= step <= self._books.step:
            raise SequenceError(f"retired({step!r}): {self._books.step} steps were begun, so passes were launched in "
                                f"steps 0 to {self._books.step} only, and none in that one")
        self._books.retired(step)

    def tables(self, batch: Iterable[tuple[Sequence, int]], *, out: TableBuffers | None = None,
               pad_to: int | None = None, label: str = MAIN) -> Tables:
        """The page tables, lengths and slots of one forward pass, as attention kernels take them.

        ``batch`` has one pair for each row: a running sequence, and how many of its opened tokens, counted from the
        end, the forward computes: at least one, and none that is committed, so that no shared page is written.
        ``out``: fixed buffers (None: new arrays of just the size). ``pad_to``: add rows of one token, all on scratch
        pages, up to this number. Changes nothing of the cache, and may differ from rank to rank.
        ``label``: in whose pool. In one with a window a row lists the pages that are there, ``seq_lens`` counts the
        tokens in them, and ``positions`` stay those of the sequence.
        Raises SequenceError for a sequence that cannot run or has no such tokens, TableError for buffers that are too
        small or padding without ``pool.scratch_pages``; nothing is written then.
        """
        ledger = self._ledger(label)
        return build(batch, running=self._agreement.running, page_size=self._books.page_size,
                     scratch=ledger.pool.scratch, label=label, out=out, pad_to=pad_to)

    def _ledger(self, label: str) -> Ledger:
        for ledger in self._books.ledgers:
            if ledger.label == label:
                return ledger
        raise MessageError(f"there is no label {label!r}; the configuration has "
                           + ", ".join(ledger.label for ledger in self._books.ledgers))

    # ---- the host tier

    def fence(self) -> None:
        """To be called behind the last ``open`` of a forward pass and before its launch: no copy reads what it writes.

        Opening a page may evict another one, whose bytes are still to be copied out of the very page that was opened.
        On CUDA the current stream waits for such copies; on the CPU this thread does. Without a host tier it does
        nothing.
        """
        for tier in self._books.tiers:
            tier.fence()

    def wait_for_copies(self, timeout_s: float = 0.01) -> None:
        """Returns when a copy has ended, or after so long: for an engine that only has sequences to be read in.

        What has ended shows in the next step. Without copies under way it returns at once.
        """
        busy = [tier for tier in self._books.tiers if tier.in_flight]
        for tier in busy:
            tier.flush()
        if busy:
            busy[0].engine.wait(timeout_s)

    def settle(self, timeout_s: float = 30.0) -> bool:
        """Waits between two steps until no copy is under way, and takes note of them. False: one still is by then.

        Raises SequenceError between begin and end of a step, whose ballot counts on host pages as they were at begin.
        """
        if self._agreement.ballot is not None:
            raise SequenceError("settle between begin_step and end_step; it belongs between two steps")
        end = time.monotonic() + timeout_s
        while any(tier.in_flight for tier in self._books.tiers):
            if time.monotonic() >= end:
                return False
            self.wait_for_copies()
            self._books.poll_all()
        return True

    def prefill_took(self, tokens: int, seconds: float) -> None:
        """This rank's engine computed so many tokens of prompts in so many seconds; see ``host.skip_slow_loads``.

        A load that would take longer than computing the pages again is not made. The mean of the last calls counts.
        """
        if self.config.host.skip_slow_loads and tokens > 0 and seconds > 0:
            self._books.prefill_took(tokens, seconds)

    def watch_copies(self, watch: Callable[[Copy], None] | None, label: str = MAIN) -> None:
        """``watch(copy)`` is called from now on for every copy of a label that is ordered, before it begins.

        None: nobody is called. For whoever follows what a page holds. It must not call the cache.
        """
        tier = self._ledger(label).tier
        if tier is not None:
            tier.ordered = watch if watch is not None else lambda copy: None
