"""The tier under the reference engine, one rank: what a host hit is worth, and how long a pass waits for spills.

Times are the wall clock's, since copies are the work of other threads or of the GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal

import numpy as np

from distkv.bench.rows import markdown, number
from distkv.config import CacheConfig, HostConfig, PoolConfig
from distkv.engine.config import EngineConfig, ModelConfig, ServeConfig
from distkv.engine.engine import Engine
from distkv.engine.model import Model, load_model
from distkv.engine.requests import Completion, Prompt
from distkv.errors import DistKVError

__all__ = ["FirstToken", "Waits", "first_tokens", "table", "waits", "waits_table"]

WAYS = ("recompute", "host hit", "device hit")

_OUTPUT = 8
_NEW = 64
"""Tokens of a request behind its prefix."""


@dataclass(slots=True)
class FirstToken:
    """Seconds to the first token of a prompt whose first ``tokens`` were computed before, by where their pages are."""

    tokens: int
    page_bytes: int
    pages: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def best(self, way: str) -> float:
        """Seconds: the least of all, since machines are shared."""
        return min(self.seconds[way])

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"tokens": self.tokens, "pages": self.pages, "page_bytes": self.page_bytes, "seconds": self.seconds,
                "best_s": {way: self.best(way) for way in WAYS}}


@dataclass(frozen=True, slots=True)
class Waits:
    """What the fences of an engine waited for, with a pool so small that every new page drives out another one."""

    policy: str
    steps: int
    seconds: float
    """Of all steps together."""
    fences: tuple[float, ...]
    """Seconds of each fence, one for each pass."""
    spilled: int

    @property
    def p99(self) -> float:
        """Seconds that 99 % of the fences took at most."""
        return sorted(self.fences)[math.ceil(0.99 * len(self.fences)) - 1]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"policy": self.policy, "steps": self.steps, "seconds": self.seconds, "fences_s": self.fences,
                "spilled": self.spilled, "p99_s": self.p99}


def first_tokens(config: ModelConfig, page_size: int, prompts: Sequence[int], repeat: int) -> list[FirstToken]:
    """All three ways by turns: with nothing cached, with the pages on the device, and with the pages on the host.

    The host's copies are made at finish, and to have the pages there alone the device is emptied of what is cached.
    """
    model, found = load_model(config), []
    for n in prompts:
        pages = 2 * -(-(n + _NEW + 1) // page_size)
        host = HostConfig(pages=pages, write_policy="finish", skip_slow_loads=False)
        with closing(Engine(_settings(config, page_size, pages, host), model)) as engine:
            cost = FirstToken(n, engine.pool.bytes_per_page(), n // page_size)
            for turn in range(-1, repeat):
                _one_turn(engine, cost, turn)
        found.append(cost)
    return found


def _settings(model: ModelConfig, page_size: int, pages: int, host: HostConfig) -> ServeConfig:
    return ServeConfig(
        cache=CacheConfig(page_size=page_size), pool=PoolConfig(pages=pages), host=host, model=model,
        engine=EngineConfig(batch_tokens=max(512, page_size)),
    )  # fmt: skip


def _one_turn(engine: Engine, cost: FirstToken, turn: int) -> None:
    engine.cache.reset()
    for way in ("recompute", "device hit", "host hit"):
        if way == "host hit":
            _settle(engine)
            engine.cache.reset("device")
        prompt = np.concatenate([_tokens(engine.model, cost.tokens, cost.tokens),
                                 _tokens(engine.model, _NEW, 1000 + 3 * turn + WAYS.index(way))])  # fmt: skip
        began = time.perf_counter()
        [done] = engine.generate([Prompt(tokens=prompt, output_limit=1)])
        took = time.perf_counter() - began
        _check(way, done, cost.tokens - cost.tokens % engine.config.cache.page_size)
        if turn >= 0:
            cost.seconds[way].append(took)


def _settle(engine: Engine) -> None:
    """Until no copy is under way."""
    while engine.cache.stats().copies_in_flight:
        engine.cache.wait_for_copies()
        engine.step()


def _check(way: str, done: Completion, cached: int) -> None:
    wanted = {"recompute": (0, 0), "device hit": (cached, 0), "host hit": (cached, cached)}[way]
    if (done.cached_tokens, done.host_tokens) != wanted:
        raise DistKVError(f"{way}: {done.cached_tokens} tokens were cached, {done.host_tokens} of them on the host, "
                          f"and not {wanted[0]} and {wanted[1]}: nothing to measure")


def _tokens(model: Model, n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, model.vocab_size, n).astype(np.int32)


def waits(config: ModelConfig, page_size: int, prompt: int, requests: int) -> list[Waits]:
    """New prompts one after the other through a pool that holds little more than one, by both write policies."""
    model, found = load_model(config), []
    each = -(-(prompt + _OUTPUT) // page_size)
    policies: tuple[Literal["evict", "finish"], ...] = ("evict", "finish")
    for policy in policies:
        host = HostConfig(pages=(requests + 1) * each, write_policy=policy)
        settings = _settings(config, page_size, each + 1, host)
        with closing(Engine(settings, model)) as engine:
            fences: list[float] = []
            engine.cache.fence = _timed(engine.cache.fence, fences)  # type: ignore[method-assign]
            engine.generate([Prompt(tokens=_tokens(model, prompt, 1), output_limit=_OUTPUT)])  # fills the pool
            before, first = engine.cache.stats(), engine.steps
            fences.clear()
            began = time.perf_counter()
            for number_ in range(requests):
                engine.generate([Prompt(tokens=_tokens(model, prompt, 2 + number_), output_limit=_OUTPUT)])
            seconds = time.perf_counter() - began
            now = engine.cache.stats()
            if not now.evicted > before.evicted:
                raise DistKVError("nothing was evicted: nothing to measure")
            found.append(Waits(policy, engine.steps - first, seconds, tuple(fences), now.stores - before.stores))
    return found


def _timed(call: Callable[[], None], seconds: list[float]) -> Callable[[], None]:
    """The same call, which notes how long it took."""
    def timed() -> None:
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)

    return timed


def table(found: Iterable[FirstToken]) -> str:
    """Milliseconds to the first token, the best, and how they compare."""
    head = ["cached + new tokens", "pages", "MiB", *(f"{way}, ms" for way in WAYS), "(medians)", "host by device",
            "host by recompute"]
    lines = []
    for one in found:
        again, host, device = (one.best(way) for way in WAYS)
        lines.append([f"{one.tokens:,} + {_NEW}", number(one.pages), number(one.pages * one.page_bytes / (1 << 20)),
                      *(number(1e3 * seconds) for seconds in (again, host, device)),
                      ", ".join(number(1e3 * median(one.seconds[way])) for way in WAYS), f"{host / device:.2f}",
                      f"{host / again:.3f}"])
    return markdown(head, lines)


def waits_table(found: Iterable[Waits]) -> str:
    """Milliseconds that passes waited for spills."""
    head = ["write policy", "steps", "pages spilled", "fence: median, ms", "mean, ms", "p99, ms", "of all time, %"]
    return markdown(head, [
        [one.policy, number(one.steps), number(one.spilled),
         *(number(1e3 * seconds) for seconds in (median(one.fences), fmean(one.fences), one.p99)),
         number(100 * sum(one.fences) / one.seconds)] for one in found
    ])  # fmt: skip
