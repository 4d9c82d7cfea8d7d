"""Small, randomly initialised models with sliding windows; engines over them that are watched; their bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distkv.config import CacheConfig, HostConfig, PoolConfig
from distkv.engine.attention import Batch
from distkv.engine.config import EngineConfig, ModelConfig, ParallelConfig, ServeConfig, WindowConfig
from distkv.engine.engine import Engine
from distkv.engine.mesh import Mesh
from distkv.engine.model import Model, load_model
from distkv.engine.page_check import CacheCheck, check_cache
from distkv.engine.pool import KVPool
from distkv.engine.record import Recording, logits_hash
from distkv.engine.requests import Completion, Prompt
from distkv.torch_group import TorchGroup
from distkv.windows import window_pages
from tests.engine import tiny

WINDOW = 40
"""Tokens that a query of a sliding layer sees: not a multiple of a page, so that windows begin within one."""

WIDE = WindowConfig(pages=128, allowance_tokens=64)
"""A pool in which nothing is evicted, and conversations that may be edited in their last 64 tokens."""

Folders = Callable[[str], Path]
"""The fixture ``hybrids``: the folder of a kind of model, made once."""

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


opened: list[Engine] = []
"""Engines of the running test: a host tier has threads, which end with its engine."""


def engine(settings: ServeConfig, mesh: Mesh | None = None) -> Engine:
    """A watched engine that records. Of a mesh every rank makes one; the groups beside it are made by all ranks."""
    model = load_model(settings.model, mesh, timeout_s=60.0)
    cache_group = TorchGroup(mesh.group) if mesh is not None and mesh.group is not None else None
    made = Engine(settings, model, cache_group=cache_group)
    opened.append(made)
    made.recording = Recording(made.pool)
    step = made.step

    def watched() -> list[Completion]:
        ended = step()
        check_window(made)
        if not made.cache.config.host.configured:  # else a page that was evicted may still be on its way to the host
            poison(made)
        return ended

    made.step = watched  # type: ignore[method-assign]
    return made


def poison(made: Engine) -> None:
    """What lies in free pages is no number: whoever reads what was given up has no number in his logits."""
    for ledger in made.cache._books.ledgers:
        made.pools[ledger.label].data[:, :, torch.from_numpy(ledger.pool.free_ids()).long()] = float("nan")


def check_window(made: Engine) -> None:
    """Every running sequence has just the pages that its window may need, and all pages of the full layers."""
    label = next(iter(made.cache.config.labels))
    assert label.window_tokens is not None
    assert label.allowance_tokens is not None
    kept = label.window_tokens + label.allowance_tokens
    for sequence in made.cache.running.values():
        pages, opened, size = sequence.pages_of("window"), sequence.seq_len, tiny.PAGE
        assert len(pages.held) <= window_pages(kept + (label.chunk_tokens or size), size)
        assert pages.first >= max(0, sequence.committed - kept + 1) // size, "what the window has left is given up"
        assert pages.first * size <= max(0, sequence.committed - label.window_tokens + 1), "and nothing that it needs"
        assert pages.first + len(pages.table) == len(sequence.page_indices) == -(-opened // size)
    stats = made.cache.stats().labels["window"]
    assert stats.pages_free + stats.pages_cached + stats.pages_held + stats.pages_live == stats.pages_usable


def check_bits(made: Engine, names: list[str] | None = None) -> int:
    """Logits and KV of ended requests are those of one pass over all their tokens, in which no page is ever given up.

    Every rank of a mesh calls it. Returns how many rows of logits were compared.
    """
    assert made.recording is not None
    compared = 0
    for name, request in made.recording.requests.items():
        if (names is not None and name not in names) or request.kv is None:
            continue
        tokens = request.tokens[: request.committed]
        logits, pool, pages = alone(made.model, tokens)
        assert {at: logits_hash(logits[at]) for at in request.logits} == request.logits, name
        assert np.array_equal(pool.token_hashes(pages, len(tokens), made.pool.numbers), request.kv), name
        compared += len(request.logits)
    return compared


def alone(model: Model, tokens: np.ndarray) -> tuple[torch.Tensor, KVPool, np.ndarray]:
    """One pass in a pool of all layers: the logits of every row, the pool, the page table."""
    pages = np.arange(-(-len(tokens) // tiny.PAGE))
    pool = model.pool(len(pages), tiny.PAGE)
    pool.data.fill_(float("nan"))
    batch = Batch.build(pool, [(tokens, 0, np.arange(len(tokens)), pages)], model.dtype)
    return model.forward(batch, list(range(len(tokens)))), pool, pages


def check_pages(made: Engine) -> CacheCheck:
    """Every cached page of both pools, on the device and on the host, has the bytes that its tokens ask for."""
    found = check_cache(made.model, made.cache, made.pool, window=made.pools["window"])
    assert found.differences == ()
    made.cache.check()
    return found


def ask(made: Engine, tokens: np.ndarray, name: str, **fields: Any) -> tuple[int, tuple[int, ...]]:
    """How many tokens came from the cache, and the answer."""
    done = made.generate([Prompt(tokens=tokens, id=name, **fields)])[0]
    assert done.error is None
    return done.cached_tokens, done.token_ids


def edited(tokens: np.ndarray, at: int, more: int = 25) -> np.ndarray:
    return np.concatenate([tokens[:at], tiny.tokens(more, 1000 + at)])
