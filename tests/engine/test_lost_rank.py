"""A rank that dies or stops inside a forward pass: the others end with a named error and do not hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from distkv.engine.engine import Engine
from distkv.engine.launch import make_groups
from distkv.engine.model import load_model
from distkv.engine.requests import Prompt
from distkv.errors import GroupTimeout, PeerLost
from distkv.testing.processes import run_outcomes
from tests.engine import tiny

DEADLINE = 4.0


def lost_case(rank: int, world_size: int, folder: Path, how: str) -> None:
    settings = tiny.config(folder, tp=world_size, idle_timeout_s=DEADLINE)
    group, handoff_group, cache_group = make_groups(world_size, DEADLINE)
    model = load_model(settings.model, group, timeout_s=DEADLINE)
    engine = Engine(settings, model, cache_group=cache_group, handoff_group=handoff_group)
    calls = 0

    def last_call(*_: object) -> None:
        nonlocal calls
        calls += 1
        if rank == world_size - 1 and calls == 3:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    model.module.model.layers[1].register_forward_pre_hook(last_call)
    if rank == 0:
        engine.generate([Prompt(tokens=tiny.tokens(40, 1))])
    else:
        engine.follow()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_lost_in_a_forward_pass_is_a_named_error_on_the_others(tmp_path: Path, how: str) -> None:
    folder = tiny.model_folder(tmp_path, "llama")
    *others, lost = run_outcomes(lost_case, 3, (folder, how), timeout_s=120.0)
    assert lost.status == how
    for outcome in others:
        assert outcome.raised(GroupTimeout) or outcome.raised(PeerLost), outcome.describe()
