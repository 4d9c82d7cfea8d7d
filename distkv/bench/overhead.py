"""The guard for work without reuse: what the cache adds to a step when every prompt is new.

One step: one new prompt of 2,048 tokens comes in and is prefilled, 15 others are decoding, one of them ends, and the
pool is full, so that every new page has to be taken from a cached one. *Off* is the same engine loop with requests
that neither read nor write and whose names were made outside the clock; page allocation is in both, because a paged
engine does that with or without a cache. The difference is what the cache costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import thread_time_ns

import numpy as np

from distkv.bench.rows import Row
from distkv.bench.timing import Sample, settled
from distkv.bench.workloads import Sizes, new_cache, tokens
from distkv.request import Message, Request
from distkv.sequence import Sequence

STEP_MS = 10.0
"""The step that the share is taken of: a decoding step of a model of 7 to 8 billion parameters on one data-centre GPU
takes about this, and one with a prefill of 2,048 tokens ten times as much. The row below gives the cost itself, so
that any other step can be put in."""
PROMPT, OUTPUT = 2_048, 16


def without_reuse(sizes: Sizes) -> Iterator[Row]:
    """The cost of the cache per step without reuse, in microseconds and as a share of a step of ``STEP_MS``."""
    steps = max(4 * OUTPUT, 2 * sizes.repeats)
    with settled():
        on, off = _steps(sizes, steps, cached=True), _steps(sizes, steps, cached=False)
    cost = on.mean - off.mean
    note = f"mean of {steps} steps with the cache {on.mean:.0f} us, without {off.mean:.0f} us, page allocation in both"
    yield Row(name="cache with 0 % reuse, added to a step", unit="us", value=cost, note=note)
    yield Row(name=f"the same, as a share of a step of {STEP_MS:.0f} ms", unit="%", value=cost / STEP_MS / 10, target=1,
              note=f"within 1 % of every step that takes more than {cost / 10:.1f} ms")


def _steps(sizes: Sizes, steps: int, *, cached: bool) -> Sample:
    pages = 2 * (OUTPUT + 1) * -(-(PROMPT + OUTPUT) // sizes.page_size)
    cache = new_cache(pages, sizes.page_size)
    rng = np.random.default_rng(31)
    running: list[Sequence] = []
    times = []
    for step in range(steps + 4 * OUTPUT):
        prompt = tokens(rng, PROMPT)
        ids = tokens(rng, OUTPUT)
        chain = None if cached else cache.chain(prompt)
        start = thread_time_ns()
        chain = chain or cache.chain(prompt)
        request = Request(id=str(step), chain=chain, output_limit=OUTPUT, read=cached, write=cached)
        (new,) = cache.step(Message(requests=(request,))).ready
        new.open(PROMPT)
        for sequence in running:
            sequence.open(1)
        new.commit(PROMPT)
        for sequence in running:
            sequence.commit(1)
        running.append(new)
        for sequence, token in zip(running, ids, strict=False):
            sequence.append([int(token)])
        if len(running) == OUTPUT:
            running.pop(0).finish()
        end = thread_time_ns()
        if step >= 4 * OUTPUT:  # the pool is full by then
            times.append(end - start)
    if cached and not cache.stats().evicted:
        raise AssertionError("the pool was never full")
    return Sample.of(times)
