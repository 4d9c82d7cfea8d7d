"""Bytes of bookkeeping for each cached token, as the allocator of Python counts them."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import numpy as np

from distkv.bench.rows import Row
from distkv.bench.workloads import FINGERPRINT, Sizes, store, tokens
from distkv.books import Books
from distkv.chain import Namer
from distkv.pages import PagePool


def per_token(sizes: Sizes) -> Iterator[Row]:
    """What an index that fills its pool takes, by tracemalloc: every object and every array buffer, numpy's included.

    The difference between before the books exist and after every chain that named the pages is gone, so that what a
    conversation keeps for itself is not counted. Two shapes: prompts of ``sizes.new`` tokens, and one long prompt.
    """
    for name, each in ((f"prompts of {sizes.new} tokens", sizes.new), ("one long prompt", sizes.pool_tokens)):
        cached, used = _fill(sizes, each)
        yield Row(name=f"metadata per cached token, {name}", unit="bytes", value=used / cached, target=5,
                  note=f"{used} bytes by tracemalloc for {cached} tokens, 4 of each token are its id")


def _fill(sizes: Sizes, each: int) -> tuple[int, int]:
    rng = np.random.default_rng(21)
    pages = sizes.pool_tokens // sizes.page_size
    prompts = [tokens(rng, each) for _ in range(sizes.pool_tokens // each)]
    namer = Namer(FINGERPRINT, sizes.page_size)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        books = Books(PagePool(pages), namer)
        for prompt in prompts:
            store(books, namer.chain(prompt), np.zeros(0, np.int32))
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    return len(books.index) * sizes.page_size, used
