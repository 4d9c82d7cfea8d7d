"""The host tier behind a real engine on three ranks: cold, warm, reloaded and resumed give the same bits, also where a
copy fails or a tier differs on one rank. One start of ranks for all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distkv.config import HostConfig
from distkv.engine.compare import compare
from distkv.engine.config import ServeConfig
from distkv.engine.engine import Engine
from distkv.engine.model import Model, load_model
from distkv.engine.page_check import check_cache
from distkv.engine.record import Recording
from distkv.engine.requests import Completion, Prompt
from distkv.engine.verification import expected_of
from distkv.errors import HostMemoryError
from distkv.host import open as opening
from distkv.host.copies import Copy, Kind
from distkv.host.memory import Pageable
from distkv.host.threads import ThreadedCopies
from distkv.testing.processes import run_ranks
from distkv.torch_group import TorchGroup
from tests.engine import tiny

RANKS = 3
POOL = 8
"""Pages: the longest request has 7, and the two stems and what follows them have more than twice as many."""

STEMS = [tiny.tokens(3 * tiny.PAGE + 5, seed) for seed in (1, 2)]
PROMPTS = [
    Prompt(tokens=np.concatenate([STEMS[i % 2], tiny.tokens(20 + 11 * i, 10 + i)]), id=f"{i}", output_limit=4 + i,
           temperature=0.7 * (i % 2), seed=i)
    for i in range(3)
]  # fmt: skip
AGAIN = [replace(prompt, id=f"{prompt.id} again") for prompt in PROMPTS]


@dataclass
class Run:
    """What one engine did on one rank."""

    tokens: dict[str, tuple[int, ...]]
    cached: dict[str, int]
    """Tokens from the cache, of each request's last admission."""
    host_tokens: int
    suspended: int
    short: int
    failures: int
    differences: tuple[str, ...]
    """Against the cold run."""
    compared: int
    """Rows of logits and pages."""
    host_pages: int
    """Compared with what was computed again."""
    left: int


class FailsOnce(ThreadedCopies):
    """The third load of the engine fails half-way."""

    loads = 0

    def _move(self, copy: Copy) -> None:
        if copy.kind is Kind.LOAD:
            type(self).loads += 1
            if type(self).loads == 3:
                raise OSError("planted")
        super()._move(copy)


def settings_of(folder: Path, dtype: str, *, pages: int = POOL, host: HostConfig | None = None,
                **engine: Any) -> ServeConfig:  # fmt: skip
    settings = tiny.config(folder, tp=RANKS, pages=pages, dtype=dtype, batch_invariant=True, **engine)
    return replace(settings, host=host or HostConfig())


def host(pages: int | None = 40, **fields: Any) -> HostConfig:
    """Without what depends on measured speeds, so that pages come back in every run."""
    return HostConfig(**{"pages": pages, "skip_slow_loads": False, **fields})


def one_by_one(engine: Engine, prompts: list[Prompt]) -> list[Completion]:
    return [engine.generate([prompt])[0] for prompt in prompts]


def suspended(engine: Engine, prompts: list[Prompt]) -> list[Completion]:
    """All at once, and some are suspended by hand as well, in the middle of a prompt or of an answer."""
    for prompt in prompts:
        engine.submit(prompt)
    done, step = {}, 0
    while engine.busy:
        step += 1
        running = list(engine.cache.running)
        if running and step < 40 and step % 4 == 3:
            engine.suspend(running[step % len(running)])
        done |= {c.id: c for c in engine.step()}
    return [done[str(prompt.id)] for prompt in prompts]


def serve(
    model: Model, settings: ServeConfig, prompts: list[Prompt], cold: Recording | None = None,
    answer: Callable[[Engine, list[Prompt]], list[Completion]] = one_by_one,
) -> tuple[Run, Recording]:  # fmt: skip
    ballots = TorchGroup(dist.new_group())
    handoff = dist.new_group() if settings.cache.asynchronous else None
    engine = Engine(settings, model, cache_group=ballots, handoff_group=handoff)
    recording = engine.recording = Recording(engine.pool)
    done: list[Completion] = []
    if model.rank:
        engine.follow()
    else:
        done = answer(engine, prompts)
        engine.shutdown()
    stats, again = engine.cache.stats(), check_cache(model, engine.cache, engine.pool)
    engine.cache.check()
    report = None
    if cold is not None:
        report = compare(recording, {
            part: expected_of(recording.requests[part], cold.requests[str(prompt.id)[0]])
            for prompt in prompts for part in recording.parts(str(prompt.id))
        }, rank=model.rank)  # fmt: skip
    run = Run(
        tokens={c.id: c.token_ids for c in done},
        cached={str(p.id): recording.requests[recording.parts(str(p.id))[-1]].cached_tokens for p in prompts},
        host_tokens=stats.host_tokens, suspended=stats.suspended, short=stats.short_read_ins,
        failures=stats.load_failures,
        differences=(*(report.differences if report else ()), *(d.difference.text() for d in again.differences)),
        compared=report.rows + report.pages if report else 0, host_pages=again.host_pages,
        left=stats.pages_live + stats.pages_reserved + stats.host_kept,
    )  # fmt: skip
    engine.close()
    ballots.exchange(b"")
    ballots.close()
    return run, recording


def no_memory_on_one_rank(rank: int, settings: ServeConfig) -> None:
    """All are told, and none waits for it in the self-test that comes next."""
    model, ballots = load_model(settings.model, dist.group.WORLD), TorchGroup(dist.new_group())
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Pageable, "allocate", lambda *_: torch.empty(-1))
        with pytest.raises(HostMemoryError, match="asked for" if rank == 1 else "rank 1 has no host tier.*asked for"):
            Engine(settings, model, cache_group=ballots)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("distkv-copy")]
    ballots.exchange(b"")
    ballots.close()


def ranks_case(rank: int, world_size: int, folder: Path) -> dict[str, Run]:
    torch.set_num_threads(1)
    runs: dict[str, Run] = {}
    no_memory_on_one_rank(rank, settings_of(folder, "float32", host=host()))
    for dtype in ("float32", "bfloat16"):
        model = load_model(settings_of(folder, dtype).model, dist.group.WORLD)

        def case(name: str, settings: ServeConfig, *more: Any, model: Model = model, dtype: str = dtype) -> Recording:
            runs[f"{name}, {dtype}"], recording = serve(model, settings, *more)
            return recording

        cold = case("cold", settings_of(folder, dtype, pages=64, cache="off"), PROMPTS)
        both = [*PROMPTS, *AGAIN]
        case("warm", settings_of(folder, dtype, pages=64), both, cold)
        case("reloaded", settings_of(folder, dtype, host=host()), both, cold)
        case("resumed", settings_of(folder, dtype, host=host(preemption_pages=20), reserve_tokens=3), both, cold,
             suspended)
        if dtype == "bfloat16":  # the rules are the same
            continue
        case("written ahead", settings_of(folder, dtype, host=host(write_policy="finish")), both, cold)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(opening, "ThreadedCopies", FailsOnce)
            case("failing", settings_of(folder, dtype, host=host()), both, cold)
        pressed = settings_of(folder, dtype, host=host(preemption_pages=20), reserve_tokens=3)
        case("overlapped", replace(pressed, engine=replace(pressed.engine, overlap=True)), both, cold, suspended)
        case("run ahead", replace(pressed, cache=replace(pressed.cache, asynchronous=True)), both, cold, suspended)
        case("smaller", settings_of(folder, dtype, host=host(4 if rank == 2 else 40)), both, cold)
        case("without", settings_of(folder, dtype, host=host(None if rank == 2 else 40)), both, cold)
    return runs


@pytest.fixture(scope="module")
def runs(folders: Callable[[str, int], Path]) -> list[dict[str, Run]]:
    return run_ranks(ranks_case, RANKS, (folders("llama", 3),), timeout_s=300.0)


WARM = [f"{name}, {dtype}" for dtype in ("float32", "bfloat16") for name in ("warm", "reloaded", "resumed")]
ODD = [f"{name}, float32" for name in ("written ahead", "failing", "overlapped", "run ahead", "smaller", "without")]


@pytest.mark.parametrize("name", [*WARM, *ODD])
def test_every_way_gives_the_bits_of_the_cold_run(runs: list[dict[str, Run]], name: str) -> None:
    """Logits and KV memory of every request and of its parts, the tokens, and what lies on the host at the end."""
    cold = runs[0][name.replace(name.split(",")[0], "cold")]
    for rank, of_rank in enumerate(runs):
        run = of_rank[name]
        assert run.differences == (), rank
        assert run.compared > 50
        assert run.left == 0 or name.startswith("run ahead"), "what was launched ahead of an end has not landed"
        assert run.cached == runs[0][name].cached, "admission is the same on all ranks"
    assert {key[0] for key in runs[0][name].tokens} == set(cold.tokens)
    assert all(tokens == cold.tokens[key[0]] for key, tokens in runs[0][name].tokens.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_were_really_reloaded_and_requests_resumed(runs: list[dict[str, Run]], dtype: str) -> None:
    for of_rank in runs:
        assert of_rank[f"warm, {dtype}"].host_tokens == of_rank[f"warm, {dtype}"].suspended == 0
        reloaded, resumed = of_rank[f"reloaded, {dtype}"], of_rank[f"resumed, {dtype}"]
        assert reloaded.host_tokens >= 5 * tiny.PAGE
        assert reloaded.cached == of_rank[f"warm, {dtype}"].cached, "what went to the host is all still there"
        assert resumed.host_tokens > 0
        assert resumed.suspended >= 4
        assert all(of_rank[f"{order}, float32"].suspended >= 4 for order in ("overlapped", "run ahead"))
        assert reloaded.host_pages > 0


def test_a_load_that_fails_on_one_rank_is_made_up_for_on_all(runs: list[dict[str, Run]]) -> None:
    name = "failing, float32"
    assert [of_rank[name].failures for of_rank in runs] == [0, 1, 0]
    assert [of_rank[name].short for of_rank in runs] == [1, 1, 1]
    whole, short = runs[0]["reloaded, float32"].cached, runs[0][name].cached
    lost = {key: whole[key] - short[key] for key in whole if whole[key] != short[key]}
    assert len(lost) == 1, "one request computed again what it did not get, from the same page on all ranks"
    assert all(0 < tokens <= whole[key] and tokens % tiny.PAGE == 0 for key, tokens in lost.items())


def test_tiers_of_other_sizes(runs: list[dict[str, Run]]) -> None:
    """The smallest decides what comes back; without one on a rank nothing does."""
    for of_rank in runs:
        reloaded = of_rank["reloaded, float32"].host_tokens
        assert 0 < of_rank["smaller, float32"].host_tokens < reloaded
        assert of_rank["without, float32"].host_tokens == 0
        assert of_rank["written ahead, float32"].host_tokens >= 5 * tiny.PAGE
