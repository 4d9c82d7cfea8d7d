"""Every rank takes the same decision, in one collective a step, whatever happens to single ranks."""

from __future__ import annotations

from typing import Any

import pytest

from distkv.testing.processes import choose_backend, run_ranks
from multigpu_tests import cases

TIMEOUT_S = 240.0


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids=lambda size: f"{size}-ranks-{choose_backend(size)}")
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank saw in the cases that leave the group whole.

    Three ranks start fresh: forked ones have one seed of ``hash``, and would agree on the order of a set too.
    """
    found: list[dict[str, Any]] = run_ranks(
        cases.in_turn, request.param, timeout_s=TIMEOUT_S, backend="auto", fresh=request.param == 3
    )
    return found


def test_even_ranks_have_equal_page_tables(results: list[dict[str, Any]]) -> None:
    assert all(result["even"] == results[0]["even"] for result in results)


def test_uneven_ranks_decide_alike(results: list[dict[str, Any]]) -> None:
    def lengths(result: dict[str, Any]) -> list[dict[str, int]]:
        return [{request_id: len(table) for request_id, table in step.items()} for step in result["uneven"]["tables"]]

    for result in results:
        assert result["uneven"]["log"] == results[0]["uneven"]["log"]
        assert lengths(result) == lengths(results[0])
    if len(results) > 1:
        tables = [result["uneven"]["tables"] for result in results]
        assert any(table != tables[0] for table in tables), "the ranks were not uneven at all"


@pytest.mark.parametrize("case", ["even", "uneven"])
def test_one_collective_a_step_and_none_when_nothing_waits(results: list[dict[str, Any]], case: str) -> None:
    for result in results:
        seen = result[case]
        assert seen["ended"]
        assert seen["hits"] > 0
        assert seen["evicted"] > 0
        assert 0 < seen["needed"] < cases.STEPS
        entered = seen["needed"] if len(results) > 1 else 0
        assert seen["calls"] == ({"all_reduce": entered} if entered else {})
        assert seen["collectives"] == entered


def test_an_idle_group_is_silent_but_for_the_heartbeat(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["idle"] == {}
        assert result["beating"] == ({"all_reduce": 3} if len(results) > 1 else {})


def test_a_failure_in_begin_is_seen_by_all_and_the_group_goes_on(results: list[dict[str, Any]]) -> None:
    faulty = len(results) - 1
    for rank, result in enumerate(results):
        by = " by MemoryError" if rank == faulty else ""
        assert result["failing"] == ["step 1: ['0']", f"step 2: PeerFailed of rank {faulty}{by}", "step 3: ['1', '2']"]


def test_a_rank_started_differently_is_refused_by_field_and_rank() -> None:
    named = {"page_size": "cache.page_size", "key_function": "cache.key_function",
             "weights_version": "fingerprint.weights_version", "hash64": "key function"}
    for errors in run_ranks(cases.mismatches, 3, (2,), timeout_s=TIMEOUT_S, backend="auto"):
        for what, field in named.items():
            assert errors[what].startswith("GroupMismatch")
            assert field in errors[what]
            assert "rank 2:" in errors[what]
