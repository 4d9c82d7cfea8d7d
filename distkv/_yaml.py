"""Strict reading of YAML: one document, one mapping, no key twice, nothing that runs or refers.

Scalars follow the core schema of YAML 1.2 with decimal numbers only, because YAML 1.1, which PyYAML implements,
reads ``1:30`` as 90, ``010`` as 8, ``no`` as false and ``1e3`` as a text. Here those are the texts they look
like (``1e3`` is a number), and a field that wants a number says so.

Importing this module needs PyYAML; nothing but the loader in ``distkv.config`` imports it.
"""

from __future__ import annotations

import re

import yaml

from distkv.errors import ConfigError

__all__ = ["parse"]

_MAX_DEPTH = 32
_PREFIX = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Composes nodes without tags, anchors and aliases; ``source`` goes into messages."""

    # Empty, so that SafeLoader's YAML 1.1 resolvers are not inherited; filled below.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    source = ""
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # so in types-PyYAML
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ConfigError("", f"anchors and aliases (& and *) are not allowed; write the value out"
                                  f"{_place(self.source, line)}")  # fmt: skip
        if getattr(event, "tag", None):
            raise ConfigError("", f"tags (!) are not allowed, got {event.tag}{_place(self.source, line)}")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ConfigError("", f"nested deeper than {_MAX_DEPTH} levels{_place(self.source, line)}")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


for _tag, _pattern, _first in [
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    # A point or an exponent is required: 010 is neither a whole number nor a fraction, it is a mistake.
    ("float", r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
]:
    _Loader.add_implicit_resolver(
        _PREFIX + _tag, re.compile(rf"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
    )


def parse(text: str, source: str = "") -> tuple[dict[str, object], dict[str, int]]:
    """Read one YAML document whose top level is a mapping.

    Returns the mapping, made of dict, list, str, int, float, bool and None, and the line number of every
    dotted path in it (``cache.page_size``, ``prompts[0]``). Raises ConfigError.
    """
    loader = None
    try:
        loader = _Loader(text)  # reads ahead, so it can raise
        loader.source = source
        node = loader.get_single_node()
    except yaml.composer.ComposerError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise ConfigError("", f"more than one YAML document; give one{_place(source, line)}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(filter(None, [error.context, error.problem]))
        raise ConfigError("", f"not valid YAML: {problem}{_place(source, mark.line + 1 if mark else None)}") from None
    except yaml.YAMLError as error:
        raise ConfigError("", f"not valid YAML: {' '.join(str(error).split())}{_place(source, None)}") from None
    finally:
        if loader is not None:
            loader.dispose()
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        raise ConfigError("", f"the file is empty{_place(source, None)}")
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        raise ConfigError("", f"the top level must be a mapping of fields, got {kind}{_place(source, None)}")
    lines: dict[str, int] = {}
    mapping = _value(node, "", lines, source)
    assert isinstance(mapping, dict)
    return mapping, lines


def _value(node: yaml.Node, path: str, lines: dict[str, int], source: str) -> object:
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if key_node.tag != _PREFIX + "str":
                shown = repr(key) if isinstance(key, str) else "a list or mapping"
                raise ConfigError(path, f"a field's name must be a text, got {shown}{_place(source, line)}")
            inner = f"{path}.{key}" if path else key
            if key in mapping:
                raise ConfigError(inner, f"given twice, first on line {lines[inner]}{_place(source, line)}")
            lines[inner] = line
            mapping[key] = _value(value_node, inner, lines, source)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        items = []
        for i, item in enumerate(node.value):
            lines[f"{path}[{i}]"] = item.start_mark.line + 1
            items.append(_value(item, f"{path}[{i}]", lines, source))
        return items
    return _scalar(node, path, source)


def _scalar(node: yaml.Node, path: str, source: str) -> object:
    text: str = node.value
    tag = node.tag.removeprefix(_PREFIX)
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    if tag == "int":
        try:
            return int(text)
        except ValueError:  # more digits than Python is willing to read
            line = node.start_mark.line + 1
            raise ConfigError(path, f"a number of {len(text)} digits{_place(source, line)}") from None
    if tag == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _place(source: str, line: int | None) -> str:
    place = " ".join(filter(None, [source, f"line {line}" if line else ""]))
    return f" ({place})" if place else ""
