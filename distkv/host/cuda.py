"""Copies of a GPU: streams and events, no threads, and nothing that waits on the host.

A page lies in many places of the pool and in one row on the host. So a batch of pages is gathered on the device into a
staging buffer, page by page, and goes to the host in few large copies; a load goes the other way. Stores and loads have
a stream each, and so a copy engine of the GPU each: a load never queues behind stores.

Within a stream everything runs in the order of its launch. That alone guards the staging buffers, one for each stream:
the next batch is gathered when the one before has left. Between streams events do it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from distkv.host._engine import TrackedCopies, source_failed
from distkv.host.copies import Copy, Kind
from distkv.host.kv import PagedKV
from distkv.host.memory import HostRows

__all__ = ["CudaCopies"]

logger = logging.getLogger(__name__)

_STAGING = 64 << 20  # bytes of each of the two buffers, at least one page
_MOST = 512  # pages of a batch, however small
_AHEAD = 16  # batches in flight for whose page ids pinned memory is there from the start
_LOOK_S = 0.0002  # how often the host looks at events, where it has nothing else to do


@dataclass(slots=True, eq=False)
class _Batch:
    """Copies of one kind that were launched together and end together."""

    copies: list[Copy]
    begun: Any
    ended: Any
    """torch.cuda.Event, both."""
    error: BaseException | None = None
    unknown: bool = False
    """The device does not answer: there is no event to wait for."""

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more. An error of the device ends it, too: after one nothing runs there."""
        try:
            return self.unknown or bool(self.ended.query())
        except RuntimeError as error:
            self.error, self.unknown = self.error or error, True
            return True


class CudaCopies(TrackedCopies):
    """Copies pages between a pool on a GPU and host rows, which should be pinned. Takes over ``rows``.

    Compute is the stream ``compute``, or the one that is current at each ``submit`` and ``fence``. A copy starts behind
    what compute had launched before its ``submit``, and behind the copies that it waits for; ``fence`` makes the stream
    wait, and not the host. The engine must not free the pool's tensors before :meth:`close`.
    """

    rows: HostRows

    def __init__(self, kv: PagedKV, rows: HostRows, *, load_timeout_s: float = 10.0,
                 compute: Any | None = None) -> None:
        """Raises LayoutMismatch if ``rows`` are for other pages; what torch raises if the GPU has no memory left."""
        rows.layout.check_same(kv.layout)
        super().__init__(pages=kv.pages, host_pages=rows.pages, load_timeout_s=load_timeout_s)
        self._kv, self.rows, self._compute = kv, rows, compute
        self._cuda: Any = self._module()
        self._fit = min(_MOST, max(1, _STAGING // kv.bytes_per_page))
        self._streams = {kind: self._cuda.Stream(device=kv.device) for kind in Kind}
        self._staging: dict[Kind, torch.Tensor] = {}
        for kind, stream in self._streams.items():
            with self._cuda.stream(stream):  # the allocator ties memory to the stream that it was made on
                self._staging[kind] = torch.empty(self._fit, kv.bytes_per_page, dtype=torch.uint8, device=kv.device)
        # Pinned memory for ids: to get some may stop the device, and torch keeps what it has. All at once, or the
        # same is used again.
        _ = [self._upload([0]) for _ in range(_AHEAD)]
        self._launched: dict[Kind, deque[_Batch]] = {kind: deque() for kind in Kind}
        self._batch_of: dict[Copy, _Batch] = {}
        self._failed: list[tuple[Copy, BaseException]] = []

    def wait(self, timeout_s: float) -> None:
        """As the interface says; returns at once if nothing runs. Looks at the events again and again."""
        end = time.monotonic() + timeout_s
        while self._running and not self._news and not self._failed and time.monotonic() < end:
            if any(batches and batches[0].over for batches in self._launched.values()):
                return
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Waits for what runs and gives back streams, staging buffers and rows; rows that are still in use stay."""
        self._closed = True
        end = time.monotonic() + self._limit_s
        while not all(batch.over for batches in self._launched.values() for batch in batches):
            if time.monotonic() > end:
                logger.error("copies between the GPU and the host have run for %g s; their memory is not given back",
                             self._limit_s)
                return
            time.sleep(_LOOK_S)
        self._staging.clear()
        self.rows.close()

    def _start(self, copies: list[Copy]) -> None:
        behind = self._cuda.Event()
        behind.record(self._compute_stream())
        batch: list[Copy] = []
        for copy in copies:
            if copy.source is not None and self._broken(copy.source, batch, behind):
                self._failed.append((copy, source_failed(copy)))
                continue
            together = not batch or copy.kind is batch[0].kind
            others = _others(copy)
            # what waits for a copy of its own batch would be moved together with it
            if not together or len(batch) == self._fit or (others and not others.isdisjoint(batch)):
                self._launch(batch, behind)
                batch = []
            batch.append(copy)
        self._launch(batch, behind)

    def _broken(self, source: Copy, batch: list[Copy], behind: Any) -> bool:
        """Whether the store has failed already; what is to be launched is, so that this is known."""
        if source in batch:
            self._launch(batch, behind)
            batch.clear()
        launched = self._batch_of.get(source)
        return any(copy is source for copy, _ in self._failed) or (launched is not None and launched.error is not None)

    def _launch(self, copies: list[Copy], behind: Any) -> None:
        if not copies:
            return
        kind = copies[0].kind
        stream = self._streams[kind]
        batch = _Batch(list(copies), self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True))
        others = {self._batch_of[copy] for waiting in copies for copy in _others(waiting) if copy in self._batch_of}
        try:
            with self._cuda.stream(stream):
                stream.wait_event(behind)
                for other in others:
                    stream.wait_event(other.ended)
                batch.begun.record(stream)
                self._move(kind, batch.copies)
        except RuntimeError as error:  # torch's, of the device or of its memory
            batch.error = error
            logger.warning("%d copies between the GPU and the host failed: %s", len(copies), error)
        except BaseException as error:  # an interrupt
            batch.error = error
            raise
        finally:  # whatever came of it: something of it may have been launched, which close has to wait for
            try:
                batch.ended.record(stream)
            except RuntimeError as error:
                batch.error, batch.unknown = batch.error or error, True
            self._launched[kind].append(batch)
            self._batch_of.update(dict.fromkeys(batch.copies, batch))

    def _move(self, kind: Kind, copies: list[Copy]) -> None:
        """Launches one batch on the current stream, which is that of its kind."""
        staging = self._staging[kind][: len(copies)]
        pages = self._upload([copy.device for copy in copies])
        if kind is Kind.STORE:
            self._kv.gather(pages, staging)
        at = 0
        for rows in self.rows.rows([copy.host for copy in copies]):
            part = staging[at : at + len(rows)]
            target, source = (rows, part) if kind is Kind.STORE else (part, rows)
            target.copy_(source, non_blocking=True)
            at += len(rows)
        if kind is Kind.LOAD:
            self._kv.scatter(staging, pages)

    def _upload(self, pages: list[int]) -> torch.Tensor:
        """Ids on the device, without a wait: torch keeps the pinned original until its copy has ended."""
        ids = torch.zeros(self._fit, dtype=torch.int64, pin_memory=True)  # always of one size, to be used again
        ids[: len(pages)] = torch.tensor(pages)
        return ids.to(self._kv.device, non_blocking=True)[: len(pages)]

    def _collect(self) -> Iterable[tuple[Copy, BaseException | None]]:
        failed, self._failed = self._failed, []
        yield from failed
        for kind, batches in self._launched.items():
            while batches and batches[0].over:  # one stream: none ends before the one ahead of it
                batch = batches.popleft()
                if kind is Kind.LOAD and batch.error is None:
                    self._measured(len(batch.copies), batch.begun.elapsed_time(batch.ended) / 1000)
                for copy in batch.copies:
                    del self._batch_of[copy]
                    yield copy, batch.error

    def _fence(self, copies: list[Copy]) -> None:
        stream = self._compute_stream()
        for batch in {self._batch_of[copy] for copy in copies if copy in self._batch_of}:
            if not batch.unknown:
                stream.wait_event(batch.ended)

    def _compute_stream(self) -> Any:
        return self._compute if self._compute is not None else self._cuda.current_stream(self._kv.device)

    def _module(self) -> Any:
        return torch.cuda


def _others(copy: Copy) -> set[Copy]:
    return {*copy.after} if copy.source is None else {*copy.after, copy.source}
