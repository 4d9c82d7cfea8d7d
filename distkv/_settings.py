"""How a section of the configuration is declared.

A section is a frozen, keyword-only dataclass that derives from :class:`Section`; its leaves are declared with
:func:`setting`, which says whether the field is agreed (equal on every rank) or local, and what is allowed.
Every value is checked when the section is made, by hand or from a file, and there is one error,
:class:`~distkv.errors.ConfigError`, which names the field, what is allowed, and what was given.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from distkv._values import Rule, Wrong, convert
from distkv.errors import ConfigError

__all__ = ["Derived", "FieldError", "Leaf", "Section", "agreed_fields", "join", "leaves", "rule_of", "setting",
           "type_hints"]


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


class Derived(NamedTuple):
    """A value that follows from something else; ``why`` is words: ``cache.page_size, because it is null``."""

    value: object
    why: str


class Leaf(NamedTuple):
    """One field of a configuration that is not a section."""

    path: str
    value: object
    default: object
    """``dataclasses.MISSING`` where the field has to be given."""
    rule: Rule


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
                value = convert(getattr(self, field.name), hints[field.name], rule_of(field))
            except Wrong as wrong:
                raise self.wrong(field.name, str(wrong)) from None
            object.__setattr__(self, field.name, value)
        self.check_fields()

    def check_fields(self) -> None:
        """Rules between fields: ``raise self.wrong(field, problem)`` when one is broken. Each field is right by now."""

    def derived(self) -> Mapping[str, Derived]:
        """Dotted path -> what the program uses instead of a field's own value, and why. For fields that leave it open
        (null, auto) and whose value follows from other fields or from the environment."""
        return {}

    def wrong(self, field: str, problem: str) -> ConfigError:
        """The error for ``field`` (a name, or a dotted path below this section)."""
        return FieldError(type(self).__name__, field, problem)


def agreed_fields(config: object) -> dict[str, str]:
    """Dotted path -> canonical text (JSON) of every agreed field of ``config``, in order of declaration.

    Two ranks may form a group only if their dictionaries are equal.
    """
    return {leaf.path: json.dumps(leaf.value, default=str) for leaf in leaves(config) if leaf.rule.agreed}


def leaves(config: Any, path: str = "") -> Iterator[Leaf]:
    """Every field of ``config`` and of its sections that is not a section itself, in order of declaration."""
    for field in dataclasses.fields(config):
        value, inner = getattr(config, field.name), join(path, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, inner)
        elif isinstance(value, tuple) and any(dataclasses.is_dataclass(item) for item in value):
            for i, item in enumerate(value):
                yield from leaves(item, f"{inner}[{i}]")
        else:
            yield Leaf(inner, value, field.default, rule_of(field))


def rule_of(field: dataclasses.Field[Any]) -> Rule:
    """The rule that ``setting`` left in a field; a field declared without it is local and has no bounds."""
    rule = field.metadata.get("rule", Rule())
    assert isinstance(rule, Rule)
    return rule


def type_hints(cls: type) -> dict[str, Any]:
    """The resolved annotations of a dataclass."""
    return typing.get_type_hints(cls)


def join(path: str, name: str) -> str:
    """The dotted path of a field below ``path``."""
    return f"{path}.{name}" if path else name
