"""The ranks of one instance as a mesh of tp x sp, and their groups.

An instance is the ranks that compute one model together. Rank ``tp_rank * sp + sp_rank`` of it keeps part ``tp_rank``
of ``tp`` of the weights, computes part ``sp_rank`` of ``sp`` of a batch's tokens (:mod:`distkv.engine.ulysses`), and
has block ``tp_rank * sp + sp_rank`` of the heads in its pool. To the cache all of them are ranks of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from distkv.engine.tensor_parallel import place_in
from distkv.errors import ModelError
from distkv.torch_group import deadline

__all__ = ["Mesh", "lay_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """This process's place in an instance, by the groups that it is given; they stay with whoever made them.

    Without a group it is one rank alone. Raises ``ModelError`` unless this process's rank in ``group`` is
    ``tp_rank * sp + sp_rank``.
    """

    group: dist.ProcessGroup | None = field(default=None, repr=False)
    """All ranks of the instance."""
    tp_group: dist.ProcessGroup | None = field(default=None, repr=False)
    """The ranks of the same ``sp_rank``, which add up their parts of a sum; None if ``tp`` is 1."""
    sp_group: dist.ProcessGroup | None = field(default=None, repr=False)
    """The ranks of the same ``tp_rank``, which exchange heads for tokens; None if ``sp`` is 1."""
    tp: int = field(init=False)
    sp: int = field(init=False)
    tp_rank: int = field(init=False)
    sp_rank: int = field(init=False)

    def __post_init__(self) -> None:
        for name, group in (("tp", self.tp_group), ("sp", self.sp_group)):
            rank, size = place_in(group)
            object.__setattr__(self, f"{name}_rank", rank)
            object.__setattr__(self, name, size)
        place, wanted = place_in(self.group), (self.tp_rank * self.sp + self.sp_rank, self.tp * self.sp)
        if place != wanted:
            raise ModelError(
                f"this process has rank {place[0]} of {place[1]} in the instance's group, but rank {self.tp_rank} of "
                f"{self.tp} in tp_group and {self.sp_rank} of {self.sp} in sp_group make it rank {wanted[0]} of "
                f"{wanted[1]}, tp_rank * sp + sp_rank; let Mesh.of make the groups"
            )

    @property
    def rank(self) -> int:
        """In the instance: the number of this rank's block of heads."""
        return self.tp_rank * self.sp + self.sp_rank

    @property
    def size(self) -> int:
        """Ranks of the instance."""
        return self.tp * self.sp

    @property
    def in_passes(self) -> frozenset[dist.ProcessGroup]:
        """The groups that a forward pass communicates over."""
        return frozenset(group for group in (self.tp_group, self.sp_group) if group is not None)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, tp: int, sp: int, *, timeout_s: float | None = None) -> Mesh:
        """The mesh over ``group``, the ranks of this instance in order (None: the default group), with new sub-groups.

        Every rank of the default group calls it at once, each with the group of its own instance: sub-groups have to be
        made by all, in one order. They have the backend of ``group``, and its default deadline if ``timeout_s`` is
        None. Where tp or sp is 1 none are made, and ``group`` itself carries what the model sends.
        Raises ``ModelError`` for a group of another size than tp x sp, and for a degree below 1.
        """
        whole = group if group is not None else dist.group.WORLD
        if whole is None:
            raise ModelError("torch.distributed is not initialised: call init_process_group, or give a group")
        if min(tp, sp) < 1:
            raise ModelError(f"tp and sp are 1 or more each, not {tp} and {sp}")
        members = dist.get_process_group_ranks(whole)
        everyone: list[list[int]] = [members]
        if 1 not in (tp, sp) and len(members) != dist.get_world_size():
            told: list[list[int]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(told, members)
            everyone = sorted({tuple(each): each for each in told}.values())
        if any(len(each) != tp * sp for each in everyone):  # on all ranks alike, so that none waits for another
            raise ModelError(f"tp {tp} x sp {sp} are {tp * sp} ranks, but an instance's group has "
                             f"{sorted({len(each) for each in everyone})}")  # fmt: skip
        backend = dist.get_backend(whole)

        def new(ranks: list[int]) -> dist.ProcessGroup:
            made: dist.ProcessGroup = dist.new_group(
                ranks, timeout=deadline(timeout_s) if timeout_s is not None else None, backend=backend
            )
            return made

        meshes = [lay_out(each, whole, tp, sp, new) for each in everyone]
        return next(mesh for mesh in meshes if mesh is not None)


def lay_out(
    members: Sequence[int], whole: dist.ProcessGroup, tp: int, sp: int,
    new: Callable[[list[int]], dist.ProcessGroup],
) -> Mesh | None:  # fmt: skip
    """This process's mesh in an instance of these ranks of the default group, None if it is not one of them.

    ``whole`` is this process's own instance's group. Every rank calls it for every instance, in one order; ``new``
    makes a group, and is called alike on all.
    """
    mine = dist.get_rank()
    if 1 in (tp, sp):
        return Mesh(group=whole, tp_group=whole if tp > 1 else None, sp_group=whole if sp > 1 else None) \
            if mine in members else None
    columns = [list(members[i::sp]) for i in range(sp)]
    rows = [list(members[i * sp : (i + 1) * sp]) for i in range(tp)]
    of_tp, of_sp = ([(ranks, new(ranks)) for ranks in lines] for lines in (columns, rows))
    if mine not in members:
        return None
    tp_group, sp_group = (next(group for ranks, group in made if mine in ranks) for made in (of_tp, of_sp))
    return Mesh(group=whole, tp_group=tp_group, sp_group=sp_group)
