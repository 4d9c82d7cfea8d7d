"""What the engine of a simulated group does with running sequences: the same on every rank, not at the same time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

from distkv.cache import PrefixCache
from distkv.errors import DuplicateRequest, NoRoom
from distkv.forks import Branch
from distkv.sequence import Sequence
from distkv.testing.content import Content
from distkv.testing.group import Disagreement, SimulatedGroup


class Work:
    """Prefill, decode, speculate, grow, fork, keep, suspend, finish, abort: each drawn once and done on every rank."""

    rng: random.Random
    size: int
    ranks: list[int]
    group: SimulatedGroup
    contents: list[Content]
    counts: Counter[str]
    step_number: int
    p_suspend = p_fork = p_keep = 0.0
    p_go_on = 0.85
    """How likely a sequence that may generate goes on to do so."""

    def _reset_work(self) -> None:
        self.extra: dict[str, int] = {}
        """Tokens beyond its limit that a sequence has grown by."""
        self.forks = 0
        self.growing: dict[str, list[int]] = {}
        """Pages for which a sequence waits to grow, in order of asking."""
        self.ended: set[str] = set()
        """Sequences that were ended since this step began, on some rank."""

    def known_ids(self) -> list[str]:
        cache = self.group.caches[0]
        return [*cache.waiting_ids, *cache.running, *cache.suspended, *cache.kept]

    def able(self) -> list[str]:
        """Sequences that can run."""
        return [name for name, sequence in self.group.caches[0].running.items() if not sequence.read_in_progress]

    def forget_ended(self) -> None:
        """What was noted of sequences that do not run any more."""
        running = self.group.caches[0].running
        self.extra = {i: n for i, n in self.extra.items() if i in running and i not in self.ended}
        self.growing = {i: n for i, n in self.growing.items() if n and i in running and i not in self.ended}

    # ---- calls on one rank

    def abort_call(self) -> Callable[[int], None]:
        request_id = self.rng.choice(self.known_ids())
        self.counts["abort"] += 1
        sequence = self.group.caches[0].running.get(request_id)
        self.counts["aborted while read in"] += sequence is not None and sequence.read_in_progress
        return partial(self.abort, request_id=request_id)

    def abort(self, rank: int, request_id: str) -> None:
        self.ended.add(request_id)
        self.group.caches[rank].abort(request_id)

    def work_calls(self) -> list[Callable[[int], None]]:
        """One piece of work for each sequence that can run, drawn once and done on every rank."""
        running = self.group.caches[0].running
        return [partial(self.work, request_id=request_id, seed=self.rng.random(), extra=self.extra.get(request_id, 0),
                        forking=running[request_id].forking) for request_id in self.able()]

    def work(self, rank: int, request_id: str, seed: float, extra: int = 0, forking: bool = False) -> None:
        """Prefill, decode, speculate, keep, suspend or finish: a function of the sequence's agreed state and of
        ``seed``. What waits for a fork (``forking``) can only end."""
        sequence = self.group.caches[rank].running.get(request_id)
        if sequence is None:
            return
        rng = random.Random(seed)
        current = sequence.epoch == self.group.caches[rank]._books.epoch
        if self.p_keep and rng.random() < self.p_keep and sequence.committed and current:
            self.ended.add(request_id)
            sequence.keep()
            self.counts["kept"] += rank == 0
            return
        if forking:
            if rng.random() < 0.2:
                self.ended.add(request_id)
                sequence.suspend() if self.p_suspend and rng.random() < 0.5 else sequence.finish()
                self.counts["ended while its fork waited"] += rank == 0
            return
        before = sequence.committed
        limit = sequence.prompt_tokens + sequence.request.output_limit + extra
        if self.p_suspend and rng.random() < self.p_suspend:
            self.ended.add(request_id)
            ahead = sequence.prompt_tokens - before
            if ahead > 0:  # opened, and never computed
                sequence.open(rng.randint(1, self.may_open(ahead)))
            sequence.suspend()
        elif before < sequence.prompt_tokens:
            n = min(rng.randint(1, 3 * self.size), sequence.prompt_tokens - before)
            sequence.open(n)
            self.launch(rank, sequence, n)
            if before + n == sequence.prompt_tokens:
                sequence.append([rng.randint(0, 2)])
            sequence.commit(n)
        elif before < limit and rng.random() < self.p_go_on:
            drafted = min(rng.randint(0, 3), limit - before - 1)
            if sequence.named == before:  # a fork samples its first token itself
                sequence.append([rng.randint(0, 2)])
            sequence.append([rng.randint(0, 2) for _ in range(drafted)])
            sequence.open(1 + drafted)
            self.launch(rank, sequence, 1 + drafted)
            accepted = rng.randint(0, drafted)
            sequence.commit(1 + accepted)
            sequence.truncate(drafted - accepted)
            sequence.append([rng.randint(0, 2)])
        else:
            self.ended.add(request_id)
            sequence.finish()
            self.finished(rank, sequence)

    def may_open(self, n: int) -> int:
        """How many of ``n`` tokens a sequence may open at a time."""
        return n

    def finished(self, rank: int, sequence: Sequence) -> None:
        """A sequence has ended well on this rank."""

    def launch(self, rank: int, sequence: Sequence, n: int) -> None:
        """A forward pass over the last ``n`` opened tokens."""
        self.group.caches[rank].fence()
        self.contents[rank].launched(sequence, n, self.step_number)

    # ---- calls on all ranks

    def fork(self, wait: bool = False) -> None:
        """Forks a running sequence or a kept prefix: alike on all ranks, or on none."""
        cache, rng = self.group.caches[0], self.rng
        parents = [*self.able(), *cache.kept]
        if not parents or len(cache.running) > 8:
            return
        name, branches = rng.choice(parents), self.branches()
        parent = cache.running.get(name) or cache.kept[name]
        if parent.forking or not parent.committed:
            return
        forked = [self._forked(rank, name, branches, wait) for rank in self.ranks]
        if any(ids != forked[0] for ids in forked):
            raise Disagreement(f"{name} was forked differently: {forked}")
        waits = forked[0] == ()
        self.counts["fork waits" if waits else "forked" if forked[0] else "not forked"] += 1
        self.counts["kept forked"] += bool(parent.ended and forked[0])

    def branches(self) -> int | tuple[Branch, ...]:
        """What children are asked for: so many, or some with suffixes, limits and names, seldom one that is taken."""
        rng, n = self.rng, self.rng.choice([1, 1, 2, 3])
        if rng.random() < 0.5:
            return n
        self.forks += n
        return tuple(Branch(id=f"fork {self.forks - i}" if rng.random() < 0.97 else "1",
                            suffix=[rng.randint(0, 1) for _ in range(rng.choice([0, 0, 1, 2, 5]))],
                            output_limit=rng.choice([None, 0, 1, 4])) for i in range(n))

    def _forked(self, rank: int, name: str, branches: int | tuple[Branch, ...], wait: bool) -> tuple[str, ...] | None:
        """The children's names on this rank; None if they cannot be."""
        cache = self.group.caches[rank]
        parent = cache.running.get(name) or cache.kept[name]
        try:
            children = parent.fork(branches, wait=wait)
        except (NoRoom, DuplicateRequest):
            return None
        self.contents[rank].forked(parent, children, self.step_number)
        return tuple(child.id for child in children)

    def grow(self, wait: bool = False) -> None:
        """A sequence asks for more pages than it was promised: granted from the leftover on all ranks, or on none."""
        running = self.able()
        if not running:
            return
        cache = self.group.caches[0]
        request_id, pages = self.rng.choice(running), self.rng.randint(1, cache.leftover + 2)
        granted = [self._grown(cache, request_id, pages, wait) for cache in self.group.caches]
        if len(set(granted)) > 1:
            raise Disagreement(f"{pages} more pages were granted on some ranks only: {granted}")
        self.counts["grown" if granted[0] else "growth waits" if granted[0] is False else "not grown"] += 1
        if granted[0]:
            self.extra[request_id] = self.extra.get(request_id, 0) + pages * self.size
        elif granted[0] is False:
            self.growing.setdefault(request_id, []).append(pages)

    @staticmethod
    def _grown(cache: PrefixCache, request_id: str, pages: int, wait: bool) -> bool | None:
        try:
            return cache.grow(cache.running[request_id], pages, wait=wait)
        except NoRoom:
            return None
