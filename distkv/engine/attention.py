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
from distkv.errors import ModelError

if TYPE_CHECKING:
    from distkv.engine.ulysses import Share

__all__ = ["ATTENTION_NAME", "Batch", "Span", "paged_attention", "register"]

ATTENTION_NAME = "distkv"

# What decoders pass to an attention function and what plain causal attention may ignore.
_IGNORED = frozenset({"position_ids", "output_attentions", "use_cache", "cache", "is_causal", "logits_to_keep"})


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
    ``share`` is this rank's part in the batch if its rows are split over ranks.
    """

    pool: KVPool
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    spans: Sequence[Span]
    calls: int = field(default=0)
    tiled: Attention | None = None
    share: Share | None = None

    @classmethod
    def build(
        cls,
        pool: KVPool,
        rows: Sequence[tuple[np.ndarray, int, np.ndarray, np.ndarray]],
        dtype: torch.dtype,
    ) -> Batch:
        """From ``(token ids, start, slots, page table)`` of each request, in row order."""
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
        return cls(pool, to[0], to[1], to[2], spans)


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
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that the model's layers call.

    ``query`` is ``[1, heads, rows, d]``, ``key`` and ``value`` ``[1, kv_heads, rows, d]``, positions applied. Writes K
    and V to their slots first, then lets each span attend over its pages, so a row sees exactly what a later request
    will see. Returns ``[1, rows, heads, d]``. Where rows are split over ranks, ``rows`` and ``heads`` are what this one
    computes outside attention, and all rows of its own heads come together in between.
    Raises ``ModelError`` for anything but plain causal attention.
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
            "only full causal attention is served (no sliding window, no soft cap, no sinks)"
        )
    layer = module.layer_idx
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if distkv.share is not None:
        q, k, v = distkv.share.enter(q, k, v)
    distkv.pool.write(layer, distkv.slots, k, v)
    scale = float(scaling) if scaling is not None else q.shape[-1] ** -0.5
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    row = 0
    for span in distkv.spans:
        rows = slice(row, row + span.n)
        row += span.n
        if not len(span.pages):
            out[rows] = 0
            continue
        tokens = span.start + span.n
        if distkv.tiled is not None:
            keys, values = distkv.pool.gather(layer, span.pages, tokens, distkv.tiled.keys(tokens))
            out[rows] = distkv.tiled(q[rows], keys, values, span.start, scale)
            continue
        keys, values = distkv.pool.gather(layer, span.pages, tokens)
        causal = span.start == 0 and span.n > 1
        out[rows] = attend(q[rows], keys, values, scale, mask=span.mask, causal=causal)
    distkv.calls += 1
    if distkv.share is not None:
        out = distkv.share.leave(out)
    return out.unsqueeze(0), None


def register() -> None:
    """Makes the attention known to ``transformers``; calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
