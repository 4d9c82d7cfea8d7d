"""The copy engine that fits a pool: of the GPU that it lies on, or threads."""

from __future__ import annotations

import logging

from distkv.errors import HostMemoryError, LayoutMismatch
from distkv.host.copies import CopyEngine
from distkv.host.cuda import CudaCopies
from distkv.host.kv import PagedKV
from distkv.host.memory import HostRows, choose_allocator
from distkv.host.threads import ThreadedCopies

__all__ = ["open_copies"]

logger = logging.getLogger(__name__)


def open_copies(
    kv: PagedKV,
    host_pages: int,
    *,
    chunk_gib: float = 1.0,
    threads: int = 2,
    load_timeout_s: float = 10.0,
    require_pinned: bool = False,
) -> CopyEngine:
    """Takes memory for ``host_pages`` pages of ``kv`` and starts what copies between the two; ``close`` ends both.

    The arguments are the settings of section ``host`` with these names. Raises HostMemoryError if memory, threads or
    streams cannot be had, and LayoutMismatch for a pool on a device that is neither a CPU nor CUDA's; nothing is kept
    then.
    """
    if kv.device.type not in ("cpu", "cuda"):
        raise LayoutMismatch(f"the host tier copies from pools on cpu and cuda, and this one is on {kv.device}")
    allocator = choose_allocator(kv.device, require_pinned=require_pinned)
    rows = HostRows(kv.layout, host_pages, chunk_gib=chunk_gib, allocator=allocator)
    engine: CopyEngine
    try:
        if kv.device.type == "cuda":
            engine = CudaCopies(kv, rows, load_timeout_s=load_timeout_s)
        else:
            engine = ThreadedCopies(kv, rows, threads=threads, load_timeout_s=load_timeout_s)
    except RuntimeError as error:  # torch's and threading's
        rows.close()
        raise HostMemoryError(f"the copies between the pool on {kv.device} and the host cannot start: {error}. Lower "
                              "host.copy_threads, or leave the GPU some more memory", asked=0, got=0) from error
    except BaseException:
        rows.close()
        raise
    logger.info("host tier: %d pages, %.2f GiB, %s; a page is %s; copied %s", rows.pages, rows.nbytes / (1 << 30),
                rows.kind, kv.layout.text,
                f"by {threads} threads" if kv.device.type == "cpu" else f"by streams of {kv.device}")
    return engine
