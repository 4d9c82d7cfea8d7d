"""Batch invariance: a row's bits must not depend on how many rows are computed with it, nor on its place among them.

The kernels underneath choose by size: a product of 3 rows, of 100 and of 1,000 may add in three orders, attention
treats its last 512 keys and a last odd query apart, and an activation computes the end of its vector with another
``exp``. So in this mode a kernel only ever sees a few fixed sizes. A batch is cut into tiles of :data:`ROWS` rows, the
last one filled with zeros; a larger tile is used only where it was seen, at start and on this machine, to give the
bits of the small one (:mod:`distkv.engine.invariant`). Keys are gathered into a multiple of :data:`KEYS`, and an
explicit mask hides what a query must not see, always: the causal kernel is another kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import linear, pad

from distkv.engine.grouped import attend

__all__ = ["KEYS", "ROWS", "SIZES", "Attention", "Rows", "cut", "padded_keys", "padded_queries", "padded_rows"]

ROWS = 16
"""Rows of the smallest tile. Its bits are the reference for the larger ones."""

SIZES = (256, 64, ROWS)
"""Tiles that are tried, largest first."""

KEYS = 512
"""Keys that CPU attention treats as one block; a last block of another size is another kernel."""


def padded_rows(n: int) -> int:
    """Rows of a product or an activation, fillers included."""
    return -(-n // ROWS) * ROWS


def padded_queries(n: int) -> int:
    """Queries of one request in attention, fillers included."""
    return -(-n // ROWS) * ROWS


def padded_keys(n: int) -> int:
    """Keys that a tile of queries is given, hidden ones included."""
    return -(-n // KEYS) * KEYS


def _first_key(position: int, window: int) -> int:
    """Where the keys begin that the queries of one block are given: those of the block of its first one's window."""
    return max(0, position // KEYS * KEYS - window + 1) // KEYS * KEYS


def cut(n: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """``n`` rows as tiles ``(first, last + 1)``, the largest first; what no size fits is the last tile."""
    tiles, at = [], 0
    for size in sizes:
        while n - at >= size:
            tiles.append((at, at + size))
            at += size
    return [*tiles, (at, n)] if at < n else tiles


@dataclass(slots=True)
class Rows:
    """Computes ``function`` of ``[..., width]`` row by row, in tiles of ``sizes``. Keeps nothing of its inputs."""

    function: Callable[[torch.Tensor], torch.Tensor]
    sizes: tuple[int, ...] = SIZES

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        n = len(flat)
        if not n:  # the output layer in a batch that samples nothing
            return self.function(x)
        rows = padded_rows(n)
        if rows > n:
            flat = pad(flat, (0, 0, 0, rows - n))
        tiles = cut(rows, self.sizes)
        out = self.function(flat) if len(tiles) == 1 else torch.cat([self.function(flat[a:b]) for a, b in tiles])
        return out[:n].view(*x.shape[:-1], out.shape[-1])

    @classmethod
    def of(cls, module: nn.Module) -> Rows:
        """Of a linear layer, or of another module whose forward takes rows."""
        if isinstance(module, nn.Linear):
            return cls(lambda x: linear(x, module.weight, module.bias))
        return cls(module.forward)


@dataclass(slots=True)
class Attention:
    """Attention of one request's queries in tiles; ``masks`` has those of the batch that runs, for all its layers."""

    sizes: tuple[int, ...] = SIZES
    masks: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def keys(self, tokens: int) -> int:
        """How many keys have to be there for a request of so many tokens."""
        return padded_keys(tokens)

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``query`` is ``[n, heads, d]`` at positions ``start ..``; ``keys``, ``values`` ``[tokens, kv_heads, d]``.

        ``tokens`` is at least ``self.keys(start + n)``; what lies behind the request's tokens has to be finite.
        ``sinks``: see :func:`distkv.engine.grouped.attend`. Returns ``[n, heads, d]``.
        """
        n = len(query)
        rows = padded_queries(n)
        if rows > n:
            query = pad(query, (0, 0, 0, 0, 0, rows - n))
        out = []
        for a, b in cut(rows, self.sizes):
            visible = padded_keys(start + min(b, n))
            mask = self._mask(start + a, b - a, visible, query)
            out.append(attend(query[a:b], keys[:visible], values[:visible], scale, mask=mask, sinks=sinks,
                              sink_keys=KEYS))  # fmt: skip
        return (out[0] if len(out) == 1 else torch.cat(out))[:n]

    def window_keys(self, start: int, n: int, window: int) -> tuple[int, int]:
        """Begin and end, in tokens, of the keys that have to be there for queries ``start .. start + n - 1``."""
        return _first_key(start, window), padded_keys(start + n)

    def windowed(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scale: float, window: int,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The same where a query sees itself and the ``window - 1`` tokens before it.

        The queries of one block of :data:`KEYS` positions are all given the same keys, from a multiple of it on to the
        end of the block, wherever the request's window begins in memory and however its rows were cut. ``keys`` and
        ``values`` are those of :meth:`window_keys`, zeros where nothing is to be seen.
        """
        n, origin, out = len(query), _first_key(start, window), []
        at = 0
        while at < n:
            end = padded_keys(start + at + 1)
            most = min(n, end - start)
            first = _first_key(start + at, window)
            seen = slice(first - origin, end - origin)
            part = query[at:most]
            rows = padded_queries(len(part))
            if rows > len(part):
                part = pad(part, (0, 0, 0, 0, 0, rows - len(part)))
            done = []
            for a, b in cut(rows, self.sizes):
                mask = self._window_mask(start + at + a, b - a, first, end, window, query)
                done.append(attend(part[a:b], keys[seen], values[seen], scale, mask=mask, sinks=sinks, sink_keys=KEYS))
            out.append((done[0] if len(done) == 1 else torch.cat(done))[: most - at])
            at = most
        return out[0] if len(out) == 1 else torch.cat(out)

    def _window_mask(
        self, start: int, rows: int, first: int, end: int, window: int, like: torch.Tensor
    ) -> torch.Tensor:
        """``[rows, end - first]``, additive. A filler behind the block sees what its last query sees."""
        found = self.masks.get((start, rows, first, end, window))
        if found is None:
            positions = torch.arange(start, start + rows, device=like.device).clamp_(max=end - 1)[:, None]
            keys = torch.arange(first, end, device=like.device)[None]
            hidden = (keys > positions) | (keys <= positions - window)
            found = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
            self.masks[start, rows, first, end, window] = found
        return found

    def _mask(self, first: int, rows: int, keys: int, like: torch.Tensor) -> torch.Tensor:
        """``[rows, keys]``, additive. A filler sees what lies before its place: a row of -inf would give NaN."""
        found = self.masks.get((first, rows, keys))
        if found is None:
            hidden = torch.ones(rows, keys, dtype=torch.bool, device=like.device).triu_(diagonal=first + 1)
            found = torch.zeros(rows, keys, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
            self.masks[first, rows, keys] = found
        return found
