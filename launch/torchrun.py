"""torchrun with what distkv needs around it; started by ``torchrun.sh``.

The configuration is checked here, once, so that a mistake is one message and not one per rank. Then torchrun's own
launcher starts one process per rank and ends all of them when one fails or when this process is interrupted. The
exit code is that of the first rank that failed (torchrun's is always 1); 2 if the configuration cannot be used.

Environment, all optional:

NPROC            processes on this host; default: parallel.tp of the configuration over the number of hosts
NNODES           number of hosts (1); with more, set on each NODE_RANK, MASTER_ADDR and MASTER_PORT
OMP_NUM_THREADS  threads per process; default: the cores of this host over the processes on it
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = "distkv.engine.quickstart"


def main(arguments: Sequence[str]) -> int:
    """Start the ranks and wait for them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="launch/torchrun.sh", description="Start one process per rank.",
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("--module", default=QUICKSTART, help=f"what each rank runs (default: {QUICKSTART})")
    parser.add_argument("config", metavar="CONFIG", help="configuration file (YAML)")
    given, rest = parser.parse_known_args(arguments)
    problem = _use_this_checkout()
    if problem:
        return _fail(problem)
    from distkv.config import load
    from distkv.engine.config import ServeConfig
    from distkv.errors import ConfigError

    try:
        tp = load(given.config, ServeConfig).parallel.tp
        options = _torchrun_options(tp)
    except ConfigError as error:
        return _fail(str(error))
    return _launch([*options, "--module", given.module, given.config, *rest])


def _torchrun_options(tp: int) -> list[str]:
    """torchrun's options; sets OMP_NUM_THREADS and the gloo interface for the ranks."""
    from distkv.errors import ConfigError

    nodes = _number("NNODES", 1)
    processes = _number("NPROC", max(1, tp // nodes))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    options = ["--nproc-per-node", str(processes)]
    if nodes == 1:
        if "lo" in {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
        # Standalone takes any free port: several jobs on one host do not meet.
        return [*options, "--standalone", "--local-addr", "127.0.0.1"]
    for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ConfigError(name, f"must be set on every host, because NNODES is {nodes}")
    return [
        *options, "--nnodes", str(nodes), "--node-rank", str(_number("NODE_RANK", 0, lowest=0)),
        "--master-addr", os.environ["MASTER_ADDR"], "--master-port", str(_number("MASTER_PORT", 0)),
    ]  # fmt: skip


def _launch(arguments: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        print(f"launch: rank {rank} ended first, with exit code {code}; see what it wrote above", file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as error:
        print(f"launch: {error.sigval.name}: all ranks were ended", file=sys.stderr)
        return 128 + error.sigval
    except KeyboardInterrupt:
        return 130
    return 0


def _use_this_checkout() -> str | None:
    """Make this checkout's distkv importable here and in the ranks; returns what is missing, if anything is."""
    sys.path[0] = str(ROOT)  # was: the folder of this file
    try:
        import torch  # noqa: F401
        import yaml  # noqa: F401

        import distkv  # noqa: F401
    except ModuleNotFoundError as error:
        return f"{sys.executable} has no module {error.name!r}; make run installs all that is needed into {ROOT}/.venv"
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return None


def _number(name: str, default: int, lowest: int = 1) -> int:
    from distkv.errors import ConfigError

    text = os.environ.get(name, "").strip() or str(default)
    if not (text.isascii() and text.isdigit() and lowest <= int(text) <= 65_535):
        raise ConfigError(name, f"must be a whole number from {lowest} to 65535, got {text!r}")
    return int(text)


def _fail(message: str) -> int:
    print(f"launch: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
