"""The worked example of docs/labels.md, run as it stands, and its formula."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from distkv._yaml import parse
from distkv.config import Config, from_mapping
from distkv.windows import window_pages

PAGE = Path(__file__).parents[1] / "docs" / "labels.md"


def test_the_worked_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, code = re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[0]
    shown = re.search(r"It prints:\n\n```\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (tmp_path / name).write_text(code, encoding="utf-8")
    runpy.run_path(str(tmp_path / name))
    assert shown is not None
    assert capsys.readouterr().out == shown[1]


def test_the_configuration_and_the_formula() -> None:
    text = PAGE.read_text("utf-8")
    mapping, _ = parse(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])
    labels = from_mapping(mapping, Config).labels
    assert [label.kind for label in labels] == ["full", "rolling", "sliding"]
    formula = re.findall(r"^    min\(T, (.*)\)$", text, re.MULTILINE)[0]
    for page_size in (1, 4, 128):
        for tokens in (1, 2, 5, 128, 129, 1000):
            names = {"page_size": page_size, "window_tokens": tokens, "allowance_tokens": 3, "chunk_tokens": 7}
            assert eval(formula, names) == window_pages(tokens + 10, page_size)
            most = max(-(-(at + tokens) // page_size) - at // page_size for at in range(page_size))
            assert window_pages(tokens, page_size) == most


def test_what_the_page_links_to_exists() -> None:
    text = PAGE.read_text("utf-8")
    for path in re.findall(r"\]\(([^)#:]+)\)?", text):
        assert (PAGE.parent / path).exists(), path
