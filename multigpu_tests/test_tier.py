"""The host tier on several ranks: over NCCL with CUDA's streams and pinned memory where there are GPUs, else over gloo
with threads."""

from __future__ import annotations

from typing import Any

import pytest

from distkv.testing.processes import choose_backend, run_ranks
from multigpu_tests import tier_cases


@pytest.fixture(scope="module", params=[(2, "evict"), (4, "finish")],
                ids=lambda param: f"{param[0]}-ranks-{choose_backend(param[0])}-{param[1]}")
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    size, policy = request.param
    found: list[dict[str, Any]] = run_ranks(tier_cases.tier, size, (policy,), timeout_s=120.0, backend="auto")
    return found


def test_ranks_decide_alike_whatever_their_tiers_hold(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["log"] == results[0]["log"]


def test_pages_left_and_came_back(results: list[dict[str, Any]]) -> None:
    """With the bytes that they had: the ranks compare them whenever a sequence gets ready, and when it ends."""
    for rank, result in enumerate(results):
        stats = result["stats"]
        assert stats.stores and stats.loads and stats.host_tokens and stats.suspended and stats.short_read_ins
        assert bool(stats.load_failures) == (rank == 1)
        assert stats.pages_live == stats.pages_reserved == stats.pages_held == stats.host_kept == 0


def test_one_collective_a_step(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["calls"] == {"all_reduce": result["stats"].collectives}


def test_the_copies_are_those_of_the_device(results: list[dict[str, Any]]) -> None:
    for result in results:
        on_gpu = result["device"] == "cuda"
        assert result["engine"] == ("CudaCopies" if on_gpu else "ThreadedCopies")
        assert result["pinned"] == on_gpu
