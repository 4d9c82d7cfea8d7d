"""Groups in lockstep under random schedules: a rank that departs is found, and without its rules nobody notices."""

from __future__ import annotations

import random
from typing import Any

import pytest

from distkv import GroupDivergence, GroupMismatch, Message, StepResult
from distkv.testing.group import Disagreement
from distkv.testing.schedules import Schedule
from tests.simulation import rules_off

SEEDS = range(30)


def unequal(seed: int) -> Schedule:
    base = random.Random(seed).randint(8, 14)
    return Schedule(seed, agreement="lockstep", pools=[base, base + 4, base])


@pytest.mark.parametrize("seed", SEEDS[:5])
def test_unequal_pools_are_refused(seed: int) -> None:
    with pytest.raises(GroupMismatch, match=r"pool\.pages \(equal in lockstep\) differs"):
        unequal(seed)


def test_with_unequal_pools_ranks_would_decide_apart() -> None:
    apart = 0
    with rules_off.equal_pools(), rules_off.state_in_the_digest():
        for seed in SEEDS:
            try:
                unequal(seed).run()
            except (Disagreement, GroupDivergence, KeyError, AssertionError):
                apart += 1
    assert apart > 0


def lost_page(schedule: Schedule) -> tuple[int, list[Any], bool]:
    """A rank loses a cached page: in which step from then on that shows, what the ranks say, if they had gone apart."""
    rng, group, apart, steps = schedule.rng, schedule.group, False, 0
    for at in range(200):
        if at > 15 and group.lose_cached_page(1, rng):
            break
        schedule.step(requests=rng.randint(0, 2) if len(schedule.known_ids()) < 6 else 0, quiet=True)
        schedule.retire(schedule.ranks, schedule.step_number)
    else:
        pytest.fail("nothing was ever cached")
    while steps < 60:
        steps += 1
        plans = [schedule.plan() for _ in range(rng.randint(0, 2) if len(group.caches[0].waiting_ids) < 6 else 0)]
        group.begin(lambda cache, plans=plans: Message(requests=tuple(p.request(cache) for p in plans)))  # type: ignore[misc]
        outcomes = group.end()
        if not all(isinstance(outcome, StepResult) for outcome in outcomes):
            break
        apart = apart or len({tuple((s.id, s.cached_tokens) for s in outcome.ready) for outcome in outcomes
                              if isinstance(outcome, StepResult)}) > 1
        for request_id in sorted(set.intersection(*(set(cache.running) for cache in group.caches))):
            seed = rng.random()
            for rank in schedule.ranks:
                schedule.work(rank, request_id, seed)
    return steps, outcomes, apart


def small(seed: int) -> Schedule:
    return Schedule(seed, agreement="lockstep", pools=[10 + seed % 5] * 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_page_is_found_within_check_every_steps(seed: int) -> None:
    schedule = small(seed)
    steps, outcomes, _ = lost_page(schedule)
    assert steps <= schedule.check_every
    assert [type(outcome) for outcome in outcomes] == [GroupDivergence] * 3


def test_without_the_state_in_the_digest_ranks_go_on_apart() -> None:
    apart = 0
    with rules_off.state_in_the_digest():
        for seed in SEEDS:
            apart += lost_page(small(seed))[2]
    assert apart > 0
