"""``distkv bench engine``: both modes do the same, and the table and the file say what each took."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from distkv.bench import engine as bench
from distkv.bench.engine import main
from distkv.engine.config import ServeConfig
from distkv.engine.engine import Engine
from distkv.engine.model import Model
from distkv.errors import DistKVError, NotInvariant
from tests.engine import tiny


def test_both_modes_are_measured(
    folders: Callable[[str, int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"model": {"source": str(folders("llama", 4))}, "cache": {"page_size": tiny.PAGE}, "pool": {"pages": 8}}
    config, out = tmp_path / "config.yaml", tmp_path / "out.json"
    config.write_text(yaml.safe_dump(settings))
    assert main([str(config), "--prompts", "70", "--repeat", "2", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == [
        "prefill of 70 tokens", "decode step behind 70 tokens", "first token, 70 cached + 64 new",
    ]  # fmt: skip
    for row in rows:
        assert row["name"] in shown
        assert len(row["fast"]["seconds"]) == len(row["invariant"]["seconds"]) == 2
        assert row["ratio"] == min(row["invariant"]["seconds"]) / min(row["fast"]["seconds"])
    config.write_text(yaml.safe_dump({**settings, "parallel": {"tp": 2}}))
    assert main([str(config)]) == 2
    assert "parallel.tp: is 2" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(NotInvariant("a product"), 1), (DistKVError("nothing was cached"), 2)])
def test_after_an_error_the_engines_are_closed(
    error: Exception, code: int, folders: Callable[[str, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model": {"source": str(folders("llama", 4))}, "cache": {"page_size": tiny.PAGE}, "pool": {"pages": 8}}
    config, made, measured = tmp_path / "config.yaml", list[Engine](), code == 2
    config.write_text(yaml.safe_dump(settings))

    def engine(settings: ServeConfig, model: Model) -> Engine:
        if settings.engine.batch_invariant and not measured:
            raise error
        made.append(Engine(settings, model))
        return made[-1]

    def fail(*_: object) -> float:
        raise error

    monkeypatch.setattr(bench, "Engine", engine)
    monkeypatch.setattr(bench, "_first_token", fail)
    assert main([str(config), "--prompts", "20"]) == code
    assert [one.closed for one in made] == [True] * code
