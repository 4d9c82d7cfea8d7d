"""Tensor parallelism by hand: which part of each weight a rank keeps, and the all-reduce on the way out.

q, k, v, gate and up are split by rows (heads, or inner columns of the MLP), o and down by columns; what these two give
is a partial sum, added up over the group by a hook. The model's code does not know: it sees fewer heads. Everything
else (embeddings, norms, the output layer) is whole on every rank, so every rank has the same logits, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from distkv.errors import ModelError
from distkv.torch_group import deadline, named_failures

__all__ = [
    "Sums",
    "added",
    "allowed_degrees",
    "allowed_meshes",
    "check_group",
    "check_mesh",
    "part_of",
    "place_in",
    "reduce_outputs",
]

_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_COLUMNS = frozenset({"o_proj", "down_proj"})
_WHOLE = frozenset({"lm_head"})


def allowed_degrees(config: Any) -> list[int]:
    """Every degree by which the weights of a model with this ``transformers`` configuration can be split."""
    common = math.gcd(config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    return [n for n in range(1, common + 1) if common % n == 0]


def allowed_meshes(config: Any) -> list[tuple[int, int]]:
    """Every ``(tp, sp)`` for a model: tp divides heads, KV heads and the MLP, and tp x sp the heads and KV heads.

    Each rank has KV heads of its own: one that several ranks would have to keep alike is not served.
    """
    heads = math.gcd(config.num_attention_heads, _kv_heads(config))
    degrees = allowed_degrees(config) if not _missing(config) else [1]
    return [(tp, sp) for tp in degrees for sp in range(1, heads // tp + 1) if heads % (tp * sp) == 0]


def check_mesh(config: Any, tp: int, sp: int = 1) -> None:
    """Raises ``ModelError``, which lists the meshes that are allowed, unless a model can run on one of tp x sp."""
    if tp > 1 and _missing(config):
        missing = _missing(config)[0]
        raise ModelError(f"a {config.model_type} model has no {missing}: it cannot be split; set parallel.tp to 1")
    allowed = allowed_meshes(config) if tp * sp > 1 else [(1, 1)]
    if (tp, sp) not in allowed:
        mesh = f"parallel.tp {tp}" if sp == 1 else f"parallel.tp {tp} x sp {sp}"
        width = getattr(config, "intermediate_size", None)
        raise ModelError(
            f"{mesh} does not divide this model ({config.num_attention_heads} heads, {_kv_heads(config)} KV heads"
            + f", MLP width {width}" * bool(width)
            + f"); allowed tp x sp: {', '.join(f'{a}x{b}' for a, b in allowed)}"
        )


def _missing(config: Any) -> list[str]:
    """What has to be known of a model whose weights are split, and is not."""
    return [n for n in ("num_key_value_heads", "intermediate_size") if not isinstance(getattr(config, n, None), int)]


def _kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or int(config.num_attention_heads)


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in a group, and the group's size; None is this process alone."""
    return (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)


def check_group(name: str, place: tuple[int, int], wanted: tuple[int, int]) -> None:
    """Raises ``ModelError`` unless rank and size of a group are those of the model's group."""
    if place != wanted:
        raise ModelError(
            f"this process has rank {wanted[0]} of the {wanted[1]} that compute the model, but rank {place[0]} of "
            f"{place[1]} in {name}; give a group of the same ranks in the same order"
        )


def _linears(model: nn.Module) -> Iterator[tuple[str, str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, name.rpartition(".")[2], module


def part_of(parameter: str, shape: torch.Size, rank: int, tp: int) -> tuple[Literal[0, 1], int, int] | None:
    """Which part of a parameter this rank keeps: ``(dimension, first, last + 1)``, or None for all of it.

    A bias of o or down counts once: rank 0 has it, on the others it is the empty part ``(0, 0, 0)``.
    """
    module, _, kind = parameter.rpartition(".")
    leaf = module.rpartition(".")[2]
    if tp == 1 or leaf not in _ROWS | _COLUMNS:
        return None
    if leaf in _COLUMNS and kind == "bias":
        return None if rank == 0 else (0, 0, 0)
    dimension: Literal[0, 1] = 0 if leaf in _ROWS else 1
    share = shape[dimension] // tp
    return dimension, rank * share, (rank + 1) * share


@dataclass(slots=True)
class Sums:
    """The sum of every rank's part over ``group``; a rank that waits longer than ``timeout_s`` raises GroupTimeout.

    ``in_rank_order``: always gathered and added in the order of the ranks, in float32. In a ring the order depends on
    an element's place, and so on the number of rows.
    """

    group: dist.ProcessGroup
    timeout_s: float = 30.0
    in_rank_order: bool = False
    named: int | None = None
    """What its errors call this rank: its number in the instance; None: that in ``group``."""

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        return _sum(part, self.group, self.timeout_s, in_rank_order=self.in_rank_order, named=self.named)


def reduce_outputs(model: nn.Module, sums: Sums) -> None:
    """Adds up the outputs of o and down by ``sums``. Raises ``ModelError`` for a model we cannot split."""
    seen = 0
    for name, leaf, linear in _linears(model):
        if leaf in _COLUMNS:
            linear.register_forward_hook(lambda _module, _args, out: sums(out))
            seen += 1
        elif leaf not in _ROWS | _WHOLE:
            raise ModelError(f"{type(model).__name__} has a layer {name}, which cannot be split; set parallel.tp to 1")
    if not seen:
        raise ModelError(f"{type(model).__name__} has no o_proj or down_proj to split; set parallel.tp to 1")


def _sum(
    out: torch.Tensor, group: dist.ProcessGroup, timeout_s: float, *, in_rank_order: bool = False,
    named: int | None = None,
) -> torch.Tensor:
    """The sum of every rank's ``out``, with the same bits on every rank.

    On gloo each rank sends its part to each other rank and adds all in rank order: for a decode step's few kilobytes
    that takes a fifth of the time of gloo's ring (0.6 against 3.1 ms, three ranks on two busy cores), and unlike in a
    ring the order of the additions does not depend on an element's place.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if dist.get_backend(group) != "gloo":
        # Enqueued, not waited for: a deadline here would stop the host at every layer. NCCL's own watchdog has that of
        # the process group.
        if in_rank_order:
            gathered = [torch.empty_like(out) for _ in range(size)]
            dist.all_gather(gathered, out, group=group)
            return added(gathered).to(out.dtype)
        dist.all_reduce(out, group=group)
        return out
    parts = [out if peer == rank else torch.empty_like(out) for peer in range(size)]
    with named_failures("a sum of the model", timeout_s, rank=rank if named is None else named):
        works = []
        for peer in range(size):
            if peer != rank:
                works.append(dist.isend(out, group=group, group_dst=peer))
                works.append(dist.irecv(parts[peer], group=group, group_src=peer))
        for work in works:
            assert work is not None
            work.wait(deadline(timeout_s))
    return added(parts).to(out.dtype)


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of the list, in float32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total
