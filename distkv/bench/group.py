"""``distkv bench group``: one ballot over each transport, several sizes, 2 to 4 ranks; and a whole step of the cache.

Wall microseconds of all ranks together, because what is waited for is another process; so they depend on what else the
machine does, and mean and p99 say how much. Exit code 0: measured. 1: a transport that was asked for failed or is not
here. 2: unusable arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from distkv.ballot import Slots
from distkv.bench import files
from distkv.bench.group_rank import torch_rank
from distkv.bench.rows import markdown
from distkv.bench.timing import Sample
from distkv.config import HostConfig
from distkv.errors import DistKVError
from distkv.inspection.machine import Machine

__all__ = ["GroupRow", "Unavailable", "main", "measure"]

QUEUE_SLOTS = (1, 8, 64, 256)
TRANSPORTS = ("gloo", "mpi", "nccl")
_TIMEOUT_S = 600.0


class Unavailable(DistKVError):
    """A transport that this machine does not have, or whose ranks failed."""


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """One operation over one transport. Samples are wall microseconds of all ranks together."""

    transport: str
    ranks: int
    operation: str
    elements: int
    """int64 in the vector; 0 for a step, whose ballot has ``ballot_size(8)``."""
    total: Sample
    issue: Sample
    """Until the call that starts it returns: an engine can launch a forward then."""
    wait: Sample
    """From then to the result, with nothing done between."""


def ballot_size(queue_slots: int) -> int:
    """int64 in a ballot for so many waiting requests, and as many read-ins as the configuration's default has."""
    return Slots(queue_slots, HostConfig().loading_slots).size


def measure(transport: str, ranks: int, sizes: Sequence[int], n: int) -> list[GroupRow]:
    """Starts ``ranks`` processes and measures. Raises Unavailable."""
    reason = missing(transport, ranks)
    if reason is not None:
        raise Unavailable(f"{transport} with {ranks} ranks: {reason}")
    found = _under_mpirun(ranks, list(sizes), n) if transport == "mpi" else _over_torch(transport, ranks, sizes, n)
    slots = {ballot_size(k): k for k in QUEUE_SLOTS}
    rows = []
    for size in sizes:
        name = f"ballot, {slots[size]} slots" if size in slots else "minimum"
        rows.append(_row(transport, ranks, name, size, [rank["minima"][str(size)] for rank in found]))
    rows.append(_row(transport, ranks, "cache.step, 1 request", 0, [rank["step"] for rank in found]))
    return rows


def missing(transport: str, ranks: int) -> str | None:
    """Why a transport cannot be measured here; None if it can."""
    import torch
    import torch.distributed as dist

    if transport == "mpi":
        if find_spec("mpi4py") is None:
            return "mpi4py is not installed (pip install '.[mpi]' mpich in the checkout)"
        return None if Machine().mpirun() else "there is no mpirun, in PATH or beside this Python"
    if transport == "nccl":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        here = gpus >= ranks and dist.is_nccl_available()
        return None if here else f"NCCL needs a GPU for each rank, and torch sees {gpus}"
    return None


def _over_torch(transport: str, ranks: int, sizes: Sequence[int], n: int) -> list[dict[str, Any]]:
    from distkv.testing import run_ranks

    return run_ranks(torch_rank, ranks, (list(sizes), n), timeout_s=_TIMEOUT_S, backend=transport)


def _under_mpirun(ranks: int, sizes: list[int], n: int) -> list[dict[str, Any]]:
    program = Machine().mpirun()
    assert program is not None
    command = [program, *launcher_options(program), "-n", str(ranks), sys.executable, "-m", "distkv.bench.group_rank",
               json.dumps([sizes, n])]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_TIMEOUT_S, check=False,
                              stdin=subprocess.DEVNULL)  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"mpi with {ranks} ranks did not end within {_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise Unavailable(f"mpi with {ranks} ranks ended with code {done.returncode}: {done.stderr.strip()[-800:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def launcher_options(program: str) -> list[str]:
    """Open MPI refuses root and more ranks than cores unless it is told to; MPICH does not know these options."""
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    return ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version or "OpenRTE" in version else []


def _row(transport: str, ranks: int, operation: str, elements: int, times: list[dict[str, list[int]]]) -> GroupRow:
    total, issue, wait = (Sample.of([t for rank in times for t in rank[part]]) for part in ("total", "issue", "wait"))
    return GroupRow(transport=transport, ranks=ranks, operation=operation, elements=elements, total=total, issue=issue,
                    wait=wait)


def table(rows: Sequence[GroupRow]) -> str:
    """The rows as a Markdown table."""
    head = ["transport", "ranks", "operation", "int64", "median us", "mean", "p99", "issue", "wait"]
    lines = []
    for row in rows:
        numbers = (row.total.median, row.total.mean, row.total.p99, row.issue.median, row.wait.median)
        lines.append([row.transport, str(row.ranks), row.operation, str(row.elements or ""),
                      *(f"{number:,.1f}" if number < 100 else f"{number:,.0f}" for number in numbers)])
    return markdown(head, lines)


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="distkv bench group", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks (default 2,3,4)")
    parser.add_argument("--transports", help="gloo, mpi, nccl (default: those that this machine has)")
    parser.add_argument("--sizes", help="numbers of int64 (default: ballots of "
                        f"{', '.join(map(str, QUEUE_SLOTS))} waiting requests)")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=1000, help="of each measurement (default 1000)")
    files.add_option(parser)
    given = parser.parse_args(arguments)
    try:
        ranks = _numbers(given.ranks)
        sizes = _numbers(given.sizes) if given.sizes else [ballot_size(k) for k in QUEUE_SLOTS]
        if given.repeats < 1:
            raise ValueError(f"--repeats {given.repeats}")
    except ValueError as error:
        print(f"distkv: {error}: give whole numbers from 1, with commas between them", file=sys.stderr)
        return 2
    asked = given.transports.split(",") if given.transports else None
    if asked and not set(asked) <= set(TRANSPORTS):
        print(f"distkv: --transports are {', '.join(TRANSPORTS)}, not {given.transports}", file=sys.stderr)
        return 2
    files.refuse_unwritable(given.json)
    return _run(asked, ranks, sizes, given.repeats, given.json)


def _run(asked: Sequence[str] | None, ranks: Sequence[int], sizes: Sequence[int], n: int, file: str | None) -> int:
    rows, failed = [], False
    for transport in asked or TRANSPORTS:
        for world_size in ranks:
            if asked is None and missing(transport, world_size) is not None:
                continue
            try:
                rows += measure(transport, world_size, sizes, n)
            except DistKVError as error:
                failed = True
                print(f"distkv: {error}", file=sys.stderr, flush=True)
    print(table(rows))
    print(f"\n{n} repetitions on each rank; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end. issue: "
          "until the call that starts it returns; wait: from then on.")
    files.write(file, {"machine": files.machine(), "unit": "us", "repeats": n, "rows": [asdict(row) for row in rows]})
    return int(failed)


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(f"{text!r} has a number below 1")
    return numbers
