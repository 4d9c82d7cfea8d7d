"""What a model's KV memory looks like, from its config.json alone: no weights are loaded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distkv.engine.served import check_alike, check_whole
from distkv.engine.sources import config_place
from distkv.engine.tensor_parallel import allowed_meshes, check_mesh, part_of
from distkv.engine.windowed import FULL, Windows
from distkv.errors import ModelError

__all__ = ["FULL", "LayerGroup", "ModelShape", "read_shape"]

@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers whose KV memory is alike: one pool, one kind of page."""

    kind: str
    """As ``transformers`` calls it: ``full_attention``, ``sliding_attention``, ..."""
    layers: int
    kv_heads: int
    """Of the whole model."""
    head_dim: int
    window: int | None = None
    """Tokens that a layer looks back at most; None: all."""

    def token_bytes(self, ranks: int, itemsize: int) -> int:
        """Bytes of one token's keys and values in all layers of the group, on one of tp x sp ``ranks``."""
        return self.layers * 2 * (self.kv_heads // ranks) * self.head_dim * itemsize


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that memory depends on."""

    kind: str
    groups: tuple[LayerGroup, ...]
    heads: int
    context: int
    """Positions that it was made for (``max_position_embeddings``)."""
    meshes: tuple[tuple[int, int], ...]
    """Every (tp, sp) that it can be split by; (1, 1) alone if it can run on one rank only."""
    settings: Any
    """Its ``transformers`` configuration."""
    windows: Windows | None = None
    """Its layers with a sliding window."""

    @property
    def layers(self) -> int:
        """Of all groups."""
        return sum(group.layers for group in self.groups)

    def token_bytes(self, ranks: int, itemsize: int) -> int:
        """Bytes of one token's keys and values in all layers, on one of tp x sp ``ranks``."""
        return sum(group.token_bytes(ranks, itemsize) for group in self.groups)

    def weight_bytes(self, tp: int, itemsize: int) -> list[int]:
        """Bytes of the parameters that each of ``tp`` ranks keeps. Makes the model without memory for its weights."""
        import torch
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM  # has no types
        with torch.device("meta"):
            model = auto.from_config(self.settings)
        totals = [0] * tp
        for name, parameter in model.named_parameters():  # tied ones once
            for rank in range(tp):
                part = part_of(name, parameter.shape, rank, tp)
                share = (part[2] - part[1], parameter.shape[part[0]]) if part else (1, 1)
                totals[rank] += parameter.numel() * share[0] // share[1] * itemsize
        return totals

    def check_split(self, tp: int, sp: int = 1) -> None:
        """Raises ModelError, with the meshes that are allowed, unless the model can be split over tp x sp ranks."""
        check_mesh(self.settings, tp, sp)
        check_whole(self.settings, tp * sp)


def read_shape(source: str, cache_dir: Path | None = None) -> ModelShape:
    """The shape of ``source`` (see ``ModelConfig.source``). Raises ModelError for one that cannot be found or read."""
    from transformers import AutoConfig

    folder, gguf = config_place(source, cache_dir)
    try:
        whole: Any = AutoConfig.from_pretrained(str(folder), local_files_only=True,
                                                **({"gguf_file": gguf.name} if gguf else {}))  # fmt: skip
    except Exception as error:  # whatever transformers raises for a file that it cannot use
        raise ModelError(f"{gguf or folder / 'config.json'} cannot be used: {error}") from error
    return shape_of(whole.get_text_config(), str(gguf or folder / "config.json"))


def shape_of(settings: Any, file: str) -> ModelShape:
    """The shape in a ``transformers`` configuration of a decoder. Raises ModelError for one without paged KV."""
    if getattr(settings, "kv_lora_rank", None):
        raise ModelError(f"{file}: a {settings.model_type} model keeps compressed keys and values, which have no pages "
                         "of heads; it is not served")
    check_alike(settings, file)
    try:
        heads = int(settings.num_attention_heads)
        kv_heads = int(getattr(settings, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(settings, "head_dim", None) or settings.hidden_size // heads)
        layers, context = int(settings.num_hidden_layers), int(settings.max_position_embeddings)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{file} does not have the sizes of a decoder with attention: {error}") from error
    if min(heads, kv_heads, head_dim, layers, context) < 1:
        raise ModelError(f"{file}: a number of heads, layers or positions is not positive")
    window = getattr(settings, "sliding_window", None)
    kinds = Counter(getattr(settings, "layer_types", None) or [FULL] * layers)
    groups = tuple(
        LayerGroup(kind=kind, layers=n, kv_heads=kv_heads, head_dim=head_dim, window=None if kind == FULL else window)
        for kind, n in sorted(kinds.items())
    )
    try:
        meshes = tuple(allowed_meshes(settings))
    except (AttributeError, TypeError):
        meshes = ((1, 1),)
    return ModelShape(kind=settings.model_type, groups=groups, heads=heads, context=context, meshes=meshes,
                      settings=settings, windows=Windows.of(settings))  # fmt: skip
