"""A ``transformers`` decoder, its code unmodified, with this rank's slices of the weights and paged attention."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from distkv.engine.attention import ATTENTION_NAME, Batch, register
from distkv.engine.config import ModelConfig, ServeConfig
from distkv.engine.mesh import Mesh
from distkv.engine.pool import KVPool
from distkv.engine.served import check_alike, check_attention, check_norms, check_whole
from distkv.engine.sources import model_folder
from distkv.engine.tensor_parallel import Sums, check_mesh, part_of, reduce_outputs
from distkv.engine.tiles import Attention
from distkv.engine.ulysses import Ulysses, joining
from distkv.engine.windowed import WINDOW, Windows, label_of
from distkv.errors import ModelError
from distkv.ledger import MAIN

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
    mesh: Mesh = field(default_factory=Mesh)
    """The ranks that compute it together."""
    timeout_s: float = 30.0
    """Seconds that a rank waits for the others of ``mesh``."""
    sums: Sums | None = field(default=None, repr=False)
    """How the parts of ``mesh.tp_group`` are added up."""
    ulysses: Ulysses | None = field(default=None, repr=False)
    """How tokens are split over ``mesh.sp_group``."""
    windows: Windows | None = None
    """The layers with a sliding window; None: it has none."""
    query_tiles: tuple[int, ...] | None = None
    """Set by :func:`distkv.engine.invariant.enable`: this model is batch-invariant, with these tiles of queries."""

    @property
    def rank(self) -> int:
        """Of this process, among those that compute the model."""
        return self.mesh.rank

    @property
    def size(self) -> int:
        """Number of ranks that compute the model."""
        return self.mesh.size

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Of all ranks that compute the model; None for one rank."""
        return self.mesh.group

    def pool(self, pages: int, page_size: int) -> KVPool:
        """A new, zeroed pool of all layers for this rank's heads. Raises ``ConfigError`` if the memory cannot hold it.

        With it alone, layers with a sliding window have all tokens, too, and a mask hides what lies before it.
        """
        return self._pool(range(self.layers), pages, page_size, "pool.pages")

    def pools(self, config: ServeConfig) -> dict[str, KVPool]:
        """New, zeroed pools by label, for an engine: ``main``, and that of the window's layers if there are others.

        Raises ``ConfigError`` for settings of the window's pool that do not fit the model, too.
        """
        page = config.cache.page_size
        if self.windows is None or not self.windows.apart:
            return {MAIN: self.pool(config.pool.pages, page)}
        label, sliding = label_of(config, self.windows, self.context), self.windows.layers
        full = [layer for layer in range(self.layers) if layer not in sliding]
        return {MAIN: self._pool(full, config.pool.pages, page, "pool.pages"),
                WINDOW: self._pool(sliding, label.pages, page, "window.pages")}

    def _pool(self, layers: Sequence[int], pages: int, page_size: int, field: str) -> KVPool:
        return KVPool(
            layers=layers, pages=pages, page_size=page_size, kv_heads=self.kv_heads, head_dim=self.head_dim,
            dtype=self.dtype, device=self.device, field=field,
        )  # fmt: skip

    @torch.inference_mode()
    def forward(self, batch: Batch, keep: list[int]) -> torch.Tensor:
        """Writes the batch's KV to its slots; returns the logits ``[len(keep), vocab]`` of the rows ``keep``.

        Every rank of ``mesh`` has to call it with the same batch: in each layer there are sums and exchanges. The
        logits are the same on all of them, bit for bit.
        """
        batch.calls = 0
        batch.windows = self.windows
        batch.tiled = Attention(self.query_tiles) if self.query_tiles is not None else None
        if self.ulysses is None:
            out = self._run(batch, batch.tokens, batch.positions, keep)
        else:
            share = batch.share = self.ulysses.share([span.n for span in batch.spans], keep)
            with joining(self.module, share):
                out = self._run(batch, share.rows(batch.tokens), share.rows(batch.positions), share.keep)
        if batch.calls != self.layers:
            raise ModelError(
                f"{type(self.module).__name__} sent {batch.calls} of its {self.layers} layers through the attention "
                "interface; a model with attention of its own cannot be served with paged KV memory"
            )
        logits: torch.Tensor = out.logits[0]
        return logits

    def _run(self, batch: Batch, tokens: torch.Tensor, positions: torch.Tensor, keep: Sequence[int]) -> Any:
        rows = torch.tensor(keep, dtype=torch.int64, device=self.device)
        return self.module(input_ids=tokens[None], position_ids=positions[None], use_cache=False, distkv=batch,
                           logits_to_keep=rows)  # fmt: skip


def load_model(
    config: ModelConfig,
    ranks: dist.ProcessGroup | Mesh | None = None,
    *,
    device: torch.device | str = "cpu",
    timeout_s: float = 30.0,
) -> Model:
    """Loads this rank's part of a model; only its slices are kept, whole tensors stay in the file's mapping.

    ``ranks`` is any group of ``torch.distributed``, ours or an embedding engine's, for tensor parallelism alone, or a
    mesh of such groups; None means the whole model. Their backend has to serve ``device``, where weights and pools will
    lie; ``timeout_s`` bounds what a pass waits for other ranks.
    Raises ``ModelError`` for a model that is missing, cannot be split over the ranks, or has no attention interface.
    """
    mesh = ranks if isinstance(ranks, Mesh) else Mesh(group=ranks, tp_group=ranks)
    folder = model_folder(config.source, config.cache_dir)
    dtype = _DTYPES[config.dtype]
    settings = _settings(folder)
    check_alike(settings, folder / "config.json")
    _check_sizes(settings, folder)
    check_attention(settings, folder)
    check_mesh(settings, mesh.tp, mesh.sp)
    check_whole(settings, mesh.size)
    module = _skeleton(settings, dtype, folder)
    if mesh.tp > 1:
        check_norms(module)
    _fill(module, folder, dtype, mesh.tp_rank, mesh.tp)
    module.to(device)
    sums = Sums(mesh.tp_group, timeout_s, named=mesh.rank) if mesh.tp_group is not None and mesh.tp > 1 else None
    if sums is not None:
        reduce_outputs(module, sums)
    ulysses = None
    if mesh.sp_group is not None and mesh.sp > 1:
        ulysses = Ulysses(mesh.sp_group, mesh.sp_rank, mesh.sp, timeout_s, mesh.rank)
    kv_heads = getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    return Model(
        module=module,
        identity=f"{settings.model_type}-{_identity(folder)}",
        dtype=dtype,
        layers=settings.num_hidden_layers,
        windows=Windows.of(settings),
        kv_heads=kv_heads // mesh.size,
        head_dim=head_dim,
        vocab_size=settings.vocab_size,
        context=settings.max_position_embeddings,
        stop_ids=_stop_ids(module),
        device=torch.device(device),
        mesh=mesh,
        timeout_s=timeout_s,
        sums=sums,
        ulysses=ulysses,
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
