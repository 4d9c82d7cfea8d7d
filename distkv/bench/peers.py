"""``distkv bench peers``: distkv, vLLM's and SGLang's prefix caches on one machine in one run, and the ratios.

The harnesses (``bench_vllm.py`` and ``bench_sglang.py``) are not part of distkv: give their folder. Each drives its
peer's own, unmodified classes, without a GPU and without an engine, and distkv through an adapter of this package, in
the peer's own virtual environment. Rounds alternate between the peers, so that a slow minute of the machine hits all.
How to make the environments: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import distkv
from distkv.bench import files
from distkv.bench.rows import markdown, number
from distkv.errors import DistKVError, InputFileError

__all__ = ["main"]

ROOT = Path(distkv.__file__).resolve().parent.parent
PLUGIN = ROOT / "distkv" / "bench" / "sglang_peer.py"
SGLANG, OURS = "sgl-rust", ("distkv", "distkv-cold")

VLLM_TITLE = """vLLM's harness: prompts are lists and named anew for each request; distkv's `match` is a whole step."""
SGLANG_TITLE = """SGLang's harness, below the scheduler; cold: the whole prompt is named in every call."""

VLLM_ROWS = {
    "names of a 131,072-token prompt (list)": "create+hash 131072 tok/sha256/block128",
    "match, fully cached": "match fully cached 131072 tok/block128",
    "slots after a full hit": "alloc after full hit (pin + <=1 new block)/block128",
    "slots, every page evicted": "alloc evicting every block 131072 tok/block128",
    "free": "free 131072 tok (all cached)/block128",
    "one decoded token": "decode append 1 token+slot/block128",
    "whole request, agents, pool 256k": "macro random/sha256/block128/cap256k/bulk append",
    "whole request, agents, pool 1M": "macro random/sha256/block128/cap1024k/bulk append",
}
SGLANG_ROWS = {
    "match + page table, 64 nodes": "match+locs_128k_64nodes",
    "match + page table, 1 node": "match+locs_128k_1node",
    "miss on the first page": "match_128k_miss_first_page",
    "store 1,024 tokens on 128k": "insert_+1024_on_128k_64nodes",
    "lock and unlock, 64 nodes": "lock+unlock_depth64",
    "evict one page among 2,048": "evict_1page_call_2048leaves",
}


@dataclass(frozen=True, slots=True)
class Places:
    """Where the harnesses and the peers' interpreters are; an interpreter is None if that peer is left out."""

    harness: Path
    vllm: str | None
    sglang: str | None


class HarnessFailed(DistKVError, RuntimeError):
    """A harness ended with an error; the message has its last lines."""


def main(arguments: Sequence[str]) -> int:
    """Runs the harnesses and prints the tables. 0 if all ran, 1 if one failed, 2 for unusable paths."""
    parser = argparse.ArgumentParser(prog="distkv bench peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    env = os.environ.get
    parser.add_argument("--harness", metavar="DIR", default=env("DISTKV_PEERS_HARNESS"),
                        help="folder with bench_vllm.py and bench_sglang.py (or DISTKV_PEERS_HARNESS)")
    parser.add_argument("--vllm-python", metavar="PATH", default=env("DISTKV_VLLM_PYTHON"),
                        help="interpreter that has vLLM (or DISTKV_VLLM_PYTHON); without it vLLM is left out")
    parser.add_argument("--sglang-python", metavar="PATH", default=env("DISTKV_SGLANG_PYTHON"),
                        help="interpreter that has SGLang (or DISTKV_SGLANG_PYTHON); without it SGLang is left out")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is run (default 3)")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="thread CPU time (default) or wall")
    files.add_option(parser)
    given = parser.parse_args(arguments)
    places = _places(given.harness, given.vllm_python, given.sglang_python)
    files.refuse_unwritable(given.json)
    rounds = [_round(places, given.clock, i) for i in range(max(1, given.rounds))]
    print(f"\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end, {given.clock} time, microseconds, "
          f"median over {len(rounds)} round(s)\n")
    print(report(rounds))
    files.write(given.json, {"machine": files.machine(), "clock": given.clock, "rounds": rounds})
    return 0


def _places(harness: str | None, vllm: str | None, sglang: str | None) -> Places:
    if not harness:
        raise InputFileError("--harness", 0, "give the folder that has bench_vllm.py and bench_sglang.py")
    if not vllm and not sglang:
        raise InputFileError("--vllm-python", 0, "give at least one of --vllm-python and --sglang-python")
    for name, python in (("bench_vllm.py", vllm), ("bench_sglang.py", sglang)):
        if python and not (Path(harness) / name).is_file():
            raise InputFileError(str(Path(harness) / name), 0, "no such file")
        if python and not os.access(python, os.X_OK):
            raise InputFileError(python, 0, "no interpreter that can be run")
    return Places(Path(harness).resolve(), vllm, sglang)


def _round(places: Places, clock: str, number_of_round: int) -> dict[str, Any]:
    """One run of everything: {"vllm": {...}, "sglang": {...}} as the harnesses write them."""
    found: dict[str, Any] = {"load": os.getloadavg()[0]}
    if places.vllm:
        script = str(places.harness / "bench_vllm.py")
        found["vllm"] = {}
        for part in ("micro", "macro"):
            for implementation in ("vllm", "distkv.bench.vllm_peer:DistKV"):
                print(f"round {number_of_round + 1}: vLLM's harness, {part}, {implementation}", flush=True)
                found["vllm"] |= _json_of([places.vllm, script, part, "--impl", implementation, "--blocks", "128",
                                           "--algos", "sha256", "--clock", clock, "--runs", "1"])
    if places.sglang:
        script = str(places.harness / "bench_sglang.py")
        common = ["--page", "128", "--orders", "random", "--inflight", "1", "--clock", clock]
        print(f"round {number_of_round + 1}: SGLang's harness, all three", flush=True)
        found["sglang"] = _json_of([places.sglang, script, "--peer", ",".join((SGLANG, *OURS)), *common,
                                    "--plugin", str(PLUGIN)])
        print(f"round {number_of_round + 1}: SGLang's harness, SGLang's own scheduler path", flush=True)
        found["scheduler"] = _json_of([places.sglang, script, "--peer", SGLANG, "--what", "macro", "--sched", *common])
    return found


def _json_of(command: list[str]) -> dict[str, Any]:
    """Runs a harness, with this distkv on its path, in an empty folder; returns what it writes with ``--json``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ran = subprocess.run([*command, "--json", str(path)], cwd=folder, env=environment, capture_output=True,
                             text=True, errors="replace", check=False)
        if ran.returncode or not path.is_file():
            last = "\n".join((ran.stdout + ran.stderr).splitlines()[-15:])
            raise HarnessFailed(f"{' '.join(command[:6])} ... ended with {ran.returncode}:\n{last}")
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content


def report(rounds: Sequence[dict[str, Any]]) -> str:
    """The tables of what was run."""
    parts = []
    if all("vllm" in one for one in rounds):
        parts += [VLLM_TITLE, _table(["vLLM", "distkv"], list(_vllm(rounds)))]
    if all("sglang" in one for one in rounds):
        parts += [SGLANG_TITLE, _table(["SGLang", "distkv", "distkv cold"], list(_sglang(rounds)))]
    return "\n\n".join(parts)


def _table(columns: list[str], lines: list[tuple[str, list[float]]]) -> str:
    head = ["operation", *columns, *(f"{columns[0]} / {other}" for other in columns[1:])]
    body = []
    for name, values in lines:
        ratios = ["" if "share" in name or not ours else f"{values[0] / ours:.1f}" for ours in values[1:]]
        body.append([name, *map(number, values), *ratios])
    return markdown(head, body)


def _vllm(rounds: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[float]]]:
    for name, key in VLLM_ROWS.items():
        both = [[one["vllm"][f"{who}/{key}"] for one in rounds] for who in ("vllm", "distkv")]
        for what, field in (("median", "median_us"), ("mean", "mean_us"), ("p99", "p99_us"), ("hit share", "hit_rate")):
            if field == "median_us" or (field in both[0][0] and "agents" in name):
                title = name if "agents" not in name else f"{name}: {what}"
                yield title, [median(run[field] for run in runs) for runs in both]


def _sglang(rounds: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[float]]]:
    who = (SGLANG, *OURS)
    for name, key in SGLANG_ROWS.items():
        runs = [[one["sglang"][w]["micro_p128"][key] for one in rounds] for w in who]
        yield name, [median(run["med_us"] for run in of) for of in runs]
        if "overshoot" in runs[0][0]:
            yield "pages freed when one is short (share of what is needed)", [of[0]["overshoot"] for of in runs]
    macro = [[one["sglang"][w]["macro_random_if1"] for one in rounds] for w in who]
    for what, field in (("median", "med_us"), ("mean", "mean_us"), ("p99", "p99_us")):
        yield f"whole request, agents: {what}", [median(run["TOTAL"][field] for run in of) for of in macro]
    yield "whole request, agents: hit share", [of[0]["_"]["hit_rate"] for of in macro]
    own = [one["scheduler"][SGLANG]["macro_random_if1_sched"]["TOTAL"]["med_us"] for one in rounds]
    ours = [median(run["TOTAL"]["med_us"] for run in of) for of in macro[1:]]
    yield "whole request, SGLang by its own scheduler path: median", [median(own), *ours]
