"""The states and request streams that are measured: seeded, so that every count of a run is the same anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time_ns

import numpy as np

from distkv.bench.timing import Sample
from distkv.books import Books
from distkv.cache import PrefixCache
from distkv.chain import KeyChain, Namer
from distkv.config import CacheConfig, Config, PoolConfig
from distkv.group import Group
from distkv.keys import Fingerprint
from distkv.pages import PagePool, Pages
from distkv.request import Message, Request
from distkv.sequence import Sequence
from distkv.stats import Stats

VOCABULARY = 150_000
FINGERPRINT = Fingerprint(model="bench", weights_version="1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large everything is. The targets hold for the sizes given here as defaults."""

    page_size: int = 128
    prompt: int = 131_072
    turns: int = 64
    new: int = 1_024
    tails: int = 2_048
    sessions: int = 40
    session_turns: int = 50
    system: int = 4_096
    user: int = 300
    output: int = 100
    pool_tokens: int = 262_144
    repeats: int = 300
    rounds: int = 5
    growth_steps: int = 4

    @property
    def pages(self) -> int:
        """Full pages of the prompt."""
        return self.prompt // self.page_size


QUICK = Sizes(prompt=8_192, turns=8, tails=64, sessions=6, session_turns=6, system=1_024, pool_tokens=8_192,
              repeats=20, rounds=2, growth_steps=2)
"""Sizes for a look that takes seconds; the targets are not for these."""


def tokens(rng: np.random.Generator, n: int) -> Pages:
    """Token ids, int32 [n]."""
    return rng.integers(0, VOCABULARY, n, dtype=np.int32)


def new_cache(pages: int, page_size: int = 128, group: Group | None = None, heartbeat: int = 64) -> PrefixCache:
    """A cache with a pool of ``pages``."""
    config = Config(cache=CacheConfig(page_size=page_size, heartbeat=heartbeat), pool=PoolConfig(pages=pages))
    return PrefixCache(config, FINGERPRINT, group)


def new_books(pages: int, page_size: int) -> Books:
    """Empty books of a pool of ``pages``, with one tier."""
    return Books(PagePool(pages), Namer(FINGERPRINT, page_size))


MakeBooks = Callable[[int, int], Books]
"""Makes empty books: as :func:`new_books`."""


class Conversation:
    """The index after a conversation whose runs do not merge: at every turn two pages were stored that diverge.

    ``books`` have the ``prompt`` stored as cold pages; ``chain`` names it again, with memory of its own.
    """

    def __init__(self, sizes: Sizes, seed: int = 7, make: MakeBooks = new_books) -> None:
        self.sizes = sizes
        size, rng = sizes.page_size, np.random.default_rng(seed)
        self.prompt = tokens(rng, sizes.prompt)
        extra = 2 * sizes.turns + 4 * (sizes.new // size)
        self.books = make(sizes.pages + extra, size)
        step = sizes.prompt // sizes.turns
        stored: Pages = np.zeros(0, np.int32)
        for end in range(step, sizes.prompt + 1, step):
            stored = store(self.books, self.books.namer.chain(self.prompt[:end]), stored)
            if end < sizes.prompt:
                aside = np.concatenate([self.prompt[:end], tokens(rng, 2 * size)])
                store(self.books, self.books.namer.chain(aside), stored)
        self.pages = stored
        self.chain = self.books.namer.chain(self.prompt)

    def longer(self, seed: int) -> KeyChain:
        """The chain of the prompt with ``sizes.new`` more tokens."""
        more = tokens(np.random.default_rng(seed), self.sizes.new)
        return self.books.namer.chain(np.concatenate([self.prompt, more]))


def store(books: Books, chain: KeyChain, known: Pages) -> Pages:
    """Stores a chain whose first pages are ``known``, as a request does that ends. Returns all its pages."""
    new = chain.pages - len(known)
    books.pool.own(known)
    books.promise(new)
    pages = np.concatenate([known, books.take(new)])
    books.store(chain, pages, len(known))
    books.release(pages, 0)
    return pages


def with_tails(n: int, sizes: Sizes, seed: int = 11, spare: int = 0, make: MakeBooks = new_books) -> Books:
    """Books whose index has ``n`` separate prompts of ``sizes.new`` tokens each, and so as many cold tails."""
    each = sizes.new // sizes.page_size
    books = make(n * each + spare, sizes.page_size)
    rng = np.random.default_rng(seed)
    for _ in range(n):
        store(books, books.namer.chain(tokens(rng, sizes.new)), np.zeros(0, np.int32))
    return books


@dataclass(frozen=True, slots=True)
class Agents:
    """What came of the agent workload."""

    whole: Sample
    """Everything that one request costs: names, step, prefill and output calls, finish. Of each request, the least of
    the rounds."""
    admission: Sample
    """Names and the step alone, likewise."""
    rounds: tuple[Sample, ...]
    """``whole`` of each round by itself."""
    prompt_tokens: int
    cached_tokens: int
    evicted: int
    requests: int

    @property
    def hit_share(self) -> float:
        """Cached prompt tokens by all prompt tokens."""
        return self.cached_tokens / self.prompt_tokens


def agents(sizes: Sizes, seed: int = 0) -> Agents:
    """The agent workload: sessions with one system prompt take turns in random order, one request at a time.

    A turn has ``sizes.user`` new tokens and ``sizes.output`` answered ones, and its prompt is all that came before;
    the pool holds a fraction of what all sessions need. Each session keeps its chain. Timed per request: extending
    the chain, making the request, the step, ``open`` and ``commit`` of the prefill, ``append``, ``open`` and
    ``commit`` of the output (in bulk), ``finish``. Token ids are made outside. All is done ``sizes.rounds`` times on
    a fresh cache, and of each request the least time counts: other processes of a shared machine empty its caches,
    which CPU time does not tell.
    """
    runs = [_agents_once(sizes, seed) for _ in range(sizes.rounds)]
    whole, admission = ([min(times) for times in zip(*(run[i] for run in runs), strict=True)] for i in (0, 1))
    stats = runs[0][2]
    return Agents(Sample.of(whole), Sample.of(admission), tuple(Sample.of(run[0]) for run in runs), stats.prompt_tokens,
                  stats.cached_tokens, stats.evicted, stats.requests)


def _agents_once(sizes: Sizes, seed: int) -> tuple[list[int], list[int], Stats]:
    rng = np.random.default_rng(seed)
    cache = new_cache(sizes.pool_tokens // sizes.page_size, sizes.page_size)
    system = tokens(rng, sizes.system)
    chains = [cache.chain(system) for _ in range(sizes.sessions)]
    unnamed = [tokens(rng, 0) for _ in range(sizes.sessions)]
    order = [session for session in range(sizes.sessions) for _ in range(sizes.session_turns)]
    random.Random(seed).shuffle(order)
    whole, admission = [], []
    for number, session in enumerate(order):
        new = np.concatenate([unnamed[session], tokens(rng, sizes.user)])
        answer = tokens(rng, sizes.output)
        kept = chains[session]
        start = thread_time_ns()
        chain = kept.branch()
        chain.extend(new)
        request = Request(id=str(number), chain=chain, output_limit=sizes.output)
        sequence = cache.step(Message(requests=(request,))).ready[0]
        admitted = thread_time_ns()
        _run(sequence, answer)
        whole.append(thread_time_ns() - start)
        admission.append(admitted - start)
        chains[session] = sequence.chain
        unnamed[session] = answer[-1:]  # the last one was sampled and not computed
    return whole, admission, cache.stats()


def _run(sequence: Sequence, answer: Pages) -> None:
    rest = sequence.prompt_tokens - sequence.committed
    sequence.open(rest)
    sequence.commit(rest)
    sequence.append(answer)
    if len(answer) > 1:
        sequence.open(len(answer) - 1)
        sequence.commit(len(answer) - 1)
    sequence.finish()
