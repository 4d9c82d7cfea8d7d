"""check-config, plan and doctor: on a model that is a config.json alone, and on machines that are files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distkv import cli
from distkv._text import counted
from distkv.config import load
from distkv.engine.config import ServeConfig
from distkv.errors import ConfigError, ModelError
from distkv.inspection.check_config import agreed_digest
from distkv.inspection.doctor import problems
from distkv.inspection.machine import Machine, ask, findings
from distkv.inspection.plan import make_plan, metadata_bytes_per_page, show
from distkv.inspection.shape import read_shape

GIB = 1 << 30
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 96,
    "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 4,
    "head_dim": 8, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


def model(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def settings(folder: Path, text: str = "", **changes: Any) -> Path:
    """A configuration file for a model of its own; the file has 3 lines of it first."""
    source = model(folder / "model", **changes)
    path = folder / "my config.yaml"
    path.write_text(f"model:\n  source: {source}\n  device: cpu\n{text}")
    return path


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    out, errors = capsys.readouterr()
    return code, out, errors


# ---- check-config


def test_every_value_with_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    path = settings(tmp_path, "cache:\n  page_size: 32\n\nengine: {batch_tokens: 64}\n")
    code, out, _ = command(capsys, "check-config", path, "--json")
    assert code == 0
    found = json.loads(out)
    fields = {field["path"]: field for field in found["fields"]}
    assert fields["cache.page_size"]["source"] == f"{path}:5"
    assert fields["engine.batch_tokens"] | {"value": 64, "source": f"{path}:7"} == fields["engine.batch_tokens"]
    assert fields["cache.queue_slots"]["source"] == "default"
    assert fields["cache.queue_slots"]["agreed"] and not fields["pool.pages"]["agreed"]
    chunk, folder = fields["engine.chunk_tokens"], fields["model.cache_dir"]
    assert (chunk["value"], chunk["derived"], chunk["because"]) == (None, 32, "cache.page_size")
    assert (folder["derived"], folder["because"]) == ("/some/cache/distkv", "$XDG_CACHE_HOME")
    code, out, _ = command(capsys, "check-config", path)
    line = next(line for line in out.splitlines() if line.startswith("engine.chunk_tokens"))
    assert line.split(maxsplit=3) == ["engine.chunk_tokens", "32", "agreed", "cache.page_size, as it is null (default)"]
    assert found["agreed_digest"] in out


def test_the_digest_is_of_the_agreed_fields_alone(tmp_path: Path) -> None:
    def digest(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return agreed_digest(load(tmp_path / name, ServeConfig))

    base = digest("a", "{}")
    assert digest("b", "pool: {pages: 7}\ncache: {page_size: 128}") == base
    assert digest("c", "cache: {page_size: 64}") != base


def test_a_wrong_file_is_one_error_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = settings(tmp_path, "pool: {pagse: 4}\n")
    for name in ("check-config", "plan", "doctor"):
        code, out, errors = command(capsys, name, path)
        assert (code, out) == (2, "")
        assert errors == f"distkv: pool.pagse: unknown field; did you mean pages? ({path} line 4)\n"


def test_another_programs_configuration_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("pool: {pages: 9}\n")
    code, out, _ = command(capsys, "check-config", path, "--config-class", "distkv:Config", "--json")
    assert code == 0
    sections = {field["path"].split(".")[0] for field in json.loads(out)["fields"]}
    assert sections == {"cache", "pool", "host", "group", "labels"}
    for name in ("distkv:Nothing", "no.such.module:X", "distkv:load", ""):
        code, _, errors = command(capsys, "check-config", path, "--config-class", name)
        assert code == 2 and "--config-class" in errors


# ---- plan


def test_bytes_are_those_of_the_heads_that_a_rank_has(tmp_path: Path) -> None:
    """Against the pool that the engine really allocates, for every degree."""
    from distkv.engine.pool import KVPool

    path = settings(tmp_path, "cache: {page_size: 16}\npool: {pages: 10, scratch_pages: 1}\n")
    shape = read_shape(str(tmp_path / "model"))
    totals = set()
    weights = {}
    for tp, sp in ((1, 1), (1, 2), (2, 2), (2, 1), (4, 1)):
        path.write_text(path.read_text().split("parallel")[0] + f"parallel: {{tp: {tp}, sp: {sp}}}\n")
        plan = make_plan(load(path, ServeConfig), shape, memory=GIB)
        pool = KVPool(layers=4, pages=10, page_size=16, kv_heads=4 // (tp * sp), head_dim=8, dtype=torch.float32)
        weights[tp, sp] = plan.weights_per_rank
        assert (f"tp {tp} x sp {sp}, {counted(tp * sp, 'rank')} on one node" in show(plan)) == (sp > 1)
        assert plan.pool_per_rank == pool.data.numel() * 4
        assert plan.bytes_per_page == pool.bytes_per_page() == 16 * plan.bytes_per_token
        assert plan.groups[0].kv_heads_per_rank == 4 // (tp * sp)
        assert plan.pool_per_node == tp * sp * plan.pool_per_rank
        totals.add(plan.pool_of_all_ranks)
        assert (plan.tokens, plan.longest_request) == (144, 144)
    assert totals == {10 * 16 * 4 * 2 * 4 * 8 * 4}, "the whole model's KV does not depend on how it is split"
    assert weights[2, 2] == weights[2, 1] < weights[1, 2] == weights[1, 1], "sp splits no weights"
    with pytest.raises(ConfigError, match="4, which is not a multiple of 3 nodes"):
        make_plan(load(path, ServeConfig), shape, nodes=3)
    spread = make_plan(load(path, ServeConfig), shape, nodes=2)
    assert (spread.ranks_per_node, spread.pool_per_node) == (2, 2 * spread.pool_per_rank)


def test_weights_are_those_of_a_model_that_is_loaded(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = read_shape(str(model(tmp_path)))
    real = sum(p.numel() * 4 for p in LlamaForCausalLM(LlamaConfig(**LLAMA)).parameters())
    assert shape.weight_bytes(1, 4) == [real]
    split = shape.weight_bytes(2, 2)
    assert split[0] == split[1] and real // 4 < split[0] < real // 2, "embeddings are whole on both"


def test_what_fits_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = settings(tmp_path, "cache: {page_size: 16}\npool: {pages: 1000}\nparallel: {tp: 2}\n")
    code, out, _ = command(capsys, "plan", path, "--memory", "1", "--json")
    plan = json.loads(out)
    assert (code, plan["fits"], plan["memory"]) == (0, True, GIB)
    beside = plan["weights_per_rank"] + plan["metadata_per_rank"]
    assert plan["most_pages"] == (GIB // 2 - beside) // plan["bytes_per_page"]
    assert plan["longest_request"] == 2048, "the model's context"
    code, out, _ = command(capsys, "plan", path, "--memory", "0.01")
    assert code == 1 and "DOES NOT FIT" in out
    for wrong in (["--nodes", "0"], ["--memory", "0"], ["--memory", "nan"]):
        assert command(capsys, "plan", path, *wrong)[0] == 2
    assert command(capsys, "doctor", path, "--nodes", "0")[0] == 2


def test_layer_groups_and_models_without_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gemma = {"model_type": "gemma3_text", "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
             "sliding_window": 64}  # fmt: skip
    path = settings(tmp_path, "pool: {pages: 4}\n", **gemma)
    code, out, _ = command(capsys, "plan", path)
    assert code == 0
    rows = [line.split() for line in out.splitlines() if "_attention" in line]
    assert [row[:2] for row in rows[:2]] == [["full_attention", "1"], ["sliding_attention", "3"]]
    assert re.search(r"window +4 pages of \S+ KiB on each rank", out)
    assert "4 of them for one running request: 64 tokens, 128 behind them" in out
    for changes, text in [({"num_attention_heads": 0}, "cannot be used|not positive|sizes"),
                          ({"model_type": "deepseek_v3", "kv_lora_rank": 16}, "compressed keys")]:  # fmt: skip
        with pytest.raises(ModelError, match=text):
            read_shape(str(model(tmp_path / "odd", **changes)))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_shape(str(tmp_path / "nowhere"))


def test_bookkeeping_is_measured_in_bytes() -> None:
    small, large = metadata_bytes_per_page(4, 256), metadata_bytes_per_page(256, 256)
    assert 4 * 4 < small < large < 256 * 4 * 3, "each token's id is kept, and not much else"


# ---- doctor


def fixture_machine(folder: Path, **changes: Any) -> Machine:
    (folder / "proc").mkdir(parents=True, exist_ok=True)
    (folder / "proc" / "meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    fields: dict[str, Any] = {"proc": folder / "proc", "cgroup": folder / "cgroup", "shm": folder / "no-shm",
                              "environ": {"OMP_WAIT_POLICY": "active"}, "ask": lambda code, env: "it does not load"}
    return Machine(**{**fields, **changes})


class Without(Machine):
    """A machine without some packages and programs."""

    def version(self, package: str) -> str | None:
        missing = json.loads(self.environ["MISSING"])
        return missing[package] if package in missing else super().version(package)

    def mpirun(self) -> str | None:
        return None


def test_odd_machines_are_described_and_nothing_is_raised(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in findings(fixture_machine(tmp_path))}
    assert "32.00 GiB can be had" in found["memory"].value
    assert "NCCL" in found["shared memory"].warning
    assert "PASSIVE" in found["threads"].warning
    missing = json.dumps({"mpi4py": None, "transformers": None, "torch": "2.1.0"})
    bare = Without(proc=tmp_path / "no", cgroup=tmp_path / "no", shm=tmp_path, environ={"MISSING": missing})
    found = {finding.name: finding for finding in findings(bare)}
    assert found["memory"].value == "unknown"
    assert "transformers" in found["engine"].warning and "torch 2.1.0 is older than 2.6" in found["packages"].warning
    assert "mpi4py is not installed" in found["MPI"].value
    broken = fixture_machine(tmp_path, proc=None)
    assert any("TypeError" in finding.warning for finding in findings(broken)), "one question fails, the others go on"


def test_a_question_that_hangs_or_dies_is_an_answer() -> None:
    assert ask("import time; time.sleep(60)", {}, 0.5) == "no answer within 0.5 s"
    assert ask("import os; os.abort()", {}) == "it ended with code -6"
    assert ask("raise SystemExit('no driver')", {}) == "no driver"
    assert ask("print('{\"a\": 1}')", {}) == {"a": 1}
    assert ask("import os; print('{\"a\": %d}' % ('PMI_RANK' in os.environ))", {"PMI_RANK": "0"}) == {"a": 0}


@pytest.mark.parametrize(("text", "changes", "field", "words"), [
    ("parallel: {tp: 3}", {}, "model", "parallel.tp 3 does not divide"),
    ("parallel: {tp: 2, sp: 4}", {}, "model", "parallel.tp 2 x sp 4 does not divide"),
    ("group: {transport: nccl}", {}, "group.transport", "needs a GPU"),
    ("group: {transport: mpi}", {}, "group.transport", "mpi4py is not installed"),
    ("pool: {pages: 10000000}", {}, "pool.pages", "pages take"),
    ("pool: {pages: 1}\nengine: {output_limit: 128}", {}, "engine.output_limit", "is refused"),
    ("", {"num_key_value_heads": "four"}, "model", "config.json"),
])  # fmt: skip
def test_what_of_a_configuration_fails_here(tmp_path: Path, text: str, changes: dict[str, Any], field: str,
                                            words: str) -> None:
    if "nccl" in text and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU: nccl works here")
    config = load(settings(tmp_path, text, **changes), ServeConfig)
    (tmp_path / "model" / "model.safetensors").touch()
    bare = Without(environ={"MISSING": '{"mpi4py": null}'})
    wrong = [problem for problem in problems(config, bare) if not problem.warning]
    assert field in {problem.field for problem in wrong}
    assert any(words in problem.problem for problem in wrong)
    assert all(problem.remedy for problem in wrong if "config.json" not in problem.problem), "each has its remedy"


def test_a_configuration_that_works_and_one_whose_model_is_missing(tmp_path: Path) -> None:
    config = load(settings(tmp_path, "pool: {pages: 8}\n"), ServeConfig)
    assert [p.field for p in problems(config, Machine())] == ["model.source"], "a config.json is not a model"
    (tmp_path / "model" / "model.safetensors").touch()
    assert problems(config, Machine()) == []
    none = Without(environ={"MISSING": '{"transformers": "5.1.0"}'})
    assert [p.problem for p in problems(config, none)] == ["needs transformers 5.24; there is transformers 5.1.0"]
    (tmp_path / "model" / "config.json").unlink()
    (problem,) = problems(config, Machine())
    assert problem.field == "model" and "there is no" in problem.problem


def shell_commands(folder: Path) -> dict[str, tuple[int, str, str]]:
    path = settings(folder, "pool: {pages: 8}\n")
    (folder / "model" / "model.safetensors").touch()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = {
        name: subprocess.Popen([sys.executable, "-m", "distkv", name, str(path), "--json"], env=env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for name in ("check-config", "doctor")
    }  # fmt: skip
    found = {}
    for name, run in runs.items():
        try:
            out, errors = run.communicate(timeout=240)
        finally:
            run.kill()
        found[name] = run.returncode, out, errors
    return found


@pytest.mark.ahead(work=shell_commands)
def test_the_commands_from_a_shell(
    ahead: dict[str, tuple[int, str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = command(capsys, "plan", settings(tmp_path, "pool: {pages: 8}\n"), "--json")  # imports what the doctor does
    found = {}
    for name, (code, out, errors) in {**ahead, "plan": plan}.items():
        assert (code, errors) == (0, ""), name
        found[name] = json.loads(out)
    assert found["doctor"]["works"] and found["doctor"]["problems"] == []
    assert found["plan"]["fits"]
    assert len(found["check-config"]["fields"]) > 20


# ---- output that is lost


def test_output_that_nobody_reads_or_that_finds_no_room(tmp_path: Path) -> None:
    """In processes of their own: what Python does at its end is a part of it."""
    reader, writer = os.pipe()
    os.close(reader)
    given = [sys.executable, "-m", "distkv", "check-config", str(settings(tmp_path))]
    with open("/dev/full", "w") as full, os.fdopen(writer, "w") as unread:
        processes = [subprocess.Popen(given, stdout=stdout, stderr=subprocess.PIPE, text=True)
                     for stdout in (unread, full)]
        found = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert found == [("", 141), ("distkv: the output cannot be written: No space left on device\n", 2)]
