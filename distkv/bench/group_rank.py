"""One rank of ``distkv bench group``: the same measurements over any group. Also the program that mpirun starts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkv import (
    CacheConfig,
    Config,
    Fingerprint,
    Group,
    GroupConfig,
    Message,
    MpiGroup,
    PoolConfig,
    PrefixCache,
    Request,
    TorchGroup,
)

__all__ = ["Times", "measure_group", "torch_rank"]

_WARM = 20
_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Times:
    """Wall times of one rank, in nanoseconds, one for each repetition. ``issue`` and ``wait`` are the two halves."""

    total: list[int]
    issue: list[int]
    wait: list[int]


def measure_group(group: Group, sizes: list[int], n: int) -> dict[str, Any]:
    """Times of ``n`` minima for each size (numbers of int64), and of ``n`` whole steps of a cache with one request.

    Every rank calls it. Rank numbers are in the vectors, so that a result that is no minimum is found out.
    """
    found: dict[str, Any] = {"minima": {}}
    for size in sizes:
        vector, wanted = np.empty(size, np.int64), np.arange(size, dtype=np.int64)

        def collective(vector: Any = vector, wanted: Any = wanted) -> tuple[int, int, int]:
            vector[:] = wanted
            vector += group.rank
            begin = time.perf_counter_ns()
            ticket = group.start(vector, 0)
            issued = time.perf_counter_ns()
            result = ticket.wait()
            end = time.perf_counter_ns()
            if not np.array_equal(result, wanted):
                raise AssertionError(f"a minimum of {len(wanted)} elements is wrong on rank {group.rank}")
            return begin, issued, end

        found["minima"][str(size)] = vars(_repeat(collective, n))
    found["step"] = vars(_steps(group, n))
    return found


def _steps(group: Group, n: int) -> Times:
    """``begin_step`` and ``end_step`` with one waiting request of 4 pages, half of which are cached."""
    config = Config(cache=CacheConfig(page_size=16), pool=PoolConfig(pages=256),
                    group=GroupConfig(timeout_s=_TIMEOUT_S, heartbeat_s=0))
    cache = PrefixCache(config, Fingerprint(model="bench", weights_version="1"), group)
    rng, number = np.random.default_rng(5), 0

    def step() -> tuple[int, int, int]:
        nonlocal number
        number += 1
        prompt = np.concatenate([np.arange(32, dtype=np.int32), rng.integers(0, 1 << 20, 32, dtype=np.int32)])
        message = Message(requests=(Request(id=str(number), chain=cache.chain(prompt), output_limit=16),))
        begin = time.perf_counter_ns()
        cache.begin_step(message)
        issued = time.perf_counter_ns()
        (sequence,) = cache.end_step().ready
        end = time.perf_counter_ns()
        tokens = sequence.prompt_tokens - sequence.committed
        sequence.open(tokens)
        sequence.commit(tokens)
        sequence.finish()
        return begin, issued, end

    times = _repeat(step, n)
    if cache.stats().collectives != (n + _WARM if group.size > 1 else 0):
        raise AssertionError("a step took other than one collective")
    cache.close()
    return times


def _repeat(call: Callable[[], tuple[int, int, int]], n: int) -> Times:
    marks = [call() for _ in range(_WARM + n)][_WARM:]
    return Times(total=[end - begin for begin, _, end in marks], issue=[issued - begin for begin, issued, _ in marks],
                 wait=[end - issued for _, issued, end in marks])


def torch_rank(rank: int, world_size: int, sizes: list[int], n: int) -> dict[str, Any]:
    """A target for :func:`distkv.testing.run_ranks`: over the default process group."""
    return measure_group(TorchGroup(timeout_s=_TIMEOUT_S), sizes, n)


def main() -> int:
    """Under mpirun: arguments are sizes and repetitions as JSON; rank 0 prints every rank's times as JSON."""
    sizes, n = json.loads(sys.argv[1])
    group = MpiGroup(timeout_s=_TIMEOUT_S)
    mine = measure_group(group, sizes, n)
    told = group.exchange(json.dumps(mine).encode())
    if group.rank == 0:
        print(json.dumps([json.loads(data) for data in told]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
