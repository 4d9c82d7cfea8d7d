"""Families of models: the logits of transformers' own attention, cold and warm the same bits, whole and split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distkv.engine.config import ModelConfig
from distkv.engine.engine import Engine
from distkv.engine.model import load_model
from distkv.engine.requests import Prompt
from distkv.engine.served import check_norms
from distkv.engine.tensor_parallel import check_mesh
from distkv.errors import ModelError
from distkv.testing.processes import run_ranks
from tests.engine import tiny
from tests.engine.test_model import single_pass, stock

Folders = Callable[[str, int], Path]
SCATTERED = np.array([7, 2, 11, 3, 0])
KV_HEADS = {"llama": 4, "qwen3": 12, "gemma": 4, "qwen2": 4, "mistral": 4}
HOT: dict[str, Any] = {"temperature": 1.4, "top_p": 0.95, "seed": 5, "output_limit": 8}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gemma", "qwen2", "mistral"])
def test_one_pass_has_the_bits_of_transformers_own_attention(folders: Folders, kind: str, dtype: str) -> None:
    folder = folders(kind, KV_HEADS[kind])
    model = load_model(ModelConfig(source=str(folder), dtype=dtype))
    assert torch.equal(single_pass(model, SCATTERED), stock(folder, model.dtype))


def serve(made: Engine) -> dict[str, tuple[int, ...]]:
    """One sampled request alone and cold, alone and warm, and among others that share its prefix; rank 0's requests."""
    prompt = tiny.tokens(70, 1)
    ask = {name: Prompt(tokens=prompt, id=name, **HOT) for name in ("cold", "warm", "among")}
    answers = {name: made.generate([ask[name]])[0].token_ids for name in ("cold", "warm")}
    mixed = [(np.concatenate([prompt[:n], tiny.tokens(n, n)]), n) for n in (21, 50, 33)]
    others = [Prompt(tokens=tokens, **{**HOT, "seed": seed}) for tokens, seed in mixed]
    answers["among"] = made.generate([*others, ask["among"]])[3].token_ids
    return answers


def check_bits(made: Engine) -> None:
    """The three have the same logits and the same keys and values, on this rank."""
    assert made.recording is not None
    cold, warm, among = (made.recording.requests[name] for name in ("cold", "warm", "among"))
    assert (cold.cached_tokens, warm.cached_tokens, among.cached_tokens) == (0, 64, 64)
    assert cold.kv is not None
    assert len(cold.logits) > 1
    for other in (warm, among):
        assert other.logits == cold.logits
        assert np.array_equal(other.kv, cold.kv)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
def test_a_sampled_answer_is_the_same_alone_among_others_cold_and_warm(folders: Folders, kind: str) -> None:
    made = tiny.engine(tiny.config(folders(kind, KV_HEADS[kind]), batch_invariant=True, chunk_tokens=8))
    answers = serve(made)
    check_bits(made)
    assert answers["cold"] == answers["warm"] == answers["among"]
    greedy = made.generate([Prompt(tokens=tiny.tokens(70, 1), output_limit=12)])[0].token_ids
    assert greedy != answers["cold"]


def split_case(rank: int, world_size: int, folders: list[Path]) -> list[tuple[torch.Tensor, list[tuple[int, ...]]]]:
    found = []
    for folder in folders:
        model = load_model(ModelConfig(source=str(folder)), dist.group.WORLD)
        logits = single_pass(model, SCATTERED)
        made = tiny.engine(tiny.config(folder, tp=world_size, batch_invariant=True))
        if rank == 0:
            answers = serve(made)
            assert answers["cold"] == answers["warm"] == answers["among"]
            made.shutdown()
        else:
            made.follow()
        check_bits(made)
        assert made.recording is not None
        found.append((logits, [tuple(r.tokens.tolist()) for r in made.recording.requests.values()]))
    return found


def test_every_family_on_two_ranks(folders: Folders) -> None:
    paths = [folders(kind, KV_HEADS[kind]) for kind in ("llama", "qwen3", "gemma", "qwen2")]
    for path, first, second in zip(paths, *run_ranks(split_case, 2, (paths,), timeout_s=240.0), strict=True):
        assert torch.equal(first[0], second[0])
        torch.testing.assert_close(first[0], stock(path, torch.float32), atol=1e-4, rtol=1e-4)
        assert first[1] == second[1], "every rank drew the same tokens"


REFUSED = {
    "Llama": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type dynamic"),
    "Mistral": ({"sliding_window": 0}, "mistral model with sliding_window 0"),
    "Gemma2": ({}, r"gemma2 model with attn_logit_softcapping 50\.0 cannot be served"),
    "Gemma3Text": ({"sliding_window": None}, "gemma3_text model with sliding_window None cannot be served"),
    "Llama4Text": ({}, "llama4_text model with layer_types chunked_attention"),
    "Gemma4Text": ({"num_hidden_layers": 12}, "gemma4_text model is not served: its layers differ in .*head_dim"),
    "DeepseekV3": ({}, "deepseek_v3 model is not served yet: its keys are 192 wide and its values 128"),
    "Gemma": ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_is_not_plain_is_refused_when_the_model_is_loaded(tmp_path: Path, name: str) -> None:
    import transformers

    given, words = REFUSED[name]
    getattr(transformers, f"{name}Config")(**given).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=words):
        load_model(ModelConfig(source=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("Qwen3Moe", {"num_experts": 2, "moe_intermediate_size": 8},
         "a qwen3_moe model is not served: it stores weights under other names than it computes with"),
        ("GPTNeoX", {}, r"a gpt_neox model is not served: .*\(embed_out\.weight, but nothing for lm_head\.weight\)"),
        ("Nemotron", {}, "a model with NemotronAttention is not served: its layers do not hand"),
    ],
)  # fmt: skip
def test_a_kind_that_is_not_served_says_so(tmp_path: Path, name: str, given: dict[str, Any], words: str) -> None:
    import transformers

    settings = getattr(transformers, f"{name}Config")(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, **given,
    )  # fmt: skip
    getattr(transformers, f"{name}ForCausalLM")(settings).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=words):
        single_pass(load_model(ModelConfig(source=str(tmp_path))), SCATTERED)


def test_what_the_configuration_does_not_say_is_refused_by_the_attention(folders: Folders) -> None:
    model = load_model(ModelConfig(source=str(folders("gemma", 4))))
    model.module.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ModelError, match="GemmaAttention asks for attention in both directions"):
        single_pass(model, SCATTERED)


def test_what_cannot_be_split_is_named(folders: Folders, tmp_path: Path) -> None:
    from transformers import AutoConfig, Olmo2Config, Olmo2ForCausalLM

    folder = folders("gemma", 1)  # as the 2B
    model = load_model(ModelConfig(source=str(folder)))
    assert torch.equal(single_pass(model, SCATTERED), stock(folder, torch.float32))
    with pytest.raises(ModelError, match=r"parallel\.tp 2 does not .* 1 KV heads, MLP width 192\); allowed tp x sp: 1"):
        check_mesh(AutoConfig.from_pretrained(folder), 2)
    wide = Olmo2Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(ModelError, match=r"self_attn\.q_norm covers 32 elements, more than a head's 8"):
        check_norms(Olmo2ForCausalLM(wide))
    check_norms(load_model(ModelConfig(source=str(folders("qwen3", 4)))).module)


def test_gemma_keeps_what_is_its_own(folders: Folders) -> None:
    """What makes it another family than Llama is in the model that the tests run."""
    folder = folders("gemma", 4)
    settings = json.loads((folder / "config.json").read_text())
    assert settings["num_attention_heads"] * settings["head_dim"] != settings["hidden_size"]
    module = load_model(ModelConfig(source=str(folder))).module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert float(module.model.embed_tokens.embed_scale) == pytest.approx(96**0.5)
    assert type(module.model.layers[0].mlp.act_fn).__name__.startswith("GELU")
