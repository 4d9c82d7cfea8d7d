"""Choosing tokens. Every rank has the same logits, bit for bit, and chooses the same without a word to the others.

The random number of a token is a function of the request's seed and the token's position and of nothing else: no
rank, batch, step or earlier draw enters. So a request is answered with the same tokens alone and among others, cold and
warm, wherever its logits have the same bits (``engine.batch_invariant``).

Temperature, then top-k, then top-p, as in transformers and vLLM. Ranks on unlike processors are out: their exponentials
may differ in the last bit, as may their logits before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distkv.errors import ModelError

__all__ = ["Sampling", "choose", "draw", "largest", "seed_of", "uniform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of one request are drawn. Checked where the request came in, see ``Prompt`` for the fields."""

    temperature: float
    """Above 0."""
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    """0 to 2**64 - 1."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53: Philox4x64-10 (Salmon et al., SC 2011), key seed, counter position.

    numpy promises the stream of its bit generators for good.
    """
    return float(int(np.random.Philox(key=seed, counter=position).random_raw()) >> 11) * 2.0**-53


def seed_of(seed: int, sample: int) -> int:
    """The seed of a request's sample: that of a request of its own that is answered alike. Sample 0 has ``seed``."""
    return (seed + sample) % 2**64


def draw(logits: np.ndarray, sampling: Sampling, position: int) -> int:
    """One token of float logits ``[vocab]``, the largest of them finite; ``position`` is the token's own.

    The inverse of the distribution function over what top-k and top-p leave, in the order of token ids: in that order
    logits that differ in the last bit move each bound by as little, where tokens sorted by likelihood would change
    places. The sums are float64.
    """
    values = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # minus infinity is right
        weights = np.exp((values - values.max()) / sampling.temperature)
    if sampling.top_k is not None and sampling.top_k < len(weights):
        weights = _kept(weights, largest(values, sampling.top_k))
    if sampling.top_p < 1.0:
        weights = _kept(weights, _nucleus(weights, sampling.top_p))
    sums = np.cumsum(weights)
    # The rounded product may be the whole sum; below it the token found has a weight.
    target = min(uniform(sampling.seed, position) * sums[-1], np.nextafter(sums[-1], 0.0))
    return int(np.searchsorted(sums, target, side="right"))


def _kept(weights: np.ndarray, keep: np.ndarray) -> np.ndarray:
    out = np.zeros_like(weights)
    out[keep] = weights[keep]
    return out


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Ids of the ``k`` largest values; of equal ones the lowest ids."""
    bound = np.partition(values, -k)[-k]
    ids = np.flatnonzero(values >= bound)
    return ids[np.argsort(-values[ids], kind="stable")[:k]]


def _nucleus(weights: np.ndarray, p: float) -> np.ndarray:
    """Ids of the fewest most likely tokens whose share is at least ``p``; of equal ones the lowest ids."""
    total = weights.sum()
    # All tokens below this weight have less than 1 - p together, so none is in the set: few are left to be sorted.
    ids = np.flatnonzero(weights >= total * (1.0 - p) / len(weights))
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    return ids[: int(np.searchsorted(np.cumsum(weights[ids]), p * total, side="left")) + 1]


def choose(logits: torch.Tensor, asked: Sequence[tuple[Sampling | None, int]]) -> list[int]:
    """A token for each row of ``[rows, vocab]``; ``asked`` has each row's sampling and the position of its new token.

    None is greedy: the most likely token, the lowest id on a tie (numpy promises the first; torch does not). Raises
    ``ModelError`` where the best logit is not a number: damaged weights.
    """
    if not len(logits):
        return []
    values = logits.float().cpu().numpy()
    best = values.argmax(axis=1)
    if not np.isfinite(values[np.arange(len(best)), best]).all():
        raise ModelError("the model gave logits that are not numbers; are its weights damaged?")
    return [
        int(top) if sampling is None else draw(row, sampling, position)
        for row, top, (sampling, position) in zip(values, best, asked, strict=True)
    ]
