"""Writes ``docs/api.md``: every public name of ``distkv`` with its signature, fields and docstrings, from the source.

Run as ``python -m distkv.api_reference > docs/api.md``.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterator
from typing import Any

import distkv
from distkv.config import Section
from distkv.config_reference import docs_in, field_docs, markdown, one_line

__all__ = ["main", "page"]

_HEAD = """\
# The public names

Written from the source by `make docs`; change the docstrings there, not this file. How they are used is in
[embedding.md](embedding.md); the configuration's fields are in [configuration.md](configuration.md). Each error says
what it ends; the tree is at the top of `distkv/errors.py`.
"""


def page() -> str:
    """The whole page, as Markdown."""
    names = [name for name in distkv.__all__ if not name.startswith("_")]
    kinds: dict[str, list[str]] = {"Classes": [], "Errors": [], "Functions": [], "Types": []}
    for name in names:
        kinds[_kind(getattr(distkv, name))].append(name)
    parts = [_HEAD]
    for kind, members in kinds.items():
        if members:
            parts.append(f"## {kind}\n")
            parts.extend(_entry(name, getattr(distkv, name)) for name in members)
    return "\n".join(parts)


def _kind(value: Any) -> str:
    if not inspect.isclass(value):
        return "Functions" if callable(value) and inspect.isroutine(value) else "Types"
    return "Errors" if issubclass(value, BaseException) else "Classes"


def _entry(name: str, value: Any) -> str:
    lines = [f"### `{name}{_signature(value)}`\n", _text(value), ""]
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        docs = docs_in(value)
        lines += [*(f"- `{one.name}` (`{one.value!r}`): {docs.get(one.name, '')}".rstrip(": ") for one in value), ""]
    elif inspect.isclass(value) and not issubclass(value, Section):
        if dataclasses.is_dataclass(value):
            docs = field_docs(value)
            lines += [f"- `{f.name}`: {docs.get(f.name, '')}".rstrip(": ") for f in dataclasses.fields(value)]
        lines += _members(value)
        if lines[-1]:
            lines.append("")
    return "\n".join(lines)


def _members(cls: type) -> Iterator[str]:
    """One line for each public attribute that has a docstring of its own, in the order of the source."""
    seen: set[str] = set()
    for owner in cls.__mro__:
        if not owner.__module__.startswith("distkv"):
            continue
        for name, member in vars(owner).items():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            routine = inspect.isfunction(function)
            if name in seen or name.startswith("_") or not (routine or hasattr(member, "__get__")):
                continue
            seen.add(name)
            text = inspect.getdoc(getattr(cls, name, None) if routine else member)
            if text and (routine or isinstance(member, property) or type(member).__name__ == "cached_property"):
                yield f"- `{name}{_signature(function) if routine else ''}`: {one_line(text)}"


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    if inspect.isclass(value) and (dataclasses.is_dataclass(value) or issubclass(value, enum.Enum)):
        return ""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name not in ("self", "cls")]
    # a default that is an object prints its address; what it is does not matter here
    parameters = [p if _plain(p.default) else p.replace(default=...) for p in parameters]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty)).replace("Ellipsis", "...")


def _plain(default: Any) -> bool:
    return default is inspect.Parameter.empty or default is None or isinstance(default, bool | int | float | str)


def _text(value: Any) -> str:
    parts = [inspect.getdoc(value) or ""]
    made = vars(value).get("__init__") if inspect.isclass(value) else None
    if inspect.isfunction(made) and made.__doc__:
        parts.append(inspect.cleandoc(made.__doc__))
    return "\n\n".join(map(markdown, filter(None, parts)))


def main() -> int:
    """The command line."""
    print(page(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
