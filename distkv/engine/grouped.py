"""Attention in which several query heads share one head of keys and values."""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

__all__ = ["attend"]


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *,
    mask: torch.Tensor | None = None, causal: bool = False, sinks: torch.Tensor | None = None, sink_keys: int = 1,
) -> torch.Tensor:
    """Attention of ``[n, heads, d]`` over ``[tokens, kv_heads, d]``; returns ``[n, heads, d]``.

    ``mask`` is ``[n, tokens]``, additive. The heads of a group see their keys and values without a copy.
    ``sinks`` (``[heads]``): a score of each head that takes part in its softmax and has no value. It becomes a key of
    zeros in front of the others, with the score in the mask; ``sink_keys`` keys for a kernel that wants a certain
    number, of which all but the first are hidden.
    """
    if sinks is not None:
        keys, values = (pad(each, (0, 0, 0, 0, sink_keys, 0)) for each in (keys, values))
        mask, causal = _with_sinks(query, keys, mask, sinks, sink_keys, causal=causal), False
    n, heads, d = query.shape
    tokens, kv_heads, _ = keys.shape
    group = heads // kv_heads
    q = query.reshape(n, kv_heads, group, d).permute(1, 2, 0, 3)
    k = keys.permute(1, 0, 2).unsqueeze(1).expand(kv_heads, group, tokens, d)
    v = values.permute(1, 0, 2).unsqueeze(1).expand(kv_heads, group, tokens, d)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(n, heads, d)


def _with_sinks(
    query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor, sink_keys: int, *,
    causal: bool,
) -> torch.Tensor:
    """``[kv_heads, group, n, tokens]``, additive: ``mask``, or what ``causal`` says, behind the sinks' scores."""
    (n, heads, _), (tokens, kv_heads, _) = query.shape, keys.shape
    whole = torch.zeros(heads, n, tokens, dtype=query.dtype, device=query.device)
    if mask is not None:
        whole[:, :, sink_keys:] = mask
    elif causal:
        hidden = torch.ones(n, tokens - sink_keys, dtype=torch.bool, device=query.device).triu_(diagonal=1)
        whole[:, :, sink_keys:].masked_fill_(hidden, float("-inf"))
    whole[:, :, 1:sink_keys] = float("-inf")
    whole[:, :, 0] = sinks.to(query.dtype)[:, None]
    return whole.view(kv_heads, heads // kv_heads, n, tokens)
