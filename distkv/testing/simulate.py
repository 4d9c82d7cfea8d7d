"""Runs many random schedules over simulated groups: ``python -m distkv.testing.simulate --seconds 90 --at-least 300``.

Prints how many schedules ran and what happened in them, and the seed of every one that failed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from distkv.testing.schedules import run_schedule
from distkv.testing.window_schedules import run_window_schedule

_BATCH = 10
Run = Callable[[int], "Counter[str]"]
"""Runs the schedule of a seed and returns what happened in it."""


@dataclass(slots=True)
class Report:
    """What a simulation saw."""

    schedules: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    """Traceback by seed."""

    def __str__(self) -> str:
        seen = ", ".join(f"{name} {n:,}" for name, n in sorted(self.counts.items()))
        return f"{self.schedules:,} schedules, {len(self.failures)} failed ({seen})"


def run_seeds(first: int, stop: int, run: Run = run_schedule) -> Report:
    """Runs the schedules of seeds ``first .. stop - 1``; a failure is noted and the rest goes on."""
    report = Report()
    for seed in range(first, stop):
        report.schedules += 1
        try:
            report.counts += run(seed)
        except Exception:  # noqa: BLE001  (a failure of any kind is what we look for)
            report.failures[seed] = traceback.format_exc()
    return report


def _batch(first: int, run: Run) -> Report:
    return run_seeds(first, first + _BATCH, run)


def simulate(*, seconds: float, at_least: int, at_most: int | None = None, first_seed: int = 0,
             workers: int | None = None, progress: bool = False, run: Run = run_schedule) -> Report:
    """As many schedules as fit into ``seconds``, at least ``at_least`` and at most ``at_most``, over all cores.

    ``run``: what runs the schedule of a seed.
    """
    total, began, printed = Report(), time.monotonic(), 0.0
    workers = workers or os.cpu_count() or 1
    seeds = iter(range(first_seed, first_seed + at_most if at_most is not None else sys.maxsize, _BATCH))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_batch, seed, run) for seed in itertools.islice(seeds, 2 * workers)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for report in (future.result() for future in done):
                total.schedules += report.schedules
                total.counts += report.counts
                total.failures |= report.failures
            elapsed = time.monotonic() - began
            if progress and elapsed - printed > 10:
                printed = elapsed
                print(f"{elapsed:6.0f} s  {total.schedules:,} schedules, {len(total.failures)} failed", flush=True)
            if not total.failures and (elapsed < seconds or total.schedules < at_least):
                running |= {pool.submit(_batch, seed, run) for seed in itertools.islice(seeds, len(done))}
    return total


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m distkv.testing.simulate", description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="run for about so long (default 90)")
    parser.add_argument("--at-least", type=int, default=300, help="but at least so many schedules (default 300)")
    parser.add_argument("--at-most", type=int, help="and at most so many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="processes (default: one per core)")
    parser.add_argument("--windows", action="store_true", help="groups with sliding, rolling and second labels")
    options = parser.parse_args()
    report = simulate(seconds=options.seconds, at_least=options.at_least, at_most=options.at_most,
                      first_seed=options.first_seed, workers=options.workers, progress=True,
                      run=run_window_schedule if options.windows else run_schedule)
    print(report)
    for seed, text in sorted(report.failures.items()):
        print(f"\nseed {seed}:\n{text}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
