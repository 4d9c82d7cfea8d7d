"""What every copy engine keeps of its copies: which run, which have ended and were not told yet, what is overdue."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence

from distkv.errors import CopyFailed, InvariantError
from distkv.host.copies import Copy, CopyEngine, CopyState, Kind

__all__ = ["TrackedCopies", "source_failed"]

_WEIGHT = 0.2  # of the newest measurement


class TrackedCopies(CopyEngine):
    """An engine but for what moves bytes: a subclass starts copies and says which have ended, with what error.

    All methods are the cache's thread's; a subclass's own threads touch no copy's state. ``load_timeout_s``: a load
    that runs for longer is overdue, or that waits for so long while no other copy ends; it is also the limit of
    :meth:`close`.
    """

    def __init__(self, *, pages: float = math.inf, host_pages: float = math.inf,
                 load_timeout_s: float = math.inf) -> None:
        self._sizes = pages, host_pages
        self._limit_s = load_timeout_s
        self._running: dict[Copy, float] = {}  # when it was submitted, in this order
        self._news: list[Copy] = []  # ended, and not told yet
        self._submitted = 0
        self._closed = False
        self._page_s: float | None = None
        self._last_end = -math.inf

    # ---- the subclass's part

    @abstractmethod
    def _start(self, copies: list[Copy]) -> None:
        """Takes copies that run from now on. What goes wrong with one is an error of its end: nothing is raised."""

    @abstractmethod
    def _collect(self) -> Iterable[tuple[Copy, BaseException | None]]:
        """The copies that have ended since the last call, each once."""

    @abstractmethod
    def _fence(self, copies: list[Copy]) -> None:
        """As ``fence``; of copies that were running."""

    # ---- the interface

    def submit(self, copies: Sequence[Copy]) -> None:
        """As the interface says. Raises InvariantError, and takes none, for copies that were submitted before or wait
        for one that was not."""
        known: set[Copy] = set()
        for copy in copies:
            if copy.state is not CopyState.PREPARED or copy in known:
                raise InvariantError(f"{_name(copy)} was submitted before")
            for other in _waits_for(copy):
                if other not in known and other not in self._running and not other.ended:
                    raise InvariantError(f"{_name(copy)} waits for {_name(other)}, which was not submitted here")
            known.add(copy)
        now = time.monotonic()
        taken = []
        for copy in copies:
            self._submitted += 1
            copy.order, copy.state = self._submitted, CopyState.RUNNING
            self._running[copy] = now
            error = self._refusal(copy)
            if error is None:
                taken.append(copy)
            else:
                self._end(copy, error)
        if taken:
            self._start(taken)

    def poll(self) -> Sequence[Copy]:
        """As the interface says."""
        self._settle()
        self._mark_overdue()
        news, self._news = self._news, []
        return news

    def fence(self, copies: Iterable[Copy]) -> None:
        """As the interface says. Raises InvariantError for a copy that was not submitted."""
        waits = []
        for copy in copies:
            if copy in self._running:
                waits.append(copy)
            elif not copy.ended:
                raise InvariantError(f"a fence waits for {_name(copy)}, which was not submitted here")
        if waits:
            self._fence(waits)

    def load_s(self, pages: int) -> float | None:
        """As the interface says: by the seconds that one page took, a moving average."""
        return None if self._page_s is None else pages * self._page_s

    # ---- for subclasses

    def _measured(self, pages: int, seconds: float) -> None:
        page_s = seconds / pages
        self._page_s = page_s if self._page_s is None else (1 - _WEIGHT) * self._page_s + _WEIGHT * page_s

    def _settle(self) -> None:
        for copy, error in self._collect():
            self._end(copy, error)

    def _end(self, copy: Copy, error: BaseException | None) -> None:
        del self._running[copy]
        self._last_end = time.monotonic()
        copy.state, copy.error = (CopyState.DONE, None) if error is None else (CopyState.FAILED, error)
        self._news.append(copy)

    def _refusal(self, copy: Copy) -> CopyFailed | None:
        pages, host_pages = self._sizes
        if self._closed:
            return CopyFailed(f"{_name(copy)}: the copy engine is closed")
        if not 0 <= copy.device < pages or not 0 <= copy.host < host_pages:
            return CopyFailed(f"{_name(copy)}: there are {pages} pages in the pool and {host_pages} on the host")
        if copy.source is not None and copy.source.state is CopyState.FAILED:
            return source_failed(copy)
        return None

    def _mark_overdue(self) -> None:
        now = time.monotonic()
        for copy, since in self._running.items():
            if now - since <= self._limit_s:
                break  # and so are all that came later
            if copy.kind is Kind.LOAD and now - self._begun(copy, since) > self._limit_s:
                copy.overdue = True

    def _begun(self, copy: Copy, submitted: float) -> float:
        """Since when its time counts: not while it only waits for others that go on."""
        return max(submitted, self._last_end)


def source_failed(copy: Copy) -> CopyFailed:
    """The error of a load whose host page was not filled."""
    return CopyFailed(f"{_name(copy)}: the store that was to fill the host page has failed")


def _name(copy: Copy) -> str:
    if copy.kind is Kind.STORE:
        return f"the store of page {copy.device} to host page {copy.host}"
    return f"the load of host page {copy.host} to page {copy.device}"


def _waits_for(copy: Copy) -> tuple[Copy, ...]:
    return copy.after if copy.source is None else (*copy.after, copy.source)
