"""The group of ranks that decide together: the interface, and a group within one process.

The cache needs two things of a group: an exchange of a few bytes at start, and one elementwise minimum per step.
:class:`distkv.TorchGroup` gives them over torch.distributed.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from distkv.ballot import Vector
from distkv.errors import GroupTimeout, PeerLost


class Ticket(ABC):
    """A minimum in flight."""

    @abstractmethod
    def wait(self) -> Vector:
        """The elementwise minimum over all ranks. Raises GroupTimeout or PeerLost, both of which end the group."""


class Group(ABC):
    """The ranks that share every decision. Does not own its transport: closing a cache leaves the group as it was."""

    rank: int
    size: int

    @abstractmethod
    def exchange(self, data: bytes) -> list[bytes]:
        """The data of every rank, by rank. Used once, at start. Raises GroupTimeout or PeerLost."""

    @abstractmethod
    def start(self, vector: Vector, step: int) -> Ticket:
        """Enters the one collective of a step; ``vector`` may be reused when the ticket was waited for."""


class SoloGroup(Group):
    """A group of one rank."""

    rank = 0
    size = 1

    def exchange(self, data: bytes) -> list[bytes]:
        return [data]

    def start(self, vector: Vector, step: int) -> Ticket:
        return _Known(vector)


class _Known(Ticket):
    def __init__(self, vector: Vector) -> None:
        self._vector = vector

    def wait(self) -> Vector:
        return self._vector


class _Meeting:
    """What the members of a local group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.exchanged: list[bytes | None] = [None] * size
        self.deposits: dict[int, dict[int, Vector]] = {}
        self.minima: dict[int, Vector] = {}
        self.readers: dict[int, int] = {}
        self.gone: set[int] = set()


class LocalGroup(Group):
    """One member of a group of ranks that live in one process: one thread each, or all in one thread.

    ``LocalGroup.make(n)`` makes all members. With ``timeout_s=0`` nothing is ever waited for: a minimum that lacks a
    rank raises GroupTimeout at once, which is what a driver that begins a step on all ranks before it ends it on the
    first wants to know: on real ranks that would hang.
    """

    def __init__(self, meeting: _Meeting, rank: int, timeout_s: float) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size
        self.timeout_s = timeout_s
        self._exchanges = 0
        self._round = 0

    @classmethod
    def make(cls, size: int, timeout_s: float = 30.0) -> list[LocalGroup]:
        """All members of a new group, by rank."""
        meeting = _Meeting(size)
        return [cls(meeting, rank, timeout_s) for rank in range(size)]

    def exchange(self, data: bytes) -> list[bytes]:
        meeting = self._meeting
        with meeting.changed:
            meeting.exchanged[self.rank] = data
            meeting.changed.notify_all()
            self._wait_for(lambda: all(d is not None for d in meeting.exchanged), "the exchange at start", -1,
                           max(self.timeout_s, 30.0))
            return [d for d in meeting.exchanged if d is not None]

    def start(self, vector: Vector, step: int) -> Ticket:
        meeting = self._meeting
        number, self._round = self._round, self._round + 1
        with meeting.changed:
            meeting.deposits.setdefault(number, {})[self.rank] = vector.copy()
            meeting.changed.notify_all()
        return _LocalTicket(self, number, step)

    def leave(self) -> None:
        """This member is gone, as a process that died: the others raise PeerLost where they would wait for it."""
        with self._meeting.changed:
            self._meeting.gone.add(self.rank)
            self._meeting.changed.notify_all()

    def minimum(self, number: int, step: int) -> Vector:
        """The minimum of round ``number``."""
        meeting = self._meeting
        with meeting.changed:
            self._wait_for(lambda: number in meeting.minima or len(meeting.deposits[number]) == self.size,
                           "the ballot", step, self.timeout_s)
            if number not in meeting.minima:
                meeting.minima[number] = np.minimum.reduce(list(meeting.deposits.pop(number).values()))
            result = meeting.minima[number]
            meeting.readers[number] = meeting.readers.get(number, 0) + 1
            if meeting.readers[number] == self.size:
                del meeting.minima[number], meeting.readers[number]
        return result

    def _wait_for(self, done: Callable[[], bool], what: str, step: int, seconds: float) -> None:
        meeting = self._meeting
        if not meeting.changed.wait_for(lambda: done() or bool(meeting.gone), seconds):
            raise GroupTimeout(what, seconds, rank=self.rank, step=step)
        if not done():
            raise PeerLost(what, f"rank(s) {sorted(meeting.gone)} left", rank=self.rank, step=step)


class _LocalTicket(Ticket):
    def __init__(self, group: LocalGroup, number: int, step: int) -> None:
        self._group, self._number, self._step = group, number, step

    def wait(self) -> Vector:
        return self._group.minimum(self._number, self._step)
