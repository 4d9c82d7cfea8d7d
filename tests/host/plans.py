"""Random copies between a small pool and host rows, with the bytes that must be there at the end."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from distkv.host.copies import Copy, CopyEngine, CopyState, Kind
from distkv.host.kv import PagedKV
from distkv.host.memory import HostRows

PAGES, HOST_PAGES = 6, 5
GUARD = -7


def small_pool(device: str = "cpu") -> tuple[torch.Tensor, PagedKV]:
    """A pool whose pages are each full of one number, between two guard pages that are not part of it."""
    memory = torch.full((2, 2, PAGES + 2, 3, 1, 5), GUARD, dtype=torch.int32, device=device)
    data = memory[:, :, 1:-1]
    for page in range(PAGES):
        data[:, :, page] = page
    return data, PagedKV(data)


def small_rows(kv: PagedKV) -> HostRows:
    """Two rows in a chunk."""
    return HostRows(kv.layout, HOST_PAGES, chunk_gib=(2 * kv.bytes_per_page + 1) / (1 << 30))


def row_of(kv: PagedKV, number: int) -> torch.Tensor:
    return torch.full((kv.bytes_per_page // 4,), number, dtype=torch.int32).view(torch.uint8)


class Plan:
    """Stores, loads and kernels in a random order, with what each has to wait for; and what sequential order gives.

    ``write(page, number)`` launches a kernel that fills a page of the pool. ``turn()`` lets the engine's copies go on,
    ``quiet()`` waits for all kernels.
    """

    def __init__(self, engine: CopyEngine, data: torch.Tensor, rows: HostRows, dice: random.Random, *,
                 write: Callable[[int, int], object], turn: Callable[[], object] = lambda: None,
                 quiet: Callable[[], object] = lambda: None) -> None:
        self.engine, self.data, self.rows, self.dice = engine, data, rows, dice
        self.write, self.turn, self.quiet = write, turn, quiet
        self.pool: list[int] = list(range(PAGES))
        self.host: list[int | None] = [None] * HOST_PAGES
        self.copies: list[Copy] = []
        self.told: list[Copy] = []
        self.numbers = 100

    def run(self, steps: int) -> None:
        """Then waits until all have ended, and checks every page and row."""
        for _ in range(steps):
            self.dice.choice((self.submit, self.submit, self.kernel, self.turn, self.poll))()
        while len(self.told) < len(self.copies):
            self.engine.wait(10.0)
            self.turn()
            self.poll()
        self.quiet()
        self.check()

    def running(self) -> list[Copy]:
        return [copy for copy in self.copies if not copy.ended]

    def submit(self) -> None:
        batch: list[Copy] = []
        for _ in range(self.dice.randint(1, 4)):
            copy = self.load() if self.dice.random() < 0.5 else self.store()
            if copy is not None:
                batch.append(copy)
                self.copies.append(copy)
        self.engine.submit(batch)

    def store(self) -> Copy | None:
        page, host = self.dice.randrange(PAGES), self.dice.randrange(HOST_PAGES)
        if any(copy.kind is Kind.LOAD and copy.device == page for copy in self.running()):
            return None  # only a page that is there is stored
        self.host[host] = self.pool[page]
        return Copy(Kind.STORE, page, host, after=tuple(copy for copy in self.running() if copy.host == host))

    def load(self) -> Copy | None:
        page, host = self.dice.randrange(PAGES), self.dice.randrange(HOST_PAGES)
        number = self.host[host]
        if number is None:
            return None
        self.pool[page] = number
        fills = [copy for copy in self.running() if copy.kind is Kind.STORE and copy.host == host]
        return Copy(Kind.LOAD, page, host, after=tuple(copy for copy in self.running() if copy.device == page),
                    source=fills[-1] if fills else None)

    def kernel(self) -> None:
        page = self.dice.randrange(PAGES)
        self.engine.fence([copy for copy in self.running() if copy.device == page])
        self.numbers += 1
        self.pool[page] = self.numbers
        self.write(page, self.numbers)

    def poll(self) -> None:
        self.told += self.engine.poll()

    def check(self) -> None:
        assert len(set(self.told)) == len(self.told) == len(self.copies)
        assert all(copy.state is CopyState.DONE and copy.error is None for copy in self.copies)
        assert [page.unique().tolist() for page in self.data.unbind(2)] == [[number] for number in self.pool]
        guards = self.data.as_strided((2, 2, PAGES + 2, 3, 1, 5), self.data.stride(), 0)[:, :, [0, -1]]
        assert bool((guards == GUARD).all())
        for host, number in enumerate(self.host):
            if number is not None:
                assert self.rows.row(host).view(torch.int32).unique().tolist() == [number]
