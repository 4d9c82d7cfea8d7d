"""What plan, doctor and check-config say of the host tier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distkv.config import load
from distkv.engine.config import ServeConfig
from distkv.inspection import doctor
from distkv.inspection.doctor import problems
from distkv.inspection.machine import Machine, why_not_pinned
from distkv.inspection.plan import Plan, make_plan, show
from distkv.inspection.shape import read_shape

from .test_inspection import GIB, Without, command, fixture_machine, settings

PAGE = 16 * 4 * 2 * 4 * 8 * 4  # bytes of a page of the model: tokens, layers, keys and values, heads, head_dim, float32
SMALL = "cache: {page_size: 16}\npool: {pages: 10}\n"


def planned(folder: Path, text: str, *, device: str = "cpu", **memory: int) -> Plan:
    path = settings(folder, SMALL + text)
    path.write_text(path.read_text().replace("device: cpu", f"device: {device}"))
    return make_plan(load(path, ServeConfig), read_shape(str(folder / "model")), **memory)


def test_the_tier_is_shown_with_its_bytes_and_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = settings(tmp_path, SMALL + "parallel: {tp: 2}\nhost: {gib_per_node: 0.5, preemption_pages: 96}\n")
    code, out, _ = command(capsys, "plan", path, "--memory", "1", "--json")
    plan = json.loads(out)
    host, page = plan["host"], PAGE // 2
    pages = GIB // 4 // page
    assert (code, plan["fits"]) == (0, True)
    assert (host["field"], host["pages"], host["bytes_per_page"]) == ("gib_per_node", pages, page)
    assert (host["per_rank"], host["per_node"], host["preemption_per_rank"]) == (GIB // 4, GIB // 2, 96 * page)
    assert host["tokens"] == (pages - 96) * 16
    rest = plan["pool_per_rank"] + plan["weights_per_rank"] + plan["metadata_per_rank"]
    assert host["beside_per_node"] == 2 * rest
    assert host["most_pages"] == (GIB // 2 - rest) // (page + host["metadata_per_rank"] // pages)
    code, out, _ = command(capsys, "plan", path, "--memory", "0.4")
    assert code == 1
    assert "it fits" in next(line for line in out.splitlines() if line.startswith("memory ")), "the pool alone does"
    assert "IT DOES NOT FIT" in out and "lower host.gib_per_node" in out and "96 of them" in out
    assert command(capsys, "plan", path, "--host-memory", "-1")[0] == 2


def test_a_tier_of_less_than_a_page_is_an_error_of_the_configuration(tmp_path: Path,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    path = settings(tmp_path, SMALL + "host: {gib_per_rank: 0.00001}\n")
    for arguments in (["plan", path], ["doctor", path]):
        code, out, errors = command(capsys, *arguments)
        assert code == (2 if arguments[0] == "plan" else 1)
        assert "host.gib_per_rank" in out + errors and "less than one page of 16.00 KiB" in out + errors


def test_beside_gpus_it_is_the_hosts_memory_that_counts(tmp_path: Path) -> None:
    tier = "host: {pages: 100}\n"
    plan = planned(tmp_path, tier, device="cuda", memory=GIB, host_memory=200 * PAGE)
    assert plan.host is not None and plan.host.memory == 200 * PAGE and plan.fits
    assert plan.host.beside_per_node == plan.metadata_per_rank, "weights and pool are on the GPU"
    plan = planned(tmp_path, tier, device="cuda", memory=GIB, host_memory=90 * PAGE)
    assert plan.pool_fits and not plan.fits
    plan = planned(tmp_path, tier, device="cuda", memory=GIB)
    assert plan.host is not None and plan.host.memory is None and plan.fits, "the GPU given is not this machine's"
    assert "unknown; give --host-memory GIB" in show(plan)
    assert planned(tmp_path, "").host is None
    assert planned(tmp_path, tier, host_memory=90 * PAGE).memory == 90 * PAGE, "on CPUs it is one memory"


def test_sizes_that_follow_from_others_are_shown_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = settings(tmp_path, "host: {gib_per_node: 6}\n")
    _, out, _ = command(capsys, "check-config", path, "--json")
    fields = {field["path"]: field for field in json.loads(out)["fields"]}
    assert (fields["host.gib_per_node"]["value"], fields["host.gib_per_node"]["source"]) == (6, f"{path}:4")
    assert fields["host.gib_per_rank"]["derived"] == "6 / ranks of the node"
    assert fields["host.pages"]["derived"] == "host.gib_per_rank / bytes of a page"
    assert fields["host.pages"]["because"] == fields["host.gib_per_rank"]["because"] == "host.gib_per_node"
    assert fields["host.loading_slots"]["agreed"] and not fields["host.pages"]["agreed"]


# ---- doctor


def wrong(folder: Path, text: str, machine: Machine) -> dict[str, tuple[bool, str]]:
    """Field -> whether it is a warning, and the words, of every problem."""
    config = load(settings(folder, text), ServeConfig)
    (folder / "model" / "model.safetensors").touch()
    found = problems(config, machine)
    assert all(problem.remedy for problem in found)
    return {problem.field: (problem.warning, f"{problem.problem} -> {problem.remedy}") for problem in found}


class Pinning(Machine):
    """A machine with CuPy."""

    def version(self, package: str) -> str | None:
        return "14.2.0" if package == "cupy-cuda12x" else super().version(package)


def no_driver(code: str, environ: object) -> dict[str, Any] | str:
    return {"version": "14.2.0", "available": False, "error": "cudaErrorInsufficientDriver"}


def test_whether_memory_can_be_pinned(tmp_path: Path) -> None:
    none = Without(environ={"MISSING": json.dumps(dict.fromkeys(("cupy-cuda12x", "cupy-cuda13x", "cupy")))})
    assert why_not_pinned(none) == "CuPy is not installed"
    assert "does not load: no such library" in why_not_pinned(Pinning(ask=lambda code, env: "no such library"))
    assert why_not_pinned(Pinning(ask=no_driver)) == "cudaErrorInsufficientDriver"
    assert why_not_pinned(Pinning(ask=lambda code, env: {"version": "14.2.0", "pinned": True})) == ""


def test_what_of_the_tier_will_not_work_here(tmp_path: Path) -> None:
    pinning = Pinning(ask=no_driver)
    assert wrong(tmp_path, "host: {pages: 8}\n", pinning) == {}, "plain memory does for a pool on the CPU"
    warning, words = wrong(tmp_path, "host: {pages: 8, require_pinned: true}\n", pinning)["host.require_pinned"]
    assert not warning and "cudaErrorInsufficientDriver" in words and "set it to false" in words
    assert wrong(tmp_path, "host: {require_pinned: true}\n", pinning) == {}, "there is no tier"
    warning, words = wrong(tmp_path, "host: {gib_per_rank: 100000}\n", pinning)["host.gib_per_rank"]
    assert not warning and "beside" in words and "for each rank fit" in words
    assert wrong(tmp_path, "host: {pages: 8, copy_threads: 256}\n", pinning)["host.copy_threads"][0]


def test_on_a_gpu_the_limit_of_locked_memory_and_plain_memory_are_worth_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_on_gpu", lambda config, ranks: True)
    monkeypatch.setattr(doctor, "memlock", lambda: (65536, 65536))
    machine = Pinning(ask=no_driver)
    found = [p for p in problems(load(settings(tmp_path, "host: {pages: 8}\n"), ServeConfig), machine) if p.warning]
    texts = [problem.problem for problem in found if problem.field == "host"]
    assert any("RLIMIT_MEMLOCK is 64.00 KiB" in text for text in texts)
    assert any("copies to and from the GPU are slower" in text for text in texts)
    monkeypatch.setattr(doctor, "memlock", lambda: (None, None))
    machine = Pinning(ask=lambda code, env: {"version": "14.2.0", "pinned": True})
    config = load(settings(tmp_path, "host: {pages: 8}\n"), ServeConfig)
    assert not [problem for problem in problems(config, machine) if problem.field == "host"]


def test_odd_machines_say_what_of_cupy_they_have(tmp_path: Path) -> None:
    from distkv.inspection.machine import findings

    machine = fixture_machine(tmp_path)
    found = {finding.name: finding for finding in findings(machine)}
    pinned = found["pinned memory"]
    assert ("it does not load" in pinned.warning) == any(map(machine.version, ("cupy-cuda12x", "cupy-cuda13x", "cupy")))
    assert "RLIMIT_MEMLOCK" in found["pinned limit"].value
