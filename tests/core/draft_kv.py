"""The KV memory of an engine with a draft layer, for tests of ``cache.next_token_depth``."""

from __future__ import annotations

from distkv import Sequence
from tests.core.helpers import Kv


class DraftKv(Kv):
    """KV memory with a draft layer: in each slot, what the token in it was, all before it, and ``depth`` behind it."""

    def __init__(self, page_size: int, depth: int) -> None:
        super().__init__(page_size)
        self.depth = depth

    def _value(self, sequence: Sequence, position: int) -> object:
        chain, end = sequence.chain, position + 1 + self.depth
        spans = tuple(s for s in chain.spans if s.start < end)
        return (sequence.epoch, chain.root, spans, tuple(chain.slice(0, end).tolist()))

    def committed(self, sequence: Sequence, start: int) -> None:
        """As an engine does: the last tokens that were computed before are computed again, with what came next."""
        super().committed(sequence, max(sequence.cached_tokens, start - self.depth))

    def wrong(self, sequence: Sequence) -> list[int]:
        """Positions that came from the cache with the KV of other tokens."""
        return [p for p in range(sequence.cached_tokens)
                if self.of_slot.get(self._slot(sequence, p)) != self._value(sequence, p)]
