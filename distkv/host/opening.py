"""How a cache gets its host tier: what it is told of the engine's memory, what it tells the others, what it takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from distkv.config import Config
from distkv.errors import HostMemoryError, MessageError
from distkv.group import Group
from distkv.host.budget import HostAsk
from distkv.host.copies import CopyEngine
from distkv.host.kv import PagedKV
from distkv.host.pages import HostPages
from distkv.host.tier import HostTier
from distkv.memory import host_memory
from distkv.pages import PagePool

if TYPE_CHECKING:
    from distkv.start import Start

__all__ = ["ask_of", "check_memory", "open_on_all", "open_tier"]

logger = logging.getLogger(__name__)


def check_memory(kv: object, copies: object) -> None:
    """Raises MessageError, on this rank, for what is no memory and no copy engine."""
    if copies is not None and not isinstance(copies, CopyEngine):
        raise MessageError(f"copies must be a distkv.CopyEngine or None, not a {type(copies).__name__}")
    if kv is not None and not isinstance(kv, PagedKV):
        raise MessageError(f"kv must be a distkv.PagedKV or None, not a {type(kv).__name__}")


def ask_of(config: Config, kv: PagedKV | None, copies: CopyEngine | None) -> HostAsk:
    """What this rank tells the others of its memory, and if it does not fit the configuration."""
    problem = _problem(config, kv, copies)
    if kv is None:
        return HostAsk(problem=problem)
    ask = HostAsk.here(host_memory(), bytes_per_page=kv.bytes_per_page, layout=kv.layout.text)
    return replace(ask, problem=problem)


def _problem(config: Config, kv: PagedKV | None, copies: CopyEngine | None) -> tuple[str, str] | None:
    if kv is None:
        if not config.host.configured or copies is not None:
            return None
        return "host", ("asks for a host tier, but the cache was given no memory to copy from: pass kv=PagedKV(...), "
                        "the engine's paged tensors")
    if kv.pages != config.pool.pages:
        return "pool.pages", f"is {config.pool.pages}, but the engine's tensors have {kv.pages} pages"
    if kv.layout.page_size != config.cache.page_size:
        return "cache.page_size", (f"is {config.cache.page_size}, but a page of the engine's tensors has "
                                   f"{kv.layout.page_size} tokens")
    return None


def open_on_all(group: Group, start: Start, open_here: Callable[[], HostTier | None]) -> HostTier | None:
    """``open_here()`` on every rank. If it fails on one, all give back what they took and raise: this one what was
    raised, the others HostMemoryError."""
    if not start.plan:  # nobody has one
        return None
    tier: HostTier | None = None
    error: Exception | None = None
    try:
        try:
            tier = open_here()
        except Exception as failed:  # noqa: BLE001 - raised below, when the others know: they would wait for this rank
            error = failed
        told = group.exchange(b"" if error is None else (str(error) or type(error).__name__).encode())
        if error is not None:
            raise error
        for rank, text in enumerate(told):
            if text:
                raise HostMemoryError(f"rank {rank} has no host tier, so no rank starts: {text.decode()}", asked=0,
                                      got=0)
    except BaseException:  # the exchange itself may fail
        if tier is not None:
            tier.close()
        raise
    return tier


def open_tier(config: Config, start: Start, pool: PagePool, kv: PagedKV | None,
              copies: CopyEngine | None) -> HostTier | None:
    """The tier of this rank, with its memory; None if it has no host pages. Raises HostMemoryError."""
    for line in start.plan:
        logger.info("%s", line)
    if not start.host_pages:
        return None
    host = config.host
    try:  # before threads and memory are taken, which would have to be given back
        pages = HostPages(start.host_pages, host.preemption_pages)
    except MemoryError as error:
        raise HostMemoryError(f"no memory for the books of {start.host_pages} host pages; lower host.pages (or "
                              "host.gib_per_rank, host.gib_per_node)", asked=0, got=0) from error
    if copies is None:
        from distkv.host.open import open_copies

        assert kv is not None
        copies = open_copies(kv, start.host_pages, chunk_gib=host.chunk_gib, threads=host.copy_threads,
                             load_timeout_s=host.load_timeout_s, require_pinned=host.require_pinned)
    return HostTier(pages, copies, pool, write_ahead=host.write_policy == "finish")
