"""Models: the bits of transformers' own attention, slices that add up, and an error for what cannot be served."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distkv.engine.attention import Batch
from distkv.engine.config import ModelConfig
from distkv.engine.engine import Engine
from distkv.engine.model import Model, load_model, load_tokenizer
from distkv.engine.tensor_parallel import _sum
from distkv.errors import ConfigError, GroupTimeout, ModelError
from distkv.testing.processes import run_ranks
from tests.engine import tiny

Folders = Callable[[str, int], Path]
N = 75


def single_pass(model: Model, pages: np.ndarray) -> torch.Tensor:
    """Logits of every position of one prompt that lies on ``pages``."""
    at = np.arange(N)
    slots = pages[at // tiny.PAGE] * tiny.PAGE + at % tiny.PAGE
    batch = Batch.build(model.pool(16, tiny.PAGE), [(tiny.tokens(N, 1), 0, slots, pages)], model.dtype)
    return model.forward(batch, list(range(N)))


def stock(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.from_numpy(tiny.tokens(N, 1)).long()[None], use_cache=False).logits
    return logits[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_one_pass_has_the_bits_of_transformers_own_attention(folders: Folders, kind: str, dtype: str) -> None:
    folder = folders(kind, 4)
    model = load_model(ModelConfig(source=str(folder), dtype=dtype))
    scattered = np.array([7, 2, 11, 3, 0])
    assert torch.equal(single_pass(model, scattered), stock(folder, model.dtype))


def slices_case(rank: int, world_size: int, folder: Path) -> tuple[torch.Tensor, tuple[int, ...], int]:
    import torch.distributed as dist

    model = load_model(ModelConfig(source=str(folder)), dist.group.WORLD)
    kept = sum(p.numel() for p in model.module.parameters())
    return single_pass(model, np.arange(5)), tuple(model.pool(3, tiny.PAGE).data.shape), kept


def test_slices_of_a_model_add_up_and_a_rank_keeps_no_more(folders: Folders) -> None:
    folder = folders("qwen3", 4)
    results = run_ranks(slices_case, 2, (folder,), timeout_s=240.0)
    assert torch.equal(results[0][0], results[1][0]), "every rank has the same bits"
    torch.testing.assert_close(results[0][0], stock(folder, torch.float32), atol=1e-4, rtol=1e-4)
    assert results[0][1] == (2, 2, 3, tiny.PAGE, 2, 8)
    split = 2 * (2 * 96 * 96 + 2 * 32 * 96 + 3 * 192 * 96)
    whole = sum(p.numel() for p in load_model(ModelConfig(source=str(folder))).module.parameters())
    assert results[0][2] == whole - split // 2


def degree_case(rank: int, world_size: int, folder: Path) -> str:
    import torch.distributed as dist

    with pytest.raises(ModelError) as caught:
        load_model(ModelConfig(source=str(folder)), dist.group.WORLD)
    return str(caught.value)


def test_a_degree_that_does_not_divide_names_those_that_do(folders: Folders) -> None:
    for message in run_ranks(degree_case, 3, (folders("qwen3", 4),), timeout_s=240.0):
        assert message == (
            "parallel.tp 3 does not divide this model (12 heads, 4 KV heads, MLP width 192); "
            "allowed tp x sp: 1x1, 1x2, 1x4, 2x1, 2x2, 4x1"
        )


def edited(folder: Path, to: Path, **changes: Any) -> Path:
    shutil.copytree(folder, to)
    settings = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**settings, **changes}))
    return to


def test_what_is_no_model_is_named(folders: Folders, tmp_path: Path) -> None:
    folder = folders("llama", 4)

    def error(source: Path | str) -> str:
        with pytest.raises(ModelError) as caught:
            load_model(ModelConfig(source=str(source)))
        return str(caught.value)

    assert "neither 'smollm2', nor a folder, nor a .gguf file" in error(tmp_path / "nowhere")
    assert "there is no file" in error(tmp_path / "nowhere.gguf")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in error(tmp_path / "empty")
    shutil.copy(folder / "config.json", tmp_path / "empty")
    assert "has no .safetensors file" in error(tmp_path / "empty")
    assert "cannot be used" in error(edited(folder, tmp_path / "unknown", model_type="no_such_model"))
    assert "missing" in error(edited(folder, tmp_path / "deeper", num_hidden_layers=3))
    assert "but config.json asks for" in error(edited(folder, tmp_path / "wider", intermediate_size=384))


def test_attention_that_is_not_plain_is_refused(folders: Folders, tmp_path: Path) -> None:
    folder = edited(
        folders("qwen3", 4), tmp_path / "chunks", layer_types=["full_attention", "chunked_attention"],
        attention_chunk_size=8,
    )  # fmt: skip
    with pytest.raises(ModelError, match="layer_types chunked_attention"):
        single_pass(load_model(ModelConfig(source=str(folder))), np.arange(5))


def test_a_model_without_the_attention_interface_is_refused(tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"(?i)bloom"):
        load_model(ModelConfig(source=str(tmp_path)))


def test_a_folder_without_a_tokenizer_is_named(folders: Folders) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer that can be read: there is no tokenizer\.json$"):
        load_tokenizer(ModelConfig(source=str(folders("llama", 4))))


def damaged(folder: Path, to: Path, how: str) -> Path:
    shutil.copytree(folder, to)
    weights = to / "model.safetensors"
    if how == "directory":
        weights.unlink()
        weights.mkdir()
    else:
        os.truncate(weights, {"empty": 0, "head": 1000, "half": weights.stat().st_size // 2}[how])
    return to


@pytest.mark.parametrize("how", ["empty", "head", "half", "directory"])
def test_weights_that_cannot_be_read_are_named(folders: Folders, tmp_path: Path, how: str) -> None:
    folder = damaged(folders("llama", 4), tmp_path / "damaged", how)
    with pytest.raises(ModelError, match=r"damaged/model\.safetensors cannot be read"):
        load_model(ModelConfig(source=str(folder)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 97), ("head_dim", 0), ("num_hidden_layers", -1), ("vocab_size", None), ("hidden_size", "x"),
        ("num_attention_heads", 0), ("num_key_value_heads", 0), ("max_position_embeddings", 0), ("rope_scaling", 7),
        ("intermediate_size", 0), ("hidden_act", "nothing"),
    ],
)  # fmt: skip
def test_sizes_that_no_model_can_have_are_named(folders: Folders, tmp_path: Path, field: str, value: Any) -> None:
    folder = edited(folders("llama", 4), tmp_path / "wrong", **{field: value})
    with pytest.raises(ModelError, match=r"wrong/config\.json"):
        load_model(ModelConfig(source=str(folder)))


def test_a_pool_beyond_the_memory_is_refused_before_memory_is_touched(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny.config(folders("llama", 4), pages=100_000_000)
    model = load_model(settings.model)
    with pytest.raises(ConfigError, match=r"pool\.pages: needs 762\.94 GiB .*GiB are available; lower it"):
        Engine(settings, model)
    monkeypatch.setattr("distkv.engine.pool.available_memory", lambda: None)
    with pytest.raises(ConfigError, match=r"pool\.pages: needs 7629394\.53 GiB on this rank .*; lower it"):
        model.pool(10**12, tiny.PAGE)  # the allocator itself says no


def deadline_case(rank: int, world_size: int) -> bool:
    """A sum with one rank missing."""
    import torch.distributed as dist

    group = dist.new_group()
    if rank == 1:  # it never comes, and its process stays until the other one has returned too
        return True
    with pytest.raises(GroupTimeout, match=r"a sum of the model did not end within 0\.5 s"):
        _sum(torch.ones(4), group, 0.5)
    return True


def test_a_sum_has_a_deadline() -> None:
    assert run_ranks(deadline_case, 2, timeout_s=60.0) == [True, True]
