"""How a configuration section is declared, checked and built from plain mappings.

A section is a frozen, keyword-only dataclass that derives from :class:`Section`; its leaves are declared with
:func:`setting`, which says whether the field is agreed (equal on every rank) or local, and what is allowed.
Every value is checked when the section is made, by hand or from a file, and there is one error,
:class:`~distkv.errors.ConfigError`, which names the field, what is allowed, and what was given.

Field types: ``bool``, ``int``, ``float``, ``str``, ``pathlib.Path``, ``Literal[...]``, ``T | None``,
``tuple[T, ...]``, and other sections. Nothing is converted but what cannot be misread: a whole number where a
number is asked for, a list to a tuple, a text to a path. ``true`` is not 1 and ``"96"`` is not 96.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from distkv.errors import ConfigError

__all__ = ["Rule", "Section", "agreed_fields", "allowed", "from_mapping", "rule_of", "setting", "type_hints"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What is known of a leaf: agreed on all ranks or local to each, and its bounds (``above`` is exclusive)."""

    agreed: bool = False
    low: float | None = None
    high: float | None = None
    above: float | None = None


def setting(
    default: Any = dataclasses.MISSING,
    *,
    agreed: bool,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Any:
    """Declare a leaf of a section. Without ``default`` the field has to be given.

    ``agreed``: the field has to be equal on all ranks and is compared at start; otherwise it is local.
    ``low``, ``high`` (inclusive) and ``above`` (exclusive) bound a number, each item of a tuple of numbers,
    or the length of a text.
    """
    rule = Rule(agreed=agreed, low=low, high=high, above=above)
    return dataclasses.field(default=default, metadata={"rule": rule})


class FieldError(ConfigError):
    """A ConfigError that still knows the field apart from the problem, so that a loader can add path and line."""

    def __init__(self, owner: str, field: str, problem: str) -> None:
        super().__init__(f"{owner}.{field}", problem)
        self.field = field
        self.problem = problem


class Section:
    """Base of the configuration dataclasses: checks every field when an instance is made.

    Derive with ``@dataclass(frozen=True, kw_only=True)``. Override :meth:`check_fields` for rules between fields.
    Raises :class:`~distkv.errors.ConfigError` from the constructor.
    """

    def __post_init__(self) -> None:
        hints = type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            try:
                value = _convert(getattr(self, field.name), hints[field.name], rule_of(field))
            except _Wrong as wrong:
                raise self.wrong(field.name, str(wrong)) from None
            object.__setattr__(self, field.name, value)
        self.check_fields()

    def check_fields(self) -> None:
        """Rules between fields: ``raise self.wrong(field, problem)`` when one is broken. Each field is right by now."""

    def wrong(self, field: str, problem: str) -> ConfigError:
        """The error for ``field`` (a name, or a dotted path below this section)."""
        return FieldError(type(self).__name__, field, problem)


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


def agreed_fields(config: object) -> dict[str, str]:
    """Dotted path -> canonical text (JSON) of every agreed field of ``config``, in order of declaration.

    Two ranks may form a group only if their dictionaries are equal.
    """
    return dict(_agreed(config, ""))


def allowed(hint: Any, rule: Rule) -> str:
    """Plain words for what a field of this type may be: ``a whole number from 1 to 4096``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(_plain(choice) for choice in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else allowed(arg, rule) for arg in args)
    if origin is tuple:
        return f"a list, each item {allowed(args[0], rule)}"
    if dataclasses.is_dataclass(hint):
        return "a mapping of fields"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    return words[hint] + ("" if hint is bool else _bounds(rule, " characters" if hint in (str, Path) else ""))


def rule_of(field: dataclasses.Field[Any]) -> Rule:
    """The rule that ``setting`` left in a field; a field declared without it is local and has no bounds."""
    rule = field.metadata.get("rule", Rule())
    assert isinstance(rule, Rule)
    return rule


def type_hints(cls: type) -> dict[str, Any]:
    """The resolved annotations of a dataclass."""
    return typing.get_type_hints(cls)


class _Wrong(Exception):
    """A value breaks its rule; the text is the problem, without the path, and ``hint`` its end: the nearest name."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem + hint)
        self.hint = hint


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
        raise where.error(path, f"must be a mapping of fields, got {_shown(value)}")
    hints = type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in value:
        if not isinstance(key, str):
            raise where.error(_join(path, str(key)), f"a field's name must be a text, got {_shown(key)}")
        if key not in fields:
            raise where.error(_join(path, key), "unknown field" + _suggest_field(key, cls, path))
    values: dict[str, object] = {}
    for name, field in fields.items():
        if name not in value:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise where.error(_join(path, name), f"missing; give {allowed(hints[name], rule_of(field))}")
            continue
        inner = _join(path, name)
        try:
            built = _build_nested(value[name], hints[name], inner, where)
            values[name] = _convert(built, hints[name], rule_of(field))
        except _Wrong as wrong:
            raise where.error(inner, str(wrong)) from None
    try:
        return cls(**values)
    except FieldError as error:
        raise where.error(_join(path, error.field), error.problem) from None


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


def _convert(value: object, hint: Any, rule: Rule) -> object:
    """The value as the field keeps it; raises _Wrong. Accepts no conversion that could hide a mistake."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        present = [arg for arg in args if arg is not type(None)]
        if len(present) != 1:
            raise TypeError(f"a configuration field has one type, or one type or None; not {hint}")
        try:
            return _convert(value, present[0], rule)
        except _Wrong as wrong:
            raise _must_be(value, hint, rule, wrong.hint) from None
    if origin is typing.Literal:
        # `1 == True`, so the type is compared too.
        if any(type(value) is type(choice) and value == choice for choice in args):
            return value
        raise _must_be(value, hint, rule, _suggest(str(value), [str(choice) for choice in args]))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _must_be(value, hint, rule)
        return tuple(_convert_item(item, i, args[0], rule) for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        if not isinstance(value, hint):
            raise _Wrong(f"must be a {hint.__name__}, got {_shown(value)}")
        return value
    return _convert_scalar(value, hint, rule)


def _convert_item(item: object, index: int, hint: Any, rule: Rule) -> object:
    try:
        return _convert(item, hint, rule)
    except _Wrong as wrong:
        raise _Wrong(f"item {index} {wrong}") from None


def _convert_scalar(value: object, hint: Any, rule: Rule) -> object:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and is_int:
        return _bounded(value, value, hint, rule)
    if hint is float and (is_int or isinstance(value, float)):
        assert isinstance(value, int | float)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise _must_be(value, hint, rule)
        return _bounded(number, number, hint, rule)
    if hint is str and isinstance(value, str):
        return _bounded(value, len(value), hint, rule)
    if hint is Path and isinstance(value, str | Path):
        if not str(value) or "\0" in str(value):
            raise _must_be(value, hint, rule)
        return _bounded(Path(value), len(str(value)), hint, rule)
    if hint not in (bool, int, float, str, Path):
        raise TypeError(f"configuration fields of type {hint} are not supported")
    raise _must_be(value, hint, rule)


def _bounded(value: object, size: Any, hint: Any, rule: Rule) -> object:
    """``value`` if ``size`` (the number itself, or the length of a text) is inside the bounds."""
    too_low = (rule.low is not None and size < rule.low) or (rule.above is not None and size <= rule.above)
    if too_low or (rule.high is not None and size > rule.high):
        raise _must_be(value, hint, rule)
    return value


def _must_be(value: object, hint: Any, rule: Rule, suggestion: str = "") -> _Wrong:
    return _Wrong(f"must be {allowed(hint, rule)}, got {_shown(value)}", suggestion)


def _bounds(rule: Rule, unit: str) -> str:
    low, high = rule.low, rule.high
    if unit and low == 1 and high is None:
        return " that is not empty"
    if low is not None and high is not None:
        return f" from {low:.15g} to {high:.15g}{unit}" if not unit else f" of {low:.15g} to {high:.15g}{unit}"
    words = []
    if low is not None:
        words.append(f"at least {low:.15g}{unit}")
    if rule.above is not None:
        words.append(f"more than {rule.above:.15g}{unit}")
    if high is not None:
        words.append(f"at most {high:.15g}{unit}")
    return " of " + " and ".join(words) if words else ""


def _shown(value: object) -> str:
    """A value in a message: its kind and its text, cut short."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = _plain(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"the text {text!r}" if isinstance(value, str | Path) else text


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        return str(value)
    except ValueError:  # an int with more digits than Python is willing to print
        return "a number of thousands of digits"


def _suggest(name: str, options: list[str]) -> str:
    near = difflib.get_close_matches(name.lower(), options, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _suggest_field(name: str, cls: type, path: str) -> str:
    """The nearest name in this section, else the section that this name belongs to, else what there is."""
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    near = _suggest(name, names)
    if near:
        return near
    for section, hint in type_hints(cls).items():
        if dataclasses.is_dataclass(hint) and name in {field.name for field in dataclasses.fields(hint)}:
            return f"; it belongs under {_join(path, section)}"
    return f"; there is {', '.join(names)}" if names else "; this section has no fields"


def _agreed(config: Any, path: str) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(config):
        value, inner = getattr(config, field.name), _join(path, field.name)
        if dataclasses.is_dataclass(value):
            yield from _agreed(value, inner)
        elif isinstance(value, tuple) and any(dataclasses.is_dataclass(item) for item in value):
            for i, item in enumerate(value):
                yield from _agreed(item, f"{inner}[{i}]")
        elif rule_of(field).agreed:
            yield inner, json.dumps(value, default=str)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
