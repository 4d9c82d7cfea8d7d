"""Which models are served: decoders with causal attention, and nothing in them that a slice of the heads changes.

Attention to all tokens before one, or to a sliding window of them (:mod:`distkv.engine.windowed`).

Found out when a model is loaded, so that the start fails and not the first request. An attention function that is asked
for more than it has refuses, too (:mod:`distkv.engine.attention`): configurations need not say all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distkv.engine.windowed import FULL, SLIDING
from distkv.errors import ModelError

__all__ = ["check_alike", "check_attention", "check_norms", "check_whole"]


def check_alike(settings: Any, file: Path | str) -> None:
    """Raises ``ModelError`` if layers differ in the width of their heads or the like: a pool has one shape for all."""
    if getattr(settings, "is_heterogeneous", False):
        names = ", ".join(sorted(settings.per_layer_attributes or ()))
        raise ModelError(f"{file}: a {settings.model_type} model is not served: its layers differ in {names}, and the "
                         "pages of a pool have one shape for all of its layers")  # fmt: skip


def check_attention(settings: Any, folder: Path) -> None:
    """Raises ``ModelError`` if a ``transformers`` configuration asks for other attention than causal: to all tokens, or
    to one window of them."""
    odd = []
    kinds = getattr(settings, "layer_types", None)
    window = getattr(settings, "sliding_window", None)
    others = sorted(set(kinds) - {FULL, SLIDING}) if kinds is not None else []
    if others:
        odd.append(f"layer_types {', '.join(others)}")
    if kinds is not None and len(kinds) != settings.num_hidden_layers:
        odd.append(f"{len(kinds)} layer_types for {settings.num_hidden_layers} layers")
    slides = window is not None if kinds is None else SLIDING in kinds
    if slides and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        odd.append(f"sliding_window {window!r}")
    for name in ("attn_logit_softcapping", "attention_chunk_size", "use_bidirectional_attention"):
        value = getattr(settings, name, None)
        if value and not (name == "attention_chunk_size" and kinds is not None):
            odd.append(f"{name} {value}")
    if odd:
        raise ModelError(
            f"{folder / 'config.json'}: a {settings.model_type} model with {'; '.join(odd)} cannot be served: only "
            "causal attention is, to all tokens or one sliding window (no chunks, no soft cap, one direction)"
        )
    _check_widths(settings, folder)
    _check_positions(settings, folder)


def _check_positions(settings: Any, folder: Path) -> None:
    """Raises ``ModelError`` if a key's rotation depends on how long the longest prompt of its batch is: then a page's
    bytes depend on who was computed beside it, and are of no use to anybody else."""
    given = getattr(settings, "rope_parameters", None) or getattr(settings, "rope_scaling", None) or {}
    each = [given, *(part for part in given.values() if isinstance(part, dict))] if isinstance(given, dict) else []
    odd = sorted({str(part.get("rope_type", part.get("type"))) for part in each} & {"dynamic", "longrope"})
    if odd:
        raise ModelError(f"{folder / 'config.json'}: a {settings.model_type} model with rope_type {', '.join(odd)} is "
                         "not served: its keys depend on the longest prompt in the batch, so a cached page is not "
                         "exact for anybody else; take a rope_type without that (default, linear, yarn, llama3)")


def _check_widths(settings: Any, folder: Path) -> None:
    """Raises ``ModelError`` if keys or values are not as wide as a head, as in latent attention (MLA)."""
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    plain, turned = (getattr(settings, f"qk_{part}_head_dim", None) for part in ("nope", "rope"))
    keys = plain + turned if isinstance(plain, int) and isinstance(turned, int) else head_dim
    values = getattr(settings, "v_head_dim", None) or head_dim
    if (keys, values) != (head_dim, head_dim):
        raise ModelError(
            f"{folder / 'config.json'}: a {settings.model_type} model is not served yet: its keys are {keys} wide and "
            f"its values {values}, and the paged KV memory has one width for both, head_dim ({head_dim} here)"
        )


def check_norms(module: Any) -> None:
    """Raises ``ModelError`` if queries or keys are normalised over all heads: a rank has some of them only."""
    for name, norm in module.named_modules():
        if name.rpartition(".")[2] in ("q_norm", "k_norm") and getattr(norm, "weight", None) is not None:
            head_dim = getattr(module.get_submodule(name.rpartition(".")[0]), "head_dim", None)
            if head_dim is not None and norm.weight.numel() != head_dim:
                raise ModelError(
                    f"{type(module).__name__}: {name} covers {norm.weight.numel()} elements, more than a head's "
                    f"{head_dim}, so it cannot be split; set parallel.tp to 1"
                )


def check_whole(settings: Any, ranks: int) -> None:
    """Raises ``ModelError`` if a model with experts is to be split: they, and their sinks, are whole on one rank."""
    experts = getattr(settings, "num_local_experts", None) or getattr(settings, "num_experts", None)
    if ranks > 1 and experts:
        raise ModelError(f"a {settings.model_type} model has {experts} experts in a layer, which cannot be split over "
                         "ranks; set parallel.tp and parallel.sp to 1")  # fmt: skip
