"""Models whose layers partly look at a sliding window: which layers, their pool, and the cache's label for it.

Such a model has two pools: ``main`` for the layers with full attention, and a second one, of the label
:data:`WINDOW`, in which a running request keeps the pages of its last tokens alone. The label's settings follow from
the model and from the engine's own; a user says how large it is, and how far back an edited conversation may go on
from. A model that has nothing but sliding layers has one pool: all its tokens stay in ``main``, and a mask hides
what a query must not see.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from distkv.errors import ConfigError
from distkv.grid import Grid
from distkv.label_config import LabelConfig
from distkv.windows import window_pages

if TYPE_CHECKING:
    from distkv.engine.config import ServeConfig
    from distkv.engine.pool import KVPool

__all__ = ["FULL", "SLIDING", "WINDOW", "WindowPages", "WindowRows", "Windows", "grid_step", "label_of", "with_label"]

logger = logging.getLogger(__name__)

WINDOW = "window"
"""The label of the layers with a sliding window."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""What ``transformers`` calls the two kinds of layers."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The layers of a model that have a sliding window."""

    layers: tuple[int, ...]
    """Their numbers in the model."""
    tokens: int
    """What a query sees: itself and the ``tokens - 1`` before it. ``transformers`` counts its ``sliding_window`` so:
    key k is seen from position q if ``q - sliding_window < k <= q``."""
    apart: bool
    """Whether there are layers with full attention, too, so that these have a pool of their own."""

    @classmethod
    def of(cls, settings: Any) -> Windows | None:
        """From a ``transformers`` configuration; None if every layer has full attention."""
        tokens = getattr(settings, "sliding_window", None)
        kinds = getattr(settings, "layer_types", None)
        if kinds is None:
            kinds = [SLIDING if tokens is not None else FULL] * settings.num_hidden_layers
        layers = tuple(number for number, kind in enumerate(kinds) if kind == SLIDING)
        return cls(layers, int(tokens), apart=len(layers) < len(kinds)) if layers and tokens is not None else None

    def seen_from(self, layer: int) -> int | None:
        """What a query sees in this layer, in tokens; None: all that lies before it."""
        return self.tokens if layer in self.layers else None


def grid_step(pages: int, boundaries: int) -> int:
    """Pages between two places at which a prompt of so many pages can be matched (see ``cache.window_boundaries``)."""
    return Grid(pages, boundaries).step


def label_of(config: ServeConfig, windows: Windows, context: int, *, any_scheduler: bool = False) -> LabelConfig:
    """The label of a hybrid model's sliding layers, as section ``window`` and the engine's settings have it.

    ``context``: the longest request, in tokens. ``any_scheduler``: whether pieces of a prompt may be longer than
    ``engine.chunk_tokens``. Raises ConfigError for a pool that has no place for one request.
    """
    given, page = config.window, config.cache.page_size
    if config.host.configured and config.host.pages is None and given.host_pages is None:
        raise ConfigError("window.host_pages", "is missing: the size of the host tier is given in GiB, of which the "
                                               "layers with a sliding window have none; give their host pages, or 0")
    step = grid_step(-(-context // page), config.cache.window_boundaries)
    allowance = given.allowance_tokens
    if allowance is None:
        allowance = step * page + config.cache.next_token_depth
    chunk = config.engine.batch_tokens if any_scheduler else config.chunk_tokens
    if config.cache.asynchronous:  # a batch is launched before the one in flight is committed
        chunk *= 2
    label = LabelConfig(
        name=WINDOW, kind="sliding", pages=config.window_pages, host_pages=config.window_host_pages,
        window_tokens=windows.tokens, allowance_tokens=allowance, chunk_tokens=chunk,
    )  # fmt: skip
    least = min(window_pages(windows.tokens + allowance + chunk, page), -(-context // page), config.pool.pages)
    if label.pages < least:
        raise ConfigError("window.pages", f"is {label.pages}, and one request takes up to {least}: the window of "
                                          f"{windows.tokens} tokens, {allowance} behind it (window.allowance_tokens) "
                                          f"and {chunk} that are being computed; raise it")  # fmt: skip
    return label


def with_label(config: ServeConfig, windows: Windows | None, context: int, *, any_scheduler: bool = False
               ) -> ServeConfig:  # fmt: skip
    """What the cache is configured with. Raises ConfigError for labels of the user's own."""
    if config.labels:
        raise ConfigError("labels", "are made by the engine, from the model; take them out. Section window has the "
                                    "settings for layers with a sliding window")  # fmt: skip
    if windows is None or not windows.apart:
        return config
    label, page = label_of(config, windows, context, any_scheduler=any_scheduler), config.cache.page_size
    step = grid_step(-(-context // page), config.cache.window_boundaries)
    assert label.allowance_tokens is not None
    if label.allowance_tokens < step * page - 1:
        logger.warning(
            "window.allowance_tokens is %d: the end of a long request may not be found again, as one of the model's "
            "%d tokens is matched at multiples of %d pages only; set it to %d, or raise cache.window_boundaries",
            label.allowance_tokens, context, step, step * page,
        )  # fmt: skip
    if config.cache.index_on == "finish":
        logger.info("the model has layers with a sliding window, and cache.index_on is finish: only the end of a "
                    "request can be gone on from; with fill other requests can share its beginning, such as a system "
                    "prompt")
    return replace(config, labels=(label,))


@dataclass(frozen=True, slots=True)
class WindowRows:
    """The place of one request's rows in the window's pool: of a launch, before the batch is made."""

    slots: np.ndarray
    """Where its tokens go, int64."""
    pages: np.ndarray
    """Its page table, int32, a copy."""
    first: int
    """Number of the table's first page in the sequence."""


class WindowPages:
    """What the sliding layers of one batch write and read, where they have a pool of their own."""

    def __init__(self, pool: KVPool, rows: Sequence[WindowRows]) -> None:
        """``rows``: of each request, in the order of the batch."""
        device = pool.data.device
        self.pool = pool
        self.slots = torch.from_numpy(np.concatenate([row.slots for row in rows]).astype(np.int64)).to(device)
        self.tables = [torch.from_numpy(row.pages.astype(np.int64)).to(device) for row in rows]
        self.firsts = [row.first for row in rows]
