"""Answers that grow beyond their room: who is suspended, that each goes on to the same end, and that all get on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distkv.config import HostConfig
from distkv.engine import gate
from distkv.engine.compare import compare
from distkv.engine.config import ServeConfig
from distkv.engine.engine import Engine
from distkv.engine.model import Model, load_model
from distkv.engine.page_check import check_cache
from distkv.engine.record import Recording
from distkv.engine.requests import Completion, Prompt
from distkv.engine.reserve import Reserve
from distkv.engine.state import Running
from distkv.engine.verification import expected_of
from distkv.errors import RequestTooLarge
from distkv.host import open as opening
from distkv.host.copies import Copy
from distkv.host.threads import ThreadedCopies
from tests.engine import tiny

Folders = Callable[[str, int], Path]
MODES = ("plain", "overlap", "asynchronous", "asynchronous in lockstep")
TIERS = {"no tier": HostConfig(), "a tier": HostConfig(pages=40, preemption_pages=20, skip_slow_loads=False),
         "a share of one page": HostConfig(pages=9, preemption_pages=1, skip_slow_loads=False)}  # fmt: skip
PROMPTS = [
    Prompt(tokens=tiny.tokens(10 + 9 * i, i), id=str(i), output_limit=40 + 4 * i, temperature=0.8 * (i % 2), seed=i)
    for i in range(5)
]  # fmt: skip
LARGEST = 7
"""Pages of the largest of them."""


@pytest.fixture(scope="module")
def model(folders: Folders) -> Model:
    return load_model(tiny.config(folders("llama", 4)).model)


def engine_of(model: Model, folder: Path, mode: str = "plain", *, host: HostConfig | None = None, pages: int = LARGEST,
              **engine: Any) -> Engine:  # fmt: skip
    settings: ServeConfig = tiny.config(folder, pages=pages, batch_invariant=True, overlap=mode == "overlap", **engine)
    cache = replace(settings.cache, asynchronous="asynchronous" in mode, check_every=4,
                    agreement="lockstep" if "lockstep" in mode else "minimum")
    made = Engine(replace(settings, cache=cache, host=host or HostConfig()), model)
    made.recording = Recording(made.pool)
    return made


@pytest.fixture(scope="module")
def cold(model: Model, folders: Folders) -> Engine:
    """The same requests with room for all of them at once, uncached; the engine and its recording."""
    made = engine_of(model, folders("llama", 4), pages=64, cache="off")
    made.generate(PROMPTS)
    return made


class Watched(Reserve):
    """Sees to it that the last come is suspended, that nobody is for ever, and that the first never is."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.cache, engine.config.engine.reserve_tokens)
        self.engine = engine
        self.at: dict[str, list[int]] = {}
        """Of each request: how many tokens all requests together had each time that it was suspended."""

    def suspend(self, running: Running) -> Running:
        name, others = running.sequence.id, list(self.engine._work.running)
        assert others, "it is not alone"
        assert int(name) > max(map(int, others)), "last come, first out"
        known = sum(r.known for r in [running, *self.engine._work.running.values(), *self._suspended()])
        self.at.setdefault(name, []).append(known)
        return super().suspend(running)

    def _suspended(self) -> list[Running]:
        return list(self.engine._work.suspended.values())


def ended_well(engine: Engine) -> None:
    """Nothing is left of any request, and the books are right."""
    engine.step()  # what was launched ahead of an end lands
    engine.cache.settle()
    engine.cache.check()
    stats = engine.cache.stats()
    assert (stats.pages_live, stats.pages_reserved, stats.host_kept) == (0, 0, 0)
    assert not engine.cache.suspended
    assert not engine._work.suspended


@pytest.mark.parametrize(("mode", "tier"), [
    (mode, tier) for mode in MODES for tier in TIERS if not (TIERS[tier].configured and "lockstep" in mode)
])  # fmt: skip
def test_all_end_as_with_room_for_all(model: Model, folders: Folders, cold: Engine, mode: str, tier: str) -> None:
    """In a pool as large as the largest request, whoever is suspended has the tokens and the bits that it would have
    had, in every part, and is suspended again only after somebody has got on."""
    engine = engine_of(model, folders("llama", 4), mode, host=TIERS[tier], reserve_tokens=4)
    watched = engine._work._reserve = Watched(engine)
    done = engine.generate(PROMPTS)
    ended_well(engine)
    assert engine.recording is not None and cold.recording is not None
    wanted = {c: cold.recording.requests[c] for c in map(str, range(len(PROMPTS)))}
    assert [c.finish_reason for c in done] == ["length"] * len(PROMPTS)
    for c in done:
        assert list(c.token_ids) == wanted[c.id].tokens[c.prompt_tokens :].tolist()
        assert c.device_tokens + c.host_tokens + c.computed_tokens == c.prompt_tokens
        assert c.suspended == len(watched.at.get(c.id, ())) == len(engine.recording.parts(c.id)) - 1
    parts = {p: expected_of(engine.recording.requests[p], wanted[c]) for c in wanted for p in engine.recording.parts(c)}
    assert compare(engine.recording, parts).differences == ()
    stats = engine.cache.stats()
    assert stats.suspended == sum(map(len, watched.at.values())) >= 3
    for tokens in watched.at.values():
        assert len(set(tokens)) == len(tokens), "somebody got on between two suspensions"
    assert (stats.host_tokens > 0) == TIERS[tier].configured
    engine.close()


@pytest.mark.parametrize("mode", ["plain", "asynchronous"])
def test_parts_are_computed_again_in_their_batches(model: Model, folders: Folders, mode: str) -> None:
    """The gate follows pages to the host and back, and the parts of a request that was suspended."""
    engine = engine_of(model, folders("llama", 4), mode, host=TIERS["a tier"], reserve_tokens=4)
    engine.generate(PROMPTS)
    assert engine.recording is not None
    assert len(engine.recording.requests) >= len(PROMPTS) + 3
    report = gate.check(engine.model, engine.recording, continued=True)
    assert (report.differences, report.requests) == ((), len(engine.recording.requests))
    engine.close()


def test_what_could_never_grow_to_its_end_is_refused_at_once(model: Model, folders: Folders) -> None:
    engine = engine_of(model, folders("llama", 4), pages=6, reserve_tokens=4)
    large = Prompt(tokens=tiny.tokens(20, 1), output_limit=77)
    refused, fits = engine.generate([large, replace(large, output_limit=76)])
    assert isinstance(refused.error, RequestTooLarge)
    assert (refused.error.pages_needed, refused.error.pages_possible) == (7, 6)
    assert (len(fits.token_ids), fits.suspended) == (76, 0)
    ended_well(engine)
    engine.close()


def until(engine: Engine, holds: Callable[[], bool]) -> list[Completion]:
    done = []
    for _ in range(500):
        if holds():
            return done
        done += engine.step()
    raise AssertionError("it never came to that")


@pytest.mark.parametrize("mode", MODES[:3])
def test_an_abort_of_a_suspended_request_keeps_its_tokens(
    model: Model, folders: Folders, cold: Engine, mode: str
) -> None:
    engine = engine_of(model, folders("llama", 4), mode, host=TIERS["a tier"], reserve_tokens=4)
    for prompt in PROMPTS[:3]:
        engine.submit(prompt)
    until(engine, lambda: any(r.known > r.sequence.prompt_tokens for r in engine._work.suspended.values()))
    (name,) = engine._work.suspended
    known = engine._work.suspended[name].known
    assert engine.abort(name)
    done = {c.id: c for c in until(engine, lambda: not engine.busy)}
    assert [done[str(i)].finish_reason for i in range(3)].count("length") == 2
    aborted = done[name]
    assert (aborted.finish_reason, aborted.suspended) == ("aborted", 1)
    assert cold.recording is not None
    assert list(aborted.token_ids) == cold.recording.requests[name].tokens[aborted.prompt_tokens : known].tolist()
    ended_well(engine)
    engine.close()


@pytest.mark.parametrize("at", [1, 2, 5, 30])
def test_a_request_that_is_suspended_by_hand_goes_on(model: Model, folders: Folders, cold: Engine, at: int) -> None:
    """Before it is in, in the middle of its prompt, and of its answer."""
    engine = engine_of(model, folders("llama", 4), host=TIERS["a tier"], max_running=1)
    name = engine.submit(PROMPTS[3])
    engine.submit(PROMPTS[4])
    assert not engine.suspend("unknown")
    done = []
    for step in range(1, 200):
        if step == at:
            assert engine.suspend(name) == (step > 1), "it has to be handed on first"
            assert not engine.suspend(str(PROMPTS[4].id))
        done += engine.step()
    assert [c.id for c in done] == [name, PROMPTS[4].id]
    assert done[0].suspended == (at > 1)
    assert cold.recording is not None
    assert list(done[0].token_ids) == cold.recording.requests[name].tokens[done[0].prompt_tokens :].tolist()
    ended_well(engine)
    engine.close()


def test_new_weights_while_a_request_is_suspended(model: Model, folders: Folders) -> None:
    """It is computed again as a whole, and nothing of before is used."""
    engine = engine_of(model, folders("llama", 4), host=TIERS["a tier"], reserve_tokens=4)
    for prompt in PROMPTS[:3]:
        engine.submit(prompt)
    until(engine, lambda: bool(engine._work.suspended))
    engine.bump("2")
    done = until(engine, lambda: not engine.busy)
    assert [c.finish_reason for c in done] == ["length"] * 3
    assert engine.recording is not None
    ended_well(engine)
    engine.close()


def test_only_prompts_tell_what_computing_a_token_takes(model: Model, folders: Folders) -> None:
    """Less than a page says nothing about pages, and answers say nothing about prompts."""
    engine = engine_of(model, folders("llama", 4), host=TIERS["a tier"])
    told: list[int] = []
    engine.cache.prefill_took = lambda tokens, seconds: told.append(tokens)  # type: ignore[method-assign]
    engine.generate([Prompt(tokens=tiny.tokens(15, 1), output_limit=20)])
    assert told == []
    engine.generate([Prompt(tokens=tiny.tokens(40, 2), output_limit=20)])
    assert sum(told) == 32, "two pieces of a page, and not the last one"
    engine.close()


class Unreliable(ThreadedCopies):
    """Some copies fail."""

    random = random.Random(0)

    def _move(self, copy: Copy) -> None:
        if self.random.random() < 0.2:
            raise OSError("planted")
        super()._move(copy)


@pytest.mark.parametrize("seed", range(4))
def test_all_end_under_any_pressure(
    model: Model, folders: Folders, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random requests, in a pool that has place for the largest, with a tier of any size whose copies fail now and
    then, and suspended at random as well."""
    monkeypatch.setattr(opening, "ThreadedCopies", Unreliable)
    rng, mode = random.Random(seed), MODES[seed % 3]
    stem = tiny.tokens(rng.randint(20, 60), seed)
    prompts = [
        Prompt(tokens=np.concatenate([stem, tiny.tokens(rng.randint(1, 60), 100 * seed + i)]), id=str(i), seed=i,
               output_limit=rng.randint(0, 40), temperature=rng.choice([0, 0.8]), write=rng.random() < 0.9)
        for i in range(5)
    ]  # fmt: skip
    largest = max(-(-(len(prompt.tokens) + (prompt.output_limit or 0)) // tiny.PAGE) for prompt in prompts)
    uncached = engine_of(model, folders("llama", 4), pages=100, cache="off")
    wanted = {c.id: c.token_ids for c in uncached.generate(prompts)}
    tier = HostConfig(pages=rng.randint(4, 30), preemption_pages=rng.randint(0, 3), prefetch=rng.random() < 0.5)
    engine = engine_of(model, folders("llama", 4), mode, host=tier, pages=largest + rng.randint(0, 2),
                       reserve_tokens=rng.choice([1, 3, 8]))  # fmt: skip
    for prompt in prompts:
        engine.submit(prompt)
    done = {}
    for _ in range(3000):
        running = list(engine.cache.running)
        if running and rng.random() < 0.03:
            engine.suspend(rng.choice(running))
        done |= {c.id: c for c in engine.step()}
        if not engine.busy:
            break
    assert {name: c.token_ids for name, c in done.items()} == wanted
    ended_well(engine)
    assert check_cache(engine.model, engine.cache, engine.pool).differences == ()
    assert engine.cache.stats().suspended
    engine.close()
