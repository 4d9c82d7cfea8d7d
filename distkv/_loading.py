"""From the plain mapping that a file gives to sections, with an error that names path, file and line."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from distkv._settings import FieldError, join, rule_of, type_hints
from distkv._values import Wrong, allowed, convert, shown, suggest
from distkv.errors import ConfigError

__all__ = ["from_mapping"]

T = TypeVar("T")


def from_mapping(
    mapping: Mapping[str, Any], cls: type[T], *, source: str = "", lines: Mapping[str, int] | None = None
) -> T:
    """Build the dataclass ``cls`` from a mapping as a YAML or JSON file gives it.

    ``source`` (a file name) and ``lines`` (dotted path -> line number) go into the message of an error.
    Raises ConfigError for the first key that is unknown, missing, of the wrong type or impossible.
    """
    built = _build(mapping, cls, "", _Where(source, lines or {}))
    assert isinstance(built, cls)
    return built


@dataclasses.dataclass(frozen=True)
class _Where:
    """Where a mapping came from, to end a message with file and line."""

    source: str
    lines: Mapping[str, int]

    def error(self, path: str, problem: str) -> ConfigError:
        line = self.lines.get(path)
        place = " ".join(filter(None, [self.source, f"line {line}" if line else ""]))
        return ConfigError(path, f"{problem} ({place})" if place else problem)


def _build(value: object, cls: type, path: str, where: _Where) -> object:
    if not isinstance(value, Mapping):
        raise where.error(path, f"must be a mapping of fields, got {shown(value)}")
    hints = type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in value:
        if not isinstance(key, str):
            raise where.error(join(path, str(key)), f"a field's name must be a text, got {shown(key)}")
        if key not in fields:
            raise where.error(join(path, key), "unknown field" + _suggest_field(key, cls, path))
    values: dict[str, object] = {}
    for name, field in fields.items():
        if name not in value:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise where.error(join(path, name), f"missing; give {allowed(hints[name], rule_of(field))}")
            continue
        inner = join(path, name)
        try:
            built = _build_nested(value[name], hints[name], inner, where)
            values[name] = convert(built, hints[name], rule_of(field))
        except Wrong as wrong:
            raise where.error(inner, str(wrong)) from None
    try:
        return cls(**values)
    except FieldError as error:
        raise where.error(join(path, error.field), error.problem) from None


def _build_nested(value: object, hint: Any, path: str, where: _Where) -> object:
    """Turn mappings into sections wherever ``hint`` has a section; leave everything else as it is."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(value, hint, path, where)
    if origin in (typing.Union, types.UnionType) and value is not None:
        section = [arg for arg in args if dataclasses.is_dataclass(arg)]
        return _build_nested(value, section[0], path, where) if section else value
    if origin is tuple and dataclasses.is_dataclass(args[0]) and isinstance(value, list):
        return tuple(_build_nested(item, args[0], f"{path}[{i}]", where) for i, item in enumerate(value))
    return value


def _suggest_field(name: str, cls: type, path: str) -> str:
    """The nearest name in this section, else the section that this name belongs to, else what there is."""
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    near = suggest(name, names)
    if near:
        return near
    for section, hint in type_hints(cls).items():
        if dataclasses.is_dataclass(hint) and name in {field.name for field in dataclasses.fields(hint)}:
            return f"; it belongs under {join(path, section)}"
    return f"; there is {', '.join(names)}" if names else "; this section has no fields"
