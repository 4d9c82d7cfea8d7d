"""The engine on one rank: answers, what is refused, aborted and waited for, and that cached pages stall nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from distkv.engine.engine import Engine
from distkv.engine.handoff import NewRequest, News
from distkv.engine.launch import make_groups
from distkv.engine.model import load_model
from distkv.engine.requests import Prompt
from distkv.engine.schedule import Chunk
from distkv.errors import DistKVError, DuplicateRequest, ModelError, PromptError, RequestTooLarge, SequenceError
from distkv.keys import Adapter
from distkv.testing.processes import run_ranks
from distkv.torch_group import TorchGroup
from tests.engine import tiny

Folders = Callable[[str, int], Path]


@pytest.fixture
def engine(folders: Folders) -> Engine:
    return tiny.engine(tiny.config(folders("llama", 4)))


def test_an_answer_stops_at_its_limit_and_says_what_it_cost(engine: Engine) -> None:
    seen: list[int] = []
    first = engine.generate([Prompt(tokens=tiny.tokens(40, 1), output_limit=5, on_token=seen.append)])[0]
    assert (first.prompt_tokens, first.cached_tokens, first.finish_reason) == (40, 0, "length")
    assert len(first.token_ids) == 5
    assert seen == list(first.token_ids)
    assert first.steps == 3 + 4  # three pieces of the prompt, the last with the first token; four more tokens
    assert first.ttft_s is not None
    assert first.ttft_s > 0
    again = engine.generate([Prompt(tokens=tiny.tokens(40, 1), output_limit=5)])[0]
    assert again.cached_tokens == 32
    assert again.token_ids == first.token_ids
    engine.cache.check()


def test_a_stop_token_ends_an_answer(engine: Engine) -> None:
    free = engine.generate([Prompt(tokens=tiny.tokens(40, 1), output_limit=5)])[0]
    engine.model.stop_ids = frozenset({free.token_ids[2]})
    stopped = engine.generate([Prompt(tokens=tiny.tokens(40, 1), output_limit=5)])[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: stopped.token_ids.index(free.token_ids[2]) + 1]


def test_cache_off_gives_the_same_tokens_and_uses_no_page_again(folders: Folders) -> None:
    runs = []
    for mode in ("on", "off"):
        engine = tiny.engine(tiny.config(folders("llama", 4), cache=mode))
        names = tiny.conversation(engine, "c", [tiny.tokens(50, 1), tiny.tokens(20, 2)])
        recording = engine.recording
        assert recording is not None
        runs.append([recording.requests[name] for name in names])
    on, off = runs
    assert [r.cached_tokens for r in off] == [0, 0]
    assert on[1].cached_tokens == 48
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(on, off, strict=True))


def test_32_requests_over_one_prefix_of_59_pages_in_a_pool_of_96_all_finish(folders: Folders) -> None:
    engine = tiny.engine(tiny.config(folders("llama", 4), pages=96))
    shared = tiny.tokens(59 * tiny.PAGE, 1)
    asked = [np.concatenate([shared, tiny.tokens(7 + i % 5, 100 + i)]) for i in range(32)]
    done = engine.generate([Prompt(tokens=tokens, output_limit=4) for tokens in asked])
    assert all(c.finish_reason == "length" for c in done)
    assert sum(c.cached_tokens for c in done) == 31 * 59 * tiny.PAGE
    stats = engine.cache.stats()
    assert stats.pages_live == 0


def test_what_does_not_fit_now_waits_and_what_never_fits_is_refused(folders: Folders) -> None:
    engine = tiny.engine(tiny.config(folders("llama", 4), pages=8))
    prompts = [Prompt(tokens=tiny.tokens(70, i)) for i in range(3)]
    prompts.insert(1, Prompt(tokens=tiny.tokens(140, 9), id="large"))
    done = engine.generate(prompts)
    assert [c.finish_reason for c in done] == ["length", "refused", "length", "length"]
    assert isinstance(done[1].error, RequestTooLarge)
    assert (done[1].error.pages_needed, done[1].error.pages_possible) == (10, 8)
    assert not engine.busy


def test_aborts_in_the_queue_while_waiting_and_while_running(folders: Folders) -> None:
    engine = tiny.engine(tiny.config(folders("llama", 4), pages=8, max_running=2))
    for i, name in enumerate(["running", "waiting", "queued", "last"]):
        engine.submit(Prompt(tokens=tiny.tokens(70, i), id=name))
    engine.step()
    assert set(engine.cache.running) == {"running"}
    assert engine.cache.waiting_ids == ("waiting",)
    assert [engine.abort(name) for name in ("running", "waiting", "queued", "unknown")] == [True, True, True, False]
    ended = {}
    while engine.busy:
        ended |= {c.id: c.finish_reason for c in engine.step()}
    assert ended == {"running": "aborted", "waiting": "aborted", "queued": "aborted", "last": "length"}
    assert engine.cache.stats().pages_live == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tokens": []}, "empty"),
        ({"tokens": [5, tiny.VOCAB]}, f"token id {tiny.VOCAB} is outside the model's vocabulary of {tiny.VOCAB}"),
        ({"tokens": [5, -1]}, "token id -1 is outside"),
        ({"tokens": [0.5]}, "whole numbers"),
        ({"tokens": [5], "output_limit": -1}, "output_limit must be at least 0"),
        ({"tokens": [5] * 2046, "output_limit": 6}, "4 more than the model's context of 2048"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused_at_once(engine: Engine, given: dict[str, Any], words: str) -> None:
    with pytest.raises(PromptError, match=words):
        engine.generate([Prompt(tokens=[5, 6]), Prompt(**given)])
    assert not engine.busy, "nothing of a wrong list is submitted"
    assert engine.generate([Prompt(tokens=[5, 6])])[0].finish_reason == "length"


def test_generate_leaves_what_was_submitted_apart_to_the_next_step(engine: Engine) -> None:
    engine.submit(Prompt(tokens=tiny.tokens(20, 1), id="apart", output_limit=2))
    assert engine.generate([Prompt(tokens=tiny.tokens(20, 2), output_limit=6)])[0].finish_reason == "length"
    assert engine.busy
    assert [c.id for c in engine.step()] == ["apart"]
    assert not engine.busy


def test_an_id_in_use_is_refused(engine: Engine) -> None:
    engine.submit(Prompt(tokens=[5], id="a"))
    with pytest.raises(DuplicateRequest):
        engine.submit(Prompt(tokens=[5], id="a"))


def test_another_salt_and_other_weights_share_nothing(engine: Engine) -> None:
    prompt = tiny.tokens(40, 1)
    cached = [engine.generate([Prompt(tokens=prompt, salt=salt)])[0].cached_tokens for salt in ("x", "x", "y")]
    assert cached == [0, 32, 0]
    engine.bump("2")
    assert engine.generate([Prompt(tokens=prompt, salt="x")])[0].cached_tokens == 0
    assert engine.generate([Prompt(tokens=prompt, salt="x")])[0].cached_tokens == 32


def test_a_failed_ballot_costs_one_step_and_no_request(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.submit(Prompt(tokens=tiny.tokens(40, 1)))
    engine.step()
    match = engine.cache._books.match

    def fail_once(*given: Any) -> Any:
        monkeypatch.setattr(engine.cache._books, "match", match)
        raise RuntimeError("a lookup that fails")

    engine.submit(Prompt(tokens=tiny.tokens(30, 2), id="second", read=False))
    monkeypatch.setattr(engine.cache._books, "match", fail_once)
    with caplog.at_level(logging.WARNING):
        done = []
        while engine.busy:
            done += engine.step()
    assert "going on" in caplog.text
    assert [c.finish_reason for c in done] == ["length", "length"]


def test_a_turn_hashes_its_new_tokens_alone(engine: Engine) -> None:
    tiny.conversation(engine, "c", [tiny.tokens(600, 1)])
    before = engine._work.chains.kept["c", None, None]
    hashed = []
    original = before.namer.naming.hash64

    def counting(data: Any, seed: int) -> int:
        hashed.append(len(data))
        return original(data, seed)

    before.namer.naming.hash64 = counting
    turn = np.concatenate([before.tokens, tiny.tokens(20, 2)])
    engine.generate([Prompt(tokens=turn, conversation="c", output_limit=1)])
    assert 1 <= len(hashed) <= 3


def test_model_and_configuration_must_fit(folders: Folders) -> None:
    with pytest.raises(ModelError, match=r"parallel.tp is 2 and parallel.sp 1, but the model lies on tp 1 x sp 1"):
        tiny.engine(tiny.config(folders("llama", 4), tp=2))


# ---- real ranks


def ranks_case(rank: int, world_size: int, folder: Path) -> tuple[list[tuple[int, ...]], list[int]]:
    engine = tiny.engine(tiny.config(folder, tp=world_size, pages=40))
    out = []
    if rank == 0:
        prompts = [Prompt(tokens=tiny.tokens(20 + i, i % 3)) for i in range(6)]
        prompts.append(Prompt(tokens=tiny.tokens(700, 1)))  # its ids do not fit into the message of fixed size
        prompts += [Prompt(tokens=tiny.tokens(500, 2), id="long"), Prompt(tokens=tiny.tokens(500, 3), id="gone")]
        for prompt in prompts:
            engine.submit(prompt)
        out += [c.token_ids for c in engine.step()]
        engine.abort("gone")
        while engine.busy:
            out += [c.token_ids for c in engine.step()]
        engine.shutdown()
    else:
        engine.follow()
    stats = engine.cache.stats()
    return out, [stats.steps, stats.cached_tokens, stats.prompt_tokens, stats.refused, stats.pages_live]


def test_ranks_that_follow_do_what_rank_0_does(folders: Folders) -> None:
    results = run_ranks(ranks_case, 2, (folders("llama", 4),), timeout_s=240.0)
    assert len(results[0][0]) == 9
    assert results[0][1] == results[1][1]
    assert results[0][1][4] == 0


def failed_case(rank: int, world_size: int, folder: Path, failed: bool) -> bool:
    engine = tiny.engine(tiny.config(folder, tp=world_size))
    if rank == 0:
        engine.generate([Prompt(tokens=tiny.tokens(20, 1))])
        engine.shutdown(failed)
    else:
        engine.follow()
    return engine.failed


@pytest.mark.parametrize("failed", [False, True])
def test_followers_learn_whether_rank_0_failed(folders: Folders, failed: bool) -> None:
    assert run_ranks(failed_case, 2, (folders("llama", 4), failed), timeout_s=240.0) == [failed, failed]


# ---- what must not break silently


@pytest.mark.parametrize("where", ["forward", "recording", "choose"])
def test_an_exception_in_a_batch_breaks_the_engine_and_stores_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory (planted)")

    engine.submit(Prompt(tokens=tiny.tokens(40, 1), id="a", output_limit=30))
    for _ in range(4):
        engine.step()
    assert engine.recording is not None
    target = {"forward": (engine.model, "forward"), "recording": (engine.recording, "ran")}.get(where)
    if target is not None:
        monkeypatch.setattr(*target, fail)
    else:
        monkeypatch.setattr("distkv.engine.batch.choose", fail)
    with pytest.raises(RuntimeError, match="planted"):
        engine.step()
    monkeypatch.undo()
    stored = engine.cache.stats().pages_cached
    for call in (engine.step, lambda: engine.submit(Prompt(tokens=[5])), lambda: engine.generate([Prompt(tokens=[5])])):
        with pytest.raises(DistKVError, match=r"broken.*step 5 raised RuntimeError: out of memory \(planted\)"):
            call()
    assert engine.cache.stats().pages_cached == stored == 0
    engine.shutdown()
    assert engine.closed
    assert engine.failed


def test_a_plan_that_is_not_the_next_chunk_is_refused(folders: Folders) -> None:
    class Wrong:
        def plan(self, running: Any) -> list[Chunk]:
            return [Chunk(running[0].request_id, 8, 8)]

    made = tiny.engine(tiny.config(folders("llama", 4)), scheduler=Wrong())
    made.submit(Prompt(tokens=tiny.tokens(40, 1), id="a"))
    with pytest.raises(SequenceError, match="0 tokens are computed, 0 opened and 40 known"):
        made.step()


def test_a_callback_that_raises_is_dropped_and_damages_nothing(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    made, clean = (tiny.engine(tiny.config(folders("llama", 4), output_limit=20)) for _ in range(2))
    prompts = [Prompt(tokens=tiny.tokens(20, 1), id="a"), Prompt(tokens=tiny.tokens(21, 2), id="b")]
    heard: list[int] = []

    def gone(token: int) -> None:
        heard.append(token)
        if len(heard) == 3:
            raise ValueError("client gone")

    done = made.generate([replace(prompts[0], on_token=gone), prompts[1]])
    assert [c.token_ids for c in done] == [c.token_ids for c in clean.generate(prompts)]
    assert tuple(heard) == done[0].token_ids[:3]
    assert "on_token of request 'a' raised" in caplog.text
    made.cache.check()


@pytest.mark.parametrize("abort_at", [5, 6])
def test_an_abort_that_crosses_the_end_of_its_request_does_not_meet_the_next_one(
    engine: Engine, abort_at: int
) -> None:
    heard: list[bool] = []

    def on_token(token: int) -> None:
        heard.append(len(heard) + 1 == abort_at and engine.abort("x"))

    engine.submit(Prompt(tokens=tiny.tokens(20, 1), id="x", output_limit=6, on_token=on_token))
    first = [c for _ in range(8) for c in engine.step()]
    assert [c.finish_reason for c in first] == ["aborted" if abort_at == 5 else "length"]
    engine.submit(Prompt(tokens=tiny.tokens(20, 2), id="x", output_limit=6))
    again = [c for _ in range(8) for c in engine.step()]
    assert [(c.id, c.finish_reason) for c in again] == [("x", "length")]


def test_one_message_ends_a_request_and_begins_another_with_its_id(engine: Engine) -> None:
    engine.submit(Prompt(tokens=tiny.tokens(40, 1), id="x", output_limit=30))
    for _ in range(5):
        engine.step()
    engine._turn(News(
        aborts=("x",), requests=(NewRequest(id="x", tokens=tiny.tokens(20, 2), output_limit=3),),
    ))  # fmt: skip
    done = [c for _ in range(8) for c in engine.step()]
    assert [(c.finish_reason, c.prompt_tokens) for c in done] == [("aborted", 40), ("length", 20)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("output_limit", 1.5), ("output_limit", True), ("output_limit", "4"), ("priority", None), ("priority", 0.5),
        ("id", 7), ("id", b"x"), ("conversation", ("user", 1)), ("salt", 5), ("adapter", "lora"), ("read", 1),
        ("adapter.generation", Adapter("lora", 1.5)), ("adapter", Adapter(7)), ("write", None), ("on_token", 3),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_type_is_named_at_once(engine: Engine, field: str, value: Any) -> None:
    with pytest.raises(PromptError, match=f"{field} must be"):
        engine.submit(Prompt(tokens=[5, 6], **{field.partition(".")[0]: value}))
    assert not engine.busy
    assert engine.generate([Prompt(tokens=[5, 6], id="r1")])[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([[1], [2, 3]], "a list of token ids: "), (["a"], "whole numbers"), (None, "not None"),
        ([None], "whole numbers"), (5, "not 5"), ("abc", "not 'abc'"), ([[1]], r"not an array of shape \[1, 1\]"),
    ],
)  # fmt: skip
def test_tokens_of_the_wrong_type_are_a_prompt_error(engine: Engine, tokens: Any, words: str) -> None:
    with pytest.raises(PromptError, match=f"prompt must be .*{words}"):
        engine.submit(Prompt(tokens=tokens))


@pytest.mark.parametrize("end", [Engine.shutdown, Engine.close])
def test_nothing_is_taken_after_the_end(engine: Engine, end: Callable[[Engine], None]) -> None:
    end(engine)
    for call in (lambda: engine.submit(Prompt(tokens=[5, 6])), lambda: engine.bump("2"), engine.step):
        with pytest.raises(DistKVError, match="was shut down"):
            call()
    assert not engine.busy


def numpy_case(rank: int, world_size: int, folder: Path) -> list[tuple[int, ...]]:
    engine = tiny.engine(tiny.config(folder, tp=world_size))
    if rank:
        engine.follow()
        return []
    fields: dict[str, Any] = {"output_limit": np.int64(4), "priority": np.int64(4), "read": np.bool_(True)}
    done = engine.generate([Prompt(tokens=tiny.tokens(20, 1), adapter=Adapter("a", np.int64(1)), **fields)])  # type: ignore[arg-type]
    engine.shutdown()
    return [c.token_ids for c in done]


def test_numbers_of_numpy_travel_as_plain_ones(folders: Folders) -> None:
    assert len(run_ranks(numpy_case, 2, (folders("llama", 4),), timeout_s=240.0)[0][0]) == 4


def test_a_message_that_cannot_be_encoded_loses_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.submit(Prompt(tokens=[5, 6], id="a"))
    monkeypatch.setattr(News, "encode", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    assert [c.id for _ in range(6) for c in engine.step()] == ["a"]


def groups_case(rank: int, world_size: int, folder: Path) -> list[str]:
    group, handoff_group, cache_group = make_groups(world_size, 20.0)
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    settings = tiny.config(folder, tp=world_size)
    model = load_model(settings.model, group)
    right: dict[str, Any] = {"cache_group": cache_group, "handoff_group": handoff_group}
    refused = []
    for wrong in ({"cache_group": None}, {"cache_group": TorchGroup(alone)}, {"handoff_group": alone}):
        with pytest.raises(ModelError) as caught:
            Engine(settings, model, **{**right, **wrong})
        refused.append(str(caught.value))
    return refused


def test_groups_that_are_not_the_models_are_refused(folders: Folders) -> None:
    for rank, refused in enumerate(run_ranks(groups_case, 2, (folders("llama", 4),), timeout_s=240.0)):
        for message, name in zip(refused, ("cache_group", "cache_group", "handoff_group"), strict=True):
            assert f"rank {rank} of the 2 that compute the model, but rank 0 of 1 in {name}" in message
