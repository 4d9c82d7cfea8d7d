"""Pages between pool and host: by CUDA's streams where this machine has a GPU, else by threads, as each case's id says.

A slow kernel stands for a forward pass that is still running when the copies are handed over.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from distkv.host.copies import Copy, CopyEngine, CopyState, Kind
from distkv.host.cuda import CudaCopies
from distkv.host.kv import PagedKV
from distkv.host.memory import HostRows, choose_allocator
from distkv.host.open import open_copies
from distkv.host.threads import ThreadedCopies
from tests.host.plans import Plan, small_pool, small_rows

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
STORE, LOAD = Kind.STORE, Kind.LOAD
WAIT_S = 60.0
Open = Callable[[PagedKV, int], CopyEngine]

on_device = pytest.mark.parametrize("device", [DEVICE], ids=["cuda" if CUDA else "threads-for-want-of-a-gpu"])


def slow_kernel() -> None:
    """About a second of the current stream; what is launched next must wait for it."""
    if CUDA:
        torch.cuda._sleep(1_500_000_000)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def drain(engine: CopyEngine, copies: list[Copy]) -> None:
    told: list[Copy] = []
    while len(told) < len(copies):
        engine.wait(WAIT_S)
        told += engine.poll()
    assert set(told) == set(copies)
    assert all(copy.state is CopyState.DONE for copy in copies), [copy.error for copy in copies]


def warm_up(engine: CopyEngine) -> None:
    """CUDA loads a kernel when it is launched first, and waits for the device then."""
    store = Copy(STORE, 0, 0)
    load = Copy(LOAD, 0, 0, source=store)
    engine.submit([store, load])
    drain(engine, [store, load])


@pytest.fixture
def opened() -> Iterator[Open]:
    engines: list[CopyEngine] = []

    def make(kv: PagedKV, host_pages: int) -> CopyEngine:
        engines.append(open_copies(kv, host_pages, chunk_gib=3 * kv.bytes_per_page / (1 << 30), threads=2,
                                   load_timeout_s=WAIT_S))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    raw = np.random.default_rng(len(shape)).integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).squeeze(-1).to(device)


POOLS: dict[str, tuple[Callable[[torch.dtype, torch.device], Any], str | None]] = {
    "one tensor": (lambda dtype, device: noise((3, 2, 9, 4, 2, 5), dtype, device), None),
    "per layer, heads first": (lambda dtype, device: [noise((9, 2, 3, 4, 8), dtype, device) for _ in range(3)],
                               "page plane head token dim"),
    "keys and values apart": (lambda dtype, device: [noise((2, 9, 4, 2, 8), dtype, device).unbind(0) for _ in "ab"],
                              None),
    "one latent plane": (lambda dtype, device: noise((9, 3, 4, 7), dtype, device), "page layer token dim"),
}


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", POOLS)
def test_every_bit_goes_out_and_comes_back(kind: str, dtype: torch.dtype, device: torch.device, opened: Open) -> None:
    make, axes = POOLS[kind]
    kv = PagedKV(make(dtype, device), axes=axes)
    before = [kv.page_bytes(page).tobytes() for page in range(9)]
    engine = opened(kv, 7)
    stores = [Copy(STORE, page, host) for page, host in ((1, 4), (3, 5), (4, 6), (5, 0), (8, 2))]
    engine.submit(stores)
    loads = [Copy(LOAD, page, copy.host, after=(copy,), source=copy)
             for page, copy in zip((8, 5, 1, 3, 4), stores, strict=True)]
    for load in loads:  # each target is another store's page
        load.after = tuple(stores)
    engine.submit(loads)
    drain(engine, [*stores, *loads])
    wanted = list(before)
    for load in loads:
        assert load.source is not None
        wanted[load.device] = before[load.source.device]
    assert [kv.page_bytes(page).tobytes() for page in range(9)] == wanted


@on_device
@pytest.mark.parametrize("seed", range(6))
def test_random_copies_and_kernels_leave_the_bytes_of_launch_order(seed: int, device: torch.device) -> None:
    data, kv = small_pool(str(device))
    if CUDA:
        rows = HostRows(kv.layout, 5, chunk_gib=2 * kv.bytes_per_page / (1 << 30), allocator=choose_allocator(device))
        engine: CopyEngine = CudaCopies(kv, rows)
    else:
        rows = small_rows(kv)
        engine = ThreadedCopies(kv, rows, threads=2)

    def write(page: int, number: int) -> None:
        if CUDA:
            torch.cuda._sleep(2_000_000)
        data[:, :, page] = number

    try:
        Plan(engine, data, rows, random.Random(seed), write=write, quiet=synchronize).run(80)
    finally:
        engine.close()


@on_device
def test_a_store_reads_what_the_kernels_before_it_wrote(device: torch.device, opened: Open) -> None:
    """And what the kernels behind the fence write comes after it."""
    data, kv = small_pool(str(device))
    engine = opened(kv, 2)
    warm_up(engine)
    data[:, :, 2] = 40
    slow_kernel()
    data[:, :, 2] = 50
    written = torch.cuda.Event() if CUDA else None
    if written is not None:
        written.record()
    store = Copy(STORE, 2, 1)
    engine.submit([store])
    engine.fence([store])
    data[:, :, 2] = 60
    if written is not None:
        assert not written.query(), "nothing of it blocks the host"
    load = Copy(LOAD, 4, 1, source=store)
    engine.submit([load])
    drain(engine, [store, load])
    synchronize()
    assert [data[:, :, page].unique().tolist() for page in (2, 4)] == [[60], [50]]


@on_device
def test_a_load_writes_after_the_kernels_before_it_have_read(device: torch.device, opened: Open) -> None:
    data, kv = small_pool(str(device))
    engine = opened(kv, 2)
    store = Copy(STORE, 5, 0)
    engine.submit([store])
    drain(engine, [store])
    slow_kernel()
    read = data[:, :, 1].clone()
    load = Copy(LOAD, 1, 0)
    engine.submit([load])
    drain(engine, [load])
    synchronize()
    assert (read.unique().tolist(), data[:, :, 1].unique().tolist()) == ([1], [5])


@on_device
def test_what_comes_behind_a_fence_reads_what_was_loaded(device: torch.device, opened: Open) -> None:
    data, kv = small_pool(str(device))
    engine = opened(kv, 2)
    store = Copy(STORE, 3, 1)
    load = Copy(LOAD, 0, 1, source=store)
    slow_kernel()
    engine.submit([store, load])
    engine.fence([load])
    read = data[:, :, 0].clone()
    drain(engine, [store, load])
    assert read.unique().tolist() == [3]
    assert (engine.load_s(1) or 0) > 0


PINNED = CUDA and importlib.util.find_spec("cupy") is not None


@pytest.mark.parametrize("pinned", [PINNED], ids=["by-cupy" if PINNED else "pageable-for-want-of-a-gpu-or-cupy"])
def test_host_memory_is_pinned_where_it_can_be(pinned: bool) -> None:
    _, kv = small_pool()
    rows = HostRows(kv.layout, 5, chunk_gib=2 * kv.bytes_per_page / (1 << 30),
                    allocator=choose_allocator(torch.device("cuda", 0)))
    assert rows.is_pinned is pinned
    for page in range(5):
        rows.row(page).fill_(page)
        assert rows.row(page).is_pinned() is pinned
    assert [rows.row(page).unique().tolist() for page in range(5)] == [[page] for page in range(5)]
