"""Timing of short calls: thread CPU time, because machines are shared, with the tail beside the median."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from time import thread_time_ns
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """Thread CPU times of ``n`` equal calls, in microseconds."""

    median: float
    mean: float
    p99: float
    n: int

    @classmethod
    def of(cls, nanoseconds: list[int]) -> Sample:
        """The sample of these times; p99 is the smallest time that 99 % of them do not exceed."""
        times = sorted(nanoseconds)
        p99 = times[math.ceil(0.99 * len(times)) - 1]
        return cls(median(times) / 1e3, fmean(times) / 1e3, p99 / 1e3, len(times))


def measure(call: Callable[[T], object], before: Callable[[], T], n: int, *,
            after: Callable[[], object] | None = None, warm: int = 3) -> Sample:
    """Times ``call(before())`` ``n`` times, after ``warm`` calls that are not counted. Only ``call`` is timed.

    What a call returns is kept until the clock has stopped, so that giving it back is not charged.
    """
    times = []
    for i in range(warm + n):
        given = before()
        start = thread_time_ns()
        kept = call(given)
        end = thread_time_ns()
        del kept, given
        if after is not None:
            after()
        if i >= warm:
            times.append(end - start)
    return Sample.of(times)


def repeat(call: Callable[[], object], n: int, warm: int = 3) -> Sample:
    """Times ``call()`` ``n`` times."""
    return measure(lambda _: call(), lambda: None, n, warm=warm)


@contextmanager
def settled() -> Iterator[None]:
    """What exists now is left out of garbage collections, which go on: as an engine does once it has started."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
