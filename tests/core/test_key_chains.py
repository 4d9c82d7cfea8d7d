"""Key chains under extend, branch and follow, against hashing everything from scratch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from distkv import KeyChain, KeyNamingError, Span
from distkv.chain import Namer
from tests.core.helpers import EXAMPLES, FINGERPRINT

IDS = st.lists(st.integers(0, 2), max_size=9)
DIGESTS = [bytes([i]) * 16 for i in range(2)]


def spans_in(draws: list[tuple[int, int, int]], low: int, high: int) -> list[Span]:
    """Disjoint spans in ``low .. high - 1`` from any draws."""
    found: list[Span] = []
    at = low
    for gap, length, digest in draws:
        start = at + gap
        if start + length > high:
            break
        found.append(Span(start, length, DIGESTS[digest], "media" if gap % 2 else "embedding"))
        at = start + length
    return found


SPANS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 1)), max_size=3)


class Chains(RuleBasedStateMachine):
    """Some chains that share logs; each is compared with a fresh chain of the same tokens and spans."""

    @initialize(size=st.integers(1, 4), depth=st.sampled_from([0, 0, 0, 1, 2, 5]))
    def start(self, size: int, depth: int) -> None:
        self.hashed = 0

        def counting(data: Any, seed: int) -> int:
            self.hashed += 1
            return xxhash.xxh3_64_intdigest(data, seed)

        self.size, self.depth = size, depth
        self.namer = Namer(FINGERPRINT, size, hash64=counting, next_token_depth=depth)
        self.plain = Namer(FINGERPRINT, size, next_token_depth=depth)
        self.chains: list[tuple[KeyChain, list[int], list[Span]]] = [(self.namer.chain(), [], [])]

    def pages(self, n_tokens: int) -> int:
        """Pages that can be named: those whose next tokens are known."""
        return max(0, n_tokens - self.depth) // self.size

    def add(self, chain: KeyChain, tokens: list[int], spans: list[Span]) -> None:
        self.chains.append((chain, tokens, spans))
        del self.chains[:-6]

    @rule(i=st.integers(0, 5), ids=IDS, spans=SPANS)
    def extend(self, i: int, ids: list[int], spans: list[tuple[int, int, int]]) -> None:
        chain, tokens, old = self.chains[i % len(self.chains)]
        new = spans_in(spans, len(tokens), len(tokens) + len(ids))
        before, pages = self.hashed, chain.pages
        chain.extend(ids, spans=new)
        assert self.hashed - before == chain.pages - pages, "only new pages are hashed"
        tokens += ids
        old += new

    @rule(i=st.integers(0, 5), cut=st.integers(0, 12))
    def branch(self, i: int, cut: int) -> None:
        chain, tokens, spans = self.chains[i % len(self.chains)]
        n = max(0, len(tokens) - cut)
        before = self.hashed
        if any(s.start < n < s.end for s in spans):
            with pytest.raises(KeyNamingError):
                chain.branch(n)
        else:
            self.add(chain.branch(n), tokens[:n], [s for s in spans if s.end <= n])
        assert self.hashed == before, "a branch hashes nothing"

    @rule(i=st.integers(0, 5), keep=st.integers(0, 20), ids=IDS, given=st.sampled_from(["none", "all", "other"]),
          draws=SPANS)
    def follow(self, i: int, keep: int, ids: list[int], given: str, draws: list[tuple[int, int, int]]) -> None:
        chain, tokens, spans = self.chains[i % len(self.chains)]
        new = tokens[:keep] + ids
        shorter = min(len(tokens), len(new))
        common = next((n for n in range(shorter) if tokens[n] != new[n]), shorter)
        cut = [s for s in spans if s.start < common < s.end]
        repeated = [s for s in spans if tokens[s.start : s.end] == new[s.start : s.end] and s.end <= len(new)]
        told = {"none": [], "all": repeated, "other": spans_in(draws, 0, len(new))}[given]
        wanted, guess = list(told), False
        for s in spans:
            over = [t for t in told if t.start < s.end and s.start < t.end]
            if s in cut:
                guess = guess or not any(t.start <= s.start and t.end >= common for t in over)
            elif s.end <= common:
                guess = guess or (bool(over) and over != [s])
                wanted += [] if over else [s]
            elif s in repeated:
                wanted += [] if over else [s]
        before = self.hashed
        if guess:
            with pytest.raises(KeyNamingError, match=r"follow branch\("):
                chain.follow(new, spans=told)
            return
        found = chain.follow(new, spans=told)
        assert sorted(wanted, key=lambda s: s.start) == list(found.spans)
        if given != "other":
            assert self.hashed - before == found.pages - self.pages(common), "the common prefix is not hashed again"
        self.add(found, new, wanted)

    @rule(i=st.integers(0, 5))
    def refused(self, i: int) -> None:
        chain, tokens, _ = self.chains[i % len(self.chains)]
        for ids, spans in (([-1], []), ([1], [Span(len(tokens), 2, DIGESTS[0])]), ([1.5], [])):
            with pytest.raises(KeyNamingError):
                chain.extend(ids, spans=spans)

    @invariant()
    def as_from_scratch(self) -> None:
        for chain, tokens, spans in getattr(self, "chains", []):
            fresh = self.plain.chain(tokens, spans=spans)
            assert len(chain) == len(tokens)
            assert chain.tokens.tolist() == tokens
            assert chain.pages == self.pages(len(tokens))
            assert chain.keys[: chain.pages] == fresh.keys
            assert list(chain.spans) == sorted(spans, key=lambda s: s.start)
            assert chain.extras_between(0, chain.pages) == fresh.extras
            assert chain.count_extras(0, chain.pages) == len(fresh.extras)
            assert chain.buffer[: 4 * len(chain)] == fresh.buffer


TestChains = Chains.TestCase
TestChains.settings = settings(max_examples=50 * EXAMPLES, stateful_step_count=30, deadline=None,
                               derandomize=EXAMPLES == 1)


def test_a_new_turn_hashes_its_new_pages_alone() -> None:
    calls = []

    def counting(data: Any, seed: int) -> int:
        calls.append(len(data))
        return xxhash.xxh3_64_intdigest(data, seed)

    namer = Namer(FINGERPRINT, 4, hash64=counting)
    history = list(range(400))
    chain = namer.chain(history)
    assert len(calls) == 101, "the root and 100 pages"
    calls.clear()
    chain = chain.follow([*history, *range(8)])
    assert (len(calls), chain.pages) == (2, 102)
    calls.clear()
    chain.follow(history[:100])
    assert not calls
    edited = chain.follow([*history[:50], 7, 7, 7, *history[53:]])
    assert len(calls) == 100 - 12, "from the page of the first edited token on"
    assert edited.keys[:12] == chain.keys[:12]


def test_branches_are_independent() -> None:
    namer = Namer(FINGERPRINT, 2)
    chain = namer.chain([1, 2, 3, 4])
    one, two = chain.branch(), chain.branch()
    one.extend([5, 6])
    two.extend([7, 8])
    chain.extend([9, 9])
    assert [c.tokens.tolist()[4:] for c in (chain, one, two)] == [[9, 9], [5, 6], [7, 8]]
    assert len({c.keys[2] for c in (chain, one, two)}) == 3
    deep = one.branch(5).branch(3).branch()
    deep.extend([0])
    assert deep.keys == namer.chain([1, 2, 3, 0]).keys
    assert one.keys == namer.chain([1, 2, 3, 4, 5, 6]).keys


def test_tokens_are_the_callers() -> None:
    """Neither does the chain change with the array it was made of, nor with what it gives out."""
    ids = np.arange(6, dtype=np.int32)
    chain = Namer(FINGERPRINT, 2).chain(ids)
    keys = list(chain.keys)
    ids[:] = 0
    assert chain.tokens.tolist() == list(range(6))
    taken = chain.tokens
    chain.extend([6, 7])
    assert taken.tolist() == list(range(6))
    assert chain.keys[:3] == keys


def test_a_chain_of_its_own_tokens() -> None:
    """Extending by what the chain itself gave out, which must not be a view that forbids appending."""
    chain = Namer(FINGERPRINT, 2).chain([1, 2, 3])
    taken = chain.tokens
    chain.extend(taken)
    assert chain.follow(chain.tokens).keys == chain.keys == Namer(FINGERPRINT, 2).chain([1, 2, 3, 1, 2, 3]).keys


def test_follow_keeps_media_that_are_not_given_again() -> None:
    """Else the pages of an image would have the names of text alone, which any other image has as well."""
    namer = Namer(FINGERPRINT, 2)
    tokens = list(range(12))
    one, two = Span(2, 3, DIGESTS[0]), Span(7, 2, DIGESTS[1])
    chain = namer.chain(tokens, spans=[one, two])
    both = namer.chain([*tokens, 1, 2], spans=[one, two])
    for spans in ([], [one], [two], [two, one]):
        assert chain.follow([*tokens, 1, 2], spans=spans).keys == both.keys
    assert chain.follow(tokens[:7]).spans == (one,)
    edited = chain.follow([0, 9, *tokens[2:]])
    assert edited.keys == namer.chain(edited.tokens, spans=[one, two]).keys, "the items stand where they stood"
    assert chain.follow([0, 9, 9, *tokens[2:]]).spans == (), "and here they do not"
    more = [Span(0, 1, DIGESTS[0]), Span(9, 1, DIGESTS[0])]
    assert chain.follow(tokens, spans=more).keys == namer.chain(tokens, spans=[*more, one, two]).keys
    assert chain.spans == (one, two)
    renamed = chain.branch(7).renamed(namer.with_weights("2"))
    assert renamed.spans == (one,)
    assert renamed.keys == namer.with_weights("2").chain(tokens[:7], spans=[one]).keys


def test_follow_does_not_guess_which_media_are_meant() -> None:
    namer = Namer(FINGERPRINT, 2)
    tokens = list(range(12))
    one, two = Span(2, 3, DIGESTS[0]), Span(7, 2, DIGESTS[1])
    chain = namer.chain(tokens, spans=[one, two])
    for other in (Span(2, 3, DIGESTS[1]), Span(2, 3, DIGESTS[0], "embedding"), Span(4, 2, DIGESTS[0]),
                  Span(1, 2, DIGESTS[0]), Span(3, 1, DIGESTS[0]), Span(0, 9, DIGESTS[0])):
        with pytest.raises(KeyNamingError, match=r"is another than the chain's own 2 \.\. 4"):
            chain.follow(tokens, spans=[other])
    replaced = chain.branch(2).follow(tokens, spans=[Span(2, 3, DIGESTS[1]), two])
    assert replaced.keys == namer.chain(tokens, spans=replaced.spans).keys
    for cut in (tokens[:8], [*tokens[:8], 0]):
        with pytest.raises(KeyNamingError, match=r"depart at 8, inside the span 7 \.\. 8.*branch\(7\)"):
            chain.follow(cut)
        smaller = chain.follow(cut, spans=[Span(7, 1, DIGESTS[0])])
        assert smaller.keys == namer.chain(cut, spans=[one, Span(7, 1, DIGESTS[0])]).keys
        assert chain.branch(7).follow(cut).spans == (one,)
    for wrong in ([one, one], [Span(11, 2, DIGESTS[0])], [Span(9, 2, DIGESTS[0]), Span(10, 1, DIGESTS[1])]):
        with pytest.raises(KeyNamingError):
            chain.follow(tokens, spans=wrong)


class Looked(list[Span]):
    """Spans, with a count of how often one was looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        return super().__getitem__(at)


def test_thousands_of_media_items() -> None:
    """A page looks at the items that touch it, which it finds by bisection, and not at all of them."""
    spans = [Span(4 * i + 1, 2, DIGESTS[i % 2]) for i in range(8192)]
    chain = Namer(FINGERPRINT, 4).chain()
    looked = chain._log.spans = Looked()
    chain.extend(np.arange(4 * 8192) % 5, spans=spans)
    assert len(chain.extras) == len(looked) == 8192
    assert 8192 < looked.looks < 8192 * 32


def test_a_conversation_of_a_hundred_thousand_turns_of_one_token() -> None:
    """Naming is linear: 2 s would be a thousand times too slow."""
    chain = Namer(FINGERPRINT, 16).chain()
    for i in range(100_000):
        chain.extend_bytes(int(i % 7).to_bytes(4, "little"))
    assert chain.pages == 6250
    assert chain.keys == Namer(FINGERPRINT, 16).chain(np.arange(100_000) % 7).keys
