"""``distkv check-config CONFIG``: every value of a configuration, where it is from, and what the ranks compare.

Exit code 0: the file can be used. 2: it cannot, and the message names field, file and line.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from distkv._settings import Section, agreed_fields, leaves
from distkv.config import from_mapping, read
from distkv.errors import ConfigError
from distkv.inspection.output import columns

__all__ = ["Resolved", "agreed_digest", "main", "resolve"]

_ENGINE = "distkv.engine.config:ServeConfig"


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """One field as a program will use it."""

    path: str
    value: object
    """As declared: ``null`` or ``auto`` where the field leaves it open; see ``derived``."""
    agreed: bool
    source: str
    """``default``, or ``FILE:LINE``."""
    derived: object = None
    """What is used instead of ``value``; None if ``value`` is used as it stands."""
    because: str = ""
    """What ``derived`` follows from."""


def resolve(config: Any, lines: Mapping[str, int], file: str) -> list[Resolved]:
    """Every field of ``config``, a Section that was read from ``file`` with these ``lines``."""
    derived = config.derived() if isinstance(config, Section) else {}
    found = []
    for leaf in leaves(config):
        instead = derived.get(leaf.path)
        found.append(Resolved(
            path=leaf.path, value=leaf.value, agreed=leaf.rule.agreed,
            source=f"{file}:{lines[leaf.path]}" if leaf.path in lines else "default",
            derived=instead.value if instead else None, because=instead.why if instead else "",
        ))  # fmt: skip
    return found


def agreed_digest(config: object) -> str:
    """128-bit xxHash of all agreed fields and their values: equal on two ranks exactly if these are."""
    return xxhash.xxh3_128_hexdigest(json.dumps(agreed_fields(config), sort_keys=True).encode())


def config_class(name: str) -> type:
    """The configuration class ``module:Class``. Raises ConfigError if there is none of this name."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("", f"--config-class {name!r} is not to be had: {error}; give module:Class") from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ConfigError("", f"--config-class {name!r} is not a configuration class (a dataclass)")
    return found


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="distkv check-config", description=__doc__.split("\n")[0])
    parser.add_argument("config", metavar="CONFIG", help="configuration file (YAML)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--config-class", metavar="MODULE:CLASS", default=_ENGINE,
                        help=f"the class that your program loads its file with (default: {_ENGINE})")  # fmt: skip
    given = parser.parse_args(arguments)
    cls = config_class(given.config_class)
    mapping, lines = read(given.config)
    config: Any = from_mapping(mapping, cls, source=given.config, lines=lines)
    fields, digest = resolve(config, lines, given.config), agreed_digest(config)
    if given.json:
        found = {"file": given.config, "agreed_digest": digest, "fields": [dataclasses.asdict(f) for f in fields]}
        print(json.dumps(found, default=str, indent=1))
        return 0
    rows = [("field", "value", "scope", "from")]
    for field in fields:
        shown, source = _text(field.value), field.source
        if field.because:
            shown, source = _text(field.derived), f"{field.because}, as it is {shown} ({source})"
        rows.append((field.path, shown, "agreed" if field.agreed else "local", source))
    print(columns(rows))
    print(f"\nagreed fields: {digest} (has to be the same on every rank; compared when a group starts)")
    return 0


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
