"""What ``distkv plan`` says of the second pool of a model whose layers partly look at a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distkv.engine.config import ServeConfig
from distkv.engine.windowed import with_label
from distkv.inspection.output import size
from distkv.inspection.shape import FULL, LayerGroup, ModelShape
from distkv.windows import window_pages

__all__ = ["WindowPlan", "groups_of_main", "make_window_plan"]


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """What the layers with a sliding window take, on one rank. Bytes."""

    window_tokens: int
    """What a query sees, itself included."""
    allowance_tokens: int
    """Tokens behind it that are kept as well."""
    pages: int
    bytes_per_page: int
    per_rank: int
    pages_of_a_request: int
    """At most, however long it grows."""
    host_pages: int
    host_per_rank: int

    def lines(self) -> list[tuple[str, str]]:
        """The lines of the plan for people: a name and a text each."""
        host = f"; {self.host_pages:,} host pages, {size(self.host_per_rank)} per rank" if self.host_pages else ""
        each = size(self.bytes_per_page)
        return [
            ("window", f"{self.pages:,} pages of {each} on each rank, {size(self.per_rank)}{host}"),
            ("", (f"{self.pages_of_a_request:,} of them for one running request: {self.window_tokens:,} tokens, "
                  f"{self.allowance_tokens:,} behind them, and what is being computed")),
        ]  # fmt: skip


def groups_of_main(shape: ModelShape) -> list[LayerGroup]:
    """The layers whose pages are those of ``pool.pages``: all; in a hybrid model those with full attention alone."""
    hybrid = shape.windows is not None and shape.windows.apart
    return [group for group in shape.groups if group.kind == FULL or not hybrid]


def make_window_plan(config: ServeConfig, shape: ModelShape, groups: Sequence[LayerGroup], ranks: int, itemsize: int
                     ) -> WindowPlan | None:  # fmt: skip
    """The plan of the window's pool, or None for a model that has none; ``groups``: of main. Raises ConfigError."""
    labels = with_label(config, shape.windows, shape.context).labels
    if not labels:
        return None
    label, page = labels[0], config.cache.page_size
    each = page * sum(g.token_bytes(ranks, itemsize) for g in shape.groups if g not in groups)
    assert label.window_tokens is not None
    assert label.allowance_tokens is not None
    kept = label.window_tokens + label.allowance_tokens + (label.chunk_tokens or page)
    return WindowPlan(
        window_tokens=label.window_tokens, allowance_tokens=label.allowance_tokens, pages=label.pages,
        bytes_per_page=each, per_rank=each * label.pages, pages_of_a_request=window_pages(kept, page),
        host_pages=label.host_pages, host_per_rank=each * label.host_pages,
    )  # fmt: skip
