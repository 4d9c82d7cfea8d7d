"""What random schedules have found, in as few calls as show it. The bytes are modelled: see tests.simulation.stage."""

from __future__ import annotations

import pytest

from distkv import PeerFailed
from tests.simulation.stage import A, B, Stage, tail_on_host


def test_growth_granted_by_a_step_commutes_with_the_calls_in_flight() -> None:
    stage = Stage([8, 8], [0, 0])
    stage.step(("a", [1], 7), ("b", [2], 7))
    assert stage.group.each(lambda cache: cache.grow(cache.running["a"], 2, wait=True)) == [False, False]
    stage.group.each(lambda cache: cache.abort("b"))
    stage.begin()
    stage.computes("a", 2, ranks=(0,))
    outcomes = stage.group.end()
    assert [[s.id for s in outcome.grown] for outcome in outcomes] == [["a"], ["a"]]  # type: ignore[union-attr]
    stage.computes("a", 2, ranks=(1,))
    assert not stage.step(("c", [3], 1)).waiting  # the digests are equal


@pytest.mark.parametrize("lookups", [0, 1, 2])
def test_the_group_goes_on_after_a_lookup_that_failed_while_prefetching(lookups: int) -> None:
    stage = tail_on_host(8, 8, B, prefetch=True)
    stage.step(("z", [9], 12))
    for request in (("a", A[:7], 1), ("b", B, 1)):
        assert stage.step(request).waiting[0].request_id == "a"
    stage.group.fail_next_begin(0, lookups)
    stage.begin()
    assert [type(outcome) for outcome in stage.group.end()] == [PeerFailed, PeerFailed]
    assert [w.request_id for w in stage.step().waiting] == ["a", "b"]
