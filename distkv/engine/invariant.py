"""``engine.batch_invariant``: makes a model's bits independent of schedule and batch, or refuses the machine.

The mode is a claim about kernels that nobody documents, so it is never taken on trust: at start every kernel is run
with the sizes that it will see (:mod:`distkv.engine.tiles`), and then the whole model under random schedules against
single passes. The sizes were found on two kinds of CPU; what another machine does, its own start tells. It holds for
the number of threads that torch had then.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from distkv.engine.invariant_case import differences, random_case
from distkv.engine.model import Model
from distkv.engine.tiles import KEYS, ROWS, SIZES, Attention, Rows, padded_keys
from distkv.errors import ModelError, NotInvariant
from distkv.torch_group import TorchGroup, abort, transport_failed

__all__ = ["enable"]

logger = logging.getLogger(__name__)

_DRAWS = 1 << 18
"""Numbers compared before a tile is taken for equal: in bfloat16 another order of adding shows in one of thousands."""

_TRIALS = 3
"""Random schedules of the whole model."""

_LONGEST = 160
"""Tokens of the longest sequence in them."""


@torch.inference_mode()
def enable(model: Model, group: dist.ProcessGroup | None = None) -> None:
    """Makes ``model`` batch-invariant and tests that it is. Every rank of ``model.mesh`` calls it together.

    ``group``: over which the ranks tell each other the outcome, ``model.group`` if it is None. Raises
    ``NotInvariant`` on all ranks if one finds a difference or cannot run the test; that one raises what stopped it. The
    model is then as it was. But what fails inside the model's passes leaves no other way than to abort
    the groups of ``model.mesh``: they cannot be used any more, and without a ``group`` beside them the others raise
    PeerLost.
    A second call does nothing.
    """
    if model.query_tiles is not None:
        return
    wrapped = dict(_wrapped(model))

    def test_kernels() -> None:
        _test_rows(model, wrapped)
        model.query_tiles = _query_tiles(model)

    try:
        for module, rows in wrapped.items():
            module.forward = rows
        model.query_tiles = SIZES
        if model.sums is not None:
            model.sums.in_rank_order = True
        _together(model, group or model.group, test_kernels)
        _together(model, group or model.group, lambda: _test_model(model), in_passes=True)
    except BaseException:
        for module in wrapped:
            del module.forward
        model.query_tiles = None
        if model.sums is not None:
            model.sums.in_rank_order = False
        raise
    logger.info("batch-invariant: queries in tiles of %s, products in %s", model.query_tiles,
                sorted({rows.sizes for rows in wrapped.values()}))  # fmt: skip


def _wrapped(model: Model) -> Iterator[tuple[nn.Module, Rows]]:
    """Products and activations: what else a decoder computes is exact, or goes row by row already."""
    for name, module in model.module.named_modules():
        if _product(module) is not None or _is_activation(module):
            yield module, Rows.of(module)
        elif not isinstance(module, nn.Embedding) and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            raise ModelError(f"engine.batch_invariant does not cover {name} of this {type(model.module).__name__}, a "
                             f"{type(module).__name__}; set it to false")  # fmt: skip


def _product(module: nn.Module) -> tuple[int, int] | None:
    """The widths of a row and of its product with this rank's slice of the weights; None for another kind of module."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        return module.weight.shape[1], module.weight.shape[0]  # unlike in_features, those of the slice
    if isinstance(module, Conv1D):  # a product all the same
        return module.weight.shape[0], module.weight.shape[1]
    return None


def _is_activation(module: nn.Module) -> bool:
    where = type(module).__module__
    return where in ("transformers.activations", "torch.nn.modules.activation") and not list(module.parameters())


def _together(
    model: Model, group: dist.ProcessGroup | None, test: Callable[[], None], *, in_passes: bool = False
) -> None:
    """A part of the self-test, after which all ranks go on, or all raise. ``in_passes``: they wait for each other.

    Under gloo the others notice an aborted group at once, under NCCL by the deadline of the group.
    """
    mine: Exception | None = None
    try:
        test()
    except Exception as error:  # noqa: BLE001
        mine = error  # handed to all ranks below, and raised here
    if group is None or model.size == 1:
        if mine is not None:
            raise mine
        return
    lost = mine is not None and transport_failed(mine)
    if mine is not None and in_passes and not isinstance(mine, NotInvariant):
        # The others wait in a pass for this rank, or, if it only lost another one, for what it has not passed on: one
        # broken connection ends only the waits at its two ends.
        for each in model.mesh.in_passes:
            abort(each)
        if group in model.mesh.in_passes:
            raise mine
    _raise_together(mine, lost, TorchGroup(group, timeout_s=model.timeout_s))


def _raise_together(mine: Exception | None, lost: bool, group: TorchGroup) -> None:
    """Raises nothing if no rank has an error. ``lost``: this rank's only says that it lost another one."""
    text = mine.what if isinstance(mine, NotInvariant) else f"the self-test ended with {type(mine).__name__}: {mine}"
    told = group.exchange(json.dumps(None if mine is None or lost else text).encode())
    if mine is not None and not lost and not isinstance(mine, NotInvariant):
        raise mine
    for rank, data in enumerate(told):
        found = json.loads(data)
        if found is not None:
            raise NotInvariant(found, rank) from mine
    if mine is not None:
        raise mine


# ---- one kernel at a time


def _test_rows(model: Model, wrapped: dict[nn.Module, Rows]) -> None:
    """Finds the tiles of every product and activation; those of one shape are tested once."""
    found: dict[tuple[object, ...], tuple[int, ...]] = {}
    parents = {child: parent for parent in model.module.modules() for child in parent.children()}
    products = {module: shape for module in wrapped if (shape := _product(module)) is not None}
    for module, rows in wrapped.items():
        shape = products.get(module)
        if shape is not None:
            bias = getattr(module, "bias", None) is not None
            cases: list[tuple[str, int, tuple[object, ...]]] = [
                (f"a product {shape[0]} x {shape[1]}", shape[0], (type(module), *shape, bias))
            ]
        else:  # it has no size of its own: what it is given is the result of one of the products beside it
            beside = {products[child][1] for child in parents[module].children() if child in products}
            widths = sorted(beside or {width for _, width in products.values()})
            kind = type(module)
            cases = [(f"{kind.__name__} of width {width}", width, (kind, width)) for width in widths]
        for what, width, key in cases:
            if key not in found:
                found[key] = tiles_of(f"{what} in {_name(model)}", rows.function, width, model)
        rows.sizes = tuple(s for s in SIZES if s == ROWS or all(s in found[key] for *_, key in cases))


def _name(model: Model) -> str:
    return f"{str(model.dtype).removeprefix('torch.')} on {model.device}, {torch.get_num_threads()} thread(s)"


def _random(model: Model, *shape: int, seed: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2
    return made.to(model.device, model.dtype)


def tiles_of(
    what: str, function: Callable[[torch.Tensor], torch.Tensor], width: int, model: Model
) -> tuple[int, ...]:
    """The sizes that give the bits of :data:`ROWS` rows. Raises ``NotInvariant`` if a row's place among these counts.

    This is nearly a proof: no other size is ever computed, and each place is tried.
    """
    sizes: tuple[int, ...] = SIZES
    seed = compared = 0
    while compared < _DRAWS:
        x = _random(model, SIZES[0] + ROWS, width, seed=seed)
        reference = torch.cat([function(x[a : a + ROWS]) for a in range(0, len(x), ROWS)])
        if not seed:
            for place in range(1, ROWS):
                if not torch.equal(function(x[place : place + ROWS]), reference[place : place + ROWS]):
                    raise NotInvariant(f"{what}: {ROWS} rows give other bits at another place among them")
        sizes = tuple(s for s in sizes if s == ROWS or same_rows(function(x[:s]), reference[:s]))
        compared += reference.numel()
        seed += 1
    return sizes


def same_rows(tile: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether a larger tile may be used: only where it gives the bits of the small ones."""
    return torch.equal(tile, reference)


def _query_tiles(model: Model) -> tuple[int, ...]:
    """The tiles of queries that give the bits of the small one, under short and long contexts, and under a window."""
    sizes = _tiles_under(model, None)
    if model.windows is None:
        return sizes
    window = _tiles_under(model, model.windows.tokens)
    return tuple(size for size in sizes if size in window)


def _tiles_under(model: Model, window: int | None) -> tuple[int, ...]:
    heads = model.module.config.num_attention_heads // model.size
    longest = padded_keys(min(model.context, 8 * KEYS))
    keys, values = (_random(model, longest, model.kv_heads, model.head_dim, seed=seed) for seed in (1, 2))
    query = _random(model, longest, heads, model.head_dim, seed=3)
    scale = model.head_dim**-0.5
    kind = f"attention to {window} tokens" if window is not None else "attention"
    what = f"{kind}, {heads} heads over {model.kv_heads} of {model.head_dim}, in {_name(model)}"

    def attend(sizes: tuple[int, ...], start: int, n: int, tokens: int) -> torch.Tensor:
        tiled, part = Attention(sizes), query[start : start + n]
        if window is None:
            return tiled(part, keys[:tokens], values[:tokens], start, scale)
        begin, end = tiled.window_keys(start, n, window)
        return tiled.windowed(part, keys[begin:end], values[begin:end], start, scale, window)

    sizes: tuple[int, ...] = SIZES
    for start in (0, KEYS - ROWS - 3, longest - SIZES[0] - ROWS):
        if start < 0 or start + SIZES[0] + ROWS > longest:
            continue
        reference = attend((ROWS,), start, SIZES[0] + ROWS, longest)
        for place in range(ROWS):
            for n in (1, ROWS):
                if not torch.equal(attend((ROWS,), start + place, n, longest), reference[place : place + n]):
                    raise NotInvariant(f"{what}: {n} queries from position {start + place} on give other bits than "
                                       f"among those from {start} on")  # fmt: skip
        sizes = tuple(
            s for s in sizes
            if s == ROWS or same_rows(attend((s,), start, s, longest), reference[:s])
        )  # fmt: skip
    return sizes


# ---- the whole model


def _test_model(model: Model) -> None:
    """A few random schedules. All of them, whatever the first ones show: a rank sees its own pages, and all add up."""
    random = np.random.default_rng(0)
    longest = min(_LONGEST, model.context)
    found: list[str] = []
    for _ in range(_TRIALS):
        case = random_case(random, vocab=model.vocab_size, page_size=ROWS, longest=longest, sequences=3, batch=longest)
        found += differences(model, case)
    if found:
        raise NotInvariant(f"the whole model in {_name(model)}: {found[0]}")
