"""What the tests of labels and windows share: caches and groups with labels, and the engine's part for them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from distkv import CacheConfig, Config, LabelConfig, Message, PoolConfig, PrefixCache, Sequence, StepResult
from distkv.config import HostConfig
from distkv.testing.copies import SimulatedCopies
from distkv.testing.group import SimulatedGroup
from distkv.testing.label_content import LabelContent, RankContent
from tests.core.helpers import FINGERPRINT, request

SIZE = 2


def sliding(pages: int = 40, window: int = 4, *, name: str = "win", allowance: int | None = 0, chunk: int = 4,
            host: int = 0) -> LabelConfig:
    return LabelConfig(name=name, kind="sliding", pages=pages, window_tokens=window, allowance_tokens=allowance,
                       chunk_tokens=chunk, host_pages=host)


def rolling(pages: int = 40, window: int = 8, *, allowance: int | None = 0, chunk: int = 4) -> LabelConfig:
    return LabelConfig(name="roll", kind="rolling", pages=pages, window_tokens=window, allowance_tokens=allowance,
                       chunk_tokens=chunk)


def full(pages: int = 40, name: str = "cfg", host: int = 0) -> LabelConfig:
    return LabelConfig(name=name, pages=pages, host_pages=host)


def config(*labels: LabelConfig, pages: int = 60, host: int | None = None, size: int = SIZE, **cache: Any) -> Config:
    return Config(cache=CacheConfig(page_size=size, **cache), pool=PoolConfig(pages=pages, check=True),
                  host=HostConfig(pages=host, prefetch=False), labels=labels)


class Ranks:
    """A group of ranks with labels, in which every byte is modelled and copies end when :meth:`copied` says so."""

    def __init__(self, *configs: Config, hash64: Any = None) -> None:
        self.contents: list[RankContent] = []
        self.engines: list[dict[str, SimulatedCopies]] = []
        for each in configs:
            sizes = {"main": (each.pool.pages, each.host.pages or 0, None)} | {
                label.name: (label.pages, label.host_pages, label.window_tokens if label.kind == "sliding" else None)
                for label in each.labels}
            self.contents.append(RankContent(
                LabelContent(name, window, each.cache.page_size, pages, hosts, asynchronous=each.cache.asynchronous)
                for name, (pages, hosts, window) in sizes.items()))
            self.engines.append({name: self._engine(self.contents[-1].parts[name])
                                 for name, (_, hosts, _) in sizes.items() if hosts})
        self.group = SimulatedGroup(configs, FINGERPRINT, hash64, copies=self.engines,  # type: ignore[arg-type]
                                    copy_pages=[self._copier(content) for content in self.contents])
        self.caches = self.group.caches

    @staticmethod
    def _engine(content: LabelContent) -> SimulatedCopies:
        engine = SimulatedCopies(content, random.Random(0))
        engine.p_fail = engine.p_stall = 0.0
        engine.epoch = lambda: 0
        return engine

    @staticmethod
    def _copier(content: RankContent) -> Any:
        return lambda label, source, target: content.parts[label].copied(source, target, 0)

    def begin(self, *given: tuple[str, object, int], **options: Any) -> None:
        self.group.begin(lambda cache: Message(requests=tuple(
            request(cache, name, tokens, limit, **options) for name, tokens, limit in given)))

    def end(self) -> StepResult:
        """The step ends; what is ready has the bytes of its prefix in every pool. Gives rank 0's result."""
        outcomes = self.group.end()
        for content, outcome in zip(self.contents, outcomes, strict=True):
            if not isinstance(outcome, StepResult):
                raise outcome
            for sequence in outcome.ready:
                content.expect(sequence, outcome.step)
        self.check()
        first = outcomes[0]
        assert isinstance(first, StepResult)
        return first

    def check(self) -> None:
        self.group.check()
        self.group.check_agreed()

    def step(self, *given: tuple[str, object, int], **options: Any) -> StepResult:
        self.begin(*given, **options)
        return self.end()

    def computes(self, name: str, tokens: int, chunk: int = 4) -> None:
        """The sequence of this name computes its next tokens on every rank, in chunks. Behind the prompt they are 7."""
        for cache, content in zip(self.caches, self.contents, strict=True):
            sequence = cache.running[name]
            left = tokens
            while left:
                n = min(chunk, left)
                sequence.append([7] * max(0, sequence.committed + n - sequence.named))
                sequence.open(n)
                cache.fence()
                content.launched(sequence, n, cache.steps)
                sequence.commit(n)
                cache.check()
                left -= n

    def serve(self, name: str, tokens: list[int], output: int = 0, **options: Any) -> int:
        """A request comes in, is computed and finished. Gives how many of its tokens were in the cache."""
        ready = self.step((name, tokens, output), **options).ready
        assert [sequence.id for sequence in ready] == [name]
        cached = ready[0].cached_tokens
        self.computes(name, len(tokens) + output - cached)
        self.group.each(lambda cache: cache.running[name].finish())
        self.check()
        return cached

    def copied(self) -> None:
        """All copies have ended, and the next step hears of it."""
        for cache, engines in zip(self.caches, self.engines, strict=True):
            for tier in cache._books.tiers:
                tier.flush()
            for engine in engines.values():
                engine.finish_all()

    def lose(self, rank: int, positions: Iterable[int], tokens: object, label: str = "win") -> None:
        """This rank loses the stored pages of the window at these positions of a chain."""
        cache = self.caches[rank]
        ledger: Any = cache._ledger(label)
        keys = cache.chain(tokens).keys
        for position in positions:
            place = int(ledger.windows.places([keys[position]])[0])
            assert place >= 0
            ledger.windows.drop(place)


def grown(cache: PrefixCache, sequence: Sequence, tokens: int, chunk: int = 4) -> Sequence:
    """The sequence computes so many more tokens, in chunks."""
    for at in range(0, tokens, chunk):
        n = min(chunk, tokens - at)
        sequence.append([7] * max(0, sequence.committed + n - sequence.named))
        sequence.open(n)
        sequence.commit(n)
        cache.check()
    return sequence
