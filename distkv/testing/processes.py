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
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

from distkv.errors import DistKVError
from distkv.testing._children import TOKEN, Child, end_all
from distkv.testing._rank import Job, Raised
from distkv.testing.warm import WarmProcess, current

__all__ = ["Outcome", "Raised", "RanksFailed", "Target", "choose_backend", "run_outcomes", "run_ranks"]

logger = logging.getLogger(__name__)

Status = Literal["returned", "raised", "exited", "killed", "stopped", "deadline", "ended"]

_POLL_S = 0.02
_GRACE_S = 2.0  # for the other ranks to tell their own story after one has failed
_DUMP_S = 2.0  # for a rank to write its stacks
_LEAVE_S = 20.0  # for a rank that returned to end its process


class Target(Protocol):
    """A module-level function ``target(rank, world_size, *args)``; args and result can be pickled."""

    def __call__(self, rank: int, world_size: int, /, *args: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank ended.

    ``status``: ``returned`` (see ``result``), ``raised`` (see ``error``), ``exited`` (without a word: sys.exit or
    os._exit, see ``exit_code``), ``killed`` (by a signal that was not ours, ``-exit_code``), ``stopped`` (SIGSTOP;
    ended by the harness when the other ranks had ended), ``deadline`` (it was still running then), ``ended`` (by the
    harness, because another rank had failed). ``stacks`` has the threads of a rank that was still running.
    ``has_returned``: the target returned, whatever its process did then; one that does not end after that is
    ``deadline`` too. ``output`` is what it wrote to stdout and stderr. ``exit_code`` is None if the harness ended
    the process.
    """

    rank: int
    status: Status
    result: Any = None
    error: Raised | None = None
    has_returned: bool = False
    exit_code: int | None = None
    stacks: str = ""
    output: str = ""

    def raised(self, kind: type[BaseException]) -> bool:
        """Whether the rank raised an exception of this type, or of one derived from it."""
        return self.error is not None and f"{kind.__module__}.{kind.__qualname__}" in self.error.kinds

    def describe(self) -> str:
        """The outcome in words, with traceback, stacks and the end of the output."""
        if self.status == "returned":
            return f"rank {self.rank}: returned"
        what = {
            "raised": f"raised {self.error.kind}: {self.error.message}" if self.error else "raised",
            "exited": f"exited with code {self.exit_code}",
            "killed": f"was killed by signal {_signal_name(self.exit_code)}",
            "stopped": "was stopped by a signal and not continued",
            "deadline": "did not end within the deadline",
            "ended": "was still running when another rank failed, and was ended",
        }[self.status] + (" (its target had returned)" if self.has_returned else "")
        parts = [f"rank {self.rank}: {what}"]
        if self.error is not None:
            parts.append(self.error.traceback)
        if self.stacks:
            parts.append(f"-- stacks of rank {self.rank}'s threads\n{self.stacks}")
        if self.output.strip():
            parts.append(f"-- end of rank {self.rank}'s output\n{_tail(self.output)}")
        return "\n".join(part.rstrip() for part in parts)


class RanksFailed(DistKVError):
    """A run in which not every rank returned. ``outcomes`` has one per rank, in order of rank."""

    def __init__(self, title: str, outcomes: Sequence[Outcome]) -> None:
        failed = sum(outcome.status != "returned" for outcome in outcomes)
        described = "\n".join(outcome.describe() for outcome in outcomes)
        super().__init__(f"{failed} of {len(outcomes)} ranks of {title} failed\n{described}")
        self.outcomes = tuple(outcomes)


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
    outcomes = _run(target, world_size, args, timeout_s, backend, env, fresh, until=_first_failure)
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
    return _run(target, world_size, args, timeout_s, backend, env, fresh, until=_all_ended)


def choose_backend(world_size: int) -> str:
    """``nccl`` if this machine has a CUDA GPU for each of ``world_size`` ranks, else ``gloo``."""
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
    call = _pickle_call(target, args)
    token = uuid.uuid4().hex
    # The parent listens and hands the port on: nothing else can take it meanwhile.
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    children: list[Child] = []
    warm: WarmProcess | None = None
    with tempfile.TemporaryDirectory(prefix="distkv-ranks-") as folder:
        try:
            for rank in range(world_size):
                module = sys.modules[target.__module__]
                job = Job(
                    rank=rank,
                    world_size=world_size,
                    backend=backend,
                    store_port=store.port,
                    timeout_s=timeout_s,
                    module=target.__module__,
                    module_file=getattr(module, "__file__", None),
                    call=call,
                )
                environment = _environment(job, token, env)
                if rank == 0 and not fresh and backend != "nccl":
                    warm = current()
                    if warm is not None and not warm.ready(environment):
                        warm = None
                children.append(Child(job, Path(folder), environment, warm))
            while not until(children) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            return _conclude(children, deadline)
        finally:
            end_all(children, token)


def _all_ended(children: Sequence[Child]) -> bool:
    return all(_is_over(child) or child.is_stopped for child in children) and any(map(_is_over, children))


def _first_failure(children: Sequence[Child]) -> bool:
    # A rank that returned waits to be released, so one that is gone by now has failed.
    return any(child.exit_code is not None for child in children) or all(child.has_reported for child in children)


def _is_over(child: Child) -> bool:
    return child.has_reported or child.exit_code is not None


def _conclude(children: Sequence[Child], deadline: float) -> list[Outcome]:
    """Let go whoever returned, show where the others are, and say how each ended. What still runs is killed later."""
    late = time.monotonic() >= deadline
    if all(child.has_reported and child.exit_code is None for child in children):
        for child in children:
            child.release(b"e")
        _wait(lambda: all(child.exit_code is not None for child in children), _LEAVE_S)
        running = [child for child in children if child.exit_code is None]
    else:
        if not late:
            _wait(lambda: all(_is_over(child) or child.is_stopped for child in children), _GRACE_S)
        running = [child for child in children if not _is_over(child)]
    stopped = [child for child in running if child.is_stopped]
    for child in running:
        child.dump_stacks()
    _wait(lambda: all(child.stacks or child.exit_code is not None for child in running), _DUMP_S)
    if running:
        time.sleep(0.1)  # the stacks of many threads are not written in one go
    outcomes = []
    for child in children:
        status: Status | None = None
        if child in running:
            status = "stopped" if child in stopped else "deadline" if late or child.has_reported else "ended"
        outcomes.append(_outcome(child, status))
    return outcomes


def _outcome(child: Child, ended: Status | None) -> Outcome:
    """``ended``: why the harness ends this rank; None if it was over by itself."""
    report, code = child.report, child.exit_code
    outcome = Outcome(
        rank=child.rank,
        status="exited",
        error=report.raised if report is not None else None,
        has_returned=report is not None and report.result is not None,
        exit_code=None if ended else code,
        stacks=child.stacks,
        output=child.output,
    )
    if ended is not None:
        return replace(outcome, status=ended)
    if outcome.error is not None:
        return replace(outcome, status="raised")
    if report is not None and report.result is not None and code in (None, 0):
        return replace(outcome, status="returned", result=pickle.loads(report.result))
    return replace(outcome, status="killed" if code is not None and code < 0 else "exited")


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(_POLL_S)


def _pickle_call(target: Target, args: Sequence[Any]) -> bytes:
    name = getattr(target, "__qualname__", None)
    if name is None or "<" in name:
        raise ValueError(f"the target has to be a function of a module, importable by name, not {target!r}")
    return pickle.dumps((target, tuple(args)))


def _environment(job: Job, token: str, extra: Mapping[str, str] | None) -> dict[str, str]:
    env = dict(os.environ)
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


def _signal_name(code: int | None) -> str:
    try:
        return signal.Signals(-(code or 0)).name
    except ValueError:
        return str(code)


def _tail(text: str, lines: int = 60) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])
