"""Small, randomly initialised models with sliding windows, as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from distkv.config import CacheConfig, HostConfig, PoolConfig
from distkv.engine.config import EngineConfig, ModelConfig, ParallelConfig, ServeConfig, WindowConfig
from tests.engine import tiny

WINDOW = 40
"""Tokens that a query of a sliding layer sees: not a multiple of a page, so that windows begin within one."""

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = {"gemma3": "Gemma3Text", "qwen3": "Qwen3", "qwen2": "Qwen2", "gpt_oss": "GptOss", "mistral": "Mistral"}


def folder(path: Path, kind: str, *, vocab: int = tiny.VOCAB, window: int = WINDOW, layers: int = 3) -> Path:
    """A saved model: every layer but the second slides; of ``mistral`` every one. 4 KV heads, of ``gpt_oss`` 2."""
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 2048,
        "initializer_range": 0.15, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
        "tie_word_embeddings": kind == "gemma3", "sliding_window": window,
    }  # fmt: skip
    if kind != "mistral":
        shape["layer_types"] = [FULL if number % 3 == 1 else SLIDING for number in range(layers)]
    own: dict[str, dict[str, Any]] = {
        "gemma3": {"query_pre_attn_scalar": 8}, "qwen3": {"use_sliding_window": True},
        "qwen2": {"use_sliding_window": True},
        "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    }  # fmt: skip
    torch.manual_seed(3)
    settings = getattr(transformers, f"{KINDS[kind]}Config")(**shape | own.get(kind, {}))
    name = KINDS[kind].removesuffix("Text")
    model = getattr(transformers, f"{name}ForCausalLM")(settings)
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms, biases and sinks
                parameter.normal_(parameter.mean().item() if "norm" in each else 0.0, 0.2)
    model.save_pretrained(path)
    return path


def config(
    path: Path, *, tp: int = 1, sp: int = 1, pages: int = 64, window: WindowConfig | None = None,
    host: HostConfig | None = None, dtype: str = "float32", cache: dict[str, Any] | None = None, **engine: Any,
) -> ServeConfig:
    """Pages of 16 tokens, and checked books."""
    return ServeConfig(
        cache=CacheConfig(page_size=tiny.PAGE, **cache or {}), pool=PoolConfig(pages=pages, check=True),
        host=host or HostConfig(), window=window or WindowConfig(), model=ModelConfig(source=str(path), dtype=dtype),
        parallel=ParallelConfig(tp=tp, sp=sp),
        engine=EngineConfig(**{"output_limit": 6, "batch_tokens": 64, **engine}),
    )
