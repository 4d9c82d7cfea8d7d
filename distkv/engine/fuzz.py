"""Random schedules: when requests come, with whom they share batches, in which pieces, and how large the pool is.

Everything follows from the seed, so that all ranks plan alike and a schedule that failed can be run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distkv.engine.config import ServeConfig
from distkv.engine.record import RecordedRequest
from distkv.engine.requests import Prompt
from distkv.engine.schedule import Chunk, Runnable

__all__ = ["Arrival", "Fuzzed", "Trial", "in_order", "random_trial"]


class Fuzzed:
    """A scheduler that packs random pieces of random requests into batches of at most ``batch_tokens``."""

    def __init__(self, random: np.random.Generator, batch_tokens: int, longest_chunk: int) -> None:
        self._random = random
        self._batch_tokens = batch_tokens
        self._longest = longest_chunk

    def plan(self, running: Sequence[Runnable]) -> list[Chunk]:
        if not running:
            return []
        chunks: list[Chunk] = []
        room = self._batch_tokens
        for i in self._random.permutation(len(running))[: self._random.integers(1, len(running) + 1)].tolist():
            request = running[i]
            n = min(request.known - request.committed, int(self._random.integers(1, self._longest + 1)), room)
            if n:
                chunks.append(Chunk(request.request_id, request.committed, n))
                room -= n
        return chunks


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt that comes at a step; ``aborted_at``: the step before which it is aborted, if it still runs."""

    step: int
    prompt: Prompt
    aborted_at: int | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. ``known`` has the request that an id of ``arrivals`` repeats; the others are strangers."""

    config: ServeConfig
    arrivals: tuple[Arrival, ...]
    known: dict[str, str]
    scheduler: Fuzzed | None = None
    """None: the engine's own."""

    @property
    def text(self) -> str:
        """What is special about it."""
        chunk = f"pieces of at most {self.scheduler._longest}" if self.scheduler is not None else "the engine's schedule"
        strangers = len(self.arrivals) - len(self.known)
        return f"{chunk}, {self.config.pool.pages} pages, {len(self.known)} requests and {strangers} strangers"


def in_order(config: ServeConfig, references: Sequence[RecordedRequest]) -> Trial:
    """The engine's own schedule, one request after the other."""
    arrivals = [Arrival(i * (1 << 20), _again(r, r.id)) for i, r in enumerate(references)]
    return Trial(config, tuple(arrivals), {r.id: r.id for r in references})


def random_trial(
    config: ServeConfig, references: Sequence[RecordedRequest], random: np.random.Generator, vocab: int
) -> Trial:
    """All ``references`` in random order, some twice, among strangers, of which some begin like one of them.

    ``random`` goes on in the trial's scheduler: every rank needs one of its own, in the same state.
    """
    size = config.cache.page_size
    longest = max(len(r.tokens) for r in references)
    prompts: list[tuple[Prompt, int]] = []
    known: dict[str, str] = {}
    for reference in references:
        for copy in range(1 + int(random.random() < 0.25)):
            name = reference.id + "'" * copy
            known[name] = reference.id
            prompts.append((_again(reference, name, write=random.random() < 0.9), 0))
    for number in range(int(random.integers(1, 2 + len(references) // 2))):
        like = references[int(random.integers(len(references)))].tokens
        begin = like[: int(random.integers(0, len(like)))] if random.random() < 0.6 else like[:0]
        own = random.integers(0, vocab, int(random.integers(1, max(2, min(2 * size, longest - len(begin))))))
        stranger = Prompt(tokens=np.concatenate([begin, own]).astype(np.int32)[: longest - 1], id=f"stranger {number}",
                          output_limit=1 + int(random.integers(min(4, longest))))  # fmt: skip
        prompts.append((stranger, int(random.integers(1, 12)) if random.random() < 0.2 else 0))
    arrivals, step = [], 0
    for i in random.permutation(len(prompts)).tolist():
        step += int(random.geometric(0.3)) if random.random() < 0.6 else 0
        prompt, abort = prompts[i]
        arrivals.append(Arrival(step, prompt, step + abort if abort else None))
    chunk = int(np.exp(random.uniform(np.log(max(1, longest // 24)), np.log(config.engine.batch_tokens + 1))))
    return Trial(_varied(config, longest + 4, random), tuple(arrivals), known,
                 Fuzzed(random, config.engine.batch_tokens, max(1, chunk)))  # fmt: skip


def _again(reference: RecordedRequest, name: str, *, write: bool = True) -> Prompt:
    tokens = reference.tokens[: reference.prompt_tokens]
    return Prompt(tokens=tokens, id=name, output_limit=len(reference.tokens) - len(tokens), write=write)


def _varied(config: ServeConfig, longest: int, random: np.random.Generator) -> ServeConfig:
    """A pool that may be so small that pages are evicted, and either rule of when a page is stored."""
    least = -(-longest // config.cache.page_size) + 1 + config.pool.scratch_pages
    pages = config.pool.pages
    if random.random() < 0.5:
        pages = min(pages, least + int(random.integers(0, least)))
    index_on = "fill" if random.random() < 0.5 else "finish"
    return replace(config, pool=replace(config.pool, pages=pages), cache=replace(config.cache, index_on=index_on))
