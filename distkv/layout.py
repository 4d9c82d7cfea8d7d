"""Which rank this process is, from the variables that a launcher sets: torchrun, mpirun, or nobody."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from distkv.errors import ConfigError

__all__ = ["Layout", "ranks_on_host"]

logger = logging.getLogger(__name__)

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# MASTER_ADDR and MASTER_PORT alone say nothing: people export them for other programs.
_TORCHRUN_SIGNS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# rank, rank on this host, number of ranks: MPICH and its relatives, then Open MPI
_MPI = (
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
)
_ON_HOST = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")


def ranks_on_host(size: int, env: Mapping[str, str] | None = None) -> int:
    """How many of ``size`` ranks are on this host, as the launcher says in ``env`` (None: the process's environment).

    All, if it does not say.
    """
    env = os.environ if env is None else env
    return next((int(env[name]) for name in _ON_HOST if env.get(name, "").isdigit()), size)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """This process among its peers.

    ``rank`` counts over all hosts, ``local_rank`` over this one (it chooses the GPU). ``master_addr`` and
    ``master_port`` are where the ranks meet; None for a process alone and under mpirun, which has its own way.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    source: Literal["torchrun", "mpirun", "alone"] = "alone"

    def __post_init__(self) -> None:
        _require(self.world_size >= 1, "WORLD_SIZE", f"must be at least 1, got {self.world_size}")
        for name, value in (("RANK", self.rank), ("LOCAL_RANK", self.local_rank)):
            inside = 0 <= value < self.world_size
            _require(inside, name, f"must be from 0 to WORLD_SIZE - 1 = {self.world_size - 1}, got {value}")
        _require(self.local_rank <= self.rank, "LOCAL_RANK", f"{self.local_rank} is larger than RANK {self.rank}")
        if self.master_port is not None:
            _require(1 <= self.master_port <= 65_535, "MASTER_PORT", f"must be 1 to 65535, got {self.master_port}")

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> Layout:
        """Read the launcher's variables from ``env`` (None: the process's environment).

        Without any it is a process alone, of world size 1. Raises ConfigError, whose path is the variable's name,
        if only some are set, if one is not a whole number, or if they contradict each other.
        """
        env = os.environ if env is None else env
        layout = cls._from_torchrun(env) or cls._from_mpi(env) or cls()
        logger.info(
            "rank %d of %d (local rank %d), %s", layout.rank, layout.world_size, layout.local_rank,
            "no launcher" if layout.source == "alone" else f"started by {layout.source}",
        )  # fmt: skip
        return layout

    @classmethod
    def _from_torchrun(cls, env: Mapping[str, str]) -> Layout | None:
        present = [name for name in _TORCHRUN_SIGNS if name in env]
        if not present:
            return None
        problem = f"missing, although {present[0]} is set; start with torchrun, which sets {', '.join(_TORCHRUN)}"
        for name in _TORCHRUN:
            _require(bool(env.get(name, "").strip()), name, problem)
        return cls(
            rank=_whole_number(env, "RANK"),
            local_rank=_whole_number(env, "LOCAL_RANK"),
            world_size=_whole_number(env, "WORLD_SIZE"),
            master_addr=env["MASTER_ADDR"].strip(),
            master_port=_whole_number(env, "MASTER_PORT"),
            source="torchrun",
        )

    @classmethod
    def _from_mpi(cls, env: Mapping[str, str]) -> Layout | None:
        for rank, local_rank, size in _MPI:
            if rank in env and size in env:
                return cls(
                    rank=_whole_number(env, rank),
                    local_rank=_whole_number(env, local_rank) if local_rank in env else _whole_number(env, rank),
                    world_size=_whole_number(env, size),
                    source="mpirun",
                )
        return None


def _whole_number(env: Mapping[str, str], name: str) -> int:
    text = env[name].strip()
    _require(text.isascii() and text.isdigit() and len(text) < 10, name, f"must be a whole number, got {env[name]!r}")
    return int(text)


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise ConfigError(name, problem)
