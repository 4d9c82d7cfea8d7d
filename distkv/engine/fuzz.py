"""Random schedules: when requests come, with whom they share batches, in which pieces, and how large the pool is.

Everything follows from the seed, so that all ranks plan alike and a schedule that failed can be run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from distkv.config import HostConfig
from distkv.engine.config import ServeConfig
from distkv.engine.record import RecordedRequest
from distkv.engine.requests import Prompt
from distkv.engine.schedule import Chunk, Runnable

__all__ = ["Arrival", "Fuzzed", "Trial", "in_order", "random_trial"]


class Fuzzed:
    """A scheduler that packs random pieces of random requests into batches of at most ``batch_tokens``.

    ``longest``: tokens of a piece at most. ``grid``: pieces do not go across its multiples, None: anywhere.
    """

    def __init__(self, random: np.random.Generator, batch_tokens: int, longest: int, grid: int | None = None) -> None:
        self._random = random
        self._batch_tokens = batch_tokens
        self._grid = grid
        self.longest = longest

    def plan(self, running: Sequence[Runnable]) -> list[Chunk]:
        if not running:
            return []
        chunks: list[Chunk] = []
        room = self._batch_tokens
        for i in self._random.permutation(len(running))[: self._random.integers(1, len(running) + 1)].tolist():
            request = running[i]
            n = min(request.known - request.committed, int(self._random.integers(1, self.longest + 1)), room)
            if self._grid is not None:
                n = min(n, self._grid - request.committed % self._grid)
            if n:
                chunks.append(Chunk(request.request_id, request.committed, n))
                room -= n
        return chunks


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt that comes at a step. It is aborted before step ``aborted_at`` if it still runs then, and suspended as
    soon as it runs after ``suspended_at``."""

    step: int
    prompt: Prompt
    aborted_at: int | None = None
    suspended_at: int | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. ``known`` has the request that an id of ``arrivals`` repeats; the others are strangers.

    Some are asked for several samples, greedy ones: each fork is to have the bits of the one request.
    """

    config: ServeConfig
    arrivals: tuple[Arrival, ...]
    known: dict[str, str]
    scheduler: Fuzzed | None = None
    """None: the engine's own."""

    @property
    def text(self) -> str:
        """What is special about it."""
        chunk = "the engine's schedule" if self.scheduler is None else f"pieces of at most {self.scheduler.longest}"
        strangers = len(self.arrivals) - len(self.known)
        pages = f"{self.config.pool.pages} pages"
        if self.config.host.pages is not None:
            pages += f" and {self.config.host.pages} on the host"
        return f"{chunk}, {pages}, {len(self.known)} requests and {strangers} strangers"


def in_order(config: ServeConfig, references: Sequence[RecordedRequest]) -> Trial:
    """The engine's own schedule, one request after the other."""
    arrivals = [Arrival(i * (1 << 20), _again(r, r.id)) for i, r in enumerate(references)]
    return Trial(config, tuple(arrivals), {r.id: r.id for r in references})


def random_trial(
    config: ServeConfig,
    references: Sequence[RecordedRequest],
    random: np.random.Generator,
    vocab: int,
    *,
    within_pages: bool,
    pressed: bool = False,
    forks: bool = True,
) -> Trial:
    """All ``references`` in random order, some twice, among strangers, of which some begin like one of them.

    Some are suspended on the way, and with ``forks`` some are forked. ``pressed``: with the smallest pool that can run
    them all, one at a time. ``random`` goes on in the trial's scheduler: every rank needs one of its own, in the same
    state. ``within_pages``: no piece goes across the end of a page, as the gate wants it.
    """
    size = config.cache.page_size
    longest = max(len(r.tokens) for r in references)
    prompts: list[tuple[Prompt, int]] = []
    known: dict[str, str] = {}
    for reference in references:
        for copy in range(1 + int(random.random() < 0.25)):
            name = reference.id + " (again)" * copy
            known[name] = reference.id
            prompts.append((_again(reference, name, write=random.random() < 0.9), 0))
    for number in range(int(random.integers(1, 2 + len(references) // 2))):
        like = references[int(random.integers(len(references)))].tokens
        begin = like[: int(random.integers(0, len(like)))] if random.random() < 0.6 else like[:0]
        own = random.integers(0, vocab, int(random.integers(1, 2 * size + 1)))
        limit = int(random.integers(1, min(4, longest - 1) + 1))
        tokens = np.concatenate([begin, own]).astype(np.int32)[: longest - limit]
        stranger = Prompt(tokens=tokens, id=f"stranger {number}", output_limit=limit)
        prompts.append((stranger, int(random.integers(1, 12)) if random.random() < 0.2 else 0))
    arrivals, step = [], 0
    for i in random.permutation(len(prompts)).tolist():
        step += int(random.geometric(0.3)) if random.random() < 0.6 else 0
        prompt, abort = prompts[i]
        suspend = step + int(random.integers(1, 24)) if random.random() < 0.4 else None
        arrivals.append(Arrival(step, prompt, step + abort if abort else None, suspend))
    most = config.engine.batch_tokens
    least = min(max(1, longest // 24), most)
    chunk = max(1, int(np.exp(random.uniform(np.log(least), np.log(most + 1)))))
    scheduler = Fuzzed(random, most, min(chunk, size) if within_pages else chunk, size if within_pages else None)
    varied = _varied(config, longest, random, pressed=pressed)
    forked = _forked(arrivals, known, varied, random.spawn(1)[0]) if forks else tuple(arrivals)
    return Trial(varied, forked, known, scheduler)


def _forked(
    arrivals: Sequence[Arrival], known: dict[str, str], config: ServeConfig, random: np.random.Generator
) -> tuple[Arrival, ...]:
    """Some of the known requests wanted two or three times, as far as the pool has place for them."""
    size, usable, out = config.cache.page_size, config.pool.pages - config.pool.scratch_pages, []
    for arrival in arrivals:
        prompt = arrival.prompt
        each = -(-(len(prompt.tokens) + (prompt.output_limit or 0) + config.cache.lookahead_tokens) // size)
        n = int(random.integers(2, 4)) if prompt.id in known and random.random() < 0.4 else 1
        if each + (n - 1) * (each - len(prompt.tokens) // size) > usable:
            n = 1
        out.append(replace(arrival, prompt=replace(prompt, n=n)))
    return tuple(out)


def _again(reference: RecordedRequest, name: str, *, write: bool = True) -> Prompt:
    tokens = reference.tokens[: reference.prompt_tokens]
    return Prompt(tokens=tokens, id=name, output_limit=len(reference.tokens) - len(tokens), write=write)


def _varied(config: ServeConfig, longest: int, random: np.random.Generator, *, pressed: bool) -> ServeConfig:
    """A pool that may be so small that pages are evicted, and that answers do not find room; either rule of when a page
    is stored, and of when it is copied to the host, whose tier may be smaller, too."""
    least = -(-longest // config.cache.page_size) + 1 + config.pool.scratch_pages
    pages = config.pool.pages
    if random.random() < 0.5 or pressed:
        pages = min(pages, least + (0 if pressed else int(random.integers(0, least))))
    index_on: Literal["fill", "finish"] = "fill" if random.random() < 0.5 else "finish"
    reserve = int(random.integers(1, config.engine.output_limit + 1)) if random.random() < 0.6 else None
    return replace(config, pool=replace(config.pool, pages=pages), cache=replace(config.cache, index_on=index_on),
                   engine=replace(config.engine, reserve_tokens=reserve), host=_varied_host(config.host, random))


def _varied_host(host: HostConfig, random: np.random.Generator) -> HostConfig:
    if not host.configured:
        return host
    policy: Literal["evict", "finish"] = "evict" if random.random() < 0.6 else "finish"
    pages, kept = host.pages, host.preemption_pages
    if pages is not None and random.random() < 0.4:
        pages = int(random.integers(kept + 1, pages + 1))
    return replace(host, pages=pages, write_policy=policy, prefetch=bool(random.random() < 0.5))
