"""One batch: its slots opened, its forward pass in flight, and what comes back from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from distkv.engine.attention import Batch
from distkv.engine.model import Model
from distkv.engine.pool import KVPool
from distkv.engine.schedule import Chunk
from distkv.engine.state import Running

__all__ = ["Flight", "Launcher"]


@dataclass(slots=True, eq=False)
class Flight:
    """A forward pass that was launched. Its pages belong to it until it has landed, whoever owns them by then."""

    step: int
    """Number of the cache's step in which it was launched: what ``cache.retired`` wants once it has landed."""
    chunks: Sequence[Chunk]
    running: list[Running]
    """The request of each chunk. One that was aborted since is not among the engine's running ones any more."""
    ids: list[np.ndarray]
    tables: list[np.ndarray]
    """Page table of each chunk as it was at the launch."""
    sampled: list[int]
    """Numbers of the chunks whose last token gives a row of logits, in the order of the rows."""
    wait: Callable[[], torch.Tensor]
    """Waits for the end and gives the logits, ``[len(sampled), vocab]``; raises what the forward pass raised."""


class Launcher:
    """Opens the slots of a batch and launches its forward pass over ``pool``.

    ``asynchronous``: :meth:`launch` returns before the pass has ended. On a GPU that is what launches do anyway, and
    an event tells when it has ended; on a CPU the pass runs in a thread of the launcher's own, one pass at a time.
    """

    def __init__(self, model: Model, pool: KVPool, *, asynchronous: bool) -> None:
        self.model = model
        self.pool = pool
        in_thread = asynchronous and model.device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distkv-forward") if in_thread else None
        self._asynchronous = asynchronous

    def launch(self, chunks: Sequence[Chunk], running: list[Running], step: int) -> Flight:
        """The batch of a checked plan; ``running`` has the request of each chunk."""
        rows, tables, sampled, keep, at = [], [], [], [], 0
        for i, (chunk, request) in enumerate(zip(chunks, running, strict=True)):
            slots = request.sequence.open(chunk.n)
            end = chunk.start + chunk.n
            tables.append(request.sequence.page_indices.copy())
            rows.append((request.tokens[chunk.start : end].copy(), chunk.start, slots, tables[-1]))
            at += chunk.n
            if end == request.known:
                sampled.append(i)
                keep.append(at - 1)
        batch = Batch.build(self.pool, rows, self.model.dtype)
        return Flight(step, chunks, running, [ids for ids, *_ in rows], tables, sampled, self._start(batch, keep))

    def _start(self, batch: Batch, keep: list[int]) -> Callable[[], torch.Tensor]:
        if self._thread is not None:
            return self._thread.submit(self.model.forward, batch, keep).result
        logits = self.model.forward(batch, keep)
        if not self._asynchronous or logits.device.type != "cuda":
            return lambda: logits
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record()

        def wait() -> torch.Tensor:
            ended.synchronize()
            return logits

        return wait

    def close(self) -> None:
        """Waits for what is in flight, and ends the thread."""
        if self._thread is not None:
            self._thread.shutdown()
