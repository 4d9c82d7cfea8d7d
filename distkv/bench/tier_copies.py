"""Spill and load by the real copy engine, as a share of a plain copy of the same bytes between the same two memories.

The plain copy is torch's, of one contiguous piece: by all its threads on a CPU, from and to pinned memory on a GPU.
Engine and plain copy take turns, each first in every second repeat, so that what else the machine does falls on both,
and the share is the median of the pairs' ratios. Times are the wall clock's: copies are what other threads and the GPU
do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

import numpy as np
import torch

from distkv.bench.rows import markdown, number
from distkv.engine.pool import KVPool
from distkv.errors import InvariantError
from distkv.host.copies import Copy, CopyEngine, CopyState, Kind
from distkv.host.kv import PagedKV
from distkv.host.memory import HostRows, choose_allocator
from distkv.host.open import open_copies

__all__ = ["TARGET", "Bandwidth", "Shape", "measure", "table"]

TARGET = 0.8
"""Least share of a plain copy, with all pages given at once."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A pool as the reference engine has it, and how much of it is copied at a time. The defaults are SmolLM2's."""

    layers: int = 30
    kv_heads: int = 3
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mib: int = 192
    """MiB of a measurement, in whole pages. The pool has twice as many, and so has the host."""
    threads: int = 2
    """``host.copy_threads``."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """One case: seconds of every repeat, by the engine and by the plain copy beside it."""

    what: str
    page_size: int
    page_bytes: int
    pages: int
    at_once: int
    """How many pages the engine has at a time; it gets the next when one has ended."""
    engine: tuple[float, ...]
    plain: tuple[float, ...]

    @property
    def share(self) -> float:
        """Of the plain copy's bandwidth: the median of the pairs' ratios."""
        return median(plain / engine for engine, plain in zip(self.engine, self.plain, strict=True))

    @property
    def reached(self) -> bool | None:
        """Whether the target was; there is one where the engine has all pages at once."""
        return None if self.at_once < self.pages else self.share >= TARGET

    def rate(self, seconds: Iterable[float]) -> float:
        """GB/s (10**9) by the median."""
        return self.pages * self.page_bytes / median(seconds) / 1e9

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"what": self.what, "page_size": self.page_size, "page_bytes": self.page_bytes, "pages": self.pages,
                "at_once": self.at_once, "share": self.share, "reached": self.reached, "engine_s": self.engine,
                "plain_s": self.plain}


def measure(shape: Shape, page_size: int, repeat: int) -> list[Bandwidth]:
    """Spill, load and both together with all pages at once, and spill and load with four and one at a time.

    Four only if they are not all."""
    memories = _Memories(shape, page_size)
    try:
        memories.check_bytes()
        return list(_cases(memories, repeat))
    finally:
        memories.close()


def _cases(memories: _Memories, repeat: int) -> Iterator[Bandwidth]:
    n = memories.pages
    cases: list[tuple[str, tuple[Kind, ...], int]] = [
        ("spill", (Kind.STORE,), n), ("load", (Kind.LOAD,), n), ("spill and load", (Kind.STORE, Kind.LOAD), 2 * n),
    ]  # fmt: skip
    for few in (4, 1):
        if few < n:  # else it would be the first two again
            cases += [("spill", (Kind.STORE,), few), ("load", (Kind.LOAD,), few)]
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in cases]
    for turn in range(-1, repeat):  # the first is not counted
        for (_, kinds, at_once), (engine, plain) in zip(cases, times, strict=True):
            both: list[tuple[Callable[[], float], list[float]]] = [
                (lambda k=kinds, m=at_once: memories.by_engine(k, m), engine),  # type: ignore[misc]
                (lambda k=kinds: memories.plainly(k), plain),  # type: ignore[misc]
            ]
            for call, seconds in both if turn % 2 else reversed(both):
                took = call()
                if turn >= 0:
                    seconds.append(took)
    for (what, kinds, at_once), (engine, plain) in zip(cases, times, strict=True):
        yield Bandwidth(what, memories.page_size, memories.kv.bytes_per_page, len(kinds) * n, min(at_once, 2 * n),
                        tuple(engine), tuple(plain))


class _Memories:
    """A pool of random bytes, a copy engine with as many host pages, and host memory for the plain copy."""

    def __init__(self, shape: Shape, page_size: int) -> None:
        self.page_size = page_size
        item = shape.dtype.itemsize
        page_bytes = shape.layers * 2 * page_size * shape.kv_heads * shape.head_dim * item
        self.pages = n = max(4, shape.mib * _MIB // page_bytes)
        pool = KVPool(layers=shape.layers, pages=2 * n, page_size=page_size, kv_heads=shape.kv_heads,
                      head_dim=shape.head_dim, dtype=shape.dtype, device=shape.device)
        self._bytes = pool.data.view(torch.uint8).flatten()
        self._bytes.random_(0, 256)  # memory that was never written is no memory
        self.kv = PagedKV(pool.data)
        self._random = np.random.default_rng(0)
        self._rows = HostRows(self.kv.layout, n, allocator=choose_allocator(self.kv.device))
        self._engine: CopyEngine = open_copies(self.kv, 2 * n, threads=shape.threads)

    def close(self) -> None:
        self._engine.close()
        self._rows.close()

    def by_engine(self, kinds: tuple[Kind, ...], at_once: int) -> float:
        """Seconds until the engine has told of the end of every copy: of pages here and there, in any order."""
        waiting = self._copies(kinds)
        self._settle()
        under_way: set[Copy] = set()
        began = time.perf_counter()
        while waiting or under_way:
            new = [waiting.popleft() for _ in range(min(at_once - len(under_way), len(waiting)))]
            self._engine.submit(new)
            under_way.update(new)
            if kinds == (Kind.STORE,):  # a cache waits for what it spills by a fence, and for loads by wait
                self._engine.fence(under_way)
            else:
                self._engine.wait(1.0)
            under_way.difference_update(_good(self._engine.poll()))
        return time.perf_counter() - began

    def plainly(self, kinds: tuple[Kind, ...]) -> float:
        """Seconds of as many bytes in one piece, each kind in a stream of its own where there are streams."""
        size = self.pages * self.kv.bytes_per_page
        first = int(self._random.integers(0, self.pages + 1)) * self.kv.bytes_per_page
        piece = self._bytes[first : first + size].view(self.pages, -1)
        lanes = [self._lane() for _ in kinds]
        self._settle()
        began = time.perf_counter()
        for kind, lane in zip(kinds, lanes, strict=True):
            with lane:
                at = 0
                for rows in self._rows.rows(range(self.pages)):
                    part = piece[at : at + len(rows)]
                    at += len(rows)
                    target, source = (rows, part) if kind is Kind.STORE else (part, rows)
                    target.copy_(source, non_blocking=True)
        self._settle()
        return time.perf_counter() - began

    def check_bytes(self) -> None:
        """What is timed moves bytes: a page that was spilled, overwritten and loaded is what it was."""
        device, host = self._random.integers(0, self.pages, 2).tolist()
        before = self.kv.page_bytes(device)
        self._one(Copy(Kind.STORE, device, host))
        self.kv.copy_page(device + 1, device)
        self._settle()
        if np.array_equal(self.kv.page_bytes(device), before):
            raise InvariantError("the pool's pages are alike: nothing would be seen of a copy")
        self._one(Copy(Kind.LOAD, device, host))
        if not np.array_equal(self.kv.page_bytes(device), before):
            raise InvariantError("a page that was spilled and loaded has other bytes: nothing to measure")

    def _copies(self, kinds: tuple[Kind, ...]) -> deque[Copy]:
        """As many pages each way, by turns; no page comes twice, here or there."""
        device, host = (self._random.permutation(2 * self.pages).reshape(2, -1).tolist() for _ in range(2))
        each = [[Copy(kind, *places) for places in zip(device[i], host[i], strict=True)]
                for i, kind in enumerate(kinds)]
        return deque(chain.from_iterable(zip(*each, strict=True)))

    def _one(self, copy: Copy) -> None:
        self._engine.submit([copy])
        while not copy.ended:
            self._engine.wait(1.0)
            _good(self._engine.poll())

    def _lane(self) -> AbstractContextManager[object]:
        if self.kv.device.type != "cuda":
            return nullcontext()
        stream: AbstractContextManager[object] = torch.cuda.stream(torch.cuda.Stream(self.kv.device))  # type: ignore[no-untyped-call]
        return stream

    def _settle(self) -> None:
        if self.kv.device.type == "cuda":
            torch.cuda.synchronize(self.kv.device)


def _good(copies: Iterable[Copy]) -> list[Copy]:
    ended = list(copies)
    for copy in ended:
        if copy.state is CopyState.FAILED and copy.error is not None:
            raise copy.error
    return ended


def table(found: Iterable[Bandwidth]) -> str:
    """Bandwidths and shares as a Markdown table."""
    head = ["what", "page, tokens", "page, MiB", "pages at once", "engine, GB/s", "plain, GB/s", "share, %", "target",
            "reached"]
    lines = []
    for one in found:
        lines.append([
            one.what, number(one.page_size), f"{one.page_bytes / _MIB:.2f}",
            number(one.at_once) if one.reached is None else f"all {number(one.pages)}", f"{one.rate(one.engine):.2f}",
            f"{one.rate(one.plain):.2f}", f"{100 * one.share:.0f}", "" if one.reached is None else f">= {TARGET:.0%}",
            {True: "yes", False: "NO", None: ""}[one.reached],
        ])
    return markdown(head, lines)
