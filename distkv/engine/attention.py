"""Paged attention for an unmodified ``transformers`` decoder.

The function :func:`paged_attention` is registered under the name ``distkv`` with ``AttentionInterface``; a batch of
several requests is one flat sequence, and the object that says which rows belong to whom, :class:`Batch`, travels as
an ordinary keyword argument of the model's forward. No mask function is registered for the name, so the model builds
no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from distkv.engine.grouped import attend
from distkv.engine.pool import KVPool
from distkv.engine.tiles import Attention
from distkv.engine.windowed import WindowPages, WindowRows, Windows
from distkv.errors import ModelError

if TYPE_CHECKING:
    from distkv.engine.ulysses import Share

__all__ = ["ATTENTION_NAME", "Batch", "Span", "paged_attention", "register"]

ATTENTION_NAME = "distkv"

# What decoders pass to an attention function and what plain causal attention may ignore.
_IGNORED = frozenset({"position_ids", "output_attentions", "use_cache", "cache", "is_causal", "logits_to_keep",
                      "output_router_logits"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one request in a batch: tokens ``start .. start + n - 1`` of a sequence with the table ``pages``."""

    start: int
    n: int
    pages: torch.Tensor  # int64 [ceil((start + n) / page_size)], None of them shared for writing
    mask: torch.Tensor | None = None  # [n, start + n], additive, only where a chunk has tokens before it


@dataclass(slots=True)
class Batch:
    """One forward pass: flat ``tokens``, ``positions`` and ``slots`` (int64 ``[rows]``) and the spans in row order.

    ``calls`` counts the layers that came through :func:`paged_attention`, so that a model which computes attention
    in some other way is found out and not served without its KV memory. A span with an empty table is a filler: its
    rows are computed to give a batch its size, and attend to nothing. ``tiled`` is how a batch-invariant model attends.
    ``share`` is this rank's part in the batch if its rows are split over ranks. ``windows``: which layers of the model
    have a sliding window; ``apart``: where those write and read, if it is not ``pool``.
    """

    pool: KVPool
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    spans: Sequence[Span]
    calls: int = field(default=0)
    tiled: Attention | None = None
    share: Share | None = None
    windows: Windows | None = None
    apart: WindowPages | None = None
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Of spans behind a window that begins within them, by start and number of rows."""

    @classmethod
    def build(
        cls,
        pool: KVPool,
        rows: Sequence[tuple[np.ndarray, int, np.ndarray, np.ndarray]],
        dtype: torch.dtype,
        apart: tuple[KVPool, Sequence[WindowRows]] | None = None,
    ) -> Batch:
        """From ``(token ids, start, slots, page table)`` of each request, in row order.

        ``apart``: the pool of the sliding layers and each request's place there. Without it ``pool`` has all layers.
        """
        device = pool.data.device
        tokens = np.concatenate([ids for ids, *_ in rows]).astype(np.int64)
        positions = np.concatenate([np.arange(start, start + len(ids)) for ids, start, *_ in rows])
        slots = np.concatenate([slots for *_, slots, _ in rows]).astype(np.int64)
        spans = []
        for ids, start, _, pages in rows:
            n = len(ids)
            needed = -(-(start + n) // pool.page_size) if len(pages) else 0
            table = torch.from_numpy(np.asarray(pages[:needed], dtype=np.int64)).to(device)
            spans.append(Span(start, n, table, _mask(start, n, dtype, device) if needed else None))
        to = [torch.from_numpy(np.ascontiguousarray(a, dtype=np.int64)).to(device) for a in (tokens, positions, slots)]
        return cls(pool, to[0], to[1], to[2], spans, apart=WindowPages(*apart) if apart is not None else None)


def _mask(start: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Which kernel a chunk takes depends on ``(start, n)`` alone: the same schedule must give the same bits."""
    if start == 0 or n == 1:
        return None
    allowed = torch.ones(n, start + n, dtype=torch.bool, device=device).tril_(diagonal=start)
    return torch.zeros(n, start + n, dtype=dtype, device=device).masked_fill_(~allowed, float("-inf"))


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    distkv: Batch | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that the model's layers call.

    ``query`` is ``[1, heads, rows, d]``, ``key`` and ``value`` ``[1, kv_heads, rows, d]``, positions applied. Writes K
    and V to their slots first, then lets each span attend over its pages, so a row sees exactly what a later request
    will see. Returns ``[1, rows, heads, d]``. Where rows are split over ranks, ``rows`` and ``heads`` are what this one
    computes outside attention, and all rows of its own heads come together in between. ``s_aux``: a sink's score of
    each head. Raises ``ModelError`` for anything but causal attention, full or with the model's sliding window.
    """
    if distkv is None:
        raise ModelError(f"a model with {type(module).__name__} is not served: its layers do not hand the keyword "
                         "argument distkv= of the model's forward on to the attention function")  # fmt: skip
    odd = sorted(name for name, given in others.items() if given is not None and name not in _IGNORED)
    if not getattr(module, "is_causal", True):
        odd.append("attention in both directions")
    if odd or attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} asks for {', '.join(odd) or 'a mask'}, which the paged attention does not have: "
            "only causal attention is served, to all tokens or a sliding window (no chunks, no soft cap)"
        )
    layer = module.layer_idx
    window = distkv.windows.seen_from(layer) if distkv.windows is not None else None
    if window != sliding_window:
        raise ModelError(f"{type(module).__name__} asks for a sliding window of {sliding_window} tokens in layer "
                         f"{layer}, and the model's configuration says {window}; it is not served")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if distkv.share is not None:
        q, k, v = distkv.share.enter(q, k, v)
    if s_aux is not None and len(s_aux) != q.shape[1]:
        raise ModelError(f"{type(module).__name__} has sinks of {len(s_aux)} heads, and this rank has {q.shape[1]} of "
                         "them: they are not split; set parallel.tp and parallel.sp to 1")
    apart = distkv.apart if window is not None else None
    pool, slots = (distkv.pool, distkv.slots) if apart is None else (apart.pool, apart.slots)
    pool.write(layer, slots, k, v)
    scale = float(scaling) if scaling is not None else q.shape[-1] ** -0.5
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    row = 0
    for i, span in enumerate(distkv.spans):
        rows = slice(row, row + span.n)
        row += span.n
        if not len(span.pages):
            out[rows] = 0
        elif window is None:
            out[rows] = _full(distkv, layer, span, q[rows], scale, s_aux)
        else:
            pages, first = (span.pages, 0) if apart is None else (apart.tables[i], apart.firsts[i])
            out[rows] = _windowed(distkv, layer, span, q[rows], scale, s_aux, window, pool, pages, first)
    distkv.calls += 1
    if distkv.share is not None:
        out = distkv.share.leave(out)
    return out.unsqueeze(0), None


def _full(
    batch: Batch, layer: int, span: Span, query: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of one span to all that lies before each row."""
    tokens = span.start + span.n
    if batch.tiled is not None:
        keys, values = batch.pool.gather(layer, span.pages, tokens, batch.tiled.keys(tokens))
        return batch.tiled(query, keys, values, span.start, scale, sinks)
    keys, values = batch.pool.gather(layer, span.pages, tokens)
    causal = span.start == 0 and span.n > 1
    return attend(query, keys, values, scale, mask=span.mask, causal=causal, sinks=sinks)


def _windowed(
    batch: Batch, layer: int, span: Span, query: torch.Tensor, scale: float, sinks: torch.Tensor | None, window: int,
    pool: KVPool, pages: torch.Tensor, first: int,
) -> torch.Tensor:
    """Attention of one span to a sliding window; its table ``pages`` begins with page ``first`` of the sequence.

    What is read, and so the bits, depends on the span and the window alone: not on how much of it the table has.
    """
    begin, end = max(0, span.start - window + 1), span.start + span.n
    if batch.tiled is not None:
        place = batch.tiled.window_keys(span.start, span.n, window)
        keys, values = pool.gather_between(layer, pages, first, begin, end, place)
        return batch.tiled.windowed(query, keys, values, span.start, scale, window, sinks)
    keys, values = pool.gather_between(layer, pages, first, begin, end)
    if end <= window:  # nothing is out of sight yet
        return attend(query, keys, values, scale, mask=span.mask, causal=span.start == 0 and span.n > 1, sinks=sinks)
    mask = _window_mask(batch, span, window, query) if span.n > 1 else None
    return attend(query, keys, values, scale, mask=mask, sinks=sinks)


def _window_mask(batch: Batch, span: Span, window: int, like: torch.Tensor) -> torch.Tensor:
    """``[n, keys]``, additive, for the keys from where the first row's window begins; all layers have the same."""
    found = batch.masks.get((span.start, span.n))
    if found is None:
        rows = torch.arange(span.start, span.start + span.n, device=like.device)[:, None]
        keys = torch.arange(max(0, span.start - window + 1), span.start + span.n, device=like.device)[None]
        hidden = (keys > rows) | (keys <= rows - window)
        found = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
        batch.masks[span.start, span.n] = found
    return found


def register() -> None:
    """Makes the attention known to ``transformers``; calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
