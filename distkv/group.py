"""The group of ranks that decide together: the interface, and a group within one process.

The cache needs two things of a group: an exchange of a few bytes at start, and one elementwise minimum per step.
:class:`distkv.TorchGroup` gives them over torch.distributed.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from distkv.ballot import Vector
from distkv.config import GroupConfig
from distkv.errors import GroupError, GroupTimeout, PeerLost
from distkv.faults import Fault, FaultBoard

_START_S = 30.0


class Ticket(ABC):
    """A minimum in flight."""

    @abstractmethod
    def wait(self) -> Vector:
        """The elementwise minimum over all ranks. Raises GroupTimeout or PeerLost, both of which end the group."""


class Group(ABC):
    """The ranks that share every decision. Does not own its transport: closing a cache leaves the group as it was.

    A rank that fails outside the ballot reports it, and then the group is over: whoever waits for that rank comes out,
    and every rank raises what :attr:`fault` says. How the ranks hear of it is the group's: a watchdog with a store
    (:class:`distkv.TorchGroup`), or what the members share (:class:`distkv.LocalGroup`).
    """

    rank: int
    size: int
    cache: weakref.ref[object] | None = None
    """The cache that decides with this group. Another one may follow when it was closed or is gone."""

    @cached_property
    def board(self) -> FaultBoard:
        """The first fault that this rank has heard of, and the callbacks for it."""
        return FaultBoard()

    def configure(self, config: GroupConfig) -> None:  # noqa: B027
        """Called once by the cache, before anything else: for what the group was not told when it was made.

        Raises ConfigError if the group cannot be what the configuration asks for.
        """

    @abstractmethod
    def exchange(self, data: bytes) -> list[bytes]:
        """The data of every rank, by rank. Used once, at start. Raises GroupTimeout or PeerLost."""

    @abstractmethod
    def start(self, vector: Vector, step: int) -> Ticket:
        """Enters the one collective of a step; ``vector`` may be reused when the ticket was waited for."""

    # ---- faults

    @property
    def fault(self) -> Fault | None:
        """Why the group is over, or None. Costs nothing: no communication."""
        return self.board.fault

    def on_fault(self, callback: Callable[[Fault], None]) -> Callable[[], None]:
        """Registers what is called once on this rank when the group is over, and returns what takes it back.

        For an engine: abort the communicators in which this rank may be waiting for the failed one
        (:func:`distkv.torch_group.abort`). It is called in the watchdog's thread, where there is one; on the failed
        rank too. It may come after this rank's own thread has raised the fault's error, so clean up in whichever is
        the later one. It must not call the cache or the group, and what it raises is logged.
        """
        return self.board.on_fault(callback)

    def report(self, fault: Fault) -> Fault:
        """Tells all ranks of a fault of this one, which ends the group. Returns the first fault of the group.

        Does not raise and does not wait for the others; a store that does not answer costs a second at most.
        """
        first = self.board.post(fault)
        self.board.tell()
        return first

    def explain(self, error: BaseException) -> GroupError | None:
        """The cause of ``error``, if it came of another rank's end: which rank, at which step. None: it did not.

        May wait for some beats of the watchdog, to learn which rank gives no more sign of life.
        """
        if self.fault is not None and isinstance(error, GroupTimeout | PeerLost):
            return self.fault.error(rank=self.rank)
        return error if isinstance(error, GroupError) else None

    def close(self) -> None:  # noqa: B027
        """This rank leaves: ends the watchdog and its connection; no callback is called any more. The transport stays.

        For whoever made the group, when no rank waits for this one any more. A second call does nothing.
        """


class SoloGroup(Group):
    """A group of one rank."""

    rank = 0
    size = 1

    def exchange(self, data: bytes) -> list[bytes]:
        return [data]

    def start(self, vector: Vector, step: int) -> Ticket:
        return Known(vector)


class Known(Ticket):
    """The minimum of a group of one."""

    def __init__(self, vector: Vector) -> None:
        self._vector = vector

    def wait(self) -> Vector:
        return self._vector


class _Meeting:
    """What the members of a local group share: what each has brought to which round."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.rounds: dict[tuple[str, int], dict[int, Any]] = {}
        self.readers: dict[tuple[str, int], int] = {}
        self.gone: set[int] = set()
        self.fault: Fault | None = None


class LocalGroup(Group):
    """One member of a group of ranks that live in one process, one thread each. ``LocalGroup.make(n)`` makes all.

    Constructing a cache waits for the other ranks, so each rank's is constructed in a thread of its own;
    :class:`distkv.testing.SimulatedGroup` does that. With ``timeout_s=0`` nothing is waited for after that: a minimum
    that lacks a rank raises GroupTimeout at once. That is for a driver in one thread, which begins a step on all
    ranks before it ends it on the first, and wants to know what would hang on real ranks.
    """

    def __init__(self, meeting: _Meeting, rank: int, timeout_s: float) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size
        self.timeout_s = timeout_s
        self._exchanges = 0
        self._minima = 0

    @classmethod
    def make(cls, size: int, timeout_s: float = 30.0) -> list[LocalGroup]:
        """All members of a new group, by rank."""
        meeting = _Meeting(size)
        return [cls(meeting, rank, timeout_s) for rank in range(size)]

    def exchange(self, data: bytes) -> list[bytes]:
        number = ("exchange", self._exchanges)
        self._exchanges += 1
        self._bring(number, data)
        return self._gather(number, "the exchange at start", -1, self.timeout_s or _START_S)

    def start(self, vector: Vector, step: int) -> Ticket:
        number = ("minimum", self._minima)
        self._minima += 1
        self._bring(number, vector.copy())
        return _LocalTicket(self, number, step)

    def leave(self) -> None:
        """This member is gone, as a process that died: the others raise PeerLost where they would wait for it."""
        with self._meeting.changed:
            self._meeting.gone.add(self.rank)
            self._meeting.changed.notify_all()

    @property
    def fault(self) -> Fault | None:
        """As for any group; the callbacks are called in the thread that asks, as there is no watchdog."""
        if self._meeting.fault is not None:
            self.board.post(self._meeting.fault)
            self.board.tell()
        return self._meeting.fault

    def report(self, fault: Fault) -> Fault:
        with self._meeting.changed:
            self._meeting.fault = self._meeting.fault or fault
            self._meeting.changed.notify_all()
        return self.fault or fault

    def _bring(self, number: tuple[str, int], value: Any) -> None:
        with self._meeting.changed:
            self._meeting.rounds.setdefault(number, {})[self.rank] = value
            self._meeting.changed.notify_all()

    def _gather(self, number: tuple[str, int], what: str, step: int, seconds: float) -> list[Any]:
        """What every rank brought to a round, by rank. Once per member and round."""
        meeting = self._meeting
        with meeting.changed:
            brought = meeting.rounds[number]
            meeting.changed.wait_for(
                lambda: len(brought) == self.size or bool(meeting.gone) or meeting.fault is not None, seconds
            )
            if len(brought) < self.size:
                if meeting.fault is not None:
                    raise meeting.fault.error(rank=self.rank)
                if meeting.gone:
                    raise PeerLost(what, f"rank(s) {sorted(meeting.gone)} left", rank=self.rank, step=step)
                raise GroupTimeout(what, seconds, rank=self.rank, step=step)
            meeting.readers[number] = meeting.readers.get(number, 0) + 1
            if meeting.readers[number] == self.size:
                del meeting.rounds[number], meeting.readers[number]
            return [brought[rank] for rank in range(self.size)]


class _LocalTicket(Ticket):
    def __init__(self, group: LocalGroup, number: tuple[str, int], step: int) -> None:
        self._group, self._number, self._step = group, number, step

    def wait(self) -> Vector:
        brought = self._group._gather(self._number, "the ballot", self._step, self._group.timeout_s)
        return np.asarray(np.minimum.reduce(brought))
