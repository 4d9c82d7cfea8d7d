"""Small, randomly initialised models, as a folder and as a GGUF file; and an engine over one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distkv.config import CacheConfig, PoolConfig
from distkv.engine.config import EngineConfig, ModelConfig, ParallelConfig, ServeConfig
from distkv.engine.engine import Engine
from distkv.engine.mesh import Mesh
from distkv.engine.model import load_model
from distkv.engine.record import Recording
from distkv.engine.requests import Prompt
from distkv.engine.schedule import Scheduler
from distkv.torch_group import TorchGroup

VOCAB = 384
PAGE = 16


def model_folder(
    folder: Path, kind: str, *, kv_heads: int = 12, heads: int = 12, layers: int = 2, seed: int = 1
) -> Path:
    """A saved model, by default of 12 heads: ``llama``, ``qwen3``, ``gemma``, ``qwen2`` or ``mistral``.

    Gemma's heads together are wider than its rows, and its embeddings are tied; Qwen2 has biases.
    """
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 8 * heads, "intermediate_size": 192, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8, "max_position_embeddings": 2048,
        "initializer_range": 0.15, "eos_token_id": 2, "bos_token_id": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    own: dict[str, Any] = {
        "gemma": {"head_dim": 16, "tie_word_embeddings": True, "pad_token_id": 0}, "mistral": {"sliding_window": None},
    }  # fmt: skip
    name = {"llama": "Llama", "qwen3": "Qwen3", "gemma": "Gemma", "qwen2": "Qwen2", "mistral": "Mistral"}[kind]
    settings = getattr(transformers, f"{name}Config")(**shape | own.get(kind, {}))
    model = getattr(transformers, f"{name}ForCausalLM")(settings)
    if kind not in ("llama", "qwen3"):
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases that would be ones and zeros
                if parameter.dim() == 1:
                    parameter.normal_(parameter.mean().item(), 0.2)
    model.save_pretrained(folder)
    return folder


def plain_folder(folder: Path, kv_heads: int = 4) -> Path:
    """A Llama as :func:`model_folder` makes one, of 4 KV heads, without torch: for threads beside the tests."""
    from safetensors.numpy import save_file

    random, weights = np.random.default_rng(1), {}

    def add(name: str, *shape: int) -> None:
        made = random.standard_normal(shape) * 0.15 if len(shape) > 1 else np.ones(shape)
        weights[f"{name}.weight"] = made.astype(np.float32)

    add("model.embed_tokens", VOCAB, 96)
    for i in range(2):
        for name, rows, columns in [
            ("self_attn.q_proj", 96, 96), ("self_attn.k_proj", 8 * kv_heads, 96),
            ("self_attn.v_proj", 8 * kv_heads, 96),
            ("self_attn.o_proj", 96, 96), ("mlp.gate_proj", 192, 96), ("mlp.up_proj", 192, 96),
            ("mlp.down_proj", 96, 192),
        ]:  # fmt: skip
            add(f"model.layers.{i}.{name}", rows, columns)
        add(f"model.layers.{i}.input_layernorm", 96)
        add(f"model.layers.{i}.post_attention_layernorm", 96)
    add("model.norm", 96)
    add("lm_head", VOCAB, 96)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": 96,
        "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 12,
        "num_key_value_heads": kv_heads, "head_dim": 8, "max_position_embeddings": 2048, "eos_token_id": 2,
        "bos_token_id": 1, "tie_word_embeddings": False,
    }))  # fmt: skip
    return folder


def config(
    folder: Path, *, tp: int = 1, sp: int = 1, pages: int = 64, dtype: str = "float32", index_on: str = "finish",
    **engine: Any,
) -> ServeConfig:
    """Pages of 16 tokens, and checked books."""
    return ServeConfig(
        cache=CacheConfig(page_size=PAGE, index_on=index_on),
        pool=PoolConfig(pages=pages, check=True),
        model=ModelConfig(source=str(folder), dtype=dtype),
        parallel=ParallelConfig(tp=tp, sp=sp),
        engine=EngineConfig(**{"output_limit": 6, "batch_tokens": 64, **engine}),
    )


def engine(settings: ServeConfig, *, scheduler: Scheduler | None = None, tokenizer: Any = None) -> Engine:
    """An engine that records; over the default process group if there is one, with a second group for the cache."""
    mesh = Mesh.of(None, settings.parallel.tp, settings.parallel.sp) if dist.is_initialized() else None
    cache_group = TorchGroup(dist.new_group()) if mesh is not None else None
    made = Engine(settings, load_model(settings.model, mesh), tokenizer, cache_group=cache_group, scheduler=scheduler)
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


def gguf_file(path: Path) -> Path:
    """A Llama with a byte-level tokenizer and a chat template, as one GGUF file of about 0.5 MB."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(96)
    writer.add_feed_forward_length(192)
    writer.add_head_count(12)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(8)
    words = ["<unk>", "<|im_start|>", "<|im_end|>", *_byte_letters(), "th", "he"]
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * (len(words) - 3))
    writer.add_token_merges(["t h", "h e"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    random = np.random.default_rng(3)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) * 0.15).astype(np.float32))

    add("token_embd.weight", len(words), 96)
    for i in range(2):
        for name, rows, columns in [
            ("attn_q", 96, 96), ("attn_k", 32, 96), ("attn_v", 32, 96), ("attn_output", 96, 96),
            ("ffn_gate", 192, 96), ("ffn_up", 192, 96), ("ffn_down", 96, 192),
        ]:  # fmt: skip
            add(f"blk.{i}.{name}.weight", rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(96, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(96, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_letters() -> list[str]:
    """The printable stand-ins of GPT-2's tokenizer for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]
