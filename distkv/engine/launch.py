"""Process groups for programs of our own, started by torchrun. An embedding engine brings its own instead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from distkv.errors import ConfigError
from distkv.group import Group
from distkv.layout import Layout
from distkv.torch_group import TorchGroup

__all__ = ["Ranks", "choose_device", "launched", "make_groups"]

# Every wait of ours has a deadline of its own, shorter than this; torch's own is per group and cannot tell them apart.
_LONG = timedelta(hours=12)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its peers. The groups are None for a single rank, which needs none."""

    rank: int
    size: int
    device: torch.device
    tp_group: dist.ProcessGroup | None = None
    """For the sums in the model."""
    handoff_group: dist.ProcessGroup | None = None
    """For rank 0's messages, over the host."""
    cache_group: Group | None = None
    """For the cache's collective: its own group, so that it never waits for the others."""


def choose_device(wanted: str, local_rank: int, local_ranks: int) -> torch.device:
    """``model.device`` for this rank. Raises ConfigError for a GPU that is not there."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and gpus < local_ranks):
        return torch.device("cpu")
    if local_rank >= gpus:
        raise ConfigError("model.device", f"is cuda, but this host has {gpus} GPU(s) that torch can use for "
                                          f"{local_ranks} rank(s); set it to cpu or auto")  # fmt: skip
    return torch.device("cuda", local_rank)


def make_groups(
    tp: int, timeout_s: float, *, device: torch.device | str = "cpu", transport: str = "auto"
) -> tuple[dist.ProcessGroup, dist.ProcessGroup, Group]:
    """This rank's groups for the model, the hand-off and the cache; ranks ``0 .. tp-1`` are the first, and so on.

    Every rank makes every group, in one global order, because ``torch.distributed`` asks for it. ``transport`` is
    ``group.transport``: what carries the cache's collective.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    fast = "nccl" if torch.device(device).type == "cuda" else "gloo"
    backends = (fast, "gloo", fast if transport == "auto" else transport)
    mine: list[dist.ProcessGroup] = []
    for first in range(0, size, tp):
        members = list(range(first, first + tp))
        made = [dist.new_group(members, timeout=_LONG, backend=backend) for backend in backends]
        if rank in members:
            mine = made
    tp_group, handoff_group, cache_group = mine
    return tp_group, handoff_group, TorchGroup(cache_group, timeout_s=timeout_s)


@contextmanager
def launched(
    layout: Layout, tp: int, timeout_s: float, *, device: str = "auto", transport: str = "auto"
) -> Iterator[Ranks]:
    """Joins the processes that torchrun started and leaves them again.

    Raises ConfigError if their number is not ``tp``, or if the device or transport asked for is not there. A process
    group that somebody else has initialised is used and neither reconfigured nor destroyed.
    """
    rank, size = layout.rank, layout.world_size
    if size != tp:
        raise ConfigError("parallel.tp", f"is {tp}, but {size} process(es) were started; start {tp} (torchrun "
                                         f"--nproc-per-node {tp}), or set parallel.tp to {size}")  # fmt: skip
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    chosen = choose_device(device, layout.local_rank, local_ranks)
    if transport == "nccl" and chosen.type != "cuda":
        raise ConfigError("group.transport", "is nccl, which needs a GPU for each rank; set it to auto or gloo")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size == 1:
        yield Ranks(0, 1, chosen)
        return
    ours = not dist.is_initialized()
    if ours and layout.source == "mpirun":
        raise ConfigError("", "under mpirun this program has no way to join the ranks: start them with torchrun")
    if ours:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=_LONG)
    try:
        yield Ranks(rank, size, chosen, *make_groups(tp, timeout_s, device=chosen, transport=transport))
    finally:
        if ours:
            dist.destroy_process_group()
