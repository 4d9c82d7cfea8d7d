"""Groups with sliding, rolling and second labels: every schedule is quiet, and with a rule switched off one fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from distkv.testing.simulate import simulate
from distkv.testing.window_schedules import run_window_schedule
from tests.simulation import window_rules_off as off

SECONDS = float(os.environ.get("DISTKV_WINDOW_SIMULATION_SECONDS", "30"))
AT_LEAST = int(os.environ.get("DISTKV_WINDOW_SIMULATION_SCHEDULES", "300"))

EVENTS = (
    "hits with a window", "lower boundaries", "hits behind what was given up", "in two pools", "without main",
    "reason: window", "reason: group minimum", "reason: load failed", "window page lost", "window page lost in flight",
    "window pages evicted", "label stores", "label loads", "label load failures", "label store failures",
    "label given up", "label dropped", "protected", "released", "waited for passes", "forked", "kept forked",
    "tails of labels copied", "suspended", "resumed", "read in", "short read-ins",
    "peer failed", "refused", "grown", "reset in flight", "bump in flight", "overlapped", "in lockstep", "by minimum",
    "loads overdue", "copies stalled", "orphans",
)


def test_no_schedule_fails(capsys: pytest.CaptureFixture[str]) -> None:
    report = simulate(seconds=SECONDS, at_least=AT_LEAST, run=run_window_schedule)
    with capsys.disabled():
        print(f"\nsimulation of labels and windows: {report}")
    assert not report.failures, "\n".join(f"seed {seed}:\n{text}" for seed, text in report.failures.items())
    assert report.schedules >= AT_LEAST
    for event in EVENTS:
        assert report.counts[event] > 0, f"the schedules never came to {event!r}"


def test_a_seed_gives_the_same_schedule_again() -> None:
    assert run_window_schedule(5) == run_window_schedule(5)


# A rule, what is seen without it, and the seed of a schedule that shows it: the search begins there.
RULES: list[tuple[Callable[[], Any], str, int]] = [
    (off.whole_window, "holds nothing: it was given up", 0),
    (off.no_live_discount, "more pages are promised than there are", 8),
    (off.counted_free, "other owner counts", 10),
    (off.given_up_until_retired, "still in flight", 13),
    (off.each_boundary_by_itself, "was matched but holds", 10),
    (off.all_sliding_labels, "was matched but holds", 5),
]


def failure(seed: int, rule: Callable[[], Any] = nullcontext) -> str:
    """What the schedule of this seed raises without the rule; empty: nothing."""
    with rule():
        try:
            run_window_schedule(seed)
        except Exception as error:  # noqa: BLE001  (what it is, the caller looks at)
            return str(error)
    return ""


@pytest.mark.parametrize(("rule", "symptom", "first"), RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_without_the_rule_a_schedule_fails(rule: Callable[[], Any], symptom: str, first: int) -> None:
    seed = next((seed for seed in range(first, first + 40) if (text := failure(seed, rule)) and symptom in text), None)
    assert seed is not None, f"40 schedules without {rule.__name__} and none showed {symptom!r}"
    assert failure(seed) == "", "the same schedule fails with the rule, too"
