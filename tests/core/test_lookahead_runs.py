"""Random calls and schedules with drafts and draft layers: no sequence ever has KV that saw other next tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import xxhash

from distkv import GroupMismatch, PrefixCache, Request, Sequence
from distkv.testing import schedules, tier_schedules
from distkv.testing.content import Content
from distkv.testing.group import Disagreement, SimulatedGroup
from distkv.testing.plans import draw_configs
from tests.core.draft_kv import DraftKv
from tests.core.helpers import EXAMPLES, FINGERPRINT, config
from tests.core.machine import OneRank, play

# ---- everything that an engine may do, on one rank


class Ahead(OneRank):
    """A cache whose pages depend on next tokens, and an engine with a draft layer and drafts behind the limit."""

    depth: ClassVar[int] = 2
    named: ClassVar[int | None] = None
    """The depth that the cache is told; None: the true one."""
    lookahead: ClassVar[int] = 3

    def start(self, size: int, **drawn: Any) -> None:
        super().start(size=size, **drawn)
        made = self.cache.config
        depth = self.depth if self.named is None else self.named
        cache = replace(made.cache, next_token_depth=depth, lookahead_tokens=self.lookahead)
        self.cache = PrefixCache(replace(made, cache=cache), FINGERPRINT, hash64=self.hash64)
        self.kv = DraftKv(size, self.depth)

    def fork(self, i: int, suffixes: list[list[int]], limit: int | None) -> None:
        """Not here: a fork with a draft layer shares fewer pages than the naive model of forks says."""

    def total(self, request: Request) -> int:
        return -(-(len(request.chain) + request.output_limit + self.lookahead) // self.size)

    def pages_in(self, tokens: int) -> int:
        return max(0, tokens - self.depth) // self.size

    def store(self, sequence: Sequence, committed: int) -> None:
        full = max(self.pages_in(committed), sequence.cached_tokens // self.size)
        if full and sequence.request.write and sequence.epoch == self.epoch:
            self.naive.store(sequence.chain, sequence.page_indices[:full].tolist())

    def commit(self, i: int, n: int) -> None:
        sequence = self.pick(i)
        if sequence is None:
            return
        before = sequence.committed
        sequence.commit(min(n, sequence.seq_len - before, sequence.named - before))
        self.kv.committed(sequence, before)
        if self.fill and self.pages_in(sequence.committed) > self.pages_in(before):
            self.store(sequence, sequence.committed)

    def decode(self, i: int, ids: list[int], n: int) -> None:
        sequence = self.pick(i)
        if sequence is None or sequence.seq_len < sequence.prompt_tokens:
            return
        limit = sequence.prompt_tokens + sequence.request.output_limit + self.lookahead
        sequence.append(ids[: max(0, limit + 1 - sequence.named)])
        n = min(n, limit - sequence.seq_len)
        if n > 0:
            self.open(sequence, n)


class Deep(Ahead):
    depth, lookahead = 5, 0


class Colliding(Ahead):
    """Seven bits of a key."""

    exact, depth = False, 1
    hash64 = staticmethod(lambda data, seed: xxhash.xxh3_64_intdigest(data, seed) & 127)


class Untold(Ahead):
    """The cache does not know of the draft layer."""

    exact, depth, named = False, 1, 0


@pytest.mark.parametrize("machine", [Ahead, Deep, Colliding])
def test_random_calls_on_one_rank(machine: type[Ahead]) -> None:
    cached = collisions = 0
    for seed in range(8 * EXAMPLES):
        stats = play(machine, seed).cache.stats()
        cached, collisions = cached + stats.cached_tokens, collisions + stats.collisions
    assert cached > 0
    assert (collisions > 0) == (machine is Colliding)


def test_random_calls_show_a_cache_that_was_not_told() -> None:
    def runs() -> None:
        for seed in range(20):
            play(Untold, seed)

    with pytest.raises(AssertionError, match=r"token \d+ of Sequence"):
        runs()


# ---- groups


class DraftContent(Content):
    """The bytes of a rank with a draft layer of depth 2, whose passes compute the last two tokens again."""

    depth = 2

    def launched(self, sequence: Sequence, n: int, step: int) -> None:
        again = min(self.depth, sequence.seq_len - n - sequence.cached_tokens)
        super().launched(sequence, n + again, step)

    def _values_of(self, sequence: Sequence, keep: int, stop: int) -> list[int]:
        known = super()._values_of(sequence, keep, min(stop + self.depth, sequence.named))
        return [known[min(at + self.depth, len(known) - 1)] for at in range(stop)]


class Drafting:
    """Mixed into a schedule: its engine drafts up to three tokens behind the limit."""

    def work(self, rank: int, request_id: str, seed: float, extra: int = 0, forking: bool = False) -> None:
        super().work(rank, request_id, seed, extra + 3, forking)  # type: ignore[misc]


class DraftSchedule(Drafting, schedules.Schedule):
    pass


class DraftTierSchedule(Drafting, tier_schedules.TierSchedule):
    pass


def run_group(seed: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    def drawn(*args: Any, **options: Any) -> Any:
        made = draw_configs(*args, **options)
        return [replace(one, cache=replace(one.cache, next_token_depth=depth, lookahead_tokens=3)) for one in made]

    monkeypatch.setattr(schedules, "draw_configs", drawn)
    for module in (schedules, tier_schedules):
        monkeypatch.setattr(module, "Content", DraftContent)
    return (DraftTierSchedule if seed % 2 else DraftSchedule)(seed).run()


def test_ranks_that_were_told_another_depth_do_not_start() -> None:
    with pytest.raises(GroupMismatch) as found:
        SimulatedGroup([config(next_token_depth=0), config(next_token_depth=1)], FINGERPRINT)
    assert found.value.values == {"cache.next_token_depth": ["0", "1"]}


def test_random_schedules_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tiers, lockstep, faults, suspended requests: no rank ever uses a page with other next tokens."""
    counts = sum((run_group(seed, 2, monkeypatch) for seed in range(12 * EXAMPLES)), Counter())
    assert min(counts[name] for name in ("hits", "evicted", "read in", "suspended", "forked")) > 0, counts
    assert counts["tails copied"] == 0, "a fork shares full pages alone"


def test_random_schedules_show_a_group_that_was_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs() -> None:
        for seed in range(40):
            run_group(seed, 0, monkeypatch)

    with pytest.raises(Disagreement, match="was matched but holds"):
        runs()
