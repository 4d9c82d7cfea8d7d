"""Random schedules of groups with a host tier: copies that end in any order, late, badly, or not at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from distkv.host.copies import Copy
from distkv.keys import Fingerprint
from distkv.request import StepResult
from distkv.sequence import Sequence
from distkv.testing.content import Content
from distkv.testing.copies import SimulatedCopies
from distkv.testing.group import Disagreement, SimulatedGroup
from distkv.testing.plans import Plan
from distkv.testing.schedules import Schedule

_PATIENCE = 40
"""Steps in which all requests end that do not need the last page, whatever copies do."""


class TierSchedule(Schedule):
    """A schedule in which cold tails go to the host and come back, and sequences suspend, resume and wait to grow."""

    has_tier = True
    p_go_on = 0.6

    def make_contents(self) -> list[Content]:
        rng = self.rng
        self.p_abort = rng.choice([0.03, 0.03, 0.15])
        self.trouble = rng.choice([0.02, 0.1, 0.1, 0.6])
        self.speeds = [rng.choice([(0, 0, 0, 1, 2), (0, 1, 2, 9)]) for _ in self.configs]
        """How many passes run at a time, on each rank."""
        self.loading: set[str] = set()
        self.orphans: set[Copy] = set()
        self.past: list[list[int]] = []
        self.p_suspend = rng.choice([0.0, 0.03, 0.15])
        self.p_resume = rng.choice([0.2, 0.8])
        self.wait_to_grow = rng.random() < 0.5
        self.slow_links = rng.random() < 0.3
        lagging = rng.random() < 0.6
        return [Content(self.size, config.pool.pages, config.host.pages or 0, asynchronous=self.asynchronous,
                        lagging=lagging) for config in self.configs]

    def make_group(self) -> SimulatedGroup:
        self.engines = [SimulatedCopies(content, random.Random(self.rng.random())) if config.host.pages else None
                        for content, config in zip(self.contents, self.configs, strict=True)]
        group = SimulatedGroup(self.configs, Fingerprint(model="simulated"), copies=self.engines,
                               copy_pages=self.copiers())
        for cache, engine in zip(group.caches, self.engines, strict=True):
            if engine is not None:
                engine.epoch = partial(getattr, cache._books, "epoch")
        return group

    # ---- what copies and passes do meanwhile

    def perturb(self, quiet: bool) -> None:
        self.asked = {name: len(pages) for name, pages in self.growing.items()}
        self.ask_fork = {name for name, sequence in self.group.caches[0].running.items() if sequence.forking}
        super().perturb(quiet)
        for rank in self.ranks:
            self.play(rank)

    def perturb_in_flight(self, rank: int) -> None:
        super().perturb_in_flight(rank)
        self.play(rank)

    def play(self, rank: int) -> None:
        content, engine, rng = self.contents[rank], self.engines[rank], self.rng
        content.run(rng.choice(self.speeds[rank]))
        if engine is None:
            return
        engine.play()
        if self.slow_links and rng.random() < 0.1:  # as measured, loading is not worth its time, or is again
            engine.page_s = rng.choice([0.0, 1e6])
            self.counts["slow links"] += engine.page_s > 0
            self.group.caches[rank].prefill_took(1, 1.0)
        tier = self.group.caches[rank]._books.tier
        assert tier is not None
        self.counts["orphans"] += len(tier._orphans - self.orphans)
        self.orphans |= tier._orphans
        self.counts["steps with kept pages"] += tier.pages.kept > 0

    # ---- calls

    def plan(self) -> Plan:
        self.next_id += 1
        return Plan.draw(self.rng, self.next_id, self.past)

    def finished(self, rank: int, sequence: Sequence) -> None:
        named = sequence.chain.salt is None and sequence.chain.adapter is None
        if rank == 0 and named and len(sequence.chain) < 2 * self.size * self.group.caches[0].pool_pages // 3:
            self.past = [*self.past[-5:], sequence.chain.tokens.tolist()]

    def resumes(self, quiet: bool) -> tuple[str, ...]:
        p = 1.0 if quiet else self.p_resume
        names = tuple(i for i in self.group.caches[0].suspended if self.rng.random() < p)
        self.counts["resumed"] += len(names)
        return names

    def more_calls(self, quiet: bool) -> list[Callable[[int], None]]:
        suspended = list(self.group.caches[0].suspended)
        if quiet or not suspended or self.rng.random() > 0.15:
            return []
        name, limit = self.rng.choice(suspended), self.rng.choice([None, 0, 3, 9])
        self.counts["resumed in flight"] += 1
        return [lambda rank: self.group.caches[rank].resume(name, output_limit=limit)]

    def was_reset(self, scope: str) -> None:
        for content in self.contents if scope != "device" else ():
            content.host_resets += 1

    def reset_in_flight(self) -> None:
        self.ask_fork.clear()  # forks wait for the next step then, and others need not
        if self.rng.random() < 0.4:
            super().reset_in_flight()
        else:
            self.reset()

    def reset(self) -> None:
        """All ranks empty a tier, or both; what runs is aborted, or finishes."""
        scope = self.rng.choice(["all", "device", "host"])
        running = self.rng.choice(["finish", "abort"])
        self.counts[f"reset of {scope}, {running}"] += 1
        self.was_reset(scope)
        if running == "abort":
            self.ended.update(self.group.caches[0].running)
        self.group.each(lambda cache: cache.reset(scope, running))  # type: ignore[arg-type]
        self.forget_ended()

    def after(self, quiet: bool) -> None:
        rng = self.rng
        if quiet:
            self.let_kept_go()
            return
        if rng.random() < 0.15:
            self.grow(wait=self.wait_to_grow)
        if rng.random() < self.p_fork:
            for _ in range(rng.choice([1, 1, 3])):
                self.fork(wait=self.wait_to_grow and rng.random() < 0.7)
        if rng.random() < 0.02 * self.trouble:
            self.reset()

    def count(self, result: StepResult) -> None:
        super().count(result)
        asked = self.asked
        for sequence in result.grown:
            pages = self.growing[sequence.id].pop(0)
            asked[sequence.id] -= 1
            self.extra[sequence.id] = self.extra.get(sequence.id, 0) + pages * self.size
            self.counts["grown after waiting"] += 1
        fresh = [s.id for s in (*result.ready, *result.loading) if s.id not in self.loading]
        self.loading = {s.id for s in result.loading}
        waits = [name for name, left in asked.items() if left and name not in self.ended]
        waits += self.ask_fork - {forked.parent.id for forked in result.forked} - self.ended
        if waits and fresh:
            raise Disagreement(f"{fresh} were admitted ahead of {waits}, which wait to grow: {result}")
        self.counts["read in"] += sum(1 for s in result.ready if s.record.host_tokens)
        for name in result.to_preempt:
            if name in self.group.caches[0].running:
                self.counts["preempted"] += 1
                self.ended.add(name)
                for rank in self.ranks:
                    self.group.caches[rank].running[name].suspend()

    # ---- the end

    def draining(self, n: int) -> None:
        if n == _PATIENCE:  # whoever waits for a page that a copy never gives back
            for engine in self.engines:
                if engine is not None:
                    engine.calm()

    def nothing_left(self) -> None:
        for content, engine, cache in zip(self.contents, self.engines, self.group.caches, strict=True):
            content.run(content.launched_passes)
            if engine is not None:
                cache.wait_for_copies(0)
                engine.calm()
                engine.finish_all()
                self.counts += engine.counts
            cache._books.poll()
            stats = cache.stats()
            if stats.copies_in_flight or stats.host_kept or stats.host_free + stats.host_ready != stats.host_pages:
                raise Disagreement(f"host pages were left behind: {stats}")
            for name in ("stores", "loads", "prefetched", "store_failures", "load_failures", "dropped"):
                self.counts[name.replace("_", " ")] += getattr(stats, name)
        stats = self.group.caches[0].stats()
        self.counts["short read-ins"] += stats.short_read_ins
        self.counts["suspended"] += stats.suspended
        super().nothing_left()
        for cache in self.group.caches:
            cache.reset()
            stats = cache.stats()
            if stats.pages_free != stats.pages_usable or stats.host_free != stats.host_pages:
                raise Disagreement(f"pages were left behind by a reset: {stats}")
