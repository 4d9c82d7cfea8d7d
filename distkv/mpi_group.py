"""A group over MPI, with mpi4py: for processes that mpirun has started. The host's fastest way to a minimum.

What MPI does when a process dies is the library's: MPICH's mpirun ends the whole job, and no rank has time to raise. A
process that is stopped is noticed by the deadline, or by the watchdog if the group was given a store. After either the
unfinished collective can be neither completed nor cancelled, so MPI cannot be finalised: end the process without it
(``mpi4py.rc.finalize = False`` before the first import of ``mpi4py.MPI``), or by ``comm.Abort()``.
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from distkv.ballot import Vector
from distkv.config import GroupConfig
from distkv.errors import ConfigError, GroupError, GroupTimeout, PeerLost
from distkv.faults import Fault
from distkv.group import Group, Known, Ticket
from distkv.layout import ranks_on_host
from distkv.watchdog import BeatStore, Watchdog

__all__ = ["MpiGroup", "mpi"]

_NAME_BYTES = 8
_SPIN_S = 200e-6  # a minimum among ranks that are all there takes 10 us, and a nap 50 at least
_SPIN_CROWDED_S = 20e-6  # unless the rank that is waited for needs this very core
_NAP_S = 20e-6
_LONG_S = 5e-3  # after so long it is another rank's computing that is waited for
_LONG_NAP_S = 200e-6


def mpi() -> Any:
    """The module ``mpi4py.MPI``, which initialises MPI when it is imported first. Raises ConfigError without it."""
    try:
        from mpi4py import MPI
    except ImportError as error:  # no mpi4py, or no MPI library that it can load
        raise ConfigError("group.transport", f"is mpi, which needs mpi4py and an MPI library ({error}): pip install "
                                             '".[mpi]" mpich in the checkout of distkv; or set it to gloo') from error
    except RuntimeError as error:  # mpi4py found no library, or one of another ABI
        raise ConfigError("group.transport", f"is mpi, but no MPI library can be loaded ({error})") from error
    return MPI


def _cores() -> int:
    """Cores for the ranks of this host. A launcher that binds each rank to a core of its own leaves one to see."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return mine if mine > 1 else os.cpu_count() or 1


class MpiGroup(Group):
    """The ranks of one MPI communicator, which stays the caller's and is neither duplicated nor freed.

    One Iallreduce per step and one exchange at start; nobody else may use the communicator meanwhile. Waiting polls: it
    spins for as long as a minimum usually takes, and then naps between two looks, until the deadline. Where ranks share
    cores it naps almost at once, because the rank that is waited for needs the core.
    """

    backend = "mpi"

    def __init__(self, communicator: Any = None, *, timeout_s: float | None = None,
                 store: Callable[[str], BeatStore] | None = None) -> None:
        """``communicator``: None is COMM_WORLD. ``timeout_s``: None is the configuration's ``group.timeout_s``.

        ``store`` makes the watchdog's store from a name that is new and the same on all ranks; None: no watchdog, and
        a rank that is stopped is noticed by the deadline alone. Raises ConfigError if there is no MPI.
        """
        self._mpi = mpi()
        self._comm = communicator if communicator is not None else self._mpi.COMM_WORLD
        self.rank, self.size = int(self._comm.Get_rank()), int(self._comm.Get_size())
        self._told = timeout_s is not None
        self.timeout_s = timeout_s if timeout_s is not None else GroupConfig().timeout_s
        self._store = store
        self._beat_s: float | None = None
        self._watchdog: Watchdog | None = None
        self._close: weakref.finalize[[], MpiGroup] | None = None
        self._spin_s = _SPIN_CROWDED_S if ranks_on_host(self.size) > _cores() else _SPIN_S
        self._unfinished: list[object] = []  # MPI may still write into the buffers of a request that was given up

    def configure(self, config: GroupConfig) -> None:
        if config.transport not in ("auto", "mpi"):
            raise ConfigError("group.transport", f"is {config.transport}, but the group that the cache was given uses "
                                                 "MPI; give it another one, or set auto or mpi")
        if not self._told:
            self.timeout_s = config.timeout_s
        self._beat_s = config.beat_s(self.timeout_s)

    def exchange(self, data: bytes, *, purpose: str = "the exchange at start") -> list[bytes]:
        """See :meth:`Group.exchange`; ``purpose`` is what its errors call it."""
        mine = np.frombuffer(secrets.token_bytes(_NAME_BYTES) + data, np.uint8)
        lengths = np.zeros(self.size, np.int64)
        length = np.array([len(mine)], np.int64)
        with self._named(purpose, -1):
            self._wait(self._comm.Iallgather(length, lengths), purpose, -1, (length, lengths))
            rows = np.zeros(int(lengths.sum()), np.uint8)
            self._wait(self._comm.Iallgatherv(mine, (rows, lengths)), purpose, -1, (mine, rows))
        ends = np.cumsum(lengths)
        told = [rows[end - n : end].tobytes() for end, n in zip(ends, lengths, strict=True)]
        if self._beat_s and self._watchdog is None and self._store is not None and self.size > 1:
            self._watch(self._store, told[0][:_NAME_BYTES].hex())
        return [row[_NAME_BYTES:] for row in told]

    def _watch(self, store: Callable[[str], BeatStore], name: str) -> None:
        assert self._beat_s
        self._watchdog = Watchdog(store(f"distkv/{name}"), self.board, self.rank, self.size, limit_s=self.timeout_s,
                                  beat_s=self._beat_s)
        self._watchdog.start()
        self._close = weakref.finalize(self, self._watchdog.close)

    def start(self, vector: Vector, step: int) -> Ticket:
        if self.size == 1:
            return Known(vector)
        result = np.empty_like(vector)
        with self._named("the ballot", step):
            request = self._comm.Iallreduce(vector, result, self._mpi.MIN)
        return _MpiTicket(self, request, vector, result, step)

    def _finish(self, request: Any, what: str, step: int, buffers: tuple[object, ...]) -> None:
        """Waits for a request within the deadline, or until there is a fault, whose error it raises.

        ``buffers`` are kept for as long as MPI may use them.
        """
        with self._named(what, step):
            self._wait(request, what, step, buffers)

    def _wait(self, request: Any, what: str, step: int, buffers: tuple[object, ...]) -> None:
        begin = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - begin
            if waited < self._spin_s:
                continue
            if self.board.fault is not None or waited > self.timeout_s:
                self._unfinished.append((request, buffers))
                if self.board.fault is not None:
                    raise self.board.fault.error(rank=self.rank)
                raise GroupTimeout(what, self.timeout_s, rank=self.rank, step=step)
            time.sleep(_NAP_S if waited < _LONG_S else _LONG_NAP_S)

    @contextmanager
    def _named(self, what: str, step: int) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise PeerLost(what, str(error), rank=self.rank, step=step) from error

    # ---- faults

    def report(self, fault: Fault) -> Fault:
        return super().report(fault) if self._watchdog is None else self._watchdog.report(fault)

    def explain(self, error: BaseException) -> GroupError | None:
        fault = self.board.fault
        if fault is None and self._watchdog is not None and isinstance(error, GroupTimeout | PeerLost):
            fault = self._watchdog.explain(broken=isinstance(error, PeerLost))
        if fault is not None and isinstance(error, GroupTimeout | PeerLost):
            return fault.error(rank=self.rank)
        return error if isinstance(error, GroupError) else None

    def close(self) -> None:
        if self._close is not None:
            self._close()


class _MpiTicket(Ticket):
    def __init__(self, group: MpiGroup, request: Any, vector: Vector, result: Vector, step: int) -> None:
        self._group, self._request, self._step = group, request, step
        self._buffers = (vector, result)
        self._result = result

    def wait(self) -> Vector:
        self._group._finish(self._request, "the ballot", self._step, self._buffers)
        return self._result
