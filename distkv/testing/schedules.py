"""Random schedules over a simulated group: everything that requests, engines and unlucky ranks can do to the cache.

``run_schedule(seed)`` is one schedule. It raises at the first thing that is wrong: ranks that decide differently, a
reservation that cannot be met, a collective that one rank enters and another does not, books that do not add up, a
matched page with the bytes of another prefix, a page that is written while a pass in flight uses it, a request that
never runs, anything left behind at the end.

Two thirds of the schedules have a host tier (:mod:`distkv.testing.tier_schedules`); of the others half are of groups in
lockstep: equal pools, every call at the same place on all ranks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from distkv.errors import GroupError, PeerFailed, PeerFault
from distkv.keys import Fingerprint
from distkv.ledger import CopyPage
from distkv.request import Message, StepResult
from distkv.testing.content import Content
from distkv.testing.group import Disagreement, InjectedFault, SimulatedGroup
from distkv.testing.plans import PAGE_SIZE, How, Plan, draw_configs
from distkv.testing.work import Work

Outcomes = list[StepResult | GroupError | InjectedFault]


class Schedule(Work):
    """One run. Every draw comes from ``seed``, so a failing seed fails again.

    ``agreement`` is drawn if it is not given. ``pools``: usable pages of each rank, drawn if they are not given.
    """

    has_tier = False
    wait_to_grow = False
    p_abort = 0.15
    trouble = 1.0
    """How likely losses and resets are, in proportion."""

    def __init__(self, seed: int, steps: int = 60, *, agreement: How | None = None,
                 pools: list[int] | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.steps = steps
        self.size = PAGE_SIZE
        self.asynchronous = rng.random() < 0.4
        self.configs = draw_configs(rng, self.asynchronous, agreement, pools, tier=self.has_tier)
        self.check_every = self.configs[0].cache.check_every
        self.lockstep = self.configs[0].cache.agreement == "lockstep"
        self.overlap = rng.choice([0.0, 0.3, 1.0])
        self.ranks = list(range(len(self.configs)))
        self.counts: Counter[str] = Counter()
        self.next_id = 0
        self.step_number = 0
        self.version = 0
        self.p_fork, self.p_keep = rng.choice([(0.0, 0.0), (0.15, 0.01), (0.4, 0.03)])
        self.over = False
        self._reset_work()
        self.refused: list[list[str]] = [[] for _ in self.ranks]
        """By rank: what was refused."""
        self.contents = self.make_contents()
        self.group = self.make_group()

    def make_contents(self) -> list[Content]:
        return [Content(self.size, config.pool.pages, asynchronous=self.asynchronous) for config in self.configs]

    def make_group(self) -> SimulatedGroup:
        return SimulatedGroup(self.configs, Fingerprint(model="simulated"), copy_pages=self.copiers())

    def copiers(self) -> list[CopyPage]:
        """What forks copy pages with, on each rank."""
        def copier(content: Content) -> CopyPage:
            def copy_page(label: str, source: int, target: int) -> None:
                self.counts["tails copied"] += 1
                content.copied(source, target, self.step_number)
            return copy_page

        return [copier(content) for content in self.contents]

    def plan(self) -> Plan:
        self.next_id += 1
        return Plan.draw(self.rng, self.next_id)

    # ---- one step

    def step(self, requests: int, quiet: bool = False) -> None:
        rng, group = self.rng, self.group
        self.ended.clear()
        plans = [self.plan() for _ in range(requests)]
        known = self.known_ids()
        aborts = (rng.choice(known),) if known and rng.random() < self.p_abort / 3 and not quiet else ()
        self.ended.update(aborts)
        version = self.new_version() if rng.random() < 0.01 * self.trouble and not quiet else None
        reset = rng.random() < 0.01 * self.trouble and not quiet
        resumes = self.resumes(quiet)
        if reset or version is not None:
            self.was_reset("all")
        self.perturb(quiet)
        faulty = self.plant_faults() if not quiet else []
        self.step_number += 1
        group.begin(lambda cache: Message(requests=tuple(p.request(cache) for p in plans), aborts=aborts,
                                          weights_version=version, reset=reset, resumes=resumes))
        faulty = [r for r in faulty if "match" not in group.caches[r]._books.__dict__]
        for rank in self.ranks:
            group.heal(rank)
        if rng.random() < 0.25:
            group.check()
        outcomes = self.between_and_end(quiet)
        if faulty and self.lockstep:
            self.broken(outcomes, faulty)
            return
        self.check_outcomes(outcomes, faulty)
        self.forget_ended()
        group.check_agreed()
        self.after(quiet)
        group.check()

    def resumes(self, quiet: bool) -> tuple[str, ...]:
        """Suspended requests that the message of this step resumes."""
        return ()

    def was_reset(self, scope: str) -> None:
        """The message, or a call on all ranks, empties one tier or both."""

    def after(self, quiet: bool) -> None:
        """Calls that all ranks make between two steps."""
        if quiet:
            self.let_kept_go()
        elif self.rng.random() < self.p_fork:
            for _ in range(self.rng.choice([1, 1, 3])):
                self.fork(wait=self.rng.random() < 0.4)
        if self.rng.random() < 0.1:
            self.grow()

    def let_kept_go(self) -> None:
        for name in list(self.group.caches[0].kept):
            self.group.each(lambda cache, name=name: cache.abort(name))  # type: ignore[misc]

    def new_version(self) -> str:
        self.version += 1
        return f"w{self.version}"

    def plant_faults(self) -> list[int]:
        """Ranks whose lookups will fail. In lockstep that ends the group, so it is rare there."""
        rng = self.rng
        if rng.random() > (0.01 if self.lockstep else 0.3):
            return []
        faulty = sorted(r for r in self.ranks if rng.random() < (0.2 if self.lockstep else 0.02))
        for rank in faulty:
            self.group.fail_next_begin(rank, rng.randint(0, 2))
        return faulty

    def perturb(self, quiet: bool) -> None:
        """What single ranks lose, and when passes end: failed copies, timing. In lockstep ranks may not differ."""
        if quiet:
            return
        if self.lockstep:
            self.retire(self.ranks)
            return
        for rank in self.ranks:
            if self.rng.random() < 0.06 * self.trouble:
                self.counts["lost"] += self.group.lose_cached_page(rank, self.rng)
            if self.rng.random() < 0.02 * self.trouble:
                self.counts["lost while owned"] += self.group.lose_indexed_page(rank, self.rng)
            self.retire([rank])

    def retire(self, ranks: list[int], step: int | None = None) -> None:
        """On these ranks the passes up to ``step`` have ended, or up to one of the last steps, or none has."""
        if not self.asynchronous or (step is None and self.rng.random() < 0.4):
            return
        step = max(0, self.step_number - self.rng.randint(0, 3)) if step is None else step
        for rank in ranks:
            before = self.group.caches[rank]._books.pool.live
            self.contents[rank].retired(step)
            self.group.caches[rank].retired(step)
            self.counts["pages retired"] += before - self.group.caches[rank]._books.pool.live

    def between_and_end(self, quiet: bool) -> Outcomes:
        """Calls that all ranks make in one order, some of which reach some ranks before the end of the step."""
        rng = self.rng
        if not quiet and rng.random() < 0.03 * self.trouble:  # at the same moment on all ranks
            self.reset_in_flight()
        if not quiet and rng.random() < 0.1:
            self.grow(wait=self.wait_to_grow)
        if not quiet and rng.random() < self.p_fork / 4:
            self.fork(wait=rng.random() < 0.7)
        calls = [self.abort_call()] if self.known_ids() and rng.random() < self.p_abort and not quiet else []
        calls += self.more_calls(quiet) + self.work_calls()
        rng.shuffle(calls)
        before = self.splits(len(calls))
        if self.lockstep and before[0]:
            self.retire(self.ranks)
        for rank in self.ranks:
            for call in calls[: before[rank]]:
                call(rank)
            if not quiet and not self.lockstep:
                self.perturb_in_flight(rank)
        outcomes = self.group.end()
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, StepResult):
                for sequence in outcome.ready:
                    self.contents[rank].expect(sequence, self.step_number)
                for forked in outcome.forked:
                    self.contents[rank].forked(forked.parent, forked.children, self.step_number)
        for rank in self.ranks:
            for call in calls[before[rank] :]:
                call(rank)
        return outcomes

    def more_calls(self, quiet: bool) -> list[Callable[[int], None]]:
        """Other calls that may reach a rank before or after the end of the step."""
        return []

    def reset_in_flight(self) -> None:
        version = self.new_version() if self.rng.random() < 0.5 else None
        self.counts["reset in flight" if version is None else "bump in flight"] += 1
        self.was_reset("all")
        self.group.each(lambda cache: cache.reset() if version is None else cache.bump(version))

    def perturb_in_flight(self, rank: int) -> None:
        """:meth:`perturb` between begin and end of a step."""
        if self.rng.random() < 0.05 * self.trouble:
            self.counts["lost in flight"] += self.group.lose_indexed_page(rank, self.rng)
        self.retire([rank])

    def splits(self, calls: int) -> list[int]:
        """How many of the calls each rank makes before the end of the step: all in an engine that overlaps."""
        if self.rng.random() < self.overlap:
            self.counts["overlapped"] += 1
            return [calls] * len(self.ranks)
        if self.lockstep:
            return [self.rng.randint(0, calls)] * len(self.ranks)
        return [self.rng.randint(0, calls) for _ in self.ranks]

    def check_outcomes(self, outcomes: Outcomes, faulty: list[int]) -> None:
        first = outcomes[0]
        if faulty:
            self.counts["peer failed"] += 1
            for outcome in outcomes:
                if not isinstance(outcome, PeerFailed) or outcome.failed_rank != faulty[0]:
                    raise Disagreement(f"ranks {faulty} failed, but a rank saw {outcome!r}")
            return
        for refused, outcome in zip(self.refused, outcomes, strict=True):
            if not isinstance(outcome, StepResult):
                raise outcome
            refused += [str(r.error) for r in outcome.refused]
            assert isinstance(first, StepResult)
            if self.decided(outcome) != self.decided(first):
                raise Disagreement(f"{first} on rank 0, {outcome} elsewhere")
        assert isinstance(first, StepResult)
        self.count(first)

    def decided(self, result: StepResult) -> tuple[object, ...]:
        """What has to be equal on all ranks: all but those that were ended since the step began."""
        def alive(those: tuple[str, ...]) -> list[str]:
            return [name for name in those if name not in self.ended]

        return (result.step, alive(tuple(s.id for s in result.ready)), alive(tuple(s.id for s in result.loading)),
                alive(tuple(s.id for s in result.grown)), result.to_preempt,
                [(f.parent.id, [child.id for child in f.children]) for f in result.forked],
                [w for w in result.waiting if w.request_id not in self.ended],
                result.leftover, result.collective)

    def count(self, result: StepResult) -> None:
        self.counts["admitted"] += len(result.ready)
        self.counts["hits"] += sum(1 for s in result.ready if s.cached_tokens)
        self.counts["refused"] += len(result.refused)
        self.counts["forked after waiting"] += len(result.forked)
        self.counts["forked although the parent ended"] += sum(
            1 for forked in result.forked if forked.parent.ended not in (None, "kept"))
        self.counts["skipped"] += not result.collective
        if self.lockstep:
            self.counts["steps in lockstep"] += 1
            self.counts["collectives in lockstep"] += result.collective

    def broken(self, outcomes: Outcomes, faulty: list[int]) -> None:
        """A lookup failed in lockstep: that rank raises it, the others PeerFault, now or in the next step."""
        self.counts["broken in lockstep"] += 1
        self.over = True
        for rank, cache in enumerate(self.group.caches):
            outcome = outcomes[rank]
            wanted = InjectedFault if rank == faulty[0] else InjectedFault | PeerFault if rank in faulty else None
            if not isinstance(outcome, wanted or StepResult | PeerFault):
                raise Disagreement(f"ranks {faulty} failed in lockstep, but rank {rank} saw {outcome!r}")
            if self.group.size > 1:
                try:
                    cache.begin_step()
                except PeerFault as error:
                    if error.failed_rank not in faulty:
                        raise
                else:
                    raise Disagreement(f"ranks {faulty} failed in lockstep, but rank {rank} goes on")
            cache.close()

    # ---- the whole

    def run(self) -> Counter[str]:
        self.counts["in lockstep" if self.lockstep else "by minimum"] += 1
        for _ in range(self.steps):
            if self.over:
                break
            waiting = len(self.group.caches[0].waiting_ids)
            self.step(requests=self.rng.randint(0, 2) if waiting < 6 and self.rng.random() < 0.7 else 0)
        self.drain()
        return self.counts

    def drain(self) -> None:
        """Nothing more comes in: everything runs to its end, and nothing is left."""
        for n in range(400):
            if not self.known_ids():
                break
            self.draining(n)
            self.step(requests=0, quiet=True)
            self.retire(self.ranks, self.step_number)
        else:
            raise Disagreement(f"requests {self.known_ids()} did not end")
        self.retire(self.ranks, self.step_number)
        self.nothing_left()

    def draining(self, n: int) -> None:
        """The ``n``-th step of the end begins."""

    def nothing_left(self) -> None:
        if any(refused != self.refused[0] for refused in self.refused):
            raise Disagreement(f"ranks refused different requests: {self.refused}")
        for cache in self.group.caches:
            cache.check()
            stats = cache.stats()
            if stats.pages_live or stats.pages_reserved or stats.pages_free + stats.pages_cached != stats.pages_usable:
                raise Disagreement(f"pages were left behind: {stats}")
            self.counts["evicted"] += stats.evicted
            self.counts["cascades"] += stats.cascades


def run_schedule(seed: int, steps: int = 60) -> Counter[str]:
    """Runs one schedule; returns what happened in it, by name."""
    from distkv.testing.tier_schedules import TierSchedule

    return (Schedule if seed % 3 == 0 else TierSchedule)(seed, steps).run()
