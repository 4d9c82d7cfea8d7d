"""What went wrong on a rank outside the ballot, and who on this rank is to be told.

A fault ends the group. The first one counts: every rank names the same rank, step and cause.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from distkv.errors import GroupError, GroupTimeout, PeerFault, PeerLost

logger = logging.getLogger(__name__)

SILENT = "silent"
"""The kind of a fault that no rank reported: a rank, or the store, gave no sign of life for as long as the deadline."""

LOST = "lost"
"""The kind of a fault that no rank reported: a connection broke, and the process at its end gives no sign of life."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why a group has ended. ``rank`` is where it went wrong, None where that cannot be known; ``seen_by`` who said so.

    ``step``: the cache's step on that rank, as far as it was heard of; -1 before the first. ``kind``: ``silent`` or
    ``lost``, or, for an exception, what the rank was doing (``forward``, ``commit``; see ``PrefixCache.guard``).
    ``text``: for an exception its type and message, for the others the whole story.
    """

    rank: int | None
    step: int
    kind: str
    text: str
    seen_by: int
    seconds: float = 0.0
    """For ``silent``: for how long."""

    def error(self, *, rank: int) -> GroupError:
        """The error that rank ``rank`` raises for it: GroupTimeout (silent), PeerLost (lost) or PeerFault."""
        if self.kind == SILENT:
            return GroupTimeout("the watch over the ranks", self.seconds, rank=rank, step=self.step,
                                failed_rank=self.rank, story=self.text)
        if self.kind == LOST:
            return PeerLost("the watch over the ranks", "", rank=rank, step=self.step, failed_rank=self.rank,
                            story=self.text)
        return PeerFault(self.rank if self.rank is not None else -1, self.kind, self.text, rank=rank, step=self.step)

    def encode(self) -> str:
        """As text, for a store."""
        return json.dumps(vars(self))

    @classmethod
    def decode(cls, data: bytes | str) -> Fault:
        """The inverse of :meth:`encode`."""
        return cls(**json.loads(data))

    @classmethod
    def of(cls, error: BaseException, what: str, *, rank: int, step: int) -> Fault:
        """The fault of a rank that caught ``error`` while it was doing ``what``."""
        first = (str(error).splitlines() or [""])[0]
        return cls(rank=rank, step=step, kind=what, text=f"{type(error).__name__}: {first[:500]}", seen_by=rank)


OnFault = Callable[[Fault], None]


class FaultBoard:
    """The first fault that this rank knows of, and the callbacks for it. Any thread may call it."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.step = -1
        """The step that the cache on this rank has begun last; the cache sets it."""
        self.known = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[OnFault] = []
        self._told = False

    def on_fault(self, callback: OnFault) -> Callable[[], None]:
        """Registers; returns what takes it back. If the callbacks were called already, it is called at once."""
        with self._lock:
            late = self._told
            if not late:
                self._callbacks.append(callback)
        if late and self.fault is not None:
            _call(callback, self.fault)

        def forget() -> None:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

        return forget

    def post(self, fault: Fault) -> Fault:
        """Notes a fault if it is the first, and returns the first."""
        with self._lock:
            if self.fault is None:
                self.fault = fault
            first = self.fault
        self.known.set()
        return first

    def tell(self) -> int:
        """Calls the callbacks, each once; one that raises is logged and does not keep the others from being called.

        Returns how many there were.
        """
        with self._lock:
            if self._told or self.fault is None:
                return 0
            self._told = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _call(callback, self.fault)
        return len(callbacks)


def _call(callback: OnFault, fault: Fault) -> None:
    try:
        callback(fault)
    except Exception:  # the group is over in any case, and the other callbacks have to be called
        logger.exception("a callback of on_fault failed")
