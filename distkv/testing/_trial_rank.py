"""What one rank of a trial does: an engine that answers requests until the planted fault ends it.

``time.monotonic()`` is one clock for all processes of a host (Linux), so times of several ranks can be compared.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch.distributed as dist

from distkv._parent import die_with
from distkv.config import CacheConfig, GroupConfig, PoolConfig
from distkv.engine.config import EngineConfig, ModelConfig, ParallelConfig, ServeConfig
from distkv.engine.engine import Engine
from distkv.engine.launch import make_groups
from distkv.engine.model import load_model
from distkv.engine.requests import Prompt
from distkv.errors import GroupError
from distkv.request import Message
from distkv.sequence import Sequence

__all__ = ["HARMLESS", "LAYERS", "OTHERS_ENDED", "VOCAB", "Kind", "Planted", "Report", "Trial", "main"]

Kind = Literal["kill", "stop", "forward", "commit", "begin", "pause", "gil"]
Place = Literal["layer", "commit", "between", "begin"]

HARMLESS: frozenset[Kind] = frozenset({"pause", "gil"})
"""A rank that is slow, for half of the deadline: stopped and continued, or with Python's lock held. No fault."""

VOCAB = 128
LAYERS = 2
_JOIN_S = 120.0
_STEPS_AFTER = 20  # of a pause, which is no fault
_PAGE = 16
_OUTLIVE_S = 30.0
OTHERS_ENDED = "others ended"
"""A file in a trial's folder, for the rank that failed: the processes of the others have ended, or had their time."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One planted fault: of which kind, on which rank, in which step of its engine, at which place of the step."""

    kind: Kind
    ranks: int
    victim: int
    step: int
    place: Place
    layer: int
    seed: int
    timeout_s: float
    store_on_rank_0: bool
    """Whether rank 0 keeps the group's store, as without torchrun; else the process that starts the ranks."""
    overlap: bool = False


class Planted(Exception):
    """The exception of a trial."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a rank ended; ``error`` is empty if it was shut down. ``failed_rank``: whom its error names; ``threads``: of
    ours, left when the group was closed."""

    rank: int
    error: str
    text: str
    named: bool
    """Whether the error is one of the group's."""
    failed_rank: int | None
    at: float
    threads: list[str]


def main(rank: int, trial: Trial, folder: Path, port: int) -> None:
    """Joins, answers requests until the fault, leaves ``<rank>.json``, a :class:`Report`, and ends as programs end.

    Does not return: multiprocessing would end the process with os._exit, and what waits in it for other ranks unseen.
    """
    die_with(os.getppid())
    _answer(rank, trial, folder, port)  # in a frame of its own, so that nothing holds on to its groups
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(0)  # what sys.exit comes to: atexit, the modules and C's destructors


def _answer(rank: int, trial: Trial, folder: Path, port: int) -> None:
    os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT), 2)  # torch's warnings, and tracebacks
    store = dist.TCPStore("127.0.0.1", port, is_master=trial.store_on_rank_0 and rank == 0, wait_for_workers=False,
                          timeout=timedelta(seconds=_JOIN_S))  # fmt: skip
    dist.init_process_group("gloo", store=store, rank=rank, world_size=trial.ranks, timeout=timedelta(seconds=_JOIN_S))
    groups = make_groups(trial.ranks, trial.timeout_s)
    error: BaseException | None = None
    try:
        _serve(rank, trial, folder, groups)
    except Exception as raised:  # noqa: BLE001  (whatever it is, it is what the trial looks at)
        error = raised
    at = time.monotonic()
    groups[2].close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("distkv-beat", "distkv-watch"))]
    report = Report(
        rank=rank, error=type(error).__name__ if error is not None else "", text=str(error or ""),
        named=isinstance(error, GroupError), failed_rank=getattr(error, "failed_rank", None), at=at, threads=left,
    )  # fmt: skip
    (folder / f"{rank}.json").write_text(json.dumps(asdict(report)))
    if rank == trial.victim and trial.kind not in HARMLESS:  # it lives on: the others have to end without its end
        end = at + trial.timeout_s + _OUTLIVE_S
        while not (folder / OTHERS_ENDED).exists() and time.monotonic() < end:
            time.sleep(0.02)


def _serve(rank: int, trial: Trial, folder: Path, groups: tuple[Any, Any, Any]) -> None:
    settings = ServeConfig(
        cache=CacheConfig(page_size=_PAGE, heartbeat=1),  # so that a fault may leave a ballot
        pool=PoolConfig(pages=128),
        group=GroupConfig(timeout_s=trial.timeout_s),
        model=ModelConfig(source=str(folder.parent / "model")),
        parallel=ParallelConfig(tp=trial.ranks),
        engine=EngineConfig(output_limit=6, batch_tokens=64, overlap=trial.overlap),
    )
    group, handoff_group, cache_group = groups
    engine = Engine(settings, load_model(settings.model, group, timeout_s=trial.timeout_s), cache_group=cache_group,
                    handoff_group=handoff_group)  # fmt: skip
    dist.barrier(group=handoff_group)  # from here on the deadlines count
    if rank == trial.victim:
        _plant(engine, trial, folder)
    random = np.random.default_rng(trial.seed)
    asked = 0
    while not engine.closed:
        while rank == 0 and asked < 2 * engine.steps + 2:
            engine.submit(Prompt(tokens=random.integers(3, VOCAB, int(random.integers(4, 50))).astype(np.int32)))
            asked += 1
        if rank == trial.victim and trial.place == "between" and engine.steps == trial.step:
            _strike(trial, folder)
        if rank == 0 and trial.kind in HARMLESS and engine.steps > trial.step + _STEPS_AFTER:
            engine.shutdown()
            return
        engine.step()


def _plant(engine: Engine, trial: Trial, folder: Path) -> None:
    if trial.place == "layer":

        def in_layer(*_: object) -> None:
            if engine.steps == trial.step:
                _strike(trial, folder)

        engine.model.module.model.layers[trial.layer].register_forward_pre_hook(in_layer)
    elif trial.place == "commit":
        commit = Sequence.commit

        def in_commit(self: Sequence, n: int) -> None:
            if engine.steps == trial.step:
                _strike(trial, folder)
            commit(self, n)

        Sequence.commit = in_commit  # type: ignore[method-assign]
    elif trial.place == "begin":  # all others wait in a ballot that lacks this rank alone
        begin = engine.cache.begin_step

        def in_begin(message: Message) -> None:
            if engine.steps == trial.step:
                _strike(trial, folder)
            begin(message)

        engine.cache.begin_step = in_begin  # type: ignore[method-assign, assignment]


def _strike(trial: Trial, folder: Path) -> None:
    if trial.kind in HARMLESS and (folder / "struck").exists():
        return  # a place may be passed more than once in a step, and goes on after this
    (folder / "struck").write_text(repr(time.monotonic()))
    if trial.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif trial.kind in ("stop", "pause"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif trial.kind == "gil":
        ctypes.PyDLL(None).usleep(int(trial.timeout_s / 2 * 1e6))  # PyDLL does not let go of the lock
    else:
        raise Planted(f"planted in {trial.place}")
