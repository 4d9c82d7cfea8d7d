"""Small, randomly initialised models, as a folder and as a GGUF file; and an engine over one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distkv.config import CacheConfig, PoolConfig
from distkv.engine.config import EngineConfig, ModelConfig, ParallelConfig, ServeConfig
from distkv.engine.engine import Engine
from distkv.engine.model import load_model
from distkv.engine.record import Recording
from distkv.engine.requests import Prompt
from distkv.engine.schedule import Scheduler
from distkv.torch_group import TorchGroup

VOCAB = 384
PAGE = 16


def model_folder(folder: Path, kind: str, *, kv_heads: int = 12, layers: int = 2, seed: int = 1) -> Path:
    """A saved Llama or Qwen3 with 12 heads."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": layers,
        "num_attention_heads": 12, "num_key_value_heads": kv_heads, "head_dim": 8, "max_position_embeddings": 2048,
        "initializer_range": 0.15, "eos_token_id": 2, "bos_token_id": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**shape)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    return folder


def config(folder: Path, *, tp: int = 1, pages: int = 64, dtype: str = "float32", **engine: Any) -> ServeConfig:
    """Pages of 16 tokens, and checked books."""
    return ServeConfig(
        cache=CacheConfig(page_size=PAGE),
        pool=PoolConfig(pages=pages, check=True),
        model=ModelConfig(source=str(folder), dtype=dtype),
        parallel=ParallelConfig(tp=tp),
        engine=EngineConfig(**{"output_limit": 6, "batch_tokens": 64, **engine}),
    )


def engine(settings: ServeConfig, *, scheduler: Scheduler | None = None, tokenizer: Any = None) -> Engine:
    """An engine that records; over the default process group if there is one, with a second group for the cache."""
    group = dist.group.WORLD if dist.is_initialized() else None
    cache_group = TorchGroup(dist.new_group()) if group is not None else None
    made = Engine(settings, load_model(settings.model, group), tokenizer, cache_group=cache_group, scheduler=scheduler)
    made.recording = Recording(made.pool)
    return made


def tokens(n: int, seed: int) -> np.ndarray:
    """Random token ids, int32 [n], none of them special."""
    return np.random.default_rng(seed).integers(3, VOCAB, n).astype(np.int32)


def conversation(made: Engine, name: str, turns: list[np.ndarray], **fields: Any) -> list[str]:
    """Answers turns one after the other, each with all before it; returns the request ids."""
    history, names = np.zeros(0, np.int32), []
    for i, turn in enumerate(turns):
        history = np.concatenate([history, turn])
        prompt = Prompt(tokens=history, id=f"{name}{i}", conversation=name, **fields)
        done = made.generate([prompt])[0]
        history = np.concatenate([history, np.array(done.token_ids, np.int32)])
        names.append(done.id)
    return names
