"""Groups of our own launch, and groups that somebody else made and keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distkv._text import counted
from distkv.engine.engine import Engine
from distkv.engine.launch import Ranks, StartFailed, choose_device, launched, make_groups, on_all_ranks
from distkv.engine.model import load_model
from distkv.engine.requests import Prompt
from distkv.errors import ConfigError, GroupTimeout, ModelError
from distkv.layout import Layout
from distkv.testing.processes import run_ranks
from tests.engine import tiny

GENEROUS = 240.0


def two_replicas_case(rank: int, world_size: int, folder: Path) -> tuple[list[int], list[tuple[int, ...]]]:
    """Four ranks of a program that is not ours: two engines over two ranks each, on its own default group."""
    group, handoff_group, cache_group = make_groups(2, 30.0)
    settings = tiny.config(folder, tp=2)
    engine = Engine(settings, load_model(settings.model, group), cache_group=cache_group,
                    handoff_group=handoff_group)
    answers = []
    if group.rank == 0:
        for seed in (1, 1):
            prompt = Prompt(tokens=tiny.tokens(40 + rank, seed))
            answers.append(engine.generate([prompt])[0].token_ids)
        engine.shutdown()
    else:
        engine.follow()
    engine.close()
    everyone = torch.tensor([rank])
    dist.all_reduce(everyone)
    return [engine.cache.stats().cached_tokens, int(everyone)], answers


def test_engines_on_sub_groups_leave_the_world_as_it_was(folders: Callable[[str, int], Path]) -> None:
    results = run_ranks(two_replicas_case, 4, (folders("llama", 4),), timeout_s=GENEROUS)
    assert [numbers for numbers, _ in results] == [[32, 6]] * 4
    assert results[0][1][0] == results[0][1][1]
    assert results[2][1][0] == results[2][1][1]


def owner_case(rank: int, world_size: int, theirs: bool) -> tuple[bool, list[str | None]]:
    if theirs:
        dist.init_process_group("gloo")
    with launched(Layout.from_environment(), world_size, 30.0) as ranks:
        assert (ranks.rank, ranks.size) == (rank, world_size)
        assert ranks.cache_group is not None
        assert len(ranks.cache_group.exchange(b"x")) == world_size
        errors = failing_start(ranks)
    return dist.is_initialized(), errors


def failing_start(ranks: Ranks) -> list[str | None]:
    def make() -> int:
        if ranks.rank:
            raise ModelError("none here")
        return 7

    assert on_all_ranks(ranks, 30.0, lambda: 5) == 5
    with pytest.raises(StartFailed) as caught:
        on_all_ranks(ranks, 30.0, make)
    return caught.value.errors


@pytest.mark.parametrize("theirs", [False, True])
def test_only_a_group_of_our_own_is_destroyed_and_a_start_that_fails_on_one_rank_fails_on_all(theirs: bool) -> None:
    wanted = (theirs, [None, "none here"])
    assert run_ranks(owner_case, 2, (theirs,), backend=None, timeout_s=GENEROUS) == [wanted] * 2


def absent_case(rank: int, world_size: int) -> str:
    if rank:
        return "never joined"
    with pytest.raises(GroupTimeout, match="the meeting of the ranks did not end within 1 s"), \
            launched(Layout.from_environment(), world_size, 1.0, start_s=1.0):
        pass
    return "gave up"


def test_a_rank_that_does_not_join_is_an_error_within_the_deadline() -> None:
    assert run_ranks(absent_case, 2, backend=None, timeout_s=GENEROUS) == ["gave up", "never joined"]


def test_counted() -> None:
    assert [counted(1, "page"), counted(2, "page")] == ["1 page", "2 pages"]
    assert counted(0, "batch", "batches") == "0 batches"


def test_a_device_that_is_not_there_is_named() -> None:
    assert choose_device("cpu", 0, 8).type == "cpu"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert choose_device("auto", 0, gpus + 1).type == "cpu", "not a GPU for each rank: all on the CPU"
    with pytest.raises(ConfigError, match=r"model.device: is cuda, but this host has \d+ GPU"):
        choose_device("cuda", gpus, gpus + 1)
    if not gpus:
        with pytest.raises(ConfigError, match=r"group.transport: is nccl, which needs a GPU"):
            launched(Layout(), 1, 30.0, transport="nccl").__enter__()


def test_one_rank_needs_no_group_and_a_wrong_number_is_named() -> None:
    with launched(Layout(), 1, 30.0) as ranks:
        assert ranks.mesh.group is None
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match=r"is 3, but 1 process was started"), launched(Layout(), 3, 30.0):
        pass
