"""The gate: cached and uncached bits are the same under the same schedule, and it fails when a byte is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distkv.engine import gate
from distkv.engine.compare import GateReport, compare
from distkv.engine.engine import Engine
from distkv.engine.fuzz import Fuzzed
from distkv.engine.model import load_model
from distkv.engine.page_check import check_cache
from distkv.engine.record import Recording
from distkv.engine.requests import Completion, Prompt
from distkv.engine.schedule import Chunk, Grid, Replay, Runnable
from distkv.errors import GateFailed, GroupTimeout
from distkv.testing.processes import run_ranks
from tests.engine import tiny

Folders = Callable[[str, int], Path]
GENEROUS = 240.0
TURNS = [tiny.tokens(70, 1), tiny.tokens(21, 2), tiny.tokens(9, 3)]


def recording_of(engine: Engine) -> Recording:
    assert engine.recording is not None
    return engine.recording


def checked(engine: Engine, **how: bool) -> GateReport:
    return gate.check(engine.model, recording_of(engine), **how)


def mixed_run(engine: Engine) -> None:
    """Conversations, requests that share a prefix in one batch with strangers, and generated text that is read back."""
    tiny.conversation(engine, "a", TURNS)
    shared = tiny.tokens(50, 9)
    engine.generate([Prompt(tokens=np.concatenate([shared, tiny.tokens(5, 10)])), Prompt(tokens=tiny.tokens(40, 11))])
    engine.generate([
        Prompt(tokens=np.concatenate([shared, tiny.tokens(n, n)]), output_limit=n % 7 + 1) for n in (3, 18, 33)
    ])  # fmt: skip
    tiny.conversation(engine, "b", [shared, tiny.tokens(30, 12)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "kv_heads"), [("llama", 12), ("qwen3", 4)])
def test_cached_bits_are_those_of_an_uncached_run(folders: Folders, kind: str, kv_heads: int, dtype: str) -> None:
    engine = tiny.engine(tiny.config(folders(kind, kv_heads), dtype=dtype))
    mixed_run(engine)
    for continued in (False, True):
        report = checked(engine, continued=continued)
        assert report.differences == ()
        assert report.cached_tokens >= 4 * tiny.PAGE
        assert report.rows > 20
        assert report.requests == len(recording_of(engine).requests)


def test_pages_of_requests_that_run_or_were_aborted_have_the_same_bits(folders: Folders) -> None:
    engine = tiny.engine(tiny.config(folders("llama", 4), index_on="fill", output_limit=40))
    prompt = tiny.tokens(40, 1)
    engine.submit(Prompt(tokens=prompt, id="aborted"))
    engine.submit(Prompt(tokens=tiny.tokens(30, 2), id="mate"))
    for _ in range(30):
        engine.step()
    tokens = engine._work.running["aborted"].tokens[:66].copy()
    engine.submit(Prompt(tokens=tokens, id="reader", output_limit=3))
    for _ in range(2):
        engine.step()
    engine.abort("aborted")
    while engine.busy:
        engine.step()
    requests = recording_of(engine).requests
    assert requests["reader"].cached_tokens == 64, "generated text of a request that still ran"
    assert requests["aborted"].kv is None
    report = checked(engine)
    assert (report.requests, report.differences) == (2, ())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_uncached_engine_that_replays_the_schedule_gives_the_same_bits(folders: Folders, kind: str) -> None:
    settings = tiny.config(folders(kind, 12))
    cached = tiny.engine(settings)
    first, mate = tiny.tokens(60, 1), tiny.tokens(40, 2)
    cached.generate([Prompt(tokens=first, id="first"), Prompt(tokens=mate, id="mate")])
    second = np.concatenate([first, tiny.tokens(13, 3)])
    others = [Prompt(tokens=second, id="second"), Prompt(tokens=tiny.tokens(20, 4), id="late")]
    done = cached.generate(others)
    assert done[0].cached_tokens == 48

    replay = Replay(gate.uncached_schedule(recording_of(cached), ["second"]))
    uncached = tiny.engine(settings, scheduler=replay)
    prompts = [Prompt(tokens=mate, id="mate", read=False, write=False)]
    prompts += [Prompt(tokens=p.tokens, id=p.id, read=False, write=False) for p in others]
    for prompt in prompts:
        uncached.submit(prompt)
    again: dict[str, Completion] = {}
    while "second" not in again:  # "mate" only filled batches; it need not end
        again |= {c.id: c for c in uncached.step()}
    assert replay.left <= 1  # "late" may have gone on for longer
    assert again["second"].cached_tokens == 0
    assert again["second"].token_ids == done[0].token_ids
    old, new = recording_of(cached).requests["second"], recording_of(uncached).requests["second"]
    assert new.kv is not None
    recomputed = {"second": gate.Recomputed({p: new.logits[p] for p in old.logits}, new.kv)}
    assert compare(recording_of(cached), recomputed).differences == ()


def warm(folders: Folders) -> tuple[Engine, np.ndarray]:
    """An engine after one request, and its prompt of four full pages and a rest."""
    engine = tiny.engine(tiny.config(folders("llama", 4)))
    prompt = tiny.tokens(70, 1)
    engine.generate([Prompt(tokens=prompt, id="first")])
    return engine, prompt


def pages_of(engine: Engine, prompt: np.ndarray) -> list[int]:
    """The pages that a request with this prompt is given from the cache."""
    engine.submit(Prompt(tokens=prompt, id="probe", output_limit=1))
    engine.step()
    pages = engine.cache.running["probe"].page_indices.tolist() if "probe" in engine.cache.running else []
    engine.abort("probe")
    engine.step()
    assert recording_of(engine).requests.pop("probe").cached_tokens == 64
    return [int(p) for p in pages[:4]]


def test_one_nudged_element_of_one_cached_page_is_found_and_named(folders: Folders) -> None:
    engine, prompt = warm(folders)
    page = pages_of(engine, np.concatenate([prompt, tiny.tokens(40, 5)]))[2]
    engine.pool.data[1, 0, page, 5, 2, 3] += 1e-6
    engine.generate([Prompt(tokens=np.concatenate([prompt, tiny.tokens(8, 2)]), id="second")])
    report = checked(engine)
    assert report.differences[0] == (
        f"request 'second', rank 0: page 2 (cached), layer 1, keys differ: pool page {page}, token 37 (5 of the page)"
    )
    assert not any("'first'" in d or "page 1 " in d or "page 3 " in d for d in report.differences)
    assert report.differing == {"second"}
    with pytest.raises(GateFailed, match="page 2") as caught:
        report.raise_if_failed()
    assert caught.value.differences == report.differences


def test_two_swapped_cached_pages_are_found_and_named(folders: Folders) -> None:
    engine, prompt = warm(folders)
    a, b = pages_of(engine, np.concatenate([prompt, tiny.tokens(40, 5)]))[1:3]
    engine.pool.data[:, :, [a, b]] = engine.pool.data[:, :, [b, a]]
    engine.generate([Prompt(tokens=np.concatenate([prompt, tiny.tokens(8, 2)]), id="second")])
    named = {(page, layer) for page in (1, 2) for layer in (0, 1)}
    found = checked(engine).differences
    assert all(any(f"page {page} (cached), layer {layer}" in d for d in found) for page, layer in named)


def test_a_page_of_another_prefix_is_found_and_named(folders: Folders) -> None:
    engine, prompt = warm(folders)
    page = pages_of(engine, np.concatenate([prompt, tiny.tokens(40, 5)]))[3]
    other = tiny.tokens(70, 77)
    engine.generate([Prompt(tokens=other, id="other")])
    foreign = pages_of(engine, np.concatenate([other, tiny.tokens(40, 6)]))[3]
    engine.pool.data[:, :, page] = engine.pool.data[:, :, foreign]
    engine.generate([Prompt(tokens=np.concatenate([prompt, tiny.tokens(8, 2)]), id="second")])
    found = checked(engine).differences
    assert any("request 'second'" in d and "page 3 (cached), layer 0" in d for d in found)


def test_a_page_table_with_another_requests_page_is_refused(folders: Folders) -> None:
    engine, prompt = warm(folders)
    engine.generate([Prompt(tokens=tiny.tokens(70, 77), id="other")])
    engine.generate([Prompt(tokens=np.concatenate([prompt, tiny.tokens(8, 2)]), id="second")])
    requests = recording_of(engine).requests
    requests["second"].origin = (*requests["second"].origin[:3], ((0, 0),))
    with pytest.raises(GateFailed, match=r"request 'second'.*page 3 .*not computed for"):
        checked(engine)


def test_pages_that_were_computed_above_a_duplicate_have_its_bits(folders: Folders) -> None:
    """Two requests compute one page at the same time, in other batches; the index has it of the one, and the rest of
    the other."""
    scheduler = Fuzzed(np.random.default_rng(1), 64, 7, tiny.PAGE)
    engine = tiny.engine(tiny.config(folders("llama", 12)), scheduler=scheduler)
    long = tiny.tokens(70, 1)
    engine.submit(Prompt(tokens=long[:20], id="short", output_limit=1))
    engine.submit(Prompt(tokens=long, id="long", output_limit=1))
    while engine.busy:
        engine.step()
    tiny.conversation(engine, "reader", [np.concatenate([long, tiny.tokens(9, 2)]), tiny.tokens(20, 3)])
    recording = recording_of(engine)
    short, other, reader = (recording.requests[name] for name in ("short", "long", "reader0"))
    assert short.kv is not None
    assert other.kv is not None
    assert not np.array_equal(short.kv[:16], other.kv[:16]), "the schedule shows in the bits"
    writers = [recording.batches[number].chunks[i].request_id for (number, i), *_ in reader.origin]
    assert writers == ["short", "long", "long", "long"]
    for continued in (False, True):
        assert checked(engine, continued=continued).differences == ()
    assert check_cache(engine.model, engine.cache, engine.pool, recording=recording).differences == ()


def test_pages_filled_by_pieces_across_their_end_are_refused(folders: Folders) -> None:
    engine = tiny.engine(tiny.config(folders("llama", 4)), scheduler=Grid(chunk_tokens=24, batch_tokens=64))
    prompt = tiny.tokens(70, 1)
    for name in ("first", "second"):
        engine.generate([Prompt(tokens=prompt, id=name)])
    with pytest.raises(GateFailed, match=r"'second'.* page 0 .* by tokens 0 to 23 of 'first': .* within one page"):
        checked(engine)


def test_nothing_cached_is_an_error_and_not_a_success(folders: Folders) -> None:
    engine = tiny.engine(tiny.config(folders("llama", 4)))
    engine.generate([Prompt(tokens=tiny.tokens(70, 1))])
    with pytest.raises(GateFailed, match="nothing to compare"):
        checked(engine)


def test_the_schedule_is_the_reason_another_one_gives_other_bits(folders: Folders) -> None:
    """What the gate is for: the same request in other chunks differs in its last bits."""
    bits = []
    for chunk in (16, 4):
        engine = tiny.engine(tiny.config(folders("llama", 12), chunk_tokens=chunk))
        engine.generate([Prompt(tokens=tiny.tokens(75, 1), id="r")])
        bits.append(recording_of(engine).requests["r"].kv)
    assert bits[0] is not None
    assert bits[1] is not None
    assert not np.array_equal(bits[0], bits[1])


def test_an_id_that_is_used_again_names_two_requests(folders: Folders) -> None:
    engine, prompt = warm(folders)
    engine.generate([Prompt(tokens=tiny.tokens(40, 2), id="first")])
    engine.generate([Prompt(tokens=tiny.tokens(40, 2), id="first")])
    engine.generate([Prompt(tokens=prompt, id="reader")])
    requests = recording_of(engine).requests
    assert [(name, r.prompt_tokens, r.cached_tokens) for name, r in requests.items()] == [
        ("first", 70, 0), ("first#2", 40, 0), ("first#3", 40, 32), ("reader", 70, 64),
    ]  # fmt: skip
    for continued in (False, True):
        report = checked(engine, continued=continued)
        assert (report.requests, report.differences) == (4, ())


@pytest.mark.parametrize("start", [0, 16, 64])
def test_a_piece_that_nobody_computed_is_found(folders: Folders, start: int) -> None:
    skipped = []

    class Skipping(Grid):
        """Commits one piece of the prompt without computing it."""

        def plan(self, running: Sequence[Runnable]) -> list[Chunk]:
            chunks = super().plan(running)
            if not chunks or chunks[0].start != start or skipped:
                return chunks
            skipped.append(chunks[0])
            sequence = engine.cache.running["a"]
            sequence.open(chunks[0].n)
            sequence.commit(chunks[0].n)
            return []

    scheduler = Skipping(chunk_tokens=tiny.PAGE, batch_tokens=64)
    engine = tiny.engine(tiny.config(folders("llama", 4)), scheduler=scheduler)
    prompt = tiny.tokens(87, 1)
    for name in ("a", "b"):
        engine.generate([Prompt(tokens=prompt, id=name)])
    assert skipped
    with pytest.raises(GateFailed, match=rf"request 'a', rank 0: tokens {start} to {start + 15} were never computed"):
        gate.recompute(engine.model, recording_of(engine), ["a"])
    with pytest.raises(GateFailed, match="computed"):
        checked(engine)


# ---- real ranks


def late_case(rank: int, world_size: int, folder: Path) -> None:
    settings = tiny.config(folder, tp=world_size)
    model = load_model(settings.model, dist.group.WORLD, timeout_s=0.5)
    if rank:  # it never comes, and its process stays until the other one has returned too
        return
    with pytest.raises(GroupTimeout, match=r"comparison of schedules did not end within 0\.5 s"):
        gate.recompute(model, Recording(model.pool(2, tiny.PAGE)))


def test_the_gate_does_not_wait_for_ever(folders: Folders) -> None:
    run_ranks(late_case, 2, (folders("llama", 4),), timeout_s=60.0)


def ranks_case(rank: int, world_size: int, folder: Path, nudge_on: int | None) -> tuple[GateReport, list[int]]:
    torch.set_num_threads(1)
    engine = tiny.engine(tiny.config(folder, tp=world_size))
    if rank == 0:
        mixed_run(engine)
    if rank == 0:
        engine.shutdown()
    else:
        engine.follow()
    if nudge_on == rank:
        request = recording_of(engine).requests["a1"]
        assert request.kv is not None
        request.kv[20, 0, 1] ^= np.uint64(1)
    report = checked(engine)
    return report, [hash for r in recording_of(engine).requests.values() for hash in r.logits.values()]


def foreign_page_case(rank: int, world_size: int, folder: Path) -> str:
    """Rank 1's recording says that a cached page came from other tokens."""
    torch.set_num_threads(1)
    engine = tiny.engine(tiny.config(folder, tp=world_size))
    if rank == 0:
        mixed_run(engine)
        engine.shutdown()
    else:
        engine.follow()
        request = recording_of(engine).requests["a1"]
        request.origin = (request.origin[1], *request.origin[1:])
    with pytest.raises(GateFailed) as caught:
        checked(engine)
    return str(caught.value)


def two_ranks_cases(rank: int, world_size: int, whole: Path, folder: Path) -> tuple[Any, Any, str]:
    """All that two ranks do, in one start of the processes."""
    return (ranks_case(rank, world_size, whole, None), ranks_case(rank, world_size, folder, 1),
            foreign_page_case(rank, world_size, folder))


@pytest.fixture(scope="module")
def two_ranks(folders: Folders) -> list[tuple[Any, Any, str]]:
    return run_ranks(two_ranks_cases, 2, (folders("llama", 12), folders("llama", 4)), timeout_s=GENEROUS)


def check_clean(by_rank: list[tuple[GateReport, list[int]]]) -> None:
    for report, logits in by_rank:
        assert report.differences == ()
        assert report.cached_tokens >= 4 * tiny.PAGE
        assert logits == by_rank[0][1], "ranks must have the same logits, bit for bit"


def test_the_gate_over_two_ranks(two_ranks: list[tuple[Any, Any, str]]) -> None:
    check_clean([clean for clean, *_ in two_ranks])


def test_the_gate_over_four_ranks(folders: Folders) -> None:
    check_clean(run_ranks(ranks_case, 4, (folders("qwen3", 4), None), timeout_s=GENEROUS))


def test_a_difference_on_one_rank_names_the_rank(two_ranks: list[tuple[Any, Any, str]]) -> None:
    on_0, on_1 = (nudged for _, nudged, _ in two_ranks)
    assert on_0[0].differences == ()
    (found,) = on_1[0].differences
    assert found.startswith("request 'a1', rank 1: page 1 (cached), layer 0, values differ: pool page ")
    assert found.endswith(", token 20 (4 of the page)")


def test_what_one_rank_cannot_compare_ends_the_gate_on_all(two_ranks: list[tuple[Any, Any, str]]) -> None:
    on_0, on_1 = (message for *_, message in two_ranks)
    assert on_0 == "nothing was compared: rank 1 cannot, see its own error"
    assert on_1.startswith("request 'a1', rank 1: page 0 came from the cache, but it was not computed for")
