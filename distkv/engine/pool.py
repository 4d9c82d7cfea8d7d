"""The paged KV memory of one rank, and what the gate needs to compare it byte for byte."""

from __future__ import annotations

import math

import numpy as np
import torch
import xxhash

from distkv.errors import ConfigError
from distkv.host.kv import PagedKV
from distkv.memory import host_memory

__all__ = ["KVPool", "available_memory"]


_GIB = 1 << 30


def available_memory() -> int | None:
    """Bytes that this process can still get from the host without driving others out; None where it is unknown.

    A limit of the control group counts, too; see :func:`distkv.memory.host_memory`.
    """
    return host_memory().room


def _too_large(pages: int, page_size: int, size: int, why: str) -> ConfigError:
    return ConfigError(
        "pool.pages",
        f"needs {size / _GIB:.2f} GiB on this rank ({pages} pages of {page_size} tokens), but {why}; lower it",
    )


class KVPool:
    """Keys and values of all layers: ``data`` is ``[layers, 2, pages, page_size, kv_heads, head_dim]``.

    ``kv_heads`` is this rank's share. A slot is ``page * page_size + offset``; slots come from the cache's
    sequences, and the pool itself knows nothing of owners: whoever writes a slot must own its page.
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layers, 2, pages, page_size, kv_heads, head_dim)
        size = math.prod(shape) * dtype.itemsize
        room = available_memory() if torch.device(device).type == "cpu" else None
        if room is not None and size > room:
            raise _too_large(pages, page_size, size, f"{room / _GIB:.2f} GiB are available")
        try:
            # Not zeros(): the kernel gives that memory when it is first touched, and until then it counts as free, for
            # the budget of the host tier and for other ranks.
            self.data = torch.empty(shape, dtype=dtype, device=device).zero_()
        except RuntimeError as error:  # what the allocators of CPU and GPU raise
            raise _too_large(pages, page_size, size, str(error).splitlines()[0]) from error
        self.layers, self.pages, self.page_size = layers, pages, page_size
        # one flat view per layer and plane, made once: making a view costs more than writing one token
        self._flat = [[self.data[layer, plane].view(-1, kv_heads, head_dim) for plane in (0, 1)]
                      for layer in range(layers)]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores ``keys`` and ``values`` (``[n, kv_heads, head_dim]``) at ``slots`` (int64 ``[n]``)."""
        self._flat[layer][0].index_copy_(0, slots, keys)
        self._flat[layer][1].index_copy_(0, slots, values)

    def gather(
        self, layer: int, pages: torch.Tensor, tokens: int, padded: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``tokens`` keys and values of a page table (int64 ``[n]``), ``[tokens, kv_heads, head_dim]``.

        With ``padded`` there are that many, zeros behind the real ones: what a page's earlier owner left there may be
        NaN, and a weight of 0 does not hide that.
        """
        planes = self.data[layer]
        if padded is not None:
            return self._padded(planes[0], pages, tokens, padded), self._padded(planes[1], pages, tokens, padded)
        keys = planes[0].index_select(0, pages).flatten(0, 1)[:tokens]
        values = planes[1].index_select(0, pages).flatten(0, 1)[:tokens]
        return keys, values

    def _padded(self, plane: torch.Tensor, pages: torch.Tensor, tokens: int, padded: int) -> torch.Tensor:
        held = len(pages) * self.page_size
        out = plane.new_empty(max(held, padded), *plane.shape[2:])
        torch.index_select(plane, 0, pages, out=out[:held].view(-1, *plane.shape[1:]))
        out[tokens:].zero_()
        return out[:padded]

    def token_hashes(self, pages: np.ndarray, tokens: int) -> np.ndarray:
        """64-bit hashes of the bytes of a sequence's first ``tokens`` tokens: uint64 ``[tokens, layers, 2]``.

        ``pages`` is its page table. By token, so that a difference names its place in the page; what lies behind
        the tokens in the last page is whatever an earlier owner left, and is not looked at.
        """
        out = np.empty((tokens, self.layers, 2), dtype=np.uint64)
        digest = xxhash.xxh3_64_intdigest
        for first in range(0, tokens, self.page_size):
            n = min(self.page_size, tokens - first)
            page = self.data[:, :, int(pages[first // self.page_size]), :n].transpose(0, 2).contiguous()
            data = memoryview(page.view(torch.uint8).cpu().numpy().data).cast("B")
            size = len(data) // (n * 2 * self.layers)
            hashes = np.fromiter((digest(data[i : i + size]) for i in range(0, len(data), size)), dtype=np.uint64)
            out[first : first + n] = hashes.reshape(n, 2, self.layers).transpose(0, 2, 1)
        return out

    def paged(self, shard: int = 0, shards: int = 1) -> PagedKV:
        """These pages as the host tier copies them; ``shard`` of ``shards``: this rank's share of the heads."""
        return PagedKV(self.data, shard=shard, shards=shards)

    def bytes_per_page(self) -> int:
        """Bytes of one page, all layers, keys and values, on this rank."""
        return self.data[:, :, 0].numel() * self.data.element_size()
