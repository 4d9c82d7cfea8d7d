"""Random schedules of groups with several labels: sliding windows, rolling labels, second pools; both tiers in each.

``run_window_schedule(seed)`` is one schedule. Beside what :mod:`distkv.testing.schedules` sees, it sees a hit whose
window is not there or has other bytes, in any pool and on any rank; a sequence with more pages of a windowed label than
window, allowance and chunk take; labels whose page tables the ranks do not share out alike.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from distkv.cache import PrefixCache
from distkv.config import Config, HostConfig, LabelConfig
from distkv.host.copies import CopyEngine
from distkv.keys import Fingerprint
from distkv.ledger import MAIN, CopyPage
from distkv.request import Request, StepResult
from distkv.sequence import Sequence
from distkv.testing.content import Content
from distkv.testing.copies import SimulatedCopies
from distkv.testing.group import Disagreement, SimulatedGroup
from distkv.testing.label_content import LabelContent, RankContent
from distkv.testing.plans import PAGE_SIZE, Plan
from distkv.testing.tier_schedules import TierSchedule
from distkv.windows import RollingLedger, SlidingLedger, WindowedLedger, window_pages

_CHUNK = 3 * PAGE_SIZE
"""Most tokens of one pass, see :class:`distkv.testing.work.Work`."""


@dataclass(frozen=True, slots=True)
class LabelPlan(Plan):
    """A request that asks for labels."""

    labels: tuple[str, ...] = (MAIN,)

    def request(self, cache: PrefixCache) -> Request:
        return replace(Plan.request(self, cache), labels=self.labels)


def draw_labels(rng: random.Random, ranks: int, *, equal: bool) -> list[tuple[LabelConfig, ...]]:
    """The labels of each rank: the same ones, with pools and host tiers of other sizes. ``equal``: not even those."""
    kinds = [kind for kind, p in (("sliding", 0.85), ("sliding", 0.15), ("full", 0.35), ("rolling", 0.35))
             if rng.random() < p] or ["sliding"]
    drawn: list[list[LabelConfig]] = [[] for _ in range(ranks)]
    for number, kind in enumerate(kinds):
        window = rng.choice([1, 2, 3, 4, 5, 6, 8]) if kind == "sliding" else rng.choice([6, 8, 12])
        allowance = rng.choice([0, 1, 2, 4, 6])
        most = window_pages(window + allowance + _CHUNK, PAGE_SIZE) if kind != "full" else 9
        room, hosts = most + rng.choice([0, 2, most, 3 * most]), rng.choice([0, 4, 12, 40])
        for label in drawn:
            scratch = 0 if equal else rng.randint(0, 1)
            pages = room + (0 if equal else rng.randint(0, 4))
            windowed: dict[str, Any] = {} if kind == "full" else {
                "window_tokens": window, "allowance_tokens": allowance, "chunk_tokens": _CHUNK}
            label.append(LabelConfig(
                name=f"{kind}{number}", kind=kind, pages=pages + scratch, scratch_pages=scratch,  # type: ignore[arg-type]
                host_pages=0 if equal else rng.choice([0, hosts, hosts, hosts]), **windowed))
    return [tuple(labels) for labels in drawn]


class LabelGroup(SimulatedGroup):
    """A group whose ranks have a copy engine for each label."""

    def __init__(self, configs: list[Config], copies: list[dict[str, CopyEngine]], copy_pages: list[CopyPage]) -> None:
        super().__init__(configs, Fingerprint(model="simulated"), copies=cast(Any, copies), copy_pages=copy_pages)
        self.asked = 0

    def check(self) -> None:
        """The invariants of every rank, every fifth time: of several labels they take longer than all the rest."""
        self.asked += 1
        if self.asked % 5 == 0:
            super().check()

    def lose_window_page(self, rank: int, rng: random.Random) -> bool:
        """Rank ``rank`` loses one stored page of a label beside ``main``, in either tier, whoever else has it."""
        ledgers = [ledger for ledger in self.caches[rank]._books.ledgers[1:] if len(ledger.stock)]
        if not ledgers:
            return False
        ledger = rng.choice(ledgers)
        if isinstance(ledger, SlidingLedger):
            ledger.windows.drop(rng.choice(sorted(ledger.windows.key_of)))
        else:
            ledger.index.drop(rng.choice([page for run in ledger.index.runs() for page in run.page_ids().tolist()]))
        return True


class WindowSchedule(TierSchedule):
    """A schedule with labels. One in eight is of a group in lockstep, without host tiers."""

    def make_contents(self) -> list[Content]:
        rng = self.rng
        if len(self.ranks) < 6 and rng.random() < 0.15:
            self.configs += [self.configs[-1]] * rng.randint(1, 6 - len(self.ranks))
            self.ranks = list(range(len(self.configs)))
            self.refused = [[] for _ in self.ranks]
        self.lockstep = rng.random() < 0.12
        roomy = rng.choice([0, 8, 16])
        boundaries, equal = rng.choice([2, 4, 8, 64]), self.configs[0]
        labels = draw_labels(rng, len(self.ranks), equal=self.lockstep)
        self.configs = [self._config(equal if self.lockstep else config, roomy, boundaries, own)
                        for config, own in zip(self.configs, labels, strict=True)]
        contents = super().make_contents()
        self.p_protect = rng.choice([0.1, 0.5])
        return [cast(Content, self._contents(config, content.lagging))
                for config, content in zip(self.configs, contents, strict=True)]

    def _config(self, config: Config, roomy: int, boundaries: int, labels: tuple[LabelConfig, ...]) -> Config:
        cache = replace(config.cache, window_boundaries=boundaries)
        if self.lockstep:
            cache, host = replace(cache, agreement="lockstep"), HostConfig()
        else:
            host = config.host
        return replace(config, cache=cache, host=host, labels=labels,
                       pool=replace(config.pool, pages=config.pool.pages + roomy))

    def _contents(self, config: Config, lagging: bool) -> RankContent:
        ways: dict[str, Any] = {"asynchronous": self.asynchronous, "lagging": lagging}
        parts = [LabelContent(MAIN, None, self.size, config.pool.pages, config.host.pages or 0, **ways)]
        parts += [LabelContent(label.name, label.window_tokens if label.kind == "sliding" else None, self.size,
                               label.pages, label.host_pages, **ways) for label in config.labels]
        return RankContent(parts)

    def rank_content(self, rank: int) -> RankContent:
        """The modelled bytes of this rank."""
        return cast(RankContent, self.contents[rank])

    def make_group(self) -> SimulatedGroup:
        self.windows: list[dict[str, SimulatedCopies]] = []
        """The copy engines of each rank by label, those of ``main`` included."""
        for rank, config in enumerate(self.configs):
            hosts = {MAIN: config.host.pages or 0} | {label.name: label.host_pages for label in config.labels}
            self.windows.append({
                name: SimulatedCopies(self.rank_content(rank).parts[name], random.Random(self.rng.random()))
                for name, pages in hosts.items() if pages})
        self.engines = [engines.get(MAIN) for engines in self.windows]
        self.labels = LabelGroup(self.configs, cast(Any, self.windows), self.copiers())
        for cache, engines in zip(self.labels.caches, self.windows, strict=True):
            for engine in engines.values():
                engine.epoch = partial(getattr, cache._books, "epoch")
        return self.labels

    def copiers(self) -> list[CopyPage]:
        def copier(content: RankContent) -> CopyPage:
            def copy_page(label: str, source: int, target: int) -> None:
                self.counts["tails copied" if label == MAIN else "tails of labels copied"] += 1
                content.parts[label].copied(source, target, self.step_number)
            return copy_page

        return [copier(self.rank_content(rank)) for rank in self.ranks]

    # ---- requests

    def plan(self) -> Plan:
        rng, names = self.rng, [label.name for label in self.configs[0].labels if label.kind != "sliding"]
        drawn = super().plan()
        tokens = drawn.tokens
        if self.past and rng.random() < 0.25:  # edited near its end
            tokens = tuple(rng.choice(self.past))
            cut = rng.randint(0, min(8, len(tokens) - 1))
            tokens = (*tokens[: len(tokens) - cut], *(rng.randint(0, 2) for _ in range(rng.randint(1, 4))))
        labels = (MAIN, *(name for name in names if rng.random() < 0.4))
        if names and rng.random() < 0.1:
            labels = labels[1:] or (rng.choice(names),)
        if rng.random() < 0.01:
            labels = (*labels, "nowhere")
        return LabelPlan(drawn.id, tokens, drawn.output_limit, drawn.salt, drawn.adapter, drawn.cap, drawn.read,
                         drawn.write, labels)

    # ---- what single ranks lose, and what copies do

    def perturb(self, quiet: bool) -> None:
        super().perturb(quiet)
        if not quiet and not self.lockstep:
            for rank in self.ranks:
                if self.rng.random() < 0.03 + 0.15 * self.trouble:
                    self.counts["window page lost"] += self.labels.lose_window_page(rank, self.rng)

    def perturb_in_flight(self, rank: int) -> None:
        super().perturb_in_flight(rank)
        if self.rng.random() < 0.02 + 0.1 * self.trouble:
            self.counts["window page lost in flight"] += self.labels.lose_window_page(rank, self.rng)

    def play(self, rank: int) -> None:
        super().play(rank)
        for label, engine in self.windows[rank].items():
            if label != MAIN:
                engine.play()

    def was_reset(self, scope: str) -> None:
        for rank in self.ranks if scope != "device" else ():
            self.rank_content(rank).host_was_reset()

    # ---- work

    def work(self, rank: int, request_id: str, seed: float, extra: int = 0, forking: bool = False) -> None:
        sequence = self.group.caches[rank].running.get(request_id)
        if sequence is None:
            return
        if not forking:
            self._roll(rank, sequence, random.Random(seed + 1))
        self._wait_for_passes(rank, sequence)
        super().work(rank, request_id, seed, extra, forking)
        if not sequence.ended:
            self._within_window(sequence)

    def may_open(self, n: int) -> int:
        return min(n, _CHUNK)

    def _roll(self, rank: int, sequence: Sequence, rng: random.Random) -> None:
        """In a rolling label: protects something now and then, and releases what the next pass needs."""
        rolling = [pages for pages in sequence.lists if isinstance(pages.ledger, RollingLedger)]
        for pages in rolling:
            assert isinstance(pages.ledger, RollingLedger)
            if not pages.gone and sequence.committed and rng.random() < self.p_protect:
                most = min(sequence.committed, self.size * (pages.ledger.most - _CHUNK // self.size - 1))
                sequence.protect_prefix(rng.randint(0, most))
                self.counts["protected"] += rank == 0
            short = -(-(sequence.seq_len + _CHUNK) // self.size) - pages.gone - pages.ledger.most
            if (short > 0 and sequence.committed) or rng.random() < 0.1:
                released = sequence.release_oldest(max(0, short) * self.size + rng.randint(0, 1))
                self.counts["released"] += bool(released) and rank == 0

    def _wait_for_passes(self, rank: int, sequence: Sequence) -> None:
        """Until pages that its windows gave up have come back, as far as its next pass needs them."""
        filled = -(-(sequence.seq_len + _CHUNK) // self.size)
        for pages in sequence.lists:
            if pages.retiring and min(filled, pages.total) - pages.owned > pages.reserved:
                self.counts["waited for passes"] += rank == 0
                self.retire([rank], self.step_number)
                return

    @staticmethod
    def _within_window(sequence: Sequence) -> None:
        for pages in sequence.lists:
            if isinstance(pages.ledger, WindowedLedger) and pages.promised > pages.ledger.most:
                raise Disagreement(f"{sequence} has {pages.promised} pages of label {pages.ledger.label}, of which "
                                   f"{pages.ledger.most} are enough")

    # ---- results

    def count(self, result: StepResult) -> None:
        super().count(result)
        for sequence in result.ready:
            record = sequence.record
            sliding = [pages for pages in sequence.lists if pages.ledger.grid]
            self.counts["hits with a window"] += bool(sliding and record.cached_tokens)
            self.counts["lower boundaries"] += bool(sliding and 0 < record.agreed < record.restorable)
            self.counts["in two pools"] += len(sequence.lists) > 1 and not sliding
            self.counts["without main"] += MAIN not in sequence.labels
            self.counts[f"reason: {record.reason}"] += 1
            for pages in sliding:
                self.counts["hits behind what was given up"] += pages.gone > 0
            self._within_window(sequence)
        self._check_labels()

    def _check_labels(self) -> None:
        """The page tables of all labels have the same shape on all ranks, but for calls that have not reached some."""
        for name, sequence in self.group.caches[0].running.items():
            shapes = [[(pages.ledger.label, pages.first, pages.protected, pages.filled, pages.owned, pages.promised)
                       for pages in cache.running[name].lists] for cache in self.group.caches]
            if any(shape != shapes[0] for shape in shapes):
                raise Disagreement(f"the ranks' page tables of {sequence} have different shapes: {shapes}")

    # ---- the end

    def draining(self, n: int) -> None:
        super().draining(n)
        if n == 40:
            for engines in self.windows:
                for engine in engines.values():
                    engine.calm()

    def nothing_left(self) -> None:
        for rank, (engines, cache) in enumerate(zip(self.windows, self.group.caches, strict=True)):
            self.rank_content(rank).run_all()
            for engine in engines.values():
                cache.wait_for_copies(0)
                for tier in cache._books.tiers:
                    tier.flush()
                engine.calm()
                engine.finish_all()
            cache._books.poll_all()
            for ledger in cache._books.ledgers[1:]:
                self._count_label(ledger)
        super().nothing_left()
        for cache in self.group.caches:
            for label, stats in cache.stats().labels.items():
                if stats.pages_free != stats.pages_usable or stats.host_free != stats.host_pages:
                    raise Disagreement(f"pages of label {label} were left behind by a reset: {stats}")

    def _count_label(self, ledger: Any) -> None:
        if ledger.pool.live or ledger.reserved or ledger.pool.claims:
            raise Disagreement(f"label {ledger.label}: {ledger.pool.live} pages are live at the end, {ledger.reserved} "
                               "reserved")
        self.counts["window pages evicted"] += ledger.stock.evicted
        if ledger.tier is not None:
            for name in ("stores", "loads", "load_failures", "store_failures", "given_up", "dropped"):
                self.counts[f"label {name.replace('_', ' ')}"] += getattr(ledger.tier, name)


def run_window_schedule(seed: int, steps: int = 30) -> Counter[str]:
    """Runs one schedule; returns what happened in it, by name."""
    return WindowSchedule(seed, steps).run()
