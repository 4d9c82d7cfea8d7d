"""The gate: a cached run against an uncached one under the same schedule, bit for bit.

A run is recorded (:class:`~distkv.engine.record.Recording`). :func:`recompute` then computes its requests again from
their first token in a pool of its own, with model and attention alone: no cache, no index, no key. Tokens that the run
took from cached pages are computed in just the chunks and batches in which those pages had once been filled, and
then everything that the run computed itself, likewise. :func:`~distkv.engine.compare.compare` wants the same bits: the
logits of every position that was sampled and the keys and values of every token, all by 64-bit hash.

A hybrid model's pages of sliding layers may come from other batches than the pages of the same tokens in ``main``, and
only the latter are followed. Where that counts (several requests in a batch, and no ``engine.batch_invariant``), the
last bits of such a request may differ without a fault; ``distkv verify`` refuses to compare it.

Why the same schedule: the bits of a matrix product depend on how many rows it has. Batch mates that are not under test
take part as rows of the right number, so that each product has the size it had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from distkv.engine.attention import Batch
from distkv.engine.compare import GateReport, compare
from distkv.engine.coverage import check_recording
from distkv.engine.lineage import Lineage
from distkv.engine.model import Model
from distkv.engine.pool import KVPool
from distkv.engine.record import Place, RecordedRequest, Recording, logits_hash
from distkv.engine.schedule import Chunk
from distkv.errors import GateFailed

__all__ = ["Bench", "Progress", "Recomputed", "check", "recompute", "uncached_schedule"]

Progress = Callable[[str, int, int], None]
"""(request id, batches done, batches in all)."""


@dataclass(slots=True)
class Recomputed:
    """The bits of one request computed from scratch; the fields are those of ``RecordedRequest``."""

    logits: dict[int, int]
    kv: np.ndarray


def check(
    model: Model, recording: Recording, *, continued: bool = False, progress: Progress | None = None
) -> GateReport:
    """Recomputes all ended requests of a recording and compares. See :func:`recompute` for ``continued``.

    Every rank of the model's group calls it with its own recording of the same run. Raises ``GateFailed`` when
    nothing came from the cache (then there is nothing to prove), and when a request was given pages that were never
    computed for its tokens or has tokens that were not computed at all; other differences are in the report.
    """
    if not any(r.cached_tokens for r in recording.requests.values() if r.kv is not None):
        raise GateFailed("no request of the recorded run took a token from the cache: the gate has nothing to compare")
    return compare(recording, recompute(model, recording, continued=continued, progress=progress), rank=model.rank)


def recompute(
    model: Model,
    recording: Recording,
    names: Sequence[str] | None = None,
    *,
    continued: bool = False,
    progress: Progress | None = None,
) -> dict[str, Recomputed]:
    """Computes requests of a recording (default: all that ended) from scratch, in a pool of its own.

    Each request starts from nothing. With ``continued`` a request keeps those leading pages of the one before that
    have the same tokens and the same origin, so that the turns of one conversation are computed in one pass, every
    token once: much cheaper, and as independent of the cache's code. Results are by request id.
    """
    ended = [name for name, r in recording.requests.items() if r.kv is not None]
    todo = [recording.requests[name] for name in (ended if names is None else names)]
    check_recording(model, recording, todo)
    bench = Bench.of(model, recording, todo)
    out = {}
    for request in todo:
        if not continued:
            bench.forget()
        out[request.id] = bench.run(request, progress)
    return out


@dataclass
class Bench:
    """A pool with one page table, in which one request after another is computed."""

    model: Model
    recording: Recording
    pool: KVPool
    table: np.ndarray
    lineage: Lineage
    kept: list[int] = field(default_factory=list)
    """The versions of the table's pages."""

    @classmethod
    def of(
        cls, model: Model, recording: Recording, todo: Sequence[RecordedRequest], lineage: Lineage | None = None
    ) -> Bench:
        """A bench for these requests of a recording that was checked for them."""
        size = recording.pool.page_size
        longest = max((r.committed for r in todo), default=0)
        widest = max((sum(c.n for c in b.chunks) for b in recording.batches), default=0)
        # behind the table of the request under test lie pages for rows that only give a batch its size
        table, spare = -(-longest // size), -(-widest // size)
        pool, pages = model.pool(table + spare, size), np.arange(table, dtype=np.int32)
        bench = cls(model, recording, pool, pages, lineage or Lineage(recording))
        bench.forget()
        return bench

    def forget(self) -> None:
        """Nothing that was computed so far is used again."""
        self.kept = []
        self.pool.data.fill_(float("nan"))  # an engine's pool begins with zeros: nobody's untouched bytes are equal

    def run(self, request: RecordedRequest, progress: Progress | None = None) -> Recomputed:
        """Computes a request, but for the leading pages that it shares with the one before."""
        versions = self.lineage.versions(request, -(-request.committed // self.pool.page_size))
        cached, own = len(request.origin), sorted(request.computed)
        keep = 0
        while keep < min(cached, len(self.kept)) and self.kept[keep] == versions[keep]:
            keep += 1
        total = cached - keep + len(own)
        for done, page in enumerate(range(keep, cached), 1):
            self._cached_page(request, page)
            if progress is not None:
                progress(request.id, done, total)
        logits: dict[int, int] = {}
        for done, place in enumerate(own, cached - keep + 1):
            row = self._batch(place)
            if row is not None:
                chunk = self.recording.batches[place[0]].chunks[place[1]]
                logits[chunk.start + chunk.n - 1] = logits_hash(row)
            if progress is not None:
                progress(request.id, done, total)
        self.kept = versions
        layers = self.recording.pool.numbers  # those of the run's pool: of a hybrid model not all
        return Recomputed(logits, self.pool.token_hashes(self.table, request.committed, layers))

    def _cached_page(self, request: RecordedRequest, page: int) -> None:
        """Computes a page that came from the cache, above the pages above which it was computed then."""
        if self.lineage.as_seen(request, page):
            for place in request.origin[page]:
                self._batch(place)
            return
        before = self.lineage.prefix(self.lineage.writer(request, page), page + 1)
        apart = Bench.of(self.model, self.recording, [before], self.lineage)
        apart.run(before)
        self.pool.data[:, :, int(self.table[page])] = apart.pool.data[:, :, page]

    def _batch(self, place: Place) -> torch.Tensor | None:
        """Runs one recorded batch with its chunk at ``place`` under test; returns that chunk's logits if it has any."""
        number, mine = place
        batch = self.recording.batches[number]
        rows, at = [], 0
        for i, chunk in enumerate(batch.chunks):
            ids = self.recording.requests[chunk.request_id].tokens[chunk.start : chunk.start + chunk.n]
            if i == mine:
                rows.append((ids, chunk.start, self._slots(chunk), self.table))
            else:
                spare = np.arange(at, at + chunk.n) + len(self.table) * self.pool.page_size
                rows.append((ids, chunk.start, spare, self.table[:0]))
            at += chunk.n
        ends = np.cumsum([chunk.n for chunk in batch.chunks])
        keep = [int(ends[i]) - 1 for i in batch.sampled]
        logits = self.model.forward(Batch.build(self.pool, rows, self.model.dtype), keep)
        return logits[batch.sampled.index(mine)] if mine in batch.sampled else None

    def _slots(self, chunk: Chunk) -> np.ndarray:
        at = np.arange(chunk.start, chunk.start + chunk.n)
        return self.table[at // self.pool.page_size].astype(np.int64) * self.pool.page_size + at % self.pool.page_size


def uncached_schedule(recording: Recording, readers: Sequence[str]) -> list[list[Chunk]]:
    """The batches of an uncached engine run that gives the bits of ``readers``: for ``Replay`` and ``read=False``.

    First the batches that filled the readers' cached pages, the reader in its writer's place, then the readers' own.
    Other requests of these batches keep their place and have to be submitted too, unless they only filled pages for a
    reader. Raises ``GateFailed`` where two readers would need one batch in different ways.
    """
    stand_in: dict[Place, str] = {}
    wanted: set[int] = set()
    for name in readers:
        request = recording.requests[name]
        for place in {place for origin in request.origin for place in origin}:
            if stand_in.setdefault(place, name) != name:
                raise GateFailed(f"{name!r} and {stand_in[place]!r} share the pages of one batch; replay them apart")
            wanted.add(place[0])
        wanted |= {number for number, _ in request.computed}
    return [
        [
            chunk._replace(request_id=stand_in.get((number, i), chunk.request_id))
            for i, chunk in enumerate(recording.batches[number].chunks)
        ]
        for number in sorted(wanted)
    ]
