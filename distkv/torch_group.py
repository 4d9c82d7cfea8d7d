"""A group over torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from distkv.ballot import Vector
from distkv.errors import GroupTimeout, PeerLost
from distkv.group import Group, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable


T = TypeVar("T")


class TorchGroup(Group):
    """The ranks of one torch.distributed process group.

    The process group is the caller's: it is used for one all-reduce per step and one exchange at start, never
    destroyed and never reconfigured. The caller makes sub-groups in one global order on all ranks, and issues its
    own collectives on the same group in an order that all ranks share. With NCCL the vector lives on ``device``.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 30.0,
                 device: torch.device | str | None = None) -> None:
        """``process_group``: None is the default group. ``device``: None is the CPU, or the current GPU under NCCL."""
        self._group = process_group if process_group is not None else dist.group.WORLD
        if self._group is None:
            raise RuntimeError("torch.distributed is not initialised: call init_process_group, or give a process_group")
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        self.timeout_s = timeout_s
        self.backend = str(dist.get_backend(self._group))
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else "cpu"
        self.device = torch.device(device)

    def exchange(self, data: bytes) -> list[bytes]:
        """Two fixed-order collectives: the lengths, then the data padded to the longest."""
        def run() -> list[bytes]:
            lengths = self._gather(torch.tensor([len(data)], dtype=torch.int64))
            longest = max(int(n) for n in lengths)
            padded = torch.from_numpy(np.frombuffer(data.ljust(longest, b"\0"), np.uint8).copy())
            rows = self._gather(padded)
            return [bytes(row[: int(n)].cpu().numpy().tobytes()) for row, n in zip(rows, lengths, strict=True)]

        return self.guarded(run, "the exchange at start", -1)

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = tensor.to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(rows, mine, group=self._group, async_op=True)
        assert work is not None
        self.wait_for(work)
        return rows

    def start(self, vector: Vector, step: int) -> Ticket:
        tensor = torch.from_numpy(vector).to(self.device)
        work = self.guarded(
            lambda: dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group, async_op=True), "the ballot", step
        )
        assert work is not None
        return _TorchTicket(self, tensor, work, step)

    def wait_for(self, work: dist.Work) -> None:
        """Waits within the deadline; the GPU's own clock counts under NCCL."""
        if self.backend == "nccl":
            work.wait(timedelta(seconds=self.timeout_s))
            torch.cuda.current_stream(self.device).synchronize()
        else:
            work.wait(timedelta(seconds=self.timeout_s))

    def guarded(self, call: Callable[[], T], what: str, step: int) -> T:
        """``call()`` with torch's errors told apart: a deadline that passed, or a connection that broke."""
        try:
            return call()
        except RuntimeError as error:  # DistBackendError and the plain RuntimeError that gloo raises
            text = str(error)
            if "timed out" in text.lower() or "timeout" in text.lower():
                raise GroupTimeout(what, self.timeout_s, rank=self.rank, step=step) from error
            raise PeerLost(what, text.splitlines()[0], rank=self.rank, step=step) from error


class _TorchTicket(Ticket):
    def __init__(self, group: TorchGroup, tensor: torch.Tensor, work: dist.Work, step: int) -> None:
        self._group, self._tensor, self._work, self._step = group, tensor, work, step

    def wait(self) -> Vector:
        self._group.guarded(lambda: self._group.wait_for(self._work), "the ballot", self._step)
        return np.asarray(self._tensor.cpu().numpy())
