"""Which rank this process is, from the variables that a launcher sets: torchrun, mpirun, srun, or nobody.

torchrun comes first, since it may run inside the others (``srun torchrun ...``), then MPI, whose mpirun may run inside
a Slurm job, then Slurm. What is normal in a launcher inside another is no contradiction: see ``docs/launching.md``.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from distkv import slurm
from distkv.errors import ConfigError

__all__ = ["Layout", "bare_address", "ranks_on_host"]

logger = logging.getLogger(__name__)

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# MASTER_ADDR and MASTER_PORT alone say nothing: people export them for other programs.
_TORCHRUN_SIGNS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun, and not by people who export RANK themselves


class _Names(NamedTuple):
    """The variables of one launcher: rank, rank on this host, number of ranks; and what people call it."""

    rank: str
    local_rank: str
    size: str
    launcher: str


_BY_TORCHRUN = _Names("RANK", "LOCAL_RANK", "WORLD_SIZE", "torchrun")
_BY_HYDRA = _Names("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPICH's or Intel's mpirun")
_BY_MPI = (
    _Names("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    _Names("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"),
    _Names("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_SIZE", "MVAPICH's mpirun"),
    _BY_HYDRA,
)
_BY_SLURM = _Names("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "srun")
_ON_HOST = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE",
            "MVP_COMM_WORLD_LOCAL_SIZE", "PMI_LOCAL_SIZE")  # fmt: skip


def ranks_on_host(size: int, env: Mapping[str, str] | None = None) -> int:
    """How many of ``size`` ranks are on this host, as the launcher says in ``env`` (None: the process's environment).

    All, if it does not say.
    """
    env = os.environ if env is None else env
    told = next((int(env[name]) for name in _ON_HOST if env.get(name, "").isdigit()), None)
    return told or slurm.tasks_on_node(env) or size


def bare_address(text: str, name: str = "MASTER_ADDR") -> str:
    """A name or address as sockets take it: brackets around an IPv6 address are taken off.

    Raises ConfigError, whose path is ``name``, for an address with a port.
    """
    text = text.strip()
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in bare or bare != text:
        try:
            ipaddress.IPv6Address(bare)
        except ValueError:
            raise ConfigError(name, f"must be a name or an address without a port, got {text!r}; "
                                    "the port is MASTER_PORT") from None  # fmt: skip
    return bare


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
    source: Literal["torchrun", "mpirun", "slurm", "alone"] = "alone"

    def __post_init__(self) -> None:
        _check_numbers(self.rank, self.local_rank, self.world_size, _BY_TORCHRUN)
        if self.master_port is not None:
            _require(1 <= self.master_port <= 65_535, "MASTER_PORT", f"must be 1 to 65535, got {self.master_port}")

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> Layout:
        """Read the launcher's variables from ``env`` (None: the process's environment).

        Without any it is a process alone, of world size 1; so is the one task of ``srun --pty bash``. Raises
        ConfigError, whose path is the variable's name, if only some are set, if one is not a whole number, or if they
        contradict each other.
        """
        env = os.environ if env is None else env
        layout = cls._from_torchrun(env) or cls._from_mpi(env) or cls._from_slurm(env) or cls()
        logger.info("%s", layout)
        return layout

    def __str__(self) -> str:
        who = f"rank {self.rank} of {self.world_size} (local rank {self.local_rank})"
        launcher = {"alone": "no launcher", "slurm": "started by srun"}.get(self.source, f"started by {self.source}")
        addr = f"[{self.master_addr}]" if ":" in str(self.master_addr) else self.master_addr
        return f"{who}, {launcher}" + (f", meeting at {addr}:{self.master_port}" if self.master_port else "")

    @classmethod
    def _from_torchrun(cls, env: Mapping[str, str]) -> Layout | None:
        present = [name for name in _TORCHRUN_SIGNS if name in env]
        if not present:
            return None
        problem = f"missing, although {present[0]} is set; start with torchrun, which sets {', '.join(_TORCHRUN)}"
        for name in _TORCHRUN:
            _require(bool(env.get(name, "").strip()), name, problem)
        rank, local_rank, size = _numbers(env, _BY_TORCHRUN)
        if _OF_TORCHRUN not in env:
            _check_exported(env, rank, size)
        return cls(rank=rank, local_rank=local_rank, world_size=size, master_addr=bare_address(env["MASTER_ADDR"]),
                   master_port=_whole_number(env, "MASTER_PORT"), source="torchrun")  # fmt: skip

    @classmethod
    def _from_mpi(cls, env: Mapping[str, str]) -> Layout | None:
        found = _mpi_numbers(env)
        if found is None:
            return None
        rank, local_rank, size = found
        return cls(rank=rank, local_rank=local_rank, world_size=size, source="mpirun")

    @classmethod
    def _from_slurm(cls, env: Mapping[str, str]) -> Layout | None:
        found = _slurm_numbers(env)
        if found is None:
            return None
        rank, local_rank, size = found
        hosts = slurm.node_list(env)
        given = env.get("MASTER_ADDR", "").strip()
        _require(bool(given or hosts), "SLURM_STEP_NODELIST", "missing, although SLURM_PROCID is set; let srun's "
                 "variables reach the process, or set MASTER_ADDR to the first host")  # fmt: skip
        if given:
            given = bare_address(given)
            _check_reachable(given, hosts)
        elif rank == 0 and env.get("SLURMD_NODENAME", hosts[0]) != hosts[0]:
            raise ConfigError("SLURM_STEP_NODELIST", f"begins with {hosts[0]}, but rank 0 is on "
                              f"{env['SLURMD_NODENAME']}; set MASTER_ADDR to that host")  # fmt: skip
        port = _whole_number(env, "MASTER_PORT") if env.get("MASTER_PORT", "").strip() else slurm.ports(env)[0]
        return cls(rank=rank, local_rank=local_rank, world_size=size, master_addr=given or hosts[0], master_port=port,
                   source="slurm")  # fmt: skip


def _mpi_numbers(env: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Rank, local rank and size by the variables of an mpirun; None if there are none, or if they are srun's own."""
    by: dict[_Names, tuple[int, int, int]] = {}
    for names in _BY_MPI:
        if names.rank in env or names.size in env:
            by[names] = _numbers(env, names)
    if not by:
        return None
    (first, found), *others = by.items()
    for names, other in others:
        if (other[0], other[2]) != (found[0], found[2]):
            raise ConfigError(first.rank, f"is {found[0]} of {found[2]}, but {names.rank} is {other[0]} of {other[2]}: "
                              f"one of {first.launcher} and {names.launcher} runs inside the other; start with one, or "
                              "unset the other's variables")  # fmt: skip
    if first == _BY_HYDRA and _BY_HYDRA.local_rank not in env and _is_sruns_own(env, found):
        return None
    return found


def _is_sruns_own(env: Mapping[str, str], found: tuple[int, int, int]) -> bool:
    """``srun --mpi=pmi2`` sets PMI_RANK and PMI_SIZE as MPICH's mpirun does: then it is srun that has started this."""
    if slurm.step_of(env) is None or not all(name in env for name in _BY_SLURM[:3]):
        return False
    rank, _, size = _numbers(env, _slurm_names(env))
    return (rank, size) == (found[0], found[2])


def _slurm_numbers(env: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Rank, local rank and size of a task of srun; None for a process that is alone, if in a job."""
    if _BY_SLURM.rank not in env:
        return None
    in_step, names = slurm.step_of(env) is not None, _slurm_names(env)
    if not in_step and names.size not in env:
        return None  # a batch script of a job that was not given a number of tasks
    found = _numbers(env, names)
    if found[2] == 1:
        return None  # srun --pty bash, or a batch script: whatever runs there may start ranks of its own
    _require(in_step or found[0] == 0, "SLURM_STEP_ID", "missing, although SLURM_PROCID is set; let srun's variables "
             "reach the process")  # fmt: skip
    _require(in_step, names.size, f"is {found[2]}, but this is one process that srun has not started: the batch "
             "script's own. Put srun before the command, or torchrun; where one process is meant, take "
             f"{names.size} away from it (env -u {names.size})")  # fmt: skip
    return found


def _slurm_names(env: Mapping[str, str]) -> _Names:
    # the step's own number: a job's may be inherited
    return _BY_SLURM._replace(size="SLURM_STEP_NUM_TASKS") if "SLURM_STEP_NUM_TASKS" in env else _BY_SLURM


def _check_exported(env: Mapping[str, str], rank: int, size: int) -> None:
    """RANK and WORLD_SIZE were set by hand, or by another launcher than torchrun: do they agree with what is around?

    Each task may start several ranks, so more ranks than tasks are normal; fewer are not, nor another rank of as many.
    """
    by_mpi = _mpi_numbers(env)
    around = by_mpi or (_slurm_numbers(env) if slurm.step_of(env) is not None else None)
    if around is None:
        return
    launcher = "mpirun" if by_mpi else "srun"
    fix = f"unset RANK, LOCAL_RANK and WORLD_SIZE, and {launcher}'s variables are used; or start with torchrun"
    if size < around[2]:
        raise ConfigError("WORLD_SIZE", f"is {size}, but {launcher} has started {around[2]} processes; {fix}")
    if size == around[2] and rank != around[0]:
        raise ConfigError("RANK", f"is {rank} of {size}, but {launcher} says {around[0]} of {size}: it was set before "
                          f"the processes were started; {fix}")  # fmt: skip
    if not by_mpi:
        _check_reachable(bare_address(env["MASTER_ADDR"]), slurm.node_list(env))


def _check_reachable(addr: str, hosts: list[str]) -> None:
    try:
        loopback = ipaddress.ip_address(addr.partition("%")[0]).is_loopback
    except ValueError:
        loopback = addr == "localhost" or addr.startswith("localhost.")
    _require(not loopback or len(hosts) < 2, "MASTER_ADDR", f"is {addr}, which is another host on each of "
             f"{len(hosts)} hosts; unset it, or set it to the first one ({hosts[0] if hosts else ''})")  # fmt: skip


def _numbers(env: Mapping[str, str], names: _Names) -> tuple[int, int, int]:
    for name in (names.rank, names.size):
        there = names.size if name == names.rank else names.rank
        _require(bool(env.get(name, "").strip()), name, f"missing, although {there} is set; let all variables of "
                 f"{names.launcher} reach the process")  # fmt: skip
    rank, size = _whole_number(env, names.rank), _whole_number(env, names.size)
    if names.local_rank in env:
        local_rank = _whole_number(env, names.local_rank)
    elif names == _BY_HYDRA:  # other launchers that talk PMI name it otherwise or not at all: then it is one host
        local_rank = _whole_number(env, "PMI_LOCAL_RANK") if "PMI_LOCAL_RANK" in env else rank
    else:
        raise ConfigError(names.local_rank, f"missing, although {names.rank} is set; let all variables of "
                                            f"{names.launcher} reach the process")  # fmt: skip
    _check_numbers(rank, local_rank, size, names)
    return rank, local_rank, size


def _check_numbers(rank: int, local_rank: int, size: int, names: _Names) -> None:
    _require(size >= 1, names.size, f"must be at least 1, got {size}")
    for name, value in ((names.rank, rank), (names.local_rank, local_rank)):
        _require(0 <= value < size, name, f"must be from 0 to {names.size} - 1 = {size - 1}, got {value}")
    _require(local_rank <= rank, names.local_rank, f"{local_rank} is larger than {names.rank} {rank}")


def _whole_number(env: Mapping[str, str], name: str) -> int:
    text = env[name].strip()
    _require(text.isascii() and text.isdigit() and len(text) < 10, name, f"must be a whole number, got {env[name]!r}")
    return int(text)


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise ConfigError(name, problem)
