"""The orders of a step: plain, with the ballot in flight during the batch, with batches run ahead, and in lockstep."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from distkv.books import Books
from distkv.engine import gate
from distkv.engine.config import ServeConfig
from distkv.engine.engine import Engine
from distkv.engine.model import load_model
from distkv.engine.requests import Prompt
from distkv.errors import GroupMismatch, ModelError
from distkv.group import SoloGroup, Ticket
from distkv.testing.processes import run_ranks
from distkv.torch_group import TorchGroup
from tests.engine import tiny

Folders = Callable[[str, int], Path]
MODES = ("plain", "overlap", "asynchronous", "asynchronous in lockstep")


def settings_of(mode: str, folder: Path, **more: Any) -> ServeConfig:
    settings = tiny.config(folder, overlap=mode == "overlap", **more)
    agreement = "lockstep" if "lockstep" in mode else "minimum"
    return replace(settings, cache=replace(settings.cache, asynchronous="asynchronous" in mode, agreement=agreement,
                                           check_every=4))


PREFIX = tiny.tokens(40, 1)
PROMPTS = [np.concatenate([PREFIX[: 8 * (i % 6)], tiny.tokens(5 + 7 * i % 60, 10 + i)]) for i in range(10)]


def answers(engine: Engine) -> dict[str, tuple[tuple[int, ...], str]]:
    """Requests that come in the middle, wait for room, end at a stop token, and are aborted: tokens and why they ended.
    """
    done = {}
    for i, prompt in enumerate(PROMPTS):
        engine.submit(Prompt(tokens=prompt, id=str(i), output_limit=3 + i % 9))
        done |= {c.id: c for c in engine.step()}
        if i % 5 == 4:
            engine.abort(str(i - 1))
    while engine.busy:
        done |= {c.id: c for c in engine.step()}
    return {name: (c.token_ids if c.finish_reason != "aborted" else (), c.finish_reason) for name, c in done.items()}


def test_a_prompt_that_wants_no_answer_is_computed_and_found_by_the_next(folders: Folders) -> None:
    for mode in ("plain", "asynchronous"):
        engine = tiny.engine(settings_of(mode, folders("llama", 4)))
        asked = [Prompt(tokens=PREFIX, output_limit=0), Prompt(tokens=PREFIX[:3], output_limit=4)]
        warm, other = engine.generate(asked)
        assert (warm.token_ids, warm.finish_reason, warm.ttft_s, warm.steps) == ((), "length", None, 3), mode
        assert len(other.token_ids) == 4
        assert engine.generate([Prompt(tokens=PREFIX, output_limit=2)])[0].cached_tokens == 32, mode
        again = engine.generate([Prompt(tokens=PREFIX, output_limit=0)])[0]
        assert (again.cached_tokens, again.steps) == (32, 1), mode
        engine.step()
        engine.cache.check()
        assert engine.cache.stats().pages_live == 0, mode
        engine.close()


def test_every_order_gives_the_same_answers_and_keeps_the_bits(folders: Folders) -> None:
    free = answers(tiny.engine(settings_of("plain", folders("llama", 4))))
    seen = []
    for mode in MODES:
        engine = tiny.engine(settings_of(mode, folders("llama", 4), pages=14))
        engine.model.stop_ids = frozenset(free[name][0][2] for name in ("1", "6", "7"))
        seen.append(answers(engine))
        stats = engine.cache.stats()
        assert stats.cached_tokens > 0, mode
        assert stats.evicted > 0, mode
        assert engine.recording is not None
        if mode == "asynchronous":
            assert gate.check(engine.model, engine.recording, continued=True).differences == ()
        engine.step()  # what was launched ahead of an end lands
        stats = engine.cache.stats()
        assert (stats.pages_live, stats.pages_reserved) == (0, 0), mode
        engine.close()
    assert {reason for _, reason in seen[0].values()} == {"stop", "length", "aborted"}
    ended = [{name for name, (_, reason) in run.items() if reason == "aborted"} for run in seen]
    for run, aborted in zip(seen[1:], ended[1:], strict=True):
        for name in run.keys() - aborted - ended[0]:  # an abort may come before or after the end
            assert run[name] == seen[0][name]
        assert len(run) == len(PROMPTS)


class Logged(SoloGroup):
    """Writes down when a collective begins and when it is waited for."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def start(self, vector: np.ndarray, step: int) -> Ticket:
        self.events.append("start")
        behind = super().start(vector, step)
        events = self.events

        class Waited(Ticket):
            def wait(self) -> np.ndarray:
                events.append("wait")
                return behind.wait()

        return Waited()


@pytest.mark.parametrize(("mode", "order"), [
    ("plain", ["start", "wait", "forward"]), ("overlap", ["start", "forward", "wait"]),
])
def test_the_model_computes_while_the_ballot_is_in_flight(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, mode: str, order: list[str]
) -> None:
    events: list[str] = []
    settings = settings_of(mode, folders("llama", 4))
    engine = Engine(settings, load_model(settings.model), cache_group=Logged(events))
    forward = engine.model.forward
    monkeypatch.setattr(engine.model, "forward", lambda *given: (events.append("forward"), forward(*given))[1])
    engine.submit(Prompt(tokens=tiny.tokens(20, 1), id="first", output_limit=9))
    engine.step()
    assert events == ["start", "wait", "forward"], "what comes alone is not kept waiting for the next step"
    for i in range(3):
        events.clear()
        engine.submit(Prompt(tokens=tiny.tokens(20, 2 + i), output_limit=2))
        engine.step()
        assert events == order
    while engine.busy:
        events.clear()
        engine.step()
        assert events.count("start") == events.count("wait") <= 1


def pages_in_flight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], set[int]]:
    """A request is aborted while its pass is in flight, and another one opens pages: those of the pass, and those."""
    engine = tiny.engine(settings_of("asynchronous", folder, pages=16))
    forward, goes_on = engine.model.forward, threading.Event()

    def held_up(*given: Any) -> Any:
        assert goes_on.wait(60)
        return forward(*given)

    monkeypatch.setattr(engine.model, "forward", held_up)
    work, found = engine._work, []
    land = work.land

    def look(leave: int = 0) -> None:
        if len(work.flights) == 2 and not found:
            assert not goes_on.is_set(), "the first pass is in flight"
            found.extend(set(np.concatenate(flight.tables).tolist()) for flight in work.flights)
            goes_on.set()
        land(leave)

    monkeypatch.setattr(work, "land", look)
    engine.submit(Prompt(tokens=tiny.tokens(70, 1), id="gone"))
    engine.step()
    engine.abort("gone")
    engine.submit(Prompt(tokens=tiny.tokens(70, 2), id="next"))
    ended = {c.id: c.finish_reason for _ in range(12) for c in engine.step()}
    assert ended == {"gone": "aborted", "next": "length"}
    engine.close()
    return found[0], found[1]


def test_pages_of_a_pass_in_flight_are_nobodys_until_it_has_landed(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pages_in_flight(folders("llama", 4), monkeypatch)
    assert first.isdisjoint(second)

    def release(self: Books, pages: np.ndarray, reserved: int, *_: object) -> None:
        self.reserved -= reserved
        self.free(pages)

    monkeypatch.setattr(Books, "release", release)
    first, second = pages_in_flight(folders("llama", 4), monkeypatch)
    assert not first.isdisjoint(second), "freed at once, they are taken at once"


def test_one_name_for_two_requests_in_flight(folders: Folders) -> None:
    engine = tiny.engine(settings_of("asynchronous", folders("llama", 4)))
    done = []
    engine.generate([Prompt(tokens=PREFIX, output_limit=1)])
    for i in range(4):
        engine.submit(Prompt(tokens=np.concatenate([PREFIX, tiny.tokens(9 + i, i)]), id="x", output_limit=6))
        done += [c.finish_reason for _ in range(3) for c in engine.step()]
        engine.abort("x")
        done += [c.finish_reason for c in engine.step()]
    while engine.busy:
        done += [c.finish_reason for c in engine.step()]
    assert done == ["aborted"] * 4
    engine.generate([Prompt(tokens=PREFIX, id="x")])
    assert engine.recording is not None
    assert gate.check(engine.model, engine.recording).differences == ()
    engine.close()


def test_an_exception_of_a_pass_run_ahead_breaks_the_engine(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.engine(settings_of("asynchronous", folders("llama", 4)))
    engine.submit(Prompt(tokens=tiny.tokens(40, 1), output_limit=30))
    engine.step()
    monkeypatch.setattr("distkv.engine.batch.choose", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate([Prompt(tokens=tiny.tokens(40, 2))])
    engine.close()
    assert engine.cache.stats().entries == 0


# ---- real ranks


def ranks_case(rank: int, world_size: int, folder: Path) -> list[tuple[dict[str, Any], list[int]]]:
    out = []
    model = load_model(settings_of("plain", folder, tp=world_size).model, dist.group.WORLD)
    for mode in MODES:
        handoff, ballots = dist.new_group(), TorchGroup(dist.new_group())
        engine = Engine(settings_of(mode, folder, tp=world_size, pages=14), model, cache_group=ballots,
                        handoff_group=handoff)
        if rank == 0:
            found = answers(engine)
            engine.shutdown()
        else:
            found = {}
            engine.follow()
        stats = engine.cache.stats()
        out.append((found, [stats.steps, stats.requests, stats.cached_tokens, stats.collectives]))
        engine.close()
        ballots.exchange(b"")
        ballots.close()
    with pytest.raises(ModelError, match="give handoff_group"):
        Engine(settings_of("asynchronous", folder, tp=world_size), model, cache_group=TorchGroup(dist.new_group()))
    with pytest.raises(GroupMismatch, match=r"engine\.batch_invariant"):  # before one of them begins with its self-test
        Engine(settings_of("plain", folder, tp=world_size, batch_invariant=rank == 0), model,
               cache_group=TorchGroup(dist.new_group()))
    return out


def test_every_order_on_two_ranks(folders: Folders) -> None:
    leader, follower = run_ranks(ranks_case, 2, (folders("llama", 4),), timeout_s=400.0)
    plain = leader[0][0]
    for mode, (found, counts), (_, others) in zip(MODES, leader, follower, strict=True):
        assert counts == others, mode
        assert counts[2] > 0, mode
        for name in plain:
            if "aborted" not in (plain[name][1], found[name][1]):
                assert found[name] == plain[name], mode
    minimum, lockstep = leader[0][1][3], leader[3][1][3]
    assert lockstep == leader[3][1][0] // 4, "a digest every four steps and nothing else"
    assert minimum > 0
