"""Process groups for programs of our own, started by torchrun or mpirun. An embedding engine brings its own instead.

Every wait has a deadline: joining that of the start, the hand-off that of an idle group, all else ``timeout_s``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from distkv._text import counted
from distkv.config import GroupConfig
from distkv.engine import mpi_launch
from distkv.engine.mesh import Mesh, lay_out
from distkv.errors import ConfigError, DistKVError, GroupError, GroupTimeout, PeerLost
from distkv.group import Group
from distkv.layout import Layout, ranks_on_host
from distkv.torch_group import TorchGroup, deadline, named_failures

__all__ = [
    "Ranks",
    "StartFailed",
    "check_devices",
    "choose_device",
    "launched",
    "make_groups",
    "on_all_ranks",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_S = 300.0
"""Seconds within which all ranks have to join. They start at once, and what may take long (the model) comes later."""


class StartFailed(DistKVError):
    """A rank could not start. Raised on all of them, with the error of each (None: it had none)."""

    def __init__(self, errors: list[str | None]) -> None:
        super().__init__("a rank could not start")
        self.errors = errors


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of its instance. The groups are None for a single rank, which needs none."""

    rank: int
    size: int
    device: torch.device
    mesh: Mesh = field(default_factory=Mesh)
    """For the model."""
    handoff_group: dist.ProcessGroup | None = None
    """For rank 0's messages, over the host."""
    cache_group: Group | None = None
    """For the cache's collective: its own group, so that it never waits for the others."""
    replica: int = 0
    """Number of this instance, of those that were started together."""


def choose_device(wanted: str, local_rank: int, local_ranks: int) -> torch.device:
    """``model.device`` for this rank. Raises ConfigError for a GPU that is not there."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and gpus < local_ranks):
        return torch.device("cpu")
    if gpus < local_ranks:  # on all ranks of this host alike, so that none waits for another
        raise ConfigError("model.device", f"is cuda, but this host has {counted(gpus, 'GPU')} that torch can use for "
                                          f"{counted(local_ranks, 'rank')}; set it to cpu or auto")  # fmt: skip
    return torch.device("cuda", local_rank)


def check_devices(device: str, transport: str, local_rank: int, local_ranks: int) -> torch.device:
    """The device of this rank; raises ConfigError for a ``model.device`` or ``group.transport`` that cannot be had."""
    chosen = choose_device(device, local_rank, local_ranks)
    if transport == "nccl" and chosen.type != "cuda":
        raise ConfigError("group.transport", "is nccl, which needs a GPU for each rank; set it to auto or gloo")
    return chosen


def make_groups(
    tp: int,
    timeout_s: float,
    *,
    sp: int = 1,
    device: torch.device | str = "cpu",
    transport: str = "auto",
    idle_timeout_s: float = 600.0,
    start_s: float = START_S,
) -> tuple[Mesh, dist.ProcessGroup, Group]:
    """This rank's groups for the model, the hand-off and the cache of its instance of tp x sp ranks.

    Ranks ``0 .. tp x sp - 1`` are the first instance, and so on. Every rank makes every group, those of other instances
    too, in one global order, because ``torch.distributed`` asks for it. ``transport`` is ``group.transport``: what
    carries the cache's collective; ``idle_timeout_s`` is the engine's, for the hand-off.
    Raises GroupTimeout or PeerLost if another rank does not make them too, within ``start_s`` (or ``timeout_s``, or for
    the hand-off's group ``idle_timeout_s``, if these are longer: a group of torch has one deadline for all it does).
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    fast = "nccl" if torch.device(device).type == "cuda" else "gloo"
    start = deadline(max(timeout_s, start_s))
    kinds = [(fast, start), ("gloo", max(start, deadline(idle_timeout_s)))]
    if transport != "mpi":
        kinds.append((fast if transport == "auto" else transport, start))
    mine: list[dist.ProcessGroup] = []
    mesh: Mesh | None = None
    ranks = tp * sp

    def in_passes(members: list[int]) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(members, timeout=start, backend=fast)
        return made

    for first in range(0, size, ranks):
        members = list(range(first, first + ranks))
        with named_failures("making the groups", start.total_seconds(), rank=rank):
            made = [dist.new_group(members, timeout=timeout, backend=backend) for backend, timeout in kinds]
            laid_out = lay_out(members, made[0], tp, sp, in_passes)
        if laid_out is not None:
            mine, mesh = made, laid_out
    assert mesh is not None
    if transport == "mpi":
        return mesh, mine[1], mpi_launch.cache_group(rank // ranks * ranks, ranks, timeout_s, mine[1])
    return mesh, mine[1], TorchGroup(mine[2], timeout_s=timeout_s)


@contextmanager
def launched(
    layout: Layout,
    tp: int,
    timeout_s: float,
    *,
    sp: int = 1,
    replicas: int = 1,
    device: str = "auto",
    transport: str = "auto",
    idle_timeout_s: float = 600.0,
    heartbeat_s: float | None = None,
    start_s: float = START_S,
) -> Iterator[Ranks]:
    """Joins the processes that torchrun or mpirun started, tp x sp for each of ``replicas`` instances, until all leave.

    The cache's group has its watchdog from here on (``timeout_s`` and ``heartbeat_s`` are ``group``'s), so that a rank
    that stops while the model is loaded is noticed.
    Raises ConfigError if their number is another one, or if the device or transport asked for is not there;
    GroupTimeout or PeerLost if a rank does not join (``start_s``, see :func:`make_groups`) or does not leave
    (``timeout_s``; an instance waits ``idle_timeout_s`` for the others).
    A process group that somebody else has initialised is used and neither reconfigured nor destroyed. After an error
    nothing is destroyed: torch aborts the process that destroys a group with unfinished work (see ``quickstart``).
    """
    rank, size = layout.rank, layout.world_size
    _check_number(layout, tp, sp, replicas)
    chosen = check_devices(device, transport, layout.local_rank, ranks_on_host(size))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if tp * sp == 1:
        yield Ranks(0, 1, chosen, replica=rank)
        return
    ours = not dist.is_initialized()
    if ours:
        seconds = max(timeout_s, start_s)
        store = mpi_launch.meet(rank, size, seconds) if layout.source == "mpirun" else None
        with named_failures("the meeting of the ranks", seconds, rank=rank):
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=deadline(seconds))
    groups = make_groups(tp, timeout_s, sp=sp, device=chosen, transport=transport, idle_timeout_s=idle_timeout_s,
                         start_s=start_s)  # fmt: skip
    try:
        groups[2].configure(GroupConfig(timeout_s=timeout_s, heartbeat_s=heartbeat_s))
        groups[2].exchange(b"")  # which starts it
        yield Ranks(rank % (tp * sp), tp * sp, chosen, *groups, replica=rank // (tp * sp))
    finally:
        groups[2].close()  # nobody watches a rank that leaves; the exchange below has a deadline of its own
    if ours:
        # Whoever leaves first breaks the others' connections, and the launcher ends the rest when one has failed.
        TorchGroup(groups[1], timeout_s=timeout_s).exchange(b"")
        if replicas > 1:
            TorchGroup(timeout_s=idle_timeout_s).exchange(b"", purpose="the end of the other instances")
        dist.destroy_process_group()
        mpi_launch.finalize()


def _check_number(layout: Layout, tp: int, sp: int, replicas: int) -> None:
    """Raises ConfigError unless as many processes were started as are wanted."""
    size, wanted = layout.world_size, replicas * tp * sp
    if size == wanted:
        return
    were = counted(size, "process was", "processes were")
    how = f"mpirun -n {wanted}" if layout.source == "mpirun" else f"torchrun --nproc-per-node {wanted}"
    start = f"but {were} started; start {wanted} ({how})"
    if sp == replicas == 1:
        raise ConfigError("parallel.tp", f"is {tp}, {start}, or set parallel.tp to {size}")
    each = f"{replicas} instances of tp {tp} x sp {sp}" if replicas > 1 else f"tp {tp} x sp {sp}"
    raise ConfigError("parallel", f"is for {each}, {start}, or change it")


def on_all_ranks(ranks: Ranks, timeout_s: float, make: Callable[[], T]) -> T:
    """``make()``, which every rank calls. If it fails on one, all raise :class:`StartFailed` with everybody's error.

    Raises GroupTimeout or PeerLost for a rank that has not come to an end ``timeout_s`` after this one, and what the
    cache's group says if that has a fault meanwhile: a rank that is slow is no fault, one that is gone or stopped is.
    """
    made: list[T] = []
    mine: str | None = None
    try:
        made.append(make())
    except (GroupTimeout, PeerLost):
        raise
    except Exception as error:  # handed on to all ranks
        logger.debug("this rank could not start", exc_info=True)
        mine = str(error) if isinstance(error, DistKVError) else f"{type(error).__name__}: {error}"
    errors = [mine]
    if ranks.handoff_group is not None and ranks.cache_group is not None:
        handoff = TorchGroup(ranks.handoff_group, timeout_s=timeout_s)
        handoff.board = ranks.cache_group.board  # what ends one ends both
        try:
            told = handoff.exchange(json.dumps(mine).encode(), purpose="the start")
        except GroupError as error:
            handoff.close()
            raise ranks.cache_group.explain(error) or error from error
        errors = [json.loads(data) for data in told]
    if any(error is not None for error in errors):
        raise StartFailed(errors)
    return made[0]
