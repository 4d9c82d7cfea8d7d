"""A group over torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from distkv.ballot import Vector
from distkv.config import GroupConfig
from distkv.errors import ConfigError, GroupTimeout, PeerLost
from distkv.group import Group, Ticket


def deadline(seconds: float) -> timedelta:
    """``seconds`` as torch takes it: whole milliseconds, and at least one, because it takes 0 for no deadline."""
    return timedelta(milliseconds=max(1, math.ceil(1000 * seconds)))


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
        detail = text.splitlines()[0].split(". This is typically")[0]
        raise PeerLost(what, detail, rank=rank, step=step) from error


class TorchGroup(Group):
    """The ranks of one torch.distributed process group.

    The process group is the caller's: it is used for one all-reduce per step and one exchange at start, never
    destroyed and never reconfigured. The caller makes sub-groups in one global order on all ranks, and issues its
    own collectives on the same group in an order that all ranks share. With NCCL the vector lives on ``device``.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float | None = None,
                 device: torch.device | str | None = None) -> None:
        """``process_group``: None is the default group. ``timeout_s``: None is the configuration's ``group.timeout_s``.
        ``device``: None is the CPU, or the current GPU under NCCL."""
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

    def configure(self, config: GroupConfig) -> None:
        if config.transport not in ("auto", self.backend):
            raise ConfigError("group.transport", f"is {config.transport}, but the process group that the cache was "
                                                 f"given uses {self.backend}; give it another one, or set auto")
        if not self._told:
            self.timeout_s = config.timeout_s

    def exchange(self, data: bytes) -> list[bytes]:
        # The lengths first: data of other lengths is how ranks that were started differently show.
        with named_failures("the exchange at start", self.timeout_s, rank=self.rank):
            lengths = [int(n) for n in self._gather(torch.tensor([len(data)], dtype=torch.int64))]
            padded = np.frombuffer(data.ljust(max(lengths), b"\0"), np.uint8).copy()
            rows = self._gather(torch.from_numpy(padded))
        return [row[:n].cpu().numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = tensor.to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(rows, mine, group=self._group, async_op=True)
        assert work is not None
        self.wait_for(work)
        return rows

    def start(self, vector: Vector, step: int) -> Ticket:
        tensor = torch.from_numpy(vector).to(self.device)
        with named_failures("the ballot", self.timeout_s, rank=self.rank, step=step):
            work = dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group, async_op=True)
        assert work is not None
        return _TorchTicket(self, tensor, work, step)

    def wait_for(self, work: dist.Work) -> None:
        """Waits within the deadline. Under NCCL a timeout makes this block until the GPU is done, not only enqueue."""
        work.wait(deadline(self.timeout_s))


class _TorchTicket(Ticket):
    def __init__(self, group: TorchGroup, tensor: torch.Tensor, work: dist.Work, step: int) -> None:
        self._group, self._tensor, self._work, self._step = group, tensor, work, step

    def wait(self) -> Vector:
        group = self._group
        with named_failures("the ballot", group.timeout_s, rank=group.rank, step=self._step):
            group.wait_for(self._work)
        return np.asarray(self._tensor.cpu().numpy())
