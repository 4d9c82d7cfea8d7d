"""A ``transformers`` decoder, its code unmodified, with this rank's slices of the weights and paged attention."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from distkv.engine.attention import ATTENTION_NAME, Batch, register
from distkv.engine.config import ModelConfig
from distkv.engine.pool import KVPool
from distkv.engine.served import check_attention, check_norms
from distkv.engine.sources import model_folder
from distkv.engine.tensor_parallel import Sums, check_degree, part_of, reduce_outputs
from distkv.engine.tiles import Attention
from distkv.errors import ModelError

__all__ = ["Model", "load_model", "load_tokenizer"]

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SAMPLE = 1 << 16


@dataclass(kw_only=True)
class Model:
    """One rank's model. ``kv_heads`` is this rank's share; the other numbers are the same on every rank."""

    module: Any
    identity: str
    """Names configuration and weights, for the fingerprint. Samples of each file, not every byte: see load_model."""
    dtype: torch.dtype
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    stop_ids: frozenset[int]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tp_rank: int = 0
    tp_size: int = 1
    tp_group: dist.ProcessGroup | None = field(default=None, repr=False)
    timeout_s: float = 30.0
    """Seconds that a rank waits for the others of ``tp_group``."""
    sums: Sums | None = field(default=None, repr=False)
    """How the parts of ``tp_group`` are added up."""
    query_tiles: tuple[int, ...] | None = None
    """Set by :func:`distkv.engine.invariant.enable`: this model is batch-invariant, with these tiles of queries."""

    def pool(self, pages: int, page_size: int) -> KVPool:
        """A new, zeroed pool for this rank's heads. Raises ``ConfigError`` if the memory cannot hold it."""
        return KVPool(
            layers=self.layers, pages=pages, page_size=page_size,
            kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=self.dtype, device=self.device,
        )  # fmt: skip

    @torch.inference_mode()
    def forward(self, batch: Batch, keep: list[int]) -> torch.Tensor:
        """Writes the batch's KV to its slots; returns the logits ``[len(keep), vocab]`` of the rows ``keep``.

        With tp > 1 every rank has to call it with the same rows: there is a sum over the group in every layer.
        """
        batch.calls = 0
        batch.tiled = Attention(self.query_tiles) if self.query_tiles is not None else None
        rows = torch.tensor(keep, dtype=torch.int64, device=self.device)
        out = self.module(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,
            distkv=batch,
            logits_to_keep=rows,
        )
        if batch.calls != self.layers:
            raise ModelError(
                f"{type(self.module).__name__} sent {batch.calls} of its {self.layers} layers through the attention "
                "interface; a model with attention of its own cannot be served with paged KV memory"
            )
        logits: torch.Tensor = out.logits[0]
        return logits


def load_model(
    config: ModelConfig,
    tp_group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str = "cpu",
    timeout_s: float = 30.0,
) -> Model:
    """Loads this rank's part of a model; only its slices are kept, whole tensors stay in the file's mapping.

    ``tp_group`` is any group of ``torch.distributed``, ours or an embedding engine's; None means the whole model. Its
    backend has to serve ``device``, where weights and pools will lie; ``timeout_s`` bounds its sums.
    Raises ``ModelError`` for a model that is missing, cannot be split over the group, or has no attention interface.
    """
    folder = model_folder(config.source, config.cache_dir)
    rank, tp = (dist.get_rank(tp_group), dist.get_world_size(tp_group)) if tp_group is not None else (0, 1)
    dtype = _DTYPES[config.dtype]
    settings = _settings(folder)
    _check_sizes(settings, folder)
    check_attention(settings, folder)
    check_degree(settings, tp)
    module = _skeleton(settings, dtype, folder)
    if tp > 1:
        check_norms(module)
    _fill(module, folder, dtype, rank, tp)
    module.to(device)
    sums = Sums(tp_group, timeout_s) if tp_group is not None and tp > 1 else None
    if sums is not None:
        reduce_outputs(module, sums)
    kv_heads = getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    return Model(
        module=module,
        identity=f"{settings.model_type}-{_identity(folder)}",
        dtype=dtype,
        layers=settings.num_hidden_layers,
        kv_heads=kv_heads // tp,
        head_dim=head_dim,
        vocab_size=settings.vocab_size,
        context=settings.max_position_embeddings,
        stop_ids=_stop_ids(module),
        device=torch.device(device),
        tp_rank=rank,
        tp_size=tp,
        tp_group=tp_group,
        timeout_s=timeout_s,
        sums=sums,
    )


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer that lies beside the model. Raises ``ModelError``."""
    from transformers import AutoTokenizer

    folder = model_folder(config.source, config.cache_dir)
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        there = (folder / "tokenizer.json").is_file()
        why = str(error).strip().splitlines()[0].rstrip(" :") if there else "there is no tokenizer.json"
        raise ModelError(f"the model folder {folder} has no tokenizer that can be read: {why}") from error


def _settings(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ModelError(f"{folder / 'config.json'} cannot be used: {error}") from error


def _check_sizes(settings: Any, folder: Path) -> None:
    """Raises ``ModelError`` for sizes of config.json that no model can have."""
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
                 "num_key_value_heads", "head_dim", "intermediate_size"):  # fmt: skip
        value = getattr(settings, name, None)
        if value is None:  # not every kind of model has all of them; one that misses its own is not built
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{folder / 'config.json'} cannot be used: {name} is {value!r}, not a positive number")


def _skeleton(settings: Any, dtype: torch.dtype, folder: Path) -> Any:
    """The model without its weights: memory is reserved and never touched, so it costs nothing."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    register()
    auto: Any = AutoModelForCausalLM  # has no types
    try:
        with no_init_weights():
            module = auto.from_config(settings, dtype=dtype, attn_implementation=ATTENTION_NAME)
    except Exception as error:
        raise ModelError(
            f"{folder / 'config.json'}: a {settings.model_type} model cannot run with paged attention: {error}"
        ) from error
    if not module._supports_attention_backend:  # there is no public question for it
        raise ModelError(f"{type(module).__name__} does not use transformers' attention interface; it cannot be served")
    with contextlib.suppress(OSError):  # a folder need not have one
        module.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    module.eval().requires_grad_(requires_grad=False)
    return module


def _stored(folder: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with _readable(path), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                yield name, file


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}; it may be incomplete, download it again") from error


def _fill(module: Any, folder: Path, dtype: torch.dtype, rank: int, tp: int) -> None:
    wanted = dict(module.named_parameters())
    known = {*wanted, *(name for name, _ in module.named_buffers())}
    loaded, strange = set(), list[str]()
    for name, file in _stored(folder):
        if name not in wanted:
            if name not in known:
                strange.append(name)
            continue
        part = part_of(name, wanted[name].shape, rank, tp)
        stored = tuple(file.get_slice(name).get_shape())
        if stored != tuple(wanted[name].shape):
            raise ModelError(f"{folder}: {name} is {stored}, but config.json asks for {tuple(wanted[name].shape)}")
        _assign(module, name, _read(file, name, part, dtype))
        loaded.add(name)
    module.tie_weights()
    missing = sorted(name for name, _ in module.named_parameters() if name not in loaded)
    if missing and strange:  # transformers renames and joins them when it loads such a model
        raise ModelError(f"{folder}: a {module.config.model_type} model is not served: it stores weights under other "
                         f"names than it computes with ({strange[0]}, but nothing for {missing[0]})")  # fmt: skip
    if missing:
        raise ModelError(f"{folder} has no weights for {missing[0]} ({len(missing)} missing); is the folder complete?")


def _read(file: Any, name: str, part: tuple[int, int, int] | None, dtype: torch.dtype) -> torch.Tensor:
    if part is None:
        whole: torch.Tensor = file.get_tensor(name)
        return whole.to(dtype)
    dimension, first, last = part
    if first == last:
        return torch.zeros(tuple(file.get_slice(name).get_shape()), dtype=dtype)
    view = file.get_slice(name)
    cut: torch.Tensor = view[first:last] if dimension == 0 else view[:, first:last]
    return cut.to(dtype).clone(memory_format=torch.contiguous_format)


def _assign(module: Any, name: str, value: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))


def _stop_ids(module: Any) -> frozenset[int]:
    given = module.generation_config.eos_token_id
    if given is None:
        given = module.config.eos_token_id
    ids = [] if given is None else [given] if isinstance(given, int) else list(given)
    return frozenset(int(i) for i in ids)


def _identity(folder: Path) -> str:
    """Digest of config.json and of size, head, middle and tail of each weight file: every byte would cost seconds."""
    digest = xxhash.xxh3_64((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with _readable(path), path.open("rb") as file:
            for offset in (0, size // 2, max(0, size - _SAMPLE)):
                file.seek(offset)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
