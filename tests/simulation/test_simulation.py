"""Whole groups of simulated ranks: every schedule is quiet, and with any rule switched off one is seen to fail."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from distkv import GroupDivergence, Message, StepResult
from distkv.testing.schedules import Plan, Schedule, run_schedule
from distkv.testing.simulate import simulate
from distkv.testing.tier_schedules import TierSchedule
from tests.simulation import rules_off

SECONDS = float(os.environ.get("DISTKV_SIMULATION_SECONDS", "30"))
AT_LEAST = int(os.environ.get("DISTKV_SIMULATION_SCHEDULES", "200"))


EVENTS = (
    "hits", "peer failed", "reset in flight", "bump in flight", "lost", "abort", "grown", "skipped", "evicted",
    "refused", "overlapped", "pages retired", "in lockstep", "broken in lockstep",
    "read in", "short read-ins", "aborted while read in", "orphans", "loads overdue", "copies stalled", "slow links",
    "loads", "stores", "load failures", "store failures", "prefetched", "dropped", "suspended", "resumed",
    "resumed in flight", "preempted", "steps with kept pages", "growth waits", "grown after waiting",
    "forked", "not forked", "fork waits", "forked after waiting", "kept", "kept forked", "tails copied",
    "ended while its fork waited", "forked although the parent ended",
    *(f"reset of {scope}, {running}" for scope in ("all", "device", "host") for running in ("finish", "abort")),
)


def test_no_schedule_fails(capsys: pytest.CaptureFixture[str]) -> None:
    report = simulate(seconds=SECONDS, at_least=AT_LEAST)
    with capsys.disabled():
        print(f"\nsimulation: {report}")
    assert not report.failures, "\n".join(f"seed {seed}:\n{text}" for seed, text in report.failures.items())
    assert report.schedules >= AT_LEAST
    for event in EVENTS:
        assert report.counts[event] > 0, f"the schedules never came to {event!r}"


def test_a_seed_gives_the_same_schedule_again() -> None:
    assert run_schedule(7) == run_schedule(7)


# A rule, what is seen without it, and the seed of a schedule that shows it: the search begins there.
RULES: list[tuple[Callable[[], Any], str, int]] = [
    (rules_off.agreed_room, "Disagreement", 0),
    (rules_off.cap_on_holds, "do not cover the reservations", 1),
    (rules_off.commit_order, "both free and used", 23),
    (rules_off.admitted_on_paper, "Disagreement", 1),
    (rules_off.epoch_rule, "was matched but holds", 11),
    (rules_off.agreed_leftover, "were granted on some ranks only", 1),
    (rules_off.agreed_entry, "GroupTimeout", 0),
    (rules_off.no_growth_in_flight, "more pages are promised than there are", 7),
    (rules_off.live_until_retired, "still in flight", 1),
    (rules_off.copy_on_write, "was matched but holds", 0),
    (rules_off.tail_reserve, "opening pages inside a reservation", 38),
    (rules_off.tail_owners, "shared tails are counted as", 0),
    (rules_off.fork_leftover, "more pages are promised than there are", 0),
    (rules_off.parked_parents, "Disagreement", 8),
    (rules_off.fence_before_copies, "was matched but holds", 35),
]
WITH_A_TIER = {rules_off.fence_before_copies}


def failure(seed: int, rule: Callable[[], Any] = nullcontext, tier: bool = False) -> str:
    """The traceback of this seed's schedule, without the rule; empty: it does not fail. ``tier``: with a host tier."""
    with rule():
        try:
            (TierSchedule if tier else Schedule)(seed).run()
        except Exception:  # noqa: BLE001  (a failure of any kind is what we look for)
            return traceback.format_exc()
    return ""


@pytest.mark.parametrize(("rule", "symptom", "first"), RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_without_the_rule_the_simulation_fails(rule: Callable[[], Any], symptom: str, first: int) -> None:
    tier = rule in WITH_A_TIER
    seed = next((seed for seed in range(first, first + 100) if symptom in failure(seed, rule, tier)), None)
    assert seed is not None, f"100 schedules without {rule.__name__} and none showed {symptom!r}"
    assert failure(seed, tier=tier) == "", "the same seed fails with the rule, too"


def missed_abort(seed: int) -> list[Any]:
    """One rank is not told of an abort that the others apply; what each rank then says of the next step."""
    schedule = Schedule(seed, agreement="minimum")
    while schedule.group.size == 1:
        seed += 1000
        schedule = Schedule(seed, agreement="minimum")
    for _ in range(10):
        schedule.step(requests=2)
    while not schedule.known_ids():
        schedule.step(requests=1)
    victim = schedule.rng.choice(schedule.known_ids())
    deaf = schedule.rng.choice(schedule.ranks)
    for rank in schedule.ranks:
        if rank != deaf:
            schedule.group.caches[rank].abort(victim)
    plan = Plan("new", (2, 2, 2), 1, None, None, None, True, True)
    schedule.group.begin(lambda cache: Message(requests=(plan.request(cache),)))
    return schedule.group.end()


@pytest.mark.parametrize("seed", range(30))
def test_a_missed_call_is_noticed_by_all_in_the_same_step(seed: int) -> None:
    outcomes = missed_abort(seed)
    assert all(isinstance(outcome, GroupDivergence) for outcome in outcomes), outcomes
    assert len({outcome.step for outcome in outcomes}) == 1


def test_without_the_rolling_digest_ranks_go_on_apart() -> None:
    apart = 0
    with rules_off.rolling_digest():
        for seed in range(30):
            outcomes = missed_abort(seed)
            assert all(isinstance(outcome, StepResult) for outcome in outcomes)
            decided = {(tuple(s.id for s in o.ready), tuple(w.request_id for w in o.waiting)) for o in outcomes}
            apart += len(decided) > 1
    assert apart > 0
