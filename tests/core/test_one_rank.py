"""One rank against the naive model: the same admissions, matches, evictions and pages, and never another's KV."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings

from tests.core.helpers import EXAMPLES
from tests.core.machine import OneRank, play

TestOneRank = OneRank.TestCase
TestOneRank.settings = settings(max_examples=40 * EXAMPLES, stateful_step_count=50, deadline=None,
                                derandomize=EXAMPLES == 1)


def test_random_calls_agree_with_the_naive_model() -> None:
    happened: Counter[str] = Counter()
    for seed in range(60 * EXAMPLES):
        stats = play(OneRank, seed).cache.stats()
        happened.update(evicted=stats.evicted, cascades=stats.cascades, cached=stats.cached_tokens,
                        refused=stats.refused, epochs=stats.epoch)
        happened.update(stats.reasons)
    assert min(happened[name] for name in ("evicted", "cascades", "cached", "refused", "epochs")) > 0, happened
    assert happened["media"] == 0, "no prompt has media"
