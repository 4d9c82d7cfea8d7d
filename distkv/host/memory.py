"""The host tier's memory: one row of bytes for each host page, in chunks, pinned where a GPU copies from it.

Never named shared memory: containers give 64 MiB of it, and more is a bus error.
"""

from __future__ import annotations

import logging
import mmap
import resource
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from distkv.errors import HostMemoryError
from distkv.host.layout import KVLayout

__all__ = ["Allocator", "CudaPinned", "HostRows", "Pageable", "choose_allocator"]

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_PROBE = 4096
_LOG_EVERY = 16  # chunks
_TROUBLE = (RuntimeError, OSError, MemoryError)  # CuPy's CUDARuntimeError is a RuntimeError, mmap's is an OSError


class Allocator(Protocol):
    """Where chunks come from. The memory is given back when the tensor, and every view of it, is gone."""

    pinned: bool
    name: str
    """For the log: ``pinned``, or ``pageable`` and why."""

    def allocate(self, size: int) -> torch.Tensor:
        """uint8 ``[size]``, of any content. Raises RuntimeError, OSError or MemoryError."""


class Pageable:
    """Plain private memory, in huge pages where the kernel has them for whoever asks.

    Every page of it is touched here, by torch's threads, so that no copy has to wait for the kernel to find memory.
    """

    pinned = False

    def __init__(self, why: str = "") -> None:
        self.name = f"pageable ({why})" if why else "pageable"

    def allocate(self, size: int) -> torch.Tensor:
        """uint8 ``[size]``. Raises OSError if the kernel refuses."""
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advice = getattr(mmap, "MADV_HUGEPAGE", None)
        if advice is not None:
            try:
                area.madvise(advice)
            except OSError:  # a kernel without huge pages
                logger.debug("no huge pages for the host tier", exc_info=True)
        chunk = torch.frombuffer(area, dtype=torch.uint8)
        chunk[:: mmap.PAGESIZE].fill_(0)
        return chunk


class CudaPinned:
    """Page-locked memory from CuPy, for the copies of one GPU. CUDA touches it when it locks it.

    Not from CuPy's pool of pinned memory, which keeps what is given back.
    """

    pinned = True
    name = "pinned"

    def __init__(self, device: int) -> None:
        """``device``: of CUDA; a context of another GPU would take memory there. Raises ImportError without CuPy."""
        import cupy

        self._cuda: Any = cupy.cuda
        self._device = device

    def allocate(self, size: int) -> torch.Tensor:
        """uint8 ``[size]``. Raises CuPy's CUDARuntimeError, which is a RuntimeError."""
        with self._cuda.Device(self._device):
            memory = self._cuda.PinnedMemory(size, self._cuda.runtime.hostAllocPortable)
        return torch.frombuffer(self._cuda.PinnedMemoryPointer(memory, 0), dtype=torch.uint8, count=size)


def choose_allocator(device: torch.device, *, require_pinned: bool = False) -> Allocator:
    """Pinned memory for a pool on a GPU, if 4 KiB of it can be had now; for a pool on the CPU plain memory.

    Tried once, here: what fails later is an error, because memory that is short must not turn into slow memory that
    nobody asked for. With ``require_pinned`` it is tried for any pool, and HostMemoryError says why there is none.
    """
    if device.type != "cuda" and not require_pinned:
        return Pageable()
    try:
        import cupy

        if not cupy.cuda.is_available():
            raise RuntimeError("CuPy finds no CUDA device")
        pinned = CudaPinned((device.index or 0) if device.type == "cuda" else 0)
        pinned.allocate(_PROBE)
    except (ImportError, RuntimeError) as error:
        why = f"no pinned memory: {_line(error)}"
        if require_pinned:
            raise HostMemoryError(
                f"{why}. Install CuPy for this CUDA (cupy-cuda12x), or set host.require_pinned to false", asked=_PROBE,
                got=0,
            ) from error
        logger.info("host tier: %s; plain memory is taken, and copies to and from the GPU are slower", why)
        return Pageable(why)
    return pinned


class HostRows:
    """``[pages, bytes_per_page]`` of host memory for pages of one layout. Owns it until :meth:`close`.

    In chunks of whole rows, because one huge allocation fails with errors that mislead, and locking it stops every CUDA
    process of the host for as long as it takes. Which row belongs to whom is the tier's business.
    """

    def __init__(self, layout: KVLayout, pages: int, *, chunk_gib: float = 1.0,
                 allocator: Allocator | None = None) -> None:
        """``chunk_gib``: GiB of a chunk, at least one row. Raises HostMemoryError, and gives back what it got."""
        self.layout = layout
        self.pages = pages
        self.bytes_per_page = layout.bytes_per_page
        self._allocator = allocator or Pageable()
        self.is_pinned = self._allocator.pinned
        self.kind = self._allocator.name
        self.rows_per_chunk = max(1, min(pages, int(chunk_gib * _GIB) // self.bytes_per_page))
        """Rows of every chunk but the last, which may be smaller."""
        if pages < 1:
            raise HostMemoryError(f"a host tier of {pages} pages holds nothing; raise host.pages", asked=0, got=0)
        self._chunks: list[torch.Tensor] = []
        self._allocate()

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.pages * self.bytes_per_page

    @property
    def chunks(self) -> Sequence[torch.Tensor]:
        """Views ``[n, bytes_per_page]`` of all rows in order: ``rows_per_chunk`` in each, but for the last."""
        return tuple(self._chunks)

    def row(self, page: int) -> torch.Tensor:
        """The row of a host page: uint8 ``[bytes_per_page]``, a view."""
        if not 0 <= page < self.pages:
            raise IndexError(f"host page {page} is not one of 0 to {self.pages - 1}")
        return self._chunks[page // self.rows_per_chunk][page % self.rows_per_chunk]

    def rows(self, pages: Sequence[int]) -> list[torch.Tensor]:
        """The rows of host pages, in this order, as views ``[n, bytes_per_page]``: neighbours come as one."""
        runs: list[list[int]] = []
        for page in pages:
            if not 0 <= page < self.pages:
                raise IndexError(f"host page {page} is not one of 0 to {self.pages - 1}")
            if runs and page == sum(runs[-1]) and page % self.rows_per_chunk:
                runs[-1][1] += 1
            else:
                runs.append([page, 1])
        size = self.rows_per_chunk
        return [self._chunks[first // size][first % size : first % size + n] for first, n in runs]

    def close(self) -> None:
        """Gives the memory back as soon as nobody has a view of it. Nothing may copy any more. Can be called again."""
        self._chunks.clear()

    def _allocate(self) -> None:
        number = -(-self.pages // self.rows_per_chunk)
        while len(self._chunks) < number:
            rows = min(self.rows_per_chunk, self.pages - len(self._chunks) * self.rows_per_chunk)
            try:  # without a name for the chunk: the error's traceback would keep the memory
                self._chunks.append(self._allocator.allocate(rows * self.bytes_per_page).view(rows, -1))
            except _TROUBLE as error:
                got = len(self._chunks) * self.rows_per_chunk * self.bytes_per_page
                self._chunks.clear()
                raise self._error(rows * self.bytes_per_page, got, error) from error
            if len(self._chunks) % _LOG_EVERY == 0 and len(self._chunks) < number:
                logger.info("host tier: %d of %d chunks of %s memory, %.2f of %.2f GiB", len(self._chunks), number,
                            self.kind, len(self._chunks) * self.rows_per_chunk * self.bytes_per_page / _GIB,
                            self.nbytes / _GIB)

    def _error(self, chunk: int, got: int, error: BaseException) -> HostMemoryError:
        names = ("RLIMIT_MEMLOCK",) if self.is_pinned else ("RLIMIT_AS", "RLIMIT_DATA")
        limits = "; ".join(f"{name} is {_limit(name)}" for name in names)
        return HostMemoryError(
            f"the host tier asked for {self.nbytes} bytes ({self.pages} pages of {self.bytes_per_page}) of {self.kind} "
            f"memory and got {got}, which are given back; the next {chunk} failed: {_line(error)}. {limits}. "
            f"Lower host.pages (or host.gib_per_rank, host.gib_per_node)",
            asked=self.nbytes, got=got,
        )


def _limit(name: str) -> str:
    soft, _ = resource.getrlimit(getattr(resource, name))
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
