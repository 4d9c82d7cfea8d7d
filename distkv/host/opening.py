"""How a cache gets its host tier: what it is told of the engine's memory, what it tells the others, what it takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from distkv.config import Config
from distkv.errors import HostMemoryError, MessageError
from distkv.group import Group
from distkv.host.budget import HostAsk
from distkv.host.copies import CopyEngine
from distkv.host.kv import PagedKV
from distkv.host.pages import HostPages
from distkv.host.tier import HostTier, close_all
from distkv.ledger import MAIN
from distkv.memory import host_memory
from distkv.pages import PagePool

if TYPE_CHECKING:
    from distkv.start import Start

__all__ = ["ask_of", "check_memory", "open_on_all", "open_tiers"]

logger = logging.getLogger(__name__)


def check_memory(kvs: Mapping[str, object], copies: Mapping[str, object]) -> None:
    """Raises MessageError, on this rank, for what is no memory and no copy engine."""
    for engine in copies.values():
        if not isinstance(engine, CopyEngine):
            raise MessageError(f"copies must be a distkv.CopyEngine or None, not a {type(engine).__name__}")
    for kv in kvs.values():
        if not isinstance(kv, PagedKV):
            raise MessageError(f"kv must be a distkv.PagedKV or None, not a {type(kv).__name__}")


def ask_of(config: Config, kvs: Mapping[str, PagedKV], copies: Mapping[str, CopyEngine]) -> HostAsk:
    """What this rank tells the others of its memory, and if it does not fit the configuration."""
    problem = _problem(config, kvs, copies)
    label_pages = sum(label.host_pages for label in config.labels)
    if not kvs:
        return HostAsk(problem=problem, label_pages=label_pages)
    main = kvs.get(MAIN)
    layouts = [kv.layout.text if name == MAIN else f"{name}: {kv.layout.text}" for name, kv in sorted(
        kvs.items(), key=lambda item: (item[0] != MAIN, item[0]))]
    ask = HostAsk.here(host_memory(), bytes_per_page=main.bytes_per_page if main is not None else None,
                       layout="; ".join(layouts))
    label_bytes = sum(label.host_pages * kvs[label.name].bytes_per_page for label in config.labels
                      if label.name in kvs)
    return replace(ask, problem=problem, label_pages=label_pages, label_bytes=label_bytes)


def _problem(config: Config, kvs: Mapping[str, PagedKV], copies: Mapping[str, CopyEngine]) -> tuple[str, str] | None:
    sizes = [(MAIN, "pool.pages", config.pool.pages, config.host.configured, "host")]
    sizes += [(label.name, f"labels.{label.name}.pages", label.pages, label.host_pages > 0,
               f"labels.{label.name}.host_pages") for label in config.labels]
    for name, path, pages, tier, asked in sizes:
        kv = kvs.get(name)
        if kv is None:
            if tier and name not in copies:
                return asked, ("asks for a host tier, but the cache was given no memory to copy from: pass "
                               "kv=PagedKV(...), the engine's paged tensors" + (f", for label {name}" * (name != MAIN)))
            continue
        if kv.pages != pages:
            return path, f"is {pages}, but the engine's tensors have {kv.pages} pages"
        if kv.layout.page_size != config.cache.page_size:
            return "cache.page_size", (f"is {config.cache.page_size}, but a page of the engine's tensors has "
                                       f"{kv.layout.page_size} tokens")
    return None


def open_on_all(group: Group, start: Start, open_here: Callable[[], dict[str, HostTier]]) -> dict[str, HostTier]:
    """``open_here()`` on every rank. If it fails on one, all give back what they took and raise: this one what was
    raised, the others HostMemoryError."""
    if not start.plan:  # nobody has one
        return {}
    tiers: dict[str, HostTier] = {}
    error: Exception | None = None
    try:
        try:
            tiers = open_here()
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
        close_all(tiers.values())
        raise
    return tiers


def open_tiers(config: Config, start: Start, pools: Mapping[str, PagePool], kvs: Mapping[str, PagedKV],
               copies: Mapping[str, CopyEngine]) -> dict[str, HostTier]:
    """The tiers of this rank by label, with their memory; none for a label without host pages. Raises
    HostMemoryError, with nothing kept."""
    for line in start.plan:
        logger.info("%s", line)
    wanted = {MAIN: (start.host_pages, config.host.preemption_pages)}
    wanted |= {label.name: (label.host_pages, 0) for label in config.labels}
    tiers: dict[str, HostTier] = {}
    try:
        for name, (pages, kept) in wanted.items():
            if pages:
                tiers[name] = _open_tier(config, pages, kept, pools[name], kvs.get(name), copies.get(name),
                                         write_ahead=name == MAIN and config.host.write_policy == "finish")
    except BaseException:
        close_all(tiers.values())
        raise
    return tiers


def _open_tier(config: Config, host_pages: int, kept: int, pool: PagePool, kv: PagedKV | None,
               copies: CopyEngine | None, *, write_ahead: bool) -> HostTier:
    host = config.host
    try:  # before threads and memory are taken, which would have to be given back
        pages = HostPages(host_pages, kept)
    except MemoryError as error:
        raise HostMemoryError(f"no memory for the books of {host_pages} host pages; lower host.pages (or "
                              "host.gib_per_rank, host.gib_per_node)", asked=0, got=0) from error
    if copies is None:
        from distkv.host.open import open_copies

        assert kv is not None
        copies = open_copies(kv, host_pages, chunk_gib=host.chunk_gib, threads=host.copy_threads,
                             load_timeout_s=host.load_timeout_s, require_pinned=host.require_pinned)
    return HostTier(pages, copies, pool, write_ahead=write_ahead)
