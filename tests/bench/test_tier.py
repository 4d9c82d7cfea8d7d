"""``distkv bench tier`` with small sizes: that each row was measured, and what it counts. Never how long it took."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from distkv.bench import cli, tier, tier_copies, tier_step
from distkv.bench.tier_books import tiered_books
from distkv.bench.tier_copies import Bandwidth
from distkv.bench.tier_engine import Waits
from distkv.bench.workloads import Sizes, with_tails
from distkv.cache import PrefixCache
from distkv.errors import InputFileError, InvariantError
from distkv.host.threads import ThreadedCopies
from tests.engine import tiny

TINY = Sizes(page_size=128, prompt=4_096, turns=4, new=256, tails=8, repeats=4)
COPIES = ["--parts", "copies", "--device", "cpu", "--threads", "1", "--shape", "2", "1", "8", "--mib", "1",
          "--repeat", "2"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What a command line writes to its file."""
    path = tmp_path_factory.mktemp("bench") / "tier.json"

    def run(*arguments: str) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tier, "QUICK", TINY)
            assert cli.main(["tier", *arguments, "--json", str(path)]) == 0
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content

    return run


def test_copies_are_compared_with_plain_ones(measured: Callable[..., dict[str, Any]],
                                             capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(*COPIES, "--page-sizes", "256", "16")["copies"]
    assert [(row["page_size"], row["what"]) for row in rows] == [
        (size, what) for size in (256, 16)
        for what in ("spill", "load", "spill and load", "spill", "load", "spill", "load")
    ]  # fmt: skip
    for row in rows:
        assert row["page_bytes"] == 2 * 2 * row["page_size"] * 8 * 4
        n = (1 << 20) // row["page_bytes"]
        assert row["pages"] == (2 * n if row["what"] == "spill and load" else n)
        assert len(row["engine_s"]) == len(row["plain_s"]) == 2
        assert min(row["engine_s"] + row["plain_s"]) > 0
        assert row["share"] == median(p / e for e, p in zip(row["engine_s"], row["plain_s"], strict=True))
        assert (row["reached"] is None) == (row["at_once"] < row["pages"]), "the target is for all at once"
    assert "spill and load" in capsys.readouterr().out


def test_the_share_is_of_the_plain_copy_beside_it() -> None:
    slow = Bandwidth("spill", 16, 100, 10, 10, engine=(2.0, 8.0, 1.0), plain=(1.0, 4.0, 1.0))
    assert (slow.share, slow.reached, slow.rate(slow.engine)) == (0.5, False, 1000 / 2.0 / 1e9)
    assert Bandwidth("spill", 16, 100, 10, 10, engine=(1.0,), plain=(0.8,)).reached
    assert Bandwidth("spill", 16, 100, 10, 4, engine=(1.0,), plain=(0.8,)).reached is None


@pytest.mark.parametrize("moves", ["nothing", "only there"])
def test_copies_that_move_no_bytes_are_not_measured(moves: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ThreadedCopies._move

    def move(engine: ThreadedCopies, copy: Any) -> None:
        if moves == "only there" and copy.kind.value == "store":
            real(engine, copy)

    monkeypatch.setattr(ThreadedCopies, "_move", move)
    with pytest.raises(InvariantError, match="other bytes"):
        tier_copies.measure(tier_copies.Shape(layers=2, kv_heads=1, head_dim=8, mib=1, threads=1), 16, 1)


def test_every_operation_of_the_books_has_its_row(measured: Callable[..., dict[str, Any]]) -> None:
    rows = measured("--quick", "--parts", "books")["books"]
    names = " / ".join(row["name"] for row in rows)
    for what in ("8 tails, without a tier", "into the tier", "into a full tier", "that the tier has", "hand one spill",
                 "promote a page of a run of one page", "promote a page of a run of 32 pages",
                 "half of 31 pages on the host", "readers of 16 host pages, taken", "let go"):
        assert what in names, what
    assert all(np.isfinite(row["value"]) and row["value"] > 0 for row in rows)
    [freed] = [row for row in rows if row["bound"] == "exactly"]
    assert freed["reached"] and freed["note"] == "spills ordered: 4 with room, 4 with a full host"
    beside = {row["name"]: row["floor_value"] for row in rows if row["floor"] == "without a tier"}
    without = next(row["value"] for row in rows if row["name"].endswith("without a tier"))
    assert len(beside) == 4 and beside["evict one page among 8 tails, into the tier"] == without


def test_what_is_evicted_is_counted() -> None:
    books = with_tails(8, TINY, make=tiered_books(4))
    ends = tier.tier_books._Ends(books, [])
    books.index.evict(1)
    ends()
    with pytest.raises(InvariantError, match="0 were freed"):
        ends()


def test_steps_move_the_pages_that_the_workload_says(measured: Callable[..., dict[str, Any]]) -> None:
    rows = measured("--quick", "--parts", "step")["step"]
    by_name = {(row["workload"], row["variant"]): row for row in rows}
    assert len(by_name) == len(rows) == 6
    requests = 32  # one in every second of 4 * 16 steps
    for (workload, variant), row in by_name.items():
        assert row["steps"] == 2 * requests and set(row["parts_us"]) == set(tier_step.PARTS)
        assert row["us"] == pytest.approx(sum(row["parts_us"].values()))
        loads = 15 * requests if workload != "new prompts" and variant != "without" else 0
        assert (row["loaded"], row["cached_tokens"]) == (loads, 128 * loads)
    assert by_name["new prompts", "without"]["stored"] == 0
    for variant in ("evict", "finish"):
        assert by_name["new prompts", variant]["stored"] == 16 * requests, "every page that is stored drives one out"


def test_the_engine_is_asked_by_where_the_pages_are(measured: Callable[..., dict[str, Any]], tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(tiny.model_folder(tmp_path, "llama"))
    arguments = ["--quick", "--parts", "engine", "--model", source, "--page-sizes", "16", "--prompts", "40",
                 "--repeat", "2"]
    found = measured(*arguments)
    [first] = found["first_tokens"]
    assert (first["tokens"], first["pages"]) == (40, 2)
    assert first["best_s"] == {way: min(seconds) for way, seconds in first["seconds"].items()}
    assert {way: len(seconds) for way, seconds in first["seconds"].items()} == {
        "recompute": 2, "host hit": 2, "device hit": 2,
    }  # fmt: skip
    assert [row["policy"] for row in found["waits"]] == ["evict", "finish"]
    for row in found["waits"]:
        assert len(row["fences_s"]) >= row["steps"] // 2 and row["spilled"] == {"evict": 1, "finish": 2}[row["policy"]]
        assert 0 <= min(row["fences_s"]) <= row["p99_s"] <= max(row["fences_s"]) < row["seconds"]
    monkeypatch.setattr(PrefixCache, "reset", lambda *_: None)
    assert tier.main(arguments) == 2, "nothing leaves the device: it is no host hit"


def test_the_tail_is_of_all_passes() -> None:
    assert Waits("evict", 100, 1.0, (0.0,) * 98 + (1.0, 2.0), 0).p99 == 1.0
    assert Waits("evict", 1, 1.0, (0.5,), 0).p99 == 0.5


@pytest.mark.parametrize(("arguments", "message"), [
    (["--mib", "0"], "--mib: must be at least 1, got 0"), (["--repeat", "0"], "--repeat: must be"),
    (["--shape", "1", "-1", "8"], "--shape: must be"), (["--parts", "engine", "--dtype", "float16"], "float16"),
    (["--parts", "engine", "--model", "/no/such/model"], "no/such/model"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(arguments: list[str], message: str,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    assert tier.main(arguments) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(InputFileError):
        tier.files.refuse_unwritable("/no/such/folder/file.json")
