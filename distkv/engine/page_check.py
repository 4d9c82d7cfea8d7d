"""The check of cached pages: compute a page again from its tokens, with the model alone, and compare every byte.

A page of another prefix, two pages swapped, one element nudged: logits may not show it, the bytes do. With
``engine.batch_invariant`` the tokens alone say what the bytes of a page must be. Without, they also depend on the
batches in which the page was filled, and the check needs the :class:`~distkv.engine.record.Recording` of the run; then
the pages of layers with a sliding window are not looked at, since they may come from other batches than the page of the
same tokens in ``main``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from distkv.cache import PrefixCache
from distkv.engine.attention import Batch
from distkv.engine.compare import PageDifference, differing_pages
from distkv.engine.coverage import check_recording
from distkv.engine.gate import Bench
from distkv.engine.model import Model
from distkv.engine.pool import KVPool
from distkv.engine.record import RecordedRequest, Recording
from distkv.engine.windowed import WINDOW
from distkv.entries import NO_PAGES
from distkv.errors import GateFailed
from distkv.ledger import MAIN
from distkv.torch_group import TorchGroup

__all__ = ["CacheCheck", "CachedPageDifference", "check_cache", "check_pages"]

_CHUNK = 256  # tokens of one forward pass; in the mode where it matters, it does not


class CachedPageDifference(NamedTuple):
    """A cached page with wrong bytes, and the prefix whose last page it is."""

    difference: PageDifference
    tokens: np.ndarray
    """int32: the tokens up to the end of the page."""


@dataclass(frozen=True, slots=True)
class CacheCheck:
    """What was found on this rank. ``pages``: how many cached pages were computed again and compared."""

    pages: int
    differences: tuple[CachedPageDifference, ...]
    host_pages: int = 0
    """How many pages of the host tier were compared, too: of what is there alone, and of copies."""
    window_pages: int = 0
    """How many pages of the layers with a sliding window were compared, on the device and on the host."""


def check_pages(
    model: Model,
    pool: KVPool,
    tokens: Sequence[int] | np.ndarray,
    page_ids: Sequence[int] | np.ndarray,
    *,
    first: int = 0,
    recording: Recording | None = None,
) -> list[PageDifference]:
    """Compares pages of a prefix with what the model computes for its tokens; empty if every byte is the same.

    ``page_ids`` are the pages in ``pool`` that hold ``tokens``, from the first on; only full pages are looked at, and
    those before number ``first`` are computed but not compared. Every rank of the model's group calls it with the same
    tokens and its own pages. ``recording`` is of the run that filled the pages; not needed, and not looked at, when the
    model is batch-invariant. Raises ``GateFailed`` where the pages cannot be checked.
    """
    size = pool.page_size
    ids = np.asarray(page_ids, dtype=np.int32)[: len(tokens) // size]
    prefix = np.asarray(tokens, dtype=np.int32)[: len(ids) * size]
    again = _again(model, pool, [(prefix, ids)], recording)
    again.fill(prefix, ids)
    return _compared(pool, again.pool, ids, np.arange(first, len(ids)))


def check_cache(
    model: Model, cache: PrefixCache, pool: KVPool, *, window: KVPool | None = None, recording: Recording | None = None
) -> CacheCheck:
    """Every page that ``cache`` has in ``pool`` or on the host, computed again and compared, see :func:`check_pages`.

    ``window``: the pool of a hybrid model's sliding layers, whose cached pages are compared, too, if the model is
    batch-invariant.
    Every rank of the model's group calls it, between two steps, when no pass is in flight; it waits for copies. The
    ranks may have cached different prefixes if the model is batch-invariant: all compute the prefixes of all, and each
    compares what it has. Raises ``GateFailed`` where pages cannot be checked.
    """
    settled = cache.settle()
    own: dict[bytes, list[_Cached]] = {}
    windows = window if model.query_tiles is not None else None
    for prefix in cache.cached_prefixes(hosts=True):
        found_there = _Cached(prefix.pages, prefix.hosts, pool.pages)
        if windows is not None:
            found_there.windows = cache.window_pages(prefix, WINDOW)
        own.setdefault(prefix.tokens.tobytes(), []).append(found_there)
    mine = [(np.frombuffer(data, np.int32), it.places) for data in sorted(own) for it in own[data]]
    again = _again(model, pool, mine, recording)
    host = _HostPages(cache, pool)
    in_window = _WindowPages(cache, windows) if windows is not None else None
    seen: set[int] = set()
    differences: list[CachedPageDifference] = []
    for data in _of_all_ranks(model, sorted(own)):
        tokens = np.frombuffer(data, np.int32)
        for it in own.get(data, [_Cached(NO_PAGES, NO_PAGES, pool.pages)]):  # more than one: another salt or adapter
            again.fill(tokens, it.places)
            new = [i for i, page in enumerate(it.pages.tolist()) if page >= 0 and page not in seen]
            seen.update(it.pages[new].tolist())
            found = _compared(pool, again.pool, it.pages, np.array(new, dtype=np.int64))
            found += host.compared(again.pool, it.hosts)
            if in_window is not None:
                found += in_window.compared(again.pool, it.windows)
            differences += [CachedPageDifference(each, tokens[: (each.page + 1) * pool.page_size]) for each in found]
    if not settled:  # said at the end, for the others had to be helped
        raise GateFailed("a copy between pool and host did not end, so the pages of the host could not be checked")
    return CacheCheck(len(seen), tuple(differences), len(host.seen), in_window.count if in_window is not None else 0)


class _Cached:
    """Where this rank has the pages of one prefix."""

    def __init__(self, pages: np.ndarray, hosts: np.ndarray, base: int) -> None:
        self.pages = pages
        self.hosts = hosts
        self.places = np.where(pages >= 0, pages, base + hosts) if len(hosts) else pages
        self.windows: tuple[np.ndarray, np.ndarray] = (NO_PAGES, NO_PAGES)
        """Device and host pages of the sliding layers, -1: none."""


class _HostPages:
    """The host pages of a label, through a page of memory that is laid out as its pool is."""

    def __init__(self, cache: PrefixCache, like: KVPool, label: str = MAIN) -> None:
        self.seen: set[int] = set()
        self._cache, self._label, self._pool = cache, label, like.one_page()
        self._kv = self._pool.paged()

    def compared(self, again: KVPool, hosts: np.ndarray) -> list[PageDifference]:
        """Host pages of a prefix (-1: it has none) with the pages that lie in order in ``again``; each once."""
        found: list[PageDifference] = []
        for number, host in enumerate(hosts.tolist()):
            if host < 0 or host in self.seen:
                continue
            self.seen.add(host)
            self._kv.scatter(self._cache.host_row(host, self._label).unsqueeze(0).to(self._kv.device), [0])
            found += [each._replace(pool_page=host, host=True)
                      for each in _difference(self._pool, 0, again, number, np.zeros(number + 1, np.int32))]
        return found


class _WindowPages:
    """The pages of the sliding layers, on the device and on the host."""

    def __init__(self, cache: PrefixCache, pool: KVPool) -> None:
        self._pool, self._hosts, self._seen = pool, _HostPages(cache, pool, WINDOW), set[int]()

    @property
    def count(self) -> int:
        """How many were compared."""
        return len(self._seen) + len(self._hosts.seen)

    def compared(self, again: KVPool, windows: tuple[np.ndarray, np.ndarray]) -> list[PageDifference]:
        """Those of a prefix, each once, with its pages that lie in order in ``again``."""
        pages, hosts = windows
        new = [number for number, page in enumerate(pages.tolist()) if page >= 0 and page not in self._seen]
        self._seen.update(pages[new].tolist())
        return _compared(self._pool, again, pages, np.array(new, np.int64)) + self._hosts.compared(again, hosts)


def _of_all_ranks(model: Model, mine: list[bytes]) -> list[bytes]:
    """The prefixes of all ranks, in one order, each once; neighbours share what they can."""
    if model.group is None:
        return mine
    group = TorchGroup(model.group, timeout_s=model.timeout_s)
    told = group.exchange(json.dumps([data.hex() for data in mine]).encode(), purpose="the exchange of cached prefixes")
    return sorted({bytes.fromhex(text) for data in told for text in json.loads(data)})


def _compared(pool: KVPool, again: KVPool, ids: np.ndarray, numbers: np.ndarray) -> list[PageDifference]:
    """Pages ``numbers`` of a prefix with the pages ``ids`` in ``pool``, which lie in order in ``again``."""
    found: list[PageDifference] = []
    for number in numbers.tolist():
        found += _difference(pool, int(ids[number]), again, number, ids)
    return found


def _difference(pool: KVPool, page: int, again: KVPool, number: int, ids: np.ndarray) -> Iterator[PageDifference]:
    """A page of ``pool`` with page ``number`` of ``again``, which has more layers if the model is a hybrid one."""
    both = (pool.page(page), again.page(number, pool.numbers))
    there, wanted = (each.contiguous().view(torch.uint8) for each in both)
    differs = (there != wanted).flatten(3).any(dim=3)  # [layers, 2, page_size]
    return differing_pages(differs.permute(2, 0, 1).cpu().numpy(), ids, again.page_size, number, pool.numbers)


class _Again(Protocol):
    """Computes prefixes, one after another, into the first pages of a pool of its own."""

    pool: KVPool

    def fill(self, tokens: np.ndarray, ids: np.ndarray) -> None:
        """``ids``: the pages of this rank that hold them, for whoever needs to know where those came from."""


def _again(
    model: Model, pool: KVPool, prefixes: Sequence[tuple[np.ndarray, np.ndarray]], recording: Recording | None
) -> _Again:
    if model.query_tiles is not None:
        return _Alone(model, pool.page_size)
    if recording is None:
        raise GateFailed("what bytes a page must have depends on the batches in which it was filled: set "
                         "engine.batch_invariant, or give the recording of the run")  # fmt: skip
    return _AsRecorded(model, recording, prefixes)


@dataclass
class _Alone:
    """By the model alone: the bits do not depend on the schedule. Keeps what a prefix shares with the one before."""

    model: Model
    page_size: int
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        self.pool = self._new_pool(1)

    def _new_pool(self, pages: int) -> KVPool:
        pool = self.model.pool(pages, self.page_size)
        pool.data.fill_(float("nan"))  # an engine's pool begins with zeros: nobody's untouched bytes are equal
        return pool

    def fill(self, tokens: np.ndarray, ids: np.ndarray) -> None:
        n = min(len(tokens), len(self.tokens))
        same = tokens[:n] == self.tokens[:n]
        at = n if same.all() else int(same.argmin())
        self._make_room(len(tokens) // self.page_size)
        table = np.arange(self.pool.pages, dtype=np.int32)
        while at < len(tokens):
            part = tokens[at : at + _CHUNK]
            row = (part, at, np.arange(at, at + len(part)), table)
            self.model.forward(Batch.build(self.pool, [row], self.model.dtype), [len(part) - 1])
            at += len(part)
        self.tokens = tokens

    def _make_room(self, pages: int) -> None:
        if pages <= self.pool.pages:
            return
        old, self.pool = self.pool, self._new_pool(max(pages, 2 * self.pool.pages))
        self.pool.data[:, :, : old.pages] = old.data


class _AsRecorded:
    """In the batches in which the pages were filled."""

    def __init__(self, model: Model, recording: Recording, prefixes: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._requests: dict[tuple[bytes, bytes], RecordedRequest] = {}
        for tokens, ids in prefixes:
            origin = tuple(recording.origin_of(page) for page in ids.tolist())
            self._requests[tokens.tobytes(), ids.tobytes()] = RecordedRequest(
                f"cached prefix {len(self._requests)}", 0, len(tokens), origin, tokens, committed=len(tokens)
            )
        todo = list(self._requests.values())
        check_recording(model, recording, todo)
        self._bench = Bench.of(model, recording, todo)
        self.pool = self._bench.pool

    def fill(self, tokens: np.ndarray, ids: np.ndarray) -> None:
        self._bench.run(self._requests[tokens.tobytes(), ids.tobytes()])
