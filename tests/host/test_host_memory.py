"""Rows of host memory: every byte has one place, and memory that cannot be had is one error that gives all back."""

from __future__ import annotations

import importlib.util
import logging
import weakref
from dataclasses import replace

import pytest
import torch

from distkv.errors import HostMemoryError
from distkv.host.layout import KVLayout
from distkv.host.memory import CudaPinned, HostRows, Pageable, choose_allocator

LAYOUT = KVLayout(dtype="bfloat16", item_bytes=2, page_size=4, layers=2, planes=2, kv_heads=2, head_dim=5,
                  order="layer plane token head dim")
SIZE = LAYOUT.bytes_per_page
GIB = 1 << 30

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")


def chunks_of(rows: int) -> float:
    return (rows * SIZE + 1) / GIB


class Failing(Pageable):
    """Has memory for so many chunks, and knows which of them somebody still holds."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.held: list[weakref.ref[torch.UntypedStorage]] = []
        self.sizes: list[int] = []

    def allocate(self, size: int) -> torch.Tensor:
        if len(self.sizes) == self.chunks:
            raise OSError(12, "Cannot allocate memory")
        self.sizes.append(size)
        chunk = super().allocate(size)
        self.held.append(weakref.ref(chunk.untyped_storage()))
        return chunk


def test_rows_do_not_overlap_and_lie_in_chunks() -> None:
    allocator = Failing(99)
    rows = HostRows(LAYOUT, 10, chunk_gib=chunks_of(4), allocator=allocator)
    assert allocator.sizes == [4 * SIZE, 4 * SIZE, 2 * SIZE]
    assert (rows.pages, rows.bytes_per_page, rows.nbytes, rows.rows_per_chunk) == (10, SIZE, 10 * SIZE, 4)
    assert not rows.is_pinned
    for page in range(10):
        assert rows.row(page).shape == (SIZE,)
        assert rows.row(page).dtype == torch.uint8
        rows.row(page).fill_(page + 1)
    for page in range(10):
        assert rows.row(page).unique().tolist() == [page + 1]


def test_neighbours_come_as_one_view() -> None:
    rows = HostRows(LAYOUT, 10, chunk_gib=chunks_of(4))
    for page in range(10):
        rows.row(page).fill_(page)
    wanted = [2, 3, 4, 5, 9, 8, 0, 1, 1]
    found = rows.rows(wanted)
    assert [[int(row[0]) for row in run] for run in found] == [[2, 3], [4, 5], [9], [8], [0, 1], [1]]
    found[1].fill_(77)
    assert int(rows.row(5)[-1]) == 77
    assert rows.rows([]) == []


def test_a_chunk_has_at_least_one_row() -> None:
    assert HostRows(LAYOUT, 3, chunk_gib=1e-9).rows_per_chunk == 1
    assert HostRows(LAYOUT, 3, chunk_gib=1.0).rows_per_chunk == 3


@pytest.mark.parametrize("page", [-1, 10])
def test_a_row_that_is_none(page: int) -> None:
    rows = HostRows(LAYOUT, 10, chunk_gib=chunks_of(4))
    for call in (lambda: rows.row(page), lambda: rows.rows([0, page])):
        with pytest.raises(IndexError, match=r"not one of 0 to 9"):
            call()


def test_what_was_had_is_given_back_when_a_chunk_fails() -> None:
    allocator = Failing(5)
    with pytest.raises(HostMemoryError) as caught:
        HostRows(LAYOUT, 40, chunk_gib=chunks_of(4), allocator=allocator)
    error = caught.value
    assert (error.asked, error.got) == (40 * SIZE, 20 * SIZE)
    for part in (str(40 * SIZE), str(20 * SIZE), "RLIMIT_AS", "Lower host.pages", "Cannot allocate memory"):
        assert part in str(error)
    assert len(allocator.held) == 5
    assert all(storage() is None for storage in allocator.held)


def test_more_than_any_machine_has_is_an_error() -> None:
    """The kernel itself refuses: no double, no limit set."""
    huge = replace(LAYOUT, page_size=1 << 50)
    with pytest.raises(HostMemoryError, match=r"and got 0"):
        HostRows(huge, 1)


def test_no_pages() -> None:
    with pytest.raises(HostMemoryError, match=r"raise host.pages"):
        HostRows(LAYOUT, 0)


def test_close_gives_back_what_nobody_views() -> None:
    allocator = Failing(99)
    rows = HostRows(LAYOUT, 8, chunk_gib=chunks_of(4), allocator=allocator)
    view = rows.row(1)
    rows.close()
    rows.close()
    assert [storage() is None for storage in allocator.held] == [False, True]
    del view
    assert allocator.held[0]() is None


def test_many_chunks_tell_how_far_they_are(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        HostRows(LAYOUT, 40, chunk_gib=chunks_of(1))
    assert [record.getMessage().split(" of pageable")[0] for record in caplog.records] == [
        "host tier: 16 of 40 chunks", "host tier: 32 of 40 chunks"
    ]


def test_a_pool_on_the_cpu_has_plain_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        allocator = choose_allocator(torch.device("cpu"))
    assert not allocator.pinned
    assert allocator.name == "pageable"
    assert not caplog.records


@no_cuda
def test_without_cuda_plain_memory_is_taken_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        allocator = choose_allocator(torch.device("cuda", 0))
        rows = HostRows(LAYOUT, 4, allocator=allocator)
    assert not rows.is_pinned
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "no pinned memory" in record.getMessage()
    assert "no pinned memory" in rows.kind


@no_cuda
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_pinned_memory_that_is_required(device: str) -> None:
    with pytest.raises(HostMemoryError, match=r"host\.require_pinned"):
        choose_allocator(torch.device(device), require_pinned=True)


@no_cuda
@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_cupys_own_error_is_one_that_is_expected() -> None:
    with pytest.raises(RuntimeError, match=r"CUDA driver"):
        CudaPinned(0).allocate(4096)
