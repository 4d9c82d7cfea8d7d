"""docs/configuration.md says what the source says, every field is described, and the shipped files load."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from distkv._settings import type_hints
from distkv.config import Config, load
from distkv.config_reference import field_docs, main, reference
from distkv.engine.config import ServeConfig

ROOT = Path(__file__).parents[1]


def sections(cls: type) -> list[type]:
    found = [cls]
    for hint in type_hints(cls).values():
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            found += sections(hint)
    return found


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference(ServeConfig), "docs/configuration.md is old: run `make docs`"


@pytest.mark.parametrize("cls", [Config, ServeConfig])
def test_every_field_has_a_docstring_and_a_scope(cls: type) -> None:
    for section in sections(cls):
        docs = field_docs(section)
        for field in dataclasses.fields(section):
            assert docs.get(field.name), f"{section.__name__}.{field.name} has no docstring under it"
            nested = dataclasses.is_dataclass(type_hints(section)[field.name])
            assert nested or "rule" in field.metadata, f"{section.__name__}.{field.name}: agreed or local?"


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == reference(Config)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configuration_files_load(path: Path) -> None:
    config = load(path, ServeConfig)
    assert config.pool.pages > config.pool.scratch_pages
