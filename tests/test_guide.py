"""What the embedding guide shows runs as it stands: on one rank, on three, and overlapped."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from distkv import Message, Request
from distkv.testing import run_ranks

GUIDE = Path(__file__).parents[1] / "docs" / "embedding.md"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The guide's files, as a reader saves them."""
    folder = tmp_path_factory.mktemp("guide")
    out = {}
    for name, text in re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL):
        out[name] = folder / name
        out[name].write_text(text, encoding="utf-8")
    assert set(out) == {"toy.py", "overlap.py", "tier.py", "preempt.py", "drafts.py"}
    return out


@pytest.fixture(scope="module")
def printed() -> str:
    found = re.search(r"```\n(rank 0: .*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def run_toy(rank: int, world_size: int, path: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path)
    return out.getvalue()


def test_the_toy_engine_on_one_rank_and_overlapped(
    files: dict[str, Path], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    toy: dict[str, Any] = runpy.run_path(str(files["toy.py"]))
    assert capsys.readouterr().out == printed
    overlapped = runpy.run_path(str(files["overlap.py"]))["overlapped"]
    plain, engine = toy["Engine"](0, 1), toy["Engine"](0, 1)
    prompt = list(range(50))
    plain.step([("x", prompt, 4)])
    overlapped(engine, Message(requests=(Request(id="x", chain=engine.cache.chain(prompt), output_limit=4),)))
    while plain.busy or engine.busy:
        plain.step()
        overlapped(engine, Message())
    assert engine.answers == plain.answers
    assert len(engine.answers["x"]) == 4
    engine.cache.check()


def test_the_toy_engine_on_three_ranks(files: dict[str, Path], printed: str) -> None:
    out = run_ranks(run_toy, 3, (str(files["toy.py"]),), backend=None)
    assert out == [printed.replace("rank 0", f"rank {rank}") for rank in range(3)]


def test_the_host_tier(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.search(r"```\n(a: .*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    ran = runpy.run_path(str(files["tier.py"]))
    assert shown is not None and capsys.readouterr().out == shown[1]
    pages = ran["cache"]._books.match(ran["cache"].chain(list(range(100))), 6).pages
    assert ran["kv"][3, 1, pages, :, 1, 7].flatten().tolist() == list(range(96)), "and with the right bytes"


def test_preemption(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.search(r"```\n(6 requests .*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    runpy.run_path(str(files["preempt.py"]))
    assert shown is not None and capsys.readouterr().out == shown[1]


def test_drafts(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.search(r"```\n(a: 10 tokens .*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    ran = runpy.run_path(str(files["drafts.py"]))
    assert shown is not None and capsys.readouterr().out == shown[1]
    ran["cache"].check()


def test_the_table_of_contents_names_every_section() -> None:
    text = GUIDE.read_text("utf-8")
    titles = re.findall(r"^## (\d+)\. (.+)$", text, re.MULTILINE)
    anchors = [f"{n}-{title.lower().replace(',', '').replace(' ', '-')}" for n, title in titles]
    assert re.findall(r"^\d+\. \[.+?\]\(#(\S+?)\)", text, re.MULTILINE) == anchors


def test_what_the_guide_links_to_exists() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", GUIDE.read_text("utf-8")):
        assert (GUIDE.parent / path).exists(), path
