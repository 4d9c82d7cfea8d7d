"""Run a function as a group of ranks, each in a process of its own, and never hang, never hide, leave nothing.

::

    def case(rank: int, world_size: int, value: int) -> int:        # a module-level function
        tensor = torch.tensor([rank + value])
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN)
        return int(tensor)

    assert run_ranks(case, 4, (10,)) == [10, 10, 10, 10]

``run_ranks`` is for cases in which every rank returns. The first rank that does not ends the run, and the error
shows every rank: its traceback, or the stacks of all its threads if it was still running. ``run_outcomes`` is
for cases in which ranks raise, exit, are killed or stopped on purpose: it lets all go on until they end.

Ranks start in fresh interpreters (nothing of the parent is inherited but ``sys.path``, the folder and the environment),
or within :func:`distkv.testing.warm.warm_start` as forks of one process, which is quicker. They meet through a store
that the parent listens on, so there is no port to guess. Linux; on other systems descendants that leave their rank's
session are not found.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from distkv.testing._children import TOKEN, Child, end_all
from distkv.testing._outcome import POLL_S, Outcome, RanksFailed, all_ended, conclude, first_failure
from distkv.testing._rank import Job, Raised
from distkv.testing.warm import WarmProcess, current

__all__ = ["Outcome", "Raised", "RanksFailed", "Target", "choose_backend", "run_outcomes", "run_ranks",
           "use_runner", "world_sizes"]

logger = logging.getLogger(__name__)

# The tests may run under a launcher themselves, which has not started the ranks that they start.
_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "MPI_", "MV2_", "MVP_", "HYD", "SLURM", "TORCHELASTIC_")


class Target(Protocol):
    """A module-level function ``target(rank, world_size, *args)``; args and result can be pickled."""

    def __call__(self, rank: int, world_size: int, /, *args: Any) -> Any: ...


def run_ranks(
    target: Target,
    world_size: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float = 60.0,
    backend: str | None = "gloo",
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> list[Any]:
    """Call ``target(rank, world_size, *args)`` on ``world_size`` ranks; returns their results in order of rank.

    ``backend``: ``gloo``, ``nccl``, ``auto`` (see :func:`choose_backend`) or None. Unless it is None the default
    process group exists when the target is called, and ``timeout_s`` is its timeout too. With None the
    variables are those of torchrun, so that ``init_process_group()`` without arguments finds the others.
    ``timeout_s`` bounds the whole call, start of the interpreters included. ``env`` adds to the environment.
    ``fresh``: start new interpreters even within :func:`~distkv.testing.warm.warm_start`.

    Raises RanksFailed as soon as a rank did not return, after a short grace for the others, or at the deadline.
    No process is left behind, whatever happens, KeyboardInterrupt included.
    """
    outcomes = _run(target, world_size, args, timeout_s, backend, env, fresh, until=first_failure)
    if any(outcome.status != "returned" for outcome in outcomes):
        raise RanksFailed(_title(target), outcomes)
    return [outcome.result for outcome in outcomes]


def run_outcomes(
    target: Target,
    world_size: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float = 60.0,
    backend: str | None = "gloo",
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> list[Outcome]:
    """As :func:`run_ranks`, for ranks that are meant to fail: all go on until they end, and nothing is raised.

    Ranks that are stopped by a signal are ended when no other rank runs any more.
    """
    return _run(target, world_size, args, timeout_s, backend, env, fresh, until=all_ended)


class Runner(Protocol):
    """Ranks that are there already: see :mod:`distkv.testing.under_launcher`."""

    world_size: int
    backend: str

    def run(self, first: Job, may_fail: bool, env: Mapping[str, str] | None, /) -> list[Outcome] | None:
        """Runs the job of rank 0 on all ranks, with their own ranks; None if it has to have new processes."""


_runner: Runner | None = None


def use_runner(runner: Runner | None) -> None:
    """From now on cases are given to ``runner`` first."""
    global _runner
    _runner = runner


def world_sizes(usual: Sequence[int]) -> tuple[int, ...]:
    """Which numbers of ranks to test at: that of the launcher, or the usual ones if tests start their ranks."""
    return (_runner.world_size,) if _runner is not None else tuple(usual)


def choose_backend(world_size: int) -> str:
    """``nccl`` if this machine has a CUDA GPU for each of ``world_size`` ranks, else ``gloo``.

    Under a launcher what its ranks have, if they are as many.
    """
    if _runner is not None and world_size == _runner.world_size:
        return _runner.backend
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "nccl" if gpus >= world_size and dist.is_nccl_available() else "gloo"


def _run(
    target: Target,
    world_size: int,
    args: Sequence[Any],
    timeout_s: float,
    backend: str | None,
    env: Mapping[str, str] | None,
    fresh: bool,
    until: Callable[[Sequence[Child]], bool],
) -> list[Outcome]:
    import torch.distributed as dist

    deadline = time.monotonic() + timeout_s
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if backend == "auto":
        backend = choose_backend(world_size)
        logger.info("%s: %d ranks over %s", _title(target), world_size, backend)
    module = target.__module__
    first = Job(rank=0, world_size=world_size, backend=backend, store_port=0, timeout_s=timeout_s, module=module,
                module_file=getattr(sys.modules[module], "__file__", None),
                call=_pickle_call(target, args))  # fmt: skip
    if _runner is not None:
        ended = _runner.run(first, until is all_ended, env)
        if ended is not None:
            return ended
    # The parent listens and hands the port on: nothing else can take it meanwhile.
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    first = replace(first, store_port=store.port)
    token = uuid.uuid4().hex
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="distkv-ranks-") as folder:
        try:
            warm = None if fresh or backend == "nccl" else _ready_process(_environment(first, token, env))
            for rank in range(world_size):
                job = replace(first, rank=rank)
                children.append(Child(job, Path(folder), _environment(job, token, env), warm))
            while not until(children) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            return conclude(children, deadline)
        finally:
            end_all(children, token)


def _ready_process(environment: Mapping[str, str]) -> WarmProcess | None:
    """The process that ranks with this environment can be forked from; None: they start fresh."""
    warm = current()
    return warm if warm is not None and warm.ready(environment) else None


def _pickle_call(target: Target, args: Sequence[Any]) -> bytes:
    name = getattr(target, "__qualname__", None)
    if name is None or "<" in name:
        raise ValueError(f"the target has to be a function of a module, importable by name, not {target!r}")
    return pickle.dumps((target, tuple(args)))


def _environment(job: Job, token: str, extra: Mapping[str, str] | None) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    env.update(
        OMP_NUM_THREADS="1",  # ranks share the machine
        OMP_WAIT_POLICY="PASSIVE",  # a spinning OpenMP thread takes the core from another rank
        TOKENIZERS_PARALLELISM="false",
        PYTHONUNBUFFERED="1",
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.store_port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 connects to the parent's store and opens none
    )
    env[TOKEN] = token
    for name in ("lo", "lo0"):
        if name in {interface for _, interface in socket.if_nameindex()}:
            env.update(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=name)
            break
    env.update(extra or {})
    return env


def _title(target: Target) -> str:
    return f"{target.__module__}.{getattr(target, '__qualname__', target)}"
