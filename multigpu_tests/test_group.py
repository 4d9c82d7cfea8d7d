"""Groups of real processes: the one minimum, the exchange at start, and ranks that die, stop or start differently."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import distkv
from distkv import (
    CacheConfig,
    Config,
    Fingerprint,
    GroupConfig,
    GroupMismatch,
    GroupTimeout,
    Message,
    PeerLost,
    PoolConfig,
    PrefixCache,
    Request,
    TorchGroup,
)
from distkv.testing.processes import Outcome, choose_backend, run_outcomes, run_ranks

NEUTRAL = np.iinfo(np.int64).max
TIMEOUT_S = 240.0
FINGERPRINT = Fingerprint(model="none", weights_version="1")
CONFIG = Config(cache=CacheConfig(page_size=4), pool=PoolConfig(pages=32, check=True), group=GroupConfig(timeout_s=60))


def vectors(size: int, step: int, ranks: int) -> np.ndarray:
    """What the ranks send in one step, int64 [ranks, size]: all that a ballot may hold, and the ends of the range."""
    rng = np.random.default_rng((size, step))
    bounds = [(-3, 3), (-(1 << 62), 1 << 62), (NEUTRAL - 2, NEUTRAL)][step % 3]
    rows = rng.integers(*bounds, size=(ranks, size), endpoint=True)
    rows[rng.random((ranks, size)) < 0.2] = NEUTRAL
    rows[rng.random((ranks, size)) < 0.05] = -NEUTRAL - 1
    return rows


def minima(rank: int, world_size: int) -> list[np.ndarray]:
    """One minimum per step, of different sizes; every other one overlaps with work of this rank."""
    group = TorchGroup(timeout_s=60)
    assert (group.rank, group.size) == (rank, world_size)
    found = []
    for step, size in enumerate([1, 8, 29, 64, 1000, 3, 29, 29, 29, 3077]):
        mine = vectors(size, step, world_size)[rank].copy()
        ticket = group.start(mine, step)
        if step % 2:
            time.sleep(0.001 * rank)
        found.append(ticket.wait().copy())
        assert found[-1].dtype == np.int64
    return found


@pytest.fixture(scope="module")
def results(world_size: int) -> list[dict[str, Any]]:
    """What each rank saw in the cases that leave the group whole, in one start of the processes."""
    found: list[dict[str, Any]] = run_ranks(in_turn, world_size, timeout_s=TIMEOUT_S, backend="auto")
    return found


def in_turn(rank: int, world_size: int) -> dict[str, Any]:
    return {case.__name__: case(rank, world_size) for case in (minima, exchanges, reuse)}


def test_one_minimum_is_numpys(world_size: int, results: list[dict[str, Any]]) -> None:
    for result in results:
        for step, minimum in enumerate(result["minima"]):
            np.testing.assert_array_equal(minimum, vectors(len(minimum), step, world_size).min(axis=0))


def lengths(rank: int, world_size: int) -> list[int]:
    """How many bytes a rank sends in each exchange."""
    return [1, 1 + 1000 * rank, 7 - rank, 100_000 if rank == world_size - 1 else 1]


def exchanges(rank: int, world_size: int) -> list[list[bytes]]:
    group = TorchGroup(timeout_s=60)
    return [group.exchange(bytes([rank]) * length) for length in lengths(rank, world_size)]


def test_the_exchange_gives_every_ranks_bytes_by_rank(world_size: int, results: list[dict[str, Any]]) -> None:
    sent = [[bytes([rank]) * length for length in lengths(rank, world_size)] for rank in range(world_size)]
    for result in results:
        assert result["exchanges"] == [list(by_rank) for by_rank in zip(*sent, strict=True)]


def reuse(rank: int, world_size: int) -> list[tuple[int, int, str]]:
    """Two requests one after the other; rank r's pool is r pages larger, and the last rank loses a cached page."""
    pool = PoolConfig(pages=32 + rank, check=True)
    with_pool = Config(cache=CONFIG.cache, pool=pool, group=CONFIG.group)
    cache = PrefixCache(with_pool, FINGERPRINT, TorchGroup(timeout_s=60))
    assert cache.pool_pages == 32
    tokens = np.arange(42, dtype=np.int32)
    seen = []
    for number, n in enumerate((41, 42, 42)):
        chain = cache.chain(tokens[:n])
        result = cache.step(Message(requests=(Request(id=f"r{number}", chain=chain, output_limit=4),)))
        (sequence,) = result.ready
        local = cache.peek(chain)
        seen.append((sequence.cached_tokens, result.leftover, str(sequence.record.agreed)))
        assert local * 4 >= sequence.cached_tokens
        rest = n - sequence.cached_tokens
        sequence.open(rest)
        sequence.commit(rest)
        sequence.finish()
        if number == 1 and rank == world_size - 1:
            cache._books.index.drop(int(np.flatnonzero(cache._books.pool.indexed)[-1]))
    cache.close()
    # The group is the caller's and works on.
    left = torch.tensor([rank], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(left)
    assert int(left) == sum(range(world_size))
    return seen


def test_all_ranks_reuse_the_same_pages(results: list[dict[str, Any]]) -> None:
    """The page that one rank has lost is not used by any."""
    seen = [result["reuse"] for result in results]
    assert all(found == seen[0] for found in seen)
    assert [cached for cached, *_ in seen[0]] == [0, 40, 36]


def start_differently(rank: int, world_size: int) -> None:
    cache = CacheConfig(page_size=4 if rank == 0 else 8, queue_slots=4 + rank)
    PrefixCache(Config(cache=cache, pool=PoolConfig(pages=8 + rank)), FINGERPRINT, TorchGroup(timeout_s=60))


@pytest.mark.parametrize("ranks", [2, 4])
def test_agreed_fields_that_differ_end_the_start_on_every_rank(ranks: int) -> None:
    for outcome in run_outcomes(start_differently, ranks, timeout_s=TIMEOUT_S, backend="auto"):
        assert outcome.raised(GroupMismatch), outcome.describe()
        assert outcome.error is not None
        message = outcome.error.message
        assert "cache.page_size differs (rank 0: 4, rank 1: 8" in message
        assert "cache.queue_slots differs (rank 0: 4, rank 1: 5" in message
        assert "pool.pages" not in message


def lose_a_peer(rank: int, world_size: int, how: str) -> str:
    """The last rank ends or stops between two steps; the others go on and say what they notice."""
    cache = PrefixCache(CONFIG, FINGERPRINT, TorchGroup(timeout_s=3))
    for number in range(3):
        if number == 2 and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        cache.step(Message(requests=(Request(id=f"r{number}", chain=cache.chain([number]), output_limit=4),)))
    return "noticed nothing"


def lost_peers(ranks: int, hows: list[str]) -> dict[str, list[Outcome]]:
    """What became of the ranks in each way; over gloo at the same time, because most of it is waiting."""
    with ThreadPoolExecutor(len(hows) if choose_backend(ranks) == "gloo" else 1) as pool:
        runs = {how: pool.submit(run_outcomes, lose_a_peer, ranks, (how,), timeout_s=TIMEOUT_S, backend="auto")
                for how in hows}  # fmt: skip
        return {how: run.result() for how, run in runs.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_peer_that_is_gone_is_a_named_error(ranks: int) -> None:
    for how, outcomes in lost_peers(ranks, ["kill", "stop"]).items():
        check_survivors(how, ranks, outcomes)


def check_survivors(how: str, ranks: int, outcomes: list[Outcome]) -> None:
    *survivors, lost = outcomes
    assert lost.status == ("killed" if how == "kill" else "stopped")
    # A broken connection is known at once over gloo; a rank that stopped is known by the deadline alone, and a rank
    # that learned of it first may be gone before another one's deadline has passed.
    for survivor in survivors:
        assert survivor.raised(PeerLost) or survivor.raised(GroupTimeout), survivor.describe()
    kind = PeerLost if how == "kill" and choose_backend(ranks) == "gloo" else GroupTimeout
    assert any(survivor.raised(kind) for survivor in survivors)
    first = next(survivor for survivor in survivors if survivor.raised(kind))
    assert first.error is not None
    assert "step 2" in first.error.message or "step 3" in first.error.message
    assert f"on rank {first.rank}" in first.error.message


def subgroups(rank: int, world_size: int) -> int:
    """Two halves, each with a cache group of its own, made in one order on all ranks."""
    half = world_size // 2
    mine = None
    for first in (0, half):
        group = dist.new_group(list(range(first, first + half)))
        if first <= rank < first + half:
            mine = group
    assert mine is not None
    group = TorchGroup(mine, timeout_s=60)
    assert (group.rank, group.size) == (rank % half, half)
    return int(group.start(np.array([100 + rank]), 0).wait()[0])


def test_subgroups_do_not_mix() -> None:
    assert run_ranks(subgroups, 4, timeout_s=TIMEOUT_S, backend="auto") == [100, 100, 102, 102]


def test_the_package_is_the_one_of_this_checkout() -> None:
    """A suite that tests an installed copy instead proves nothing about the checkout."""
    from pathlib import Path

    assert Path(distkv.__file__).resolve().parents[1] == Path(__file__).resolve().parents[1]
