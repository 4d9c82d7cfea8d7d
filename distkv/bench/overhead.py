"""The guard for work without reuse: what the cache adds to a step when every prompt is new.

A loop of steps, up to 15 sequences decoding, the pool full, so that every new page has to be taken from a cached one.
Every second step takes in and prefills one new prompt of 2,048 tokens, and one that is done leaves. *Off* is the same
loop with requests that neither read nor write and whose names were made outside the clock; pages are allocated in
both, because a paged engine does that with or without a cache. The difference is what the cache costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from time import thread_time_ns

import numpy as np

from distkv.bench.rows import Row
from distkv.bench.timing import settled
from distkv.bench.workloads import Sizes, new_cache, tokens
from distkv.cache import PrefixCache
from distkv.errors import InvariantError
from distkv.request import Message, Request
from distkv.sequence import Sequence

DECODE_MS = 10.0
"""A decoding step: about what a model of 7 to 8 billion parameters takes on one data-centre GPU."""
PREFILL_TOKENS_PER_MS = 50.0
"""Prefill of such a model at the peak of such a GPU: 2 x 8e9 operations a token at 8e14 a second."""
PROMPT, RUNNING = 2_048, 16


def without_reuse(sizes: Sizes) -> Iterator[Row]:
    """The cost of the cache in both kinds of step, in microseconds and as a share of the step."""
    with settled():
        on, off = _loop(sizes, cached=True), _loop(sizes, cached=False)
    prefill_ms = DECODE_MS + PROMPT / PREFILL_TOKENS_PER_MS
    for kind, step_ms in (("with a new prompt", prefill_ms), ("that decodes", DECODE_MS)):
        cost = fmean(on[kind]) - fmean(off[kind])
        note = (f"means of {len(on[kind])} steps: with the cache {fmean(on[kind]):.0f} us, without "
                f"{fmean(off[kind]):.0f} us; within 1 % of every step of more than {max(0.0, cost) / 10:.1f} ms")
        yield Row(name=f"0 % reuse: the cache adds to a step {kind}", unit="us", value=cost, note=note)
        yield Row(name=f"0 % reuse: share of a step {kind}, {step_ms:.0f} ms", unit="%", value=cost / step_ms / 10,
                  target=1)
    every = fmean(on["that decodes"])
    yield Row(name=f"every call of a step that decodes, {RUNNING - 1} sequences", unit="us", value=every,
              note="page allocation and all: what a paged engine has to do anyway is in it")


def _loop(sizes: Sizes, *, cached: bool) -> dict[str, list[float]]:
    """Microseconds of each step, by kind."""
    pages = 2 * (RUNNING + 1) * -(-(PROMPT + 2 * RUNNING) // sizes.page_size)
    cache, rng = new_cache(pages, sizes.page_size), np.random.default_rng(31)
    running: list[Sequence] = []
    times: dict[str, list[float]] = {"with a new prompt": [], "that decodes": []}
    warm = 8 * RUNNING  # the pool is full by then
    for number in range(warm + max(4 * RUNNING, 4 * sizes.repeats)):
        new = number % 2 == 0
        prompt, ids = tokens(rng, PROMPT), tokens(rng, RUNNING).tolist()
        chain = cache.chain(prompt) if new and not cached else None
        start = thread_time_ns()
        message = Message()
        if new:
            request = Request(id=str(number), chain=chain or cache.chain(prompt), output_limit=2 * RUNNING + 1,
                              read=cached, write=cached)
            message = Message(requests=(request,))
        _step(cache, message, running, ids)
        end = thread_time_ns()
        if number >= warm:
            times["with a new prompt" if new else "that decodes"].append((end - start) / 1e3)
    if cached and not cache.stats().evicted:
        raise InvariantError("the pool was never full, so nothing was measured of eviction")
    return times


def _step(cache: PrefixCache, message: Message, running: list[Sequence], ids: list[int]) -> None:
    """One step of an engine: what is running decodes a token, what is new is prefilled, and the oldest may leave."""
    ready = cache.step(message).ready
    for sequence in running:
        sequence.open(1)
        sequence.commit(1)
    for sequence in ready:
        sequence.open(sequence.prompt_tokens - sequence.committed)
        sequence.commit(sequence.prompt_tokens - sequence.committed)
        running.append(sequence)
    for sequence, token in zip(running, ids, strict=False):
        sequence.append([token])
    if len(running) == RUNNING:
        running.pop(0).finish()
