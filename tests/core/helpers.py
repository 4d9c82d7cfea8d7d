"""What the tests of the core share: a small cache, an engine for it, and the KV that a model would have written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from distkv import CacheConfig, Config, Fingerprint, KeyChain, Message, PoolConfig, PrefixCache, Request, Sequence

EXAMPLES = int(os.environ.get("DISTKV_TEST_EXAMPLES", "1"))
"""Multiplies the examples of every property test."""

FINGERPRINT = Fingerprint(model="tests", weights_version="1")


def config(pages: int = 16, page_size: int = 2, scratch: int = 0, **cache: Any) -> Config:
    """A small configuration whose books are checked after every step."""
    return Config(cache=CacheConfig(page_size=page_size, **cache),
                  pool=PoolConfig(pages=pages, scratch_pages=scratch, check=True))


def solo(pages: int = 16, page_size: int = 2, scratch: int = 0, hash64: Any = None, **cache: Any) -> PrefixCache:
    """A cache of one rank."""
    return PrefixCache(config(pages, page_size, scratch, **cache), FINGERPRINT, hash64=hash64)


def request(cache: PrefixCache, request_id: str, tokens: object, output_limit: int = 0, *, salt: str | None = None,
            adapter: Any = None, spans: Iterable[Any] = (), **options: Any) -> Request:
    chain = tokens if isinstance(tokens, KeyChain) else cache.chain(tokens, salt=salt, adapter=adapter, spans=spans)
    return Request(id=request_id, chain=chain, output_limit=output_limit, **options)


def admit(cache: PrefixCache, request_id: str, tokens: object, output_limit: int = 0, **options: Any) -> Sequence:
    """One request, which must be admitted in this step."""
    result = cache.step(Message(requests=(request(cache, request_id, tokens, output_limit, **options),)))
    assert [s.id for s in result.ready] == [request_id], result
    return result.ready[0]


def prefill(sequence: Sequence) -> Sequence:
    """The whole prompt in one forward."""
    n = sequence.prompt_tokens - sequence.committed
    sequence.open(n)
    sequence.commit(n)
    return sequence


def serve(cache: PrefixCache, request_id: str, tokens: object, generated: Iterable[int] = (),
          **options: Any) -> Sequence:
    """One request from submission to finish; the last generated token is sampled and not fed."""
    generated = list(generated)
    options.setdefault("output_limit", len(generated))
    sequence = prefill(admit(cache, request_id, tokens, **options))
    for i, token in enumerate(generated):
        sequence.append([token])
        if i + 1 < len(generated):
            sequence.open(1)
            sequence.commit(1)
    sequence.finish()
    cache.check()
    return sequence


class Kv:
    """The KV memory of one rank: in each slot, what the token in it and everything before it were."""

    GARBAGE = "written and not committed"

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.of_slot: dict[int, object] = {}

    def _value(self, sequence: Sequence, position: int) -> object:
        chain = sequence.chain
        spans = tuple(s for s in chain.spans if s.start <= position)
        return (sequence.epoch, chain.root, spans, tuple(chain.slice(0, position + 1).tolist()))

    def _slot(self, sequence: Sequence, position: int) -> int:
        return int(sequence.page_indices[position // self.page_size]) * self.page_size + position % self.page_size

    def opened(self, slots: Iterable[int]) -> None:
        """A forward may write anything here from now on."""
        for slot in slots:
            self.of_slot[int(slot)] = self.GARBAGE

    def committed(self, sequence: Sequence, start: int) -> None:
        """Tokens from ``start`` on were committed."""
        for position in range(start, sequence.committed):
            self.of_slot[self._slot(sequence, position)] = self._value(sequence, position)

    def copied(self, source: int, target: int) -> None:
        """A page was copied onto another one."""
        for offset in range(self.page_size):
            self.of_slot[target * self.page_size + offset] = self.of_slot.get(source * self.page_size + offset)

    def expect(self, sequence: Sequence) -> None:
        """Every committed token of the sequence has its own KV, whoever wrote it."""
        for position in range(sequence.committed):
            found, wanted = self.of_slot.get(self._slot(sequence, position)), self._value(sequence, position)
            assert found == wanted, f"token {position} of {sequence} has {found}, not {wanted}"
