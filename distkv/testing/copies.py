"""The copy engine of a simulated rank: scripted, over the modelled bytes, with moods, and with what never ends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from distkv.host.copies import Copy, Kind
from distkv.host.scripted import Rules, ScriptedCopies
from distkv.testing.content import Content


class SimulatedCopies(ScriptedCopies):
    """Copies of one rank. Every draw is from ``rng``; ``epoch``, once it is set, gives the rank's epoch.

    A copy waits for the passes that were launched before its submit, and reads and writes when the script says. Loads
    that take too long are overdue; what is stalled ends in :meth:`calm` only.
    """

    def __init__(self, content: Content, rng: random.Random, rules: Rules | None = None) -> None:
        super().__init__(read=content.read, write=self._written, barrier=self._retired_before, retire=self._let_retire,
                         rules=rules)
        self.content = content
        self.rng = rng
        self.epoch: Callable[[], int] = lambda: 0
        self.counts: Counter[str] = Counter()
        self.p_end = rng.choice([0.2, 0.6, 0.95])
        self.p_fail = rng.choice([0.0, 0.0, 0.05, 0.3])
        self.p_stall = rng.choice([0.0, 0.0, 0.05])
        self.patience = rng.choice([4, 12, 40])
        self._marks: dict[Copy, tuple[int, int]] = {}  # passes launched before its submit, and what it brings
        self._age: Counter[Copy] = Counter()

    def submit(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            era = self.epoch() if copy.kind is Kind.LOAD else self.content.host_resets
            self._marks[copy] = self.content.launched_passes, era
        super().submit(copies)
        for copy in copies:
            if copy in self._plays and self.p_stall and self.rng.random() < self.p_stall:
                self.stall(copy)
                self.counts["copies stalled"] += 1

    def play(self) -> None:
        """A moment passes."""
        self.tick(self.rng, self.p_end, self.p_fail)
        for copy in self.running:
            self._age[copy] += 1
            if copy.kind is Kind.LOAD and self._age[copy] == self.patience:
                self.expire(copy)
                self.counts["loads overdue"] += 1

    def calm(self) -> None:
        """From now on copies end, and end well."""
        self.p_end, self.p_fail, self.p_stall = 0.7, 0.0, 0.0
        for copy in self.running:
            self.release(copy)

    def _written(self, copy: Copy, data: object) -> None:
        self.content.write(copy, data, self._marks[copy][1])  # type: ignore[arg-type]

    def _retired_before(self, copy: Copy) -> bool:
        return self.content.run_passes >= self._marks[copy][0]

    def _let_retire(self, copy: Copy) -> None:
        self.content.run_up_to(self._marks[copy][0])
