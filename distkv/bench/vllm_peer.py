"""distkv for ``bench_vllm.py``: ``--impl distkv.bench.vllm_peer:DistKV``.

The harness gives every implementation the same ``list[int]``, so the conversion is inside its clock, and so is naming
the whole prompt anew: it knows no conversation that could keep a chain. ``match`` is a whole step: lookup, verification
of every token, ballot, admission and ownership. Nothing here needs the harness or vLLM.
"""

from __future__ import annotations

from typing import Any

from distkv.bench.workloads import new_cache
from distkv.request import Message, Request
from distkv.sequence import Sequence

__all__ = ["DistKV"]


class Running:
    """A request of the harness: named at first, then the admitted sequence."""

    __slots__ = ("request", "sequence")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.sequence: Sequence


class DistKV:
    """One rank's :class:`distkv.PrefixCache` behind the seven methods of the harness's ``Impl``."""

    name = "distkv"

    def __init__(self, block: int, capacity_tokens: int, algo: str = "", max_len: int = 0, **other: Any) -> None:
        """``algo`` is the peer's: distkv always names with xxh3_64 and compares every token."""
        self.block = block
        self.cache = new_cache(capacity_tokens // block, block)
        self.requests = 0

    def new_request(self, tokens: list[int]) -> Running:
        """Converts and names the prompt. Output grows page by page, as the peer's does: nothing is reserved for it."""
        self.requests += 1
        return Running(Request(id=str(self.requests), chain=self.cache.chain(tokens), output_limit=0))

    def match(self, running: Running) -> int:
        """One step of one request; returns the cached tokens."""
        (running.sequence,) = self.cache.step(Message(requests=(running.request,))).ready
        return running.sequence.cached_tokens

    def alloc_prompt(self, running: Running) -> bool:
        """Slots for the rest of the prompt, which then counts as computed."""
        sequence = running.sequence
        rest = sequence.prompt_tokens - sequence.committed
        sequence.open(rest)
        sequence.commit(rest)
        return True

    def append(self, running: Running, ids: list[int]) -> bool:
        """Names output tokens and makes slots for all of them but the last sampled one. False: no room."""
        sequence = running.sequence
        sequence.append(ids)
        n = sequence.named - 1 - sequence.committed
        if n <= 0:
            return True
        more = -(-(sequence.committed + n) // self.block) - len(sequence.owned_pages) - sequence.reserved
        if more > 0:
            if more > self.cache.leftover:
                return False
            self.cache.grow(sequence, more)
        sequence.open(n)
        sequence.commit(n)
        return True

    def free(self, running: Running) -> None:
        """Ends the request: its full pages stay in the cache."""
        running.sequence.finish()

    def drain_events(self) -> int:
        """No events."""
        return 0
