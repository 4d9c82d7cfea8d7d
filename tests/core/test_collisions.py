"""Keys that collide: the 64-bit hash only nominates, so a broken one costs misses and never gives a wrong page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import xxhash
from hypothesis import settings

from distkv import PrefixCache, Span
from distkv.testing import schedules
from distkv.testing.group import SimulatedGroup
from tests.core.helpers import EXAMPLES, Kv, admit, prefill, serve, solo
from tests.core.machine import OneRank, play

A, B, C, D = [1, 1], [2, 2], [3, 3], [4, 4]


def page_of(data: Any) -> list[int]:
    """The token ids in what is hashed for one page of two tokens; empty for a root."""
    raw = bytes(data)
    return [] if len(raw) != 8 else list(memoryview(raw).cast("i"))


def constant(data: Any, seed: int) -> int:
    return 7


def broken_for(wrong: Callable[[list[int], int], int | None]) -> Callable[[Any, int], int]:
    """xxh3, but for the pages for which ``wrong(tokens, seed)`` has another key."""

    def hash64(data: Any, seed: int) -> int:
        key = wrong(page_of(data), seed)
        return xxhash.xxh3_64_intdigest(data, seed) if key is None else key

    return hash64


def cached(cache: PrefixCache, tokens: list[int], **options: Any) -> int:
    """Cached tokens of one more request with this prompt, which stores nothing."""
    sequence = admit(cache, "probe", [*tokens, 9], write=False, **options)
    sequence.abort()
    cache.check()
    return sequence.cached_tokens


def evict_all(cache: PrefixCache) -> None:
    stats = cache.stats()
    assert stats.pages_live == stats.pages_held == stats.pages_reserved == 0
    assert cache._books.index.evict(stats.entries) == stats.entries
    assert cache.stats().pages_free == stats.pages_usable
    cache.check()


def test_all_keys_equal() -> None:
    cache = solo(hash64=constant)
    serve(cache, "1", A + B + C)
    assert len(cache._books.index) == 1, "the second page has the key of the first, which was there before"
    assert cached(cache, A + B + C) == 2
    assert cached(cache, B + A) == 0
    serve(cache, "2", B + A)
    assert (cached(cache, A + B), cached(cache, B + A)) == (2, 0)
    assert cache.stats().collisions > 0
    evict_all(cache)
    serve(cache, "3", B + A)
    assert (cached(cache, A + B), cached(cache, B + A)) == (0, 2)


def test_the_first_page_of_another_prompt_has_the_same_key() -> None:
    cache = solo(hash64=broken_for(lambda tokens, seed: 42 if tokens in (A, B) else None))
    serve(cache, "1", A + C + D)
    assert cached(cache, B + C + D) == 0, "all three keys are in the index, and no page is right"
    assert cached(cache, A + C + D) == 6
    serve(cache, "2", B + C + D)
    assert cached(cache, B + C + D) == 0
    assert cached(cache, A + C + D) == 6
    evict_all(cache)


def test_only_the_second_page_collides() -> None:
    """Equal own tokens at the third page and equal keys: only the climb to the root tells."""
    cache = solo(hash64=broken_for(lambda tokens, seed: 42 if tokens in (B, C) else None))
    serve(cache, "1", A + B + D)
    assert cached(cache, A + C + D) == 2
    serve(cache, "2", A + C + D)
    assert cached(cache, A + C + D) == 2
    assert cached(cache, A + B + D) == 6
    evict_all(cache)


def test_only_the_parent_link_tells() -> None:
    """Two chains whose pages have equal own tokens and equal keys at the third page, under other parents."""
    cache = solo(hash64=broken_for(lambda tokens, seed: 42 if tokens == D else None))
    serve(cache, "1", A + B + D)
    serve(cache, "2", A + C)
    assert cached(cache, A + C + D) == 4, "the third page is known with these tokens, and below another parent"
    assert cached(cache, A + B + D) == 6
    assert cached(cache, D) == 0, "nor at another depth"
    assert cached(cache, A + D) == 2
    evict_all(cache)


def test_a_key_equal_to_that_of_an_unrelated_deeper_entry() -> None:
    cache = solo(hash64=broken_for(lambda tokens, seed: 42 if tokens in (C, D) else None))
    serve(cache, "1", A + B + C)
    assert cached(cache, D) == 0
    serve(cache, "2", D + A)
    assert cached(cache, D + A) == 0, "the first writer has the key"
    assert cached(cache, A + B + C) == 6
    evict_all(cache)


def test_the_roots_of_two_salts_collide() -> None:
    cache = solo(hash64=lambda data, seed: 5 if len(bytes(data)) != 8 else xxhash.xxh3_64_intdigest(data, seed))
    serve(cache, "1", A + B, salt="x")
    assert cached(cache, A + B, salt="x") == 4
    assert cached(cache, A + B, salt="y") == 0
    assert cached(cache, A + B) == 0
    serve(cache, "2", A + B, salt="y")
    assert (cached(cache, A + B, salt="x"), cached(cache, A + B, salt="y")) == (4, 0)
    evict_all(cache)


def test_media_that_only_their_digest_tells_apart() -> None:
    """The extras collide: equal tokens, equal parents, equal keys, other images."""
    def blind(data: Any, seed: int) -> int:
        return xxhash.xxh3_64_intdigest(bytes(data)[:8] if len(bytes(data)) > 8 else bytes(data), seed)

    cache = solo(hash64=blind)
    one, two = Span(1, 2, b"1" * 16), Span(1, 2, b"2" * 16)
    serve(cache, "1", A + B + C, spans=[one])
    assert cached(cache, A + B + C, spans=[one]) == 6
    assert cached(cache, A + B + C, spans=[two]) == 0
    assert cached(cache, A + B + C) == 0
    evict_all(cache)


def test_what_was_known_is_looked_at_again() -> None:
    """A sequence's own pages left the index and a colliding chain took their place: nothing is hung below that."""
    cache = solo(index_on="fill", hash64=broken_for(lambda tokens, seed: 42 if tokens in (B, C) else None))
    sequence = admit(cache, "1", A + B + [8, 8, 9])
    sequence.open(7)
    sequence.commit(4)
    cache._books.index.drop(int(sequence.page_indices[0]))
    serve(cache, "2", D + C + [0])
    assert cached(cache, D + C) == 4
    sequence.commit(2)
    cache.check()
    assert cached(cache, D + C + [8, 8]) == 4
    sequence.finish()
    assert (cached(cache, D + C + [8, 8]), cached(cache, A + B + [8, 8])) == (4, 2)
    evict_all(cache)


def test_generated_pages_that_collide_are_freed_at_the_end() -> None:
    cache = solo(pages=4, hash64=constant, index_on="fill")
    kv = Kv(2)
    for i in range(50):
        sequence = admit(cache, str(i), [i, i + 1, i + 2], output_limit=5)
        kv.expect(sequence)
        prefill(sequence)
        kv.committed(sequence, sequence.cached_tokens)
        sequence.append([1, 2, 3, 4, 5])
        sequence.open(5)
        sequence.commit(5)
        cache.check()
        sequence.finish()
        cache.check()
        assert cache.stats().pages_live == 0
    evict_all(cache)


@pytest.mark.parametrize("mask", [0, 7, 127])
def test_a_group_whose_keys_collide(mask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two colliding pages a rank has depends on what it lost; what the group uses is right on every rank."""
    few = partial(SimulatedGroup, hash64=lambda data, seed: xxhash.xxh3_64_intdigest(data, seed) & mask)
    monkeypatch.setattr(schedules, "SimulatedGroup", few)
    hits = sum(schedules.run_schedule(seed)["hits"] for seed in range(8 * EXAMPLES))
    assert hits > 0


class EightKeys(OneRank):
    """Three-bit keys."""

    exact = False
    hash64 = staticmethod(lambda data, seed: xxhash.xxh3_64_intdigest(data, seed) & 7)


class OneKey(OneRank):
    exact = False
    hash64 = staticmethod(constant)


class FewKeys(OneRank):
    """Seven bits: long true prefixes, with a collision now and then."""

    exact = False
    hash64 = staticmethod(lambda data, seed: xxhash.xxh3_64_intdigest(data, seed) & 127)


TestEightKeys = EightKeys.TestCase
TestEightKeys.settings = settings(max_examples=25 * EXAMPLES, stateful_step_count=50, deadline=None,
                                  derandomize=EXAMPLES == 1)


@pytest.mark.parametrize("machine", [EightKeys, OneKey, FewKeys])
def test_random_calls_never_give_a_wrong_page(machine: type[OneRank]) -> None:
    collisions = cached_tokens = 0
    for seed in range(25 * EXAMPLES):
        stats = play(machine, seed).cache.stats()
        collisions += stats.collisions
        cached_tokens += stats.cached_tokens
    assert collisions > 0
    assert cached_tokens > 0
