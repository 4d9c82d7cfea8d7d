"""The ledgers of a cache's labels, as the configuration has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from distkv.config import Config
from distkv.errors import MessageError
from distkv.host.kv import PagedKV
from distkv.host.tier import HostTier
from distkv.label_config import LabelConfig
from distkv.ledger import MAIN, CopyPage, Ledger
from distkv.pages import PagePool
from distkv.windows import RollingLedger, SlidingLedger

T = TypeVar("T")

__all__ = ["by_label", "copier", "in_order", "ledgers", "pools"]


def by_label(given: T | Mapping[str, T] | None, config: Config, what: str) -> dict[str, T]:
    """What was given for each label: a mapping, or one thing for ``main``.

    Raises MessageError for unknown labels, and for one thing for two of them.
    """
    if given is None:
        return {}
    found = dict(given) if isinstance(given, Mapping) else {MAIN: given}
    known = [MAIN, *(label.name for label in config.labels)]
    for name in found:
        if name not in known:
            raise MessageError(f"{what} has something for label {name!r}; the configuration has {', '.join(known)}")
    if len({id(each) for each in found.values()}) < len(found):
        raise MessageError(f"{what} has one object for two labels; their page ids overlap, so give each one of its own")
    return found


def in_order(config: Config) -> list[LabelConfig]:
    """The labels beside ``main``, those of sliding layers last."""
    return sorted(config.labels, key=lambda label: label.kind == "sliding")


def pools(config: Config) -> dict[str, PagePool]:
    """An empty pool for each label, ``main`` first."""
    return {MAIN: PagePool(config.pool.pages, config.pool.scratch_pages),
            **{label.name: PagePool(label.pages, label.scratch_pages) for label in in_order(config)}}


def ledgers(config: Config, pools: Mapping[str, PagePool], tiers: Mapping[str, HostTier],
            kvs: Mapping[str, PagedKV], copy_page: CopyPage | None) -> list[Ledger]:
    """The ledgers of the labels beside ``main``; of ``kvs`` and ``copy_page`` see :func:`copier`."""
    return [_ledger(config, label, pools[label.name], tiers.get(label.name), copier(label.name, kvs, copy_page))
            for label in in_order(config)]


def _ledger(config: Config, label: LabelConfig, pool: PagePool, tier: HostTier | None,
            copy_page: CopyPage | None) -> Ledger:
    size = config.cache.page_size
    if label.kind == "full":
        return Ledger(pool, size, label=label.name, tier=tier, copy_page=copy_page)
    assert label.window_tokens is not None
    kind = SlidingLedger if label.kind == "sliding" else RollingLedger
    allowance = label.allowance_tokens
    if allowance is None:
        allowance = size + config.cache.next_token_depth if label.kind == "sliding" else 0
    return kind(pool, size, label=label.name, window=label.window_tokens, allowance=allowance,
                chunk=label.chunk_tokens or size, tier=tier, copy_page=copy_page)


def copier(label: str, kvs: Mapping[str, PagedKV], given: CopyPage | None) -> CopyPage | None:
    """What copies a page of this label: ``given``, else its memory; None if there is neither."""
    if given is not None or label not in kvs:
        return given

    def copy_page(label: str, source: int, target: int) -> None:
        kvs[label].copy_page(source, target)

    return copy_page
