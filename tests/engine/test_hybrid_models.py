"""Which models with sliding windows are served, how they attend, and what of their settings is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distkv.config import HostConfig, from_mapping
from distkv.engine import verify
from distkv.engine.config import ModelConfig, ServeConfig, WindowConfig
from distkv.engine.engine import Engine
from distkv.engine.invariant import enable
from distkv.engine.invariant_case import differences, random_case
from distkv.engine.model import load_model
from distkv.engine.served import check_whole
from distkv.errors import ConfigError, ModelError, SequenceError
from distkv.inspection.doctor import problems
from distkv.inspection.machine import Machine
from distkv.inspection.plan import make_plan
from distkv.inspection.shape import read_shape
from distkv.label_config import LabelConfig
from tests.engine import hybrid, tiny
from tests.engine.hybrid import WIDE, Folders, ask, check_bits, edited

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
def test_one_pass_has_the_bits_of_transformers_own_attention(hybrids: Folders, kind: str, dtype: str) -> None:
    model, tokens = load_model(ModelConfig(source=str(hybrids(kind)), dtype=dtype)), tiny.tokens(150, 1)
    assert torch.equal(hybrid.alone(model, tokens)[0], stock(hybrids(kind), model.dtype, tokens, "sdpa"))
    assert model.windows is not None
    assert model.windows.layers == ((0, 1, 2) if kind == "mistral" else (0, 2))


def test_sinks_are_part_of_the_softmax(hybrids: Folders) -> None:
    model, tokens = load_model(ModelConfig(source=str(hybrids("gpt_oss")))), tiny.tokens(150, 1)
    ours, wanted = hybrid.alone(model, tokens)[0], stock(hybrids("gpt_oss"), model.dtype, tokens, "eager")
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)
    model.module.model.layers[1].self_attn.sinks.data += 1.0
    assert (hybrid.alone(model, tokens)[0] - wanted).abs().max() > 0.01


def test_the_window_is_that_of_transformers_to_the_token(hybrids: Folders) -> None:
    model, tokens = load_model(ModelConfig(source=str(hybrids("qwen3")))), tiny.tokens(60, 1)
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
def test_random_schedules_give_the_bits_of_single_passes(hybrids: Folders, dtype: str) -> None:
    """Windows that begin and end in other blocks of keys, too, behind 512 and 1,024 tokens."""
    model = load_model(ModelConfig(source=str(hybrids("gemma3")), dtype=dtype))
    enable(model)
    for seed in range(4):
        case = random_case(np.random.default_rng(seed), vocab=tiny.VOCAB, page_size=16, longest=1200, sequences=2)
        assert differences(model, case) == []


# ---- other kinds of models


def test_a_model_whose_every_layer_slides_has_one_pool(hybrids: Folders) -> None:
    made = tiny.engine(hybrid.config(hybrids("mistral"), batch_invariant=True))
    assert list(made.pools) == list(made.cache.labels) == ["main"]
    tokens = tiny.tokens(120, 1)
    assert ask(made, tokens, "cold")[0] == 0
    assert ask(made, edited(tokens, 70), "warm")[0] == 64, "all of it is there, so it may go on from anywhere"
    assert check_bits(made) == 12


def test_a_model_with_experts_and_sinks_is_served_on_one_rank(hybrids: Folders) -> None:
    """Its experts are not batch-invariant; requests one after the other are cut alike, and so have the same bits."""
    settings = hybrid.config(hybrids("gpt_oss"), window=WIDE)
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
        hybrid.engine(hybrid.config(hybrids("gpt_oss"), batch_invariant=True))
    with pytest.raises(ModelError, match=r"a gpt_oss model has 4 experts in a layer, which cannot be split over ranks"):
        check_whole(AutoConfig.from_pretrained(hybrids("gpt_oss")), 2)


# ---- settings


def test_settings_that_contradict_the_model_or_each_other(hybrids: Folders) -> None:
    model = load_model(ModelConfig(source=str(hybrids("gemma3"))))

    def refused(match: str, **changed: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            Engine(replace(hybrid.config(hybrids("gemma3")), **changed), model)

    refused(r"window\.pages: is 5, and one request takes up to 7: the window of 40 tokens, 31 behind it",
            window=WindowConfig(pages=5, allowance_tokens=31))  # fmt: skip
    refused(r"labels: are made by the engine", labels=(LabelConfig(name="window", kind="sliding", window_tokens=64),))
    refused(r"window\.host_pages: is missing: the size of the host tier is given", host=HostConfig(gib_per_rank=1))
    refused(r"window\.pages: needs .* GiB on this rank", window=WindowConfig(pages=1 << 30))
    with pytest.raises(ConfigError, match=r"window\.allowance_tokens: must be at least cache\.page_size - 1, which is"):
        hybrid.config(hybrids("gemma3"), window=WindowConfig(allowance_tokens=14))
    with pytest.raises(ConfigError, match=r"window\.page: .*pages"):
        from_mapping({"window": {"page": 3}}, ServeConfig, source="x.yaml")


def test_the_plan_has_the_bytes_of_both_pools(hybrids: Folders) -> None:
    window = WindowConfig(pages=12, host_pages=3)
    settings = hybrid.config(hybrids("gemma3"), pages=20, window=window, host=HostConfig(pages=7))
    plan, made = make_plan(settings, read_shape(str(hybrids("gemma3"))), memory=1 << 30), hybrid.engine(settings)
    assert plan.window is not None
    assert plan.pool_per_rank == made.pool.data.nbytes
    assert plan.window.per_rank == made.pools["window"].data.nbytes
    assert plan.window.host_per_rank == 3 * made.pools["window"].bytes_per_page()
    assert plan.host is not None
    assert plan.host.per_rank == 7 * made.pool.bytes_per_page()
    assert plan.window.allowance_tokens == 32, "prompts of 128 pages are matched at every second one"
    assert plan.window.pages_of_a_request == 7
    for wrong, text in ((replace(settings, window=WindowConfig(pages=3)), "window.pages"),
                        (hybrid.config(hybrids("gpt_oss"), tp=2), "model")):  # fmt: skip
        assert [problem.field for problem in problems(wrong, Machine()) if not problem.warning] == [text]


def test_verify_compares_both_pools_where_the_bits_are_certain(
    hybrids: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"""
        model: {{source: {hybrids("gemma3-small")}, device: cpu}}
        cache: {{page_size: 16, index_on: fill}}
        pool: {{pages: 60}}
        host: {{pages: 60, preemption_pages: 12}}
        engine: {{batch_invariant: true, batch_tokens: 64, output_limit: 8, reserve_tokens: 4}}
    """
    path = tmp_path / "hybrid.yaml"
    path.write_text(text)
    assert verify.main([str(path), "--random", "--schedules", "2"]) == 0
    assert "same bits: 3 runs (1 in order, 2 under random schedules)" in capsys.readouterr().out
    path.write_text(text.replace("batch_invariant: true", "batch_invariant: false"))
    assert verify.main([str(path), "--random"]) == 2
    found = capsys.readouterr()
    assert "engine.batch_invariant: is false, and this model has layers with a sliding window" in found.out + found.err


def test_what_a_window_has_given_up_cannot_be_read(hybrids: Folders) -> None:
    pool = load_model(ModelConfig(source=str(hybrids("gemma3")))).pool(4, 16)
    table = torch.tensor([2, 0])
    assert len(pool.gather_between(0, table, 3, 50, 70)[0]) == 20
    for start, stop in ((47, 70), (50, 81)):
        with pytest.raises(SequenceError, match="the page table has the pages from 3 to 4, of 16 tokens each"):
            pool.gather_between(0, table, 3, start, stop)
