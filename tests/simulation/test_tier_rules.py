"""With any rule of the host tier switched off, a simulation fails, and for that reason; with the rule it is quiet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from distkv.testing.tier_schedules import TierSchedule
from tests.simulation import stage
from tests.simulation import tier_rules_off as off

WRONG_BYTES = "was matched but holds"
Rule = Callable[[], Any]

# A rule, what is seen without it, and the seed of a schedule that shows it: the search begins there.
SCHEDULES: list[tuple[Rule, str, int]] = [
    (off.fence, WRONG_BYTES, 4),
    (off.spill_event, WRONG_BYTES, 11),
    (off.load_after_spill, WRONG_BYTES, 54),
    (off.load_after_store, WRONG_BYTES, 7),
    (off.preemption_split, "are kept, of a share of", 1),
    (off.not_indexed_while_loading, WRONG_BYTES, 1),
    (off.orphans_live, WRONG_BYTES, 7),
    (off.agreed_wait_for_loads, "on rank 0", 10),
    (off.growth_first, "which wait to grow", 9),
    (off.committed_only, WRONG_BYTES, 2),
]
CASES: list[tuple[Callable[[], None], Rule, str]] = [
    (stage.opened_behind_holds, off.drop_before_open, "opening pages inside a reservation"),
    (stage.given_up_in_flight, off.readers_at_begin, WRONG_BYTES),
    (stage.read_twice, off.reader_count, WRONG_BYTES),
    (stage.reset_in_flight, off.generation_rule, WRONG_BYTES),
    (stage.device_reset_behind_loads, off.nothing_from_before_a_reset, WRONG_BYTES),
    (stage.retaken_before_commit, off.same_use, WRONG_BYTES),
    (stage.short_with_shared_pages, off.readmission, "more pages are promised than there are"),
]


def failure(seed: int, rule: Callable[[], Any] = nullcontext) -> str:
    """What the schedule of this seed raises without the rule; empty: nothing."""
    with rule():
        try:
            TierSchedule(seed).run()
        except Exception as error:  # noqa: BLE001  (what it is, the caller looks at)
            return str(error)
    return ""


@pytest.mark.parametrize(("rule", "symptom", "first"), SCHEDULES, ids=lambda value: getattr(value, "__name__", ""))
def test_without_the_rule_a_schedule_fails(rule: Rule, symptom: str, first: int) -> None:
    seed = next((seed for seed in range(first, first + 60) if symptom in failure(seed, rule)), None)
    assert seed is not None, f"60 schedules without {rule.__name__} and none showed {symptom!r}"
    assert failure(seed) == "", "the same schedule fails with the rule, too"


@pytest.mark.parametrize(("case", "rule", "symptom"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_without_the_rule_the_case_fails(case: Callable[[], None], rule: Rule, symptom: str) -> None:
    case()
    with rule(), pytest.raises(Exception, match=symptom):
        case()
