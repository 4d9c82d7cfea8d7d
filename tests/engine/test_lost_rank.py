"""A rank that is killed, stopped or fails in a step: the others end with an error that names it, and nothing is left.

One trial of each kind; ``python -m distkv.testing.trials`` runs as many as wanted, at random.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distkv.testing import trials
from distkv.testing._trial_rank import Trial

DEADLINE = 4.0
KILLED = Trial(kind="kill", ranks=3, victim=2, step=5, place="layer", layer=1, seed=1, timeout_s=DEADLINE,
               store_on_rank_0=False)  # fmt: skip
TRIALS = [
    KILLED,
    # the process that keeps the group's store, so that no watchdog can say a word
    replace(KILLED, kind="stop", victim=0, place="between", store_on_rank_0=True),
    replace(KILLED, kind="forward", victim=1, overlap=True),
    replace(KILLED, kind="commit", victim=0, place="commit", store_on_rank_0=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trials")
    trials.random_model(folder / "model")
    return folder


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.kind)
def test_the_others_end_with_a_named_error_within_the_deadline(folder: Path, trial: Trial) -> None:
    result = trials.run_trial(trial, folder, trials.context())
    assert not result.problems
    wanted = {"kill": "PeerLost", "stop": "GroupTimeout"}.get(trial.kind, "PeerFault")
    assert [report.error for report in result.reports] == [wanted] * 2
