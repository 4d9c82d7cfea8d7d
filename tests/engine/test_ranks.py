"""The engine on one to four ranks: page tables, admissions and tokens are equal on every rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from distkv.engine.requests import Prompt
from distkv.testing.processes import run_ranks
from tests.engine import tiny

REQUESTS = 14


def prompts() -> list[Prompt]:
    """Requests that share prefixes of 3 pages, more than the pool can run at once; some sampled, one without a seed."""
    stems = [tiny.tokens(3 * tiny.PAGE, seed) for seed in (1, 2)]
    return [
        Prompt(
            tokens=np.concatenate([stems[i % 2], tiny.tokens(5 + 3 * i, 10 + i)]), id=f"r{i}", output_limit=5,
            temperature=(i % 4) / 2, top_p=1.0 if i % 3 else 0.9, seed=i if i != 3 else None,
        )
        for i in range(REQUESTS)
    ]  # fmt: skip


def case(rank: int, world_size: int, folder: Path, sp: int = 1) -> dict[str, Any]:
    """All requests at once and then all again, half of them aborted on the way."""
    made = tiny.engine(tiny.config(folder, tp=world_size // sp, sp=sp, pages=24, batch_tokens=48))
    calls: Counter[str] = Counter()
    honest = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls["all_reduce"] += 1
        return honest(*args, **kwargs)

    dist.all_reduce = counting
    tables, ended, needed = [], {}, 0
    for turn in range(2):
        if rank == 0:
            for prompt in prompts():
                made.submit(prompt)
        for step in range(400):
            if rank == 0 and turn == 1 and step == 3:
                for i in range(0, REQUESTS, 2):
                    made.abort(f"r{i}")
            waited = made.cache.stats().collectives
            ended |= {f"{turn}/{c.id}": (c.token_ids, c.cached_tokens, c.finish_reason) for c in made.step()}
            needed += made.cache.stats().collectives - waited
            tables.append({name: s.page_indices.tolist() for name, s in made.cache.running.items()})
            if len(ended) == (turn + 1) * REQUESTS:
                break
    dist.all_reduce = honest
    made.cache.check()
    stats = made.cache.stats()
    return {"tables": tables, "ended": ended, "needed": needed, "calls": calls["all_reduce"], "steps": stats.steps,
            "left": stats.pages_live + stats.pages_reserved, "evicted": stats.evicted}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("ranks"), "llama")


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_every_rank_runs_the_same(folder: Path, tp: int) -> None:
    results = run_ranks(case, tp, (folder,), timeout_s=240.0)
    for result in results:
        assert result == results[0]
    seen = results[0]
    assert len(seen["ended"]) == 2 * REQUESTS
    assert {"length", "aborted"} <= {reason for _, _, reason in seen["ended"].values()}
    assert sum(cached > 0 for _, cached, _ in seen["ended"].values()) > REQUESTS
    assert seen["evicted"] > 0
    assert seen["left"] == 0
    # The model's sums and the hand-off use other calls over gloo: every all_reduce is a ballot.
    assert seen["calls"] == seen["needed"] < seen["steps"]
