"""Beam search: which continuations of which beams go on. Sans-IO, and the same on every rank for the same logits.

The rules and scores are those of ``generate(num_beams=...)`` of transformers, but that sums are float64 and that equal
scores are told apart: the lower token id comes first, then the better beam. Where pages come from is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from distkv.engine.sampling import largest

__all__ = ["BeamSearch", "Beams", "Hypothesis", "Successor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beams:
    """How a request is searched. Checked where the request came in, see ``Prompt`` for the fields."""

    width: int
    """2 or more."""
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


class Successor(NamedTuple):
    """A beam of the next round."""

    parent: int
    """Number of the beam that it goes on from, in this round."""
    token: int


class Hypothesis(NamedTuple):
    """An answer, whole or not."""

    score: float
    """The sum of its tokens' log probabilities, by its length to the power of the length penalty."""
    tokens: tuple[int, ...]
    stopped: bool
    """Whether its last token is one that ends an answer."""


class _Beam(NamedTuple):
    before: _Beam | None
    token: int
    score: float
    """Sum of log probabilities."""

    def tokens(self) -> tuple[int, ...]:
        found: list[int] = []
        at: _Beam | None = self
        while at is not None and at.before is not None:
            found.append(at.token)
            at = at.before
        return tuple(reversed(found))


class BeamSearch:
    """The search of one request. ``beams`` of them live at a time, fewer where there are not so many continuations."""

    def __init__(self, how: Beams, stop_ids: Set[int], limit: int) -> None:
        """``limit``: tokens of an answer at most, 1 or more."""
        self.length = 0
        """Tokens of each beam."""
        self.finished: list[Hypothesis] = []
        """The best whole answers so far, the best first; never more than beams."""
        self.gave: frozenset[int] = frozenset()
        """Beams of the last round of which a continuation was whole, and good enough to be kept."""
        self._how = how
        self._stop_ids = stop_ids
        self._limit = limit
        self._live = [_Beam(None, -1, 0.0)]

    def step(self, rows: Sequence[np.ndarray]) -> list[Successor]:
        """One round: the logits (float ``[vocab]``) behind each beam in, the beams of the next round out, best first.

        None: the search is over, and :attr:`finished` has its answers.
        """
        width = self._how.width
        self.length += 1
        kept: list[tuple[Hypothesis, int]] = [(hypothesis, -1) for hypothesis in self.finished]
        live: list[_Beam] = []
        successors: list[Successor] = []
        for rank, (score, token, parent) in enumerate(self._candidates(rows)):
            beam, stopped = _Beam(self._live[parent], token, score), token in self._stop_ids
            if stopped or self.length == self._limit:
                if rank < width:  # those behind are there only so that enough go on
                    kept.append((Hypothesis(self._penalised(score, self.length), beam.tokens(), stopped), parent))
            elif len(live) < width:
                live.append(beam)
                successors.append(Successor(parent, token))
        kept = sorted(kept, key=lambda each: -each[0].score)[:width]  # stable: of equal ones the earlier
        self.finished = [hypothesis for hypothesis, _ in kept]
        self.gave = frozenset(parent for _, parent in kept if parent >= 0)
        self._live = live
        return successors if self._goes_on() else []

    def best(self, n: int) -> list[Hypothesis]:
        """The ``n`` best answers, or fewer; whole ones first, then what lives."""
        alive = [Hypothesis(self._penalised(beam.score, max(1, self.length)), beam.tokens(), False)
                 for beam in self._live]  # fmt: skip
        return [*self.finished, *(alive if self.length < self._limit else [])][:n]

    def _candidates(self, rows: Sequence[np.ndarray]) -> list[tuple[float, int, int]]:
        """(score, token, beam), best first: enough of them that ``width`` go on, however many end."""
        most = max(2, 1 + len(self._stop_ids)) * self._how.width
        found: list[tuple[float, int, int]] = []
        for number, (beam, row) in enumerate(zip(self._live, rows, strict=True)):
            values = row.astype(np.float64)
            values -= values.max()
            values -= np.log(np.exp(values).sum())
            ids = largest(values, min(most, len(values)))
            scores = (beam.score + values[ids]).tolist()
            found += [(score, token, number) for score, token in zip(scores, ids.tolist(), strict=True)
                      if score > -np.inf]  # fmt: skip
        return sorted(found, key=lambda each: (-each[0], each[1], each[2]))[:most]

    def _goes_on(self) -> bool:
        how = self._how
        if not self._live or self.length == self._limit:
            return False
        if len(self.finished) < how.width:
            return True
        longest = how.early_stopping == "never" and how.length_penalty > 0
        possible = self._penalised(self._live[0].score, self._limit if longest else self.length)
        return how.early_stopping is not True and possible > self.finished[-1].score

    def _penalised(self, score: float, length: int) -> float:
        return float(score / length**self._how.length_penalty)
