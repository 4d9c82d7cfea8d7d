"""What the ranks of tests/test_mpi.py do, started by mpirun: every case in one start. Results go to a file per rank."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from distkv import ConfigError, GroupConfig, GroupError, MpiGroup, TorchGroup
from distkv.bench.group_rank import measure_group
from distkv.engine import mpi_launch
from distkv.engine.engine import Engine
from distkv.engine.launch import Ranks, launched
from distkv.engine.model import load_model
from distkv.engine.requests import Prompt
from distkv.faults import Fault
from distkv.layout import Layout
from multigpu_tests import cases
from tests.engine import tiny


def both(ranks: Ranks) -> dict[str, Any]:
    """The same calls over gloo and over MPI."""
    found: dict[str, Any] = {}
    for name in ("gloo", "mpi"):
        for uneven in (False, True):
            group = ranks.cache_group if name == "mpi" else TorchGroup(ranks.handoff_group, timeout_s=20.0)
            found[f"{name}, {uneven}"] = cases.decisions(ranks.rank, ranks.size, cases.STEPS, uneven, group)
        group = ranks.cache_group if name == "mpi" else TorchGroup(ranks.handoff_group, timeout_s=20.0)
        found[f"{name}, failing"] = cases.failing_begin(ranks.rank, ranks.size, 1, group)
    return found


def late(ranks: Ranks) -> str:
    """Rank 1 enters the ballot when rank 0 has given it up; the collective is finished then, so that MPI can end."""
    world = MpiGroup(timeout_s=60.0)
    group = MpiGroup(mpi_launch.mpi().COMM_WORLD.Dup(), timeout_s=0.3)
    text, began = "", time.monotonic()
    vector = mpi_vector(ranks.rank)
    if ranks.rank == 0:
        try:
            group.start(vector, 7).wait()
        except GroupError as error:
            text = f"{type(error).__name__} after {time.monotonic() - began > 0.3}: {error}"
    world.exchange(b"")
    if ranks.rank == 1:
        text = str(group.start(vector, 7).wait().tolist())
    world.exchange(b"")
    return text


def faulty(ranks: Ranks) -> str:
    """Rank 1 fails outside the ballot while rank 0 waits in it; the watchdog tells."""
    world = MpiGroup(timeout_s=60.0)
    group = mpi_launch.cache_group(0, ranks.size, 60.0, ranks.handoff_group)
    group.configure(GroupConfig(heartbeat_s=0.05, transport="mpi"))
    assert group.exchange(bytes([ranks.rank]) * (1 + 5 * ranks.rank)) == [b"\0", b"\1" * 6]
    text = ""
    if ranks.rank == 0:
        try:
            group.start(mpi_vector(0), 3).wait()
        except GroupError as error:
            text = f"{type(error).__name__}: {error}"
    else:
        group.report(Fault.of(ValueError("no luck"), "forward", rank=1, step=3))
    world.exchange(b"")
    if ranks.rank == 1:
        group.start(mpi_vector(1), 3)
    world.exchange(b"")
    group.close()
    return text


def refused() -> str:
    group = MpiGroup(timeout_s=5.0)
    group.configure(GroupConfig(transport="auto"))
    try:
        group.configure(GroupConfig(transport="gloo"))
    except ConfigError as error:
        return str(error)
    return "taken"


def unmet(layout: Layout) -> dict[str, str]:
    """What all ranks raise if rank 0 cannot listen, and if MASTER_ADDR leads elsewhere, as it matters on two hosts."""
    on_two_hosts = patch.object(mpi_launch, "ranks_on_host", lambda size: 1)
    no_port = patch.object(dist, "TCPStore", side_effect=dist.DistNetworkError("no port is free"))
    found = {}
    for name, wrong in (("listen", no_port), ("address", on_two_hosts)):
        try:
            with wrong:
                mpi_launch.meet(layout.rank, layout.world_size, 60.0)
        except ConfigError as error:
            found[name] = str(error)
    return found


def served(ranks: Ranks, folder: Path) -> list[Any]:
    """The reference engine on a random model, the cache's collective over MPI: one prompt twice."""
    settings = tiny.config(folder, tp=ranks.size)
    group = mpi_launch.cache_group(0, ranks.size, 60.0, ranks.handoff_group)
    engine = Engine(settings, load_model(settings.model, ranks.mesh), cache_group=group,
                    handoff_group=ranks.handoff_group)  # fmt: skip
    answers = []
    if ranks.rank == 0:
        for _ in range(2):
            answers.append(engine.generate([Prompt(tokens=tiny.tokens(40, 1))])[0].token_ids)
        engine.shutdown()
    else:
        engine.follow()
    engine.close()
    return [engine.cache.stats().cached_tokens, engine.cache.stats().collectives > 0, answers]


def mpi_vector(rank: int) -> Any:
    return np.array([rank + 5, 9 - rank], np.int64)


def main() -> None:
    layout = Layout.from_environment()
    not_met = unmet(layout)
    with launched(layout, 2, 60.0, device="cpu", transport="mpi") as ranks:
        assert isinstance(ranks.cache_group, MpiGroup)
        found = {"layout": vars(layout), **both(ranks), "late": late(ranks), "faulty": faulty(ranks),
                 "refused": refused(), "served": served(ranks, Path(sys.argv[1], "model")),
                 "unmet": not_met, "sum": int(sum_of(ranks)),
                 "bench": measure_group(MpiGroup(timeout_s=60.0), [7, 300], 5)}
        Path(sys.argv[1], f"{ranks.rank}.json").write_text(json.dumps(found))


def sum_of(ranks: Ranks) -> Any:
    tensor = torch.tensor([ranks.rank + 1])
    dist.all_reduce(tensor, group=ranks.mesh.group)
    return tensor


if __name__ == "__main__":
    main()
