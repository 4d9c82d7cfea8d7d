"""Choosing tokens. Every rank has the same logits, so every rank chooses the same."""

from __future__ import annotations

import numpy as np
import torch

from distkv.errors import ModelError

__all__ = ["greedy"]


def greedy(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row, the lowest id on a tie (numpy promises the first; torch does not)."""
    if not len(logits):
        return []
    values = logits.float().cpu().numpy()
    best = values.argmax(axis=1)
    if not np.isfinite(values[np.arange(len(best)), best]).all():
        raise ModelError("the model gave logits that are not numbers; are its weights damaged?")
    return [int(b) for b in best]
