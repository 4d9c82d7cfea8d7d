"""One batch: its slots opened, its forward pass in flight, and what comes back from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from distkv.engine.attention import Batch
from distkv.engine.model import Model
from distkv.engine.pool import KVPool
from distkv.engine.sampling import Sampling, choose
from distkv.engine.schedule import Chunk
from distkv.engine.state import Running
from distkv.engine.windowed import WINDOW, WindowRows
from distkv.errors import ModelError

__all__ = ["Flight", "Landed", "Launcher"]


@dataclass(slots=True, eq=False)
class Landed:
    """What a forward pass gave."""

    ids: list[np.ndarray]
    """Token ids of each chunk, int32."""
    logits: torch.Tensor
    """``[len(sampled), vocab]``."""
    tokens: list[int]
    """The token chosen for each row of logits."""
    seconds: float
    """What the pass took."""


@dataclass(slots=True, eq=False)
class Flight:
    """A forward pass that was launched. It uses its pages until it has landed, whoever owns them by then."""

    step: int
    """Number of the cache's step in which it was launched: what ``cache.retired`` wants once it has landed."""
    chunks: Sequence[Chunk]
    running: list[Running]
    """The request of each chunk. One that has ended since is not among the engine's running ones any more."""
    slots: list[np.ndarray]
    tables: list[np.ndarray]
    """Page table of each chunk as it was at the launch."""
    sampled: list[int]
    """Numbers of the chunks whose last token gives a row of logits, in the order of the rows."""
    wait: Callable[[], Landed]
    """Waits for the end of the pass; raises what it raised."""

    @property
    def tokens(self) -> int:
        """How many it computes."""
        return sum(chunk.n for chunk in self.chunks)

    @property
    def prompt_tokens(self) -> int:
        """How many of them are of prompts, or of what a suspended request has to compute again."""
        return sum(chunk.n for chunk, request in zip(self.chunks, self.running, strict=True)
                   if chunk.start < request.sequence.prompt_tokens)


class Launcher:
    """Opens the slots of a batch and launches its forward pass over ``pool``.

    ``asynchronous``: passes run in a thread of the launcher's own, one after the other as launched, and :meth:`launch`
    returns at once. ``fence`` is called when the slots are open: what they cover may be written from then on. A chosen
    token goes into its request's ``tokens`` before the next pass begins, so that one may be launched which reads it.
    ``window``: the pool of the sliding layers, if they have one of their own.
    Raises ``ModelError`` then for a model that is not on the CPU.
    """

    def __init__(self, model: Model, pool: KVPool, fence: Callable[[], None], *, asynchronous: bool,
                 window: KVPool | None = None) -> None:
        if asynchronous and model.device.type != "cpu":
            raise ModelError(f"cache.asynchronous is true, but the model is on {model.device}: this engine runs passes "
                             "ahead in a thread, and only on the CPU; set it to false")  # fmt: skip
        self.model = model
        self.pool = pool
        self.window = window
        self._fence = fence
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distkv-forward") if asynchronous else None

    def launch(self, chunks: Sequence[Chunk], running: list[Running], step: int) -> Flight:
        """The batch of a checked plan; ``running`` has the request of each chunk."""
        slots, tables, sampled, asked = [], [], [], []
        windows: list[WindowRows] = []
        for i, (chunk, request) in enumerate(zip(chunks, running, strict=True)):
            slots.append(request.sequence.open(chunk.n))
            tables.append(request.sequence.page_indices.copy())
            if self.window is not None:  # as it is before the commit of this chunk, or of one in flight, gives pages up
                windows.append(_in_window(request, chunk))
            if chunk.start + chunk.n == request.promised < len(request.tokens):
                sampled.append(i)
                asked.append((request.sampling, request.promised))
                request.promised += 1
        flight = Flight(step, chunks, running, slots, tables, sampled, lambda: landed)
        self._fence()
        compute = partial(self._compute, flight, asked, windows)
        if self._thread is not None:
            flight.wait = self._thread.submit(compute).result
        else:
            landed = compute()
        return flight

    def _compute(
        self, flight: Flight, asked: list[tuple[Sampling | None, int]], windows: list[WindowRows]
    ) -> Landed:
        began = time.perf_counter()
        chunks, running = flight.chunks, flight.running
        ids = [r.tokens[c.start : c.start + c.n].copy() for c, r in zip(chunks, running, strict=True)]
        rows = [(ids[i], c.start, flight.slots[i], flight.tables[i]) for i, c in enumerate(chunks)]
        ends = np.cumsum([c.n for c in chunks])
        apart = (self.window, windows) if self.window is not None else None
        batch = Batch.build(self.pool, rows, self.model.dtype, apart)
        logits = self.model.forward(batch, [int(ends[i]) - 1 for i in flight.sampled])
        tokens = choose(logits, asked)
        for i, token, (_, position) in zip(flight.sampled, tokens, asked, strict=True):
            running[i].tokens[position] = token
        return Landed(ids, logits, tokens, time.perf_counter() - began)

    def close(self) -> None:
        """Waits for what is in flight, and ends the thread."""
        if self._thread is not None:
            self._thread.shutdown()


def _in_window(request: Running, chunk: Chunk) -> WindowRows:
    """Where an opened chunk lies in the pool of the sliding layers."""
    sequence = request.sequence
    pages = sequence.pages_of(WINDOW)
    return WindowRows(sequence.slots(chunk.start, chunk.start + chunk.n, WINDOW), pages.table.copy(), pages.first)
