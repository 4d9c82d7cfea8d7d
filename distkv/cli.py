"""The command line: ``distkv COMMAND ...``, also as ``python -m distkv``.

Each command is a module with ``main(arguments) -> exit code`` and a parser of its own, imported when it is asked for:
``distkv plan`` does not load an engine. Exit codes are the same for all: 0 it holds, 1 it does not, 2 the command, the
configuration or a file cannot be used (or the output not written), 130 interrupted, 141 nobody reads the output.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distkv import _streams
from distkv.errors import ConfigError, DistKVError, InputFileError

__all__ = ["main"]


class Command(NamedTuple):
    """A command: the module that has its ``main``, and one line for the list."""

    module: str
    text: str


COMMANDS = {
    "check-config": Command("distkv.inspection.check_config", "every value of a configuration, and where it is from"),
    "plan": Command("distkv.inspection.plan", "pages and bytes, per rank and per node"),
    "doctor": Command("distkv.inspection.doctor", "what this machine offers, and what of a configuration fails here"),
    "verify": Command("distkv.engine.verify", "your model and conversations, cold and warm: the same bits or not"),
    "bench": Command("distkv.bench.cli", "benchmarks: core, group, engine, tier, peers"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    try:
        try:
            return _run(arguments)
        finally:
            _streams.flush()
    except OSError as error:
        code = _streams.lost(error)
        if code is None:
            raise
        return code


def _run(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if given else 2
    if given[0] == "--version":
        import distkv

        print(f"distkv {distkv.__version__}")
        return 0
    command = COMMANDS.get(given[0])
    if command is None:
        near = difflib.get_close_matches(given[0], COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return _fail(f"there is no command {given[0]!r}{hint}; see distkv --help")
    try:
        run: Callable[[Sequence[str]], int] = importlib.import_module(command.module).main
        return run(given[1:])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("distkv"):
            raise
        return _fail(f"{given[0]} needs the module {error.name}, which is not installed: "
                     "pip install '.[engine]' in the checkout of distkv")
    except (ConfigError, InputFileError) as error:
        return _fail(str(error))
    except DistKVError as error:
        print(f"distkv: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("distkv: interrupted", file=sys.stderr, flush=True)
        return 130


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.text}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: distkv COMMAND ...", "", *lines, "", "distkv COMMAND --help says more."])


def _fail(message: str) -> int:
    print(f"distkv: {message}", file=sys.stderr, flush=True)
    return 2
