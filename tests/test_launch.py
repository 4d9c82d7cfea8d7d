"""launch/torchrun.sh with real processes: number of ranks, environment, exit codes, Ctrl-C, and clear messages."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "launch" / "torchrun.sh"
GENEROUS = 240.0

CASE = """
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist
from distkv.layout import Layout

layout = Layout.from_environment()
config, *rest = sys.argv[1:]
names = ["OMP_NUM_THREADS", "OMP_WAIT_POLICY", "WORLD_SIZE", "MASTER_ADDR"]
found = {name: os.environ.get(name) for name in names}
found.update(config=config, rest=rest, rank=layout.rank, local_rank=layout.local_rank, pid=os.getpid())
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
Path(os.environ["OUT"], f"{layout.rank}.writing").write_text(json.dumps(found))
Path(os.environ["OUT"], f"{layout.rank}.writing").rename(Path(os.environ["OUT"], f"{layout.rank}.json"))
if "--stay" in rest:
    time.sleep(10_000)
if "--exit" in rest and layout.rank == 1:
    sys.exit(int(rest[-1]))
if "--exit" in rest:
    time.sleep(10_000)
"""


class Launch:
    """A folder with spaces in its name, a module for the ranks to run, and what they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a folder with spaces"
        self.out = self.folder / "out"
        self.out.mkdir(parents=True)
        (self.folder / "a_case.py").write_text(CASE)
        self.config = self.folder / "a config.yaml"
        self.config.write_text("parallel: {tp: 2}")
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OMP_", "NPROC", "NNODES", "NODE_RANK", "MASTER_", "HF_", "PYTHONPATH"))
        }
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.env = {**kept, "OUT": str(self.out), "PYTHONPATH": str(self.folder), "PATH": path}

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments], env=self.env | env, cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *arguments: str, **env: str) -> tuple[int, str]:
        process = self.start(*arguments, **env)
        try:
            _, errors = process.communicate(timeout=GENEROUS)
        finally:
            process.kill()
        return process.returncode, errors

    def found(self) -> list[dict[str, object]]:
        return [json.loads(file.read_text()) for file in sorted(self.out.glob("*.json"))]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    for found in launch.found():
        assert not psutil.pid_exists(int(str(found["pid"]))), "a rank is left"


def test_one_process_per_rank_of_the_configuration(launch: Launch) -> None:
    code, errors = launch.run("--module", "a_case", "a config.yaml", "--messages", "some file.jsonl")
    assert code == 0, errors
    cores = len(os.sched_getaffinity(0))
    for rank, found in enumerate(launch.found()):
        del found["pid"]
        assert found == {
            "OMP_NUM_THREADS": str(max(1, cores // 2)),
            "OMP_WAIT_POLICY": "PASSIVE",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "config": "a config.yaml",
            "rest": ["--messages", "some file.jsonl"],
            "rank": rank,
            "local_rank": rank,
        }
    assert len(launch.found()) == 2


def test_what_the_user_sets_is_kept(launch: Launch) -> None:
    code, errors = launch.run(
        "--module", "a_case", str(launch.config), NPROC="1", OMP_NUM_THREADS="3", OMP_WAIT_POLICY="ACTIVE"
    )
    assert code == 0, errors
    (found,) = launch.found()
    assert (found["WORLD_SIZE"], found["OMP_NUM_THREADS"], found["OMP_WAIT_POLICY"]) == ("1", "3", "ACTIVE")


def test_the_exit_code_of_the_rank_that_failed_first(launch: Launch) -> None:
    code, errors = launch.run("--module", "a_case", str(launch.config), "--exit", "7")
    assert code == 7
    assert errors == "launch: rank 1 ended first, with exit code 7; see what it wrote above\n"


def test_help_lists_the_messages(launch: Launch) -> None:
    process = launch.start("--help")
    out, errors = process.communicate(timeout=GENEROUS)
    assert (process.returncode, errors) == (0, "")
    assert "--messages FILE" in out


def test_two_hosts_meet_at_the_master(launch: Launch, tmp_path: Path) -> None:
    import socket

    with socket.socket() as probe:  # the only test that needs a port that is known beforehand
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    hosts = [
        launch.start(
            "--module", "a_case", str(launch.config),
            NNODES="2", NODE_RANK=str(node), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for node in range(2)
    ]  # fmt: skip
    for host in hosts:
        _, errors = host.communicate(timeout=GENEROUS)
        assert host.returncode == 0, errors
    assert [(found["rank"], found["local_rank"]) for found in launch.found()] == [(0, 0), (1, 0)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_ranks(launch: Launch, number: signal.Signals) -> None:
    process = launch.start("--module", "a_case", str(launch.config), "--stay")
    end = time.monotonic() + GENEROUS
    while len(launch.found()) < 2:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=GENEROUS)
    assert process.returncode == 128 + number, errors
    assert errors == f"launch: {number.name}: all ranks were ended\n"


def test_an_interrupt_before_the_ranks_have_started(launch: Launch) -> None:
    process = launch.start("--module", "a_case", str(launch.config), "--stay")
    time.sleep(0.5)  # Python has started, torch is being imported
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=GENEROUS)
    assert (process.returncode, errors) == (130, "launch: SIGINT: all ranks were ended\n")


@pytest.mark.parametrize(
    ("arguments", "env", "parts"),
    [
        ([], {}, ["CONFIG"]),
        (["none.yaml"], {}, ["cannot read the configuration file 'none.yaml'"]),
        (["wrong.yaml"], {}, ["parallel.tpp", "did you mean tp?", "line 1"]),
        (["a config.yaml"], {"NPROC": "two"}, ["NPROC: must be a whole number", "'two'"]),
        (["a config.yaml"], {"NPROC": "0"}, ["NPROC: must be a whole number"]),
        (["a config.yaml"], {"NNODES": "2"}, ["NODE_RANK: must be set on every host"]),
        (["a config.yaml"], {"NNODES": "2", "NODE_RANK": "0"}, ["MASTER_ADDR: must be set"]),
        (["a config.yaml", "--mesages", "x"], {}, ["no argument '--mesages'", "did you mean --messages?"]),
        (["a config.yaml", "more"], {}, ["no argument 'more'"]),
        (["a config.yaml", "--messages", "nope.jsonl"], {}, ["nope.jsonl: there is no such file"]),
        (["a config.yaml", "--messages", "wrong.yaml"], {}, ["wrong.yaml, line 1: not valid JSON"]),
        (["model.yaml"], {}, ["model.source 'nowhere' is neither"]),
        (["gguf.yaml"], {}, ["there is no file nowhere.gguf"]),
        (["nccl.yaml"], {}, ["group.transport: is nccl, which needs a GPU"]),
    ],
)
def test_one_clear_message_and_exit_code_2(
    launch: Launch, arguments: list[str], env: dict[str, str], parts: list[str]
) -> None:
    for name, text in [
        ("wrong", "parallel: {tpp: 2}"), ("model", "model: {source: nowhere}"),
        ("gguf", "model: {source: nowhere.gguf}"), ("nccl", "model: {device: cpu}\ngroup: {transport: nccl}"),
    ]:  # fmt: skip
        (launch.folder / f"{name}.yaml").write_text(text)
    code, errors = launch.run(*arguments, **env)
    assert code == 2
    assert "Traceback" not in errors
    assert errors.count("launch: ") == (1 if arguments else 0), "no rank has started"
    for part in parts:
        assert part in errors


def test_a_checkout_in_a_folder_with_spaces_and_without_venv(launch: Launch) -> None:
    """The scripts alone, with a Python on PATH that lacks what distkv needs."""
    checkout = launch.folder / "check out"
    shutil.copytree(ROOT / "launch", checkout / "launch")
    bare = launch.folder / "bare bin"
    bare.mkdir()
    python = bare / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.base_prefix}/bin/python3" -I -S "$@"\n')
    python.chmod(0o755)
    path = os.pathsep.join([str(bare), os.environ["PATH"]])
    run = subprocess.run(
        ["bash", str(checkout / "launch" / "torchrun.sh"), str(launch.config)],
        env=launch.env | {"PATH": path}, capture_output=True, text=True, timeout=GENEROUS, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert "has no module 'torch'" in run.stderr
    assert "Traceback" not in run.stderr
