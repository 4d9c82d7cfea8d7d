"""Copies on the CPU, by threads: a pool of plain memory and host rows, with the GIL released while bytes move."""

from __future__ import annotations

import atexit
import heapq
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from distkv.errors import CopyFailed
from distkv.host._engine import TrackedCopies, source_failed
from distkv.host.copies import Copy, Kind
from distkv.host.kv import PagedKV
from distkv.host.memory import HostRows

__all__ = ["ThreadedCopies"]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    copy: Copy
    urgent: bool
    """A load, or what a load or a fence waits for."""
    waits: int = 0
    """How many copies have to end before it may start."""
    followers: list[_Job] = field(default_factory=list)
    started: bool = False
    begun: float = 0.0
    """When it started, by the monotonic clock."""
    ended: bool = False
    error: BaseException | None = None


class ThreadedCopies(TrackedCopies):
    """Copies pages between a pool on the CPU and host rows, in threads of its own. Takes over ``rows``.

    A copy starts when those that it waits for have ended, so that no worker waits for another one; what loads and
    fences wait for comes first, loads before stores, in the order of ``submit``. Compute is the caller's own thread:
    what it wrote before ``submit`` is there, and ``fence`` blocks until the copies have ended.

    A copy that fails is an error of its own and of the loads that read what it should have written. The threads end
    with :meth:`close`, which a program that has nothing left to do but to end calls by itself: a copy that never ends
    holds it up for the time limit.
    """

    rows: HostRows

    def __init__(self, kv: PagedKV, rows: HostRows, *, threads: int = 2, load_timeout_s: float = 10.0) -> None:
        """Raises LayoutMismatch if ``rows`` are for other pages; RuntimeError if no thread can be started."""
        rows.layout.check_same(kv.layout)
        super().__init__(pages=kv.pages, host_pages=rows.pages, load_timeout_s=load_timeout_s)
        self._kv, self.rows = kv, rows
        # made once: behind a page that has swept the caches every line of Python costs
        self._places = [kv.places(chunk) for chunk in rows.chunks]
        # One lock for all below; it is held for a few lines at a time, and never while bytes move. Whoever wakes up
        # needs the GIL, too, so nobody is woken for nothing. It is taken as such, for an interrupt between the lines of
        # a condition's __enter__ would leave it taken for ever.
        self._lock = threading.Lock()
        self._todo = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._jobs: dict[Copy, _Job] = {}  # until its end was collected
        self._ready: list[tuple[bool, int, _Job]] = []  # a heap; a job that became urgent is there twice
        self._over: list[tuple[Copy, BaseException | None, float]] = []
        self._awaited: set[_Job] = set()  # what a fence still waits for
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._at_exit = partial(_close_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)
        try:
            for number in range(max(1, threads)):
                thread = threading.Thread(target=self._work, name=f"distkv-copy-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    # ---- the cache's thread

    def wait(self, timeout_s: float) -> None:
        """As the interface says; returns at once if nothing runs."""
        if self._running and not self._news:
            with self._lock:
                self._done.wait_for(lambda: bool(self._over), min(max(0.0, timeout_s), threading.TIMEOUT_MAX))

    def load_s(self, pages: int) -> float | None:
        """As the interface says, with all threads at work."""
        side_by_side = len(self._threads)
        return super().load_s(-(-pages // side_by_side))

    def close(self) -> None:
        """Fails what has not begun, waits for the rest, ends the threads and gives back the rows. Can be called again.

        ``poll`` still tells how the copies ended."""
        with self._lock:
            self._closed = self._closing = True
            for job in list(self._jobs.values()):
                if not job.started and not job.ended:
                    job.ended = True
                    self._over.append((job.copy, CopyFailed("the copy engine was closed before this copy began"), 0.0))
            self._todo.notify_all()
        atexit.unregister(self._at_exit)
        with self._lock:
            ended = self._done.wait_for(lambda: not any(job.started and not job.ended for job in self._jobs.values()),
                                        min(self._limit_s, threading.TIMEOUT_MAX))
        if not ended:
            logger.warning("a copy between pool and host did not end within %g s and is left behind, with the host's "
                           "memory; its thread ends with it", self._limit_s)
        else:
            for thread in self._threads:  # none moves anything, so each ends at once
                thread.join()
            self._places.clear()
            self.rows.close()

    def _start(self, copies: list[Copy]) -> None:
        with self._lock:
            for copy in copies:
                job = self._jobs[copy] = _Job(copy, urgent=copy.kind is Kind.LOAD)
                for other in self._before(job):
                    if not other.ended:
                        other.followers.append(job)
                        job.waits += 1
                    elif other.error is not None and other.copy is copy.source:
                        job.error = source_failed(copy)
                if job.urgent:
                    self._hurry(self._before(job))
                self._go_on(job)

    def _collect(self) -> Iterable[tuple[Copy, BaseException | None]]:
        with self._lock:
            over, self._over = self._over, []
            for copy, _, _ in over:
                del self._jobs[copy]
        for copy, error, seconds in over:
            if copy.kind is Kind.LOAD and error is None:
                self._measured(1, seconds)
            yield copy, error

    def _fence(self, copies: list[Copy]) -> None:
        with self._lock:
            jobs = [self._jobs[copy] for copy in copies]
            self._hurry(jobs)
            self._awaited = {job for job in jobs if not job.ended}
            try:
                self._done.wait_for(lambda: not self._awaited)
            finally:
                self._awaited = set()  # an interrupt, too

    def _begun(self, copy: Copy, submitted: float) -> float:
        job = self._jobs.get(copy)
        return job.begun if job is not None and job.started else super()._begun(copy, submitted)

    # ---- with the lock held

    def _before(self, job: _Job) -> list[_Job]:
        """What it waits for, as far as that has not been collected; each once."""
        named = {*job.copy.after, job.copy.source}
        return [self._jobs[copy] for copy in named if copy is not None and copy in self._jobs]

    def _hurry(self, jobs: list[_Job]) -> None:
        """These, and what they wait for, come before all that is not urgent."""
        todo = list(jobs)
        while todo:
            job = todo.pop()
            if not job.urgent and not job.ended:
                job.urgent = True
                todo += self._before(job)
                if not job.waits and not job.started:
                    self._go_on(job)

    def _go_on(self, job: _Job) -> None:
        """It may start, or has ended already, if it waits for nothing."""
        if job.waits:
            return
        if job.error is not None:
            self._finish(job, job.error, 0.0)
        else:
            heapq.heappush(self._ready, (not job.urgent, job.copy.order, job))
            self._todo.notify()

    def _finish(self, job: _Job, error: BaseException | None, seconds: float) -> None:
        job.ended, job.error = True, error
        self._awaited.discard(job)
        self._over.append((job.copy, error, seconds))
        for follower in job.followers:
            follower.waits -= 1
            if error is not None and follower.copy.source is job.copy:
                follower.error = source_failed(follower.copy)
            if not follower.ended:
                self._go_on(follower)

    # ---- the workers

    def _work(self) -> None:
        job = self._next()
        while job is not None:
            error: BaseException | None = None
            begun = time.perf_counter()
            try:
                self._move(job.copy)
            except BaseException as problem:  # handed to the cache's thread, as the copy's error
                logger.debug("a copy between pool and host failed", exc_info=True)
                error = problem
            seconds = time.perf_counter() - begun
            with self._lock:
                self._finish(job, error, seconds)
                if not self._awaited:
                    self._done.notify_all()
                job = self._take()
            del error  # an idle worker keeps nothing alive
            if job is None:
                job = self._next()

    def _next(self) -> _Job | None:
        """The next copy, when there is one; None when it is time to end."""
        with self._lock:
            while not self._closing:
                job = self._take()
                if job is not None:
                    return job
                self._todo.wait()
        return None

    def _take(self) -> _Job | None:
        """The next copy, if there is one now. With the lock held."""
        while self._ready and not self._closing:
            _, _, job = heapq.heappop(self._ready)
            if not job.started:
                job.started, job.begun = True, time.monotonic()
                return job
        return None

    def _move(self, copy: Copy) -> None:
        """Copies one page, in a worker."""
        chunk, row = divmod(copy.host, self.rows.rows_per_chunk)
        if copy.kind is Kind.STORE:
            self._kv.copy_out(copy.device, self._places[chunk], row)
        else:
            self._kv.copy_in(self._places[chunk], row, copy.device)


def _close_at_exit(engine: weakref.ref[ThreadedCopies], process: int) -> None:
    """When all threads but the daemons have ended, and before the memory that copies move is torn down."""
    still = engine()
    if still is not None and process == os.getpid():  # a fork has none of the threads
        still.close()
