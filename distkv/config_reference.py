"""Writes ``docs/configuration.md`` from the configuration dataclasses and the docstrings under their fields.

Run as ``python -m distkv.config_reference [module:Class ...] > docs/configuration.md``; without arguments it
describes :class:`distkv.config.Config`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from distkv._settings import rule_of, type_hints
from distkv._values import allowed

__all__ = ["docs_in", "field_docs", "main", "markdown", "one_line", "reference"]

_HEAD = """\
# Configuration

Written from the source by `make docs`; change the docstrings there, not this file.

A configuration file is one YAML mapping. Every field has the default shown unless it says *required*; an unknown or
doubled key, a wrong type or an impossible value is an error that names the field, the line and what is allowed.
Numbers are decimal; `true` and `false` are the only truth values; tags, anchors and aliases are not allowed.

*Agreed* fields have to be equal on every rank: they are compared when a group starts, and a difference ends the start
with an error that names the field and the ranks. *Local* fields may differ from rank to rank.
"""


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the docstring under it, as one line of Markdown; fields of base classes included."""
    docs: dict[str, str] = {}
    for owner in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        docs |= docs_in(owner)
    return docs


def docs_in(cls: type) -> dict[str, str]:
    """Name -> the docstring under it, as one line of Markdown, for what the body of this class assigns."""
    docs: dict[str, str] = {}
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for statement, after in zip(body.body, body.body[1:], strict=False):
        target = statement.target if isinstance(statement, ast.AnnAssign) else (
            statement.targets[0] if isinstance(statement, ast.Assign) else None)
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[target.id] = one_line(str(after.value.value))
    return docs


def markdown(text: str) -> str:
    """A docstring's text as Markdown."""
    text = re.sub(r":(?:class|meth|func|mod|attr|data):`~?([^`]+)`", r"`\1`", text.replace("``", "`"))
    return re.sub(r"::\n", ":\n", text)


def one_line(text: str) -> str:
    """:func:`markdown` on one line."""
    return " ".join(markdown(text).split())


def reference(*classes: type) -> str:
    """The whole page, as Markdown, for one or more configuration classes. A section seen before is not repeated."""
    seen: set[tuple[str, type]] = set()
    parts = [_HEAD]
    for cls in classes:
        parts.extend(_sections(cls, "", seen))
    return "\n".join(parts)


def _sections(cls: type, path: str, seen: set[tuple[str, type]]) -> Iterator[str]:
    if (path, cls) in seen:
        return
    seen.add((path, cls))
    hints, docs = type_hints(cls), field_docs(cls)
    leaves: list[str] = []
    inner: list[tuple[str, type]] = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        section = _section_in(hint)
        if section is not None:
            inner.append((f"{path}.{field.name}" if path else field.name, section))
        else:
            scope = "agreed" if rule_of(field).agreed else "local"
            cells = [f"`{field.name}`", allowed(hint, rule_of(field)), _default(field), scope, docs.get(field.name, "")]
            leaves.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    if leaves:
        title = f"## `{path}`" if path else f"## Top level of `{cls.__name__}`"
        text = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
        head = "| field | allowed | default | scope | meaning |\n|---|---|---|---|---|\n"
        yield f"{title}\n\n{text}\n\n{head}{''.join(leaves)}"
    for inner_path, section in inner:
        yield from _sections(section, inner_path, seen)


def _section_in(hint: Any) -> type | None:
    """The section that a field's type is, or holds (a list of sections, a section or null)."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    for arg in typing.get_args(hint):
        if isinstance(arg, type) and dataclasses.is_dataclass(arg):
            return arg
    return None


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{json.dumps(field.default, default=str)}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{json.dumps(field.default_factory(), default=str)}`"
    return "*required*"


def main(arguments: Sequence[str]) -> int:
    """The command line: prints the page for the classes named as ``module:Class``."""
    classes = []
    for name in arguments or ["distkv.config:Config"]:
        module, _, attribute = name.partition(":")
        classes.append(getattr(importlib.import_module(module), attribute))
    print(reference(*classes), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
