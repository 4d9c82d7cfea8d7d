"""Attention in which several query heads share one head of keys and values."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend"]


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *,
    mask: torch.Tensor | None = None, causal: bool = False,
) -> torch.Tensor:
    """Attention of ``[n, heads, d]`` over ``[tokens, kv_heads, d]``; returns ``[n, heads, d]``.

    ``mask`` is ``[n, tokens]``, additive. The heads of a group see their keys and values without a copy.
    """
    n, heads, d = query.shape
    tokens, kv_heads, _ = keys.shape
    group = heads // kv_heads
    q = query.reshape(n, kv_heads, group, d).permute(1, 2, 0, 3)
    k = keys.permute(1, 0, 2).unsqueeze(1).expand(kv_heads, group, tokens, d)
    v = values.permute(1, 0, 2).unsqueeze(1).expand(kv_heads, group, tokens, d)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(n, heads, d)
