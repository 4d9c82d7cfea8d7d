"""Forks on several ranks: pages copied on the GPU in the order of its stream where there is one, else by numpy."""

from __future__ import annotations

from typing import Any

import pytest

from distkv.testing.processes import choose_backend, run_ranks
from multigpu_tests import fork_cases


@pytest.fixture(scope="module", params=[1, 2], ids=lambda size: f"{size}-ranks-{choose_backend(size)}")
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_ranks(fork_cases.forks, request.param, timeout_s=120.0, backend="auto")
    return found


def test_ranks_fork_alike(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["log"] == results[0]["log"]


def test_tails_were_copied_and_every_sequence_had_its_own_bytes(results: list[dict[str, Any]]) -> None:
    for result in results:
        stats = result["stats"]
        assert result["copies"] and result["waited"]
        assert stats.forked > result["waited"]
        assert stats.stores, "and copies were written where pages had been spilled"
        assert stats.pages_live == stats.pages_reserved == stats.pages_held == 0


def test_one_collective_a_step(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["calls"] == ({"all_reduce": result["stats"].collectives} if result["stats"].collectives else {})
