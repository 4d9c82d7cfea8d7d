"""Process groups for programs of our own, started by torchrun. An embedding engine brings its own instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from distkv.errors import ConfigError
from distkv.group import Group
from distkv.layout import Layout
from distkv.torch_group import TorchGroup

__all__ = ["Ranks", "launched", "make_groups"]

# Rank 0 may be busy between two messages (it reads a model, it waits for a user); what watches for dead
# ranks is the cache's own deadline, and the launcher, which ends all processes when one ends.
_LONG = timedelta(hours=12)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its peers. The groups are None for a single rank, which needs none."""

    rank: int
    size: int
    tp_group: dist.ProcessGroup | None
    """For the engine: sums in the model, and the hand-off."""
    cache_group: Group | None
    """For the cache's collective: its own group, so that the two never wait for each other."""


def make_groups(tp: int, timeout_s: float) -> tuple[dist.ProcessGroup, Group]:
    """This rank's tensor-parallel group and its cache group; ranks ``0 .. tp-1`` are the first group, and so on.

    Every rank makes every group, in one global order, because ``torch.distributed`` asks for it.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mine: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    for first in range(0, size, tp):
        members = list(range(first, first + tp))
        pair = dist.new_group(members, timeout=_LONG), dist.new_group(members, timeout=_LONG)
        if rank in members:
            mine = pair
    assert mine is not None
    return mine[0], TorchGroup(mine[1], timeout_s=timeout_s)


@contextmanager
def launched(layout: Layout, tp: int, timeout_s: float) -> Iterator[Ranks]:
    """Joins the processes that torchrun started and leaves them again.

    Raises ConfigError if their number is not ``tp``. A process group that somebody else has initialised is used and
    neither reconfigured nor destroyed.
    """
    rank, size = layout.rank, layout.world_size
    if size != tp:
        raise ConfigError("parallel.tp", f"is {tp}, but {size} process(es) were started; start {tp} (torchrun "
                                         f"--nproc-per-node {tp}), or set parallel.tp to {size}")  # fmt: skip
    if size == 1:
        yield Ranks(0, 1, None, None)
        return
    ours = not dist.is_initialized()
    if ours and layout.source == "mpirun":
        raise ConfigError("", "under mpirun this program has no way to join the ranks: start them with torchrun")
    if ours:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=_LONG)
    try:
        tp_group, cache_group = make_groups(tp, timeout_s)
        yield Ranks(rank, size, tp_group, cache_group)
    finally:
        if ours:
            dist.destroy_process_group()
