"""What this machine needs for the parts that no bookkeeping can save, measured in the same run."""

from __future__ import annotations

from heapq import heappop, heappush
from time import thread_time_ns

import numpy as np
import xxhash

from distkv.bench.rows import Row
from distkv.bench.timing import Sample, measure, repeat
from distkv.bench.workloads import Sizes, tokens

CLOCK = "two readings of the clock"
MEMCMP = "memcmp of the prompt"
MEMCPY = "copy of the prompt"
HASH_WHOLE = "xxh3_64 of the prompt at once"
HASH_PAGES = "xxh3_64 of the prompt by page"
HASH_NEW = "xxh3_64 of the new tokens by page"
PROBES = "10 dictionary probes"
FANCY = "numpy a[pages] = 1, prompt's pages"
HEAP = "heap pop, dictionary delete, heap push"


def floors(sizes: Sizes) -> dict[str, Sample]:
    """The floors by name."""
    n, size = sizes.repeats, 4 * sizes.page_size
    data = tokens(np.random.default_rng(1), sizes.prompt).tobytes()
    twin = bytearray(data)
    view = memoryview(data)
    pages = [view[at : at + size] for at in range(0, len(data), size)]
    new = pages[: sizes.new // sizes.page_size]
    keys = np.random.default_rng(2).integers(0, 2**63, 4096).tolist()
    table = dict.fromkeys(keys, 1)
    ten = keys[::400][:10]
    counts = np.zeros(4 * sizes.pages, np.int32)
    ids = np.random.default_rng(3).permutation(4 * sizes.pages)[: sizes.pages].astype(np.int32)
    heap = sorted((key, i) for i, key in enumerate(keys[:2048]))
    entries = iter(keys)

    def chained(parts: list[memoryview]) -> int:
        key = 0
        for part in parts:
            key = xxhash.xxh3_64_intdigest(part, key)
        return key

    def drop_one(key: int) -> None:
        top = heappop(heap)
        del table[key]
        heappush(heap, top)

    return {
        CLOCK: repeat(thread_time_ns, n),
        MEMCMP: repeat(lambda: twin.startswith(data), n),
        MEMCPY: repeat(lambda: bytearray(data), n),
        HASH_WHOLE: repeat(lambda: xxhash.xxh3_64_intdigest(data), n),
        HASH_PAGES: repeat(lambda: chained(pages), n),
        HASH_NEW: repeat(lambda: chained(new), n),
        PROBES: repeat(lambda: [key in table for key in ten], n),
        FANCY: repeat(lambda: counts.__setitem__(ids, 1), n),
        HEAP: measure(drop_one, lambda: next(entries), n),
    }


def rows(found: dict[str, Sample]) -> list[Row]:
    """The floors as rows."""
    return [Row(name=name, unit="us", value=sample.median, sample=sample) for name, sample in found.items()]
