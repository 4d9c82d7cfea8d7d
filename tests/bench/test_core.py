"""``distkv bench core`` with small sizes: that each row was measured, and what it counts. Never how long it took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distkv.bench import cli, core, workloads
from distkv.bench.rows import Row, table
from distkv.bench.timing import Sample
from distkv.bench.workloads import QUICK, Sizes, agents, tokens, with_tails
from distkv.books import Books
from distkv.errors import InputFileError

TINY = Sizes(page_size=16, prompt=1_024, turns=4, new=64, tails=8, sessions=4, session_turns=4, system=128, user=40,
             output=20, pool_tokens=1_024, repeats=4, rounds=1, growth_steps=1)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bench") / "core.json"
    monkey = pytest.MonkeyPatch()
    monkey.setattr(core, "QUICK", TINY)
    try:
        assert core.main(["--quick", "--json", str(path)]) == 0
    finally:
        monkey.undo()
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_every_row_was_measured(report: dict[str, Any]) -> None:
    names = " / ".join(row["name"] for row in report["rows"])
    for what in ("match + page table", "miss on the first page", "keys of a cold prompt, int32", "list", "kept chain",
                 "store", "evict one page", "whole request", "hit share", "metadata per cached token", "collectives",
                 "0 % reuse: the cache adds to a step with a new prompt", "share of a step that decodes"):
        assert what in names, what
    for row in report["rows"] + report["floors"]:
        assert np.isfinite(row["value"])
        if "n" in row:
            assert row["n"] >= 1 and 0 < row["median"] <= row["p99"] and row["mean"] > 0
        if row["floor"]:
            assert row["floor"] in {floor["name"] for floor in report["floors"]}
            assert row["ratio_to_floor"] == row["value"] / row["floor_value"]


def test_counts_are_exact(report: dict[str, Any]) -> None:
    counts = {row["name"]: row["value"] for row in report["rows"] if row["bound"] == "exactly"}
    assert counts == {"pages freed when one is short": 1, "collectives of a step with a waiting request": 1,
                      "collectives of a step in which nothing waits": 0}
    assert all(row["reached"] for row in report["rows"] if row["bound"] == "exactly")
    assert all(row["target"] is None for row in report["rows"] if row["bound"] != "exactly"), "not for other sizes"


def test_growth_has_its_points(report: dict[str, Any]) -> None:
    found = {(g["operation"], g["size"]) for g in report["growth"]}
    assert {size for _, size in found} == {"prompt tokens", "entries", "tails", "waiting requests", "pool pages"}
    for growth in report["growth"]:
        assert len(growth["points"]) == 2
        assert growth["points"][1][0] == 2 * growth["points"][0][0]


def test_the_hit_share_is_a_count() -> None:
    once, again = agents(TINY, seed=3), agents(TINY, seed=3)
    assert (once.prompt_tokens, once.cached_tokens, once.evicted) == (again.prompt_tokens, again.cached_tokens,
                                                                      again.evicted)
    assert once.requests == 16
    assert once.evicted > 0, "the pool holds less than all sessions"
    roomy = agents(Sizes(**{name: getattr(TINY, name) for name in TINY.__slots__} | {"pool_tokens": 1 << 16}))
    # Session s's turn t finds what was computed before it: 20 tokens of output, the last of which is not computed.
    prompts = [128 + 40 + 60 * turn for turn in range(4)]
    cached = [(prompt - 40 - 1) // 16 * 16 for prompt in prompts[1:]]
    assert roomy.prompt_tokens == 4 * sum(prompts)
    assert roomy.cached_tokens == 3 * 128 + 4 * sum(cached), "the system prompt is computed once"
    assert roomy.evicted == 0


def test_the_agent_workload_of_the_plan_reaches_its_hit_share(monkeypatch: pytest.MonkeyPatch) -> None:
    found = agents(Sizes(rounds=1))
    assert (found.requests, found.prompt_tokens, found.cached_tokens) == (2_000, 28_392_000, 18_240_384)
    assert found.hit_share >= 0.641


def test_a_target_is_a_most_a_least_or_a_count() -> None:
    def row(value: float, **target: Any) -> Row:
        return Row(name="x", unit="us", value=value, **target)

    assert row(2, target=2).reached and not row(3, target=2).reached
    assert row(3, target=2, at_least=True).reached and not row(1, target=2, at_least=True).reached
    assert row(2, target=2, exactly=True).reached and not row(1, target=2, exactly=True).reached
    assert row(1).reached is None
    assert "NO" in table([row(3, target=2)]) and "yes" in table([row(1, target=2)])


def test_a_sample_names_the_tail() -> None:
    sample = Sample.of([1_000 * i for i in range(100, 0, -1)])
    assert (sample.median, sample.mean, sample.p99, sample.n) == (50.5, 50.5, 99, 100)
    assert Sample.of([5_000]).p99 == 5


class Counted(dict[int, Any]):
    """The index's dictionary, with a count of how often it was asked."""

    asked = 0

    def __contains__(self, key: object) -> bool:
        self.asked += 1
        return super().__contains__(key)

    def get(self, key: int, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


def probes(books: Books, prompt: np.ndarray[Any, Any]) -> int:
    counted = Counted(books.index.entries.run_of_key)
    books.index.entries.run_of_key = counted
    books.match(books.namer.chain(prompt), len(prompt) // books.page_size)
    return counted.asked


def test_a_lookup_asks_the_index_a_logarithm_of_the_prompt_and_nothing_of_the_index() -> None:
    rng = np.random.default_rng(1)
    prompt = tokens(rng, 64 * 16)
    asked = {}
    for tails in (8, 64):
        books = with_tails(tails, TINY, spare=200)
        stored = workloads.store(books, books.namer.chain(prompt[: 40 * 16]), np.zeros(0, np.int32))
        assert len(stored) == 40
        asked[tails] = probes(books, prompt)
    assert asked[8] == asked[64] <= 10, "first, last, six halvings, one entry"


def test_parts_that_are_not_there_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2 and cli.main(["--help"]) == 0
    assert "core" in capsys.readouterr().out
    assert cli.main(["cores"]) == 2
    assert "not 'cores'" in capsys.readouterr().err


def test_a_missing_part_is_said_clearly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(cli.PARTS, "group", ("distkv.bench.no_such_part", ""))
    assert cli.main(["group"]) == 2
    assert "not part of this installation" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="No such file"):
        core.main(["--quick", "--json", str(tmp_path / "no" / "such" / "folder.json")])
    assert QUICK.prompt < Sizes().prompt
