"""Runs tests in the processes that a launcher has started: the cases of ``run_ranks`` on its ranks, not on new ones.

::

    torchrun --standalone --nproc-per-node 2 -m distkv.testing.under_launcher multigpu_tests
    mpirun -n 2 python -m distkv.testing.under_launcher multigpu_tests
    srun -n 2 python -m distkv.testing.under_launcher --require nccl multigpu_tests

Rank 0 runs pytest with the arguments; whenever a test calls :func:`~distkv.testing.processes.run_ranks`, all ranks call
the target, in a process group that is made for it: over NCCL if every rank has a GPU, else over gloo, and with
``--require nccl`` not at all. A case for another number of ranks is skipped, and says so. Cases whose ranks are meant
to fail (``run_outcomes``) and those with an environment of their own get processes of their own here too, because a
launcher ends all ranks when one has ended.

The exit code is pytest's, on every rank; 1 also if no case has run on these ranks, 2 if they cannot be used. After a
case in which a rank failed the rest are not run: its process group may hold anything. A rank that is late by more than
a grace shows its stacks and ends, and the launcher ends the others.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

from distkv._text import counted
from distkv.engine import mpi_launch
from distkv.engine.meeting import hand_over
from distkv.errors import ConfigError, DistKVError
from distkv.layout import Layout, ranks_on_host
from distkv.testing import processes
from distkv.testing._outcome import Outcome
from distkv.testing._rank import Job, Report, call, describe

__all__ = ["main"]

logger = logging.getLogger(__name__)

_JOIN_S = 300.0
_IDLE = timedelta(hours=6)  # between two cases, while rank 0 runs tests that need no other
_LEAVE_S = 30.0
_GRACE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the launcher's, and the store that they talk through."""

    layout: Layout
    store: dist.Store
    backend: str
    stderr: IO[str]
    """pytest takes the real one."""

    def of_case(self, job: Job, number: int) -> Report:
        """Calls the target on this rank, in a new default process group; the group is left as it is."""
        with self._deadline(job.timeout_s + _GRACE_S):
            try:
                self._join(job, number)
                return Report(result=call(job))
            except Exception as error:  # noqa: BLE001  # handed to rank 0
                return Report(raised=describe(error))

    def _join(self, job: Job, number: int) -> None:
        assert job.backend is not None
        device = torch.device("cuda", self.layout.local_rank) if job.backend == "nccl" else None
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group(
            job.backend, store=dist.PrefixStore(f"case{number}", self.store), rank=job.rank, world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout_s), device_id=device,
        )  # fmt: skip

    @contextlib.contextmanager
    def _deadline(self, seconds: float) -> Iterator[None]:
        def end() -> None:
            self.stderr.write(f"rank {self.layout.rank}: a case did not end within {seconds:g} s\n")
            faulthandler.dump_traceback(self.stderr, all_threads=True)
            self.stderr.flush()
            os._exit(1)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    # ---- words between rank 0 and the others

    def follow(self) -> int:
        """A rank that is not the first: runs one case after the other, until rank 0 gives the exit code."""
        number = 0
        while True:
            self.store.wait([f"case/{number}"], _IDLE)
            told = pickle.loads(self.store.get(f"case/{number}"))
            if isinstance(told, int):
                return told
            report = self.of_case(replace(told, rank=self.layout.rank), number)
            _put(self.store, f"report/{number}/{self.layout.rank}", pickle.dumps(report))
            self.store.wait([f"over/{number}"], _IDLE)
            if self.store.get(f"over/{number}") == b"whole":
                dist.destroy_process_group()
            number += 1


class Runner:
    """Rank 0's: gives a case to all ranks. What :mod:`distkv.testing.processes` asks first."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.world_size = ranks.layout.world_size
        self.backend = ranks.backend
        self.cases = 0
        self.is_whole = True

    def run(self, first: Job, may_fail: bool, env: Mapping[str, str] | None) -> list[Outcome] | None:
        """What became of each rank; None if the case needs processes of its own."""
        if first.world_size != self.world_size:
            import pytest

            pytest.skip(f"for {first.world_size} ranks, and these are {self.world_size}")
        if may_fail or env or first.backend is None:
            return None
        if not self.is_whole:
            raise DistKVError("not run: an earlier case has failed on these ranks, and may have left anything behind")
        number, self.cases = self.cases, self.cases + 1
        store = self._ranks.store
        _put(store, f"case/{number}", pickle.dumps(first))
        self.is_whole = False
        reports = [self._ranks.of_case(first, number)]
        for rank in range(1, self.world_size):
            store.wait([f"report/{number}/{rank}"], timedelta(seconds=first.timeout_s + 2 * _GRACE_S))
            reports.append(pickle.loads(store.get(f"report/{number}/{rank}")))
        self.is_whole = all(report.raised is None for report in reports)
        _put(store, f"over/{number}", "whole" if self.is_whole else "broken")
        if self.is_whole:
            dist.destroy_process_group()
        return [_outcome(rank, report) for rank, report in enumerate(reports)]

    def end(self, code: int) -> None:
        """Gives the others the exit code."""
        _put(self._ranks.store, f"case/{self.cases}", pickle.dumps(code))


def _put(store: Any, key: str, value: bytes | str) -> None:
    store.set(key, value)  # bytes too, whatever its types say


def _outcome(rank: int, report: Report) -> Outcome:
    if report.raised is not None:
        return Outcome(rank=rank, status="raised", error=report.raised)
    assert report.result is not None
    return Outcome(rank=rank, status="returned", result=pickle.loads(report.result), has_returned=True, exit_code=0)


def _met(layout: Layout, required: str | None) -> Ranks:
    hand_over(layout, _JOIN_S)
    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=_JOIN_S)))
    store = dist.PrefixStore("distkv-under-launcher", store)
    _put(store, f"backend/{rank}", processes.choose_backend(ranks_on_host(size)))
    found = [store.get(f"backend/{other}").decode() for other in range(size)]
    backend = "nccl" if set(found) == {"nccl"} else "gloo"
    if required not in (None, backend):
        raise ConfigError("--require", f"is {required}, but the {counted(size, 'rank')} can have, one after the other, "
                                       f"{', '.join(found)}")  # fmt: skip
    return Ranks(layout=layout, store=store, backend=backend, stderr=os.fdopen(os.dup(2), "w"))


def _test(ranks: Ranks, arguments: Sequence[str]) -> int:
    """Rank 0: pytest, whose exit code all ranks are given."""
    import pytest

    runner = Runner(ranks)
    processes.use_runner(runner)
    code = 1
    try:
        code = int(pytest.main(list(arguments)))
        code = code or int(runner.cases == 0)
    finally:
        processes.use_runner(None)
        runner.end(code)
    sys.stdout.write(f"{counted(runner.cases, 'case')} on the {counted(runner.world_size, 'rank')} of "
                     f"{ranks.layout.source}, over {ranks.backend}\n")  # fmt: skip
    if runner.cases == 0:
        ranks.stderr.write("distkv.testing: no case ran on these ranks, so nothing was tested on them\n")
        ranks.stderr.flush()
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m distkv.testing.under_launcher", allow_abbrev=False,
                                     description="Runs pytest's tests on the ranks of a launcher.")  # fmt: skip
    parser.add_argument("--require", choices=("gloo", "nccl"), help="end with an error if the ranks cannot have it")
    given, rest = parser.parse_known_args(arguments)
    try:
        ranks = _met(Layout.from_environment(), given.require)
    except DistKVError as error:
        sys.stderr.write(f"distkv.testing: {error}\n")
        return 2
    code = ranks.follow() if ranks.layout.rank else _test(ranks, rest)
    _put(ranks.store, f"left/{ranks.layout.rank}", b"")
    if ranks.layout.rank == 0:  # the store may be in this process
        everyone = [f"left/{rank}" for rank in range(ranks.layout.world_size)]
        with contextlib.suppress(RuntimeError):  # one is late; its own deadline ends it
            ranks.store.wait(everyone, timedelta(seconds=_LEAVE_S))
    if code == 0 and ranks.layout.source == "mpirun":
        mpi_launch.finalize()
    return code


def _end(code: Any) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's threads may outlive a group that broke


if __name__ == "__main__":
    _end(main())
