"""Ulysses sequence parallelism: each rank computes some rows of a batch, and in attention some heads of all rows.

Outside attention a decoder computes row by row, so the rows of a batch are split over the sp ranks. Attention needs all
rows of a head: one all-to-all hands every rank its own heads of q, k and v of all rows, and another one the outcome
back. A batch whose requests have one row each (decoding) is not worth that: every rank computes all of its rows,
attends with its own heads, and one all-gather joins them. Which of the two a batch takes is a function of the batch
alone, so that all ranks do the same, and a batch that is computed again does, too.

After Jacobs et al., DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import pad

from distkv.errors import ModelError
from distkv.torch_group import deadline, named_failures

__all__ = ["AllRows", "Share", "SplitRows", "Ulysses", "joining"]


class Share(Protocol):
    """One rank's part in one batch."""

    keep: list[int]
    """Which of the rows here go into the output layer. Behind it are the rows that the batch keeps, on every rank."""

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """Of ``[rows of the batch]`` those that are computed here."""

    def enter(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From ``[rows here, heads, d]`` to ``[rows of the batch, heads / sp, d]``: all rows of this rank's heads."""

    def leave(self, out: torch.Tensor) -> torch.Tensor:
        """The way back, for the outcome of attention."""

    def join(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[1, len(keep), width]`` of this rank to those of all, in the order in which the batch keeps them."""


@dataclass(frozen=True, slots=True)
class Ulysses:
    """The sp ranks of ``group``, this one among them. One that waits longer than ``timeout_s`` raises GroupTimeout."""

    group: dist.ProcessGroup
    rank: int
    size: int
    timeout_s: float = 30.0
    named: int | None = None
    """What its errors call this rank: its number in the instance; None: that in ``group``."""

    def share(self, lengths: Sequence[int], keep: Sequence[int]) -> Share:
        """This rank's part in a batch of requests with so many rows each, of which the rows ``keep`` give logits."""
        if all(n == 1 for n in lengths):
            return AllRows(self, list(keep))
        return SplitRows(self, sum(lengths), keep)

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """``[sp, ...]``, one part for each rank; returns the parts from each rank."""
        out = torch.empty_like(parts)
        if dist.get_backend(self.group) != "gloo":
            # Enqueued, not waited for, as the sums of tensor_parallel are.
            dist.all_to_all_single(out, parts, group=self.group)
            return out
        named = self.rank if self.named is None else self.named
        with named_failures("an all-to-all of the model", self.timeout_s, rank=named):
            work = dist.all_to_all_single(out, parts, group=self.group, async_op=True)
            assert work is not None
            work.wait(deadline(self.timeout_s))
        return out

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """``[sp, ...]``: every rank's part.

        On gloo it is an all-to-all of equal parts: gloo's all-gather goes round a ring, and takes two to five times as
        long for what a decode step sends (0.65 against 0.24 ms, three ranks on two cores).
        """
        if dist.get_backend(self.group) == "gloo":
            return self.all_to_all(part.expand(self.size, *part.shape).contiguous())
        out = part.new_empty(self.size * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(out, part.contiguous(), group=self.group)
        return out.view(self.size, *part.shape)


class AllRows:
    """Every rank computes all rows, and attends with its own heads."""

    def __init__(self, ulysses: Ulysses, keep: list[int]) -> None:
        self.keep = keep
        self._ulysses = ulysses

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        return flat

    def enter(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rank, size = self._ulysses.rank, self._ulysses.size
        q, k, v = (heads.chunk(size, dim=1)[rank].contiguous() for heads in (q, k, v))
        return q, k, v

    def leave(self, out: torch.Tensor) -> torch.Tensor:
        return self._ulysses.all_gather(out).transpose(0, 1).flatten(1, 2)

    def join(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class SplitRows:
    """Rank r computes rows ``r * each .. (r + 1) * each - 1``; what lies behind the batch's last row is filled up.

    The fillers take part in nothing but products: they are dropped when the rows of a head come together.
    """

    def __init__(self, ulysses: Ulysses, rows: int, keep: Sequence[int]) -> None:
        self._ulysses = ulysses
        self._total = rows
        self.each = -(-rows // ulysses.size)
        owner, at = np.divmod(np.asarray(keep, np.int64), self.each)
        counts = np.bincount(owner, minlength=ulysses.size)
        # each rank hands in as many as the one that has most
        here = at[owner == ulysses.rank].tolist()
        most = int(counts.max())
        self.keep: list[int] = here + [0] * (most - len(here))
        number = np.zeros(len(owner), np.int64)  # of a kept row among those of its owner
        for rank in range(ulysses.size):
            number[owner == rank] = np.arange(counts[rank])
        self._order = owner * most + number

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        size = self._ulysses.size
        return pad(flat, (0, size * self.each - self._total)).view(size, self.each)[self._ulysses.rank]

    def enter(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size = self._ulysses.size
        parts = torch.cat([heads.reshape(self.each, size, -1, heads.shape[-1]) for heads in (q, k, v)], dim=2)
        got = self._ulysses.all_to_all(parts.transpose(0, 1).contiguous()).flatten(0, 1)[: self._total]
        own_q, own_k, own_v = torch.split(got, [heads.shape[1] // size for heads in (q, k, v)], dim=1)
        return own_q.contiguous(), own_k, own_v

    def leave(self, out: torch.Tensor) -> torch.Tensor:
        size = self._ulysses.size
        filled = pad(out, (0, 0, 0, 0, 0, size * self.each - self._total))
        got = self._ulysses.all_to_all(filled.view(size, self.each, *out.shape[1:]))
        return got.transpose(0, 1).flatten(1, 2)

    def join(self, hidden: torch.Tensor) -> torch.Tensor:
        if not len(self._order):
            return hidden
        rows = self._ulysses.all_gather(hidden[0]).flatten(0, 1)
        return rows[torch.from_numpy(self._order).to(rows.device)].unsqueeze(0)


@contextmanager
def joining(module: Any, share: Share) -> Iterator[None]:
    """While it lasts, what enters the output layer of ``module`` are the kept rows of all ranks, not of this one.

    Raises ``ModelError`` if the output layer was not called just once.
    """
    calls = 0

    def join(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        nonlocal calls
        calls += 1
        return (share.join(args[0]), *args[1:])

    hook = module.get_output_embeddings().register_forward_pre_hook(join)
    try:
        yield
    finally:
        hook.remove()
    if calls != 1:
        raise ModelError(f"{type(module).__name__} called its output layer {calls} times in a pass, not once: its "
                         "tokens cannot be split over ranks; set parallel.sp to 1")  # fmt: skip
