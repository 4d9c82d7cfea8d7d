"""The harness for groups of processes: it shows every rank, never hangs, and leaves nothing behind.

Ranks are forked from a warm process here, as in all tests; what may depend on that is tested with fresh ones too.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from distkv.errors import GroupTimeout, RequestTooLarge
from distkv.testing._children import TOKEN
from distkv.testing.processes import RanksFailed, choose_backend, run_outcomes, run_ranks
from distkv.testing.warm import WarmProcess, warm_start

GENEROUS = 240.0
SHORT_S = 5.0  # for ranks that are forked to come to where they get stuck
CUDA = torch.cuda.is_available()  # then all ranks start fresh


@dataclass(frozen=True)
class Answer:
    rank: int
    lowest: int


def lowest(rank: int, world_size: int, base: int) -> Answer:
    tensor = torch.tensor([base + rank])
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    assert dist.get_world_size() == world_size
    return Answer(rank, int(tensor))


def minimum_by_torchrun_variables(rank: int, world_size: int) -> int:
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    return lowest(rank, world_size, 5).lowest


def environment(rank: int, world_size: int) -> tuple[dict[str, str], int, tuple[int, int, int], list[float]]:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "COLOUR"]
    ids = (os.getppid(), os.getsid(0), os.getpid())
    numbers = [random.random(), float(np.random.random())]  # noqa: NPY002  # the global one is the question
    return {name: os.environ[name] for name in names}, hash("a word"), ids, numbers


def array(rank: int, world_size: int) -> np.ndarray:
    return np.full(3, rank, np.int32)


def fail(rank: int, world_size: int) -> None:
    if rank == 1:
        print("a word before the end")
        raise RequestTooLarge("r1", 9, 4)
    time.sleep(10_000)


def sleep_in_a_function_with_a_name(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(10_000)


def wait_for_a_message(rank: int, world_size: int) -> None:
    """Rank 0 waits inside gloo, in C++, for a rank that never sends."""
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    else:
        time.sleep(10_000)


WAYS = ("return", "raise", "kill", "stop", "children")


def end_each_in_its_way(rank: int, world_size: int, folder: str) -> str:
    way = WAYS[rank]
    if way == "raise":
        fail(1, world_size)
    elif way == "children":
        start_children(rank, world_size, folder, "return")
    elif way != "return":
        os.kill(os.getpid(), signal.SIGKILL if way == "kill" else signal.SIGSTOP)
    return way


def end_oneself(rank: int, world_size: int, way: str) -> str:
    if rank == 1:
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif way == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif way == "exit":
            os._exit(7)
        elif way == "sys.exit":
            sys.exit(3)
    try:
        dist.recv(torch.zeros(1), src=1) if way != "stop" else time.sleep(0.1)
    except RuntimeError:
        return "noticed"
    return "went on"


def raise_timeout(rank: int, world_size: int) -> None:
    raise GroupTimeout("all_reduce", 1.5, rank=rank, step=7)


def start_children(rank: int, world_size: int, folder: str, end: str) -> None:
    """One child in the rank's session, one that left it, and a fork that left it; they would live for hours."""
    if os.fork() == 0:
        os.setsid()
        (Path(folder) / f"{rank}-forked").write_text(str(os.getpid()))
        time.sleep(10_000)
    code = "import time; time.sleep(10_000)"
    for new_session in (False, True):
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=new_session)
        (Path(folder) / f"{rank}-{new_session}").write_text(str(child.pid))
    while not (Path(folder) / f"{rank}-forked").exists():
        time.sleep(0.01)
    if end == "raise":
        raise ValueError("after the children were started")
    if end == "sleep":
        time.sleep(10_000)


def return_but_stay(rank: int, world_size: int) -> int:
    threading.Thread(target=time.sleep, args=(10_000,)).start()
    return rank


def return_a_lambda(rank: int, world_size: int) -> object:
    return lambda: rank


def alive(folder: Path) -> list[int]:
    """Processes started by the ranks that are neither gone nor zombies."""
    pids = [int(text) for text in (file.read_text() for file in folder.iterdir()) if text]
    assert pids
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(autouse=True)
def start(warm: WarmProcess) -> None:
    """The warm process, which stays for the next run, is no process that a test has left."""
    if warm.pid is None and not CUDA:
        run_ranks(array, 1, backend=None, timeout_s=GENEROUS)


def of_ranks() -> set[int]:
    """Processes of ranks, and those that they start; not what other tests have begun (see conftest.py)."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if TOKEN in child.environ():
                found.add(child.pid)
    return found


@pytest.fixture(autouse=True)
def no_process_is_left(start: None):
    before = of_ranks()
    yield
    assert of_ranks() <= before


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_in_order_of_rank(world_size: int) -> None:
    assert run_ranks(lowest, world_size, (10,)) == [Answer(rank, 10) for rank in range(world_size)]


def test_the_group_may_be_made_by_the_ranks_as_under_torchrun() -> None:
    assert run_ranks(minimum_by_torchrun_variables, 2, backend=None) == [5, 5]


def lowest_and_environment(rank: int, world_size: int) -> tuple[Answer, Any]:
    return lowest(rank, world_size, 10), environment(rank, world_size)


def check_environment(found: list[Any], parent: int | None) -> None:
    for rank, (variables, _, (born_of, session, pid), _) in enumerate(found):
        assert variables == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "COLOUR": "red",
        }
        assert session == pid
        assert born_of == parent
    numbers = [number for *_, drawn in found for number in drawn]
    assert len(set(numbers)) == len(numbers), "ranks draw the same random numbers"


def test_environment_of_a_rank(warm: WarmProcess) -> None:
    found = run_ranks(environment, 2, backend=None, env={"COLOUR": "red"})
    check_environment(found, os.getpid() if CUDA else warm.pid)


def test_what_is_read_when_python_starts_starts_a_new_one() -> None:
    results = run_ranks(lowest_and_environment, 2, env={"COLOUR": "red", "PYTHONHASHSEED": "7"})
    assert [answer for answer, _ in results] == [Answer(0, 10), Answer(1, 10)]
    found = [seen for _, seen in results]
    check_environment(found, os.getpid())
    assert found[0][1] == found[1][1] != hash("a word")


@pytest.mark.skipif(CUDA, reason="ranks are not forked where they may use a GPU")
def test_a_warm_process_that_was_killed_ends_its_ranks_and_is_started_again(tmp_path: Path) -> None:
    with warm_start([]) as other:
        def kill() -> None:
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.05)
            os.kill(other.pid or 0, signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        outcomes = run_outcomes(pid_file, 2, (str(tmp_path),), backend=None, timeout_s=GENEROUS)
        assert [outcome.status for outcome in outcomes] == ["killed", "killed"]
        assert alive(tmp_path) == []
        assert len(run_ranks(array, 2, backend=None)) == 2


def test_what_starts_threads_cannot_be_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(10_000,), daemon=True).start()"
    (tmp_path / "with_a_thread.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "with_a_thread", sys)  # as if it was imported here
    with warm_start(["with_a_thread"]) as other:
        ((_, _, (parent, *_), _),) = run_ranks(environment, 1, backend=None, env={"COLOUR": ""})
        assert parent == os.getpid()
        assert other.pid is None


def test_arrays_are_results_too() -> None:
    results = run_ranks(array, 2, backend=None)
    assert [result.tolist() for result in results] == [[0, 0, 0], [1, 1, 1]]


def test_auto_uses_a_backend_that_the_machine_has() -> None:
    enough_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= 2
    assert choose_backend(2) == ("nccl" if enough_gpus else "gloo")
    if not enough_gpus:
        assert run_ranks(lowest, 2, (3,), backend="auto") == [Answer(0, 3), Answer(1, 3)]


def test_an_exception_shows_its_traceback_and_ends_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkv.testing._outcome._GRACE_S", 0.5)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail, 3, backend=None, timeout_s=10_000)
    text = str(caught.value)
    assert "3 of 3 ranks" in text
    assert "rank 1: raised distkv.errors.RequestTooLarge" in text
    assert 'raise RequestTooLarge("r1", 9, 4)' in text
    assert "a word before the end" in text
    assert "rank 2: was still running when another rank failed" in text
    assert [outcome.status for outcome in caught.value.outcomes] == ["ended", "raised", "ended"]
    assert caught.value.outcomes[1].raised(RequestTooLarge)
    assert not caught.value.outcomes[1].raised(GroupTimeout)


def test_ranks_that_are_stuck_show_where_they_are_and_leave_nothing(tmp_path: Path) -> None:
    """In Python, inside a collective, and with children of their own: all of them until one deadline."""
    with ThreadPoolExecutor(3) as pool:
        asleep = pool.submit(run_outcomes, sleep_in_a_function_with_a_name, 2, backend=None, timeout_s=SHORT_S)
        waiting = pool.submit(run_ranks, wait_for_a_message, 2, timeout_s=SHORT_S)
        parents = pool.submit(
            run_outcomes, start_children, 2, (str(tmp_path), "sleep"), backend=None, timeout_s=SHORT_S
        )
    returned, stuck = asleep.result()
    assert (returned.status, stuck.status) == ("returned", "deadline")
    assert "rank 1: did not end within the deadline" in stuck.describe()
    assert "sleep_in_a_function_with_a_name" in stuck.stacks
    with pytest.raises(RanksFailed) as caught:
        waiting.result()
    for outcome in caught.value.outcomes:
        assert "wait_for_a_message" in outcome.stacks + (outcome.error.traceback if outcome.error else "")
    assert [outcome.status for outcome in parents.result()] == ["deadline", "deadline"]
    assert len(list(tmp_path.iterdir())) == 6
    assert alive(tmp_path) == []


@pytest.mark.parametrize(
    ("way", "status", "code"), [("kill", "killed", -9), ("exit", "exited", 7), ("sys.exit", "exited", 3)]
)
def test_a_rank_that_ends_without_a_word(way: str, status: str, code: int) -> None:
    survivor, ended = run_outcomes(end_oneself, 2, (way,))
    assert (ended.status, ended.exit_code) == (status, code)
    assert (survivor.status, survivor.result) == ("returned", "noticed")
    assert ("SIGKILL" in ended.describe()) == (way == "kill")


def test_a_stopped_rank_does_not_hold_up_the_others() -> None:
    survivor, stopped = run_outcomes(end_oneself, 2, ("stop",), timeout_s=10_000)
    assert (survivor.status, survivor.result) == ("returned", "went on")
    assert stopped.status == "stopped"
    assert "end_oneself" in stopped.stacks


def test_ranks_that_start_fresh_end_in_every_way(tmp_path: Path) -> None:
    outcomes = run_outcomes(end_each_in_its_way, len(WAYS), (str(tmp_path),), backend=None, timeout_s=GENEROUS,
                            fresh=True)
    returned, raised, killed, stopped, parent = outcomes
    assert (returned.status, returned.result) == ("returned", "return")
    assert raised.raised(RequestTooLarge) and not raised.raised(GroupTimeout)
    assert 'raise RequestTooLarge("r1", 9, 4)' in raised.describe() and "a word before the end" in raised.output
    assert (killed.status, killed.exit_code) == ("killed", -9)
    assert stopped.status == "stopped" and "end_each_in_its_way" in stopped.stacks
    assert parent.status == "returned"
    assert len(list(tmp_path.iterdir())) == 3
    assert alive(tmp_path) == []


def test_an_exception_keeps_its_attributes() -> None:
    for rank, outcome in enumerate(run_outcomes(raise_timeout, 2, backend=None)):
        assert outcome.raised(GroupTimeout)
        assert outcome.error is not None
        expected = {"operation": "all_reduce", "seconds": 1.5, "rank": rank, "step": 7}
        assert outcome.error.attributes | expected == outcome.error.attributes


@pytest.mark.parametrize("end", ["return", "raise"])
def test_nothing_that_a_rank_started_is_left(tmp_path: Path, end: str) -> None:
    outcomes = run_outcomes(start_children, 2, (str(tmp_path), end), backend=None, timeout_s=GENEROUS)
    expected = {"return": "returned", "raise": "raised"}[end]
    assert [outcome.status for outcome in outcomes] == [expected, expected]
    assert len(list(tmp_path.iterdir())) == 6
    assert alive(tmp_path) == []


def test_nothing_is_left_after_an_interrupt(tmp_path: Path) -> None:
    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 6:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    # a shell starts what runs in its background with interrupts ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            run_ranks(start_children, 2, (str(tmp_path), "sleep"), backend=None, timeout_s=GENEROUS)
    finally:
        signal.signal(signal.SIGINT, before)
    assert alive(tmp_path) == []


def test_ranks_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Ranks that are forked, and ranks that start fresh: a parent of each kind."""
    folders = {way: tmp_path / way for way in ("forked", "fresh")}
    parents = {}
    for way, folder in folders.items():
        folder.mkdir()
        code = f"""
import contextlib, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_processes import pid_file, run_ranks, warm_start
with warm_start([]) if {way == "forked"} else contextlib.nullcontext():
    run_ranks(pid_file, 1, ({str(folder)!r},), backend=None)
"""
        parents[way] = subprocess.Popen([sys.executable, "-c", code])
    try:
        for way, parent in parents.items():
            while not list(folders[way].iterdir()):
                assert parent.poll() is None
                time.sleep(0.05)
            descendants = psutil.Process(parent.pid).children(recursive=True)
            assert len(descendants) == (2 if way == "forked" and not CUDA else 1)
            parent.kill()
            parent.wait()
            _, left = psutil.wait_procs(descendants, 30)
            assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
            assert alive(folders[way]) == []
    finally:
        for parent in parents.values():
            parent.kill()
            parent.wait()


def pid_file(rank: int, world_size: int, folder: str) -> None:
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    time.sleep(10_000)


def test_a_process_that_stays_after_its_target_returned_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkv.testing._outcome._LEAVE_S", 0.5)
    with pytest.raises(RanksFailed, match="its target had returned") as caught:
        run_ranks(return_but_stay, 1, backend=None)
    assert "sleep" in caught.value.outcomes[0].stacks or "Thread" in caught.value.outcomes[0].stacks


def test_a_result_that_cannot_be_pickled_is_an_error_of_that_rank() -> None:
    (outcome,) = run_outcomes(return_a_lambda, 1, backend=None)
    assert outcome.raised(TypeError)
    assert outcome.error is not None
    assert "cannot be pickled" in outcome.error.message


def test_targets_must_be_importable() -> None:
    with pytest.raises(ValueError, match="importable by name"):
        run_ranks(lambda rank, world_size: None, 1)
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(array, 0)


def test_a_script_can_run_its_own_functions(tmp_path: Path) -> None:
    script = tmp_path / "a script.py"
    script.write_text(
        "from dataclasses import dataclass\n"
        "from distkv.testing.processes import run_ranks\n"
        "from distkv.testing.warm import warm_start\n"
        "@dataclass\n"
        "class Point:\n"
        "    x: int\n"
        "def case(rank, world_size, point):\n"
        "    return Point(point.x + rank)\n"
        "if __name__ == '__main__':\n"
        "    with warm_start([]):\n"
        "        print(run_ranks(case, 2, (Point(3),), backend=None))\n"
    )
    root = str(Path(__file__).parents[1])
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True, text=True, timeout=GENEROUS, env={**os.environ, "PYTHONPATH": root}, check=False,
    )  # fmt: skip
    assert run.stdout.strip() == "[Point(x=3), Point(x=4)]", run.stderr


def test_groups_started_at_once_do_not_fight_over_a_port() -> None:
    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(run_ranks, lowest, 2, (100 * i,), timeout_s=GENEROUS) for i in range(8)]
        for i, run in enumerate(runs):
            assert run.result() == [Answer(0, 100 * i), Answer(1, 100 * i)]
