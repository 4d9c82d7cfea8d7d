"""launch/torchrun.sh with real processes: number of ranks, environment, exit codes, Ctrl-C, and clear messages."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from distkv import launching
from distkv.testing.processes import run_ranks

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
if "--exit" in rest and layout.rank == 1:
    sys.exit(int(rest[-1]))
if "--exit" in rest:
    time.sleep(10_000)
"""

# for what is about the launcher alone: nothing of torch is imported
LIGHT_CASE = """
import json, os, time
from pathlib import Path

rank, out = os.environ["RANK"], Path(os.environ["OUT"])
(out / f"{rank}.writing").write_text(json.dumps({"pid": os.getpid()}))
(out / f"{rank}.writing").rename(out / f"{rank}.json")
time.sleep(10_000)
"""


class Launch:
    """A folder with spaces in its name, a module for the ranks to run, and what they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a folder with spaces"
        self.out = self.folder / "out"
        self.out.mkdir(parents=True)
        (self.folder / "a_case.py").write_text(CASE)
        (self.folder / "a_light_case.py").write_text(LIGHT_CASE)
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

    def check_none_left(self) -> None:
        for found in self.found():
            assert not psutil.pid_exists(int(str(found["pid"]))), "a rank is left"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.check_none_left()


def one_fails(folder: Path) -> tuple[Launch, int, str]:
    launch = Launch(folder)
    return launch, *launch.run(
        "--module", "a_case", "a config.yaml", "--messages", "some file.jsonl", "--exit", "7"
    )  # fmt: skip


@pytest.mark.ahead(work=one_fails)
def test_one_process_per_rank_and_the_exit_code_of_the_one_that_failed_first(ahead: tuple[Launch, int, str]) -> None:
    launch, code, errors = ahead
    launch.check_none_left()
    assert code == 7
    assert errors == "launch: rank 1 ended first, with exit code 7; see what it wrote above\n"
    cores = len(os.sched_getaffinity(0))
    for rank, found in enumerate(launch.found()):
        del found["pid"]
        assert found == {
            "OMP_NUM_THREADS": str(max(1, cores // 2)),
            "OMP_WAIT_POLICY": "PASSIVE",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "config": "a config.yaml",
            "rest": ["--messages", "some file.jsonl", "--exit", "7"],
            "rank": rank,
            "local_rank": rank,
        }
    assert len(launch.found()) == 2


def script(name: str) -> ModuleType:
    """A file of launch/, which is a script and no module of the package."""
    spec = importlib.util.spec_from_file_location(f"launch_{name}", ROOT / "launch" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "launch"))  # as the interpreter does for a script
    spec.loader.exec_module(module)
    sys.path.pop(0)
    return module


def test_help_lists_arguments_and_variables() -> None:
    text = script("_front").parser("torchrun.sh", "", launching.VARIABLES).format_help()
    assert "--messages FILE" in text
    for name in ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "JOIN_S", "OMP_NUM_THREADS"):
        assert f"\n{name} " in text


def free_port() -> str:
    """The only tests that need a port that is known beforehand."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


MASTER = "[::1]" if has_ipv6() else "127.0.0.1"


def two_hosts(folder: Path) -> tuple[Launch, list[tuple[int, str]]]:
    launch, addr, port = Launch(folder), MASTER, free_port()
    hosts = [
        launch.start(
            "--module", "a_case", str(launch.config),
            NNODES="2", NODE_RANK=str(node), MASTER_ADDR=addr, MASTER_PORT=port, NPROC="1",
            OMP_NUM_THREADS="3", OMP_WAIT_POLICY="ACTIVE",
        )
        for node in range(2)
    ]  # fmt: skip
    ends = []
    for host in hosts:
        _, errors = host.communicate(timeout=GENEROUS)
        ends.append((host.returncode, errors))
    return launch, ends


@pytest.mark.ahead(work=two_hosts)
def test_two_hosts_meet_at_the_master_and_what_the_user_sets_is_kept(
    ahead: tuple[Launch, list[tuple[int, str]]]
) -> None:
    launch, ends = ahead
    launch.check_none_left()
    for code, errors in ends:
        assert code == 0, errors
    assert [(found["rank"], found["local_rank"]) for found in launch.found()] == [(0, 0), (1, 0)]
    for found in launch.found():
        assert (found["WORLD_SIZE"], found["OMP_NUM_THREADS"], found["OMP_WAIT_POLICY"]) == ("2", "3", "ACTIVE")
        assert found["MASTER_ADDR"] == MASTER.strip("[]")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_ranks(launch: Launch, number: signal.Signals) -> None:
    process = launch.start("--module", "a_light_case", str(launch.config))
    end = time.monotonic() + GENEROUS
    while len(launch.found()) < 2:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=GENEROUS)
    assert process.returncode == 128 + number, errors
    assert errors == f"launch: {number.name}: all ranks were ended\n"


def python_blocks(pid: int, number: signal.Signals) -> bool:
    """Whether bash has become Python, and Python has blocked the signal."""
    if b"torchrun.py" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        return False
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigBlk"], 16) >> (number - 1) & 1)


def test_an_interrupt_before_the_ranks_have_started(launch: Launch) -> None:
    process = launch.start("--module", "a_light_case", str(launch.config))
    while not python_blocks(process.pid, signal.SIGINT):  # it goes on to import torch
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=GENEROUS)
    assert (process.returncode, errors) == (130, "launch: SIGINT: all ranks were ended\n")


TWO = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
CONFIGS = {
    "tp2": "parallel: {tp: 2}", "wrong": "parallel: {tpp: 2}", "model": "model: {source: nowhere}",
    "gguf": "model: {source: nowhere.gguf}", "nccl": "model: {device: cpu, source: x.gguf}\ngroup: {transport: nccl}",
    "tp3": "parallel: {tp: 3}\nmodel: {source: x.gguf}", "x.gguf": "",
}  # fmt: skip
MISTAKES: list[tuple[list[str], dict[str, str], list[str]]] = [
    ([], {}, ["CONFIG"]),
    (["none.yaml"], {}, ["cannot read the configuration file 'none.yaml'"]),
    (["wrong.yaml"], {}, ["parallel.tpp", "did you mean tp?", "line 1"]),
    (["tp2.yaml", "--mesages", "x"], {}, ["no argument '--mesages'", "did you mean --messages?"]),
    (["tp2.yaml", "more"], {}, ["no argument 'more'"]),
    (["tp2.yaml", "--messages", "nope.jsonl"], {}, ["nope.jsonl: there is no such file"]),
    (["tp2.yaml", "--messages", "wrong.yaml"], {}, ["wrong.yaml, line 1: not valid JSON"]),
    (["model.yaml"], {}, ["model.source 'nowhere' is neither"]),
    (["gguf.yaml"], {}, ["there is no file nowhere.gguf"]),
    (["nccl.yaml"], {}, ["group.transport: is nccl, which needs a GPU"]),
    (["tp2.yaml"], {"NPROC": "two"}, ["NPROC: must be a whole number", "'two'"]),
    (["tp2.yaml"], {"NPROC": "0"}, ["NPROC: must be a whole number"]),
    (["tp3.yaml"], {"NPROC": "2"}, ["NPROC: is 2 on this host", "has 3 ranks"]),
    (["tp2.yaml"], {"NODE_RANK": "1"}, ["NODE_RANK: is 1, but there is one host; set NNODES"]),
    (["tp2.yaml"], {"NNODES": "2"}, ["NODE_RANK: must be set on every host"]),
    (["tp2.yaml"], {"NNODES": "2", "NODE_RANK": "0"}, ["MASTER_ADDR: must be set"]),
    (["tp2.yaml"], TWO, ["MASTER_PORT: must be set"]),
    (["tp2.yaml"], TWO | {"NODE_RANK": "2", "MASTER_PORT": "1"}, ["NODE_RANK: is 2, but hosts count from 0 to"]),
    (["tp2.yaml"], TWO | {"MASTER_PORT": "FREE", "MASTER_ADDR": "a:7"}, ["without a port, got 'a:7'"]),
    (["tp2.yaml"], TWO | {"MASTER_PORT": "TAKEN"}, ["MASTER_PORT: port ", "is taken by another program"]),
    (["tp3.yaml"], TWO | {"MASTER_PORT": "FREE"}, ["NPROC: must be set on every host", "ranks, 3, are"]),
    (["tp3.yaml"], TWO | {"MASTER_PORT": "FREE", "NPROC": "3"}, ["NPROC: is 3 on this host, of NNODES 2"]),
    (["tp2.yaml", "--module", "a_case"], TWO | {"MASTER_PORT": "FREE", "NODE_RANK": "1", "JOIN_S": "1"},
     ["the 2 hosts did not meet at 127.0.0.1 port ", "within 1 s (JOIN_S)"]),
]  # fmt: skip


def mistakes_case(rank: int, world_size: int, folder: str) -> list[tuple[int, str]]:
    """All of MISTAKES, one after the other, in a process whose signals and environment nobody needs afterwards."""
    os.chdir(folder)
    launch = script("torchrun")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                 "TORCHELASTIC_USE_AGENT_STORE"):  # fmt: skip
        del os.environ[name]
    plain = dict(os.environ)
    found = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"TAKEN": str(taken.getsockname()[1]), "FREE": free_port()}
        for arguments, env, _ in MISTAKES:
            os.environ.update({name: ports.get(value, value) for name, value in env.items()})
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                try:
                    code = launch.main(arguments)
                except SystemExit as end:
                    code = int(str(end.code))
            found.append((code, errors.getvalue()))
            os.environ.clear()
            os.environ.update(plain)
    return found


def test_each_mistake_is_one_clear_message_and_exit_code_2(tmp_path: Path) -> None:
    for name, text in CONFIGS.items():
        (tmp_path / (name if "." in name else f"{name}.yaml")).write_text(text)
    (results,) = run_ranks(mistakes_case, 1, (str(tmp_path),), backend=None, timeout_s=GENEROUS)
    for (arguments, env, parts), (code, errors) in zip(MISTAKES, results, strict=True):
        case = f"{arguments} {env}: {code}\n{errors}"
        assert code == 2, case
        assert errors.count("launch: ") == (1 if arguments else 0), case
        assert errors.count("\n") == 1 or not arguments, case
        assert all(part in errors for part in parts), case


def test_a_checkout_in_a_folder_with_spaces_and_without_venv(launch: Launch) -> None:
    """The scripts alone, with a Python on PATH that lacks what distkv needs."""
    checkout = launch.folder / "check out"
    shutil.copytree(ROOT / "launch", checkout / "launch")
    bare = launch.folder / "bare bin"
    bare.mkdir()
    python = bare / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.base_prefix}/bin/python3" -E -s -S "$@"\n')
    python.chmod(0o755)
    path = os.pathsep.join([str(bare), os.environ["PATH"]])
    run = subprocess.run(
        ["bash", str(checkout / "launch" / "torchrun.sh"), str(launch.config)],
        env=launch.env | {"PATH": path}, capture_output=True, text=True, timeout=GENEROUS, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert "has no module 'torch'" in run.stderr
    assert "Traceback" not in run.stderr
