"""What a second tier adds to the steps of an engine, part by part: the same loop of steps with and without it.

Up to 15 sequences decode; every second step one new prompt of 2,048 tokens comes and the oldest sequence leaves. The
pool is full, so every new page drives out a cached one. With a tier these pages are spilled; if the prompts come back,
they are loaded. With finish the tier has room for all: a full one stores nothing ahead. Copies have ended at the next
step and move nothing: what is timed is bookkeeping, and no thread waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean
from time import thread_time_ns
from typing import Literal

import numpy as np

from distkv.bench.overhead import PROMPT, RUNNING
from distkv.bench.rows import markdown, number
from distkv.bench.tier_books import InstantCopies
from distkv.bench.timing import Sample, settled
from distkv.bench.workloads import FINGERPRINT, Sizes, tokens
from distkv.cache import PrefixCache
from distkv.config import CacheConfig, Config, HostConfig, PoolConfig
from distkv.errors import InvariantError
from distkv.pages import Pages
from distkv.request import Message, Request
from distkv.sequence import Sequence

__all__ = ["StepCost", "measure", "table"]

PARTS = ("begin", "end", "fence", "open", "commit", "finish")
"""Of a step, in this order. ``commit`` has ``append`` in it."""
VARIANTS = ("without", "evict", "finish")
"""Without a tier, and with one by its write policy."""

Variant = Literal["without", "evict", "finish"]


@dataclass(slots=True)
class StepCost:
    """Nanoseconds of every step by part, and the pages that were spilled and loaded in them."""

    workload: str
    variant: Variant
    parts: dict[str, list[int]] = field(default_factory=lambda: {part: [] for part in PARTS})
    stored: int = 0
    loaded: int = 0
    cached_tokens: int = 0

    @property
    def steps(self) -> int:
        """How many steps were measured."""
        return len(self.parts["begin"])

    @property
    def us(self) -> float:
        """Microseconds of a step: the mean, as what moves pages does so in every second one."""
        return sum(self.part_us(part) for part in PARTS)

    @property
    def fence(self) -> Sample:
        """The calls of fence alone."""
        return Sample.of(self.parts["fence"])

    @property
    def pages(self) -> float:
        """Pages that were spilled or loaded in a step."""
        return (self.stored + self.loaded) / self.steps

    def part_us(self, part: str) -> float:
        """Microseconds of one part of a step, the mean."""
        return fmean(self.parts[part]) / 1e3

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        fence = self.fence
        return {"workload": self.workload, "variant": self.variant, "steps": self.steps, "us": self.us,
                "parts_us": {part: self.part_us(part) for part in PARTS}, "stored": self.stored,
                "loaded": self.loaded, "cached_tokens": self.cached_tokens,
                "fence_us": {"median": fence.median, "mean": fence.mean, "p99": fence.p99}}


def measure(sizes: Sizes) -> list[StepCost]:
    """Both workloads by all variants, which take turns step by step."""
    return [cost for workload in ("new prompts", "prompts that come back") for cost in _measured(sizes, workload)]


def _measured(sizes: Sizes, workload: str) -> list[StepCost]:
    each = -(-(PROMPT + 2 * RUNNING) // sizes.page_size)
    pool, back = 2 * (RUNNING + 1) * each, 4 * (RUNNING + 1)
    warm = 4 * back  # every prompt came once and was driven out
    steps = warm + max(4 * RUNNING, 4 * sizes.repeats)
    hosts = {"without": 0, "evict": 2 * back * each, "finish": steps * each}  # a full tier stores nothing ahead
    loops = [_Loop(sizes, workload, variant, pool, hosts[variant]) for variant in VARIANTS]  # type: ignore[arg-type]
    rng = np.random.default_rng(31)
    prompts = [tokens(rng, PROMPT) for _ in range(back)]
    with settled():
        for number_ in range(steps):
            prompt = None
            if number_ % 2 == 0:
                prompt = prompts[number_ // 2 % back] if workload != "new prompts" else tokens(rng, PROMPT)
            if number_ == warm:
                for loop in loops:
                    loop.count_from_here()
            for loop in loops:
                loop.step(str(number_), prompt)
    return [loop.result() for loop in loops]


class _Loop:
    """One cache, what runs on it, and what its steps took."""

    def __init__(self, sizes: Sizes, workload: str, variant: Variant, pool: int, host: int) -> None:
        tier = HostConfig() if variant == "without" else HostConfig(pages=host, write_policy=variant)
        config = Config(cache=CacheConfig(page_size=sizes.page_size), pool=PoolConfig(pages=pool), host=tier)
        self.cache = PrefixCache(config, FINGERPRINT, copies=InstantCopies() if tier.configured else None)
        self.running: list[Sequence] = []
        self.cost = StepCost(workload, variant)
        self._before = self.cache.stats()

    def count_from_here(self) -> None:
        """What came before was for the pool to be full."""
        self.cost.parts = {part: [] for part in PARTS}
        self._before = self.cache.stats()

    def step(self, name: str, prompt: Pages | None) -> None:
        """One step of an engine: what runs decodes a token, what is new is prefilled, and the oldest may leave."""
        message = Message()
        if prompt is not None:
            request = Request(id=name, chain=self.cache.chain(prompt), output_limit=2 * RUNNING + 1)
            message = Message(requests=(request,))
        cache, clock = self.cache, thread_time_ns
        times = [clock()]
        cache.begin_step(message)
        times.append(clock())
        ready = cache.end_step().ready
        times.append(clock())
        cache.fence()
        times.append(clock())
        batch = [(sequence, 1) for sequence in self.running]
        batch += [(sequence, sequence.prompt_tokens - sequence.committed) for sequence in ready]
        for sequence, n in batch:
            sequence.open(n)
        times.append(clock())
        for sequence, n in batch:
            sequence.append([7])
            sequence.commit(n)
        times.append(clock())
        self.running += ready
        if len(self.running) == RUNNING:
            self.running.pop(0).finish()
        times.append(clock())
        for part, begun, ended in zip(PARTS, times, times[1:], strict=False):
            self.cost.parts[part].append(ended - begun)

    def result(self) -> StepCost:
        """What was counted; raises InvariantError if the workload was not what it says."""
        before, now, cost = self._before, self.cache.stats(), self.cost
        cost.stored, cost.loaded = now.stores - before.stores, now.loads - before.loads
        cost.cached_tokens = now.cached_tokens - before.cached_tokens
        tier, back = cost.variant != "without", cost.workload != "new prompts"
        if not now.evicted > before.evicted or bool(cost.loaded) != (tier and back) or (cost.stored and not tier):
            raise InvariantError(f"{cost.workload}, {cost.variant}: {now.evicted - before.evicted} pages were evicted, "
                                 f"{cost.stored} stored and {cost.loaded} loaded: nothing to measure")
        self.cache.close()
        return cost


def table(found: list[StepCost]) -> str:
    """Microseconds of a step by part, and what the tier adds, by step and by page that was moved."""
    head = ["microseconds of a step, mean", "tier", *PARTS, "all", "the tier adds", "pages moved", "adds a page",
            "fence: p99"]
    return markdown(head, list(_lines(found)))


def _lines(found: list[StepCost]) -> Iterator[list[str]]:
    without = {cost.workload: cost.us for cost in found if cost.variant == "without"}
    for cost in found:
        adds = cost.us - without[cost.workload]
        has = cost.variant != "without"
        yield [cost.workload, cost.variant if has else "none", *(number(cost.part_us(part)) for part in PARTS),
               number(cost.us), number(adds) if has else "", number(cost.pages),
               number(adds / cost.pages) if cost.pages else "", number(cost.fence.p99)]
