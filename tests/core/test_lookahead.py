"""Drafted tokens, and draft layers: a page is shared only where all tokens are equal that its KV depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from distkv import Branch, LabelConfig, Message, PrefixCache, SequenceError, Span
from distkv.chain import Namer
from distkv.errors import RequestTooLarge
from distkv.index import PrefixIndex
from distkv.pages import PagePool
from distkv.reasons import Reason
from tests.core.draft_kv import DraftKv
from tests.core.helpers import EXAMPLES, FINGERPRINT, admit, config, prefill, request, serve, solo
from tests.core.test_key_chains import SPANS, spans_in
from tests.core.test_tiers import A, B, Tiers

TOKENS = st.lists(st.integers(0, 1), max_size=14)
SHARED = list(range(8))  # two pages of four


# ---- which prompts share which pages


def shared_pages(one: tuple[list[int], list[Span]], other: tuple[list[int], list[Span]], size: int, depth: int) -> int:
    """How many leading pages two prompts may share, from the definition."""
    pages = 0
    for page in range(1, 99):
        end = page * size + depth
        same = one[0][:end] == other[0][:end] and len(one[0]) >= end <= len(other[0])
        if not same or [s for s in one[1] if s.start < end] != [s for s in other[1] if s.start < end]:
            break
        pages = page
    return pages


@settings(max_examples=120 * EXAMPLES, deadline=None, derandomize=EXAMPLES == 1)
@given(size=st.integers(1, 4), depth=st.integers(0, 6), mask=st.sampled_from([2**64 - 1, 2**64 - 1, 3, 0]),
       prompts=st.lists(st.tuples(TOKENS, SPANS, st.integers(0, 14)), min_size=2, max_size=5))
def test_two_prompts_share_a_page_if_and_only_if_all_up_to_its_next_tokens_is_equal(
    size: int, depth: int, mask: int, prompts: list[Any]
) -> None:
    """Also with keys that collide: then a match may be shorter, and is never wrong. The tokens decide."""
    namer = Namer(FINGERPRINT, size, hash64=lambda data, seed: xxhash.xxh3_64_intdigest(data, seed) & mask,
                  next_token_depth=depth)
    index = PrefixIndex(PagePool(99), size)
    stored: list[tuple[list[int], list[Span]]] = []
    written: dict[int, tuple[list[int], list[Span]]] = {}
    for tokens, draws, cut in prompts:
        spans = spans_in(draws, 0, len(tokens))
        chain = namer.chain(tokens, spans=spans)
        if not any(s.start < cut < s.end for s in spans):  # a branch, and what was cut off again, is the same prompt
            chain = chain.branch(min(cut, len(tokens))).follow(tokens, spans=spans)
        prompt = (tokens, spans)
        wanted = max((shared_pages(prompt, other, size, depth) for other in stored), default=0)
        found = index.match(chain, 99)
        assert len(found) == wanted if mask > 3 else len(found) <= wanted
        for n, page in enumerate(found.pages.tolist(), 1):
            assert shared_pages(prompt, written[page], size, depth) >= n, "another prompt's KV"
        pages = index.pool.take(chain.pages)
        written |= dict.fromkeys(pages.tolist(), prompt)
        assert index.store(chain, pages) == chain.pages or mask <= 3
        index.check()
        stored.append(prompt)


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_next_tokens_are_compared_where_keys_collide(depth: int) -> None:
    namer = Namer(FINGERPRINT, 4, hash64=lambda data, seed: 7, next_token_depth=depth)
    index = PrefixIndex(PagePool(9), 4)
    tokens = [*range(4), *range(10, 10 + depth)]
    chain = namer.chain(tokens)
    assert index.store(chain, index.pool.take(1)) == 1
    assert len(index.match(namer.chain([*tokens, 1]), 9)) == 1
    for at in range(4, 4 + depth):
        assert len(index.match(namer.chain([*tokens[:at], 9, *tokens[at + 1 :]]), 9)) == 0
    assert len(index.match(namer.chain(tokens[:-1]), 9)) == 0


def test_a_branch_that_cuts_the_next_tokens_off_has_no_name_for_the_page() -> None:
    namer = Namer(FINGERPRINT, 4, next_token_depth=2)
    chain = namer.chain([*SHARED, 8, 9])
    assert [chain.branch(n).pages for n in (10, 9, 8, 6, 5, 1, 0)] == [2, 1, 1, 1, 0, 0, 0]
    keys = list(chain.keys)
    other, same = chain.branch(9), chain.branch(9)
    other.extend([7])
    same.extend([9])
    assert (other.pages, same.pages) == (2, 2)
    assert same.keys == keys == chain.keys
    assert other.keys[0] == keys[0]
    assert other.keys[1] != keys[1]
    assert chain.follow([*SHARED, 8, 7]).keys == other.keys
    assert chain.renamed(namer.with_weights("2")).keys == namer.with_weights("2").chain([*SHARED, 8, 9]).keys


def test_a_span_among_the_next_tokens_is_in_the_name() -> None:
    """A draft layer reads the item's embedding there, and not its placeholder id."""
    namer = Namer(FINGERPRINT, 4, next_token_depth=1)
    tokens = [*SHARED, 0, 0, 0, 0]
    text, image, other = (namer.chain(tokens, spans=[Span(4, 3, digest * 16)] if digest else ())
                          for digest in (b"", b"i", b"o"))
    assert len({chain.keys[0] for chain in (text, image, other)}) == 3
    behind = namer.chain(tokens, spans=[Span(5, 3, b"i" * 16)])
    assert behind.keys[0] == text.keys[0], "one token further on it is not"
    assert behind.extras.keys() == text.extras.keys() == {0, 1}


# ---- three requests


def three(depth: int, back_off: bool = False) -> list[tuple[int, list[int]]]:
    """Of each of three requests: cached tokens, and positions that came from the cache with other tokens' KV.

    The first goes on from the shared pages with token 1, the others with 2. ``back_off``: the last page of a match is
    not used, which is what other caches do for draft layers.
    """
    cache, kv, out = solo(page_size=4, next_token_depth=depth), DraftKv(4, 1), []
    two = [*SHARED, 2, 3, 3, 3, 3]
    for name, tokens in (("one", [*SHARED, 1, 1]), ("two", two), ("three", [*two, 3])):
        cap = cache.peek(cache.chain(tokens)) - 1 if back_off else None
        sequence = admit(cache, name, tokens, matched_cap=cap if cap is not None and cap >= 0 else None)
        out.append((sequence.cached_tokens, kv.wrong(sequence)))
        prefill(sequence)
        kv.committed(sequence, sequence.cached_tokens)
        sequence.finish()
        cache.check()
    return out


def test_three_requests_with_a_shared_prefix() -> None:
    assert three(depth=1) == [(0, []), (4, []), (12, [])]


def test_without_next_tokens_in_its_name_a_page_is_used_for_other_tokens() -> None:
    """The negative control, and why it does not help to leave out the last page of a match."""
    assert three(depth=0) == [(0, []), (8, [7]), (12, [7])]
    assert three(depth=0, back_off=True) == [(0, []), (4, []), (8, [7])]


def test_the_reason_is_that_other_tokens_follow() -> None:
    cache = solo(page_size=4, next_token_depth=1)
    image, other = ([Span(5, 2, digest * 16)] for digest in (b"i", b"o"))
    serve(cache, "one", [*SHARED, 1, 1])
    serve(cache, "two", [9, *SHARED, 1, 1], spans=image)

    def reason(tokens: list[int], **options: Any) -> tuple[int, Reason]:
        sequence = admit(cache, "again", tokens, **options)
        sequence.abort()
        return sequence.cached_tokens, sequence.record.reason

    assert reason([*SHARED, 2, 2]) == (4, Reason.NEXT_TOKENS)
    assert reason([*SHARED[:4], 5]) == (0, Reason.NEXT_TOKENS)
    assert reason([*SHARED, 1]) == (8, Reason.PARTIAL_PAGE)
    assert reason(SHARED) == (4, Reason.PARTIAL_PAGE)
    assert reason([0, 0, 0, 0, 0]) == (0, Reason.NEVER_SEEN)
    assert reason([9, *SHARED, 1, 1], spans=other) == (4, Reason.MEDIA)
    assert reason([9, *SHARED, 2, 2], spans=image) == (8, Reason.PARTIAL_PAGE)
    assert reason([9, *SHARED[:7], 8, 1], spans=image) == (4, Reason.NEXT_TOKENS)


# ---- drafts


def test_drafts_that_were_not_accepted_name_nothing() -> None:
    """20 tokens are written and 17 accepted: one page can be matched, and the next is named by the final tokens."""
    for depth in (0, 1):
        cache = solo(page_size=16, next_token_depth=depth, index_on="fill")
        sequence = admit(cache, "a", [0], output_limit=40)
        sequence.open(20)
        sequence.append(range(1, 20))
        sequence.commit(17)
        sequence.truncate(3)
        assert cache.peek(cache.chain(range(40))) == 1
        final = [*range(17), *range(100, 117)]
        sequence.append(final[17:])
        sequence.open(17)
        sequence.commit(16 - depth)
        assert cache.peek(cache.chain(final)) == 2 - (depth > 0), "nor before its next token is there"
        sequence.commit(1 + depth)
        assert cache.peek(cache.chain(final)) == 2
        assert cache.peek(cache.chain(range(40))) == 1
        sequence.finish()
        cache.check()


@pytest.mark.parametrize("depth", [0, 1, 3, 9])
def test_generated_tokens_are_stored_as_far_as_their_next_ones_are_accepted(depth: int) -> None:
    """At finish, at fill, and from chunk to chunk of a prompt, for every number of tokens."""
    for n in (1, 4, 5, 7, 8, 9, 12, 13, 14, 17):
        wanted = max(0, n - depth) // 4
        cache = solo(page_size=4, next_token_depth=depth)
        done = serve(cache, "a", [0], [*range(1, n), 99])
        assert (done.committed, len(cache._books.index)) == (n, wanted)
        assert cache.peek(cache.chain([*range(n), *range(50, 70)])) == wanted
        filling = solo(page_size=4, next_token_depth=depth, index_on="fill")
        sequence = admit(filling, "a", range(n))
        for at in range(1, n + 1):
            sequence.open(1)
            sequence.commit(1)
            assert len(filling._books.index) == max(0, at - depth) // 4
            filling.check()


def test_a_matched_page_stays_stored_when_its_request_is_suspended_at_once() -> None:
    cache = solo(page_size=2, next_token_depth=1)
    serve(cache, "a", range(6))
    sequence = admit(cache, "b", range(6), output_limit=3)
    assert sequence.cached_tokens == 4
    sequence.suspend()
    cache.resume("b")
    assert [s.cached_tokens for s in cache.step().ready] == [4]
    cache.check()


def test_drafts_ahead_of_the_limit_are_promised() -> None:
    for lookahead, pages in ((0, 3), (1, 4), (5, 5)):
        cache = solo(pages=5, page_size=4, lookahead_tokens=lookahead)
        sequence = admit(cache, "a", range(9), output_limit=3)
        assert sequence.promised == pages
        prefill(sequence)
        sequence.open(3 + lookahead)
        if (12 + lookahead) % 4 == 0:
            with pytest.raises(SequenceError, match=r"cannot open 1 tokens behind"):
                sequence.open(1)
        sequence.append(range(3 + lookahead))
        sequence.truncate(lookahead)
        sequence.finish()
        cache.check()
        assert cache.stats().pages_live == 0


def test_what_does_not_fit_with_its_drafts_is_refused() -> None:
    cache = solo(pages=3, page_size=4, lookahead_tokens=1)
    result = cache.step(Message(requests=(request(cache, "a", range(9), 3), request(cache, "b", range(9), 2))))
    assert [(type(r.error), r.request_id) for r in result.refused] == [(RequestTooLarge, "a")]
    assert [s.promised for s in result.ready] == [3]
    assert "cache.lookahead_tokens" in str(result.refused[0].error)


# ---- forks


@pytest.mark.parametrize(("committed", "shared"), [(3, 0), (4, 0), (5, 0), (6, 4), (8, 4), (9, 4), (10, 8)])
def test_a_fork_shares_what_no_next_token_can_change(committed: int, shared: int) -> None:
    """Parent and children go on with other tokens, so each computes the KV of the last ones itself: depth 2."""
    cache, kv = solo(page_size=4, next_token_depth=2, lookahead_tokens=2), DraftKv(4, 2)
    parent = prefill(admit(cache, "a", range(committed), output_limit=6))
    kv.committed(parent, 0)
    children = parent.fork([Branch(id="b", suffix=[50]), Branch(id="c", suffix=[60, 61], output_limit=1)])
    assert [(child.committed, child.cached_tokens) for child in children] == [(shared, shared)] * 2
    assert [child.promised for child in children] == [-(-(committed + 8) // 4), -(-(committed + 5) // 4)]
    for sequence in (parent, *children, parent):
        kv.expect(sequence)
        sequence.append([70, 71, 72])
        start, n = sequence.committed, min(sequence.named - sequence.committed, 99)
        sequence.open(n)
        sequence.commit(n)
        kv.committed(sequence, start)
        cache.check()
    for sequence in (parent, *children):
        kv.expect(sequence)
        sequence.finish()
        cache.check()
    for tokens in ([*range(committed), 50, 70, 71, 72, 0], [*range(committed), 60, 61, 70, 71, 72, 0]):
        again = admit(cache, str(tokens), tokens)
        assert again.cached_tokens == (len(tokens) - 3) // 4 * 4
        assert kv.wrong(again) == []


def test_a_kept_prefix_is_forked_alike() -> None:
    cache = solo(page_size=4, next_token_depth=1)
    prefix = prefill(admit(cache, "a", range(8)))
    prefix.keep()
    (child,) = prefix.fork([Branch(id="b", suffix=[9], output_limit=1)])
    assert (child.committed, child.named) == (4, 9)
    child.abort()
    prefix.abort()
    cache.check()
    assert cache.stats().pages_live == 0


def test_a_fork_is_refused_where_a_window_may_be_missing() -> None:
    made = config(page_size=4, next_token_depth=1)
    label = LabelConfig(name="near", kind="sliding", pages=16, window_tokens=4, chunk_tokens=16)
    cache = PrefixCache(replace(made, labels=(label,)), FINGERPRINT)
    parent = prefill(admit(cache, "a", range(10), output_limit=4))
    with pytest.raises(SequenceError, match="next_token_depth"):
        parent.fork(1)
    cache.check()


# ---- the host tier


def test_pages_come_back_from_the_host_for_the_same_next_tokens_alone() -> None:
    tiers = Tiers(next_token_depth=1)
    for name, tokens in (("1", A), ("2", B)):
        assert tiers.serve(name, tokens) == 0
    assert [tiers.matched(tokens) for tokens in (A, [*A[:8], 0], A[:8], [*A[:4], 0, 0, 0])] == [4, 3, 3, 1]
    assert tiers.serve("3", [*A[:8], 0]) == 6
    assert tiers.serve("4", A) == 8


def test_a_request_whose_pages_have_no_name_does_not_wait_for_those_being_read_in() -> None:
    """Its prompt is long enough to match the page that is read in, but the tokens behind that are not known."""
    tiers = Tiers(pages=8, next_token_depth=2)
    for name, tokens in (("1", [*A, 19]), ("2", [*B, 29])):
        tiers.serve(name, tokens)
    cache = tiers.cache
    (first,) = cache.step(Message(requests=(request(cache, "3", [*A, 19]),))).loading
    assert first.record.host_tokens == 2
    at = (first.cached_tokens - first.record.host_tokens) // 2
    short = A[: 2 * at + 3]
    assert len(short) - 1 >= 2 * (at + 1) > cache.chain(short).pages * 2
    result = cache.step(Message(requests=(request(cache, "4", short),)))
    assert [s.cached_tokens for s in result.ready] == [2 * at]
    tiers.settle()
