"""The file of ``--json``, which all benchmarks have: refused before anything is measured, written afterwards."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path

from distkv.errors import InputFileError

__all__ = ["add_option", "machine", "refuse_unwritable", "write"]


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--json FILE``."""
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")


def refuse_unwritable(path: str | None) -> None:
    """Raises InputFileError if a file of this name cannot be written. None: no file was asked for."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            return
    except OSError as error:
        raise InputFileError(path, 0, error.strerror or str(error)) from None


def write(path: str | None, content: object) -> None:
    """Writes ``content`` as JSON, if a file was asked for."""
    if path is not None:
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def machine(**more: object) -> dict[str, object]:
    """What a measurement depends on, at this moment, and ``more`` of it."""
    return {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0],
            "system": platform.platform(), **more}
