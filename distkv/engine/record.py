"""What an engine run did, in enough detail to be computed again: schedule, tokens, and hashes of logits and KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import xxhash

from distkv.engine.pool import KVPool
from distkv.engine.schedule import Chunk
from distkv.host.copies import Copy, Kind

__all__ = ["Place", "Recorded", "RecordedBatch", "RecordedRequest", "Recording", "logits_hash"]

Place = tuple[int, int]
"""Where tokens were computed: number of the batch, number of the chunk in it."""


class Recorded(Protocol):
    """The bits of one request: of a run, or computed from scratch."""

    @property
    def logits(self) -> dict[int, int]:
        """Position -> hash of the logits that were taken there."""

    @property
    def kv(self) -> np.ndarray | None:
        """uint64 [tokens, layers, 2]: hashes of the bytes of each token's keys and values."""


def logits_hash(row: torch.Tensor) -> int:
    """64-bit hash of the bytes of one row of logits."""
    return int(xxhash.xxh3_64_intdigest(row.contiguous().view(torch.uint8).cpu().numpy().data))


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """One forward pass: its chunks, and which of them (by number) had logits taken from their last row."""

    chunks: tuple[Chunk, ...]
    sampled: tuple[int, ...]


@dataclass(slots=True)
class RecordedRequest:
    """One request, or one fork of it. ``origin[p]`` says where the tokens of its cached page ``p`` had been computed;
    of a fork the last of them may be filled in part."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    origin: tuple[tuple[Place, ...], ...]
    tokens: np.ndarray
    """int32: the prompt and what was computed behind it; once it has ended, all tokens."""
    computed: list[Place] = field(default_factory=list)
    logits: dict[int, int] = field(default_factory=dict)
    """Position -> hash of the logits that were taken there."""
    kv: np.ndarray | None = None
    """uint64 [committed, layers, 2]: hashes of the bytes of each token's keys and values when it ended; None if it has
    not, or was aborted."""
    page_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32: its pages in the pool when it ended."""
    committed: int = 0


class Recording:
    """Gathers a run of one rank. An engine calls the methods; the results are ``batches`` and ``requests``.

    Where a cached page came from is followed by its place in the pool and on the host, and by nothing else: no key and
    no index is asked, so the cache's own idea of what a page holds does not enter into the check of it.

    ``requests`` is by request id. When an id is used again, the later request is recorded as ``id#2``, then ``id#3``
    (in ``batches``, too); and so are the parts of a request that was suspended, of which each but the last has ended
    there. A fork is a request of its own, which has taken from the cache what its parent had computed.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.batches: list[RecordedBatch] = []
        self.requests: dict[str, RecordedRequest] = {}
        self._writers: dict[int, list[Place]] = {}
        self._on_host: dict[int, tuple[Place, ...]] = {}
        self._names: dict[str, str] = {}
        self._parts: dict[str, list[str]] = {}
        self._tails: dict[str, tuple[int, tuple[Place, ...]]] = {}
        """Of each owner of a shared tail that has not written since: the page, and where its tokens were computed."""

    def admitted(self, request_id: str, tokens: np.ndarray, cached_tokens: int, pages: np.ndarray) -> None:
        """A request begins: its prompt, and the first pages of its table if ``cached_tokens`` came from the cache."""
        cached = -(-cached_tokens // self.pool.page_size)
        origin = tuple(self.origin_of(page) for page in pages[:cached].tolist())
        name, times = request_id, 1
        while name in self.requests:
            times += 1
            name = f"{request_id}#{times}"
        self._names[request_id] = name
        self._parts.setdefault(request_id, []).append(name)
        self.requests[name] = RecordedRequest(name, len(tokens), cached_tokens, origin, tokens.copy())

    def forked(self, parent: str, child: str, tokens: np.ndarray, cached_tokens: int, pages: np.ndarray) -> None:
        """As :meth:`admitted`, of a fork; neither has written since into the last page, if that is partly filled."""
        self.admitted(child, tokens, cached_tokens, pages)
        if cached_tokens % self.pool.page_size:
            page = int(pages[cached_tokens // self.pool.page_size])
            for name in (self._names[parent], self._names[child]):
                self._tails[name] = page, self.origin_of(page)

    def ran(
        self,
        chunks: Sequence[Chunk],
        ids: Sequence[np.ndarray],
        tables: Sequence[np.ndarray],
        sampled: Sequence[int],
        logits: torch.Tensor,
    ) -> None:
        """A batch: token ids and page table of each chunk, numbers of the chunks sampled, a row of logits for each."""
        number, size = len(self.batches), self.pool.page_size
        chunks = [chunk._replace(request_id=self._names[chunk.request_id]) for chunk in chunks]
        for i, (chunk, table) in enumerate(zip(chunks, tables, strict=True)):
            request = self.requests[chunk.request_id]
            if request.kv is not None:
                continue  # launched before its end was known, and dropped
            request.computed.append((number, i))
            new = ids[i][max(0, len(request.tokens) - chunk.start) :]
            if len(new):
                request.tokens = np.concatenate([request.tokens, new])
            shared = self._tails.pop(chunk.request_id, None)
            if shared is not None and (page := int(table[chunk.start // size])) != shared[0]:
                self._writers[page] = list(shared[1])  # it was copied there
            for index in range(chunk.start // size, (chunk.start + chunk.n - 1) // size + 1):
                page = int(table[index])
                if chunk.start <= index * size:
                    self._writers[page] = []
                self._writers[page].append((number, i))
        for i, row in zip(sampled, logits, strict=True):
            chunk = chunks[i]
            if self.requests[chunk.request_id].kv is not None:
                continue
            self.requests[chunk.request_id].logits[chunk.start + chunk.n - 1] = logits_hash(row)
        self.batches.append(RecordedBatch(tuple(chunks), tuple(sampled)))

    def origin_of(self, page: int) -> tuple[Place, ...]:
        """Where the tokens that lie in a page were computed. Pages from ``pool.pages`` on are those of the host."""
        if page >= self.pool.pages:
            return self._on_host.get(page - self.pool.pages, ())
        return tuple(self._writers.get(page, ()))

    def parts(self, request_id: str) -> list[str]:
        """The names under which requests with this id were recorded, in order: parts of one if it was suspended."""
        return list(self._parts.get(request_id, ()))

    def copied(self, copy: Copy) -> None:
        """A page is to be copied between the pool and the host: what it holds goes with it."""
        if copy.kind is Kind.STORE:
            self._on_host[copy.host] = self.origin_of(copy.device)
        else:
            self._writers[copy.device] = list(self._on_host.get(copy.host, ()))

    def ended(self, request_id: str, tokens: np.ndarray, committed: int, pages: np.ndarray) -> None:
        """A request finished; its pages are still its own, and are hashed now."""
        request = self.requests[self._names[request_id]]
        request.tokens, request.committed = tokens.copy(), committed
        request.page_ids = pages[: -(-committed // self.pool.page_size)].copy()
        request.kv = self.pool.token_hashes(pages, committed)
