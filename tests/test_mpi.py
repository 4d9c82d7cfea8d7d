"""MPI as transport: two ranks in one mpirun start, beside gloo in the same processes; and what is said without MPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from distkv import ConfigError, MpiGroup, SoloGroup
from distkv.bench import group as bench
from distkv.inspection.machine import Machine
from tests.engine import tiny

ROOT = Path(__file__).parents[1]
needs_mpi = pytest.mark.skipif(find_spec("mpi4py") is None or Machine().mpirun() is None,
                               reason="needs mpi4py and an mpirun: pip install '.[mpi]' mpich")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("mpi")
    tiny.plain_folder(out / "model")
    program = str(Machine().mpirun())
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
           "MASTER_ADDR": "elsewhere.invalid"}  # exported for another program
    done = subprocess.run(
        [program, *bench.launcher_options(program), "-n", "2", sys.executable, "-W", "error", "-m", "tests.mpi_case",
         str(out)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@needs_mpi
@pytest.mark.parametrize("uneven", [False, True])
def test_mpi_decides_as_gloo_does(results: list[dict[str, Any]], uneven: bool) -> None:
    for rank in results:
        gloo, mpi = dict(rank[f"gloo, {uneven}"]), dict(rank[f"mpi, {uneven}"])
        assert gloo.pop("calls") == {"all_reduce": gloo["needed"]}
        assert mpi.pop("calls") == {}, "nothing goes over torch"
        assert gloo == mpi
        assert mpi["hits"] > 0 and mpi["evicted"] > 0 and mpi["collectives"] == mpi["needed"]
    logs = [rank[f"mpi, {uneven}"]["log"] for rank in results]
    assert logs[0] == logs[1]


@needs_mpi
def test_a_failure_in_begin_goes_over_mpi_as_over_gloo(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["mpi, failing"] == rank["gloo, failing"]
        assert "PeerFailed of rank 1" in rank["mpi, failing"][1]


@needs_mpi
def test_deadlines_and_faults_are_named(results: list[dict[str, Any]]) -> None:
    assert results[0]["late"].startswith("GroupTimeout after True: the ballot of step 7 did not end within 0.3 s")
    assert results[1]["late"] == "[5, 8]"
    assert results[0]["faulty"].startswith("PeerFault: ") and "no luck" in results[0]["faulty"]
    assert results[1]["faulty"] == ""


@needs_mpi
def test_gloo_meets_through_mpi_and_the_benchmark_measures(results: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(results):
        assert rank["layout"] == {"rank": number, "local_rank": number, "world_size": 2, "master_addr": None,
                                  "master_port": None, "source": "mpirun"}
        assert rank["sum"] == 3
        times = rank["bench"]
        assert set(times["minima"]) == {"7", "300"}
        for measured in (*times["minima"].values(), times["step"]):
            assert len(measured["total"]) == 5
            assert [a + b for a, b in zip(measured["issue"], measured["wait"], strict=True)] == measured["total"]


@needs_mpi
def test_a_meeting_that_fails_on_rank_0_is_named_on_all_ranks(results: list[dict[str, Any]]) -> None:
    for rank in results:
        listen, address = rank["unmet"]["listen"], rank["unmet"]["address"]
        assert listen.startswith("rank 0 cannot open a store") and listen.endswith("no port is free")
        assert address.startswith("MASTER_ADDR: is elsewhere.invalid, but rank 0 is on ")


@needs_mpi
def test_the_engine_serves_over_mpi(results: list[dict[str, Any]]) -> None:
    assert [rank["served"][:2] for rank in results] == [[32, True]] * 2
    cold, warm = results[0]["served"][2]
    assert cold == warm and len(cold) == 6


@needs_mpi
def test_another_transport_is_refused(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["refused"].startswith("group.transport: is gloo, but the group that the cache was given uses MPI")


def test_without_mpi_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # what a missing module looks like to import
    with pytest.raises(ConfigError, match=r'group\.transport: .*pip install "\.\[mpi\]"'):
        MpiGroup()


def test_the_command_line_of_the_benchmark(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from distkv.bench.group_rank import measure_group

    def alone(transport: str, ranks: int, sizes: list[int], n: int) -> list[dict[str, Any]]:
        return [measure_group(SoloGroup(), list(sizes), n) for _ in range(ranks)]  # real times of a group of one

    monkeypatch.setattr(bench, "_over_torch", alone)
    arguments = ["--ranks", "1", "--transports", "gloo", "--repeats", "3"]
    assert bench.main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    capsys.readouterr()
    assert [row["elements"] for row in rows] == [bench.ballot_size(k) for k in bench.QUEUE_SLOTS] + [0]
    assert all(0 < row["total"]["median"] <= row["total"]["p99"] and row["total"]["n"] == 3 for row in rows)
    assert bench.main([*arguments, "--sizes", "5,6"]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("| gloo")]) == 3
    monkeypatch.setattr(bench, "missing", lambda transport, ranks: "it is not here")
    assert bench.main(["--ranks", "2", "--transports", "mpi"]) == 1
    assert "mpi with 2 ranks: it is not here" in capsys.readouterr().err
    for wrong in (["--ranks", "0"], ["--ranks", "two"], ["--transports", "tcp"], ["--repeats", "0"]):
        assert bench.main(wrong) == 2
