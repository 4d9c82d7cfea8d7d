"""Faults on purpose: ``python -m distkv.testing.trials --trials 20 --kinds kill,stop,forward,commit --ranks 4``.

In each trial an engine answers requests on several ranks, and on a random rank, in a random step, the process is killed
(kill -9) or stopped (SIGSTOP), or the forward pass, commit or begin of the cache's step raises. Every other rank has to
end with a named error within the deadline + 2 s, and its process has to end by itself, while that of the rank that was
stopped or raised is still there. Two more kinds are no faults, and the group has to go on: a process that is stopped
for half of the deadline (pause), or holds Python's lock for so long (gil). About half of the trials have the group's
store on rank 0, the others outside of the ranks, as with torchrun. Prints a table; exit code 1 if a trial went wrong,
and which.

The model is a Llama of two layers with random weights. Each trial has processes of its own. Linux.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import get_args

import torch.distributed as dist

from distkv.testing._trial_rank import HARMLESS, LAYERS, OTHERS_ENDED, VOCAB, Kind, Place, Report, Trial
from distkv.testing._trial_rank import main as rank_main

__all__ = ["Result", "main", "random_model", "random_trial", "run_trial"]

KINDS: tuple[Kind, ...] = get_args(Kind)
PLACES: tuple[Place, ...] = get_args(Place)
_MARGIN_S = 2.0
_EXIT_S = 10.0  # for a process to end after its error; the interpreter takes some of it on a busy machine
_START_S = 180.0


@dataclass(frozen=True)
class Result:
    """One trial: every survivor's report, how long after the fault the last error came, and what went wrong."""

    trial: Trial
    reports: list[Report]
    slowest_s: float
    exit_s: float
    """How long after the fault the last process of another rank had ended."""
    problems: list[str] = field(default_factory=list)


def random_model(folder: Path) -> None:
    """Saves a small Llama with random weights, 12 heads, so that it goes on 1, 2, 3, 4, 6 or 12 ranks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=192, num_hidden_layers=LAYERS, num_attention_heads=12,
        num_key_value_heads=12, head_dim=8, max_position_embeddings=2048, initializer_range=0.15, eos_token_id=2,
        bos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def random_trial(kind: Kind, ranks: int, timeout_s: float, source: random.Random) -> Trial:
    """A trial of a kind: random rank, step and place."""
    place = {"forward": "layer", "commit": "commit", "begin": "begin"}.get(kind) or source.choice(PLACES)
    return Trial(
        kind=kind, ranks=ranks, victim=source.randrange(ranks), step=source.randint(2, 40), place=place,  # type: ignore[arg-type]
        layer=source.randrange(LAYERS), seed=source.randrange(1 << 30), timeout_s=timeout_s,
        store_on_rank_0=source.random() < 0.5, overlap=source.random() < 0.5,
    )  # fmt: skip


def context() -> ForkServerContext:
    """Where ranks are started from: a process that has imported everything once."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["distkv.testing._trial_rank", "transformers.models.llama.modeling_llama"])
    return forks


def run_trial(trial: Trial, folder: Path, forks: ForkServerContext | ForkContext) -> Result:
    """Runs one trial; ``folder / "model"`` has the model. Leaves no process behind.

    ``forks`` is :func:`context`'s, or "fork" in a process that has computed nothing and has no threads.
    """
    place = Path(tempfile.mkdtemp(dir=folder))
    store = None
    if trial.store_on_rank_0:
        port = _free_port()
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    ranks = [
        forks.Process(target=rank_main, args=(rank, trial, place, port), daemon=True)
        for rank in range(trial.ranks)
    ]
    try:
        for process in ranks:
            process.start()
        return _judge(trial, place, ranks)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            if process.pid is not None:  # the start of an earlier one may have failed
                process.join()
        del store


def _judge(trial: Trial, place: Path, ranks: Sequence[BaseProcess]) -> Result:
    lost = {trial.victim} if trial.kind in ("kill", "stop") else set()
    others = [process for rank, process in enumerate(ranks) if rank not in lost]
    struck = place / "struck"
    end = time.monotonic() + _START_S
    while not (struck.exists() and struck.read_text()) and time.monotonic() < end:
        if not all(process.is_alive() for process in others):
            break
        time.sleep(0.02)
    if not struck.exists():
        return Result(trial, [], 0.0, 0.0, ["the fault did not come: " + _logs(place)])
    at = float(struck.read_text())
    limit = trial.timeout_s + _MARGIN_S
    if trial.kind == "pause":
        time.sleep(trial.timeout_s / 2)
        os.kill(ranks[trial.victim].pid or 0, signal.SIGCONT)
    last = at + limit + _EXIT_S
    _join([process for rank, process in enumerate(ranks) if rank != trial.victim], last)
    exit_s = time.monotonic() - at
    hang = {rank for rank, process in enumerate(ranks) if rank != trial.victim and process.is_alive()}
    (place / OTHERS_ENDED).touch()
    _join(others, max(last, time.monotonic() + _EXIT_S))
    problems = []
    reports = []
    for rank, process in enumerate(ranks):
        if rank in lost:
            continue
        file = place / f"{rank}.json"
        if rank in hang or process.is_alive():
            problems.append(f"rank {rank} has not ended" + ("" if file.exists() else ", without an error"))
        elif not file.exists() or process.exitcode:
            problems.append(f"rank {rank} ended with exit code {process.exitcode}: " + _logs(place))
        if file.exists():
            report = Report(**json.loads(file.read_text()))
            if rank != trial.victim:
                reports.append(report)
            problems += _wrong(trial, report, at)
    return Result(trial, reports, max((r.at for r in reports), default=at) - at, exit_s, problems)


def _join(processes: Sequence[BaseProcess], until: float) -> None:
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))


def _wrong(trial: Trial, report: Report, at: float) -> list[str]:
    """What is wrong with how a rank ended."""
    who = f"rank {report.rank}: {report.error}: {report.text}"
    wrong = []
    keeper = trial.store_on_rank_0 and trial.victim == 0  # then nobody can tell who else is alive
    if report.threads and not (keeper and trial.kind == "stop"):  # a call of a store that is stopped cannot be ended
        wrong.append(f"{who}: threads were left: {report.threads}")
    if trial.kind in HARMLESS:
        return [*wrong, f"{who}, though it was no fault"] if report.error else wrong
    if report.rank == trial.victim:
        return wrong if report.error == "Planted" else [*wrong, f"{who}, not its own exception"]
    if not report.named:
        wrong.append(f"{who}, which is no error of the group")
    if report.at - at > trial.timeout_s + _MARGIN_S:
        wrong.append(f"{who}: {report.at - at:.1f} s after the fault")
    if report.failed_rank != trial.victim and not (keeper and report.failed_rank is None):
        wrong.append(f"{who}: names rank {report.failed_rank}")
    return wrong


def _logs(place: Path) -> str:
    return "\n".join(f"{file.name}: {file.read_text()[-2000:]}" for file in sorted(place.glob("*.log")))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table(results: Sequence[Result]) -> str:
    """One line for each kind, as Markdown."""
    lines = ["| kind | trials | wrong | errors on the other ranks | name the rank | slowest error s | last process s |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for kind in KINDS:
        mine = [result for result in results if result.trial.kind == kind]
        if not mine:
            continue
        reports = [(result.trial, report) for result in mine for report in result.reports]
        errors = Counter(report.error or "none" for _, report in reports)
        named = sum(report.failed_rank == trial.victim for trial, report in reports)
        of = "-" if kind in HARMLESS else f"{named} of {len(reports)}"
        wrong = sum(bool(result.problems) for result in mine)
        slowest, ended = max(result.slowest_s for result in mine), max(result.exit_s for result in mine)
        shown = ", ".join(f"{name} {n}" for name, n in errors.most_common())
        lines.append(f"| {kind} | {len(mine)} | {wrong} | {shown} | {of} | {slowest:.2f} "
                     f"| {ended:.2f} |")  # fmt: skip
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m distkv.testing.trials", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=20, help="of each kind (default 20)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"default {','.join(KINDS)}")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--timeout-s", type=float, default=4.0, help="group.timeout_s, the deadline (default 4)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"there is no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false",
                      GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))  # fmt: skip
    source, results = random.Random(options.seed), []
    with tempfile.TemporaryDirectory(prefix="distkv-trials-") as name:
        random_model(Path(name) / "model")
        forks = context()
        for number in range(options.trials * len(kinds)):
            trial = random_trial(kinds[number % len(kinds)], options.ranks, options.timeout_s, source)
            result = run_trial(trial, Path(name), forks)
            results.append(result)
            where = f"{trial.kind} of rank {trial.victim} in step {trial.step} ({trial.place})"
            said = f"{result.reports[0].error}: {result.reports[0].text}" if result.reports else ""
            print(f"{number + 1:4} {where}: {result.slowest_s:.2f} s, {said}", flush=True)
            for problem in result.problems:
                print(f"     WRONG, {trial}: {problem}", flush=True)
    print("\n" + table(results))
    return 1 if any(result.problems for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
