"""What a value of a configuration may be, and how what is wrong with one is said.

Field types: ``bool``, ``int``, ``float``, ``str``, ``pathlib.Path``, ``Literal[...]``, ``T | None``, ``tuple[T, ...]``,
and sections. Nothing is converted but what cannot be misread: a whole number where a number is asked for, a list to a
tuple, a text to a path. ``true`` is not 1 and ``"96"`` is not 96.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Rule", "Wrong", "allowed", "convert", "plain", "shown", "suggest"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What is known of a leaf: agreed on all ranks or local to each, and its bounds (``above`` is exclusive)."""

    agreed: bool = False
    low: float | None = None
    high: float | None = None
    above: float | None = None


class Wrong(Exception):
    """A value breaks its rule; the text is the problem, without the path, and ``hint`` its end: the nearest name."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem + hint)
        self.hint = hint


def allowed(hint: Any, rule: Rule) -> str:
    """Plain words for what a field of this type may be: ``a whole number from 1 to 4096``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(plain(choice) for choice in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else allowed(arg, rule) for arg in args)
    if origin is tuple:
        return f"a list, each item {allowed(args[0], rule)}"
    if dataclasses.is_dataclass(hint):
        return "a mapping of fields"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    return words[hint] + ("" if hint is bool else _bounds(rule, " characters" if hint in (str, Path) else ""))


def convert(value: object, hint: Any, rule: Rule) -> object:
    """The value as the field keeps it; raises Wrong. Accepts no conversion that could hide a mistake."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        present = [arg for arg in args if arg is not type(None)]
        if len(present) != 1:
            raise TypeError(f"a configuration field has one type, or one type or None; not {hint}")
        try:
            return convert(value, present[0], rule)
        except Wrong as wrong:
            raise _must_be(value, hint, rule, wrong.hint) from None
    if origin is typing.Literal:
        # `1 == True`, so the type is compared too.
        if any(type(value) is type(choice) and value == choice for choice in args):
            return value
        raise _must_be(value, hint, rule, suggest(str(value), [str(choice) for choice in args]))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _must_be(value, hint, rule)
        return tuple(_convert_item(item, i, args[0], rule) for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        if not isinstance(value, hint):
            raise Wrong(f"must be a {hint.__name__}, got {shown(value)}")
        return value
    return _convert_scalar(value, hint, rule)


def _convert_item(item: object, index: int, hint: Any, rule: Rule) -> object:
    try:
        return convert(item, hint, rule)
    except Wrong as wrong:
        raise Wrong(f"item {index} {wrong}") from None


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


def _must_be(value: object, hint: Any, rule: Rule, suggestion: str = "") -> Wrong:
    return Wrong(f"must be {allowed(hint, rule)}, got {shown(value)}", suggestion)


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


def shown(value: object) -> str:
    """A value in a message: its kind and its text, cut short."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = plain(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"the text {text!r}" if isinstance(value, str | Path) else text


def plain(value: object) -> str:
    """A scalar as a configuration file would have it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        return str(value)
    except ValueError:  # an int with more digits than Python is willing to print
        return "a number of thousands of digits"


def suggest(name: str, options: list[str]) -> str:
    """The end of a message: the nearest of ``options``, if one is near."""
    near = difflib.get_close_matches(name.lower(), options, n=1)
    return f"; did you mean {near[0]}?" if near else ""
