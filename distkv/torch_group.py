"""A group over torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from distkv.ballot import Vector
from distkv.config import GroupConfig
from distkv.errors import ConfigError, GroupError, GroupTimeout, PeerLost
from distkv.faults import Fault
from distkv.group import Group, Known, Ticket
from distkv.watchdog import Watchdog

logger = logging.getLogger(__name__)

_TIMED_OUT = "Operation timed out!"  # gloo's whole message when a wait passed its deadline and nothing broke
_TRANSPORT_MARKS = ("gloo/", "NCCL", _TIMED_OUT, "Application timeout caused pair closure")
_SLICE_S = 0.05  # between two looks at the fault while a collective is waited for
_NAME_BYTES = 8
_ABORT_TAG = 0x6B76  # of a message that nobody sends


def deadline(seconds: float) -> timedelta:
    """``seconds`` as torch takes it: whole milliseconds, and at least one, because it takes 0 for no deadline."""
    return timedelta(milliseconds=max(1, math.ceil(1000 * seconds)))


def transport_failed(error: BaseException) -> bool:
    """Whether an exception says that communication with another rank failed, and not that this rank did."""
    if isinstance(error, GroupTimeout | PeerLost | dist.DistError):
        return True
    # gloo raises plain RuntimeErrors
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _TRANSPORT_MARKS)


def abort(process_group: dist.ProcessGroup) -> None:
    """Makes whoever waits in this process for ``process_group`` raise; it cannot be used afterwards. Never blocks long.

    For a callback of :meth:`distkv.Group.on_fault`, from any thread. NCCL has an abort. In gloo that does nothing
    (torch 2.13); but a receive that passes its deadline breaks all connections of its group, so one is made to do so.
    """
    if process_group.name() != "gloo":
        process_group.abort()
        return
    for peer in range(process_group.size()):
        if peer == process_group.rank():
            continue
        try:
            # the group's own call: those of torch.distributed refuse a group that was destroyed, and its work goes on
            process_group.recv([torch.zeros(1)], peer, _ABORT_TAG).wait(deadline(0.001))
        except RuntimeError:  # this is what it is for; or this connection was broken already
            logger.debug("aborted the connection to rank %d", peer, exc_info=True)


@contextmanager
def named_failures(what: str, seconds: float, *, rank: int, step: int = -1) -> Iterator[None]:
    """Around communication and nothing else: tells a deadline that passed from a connection that broke.

    torch raises RuntimeError and its subclasses for both. Raises GroupTimeout or PeerLost instead.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise GroupTimeout(what, seconds, rank=rank, step=step) from error
        raise PeerLost(what, _first_line(error), rank=rank, step=step) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].split(". This is typically")[0]


class _InFlight:
    """The last collective that a group of ours has entered, and its end when nobody waits for it any more."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self._work: dist.Work | None = None
        self._lock = threading.Lock()

    def enter(self, work: dist.Work | None) -> dist.Work:
        assert work is not None
        self._work = work
        return work

    def give_up(self) -> None:
        """Aborts the process group if the collective is not done: the process could not end before the others come."""
        with self._lock:
            work, self._work = self._work, None
            if work is not None and not work.is_completed():
                abort(self._group)


class TorchGroup(Group):
    """The ranks of one torch.distributed process group.

    The process group is the caller's: it is used for one all-reduce per step and one exchange at start, never
    destroyed and never reconfigured. The caller makes sub-groups in one global order on all ranks, and issues its
    own collectives on the same group in an order that all ranks share. With NCCL the vector lives on ``device``.

    After an error that ends the group the process group cannot be used any more: a collective that nobody will wait
    for is aborted (see :func:`abort`), then or at the latest by :meth:`close` or the end of the process, because torch
    would let the process end only when the ranks that are missing come or are gone.

    The first :meth:`exchange` after the cache configured the group starts a watchdog (:mod:`distkv.watchdog`), over the
    process group's own store or one that is given; :meth:`close`, or the end of the process, ends it.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float | None = None,
                 device: torch.device | str | None = None, store: dist.Store | None = None) -> None:
        """``process_group``: None is the default group. ``timeout_s``: None is the configuration's ``group.timeout_s``.
        ``device``: None is the CPU, or the current GPU under NCCL. ``store``: what the watchdog talks through, the same
        on all ranks; None is the process group's. It is cloned: a TCPStore gets a connection more."""
        self._group = process_group if process_group is not None else dist.group.WORLD
        if self._group is None:
            raise RuntimeError("torch.distributed is not initialised: call init_process_group, or give a process_group")
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        self._told = timeout_s is not None
        self.timeout_s = timeout_s if timeout_s is not None else GroupConfig().timeout_s
        self.backend = str(dist.get_backend(self._group))
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else "cpu"
        self.device = torch.device(device)
        self._store = store
        self._beat_s: float | None = None
        self._watchdog: Watchdog | None = None
        self._in_flight = _InFlight(self._group)
        self._close: weakref.finalize[[], TorchGroup] | None = None
        weakref.finalize(self, self._in_flight.give_up)  # also at the end of the process

    def configure(self, config: GroupConfig) -> None:
        if config.transport not in ("auto", self.backend):
            raise ConfigError("group.transport", f"is {config.transport}, but the process group that the cache was "
                                                 f"given uses {self.backend}; give it another one, or set auto")
        if not self._told:
            self.timeout_s = config.timeout_s
        self._beat_s = config.beat_s(self.timeout_s)

    def exchange(self, data: bytes, *, purpose: str = "the exchange at start") -> list[bytes]:
        """See :meth:`Group.exchange`; ``purpose`` is what its errors call it."""
        data = secrets.token_bytes(_NAME_BYTES) + data
        # The lengths first: data of other lengths is how ranks that were started differently show.
        with named_failures(purpose, self.timeout_s, rank=self.rank):
            lengths = [int(n) for n in self._gather(torch.tensor([len(data)], dtype=torch.int64))]
            padded = np.frombuffer(data.ljust(max(lengths), b"\0"), np.uint8).copy()
            rows = self._gather(torch.from_numpy(padded))
        told = [row[:n].cpu().numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]
        if self._beat_s and self._watchdog is None:
            self._watch(told[0][:_NAME_BYTES].hex())
        return [row[_NAME_BYTES:] for row in told]

    def _watch(self, name: str) -> None:
        """Starts the watchdog; ``name`` is the same on all ranks, and no earlier group of this store had it."""
        store = self._store if self._store is not None else self._own_store()
        if self.size == 1 or store is None:
            return
        assert self._beat_s
        connection: dist.Store = store.clone()  # type: ignore[attr-defined]  # of its own: a call may block
        beats = dist.PrefixStore(f"distkv/{name}", connection)
        self._watchdog = Watchdog(beats, self.board, self.rank, self.size, limit_s=self.timeout_s, beat_s=self._beat_s)
        self._watchdog.start()
        # also at the end of the process, while threads can still end; it must not keep the group alive
        self._close = weakref.finalize(self, self._watchdog.close)

    def _own_store(self) -> dist.Store | None:
        get = getattr(self._group, "get_group_store", None)
        store = get() if get is not None else None
        if store is None or not hasattr(store, "clone"):
            logger.warning("torch %s gives no store of a process group that can be cloned: no watchdog, so a rank that "
                           "is lost is noticed by the deadlines alone. Give TorchGroup a store", torch.__version__)
            return None
        assert isinstance(store, dist.Store)
        return store

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = tensor.to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait_for(self._in_flight.enter(dist.all_gather(rows, mine, group=self._group, async_op=True)))
        return rows

    def start(self, vector: Vector, step: int) -> Ticket:
        if self.size == 1:
            return Known(vector)
        tensor = torch.from_numpy(vector).to(self.device)
        with named_failures("the ballot", self.timeout_s, rank=self.rank, step=step):
            work = self._in_flight.enter(dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group, async_op=True))
        return _TorchTicket(self, tensor, work, step)

    def _wait_for(self, work: dist.Work) -> None:
        """Waits within the deadline, or until there is a fault, whose error it raises.

        Under NCCL it waits until the GPU is done, not only until the work is enqueued.
        """
        end = time.monotonic() + self.timeout_s
        if self.backend == "nccl":
            # a wait of NCCL's that passes its deadline breaks the communicator, so it is asked instead
            while not work.is_completed() and time.monotonic() < end:
                self._raise_fault()
                time.sleep(2e-5)
            work.wait(deadline(max(0.0, end - time.monotonic())))
            return
        while True:
            left = end - time.monotonic()
            try:
                work.wait(deadline(min(left, _SLICE_S)))
                return
            except RuntimeError as error:
                if str(error) != _TIMED_OUT or left <= _SLICE_S:
                    self._raise_fault()
                    raise
            self._raise_fault()

    def _raise_fault(self) -> None:
        if self.board.fault is not None:
            raise self.board.fault.error(rank=self.rank)

    # ---- faults

    def report(self, fault: Fault) -> Fault:
        first = super().report(fault) if self._watchdog is None else self._watchdog.report(fault)
        self._in_flight.give_up()
        return first

    def explain(self, error: BaseException) -> GroupError | None:
        cause = self._cause(error)
        if cause is not None:
            self._in_flight.give_up()  # only now: a connection that breaks tells the others less than the watchdog
        return cause

    def _cause(self, error: BaseException) -> GroupError | None:
        # what the callbacks aborted is not always to be told by its text
        aborted = self.board.fault is not None and isinstance(error, RuntimeError)
        if not aborted and not transport_failed(error):
            return error if isinstance(error, GroupError) else None
        fault = self.board.fault
        if fault is None and self._watchdog is not None:
            broken = not (isinstance(error, GroupTimeout) or "timed out" in str(error).lower())
            fault = self._watchdog.explain(broken=broken)
        if fault is not None:
            return fault.error(rank=self.rank)
        if isinstance(error, GroupError):
            return error
        return PeerLost("communication", _first_line(error), rank=self.rank, step=self.board.step)

    def close(self) -> None:
        if self._close is not None:
            self._close()
        self._in_flight.give_up()


class _TorchTicket(Ticket):
    def __init__(self, group: TorchGroup, tensor: torch.Tensor, work: dist.Work, step: int) -> None:
        self._group, self._tensor, self._work, self._step = group, tensor, work, step

    def wait(self) -> Vector:
        group = self._group
        with named_failures("the ballot", group.timeout_s, rank=group.rank, step=self._step):
            group._wait_for(self._work)
        return np.asarray(self._tensor.cpu().numpy())
