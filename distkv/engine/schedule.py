"""Which tokens of which requests go into the next batch. Sans-IO: a function of what every rank knows alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from distkv.errors import DistKVError

__all__ = ["Chunk", "Grid", "Replay", "Runnable", "Scheduler"]


class Chunk(NamedTuple):
    """Tokens ``start .. start + n - 1`` of one request, in one batch."""

    request_id: str
    start: int
    n: int


@dataclass(frozen=True, slots=True)
class Runnable:
    """An admitted request: ``committed`` tokens have KV, ``known`` have ids; ``known - committed`` is at least 1."""

    request_id: str
    committed: int
    known: int
    generating: bool


class Scheduler(Protocol):
    """Plans one batch. All ranks call it with equal arguments and must get equal plans."""

    def plan(self, running: Sequence[Runnable]) -> list[Chunk]:
        """The chunks of the next batch, at most one for each request; empty when there is nothing to run."""
        ...


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Continuous batching with prompts cut on an absolute grid.

    First one token of every answer in progress, then pieces of prompts in order of admission while the batch has room.
    A piece ends at a multiple of ``chunk_tokens`` or with the prompt, and is never cut to fit: so where pieces begin
    and end depends neither on where a cached prefix ended nor on who else is running. That is what makes the bits of
    a cached and an uncached run comparable at all.
    """

    chunk_tokens: int
    batch_tokens: int

    def plan(self, running: Sequence[Runnable]) -> list[Chunk]:
        chunks = [Chunk(r.request_id, r.committed, r.known - r.committed) for r in running if r.generating]
        room = self.batch_tokens - sum(chunk.n for chunk in chunks)
        for r in running:
            if r.generating:
                continue
            end = min(r.known, (r.committed // self.chunk_tokens + 1) * self.chunk_tokens)
            n = end - r.committed
            if n > room and chunks:
                break  # in order: a later, shorter piece does not overtake
            chunks.append(Chunk(r.request_id, r.committed, n))
            room -= n
        return chunks


class Replay:
    """Runs given batches, one after another, instead of a policy: the same schedule for another run.

    A batch waits until all its requests are admitted. Raises ``DistKVError`` when a request is not where the given
    schedule has it, or when batches are used up while requests are still running.
    """

    def __init__(self, batches: Sequence[Sequence[Chunk]]) -> None:
        self._batches = [list(batch) for batch in batches]
        self._next = 0

    @property
    def left(self) -> int:
        """Batches that have not been run."""
        return len(self._batches) - self._next

    def plan(self, running: Sequence[Runnable]) -> list[Chunk]:
        if not running:
            return []
        if not self.left:
            raise DistKVError(f"the schedule is used up, but {running[0].request_id!r} is still running")
        batch, at = self._batches[self._next], {r.request_id: r for r in running}
        if any(chunk.request_id not in at for chunk in batch):
            return []
        for chunk in batch:
            request = at[chunk.request_id]
            if chunk.start != request.committed or chunk.start + chunk.n > request.known:
                raise DistKVError(
                    f"batch {self._next} of the schedule wants tokens {chunk.start} to {chunk.start + chunk.n} of "
                    f"{chunk.request_id!r}, which has {request.committed} computed and {request.known} known"
                )
        self._next += 1
        return list(batch)
