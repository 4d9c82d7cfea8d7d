"""Instances of tp x sp ranks: the tokens of one rank, the bits of the cold run in every way, and errors with names."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distkv.engine.attention import Batch
from distkv.engine.config import ServeConfig
from distkv.engine.engine import Engine
from distkv.engine.invariant_case import Case, Piece, differences, random_case
from distkv.engine.launch import launched, make_groups
from distkv.engine.mesh import Mesh
from distkv.engine.model import Model, load_model
from distkv.engine.requests import Prompt
from distkv.engine.tensor_parallel import allowed_meshes, check_mesh
from distkv.engine.ulysses import Ulysses
from distkv.errors import ConfigError, GroupError, ModelError
from distkv.layout import Layout
from distkv.testing.processes import run_outcomes, run_ranks
from distkv.torch_group import TorchGroup
from tests.engine import test_ranks, test_tier, tiny

GENEROUS = 240.0
DEADLINE = 4.0

PROMPTS = [replace(prompt, temperature=0.0) for prompt in test_tier.PROMPTS]
BOTH = [*PROMPTS, *(replace(prompt, id=f"{prompt.id} again") for prompt in PROMPTS)]

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 12}, "qwen3": {"kv_heads": 4}, "nine": {"kind": "llama", "heads": 9, "kv_heads": 3},
}  # fmt: skip
MESHES = {(1, 2): "qwen3", (2, 1): "llama", (2, 2): "llama", (1, 3): "nine", (3, 1): "nine"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("parallel")
    return {name: tiny.model_folder(folder / name, **{"kind": name, **shape}) for name, shape in MODELS.items()}


@dataclass
class Passes:
    """What four passes did: a prompt with logits, one without, a decode step of two requests, a mixed batch."""

    exchanges: list[int]
    """All-to-alls of each."""
    strange: int
    """Slots that were written and that are not those of the batches."""
    logits: torch.Tensor
    kv: torch.Tensor
    """This rank's heads of three pages: [layers, 2, 3, page, heads, d]."""


@dataclass
class Seen:
    """What one rank saw of one mesh."""

    runs: dict[str, test_tier.Run]
    recorded: dict[str, Any]
    """Of the warm run: for each request what came from the cache, its page table, and its logits."""
    served: dict[str, Any]
    """See test_ranks."""
    fuzzed: list[str]
    passes: Passes


def mesh_case(rank: int, world_size: int, folder: Path, sp: int) -> Seen:
    torch.set_num_threads(1)
    mesh = Mesh.of(None, world_size // sp, sp)
    settings = tiny.config(folder, tp=mesh.tp, sp=sp, batch_invariant=True)
    model = load_model(settings.model, mesh)
    in_passes = passes(model)
    runs: dict[str, test_tier.Run] = {}
    runs["cold"], cold = test_tier.serve(model, engine_of(settings, cache="off"), PROMPTS)
    runs["warm"], warm = test_tier.serve(model, settings, BOTH, cold)
    if sp > 1:
        tier = replace(settings, pool=replace(settings.pool, pages=test_tier.POOL), host=test_tier.host())
        runs["reloaded"], _ = test_tier.serve(model, tier, BOTH, cold)
        pressed = replace(tier, host=test_tier.host(preemption_pages=20),
                          engine=replace(settings.engine, reserve_tokens=3, overlap=mesh.tp == 1))
        if world_size == 3:  # in which a batch runs beside the next hand-off and the next ballot
            pressed = replace(pressed, cache=replace(pressed.cache, asynchronous=True))
        runs["resumed"], _ = test_tier.serve(model, pressed, BOTH, cold, test_tier.suspended)
    recorded = {name: (r.cached_tokens, r.page_ids.tolist(), r.logits) for name, r in warm.requests.items()}
    fuzz = [odd_lengths(),
            random_case(np.random.default_rng(3), vocab=tiny.VOCAB, page_size=tiny.PAGE, longest=90)]  # fmt: skip
    fuzzed = [text for each in fuzz for text in differences(model, each)] if sp > 1 else []
    return Seen(runs, recorded, test_ranks.case(rank, world_size, folder, sp), fuzzed, in_passes)


def engine_of(settings: ServeConfig, **engine: Any) -> ServeConfig:
    return replace(settings, engine=replace(settings.engine, **engine))


def odd_lengths() -> Case:
    """Prompts and batches of fewer rows than ranks, and of one row; requests at once in a prompt and in an answer."""
    lengths = [1, 2, 5, 7]
    pieces = [
        [(0, 0, 1)], [(1, 0, 2)], [(2, 0, 1), (3, 0, 1)], [(2, 1, 2)], [(3, 1, 3), (2, 3, 1)], [(2, 4, 1), (3, 4, 1)],
        [(3, 5, 2)],
    ]  # fmt: skip
    batches = [[Piece(who, start, n, tuple(range(start, start + n))) for who, start, n in batch] for batch in pieces]
    return Case([tiny.tokens(n, 20 + n) for n in lengths], [(0, 0)] * 4, batches, tiny.PAGE)


def passes(model: Model) -> Passes:
    pool, pages = model.pool(8, tiny.PAGE), np.array([6, 1, 3])
    pool.data.fill_(float("nan"))
    honest, calls, found, logits = dist.all_to_all_single, [0], [], []
    used = np.zeros(8 * tiny.PAGE, bool)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return honest(*args, **kwargs)

    batches = [([(0, 13)], [12, 3, 3, 7]), ([(13, 7)], []), ([(20, 1), (21, 1)], [0]), ([(22, 1), (23, 2)], [2])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        for spans, keep in batches:
            rows = []
            for start, n in spans:  # one sequence, as if it were two
                at = np.arange(start, start + n)
                slots = pages[at // tiny.PAGE] * tiny.PAGE + at % tiny.PAGE
                used[slots] = True
                rows.append((tiny.tokens(n, start), start, slots, pages))
            calls[0] = 0
            logits.append(model.forward(Batch.build(pool, rows, model.dtype), keep))
            assert tuple(logits[-1].shape) == (len(keep), tiny.VOCAB)
            found.append(calls[0])
    written = ~pool.data.isnan().flatten(2, 3).all(dim=(0, 1, 3, 4)).flatten()
    strange = int((written.numpy() != used).sum())
    return Passes(found, strange, torch.cat(logits), pool.data[:, :, torch.from_numpy(pages)])


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_a_mesh_gives_the_tokens_of_one_rank_and_the_bits_of_the_cold_run(
    models: dict[str, Path], mesh: tuple[int, int]
) -> None:
    folder, (tp, sp) = models[MESHES[mesh]], mesh
    seen: list[Seen] = run_ranks(mesh_case, tp * sp, (folder, sp), timeout_s=GENEROUS)
    alone = tiny.engine(tiny.config(folder))
    wanted = {str(prompt.id): done.token_ids for prompt in PROMPTS for done in alone.generate([prompt])}
    for rank, of_rank in enumerate(seen):
        assert of_rank.recorded == seen[0].recorded, "logits, page tables and agreed lengths are those of rank 0"
        assert of_rank.served == seen[0].served
        for name, run in of_rank.runs.items():
            assert run.differences == (), (name, rank)
            assert run.cached == seen[0].runs[name].cached, name
            assert run.compared > 50 or name == "cold"
        assert of_rank.fuzzed == []
        # of two layers; the outcome of a prompt's layers lies with other ranks than the output layer needs it on
        assert of_rank.passes.exchanges == ([2 * 2 + 1, 2 * 2, 2, 2 * 2 + 1] if sp > 1 else [0] * 4)
        assert of_rank.passes.strange == 0, "fillers have no page"
        assert torch.equal(of_rank.passes.logits, seen[0].passes.logits)
    one = passes(load_model(tiny.config(folder).model))
    heads = torch.cat([of_rank.passes.kv for of_rank in seen], dim=4)
    for found, whole in ((seen[0].passes.logits, one.logits), (heads, one.kv)):
        torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4, equal_nan=True)
    for name, run in seen[0].runs.items():
        assert {key: tokens for key, tokens in run.tokens.items() if key[0] in wanted} == {
            key: wanted[key[0]] for key in run.tokens
        }, name
    assert all(seen[0].runs["warm"].cached[f"{prompt.id} again"] for prompt in PROMPTS)
    if sp > 1:
        assert seen[0].runs["reloaded"].host_tokens > 0
        assert seen[0].runs["resumed"].suspended >= 4
    # one all_reduce for each ballot, and none of the model's: see test_ranks
    assert seen[0].served["calls"] == seen[0].served["needed"] < seen[0].served["steps"]
    assert seen[0].served["left"] == 0


# ---- meshes, and instances beside each other


def test_the_meshes_that_a_model_allows(models: dict[str, Path]) -> None:
    from transformers import AutoConfig, GPT2Config

    settings = AutoConfig.from_pretrained(models["qwen3"])
    assert allowed_meshes(settings) == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    with pytest.raises(ModelError, match=r"^parallel\.tp 2 x sp 4 does not divide this model \(12 heads, 4 KV heads, "
                                         r"MLP width 192\); allowed tp x sp: 1x1, 1x2, 1x4, 2x1, 2x2, 4x1$"):
        check_mesh(settings, 2, 4)
    plain = GPT2Config(n_head=6)
    check_mesh(plain, 1, 3)  # every head is a KV head, and no weight is split
    with pytest.raises(ModelError, match=r"allowed tp x sp: 1x1, 1x2, 1x3, 1x6$"):
        check_mesh(plain, 1, 4)
    with pytest.raises(ModelError, match=r"it cannot be split; set parallel\.tp to 1"):
        check_mesh(plain, 2, 3)


def layouts_case(rank: int, world_size: int, folder: Path) -> list[Any]:
    """Two instances of 2 x 2, on eight ranks, and what is refused."""
    whole = [dist.new_group(range(4)), dist.new_group(range(4, 8))][rank // 4]
    mesh = Mesh.of(whole, 2, 2)
    lines = [dist.get_process_group_ranks(group) for group in (mesh.tp_group, mesh.sp_group)]
    with pytest.raises(ModelError, match="make it rank"):
        Mesh(group=whole, tp_group=mesh.tp_group)
    with pytest.raises(ModelError, match=r"tp 2 x sp 2 are 4 ranks, but an instance's group has \[8\]"):
        Mesh.of(None, 2, 2)
    with pytest.raises(ModelError, match="tp and sp are 1 or more each, not -2 and -2"):
        Mesh.of(whole, -2, -2)
    model = load_model(tiny.config(folder).model, mesh)
    settings = tiny.config(folder, tp=2, sp=2)
    with pytest.raises(ModelError, match=r"parallel\.tp is 4 and parallel\.sp 1, but the model lies on tp 2 x sp 2"):
        Engine(tiny.config(folder, tp=4), model, cache_group=TorchGroup(whole))
    ahead = replace(settings, cache=replace(settings.cache, asynchronous=True))
    flat = Mesh.of(whole, 1, 4)
    with pytest.raises(ModelError, match="give handoff_group and cache_group groups of their own"):
        Engine(replace(ahead, parallel=replace(ahead.parallel, tp=1, sp=4)), load_model(settings.model, flat),
               cache_group=TorchGroup(whole))  # fmt: skip
    return [*lines, mesh.rank, mesh.tp_rank, mesh.sp_rank, model.kv_heads]


def test_instances_make_their_groups_in_one_order(models: dict[str, Path]) -> None:
    seen = run_ranks(layouts_case, 8, (models["llama"],), timeout_s=GENEROUS)
    assert seen == [
        [[4 * i + s, 4 * i + 2 + s], [4 * i + 2 * t, 4 * i + 2 * t + 1], 2 * t + s, t, s, 3]
        for i in (0, 1) for t in (0, 1) for s in (0, 1)
    ]  # fmt: skip


def replicas_case(rank: int, world_size: int, folder: Path) -> tuple[int, int, list[tuple[int, ...]], int]:
    """Each instance answers prompts of its own, one of them twice."""
    settings = tiny.config(folder, sp=2)
    with pytest.raises(ConfigError, match=r"^parallel: is for 3 instances of tp 1 x sp 2, but 4 processes were "
                                          r"started; start 6 "):  # fmt: skip
        launched(Layout.from_environment(), 1, GENEROUS, sp=2, replicas=3).__enter__()
    with pytest.raises(ConfigError, match=r"^parallel: is for tp 1 x sp 2, but 4 processes were started; start 2 "):
        launched(Layout.from_environment(), 1, GENEROUS, sp=2).__enter__()
    with launched(Layout.from_environment(), 1, GENEROUS, sp=2, replicas=2) as ranks:
        engine = Engine(settings, load_model(settings.model, ranks.mesh), cache_group=ranks.cache_group,
                        handoff_group=ranks.handoff_group)  # fmt: skip
        answers = []
        if ranks.rank == 0:
            for _ in range(2 + ranks.replica):  # so that one of them is through first
                prompt = Prompt(tokens=tiny.tokens(40 + ranks.replica, 1))
                answers.append(engine.generate([prompt])[0].token_ids)
            engine.shutdown()
        else:
            engine.follow()
        engine.close()
        return ranks.replica, ranks.rank, answers, engine.cache.stats().cached_tokens


def test_two_replicas_serve_beside_each_other(models: dict[str, Path]) -> None:
    seen = run_ranks(replicas_case, 4, (models["qwen3"],), backend=None, timeout_s=GENEROUS)
    assert [(replica, rank) for replica, rank, *_ in seen] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [cached for *_, cached in seen] == [32, 32, 64, 64]
    for first in (0, 2):
        answers = seen[first][2]
        assert len(answers) == 2 + first // 2
        assert len(set(answers)) == 1


# ---- a rank that is lost


def lost_case(rank: int, world_size: int, folder: Path) -> tuple[str, str, int | None]:
    """Rank 1 is killed when the others are in the all-to-all of its second layer, or wait for those."""
    mesh, handoff_group, cache_group = make_groups(2, DEADLINE, sp=2)
    settings = tiny.config(folder, tp=2, sp=2)
    settings = replace(settings, group=replace(settings.group, timeout_s=DEADLINE))
    engine = Engine(settings, load_model(settings.model, mesh, timeout_s=DEADLINE), cache_group=cache_group,
                    handoff_group=handoff_group)  # fmt: skip
    exchange, calls = Ulysses.all_to_all, iter(range(1 << 20))

    def killed(self: Ulysses, parts: torch.Tensor) -> torch.Tensor:
        if next(calls) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(self, parts)

    if rank == 1:
        Ulysses.all_to_all = killed  # type: ignore[method-assign]
    try:
        if rank == 0:
            engine.generate([Prompt(tokens=tiny.tokens(40, 1), output_limit=30)])
        else:
            engine.follow()
    except GroupError as error:
        return type(error).__name__, str(error), getattr(error, "failed_rank", None)
    finally:
        cache_group.close()
    return "", "went on", None


def test_a_rank_killed_in_an_all_to_all_ends_the_others_by_name(models: dict[str, Path]) -> None:
    outcomes = run_outcomes(lost_case, 4, (models["llama"],), timeout_s=60.0)
    assert outcomes[1].result is None
    for rank in (0, 2, 3):
        assert outcomes[rank].status == "returned", outcomes[rank].describe()
        kind, text, failed_rank = outcomes[rank].result
        assert (kind, failed_rank) == ("PeerLost", 1), text
