"""The paged KV memory of one rank, and what the gate needs to compare it byte for byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from distkv.errors import ConfigError, SequenceError
from distkv.host.kv import PagedKV
from distkv.memory import host_memory

__all__ = ["KVPool", "available_memory"]


_GIB = 1 << 30


def available_memory() -> int | None:
    """Bytes that this process can still get from the host without driving others out; None where it is unknown.

    A limit of the control group counts, too; see :func:`distkv.memory.host_memory`.
    """
    return host_memory().room


def _too_large(field: str, pages: int, page_size: int, size: int, why: str) -> ConfigError:
    return ConfigError(
        field,
        f"needs {size / _GIB:.2f} GiB on this rank ({pages} pages of {page_size} tokens), but {why}; lower it",
    )


class KVPool:
    """Keys and values of some layers: ``data`` is ``[layers, 2, pages, page_size, kv_heads, head_dim]``.

    ``kv_heads`` is this rank's share. A slot is ``page * page_size + offset``; slots come from the cache's
    sequences, and the pool itself knows nothing of owners: whoever writes a slot must own its page. Methods take the
    numbers that the layers have in the model. ``layers``: how many, from 0 on, or their numbers. Raises ConfigError,
    for the setting ``field``, if the memory cannot hold it.
    """

    def __init__(
        self,
        *,
        layers: int | Sequence[int],
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        field: str = "pool.pages",
    ) -> None:
        self.numbers = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        """The layers, by their numbers in the model."""
        shape = (len(self.numbers), 2, pages, page_size, kv_heads, head_dim)
        size = math.prod(shape) * dtype.itemsize
        room = available_memory() if torch.device(device).type == "cpu" else None
        if room is not None and size > room:
            raise _too_large(field, pages, page_size, size, f"{room / _GIB:.2f} GiB are available")
        try:
            # Not zeros(): the kernel gives that memory when it is first touched, and until then it counts as free, for
            # the budget of the host tier and for other ranks.
            self.data = torch.empty(shape, dtype=dtype, device=device).zero_()
        except RuntimeError as error:  # what the allocators of CPU and GPU raise
            raise _too_large(field, pages, page_size, size, str(error).splitlines()[0]) from error
        self.layers, self.pages, self.page_size = len(self.numbers), pages, page_size
        self._places = {number: place for place, number in enumerate(self.numbers)}
        # one flat view per layer and plane, made once: making a view costs more than writing one token
        self._flat = [[self.data[layer, plane].view(-1, kv_heads, head_dim) for plane in (0, 1)]
                      for layer in range(self.layers)]

    def __contains__(self, layer: int) -> bool:
        """Whether the pool has this layer of the model."""
        return layer in self._places

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores ``keys`` and ``values`` (``[n, kv_heads, head_dim]``) at ``slots`` (int64 ``[n]``)."""
        flat = self._flat[self._places[layer]]
        flat[0].index_copy_(0, slots, keys)
        flat[1].index_copy_(0, slots, values)

    def gather(
        self, layer: int, pages: torch.Tensor, tokens: int, padded: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``tokens`` keys and values of a page table (int64 ``[n]``), ``[tokens, kv_heads, head_dim]``.

        With ``padded`` there are that many, zeros behind the real ones: what a page's earlier owner left there may be
        NaN, and a weight of 0 does not hide that.
        """
        planes = self.data[self._places[layer]]
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

    def gather_between(
        self, layer: int, pages: torch.Tensor, first: int, start: int, stop: int, place: tuple[int, int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens ``start .. stop - 1``, ``[stop - start, kv_heads, head_dim]``.

        ``pages`` (int64 ``[n]``) is a page table that begins with the sequence's page ``first``. With ``place``, a
        begin and an end in tokens, they lie there among zeros, as in :meth:`gather`. Raises ``SequenceError`` for
        tokens in front of the table: they were given up, and nobody may read them.
        """
        at, end = start // self.page_size, -(-stop // self.page_size)
        if at < first or end > first + len(pages):
            raise SequenceError(f"attention reads tokens {start} .. {stop - 1}, and the page table has the pages from "
                                f"{first} to {first + len(pages) - 1}, of {self.page_size} tokens each")
        planes, skip = self.data[self._places[layer]], start - at * self.page_size
        found = [plane.index_select(0, pages[at - first : end - first]).flatten(0, 1)[skip : skip + stop - start]
                 for plane in planes]
        if place is None:
            return found[0], found[1]
        out = planes.new_zeros(2, place[1] - place[0], *planes.shape[3:])
        for plane, read in zip(out, found, strict=True):
            plane[start - place[0] : stop - place[0]] = read
        return out[0], out[1]

    def page(self, page: int, layers: Sequence[int] | None = None) -> torch.Tensor:
        """Keys and values of one page, ``[layers, 2, page_size, kv_heads, head_dim]``; ``layers``: of these alone."""
        whole = self.data[:, :, page]
        if layers is None or tuple(layers) == self.numbers:
            return whole
        return whole[[self._places[number] for number in layers]]

    def token_hashes(self, pages: np.ndarray, tokens: int, layers: Sequence[int] | None = None) -> np.ndarray:
        """64-bit hashes of the bytes of a sequence's first ``tokens`` tokens: uint64 ``[tokens, layers, 2]``.

        ``pages`` is its page table; ``layers``: of these alone. By token, so that a difference names its place in the
        page; what lies behind the tokens in the last page is whatever an earlier owner left, and is not looked at.
        """
        count = self.layers if layers is None else len(layers)
        out = np.empty((tokens, count, 2), dtype=np.uint64)
        digest = xxhash.xxh3_64_intdigest
        for first in range(0, tokens, self.page_size):
            n = min(self.page_size, tokens - first)
            page = self.page(int(pages[first // self.page_size]), layers)[:, :, :n].transpose(0, 2).contiguous()
            data = memoryview(page.view(torch.uint8).cpu().numpy().data).cast("B")
            size = len(data) // (n * 2 * count)
            hashes = np.fromiter((digest(data[i : i + size]) for i in range(0, len(data), size)), dtype=np.uint64)
            out[first : first + n] = hashes.reshape(n, 2, count).transpose(0, 2, 1)
        return out

    def one_page(self) -> KVPool:
        """A pool of one page that is laid out as the pages here are."""
        kv_heads, head_dim = self.data.shape[4:]
        return KVPool(layers=self.numbers, pages=1, page_size=self.page_size, kv_heads=kv_heads, head_dim=head_dim,
                      dtype=self.data.dtype, device=self.data.device)  # fmt: skip

    def paged(self, shard: int = 0, shards: int = 1) -> PagedKV:
        """These pages as the host tier copies them; ``shard`` of ``shards``: this rank's share of the heads."""
        return PagedKV(self.data, shard=shard, shards=shards)

    def bytes_per_page(self) -> int:
        """Bytes of one page, all layers, keys and values, on this rank."""
        return self.data[:, :, 0].numel() * self.data.element_size()
