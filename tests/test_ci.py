"""The jobs of continuous integration name what exists, and the multi-GPU cases run on a launcher's own ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
GENEROUS = 240.0


def workflow(name: str) -> dict[str, Any]:
    loaded: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    loaded["on"] = loaded.pop(True)  # a word of YAML 1.1
    return loaded


def commands(job: dict[str, Any]) -> list[str]:
    return [line.strip() for step in job["steps"] for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("name", ["cpu.yml", "multigpu.yml"])
def test_a_workflow_is_whole_and_what_it_runs_exists(name: str) -> None:
    found = workflow(name)
    assert set(found) >= {"name", "on", "jobs"}
    targets = re.findall(r"^([\w./$()-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    targets = [target.replace("$(VENV)", ".venv") for target in targets]
    for job in found["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"]
        assert any("checkout" in step.get("uses", "") for step in job["steps"])
        asked = set(re.findall(r"matrix\.(\w+)", str(job)))
        matrix = job["strategy"]["matrix"]
        assert asked == {*matrix, *(key for row in matrix.get("include", ()) for key in row)} - {"include"}
        assert commands(job)
        for line in commands(job):
            words = line.split()
            if words[0] == "make":
                assert set(words[1:]) <= set(targets), line
            elif words[0] == "bash":
                assert (ROOT / words[1]).is_file(), line
            else:
                assert words[:2] == [".venv/bin/python", "-m"] and words[2] in ("pytest", "pip", "distkv"), line
                assert words[2] != "pytest" or all((ROOT / word).is_dir() for word in words[3:]), line


def test_the_cpu_job_is_ci_run() -> None:
    assert commands(workflow("cpu.yml")["jobs"]["test"]) == ["bash .ci/run"]


def test_the_multi_gpu_job_covers_both_launchers_and_each_world_size_that_the_gpus_allow() -> None:
    job = workflow("multigpu.yml")["jobs"]["multigpu"]
    assert job["strategy"]["matrix"]["launcher"] == ["torchrun", "mpirun"]
    sizes = {row["gpus"]: row["sizes"] for row in job["strategy"]["matrix"]["include"]}
    assert sizes == {2: "1 2", 4: "1 2 4"} and list(sizes) == job["strategy"]["matrix"]["gpus"]
    assert "self-hosted" in job["runs-on"]
    assert any(line.startswith("bash .ci/multigpu --require nccl") for line in commands(job))


CASES = """
import os
import pytest
from distkv.testing.processes import choose_backend, run_outcomes, run_ranks

def pid(rank, world_size):
    return rank, world_size, os.getpid(), os.environ.get("RANK"), choose_backend(1)

def gone(rank, world_size):
    os._exit(7)

def fails(rank, world_size):
    if rank == 1:
        raise ValueError("planted")

def test_on_our_ranks():
    first, second = run_ranks(pid, 2), run_ranks(pid, 2)
    assert first == second and first[0][2] == os.getpid() != first[1][2]
    assert [found[:2] for found in first] == [(0, 2), (1, 2)]

def test_ranks_that_end_are_not_ours():
    assert [outcome.exit_code for outcome in run_outcomes(gone, 2)] == [7, 7]

def test_for_others():
    run_ranks(pid, 3)

def test_fails():
    run_ranks(fails, 2)

def test_after_a_failure():
    run_ranks(pid, 2)
"""


def on_a_launcher(folder: Path) -> list[tuple[int, str]]:
    """The decisions of the multi-GPU cases under torchrun; cases that fail, and none at all, under mpirun."""
    (folder / "test_planted.py").write_text(CASES)
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    planted = ["-q", "-p", "no:cacheprovider", str(folder / "test_planted.py")]
    found = []
    for arguments in (["torchrun", "2", "--", "-q", "-p", "no:cacheprovider", "multigpu_tests/test_decisions.py"],
                      ["mpirun", "2", "--", *planted], ["mpirun", "1", "--", *planted, "-k", "others"]):  # fmt: skip
        done = subprocess.run(["bash", str(ROOT / ".ci" / "multigpu"), *arguments], env=env, text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=GENEROUS)  # fmt: skip
        found.append((done.returncode, done.stdout))
    return found


@pytest.mark.ahead(work=on_a_launcher)
def test_the_cases_run_on_the_ranks_of_a_launcher_and_never_silently_on_none(ahead: list[tuple[int, str]]) -> None:
    (code, out), (failed, planted), (nothing, skipped) = ahead
    assert code == 0, out
    assert "1 case on the 2 ranks of torchrun, over " in out
    assert "SKIPPED" in out and "for 4 ranks, and these are 2" in out
    assert failed == 1, planted
    assert "2 failed, 2 passed, 1 skipped" in planted
    assert "rank 1: raised builtins.ValueError: planted" in planted
    assert "not run: an earlier case has failed on these ranks" in planted
    assert nothing == 1, skipped
    assert "no case ran on these ranks" in skipped


def test_a_command_that_cannot_be_used_says_how() -> None:
    for arguments in ([], ["torchrun"], ["slurm", "2"], ["torchrun", "two"], ["--require"]):
        done = subprocess.run(["bash", str(ROOT / ".ci" / "multigpu"), *arguments], capture_output=True, text=True,
                              check=False, timeout=60)  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert "torchrun|mpirun SIZE..." in done.stderr
