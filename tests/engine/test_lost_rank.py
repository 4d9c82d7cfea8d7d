"""A rank that is killed, stopped or fails in a step: the others end with an error that names it, and nothing is left.

One trial of each kind; ``python -m distkv.testing.trials`` runs as many as wanted, at random.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

from distkv.testing import trials
from distkv.testing._trial_rank import Trial
from distkv.testing.processes import run_ranks

DEADLINE = 4.0
ERRORS = {"kill": "PeerLost", "stop": "GroupTimeout", "forward": "PeerFault", "commit": "PeerFault",
          "begin": "PeerFault"}
KILLED = Trial(kind="kill", ranks=3, victim=2, step=5, place="layer", layer=1, seed=1, timeout_s=DEADLINE,
               store_on_rank_0=False)  # fmt: skip
TRIALS = [
    KILLED,
    # the process that keeps the group's store, so that no watchdog can say a word
    replace(KILLED, kind="stop", victim=0, place="between", store_on_rank_0=True),
    replace(KILLED, kind="forward", victim=1, overlap=True),
    replace(KILLED, kind="commit", victim=0, place="commit", store_on_rank_0=True),
    # the others are in a ballot that lacks rank 1 alone, and have to end although it lives on
    replace(KILLED, kind="begin", victim=1, place="begin"),
]


def trials_case(rank: int, world_size: int, folder: Path) -> list[tuple[list[str], list[str]]]:
    """In a process that has imported everything, so that the ranks are forked from it."""
    forks = multiprocessing.get_context("fork")
    results = [trials.run_trial(trial, folder, forks) for trial in shares()[rank]]
    return [(result.problems, [report.error for report in result.reports]) for result in results]


def shares() -> list[list[Trial]]:
    """The trial that mostly waits for its deadline, and the others beside it."""
    return [[trial for trial in TRIALS if (trial.kind == "stop") == waits] for waits in (True, False)]


def test_the_others_end_with_a_named_error_within_the_deadline(tmp_path: Path) -> None:
    trials.random_model(tmp_path / "model")
    seen = run_ranks(trials_case, 2, (tmp_path,), backend=None, timeout_s=240.0)
    for share, results in zip(shares(), seen, strict=True):
        for trial, (problems, errors) in zip(share, results, strict=True):
            assert not problems, trial
            assert errors == [ERRORS[trial.kind]] * 2, trial
