"""Several samples of one prompt, by forks: each has the tokens and the bits of a request of its own that ran cold.

One start of two ranks, and the same on one; then the orders of a step, pressure, aborts and suspensions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distkv.config import HostConfig
from distkv.engine import gate
from distkv.engine.beam import Beams
from distkv.engine.compare import compare
from distkv.engine.engine import Engine
from distkv.engine.handoff import NewRequest, News
from distkv.engine.mesh import Mesh
from distkv.engine.model import Model, load_model
from distkv.engine.page_check import check_cache
from distkv.engine.record import Recording
from distkv.engine.requests import Completion, Prompt
from distkv.engine.sampling import Sampling
from distkv.engine.verification import expected_of
from distkv.errors import RequestTooLarge
from distkv.testing.processes import run_ranks
from distkv.torch_group import TorchGroup
from tests.engine import tiny

Folders = Callable[[str, int], Path]
MODES = ("plain", "overlap", "asynchronous", "asynchronous in lockstep")
N = 3
PROMPTS = [
    Prompt(tokens=tiny.tokens(n, n), id=f"p{n}", n=N, output_limit=limit, temperature=0.9 * (n != 15), seed=2**64 - 2)
    for n, limit in [(37, 14), (32, 20), (15, 2), (3, 30)]
]  # fmt: skip
SEARCH = Prompt(tokens=tiny.tokens(25, 9), id="search", beams=4, n=4, output_limit=20, early_stopping="never")
Answer = list[tuple[tuple[int, ...], str, float | None]]


def answers(done: Completion) -> Answer:
    assert [choice.index for choice in done.choices] == list(range(len(done.choices)))
    return [(choice.token_ids, choice.finish_reason, choice.score) for choice in done.choices]


def alone(prompt: Prompt) -> list[Prompt]:
    """The requests that are answered as its samples are."""
    assert prompt.seed is not None
    return [replace(prompt, n=1, id=f"{prompt.id}, {i}", seed=(prompt.seed + i) % 2**64, read=False, write=False)
            for i in range(prompt.n)]  # fmt: skip


def engine_of(model: Model, folder: Path, mode: str = "plain", *, pages: int = 64, host: HostConfig | None = None,
              **engine: Any) -> Engine:  # fmt: skip
    many = dist.is_initialized()
    settings = tiny.config(folder, tp=model.mesh.tp, sp=model.mesh.sp, pages=pages, batch_invariant=True,
                           overlap=mode == "overlap", dtype=str(model.dtype).removeprefix("torch."),
                           **engine)  # fmt: skip
    cache = replace(settings.cache, asynchronous="asynchronous" in mode, check_every=4,
                    agreement="lockstep" if "lockstep" in mode else "minimum")
    ballots = TorchGroup(dist.new_group()) if many else None
    handoff = dist.new_group() if many and "asynchronous" in mode else None
    made = Engine(replace(settings, cache=cache, host=host or HostConfig()), model, cache_group=ballots,
                  handoff_group=handoff)  # fmt: skip
    made.recording = Recording(made.pool)
    return made


def differences(engine: Engine, cold: Recording, prompts: list[Prompt]) -> list[str]:
    """Of every sequence that came to an end, from the request that ran cold with the same tokens."""
    assert engine.recording is not None
    parts, wholes = {}, [request for request in cold.requests.values() if request.kv is not None]
    for prompt in prompts:
        for name, part in engine.recording.requests.items():
            if name.split("#")[0].split("/")[0] != prompt.id or part.kv is None:
                continue
            whole = next(each for each in wholes if np.array_equal(each.tokens[: len(part.tokens)], part.tokens))
            parts[name] = expected_of(part, whole)
    assert len(parts) >= sum(prompt.n for prompt in prompts)
    report = compare(engine.recording, parts, rank=engine.model.rank)
    assert report.rows > 10
    return list(report.differences)


def ended_well(engine: Engine) -> None:
    engine.cache.settle()
    engine.cache.check()
    stats, work = engine.cache.stats(), engine._work
    assert (stats.pages_live, stats.pages_reserved, stats.host_kept) == (0, 0, 0)
    assert not (engine.cache.suspended or work.suspended or work.running or work.pending or work.news)


# ---- cold and forked, on one rank and on two


def steps(engine: Engine, *prompts: Prompt) -> dict[str, Completion]:
    for prompt in prompts:
        engine.submit(prompt)
    done: dict[str, Completion] = {}
    for _ in range(2000):
        if not engine.busy:
            return done
        done |= {each.id: each for each in engine.step()}
    raise AssertionError(f"still running: {list(engine._work.running)}, waiting: {engine.cache.waiting_ids}")


def drive(engine: Engine, prompts: list[Prompt]) -> list[Completion]:
    """All at once, to the end of the engine; on other ranks than rank 0 nothing comes back."""
    done: list[Completion] = []
    if engine.model.rank == 0:
        ended = steps(engine, *prompts)
        done = [ended[str(prompt.id)] for prompt in prompts]
        engine.step()
        engine.shutdown()
    else:
        engine.follow()
    ended_well(engine)
    return done


def forked_case(
    rank: int, world_size: int, folder: Path, dtypes: tuple[str, ...], modes: tuple[str, ...], sp: int = 1
) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    seen: dict[str, dict[str, Any]] = {}
    single = [each for prompt in PROMPTS for each in alone(prompt)]
    for dtype in dtypes:
        mesh = Mesh.of(None, world_size // sp, sp) if world_size > 1 else None
        model = load_model(tiny.config(folder, dtype=dtype).model, mesh)
        cold = engine_of(model, folder)
        *firsts, searched = [answers(done) for done in drive(cold, [*single, replace(SEARCH, read=False)])] or [[]]
        wanted = [[answer for each in firsts[i : i + N] for answer in each] for i in range(0, len(firsts), N)]
        wanted.append(searched)
        for mode in modes:
            # in no more pages than one of them needs; what a rank has beyond the others changes nothing
            engine = engine_of(model, folder, mode, pages=64 if mode == "plain" else 13 + 5 * rank)
            found = [answers(done) for done in drive(engine, [*PROMPTS, SEARCH])]
            assert cold.recording is not None and engine.recording is not None
            again = check_cache(model, engine.cache, engine.pool)
            stats = engine.cache.stats()
            seen[f"{mode}, {dtype}"] = {
                "as alone": found == wanted or rank > 0,
                "different": differences(engine, cold.recording, PROMPTS) + [str(each) for each in again.differences],
                "gate": gate.check(model, engine.recording, continued=True).differences if mode == "plain" else (),
                "told": {name: (r.cached_tokens, r.logits) for name, r in engine.recording.requests.items()},
                "forked": stats.forked, "collectives": stats.collectives, "checked": again.pages,
            }  # fmt: skip
            engine.close()
        cold.close()
    return seen


def check_runs(ranks: list[dict[str, dict[str, Any]]], runs: int) -> None:
    for seen in ranks:
        assert len(seen) == runs
        for name, run in seen.items():
            assert run["as alone"], name
            assert (run["different"], run["gate"]) == ([], ()), name
            assert run["told"] == ranks[0][name]["told"], "logits and lengths of every sequence, on all ranks"
            assert run["forked"] > len(PROMPTS) * (N - 1)
            assert run["checked"] >= 6
            assert run["collectives"] > 0 or len(ranks) == 1


@pytest.mark.parametrize(("kind", "modes"), [("llama", ("plain", "asynchronous")), ("qwen3", ("plain",))])
def test_samples_have_the_tokens_and_bits_of_requests_of_their_own(
    folders: Folders, kind: str, modes: tuple[str, ...]
) -> None:
    """Cold and forked, whatever the order of a step. And searches, of themselves in other batches."""
    check_runs([forked_case(0, 1, folders(kind, 4), ("float32", "bfloat16"), modes)], 2 * len(modes))


def both_kinds(rank: int, world_size: int, llama: Path, qwen3: Path) -> list[dict[str, dict[str, Any]]]:
    return [forked_case(rank, world_size, llama, ("float32",), ("overlap", "asynchronous")),
            forked_case(rank, world_size, qwen3, ("bfloat16",), ("plain",), sp=2)]  # fmt: skip


def test_on_two_ranks_of_unlike_pools_too(folders: Folders) -> None:
    """Tensor parallel and sequence parallel ones."""
    seen = run_ranks(both_kinds, 2, (folders("llama", 4), folders("qwen3", 4)), timeout_s=240.0)
    check_runs([llama for llama, _ in seen], 2)
    check_runs([qwen3 for _, qwen3 in seen], 1)


# ---- one rank: pressure, ends, names


@pytest.fixture(scope="module")
def model(folders: Folders) -> Model:
    return load_model(tiny.config(folders("llama", 4)).model)


@pytest.mark.parametrize("mode", MODES)
def test_prompts_that_all_wait_for_their_forks_get_on(model: Model, folders: Folders, mode: str) -> None:
    """They take the whole pool: the last is suspended, and the first is forked."""
    prompts = [Prompt(tokens=tiny.tokens(40, i), id=str(i), n=3, temperature=0.9, seed=i, output_limit=8)
               for i in range(3)]  # fmt: skip
    roomy = engine_of(model, folders("llama", 4))
    wanted = steps(roomy, *prompts, replace(SEARCH, output_limit=8))
    roomy.close()
    engine = engine_of(model, folders("llama", 4), mode, pages=9)  # one has 3 pages, and 5 with its forks
    done = steps(engine, *prompts, replace(SEARCH, output_limit=8))
    assert {name: answers(each) for name, each in done.items()} == {name: answers(wanted[name]) for name in done}
    assert sum(each.suspended for each in done.values()) >= 1
    assert done["0"].suspended == 0, "the first goes on to its end"
    engine.step()
    ended_well(engine)
    engine.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_search_that_came_first_is_not_suspended_for_answers_that_grow(
    model: Model, folders: Folders, mode: str
) -> None:
    """Its beams are the last sequences, but those that came later make place."""
    engine = engine_of(model, folders("llama", 4), mode, pages=12, reserve_tokens=4)
    growing = [Prompt(tokens=tiny.tokens(20, i), id=str(i), output_limit=44) for i in (1, 4)]
    done = steps(engine, SEARCH, *growing)  # it has 9 pages, and each of them 2 at first and 4 at last
    assert done["search"].suspended == 0
    assert done["1"].suspended + done["4"].suspended > 0
    engine.step()
    ended_well(engine)
    engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_samples_and_searches_end_as_alone_under_any_pressure(model: Model, folders: Folders, seed: int) -> None:
    """Random requests in a pool for hardly one of them, with answers that grow, a tier, aborts and suspensions."""
    rng, mode = random.Random(seed), MODES[seed % 4]
    prompts = []
    for i in range(5):
        kinds: list[dict[str, Any]] = [{"n": 3, "temperature": rng.choice([0, 0.9])}, {"beams": 3, "n": 2}, {}]
        tokens = np.concatenate([tiny.tokens(20, 1)[: rng.choice([0, 16, 20])], tiny.tokens(rng.randint(1, 30), i)])
        prompts.append(Prompt(tokens=tokens, id=str(i), output_limit=rng.randint(1, 24), seed=i,
                              write=rng.random() < 0.9, **rng.choice(kinds)))  # fmt: skip
    model.stop_ids = frozenset(range(2, tiny.VOCAB, 17))
    tier = HostConfig(pages=20, preemption_pages=rng.randint(0, 8), skip_slow_loads=False)
    engine = engine_of(model, folders("llama", 4), mode, pages=rng.randint(12, 16),
                       reserve_tokens=rng.choice([None, 1, 4]), host=None if "lockstep" in mode else tier)  # fmt: skip
    for prompt in prompts:
        engine.submit(prompt)
    done: dict[str, Completion] = {}
    for _ in range(2000):
        if not engine.busy:
            break
        if rng.random() < 0.1:
            engine.suspend(str(rng.randrange(5)))
        if rng.random() < 0.02:
            engine.abort(str(rng.randrange(5)))
        done |= {each.id: each for each in engine.step()}
    engine.step()
    ended_well(engine)
    assert engine.recording is not None
    assert gate.check(model, engine.recording, continued=True).differences == ()
    assert check_cache(model, engine.cache, engine.pool, recording=engine.recording).differences == ()
    engine.close()
    uncached = engine_of(model, folders("llama", 4), pages=100, cache="off")
    wanted = steps(uncached, *prompts)
    for name, each in done.items():
        whole = answers(wanted[name])
        assert len(each.choices) == len(whole) or each.finish_reason == "aborted"
        assert each.finish_reason == "aborted" or answers(each) == whole
    assert sum(each.finish_reason != "aborted" for each in done.values()) >= 2
    uncached.close()
    model.stop_ids = frozenset({2})


def test_a_sample_that_ends_at_once_needs_no_fork(model: Model, folders: Folders) -> None:
    """Stop tokens first, later and never; the first sample's tokens are told, and nothing is left."""
    prompt = Prompt(tokens=tiny.tokens(20, 3), n=6, temperature=1.5, seed=4, output_limit=5)
    engine = engine_of(model, folders("llama", 4))
    free = engine.generate([prompt])[0]
    firsts = [choice.token_ids[0] for choice in free.choices]
    assert len(set(firsts)) > 3
    told: list[int] = []
    for stops, forks in [({firsts[0]}, 4), ({firsts[0], firsts[2]}, 3), (set(firsts), 0), ({free.token_ids[1]}, 5)]:
        model.stop_ids = frozenset(stops)
        before = engine.cache.stats().forked
        told.clear()
        done = engine.generate([replace(prompt, on_token=told.append)])[0]
        assert told == list(done.token_ids)
        for choice, whole in zip(done.choices, free.choices, strict=True):
            end = next((i + 1 for i, token in enumerate(whole.token_ids) if token in stops), 5)
            assert choice.token_ids == whole.token_ids[:end]
            assert (choice.finish_reason == "stop") == (choice.token_ids[-1] in stops)
        assert done.finish_reason == done.choices[0].finish_reason
        assert engine.cache.stats().forked - before == forks
    model.stop_ids = frozenset({2})
    before = engine.cache.stats().forked
    one, none = engine.generate([replace(prompt, output_limit=1), replace(prompt, output_limit=0)])
    assert [choice.token_ids for choice in one.choices] == [(first,) for first in firsts]
    assert [(choice.token_ids, choice.finish_reason) for choice in none.choices] == [((), "length")] * 6
    assert engine.cache.stats().forked == before
    ended_well(engine)
    engine.close()


def test_what_can_never_be_forked_is_refused_and_the_rest_goes_on(model: Model, folders: Folders) -> None:
    engine = engine_of(model, folders("llama", 4), pages=9)
    large = Prompt(tokens=tiny.tokens(40, 1), id="large", n=5, output_limit=24, temperature=0.5)  # 4 + 4 * 2 pages
    done = steps(engine, large, Prompt(tokens=tiny.tokens(5, 2), id="small"))
    assert isinstance(done["large"].error, RequestTooLarge)
    assert (done["large"].error.pages_needed, done["large"].error.pages_possible) == (12, 9)
    assert done["small"].finish_reason == "length"
    assert steps(engine, replace(large, n=3))["large"].finish_reason == "length"
    ended_well(engine)
    engine.close()
    growing = engine_of(model, folders("llama", 4), pages=9, reserve_tokens=8)  # 3 + 4 * 1: samples can be suspended
    assert len(steps(growing, large)["large"].choices) == 5
    ended_well(growing)
    growing.close()


def test_samples_are_aborted_together_and_their_names_are_nobody_elses(model: Model, folders: Folders) -> None:
    engine = engine_of(model, folders("llama", 4), index_on="fill")
    prompt = Prompt(tokens=tiny.tokens(20, 3), id="a", n=3, temperature=0.9, seed=1, output_limit=20)
    engine.submit(Prompt(tokens=tiny.tokens(9, 9), id="a/1", output_limit=20))
    engine.submit(prompt)
    for _ in range(6):
        engine.step()
    assert sorted(engine._work.running) == ["a", "a/1", "a/2", "a/3"]
    engine.submit(Prompt(tokens=[1, 2, 3], id="a/2"))  # refused, and the sample of this name goes on
    (refused,) = [done for _ in range(2) for done in engine.step()]
    assert (refused.id, refused.finish_reason) == ("a/2", "refused")
    engine.abort("a")
    (aborted,) = engine.step()
    assert [choice.finish_reason for choice in aborted.choices] == ["aborted"] * 3
    assert all(0 < len(choice.token_ids) < 20 for choice in aborted.choices)
    assert list(engine._work.running) == ["a/1"]
    assert [done.id for done in steps(engine).values()] == ["a/1"]
    ended_well(engine)
    engine.close()


def test_what_all_ranks_are_told_of_it() -> None:
    new = NewRequest(id="x", tokens=np.arange(5, dtype=np.int32), output_limit=3, n=4,
                     sampling=Sampling(temperature=0.5), beams=Beams(width=6, early_stopping="never"))  # fmt: skip
    (read,) = News.decode(News(requests=(new,)).encode()).requests
    assert (read.n, read.beams, read.sampling, read.sequences) == (4, new.beams, new.sampling, 6)
