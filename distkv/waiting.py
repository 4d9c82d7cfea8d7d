"""The waiting queue: requests that are not admitted yet, in the order in which they will be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distkv.pending import Pending

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Pending requests, first in, first out, but for those that come back, which go to the head.

    A request that is aborted while a ballot is in flight keeps its place until the ballot has been decided upon: the
    ranks may hear of the abort before or after. For the same reason what comes back meanwhile joins it afterwards.
    """

    def __init__(self) -> None:
        self._queue: list[Pending] = []
        self._by_id: dict[str, Pending] = {}  # those that are not aborted
        self._aborted_in_flight = False
        self._coming_back: list[Pending] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Pending]:
        yield from self._coming_back
        yield from self._queue

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    @property
    def ids(self) -> tuple[str, ...]:
        """Those that are not aborted, in order."""
        return tuple(p.request.id for p in self if not p.aborted)

    def first(self, n: int) -> list[Pending]:
        """The first ``n``."""
        return self._queue[:n]

    def add(self, pending: Pending) -> None:
        """Behind all others."""
        self._queue.append(pending)
        self._by_id[pending.request.id] = pending

    def put_back(self, those: Sequence[Pending], *, in_flight: bool = False) -> None:
        """Ahead of all others, in this order; ``in_flight``: when the step has ended."""
        if in_flight:
            self._coming_back[0:0] = those
        else:
            self._queue[0:0] = those
        self._by_id.update((pending.request.id, pending) for pending in those)

    def abort(self, request_id: str, *, in_flight: bool) -> bool:
        """Takes a request out, at once or with ``drop_aborted``. Whether there was one of this name."""
        pending = self._by_id.pop(request_id, None)
        if pending is None:
            return False
        pending.aborted = True
        if in_flight:
            self._aborted_in_flight = True
        else:
            self._queue.remove(pending)
        return True

    def admitted(self, pending: Pending) -> None:
        """It waits no longer."""
        self._queue.remove(pending)
        if not pending.aborted:
            del self._by_id[pending.request.id]

    def drop_aborted(self) -> None:
        """The ballot in flight has been decided upon."""
        if self._aborted_in_flight:
            self._aborted_in_flight = False
            self._queue = [p for p in self._queue if not p.aborted]

    def end_of_step(self) -> None:
        """No ballot is in flight any more, and what was decided is done."""
        self.drop_aborted()
        if self._coming_back:
            back, self._coming_back = self._coming_back, []
            self._queue[0:0] = [p for p in back if not p.aborted]

    def clear(self) -> None:
        """Nothing waits."""
        self._queue.clear()
        self._coming_back.clear()
        self._by_id.clear()
