"""An engine's paged KV memory as the host tier sees it: pages that are gathered into rows of bytes and put back.

An element is moved as an unsigned number of its own size, never converted, so every bit pattern survives. On the CPU
numpy copies: it takes one thread, the caller's, where torch's ``copy_`` would start a team of OpenMP threads for each
thread that calls it, and both let go of the GIL.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distkv.errors import CopyFailed, LayoutMismatch
from distkv.host.layout import KVLayout

__all__ = ["KVLayout", "PageIds", "PagedKV", "Places", "Tensors"]

PageIds = Sequence[int] | npt.NDArray[np.integer]
Places = Sequence[npt.NDArray[np.integer]]
Tensors = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]

_AXES = ("layer", "plane", "page", "token", "head", "dim")
_NEEDED = ("page", "token", "dim")
_CARRIERS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16), 4: (torch.int32, np.int32),
             8: (torch.int64, np.int64)}  # fmt: skip


class PagedKV:
    """The pages of one pool, described once. Refers to the engine's tensors and owns nothing.

    ``tensors`` is one tensor for all layers, or a list with one per layer, or with one list per layer that has one per
    plane (keys, values). ``axes`` names their axes, the same for all: ``page`` counts pages, and page ids index it;
    ``token`` is a token's place in its page; ``dim`` may come more than once, where an engine splits the head's
    elements. What is left out has the size 1. Examples::

        PagedKV(pool)                                              # [layers, 2, pages, page_size, heads, head_dim]
        PagedKV(per_layer, axes="page plane head token dim")       # a list of [pages, 2, heads, page_size, head_dim]
        PagedKV([(k, v), ...], axes="page token head dim")         # keys and values apart
        PagedKV(latent, axes="layer page token dim")               # one plane

    A row is one page: uint8 ``[bytes_per_page]``, contiguous; layers outside, then what ``axes`` says without the page
    (``layout.order``). Strides may be anything, but no element may lie in two places of one tensor or of two: raises
    LayoutMismatch for that, and for tensors that are not alike.

    One thread may gather while another one scatters; who may touch which page when is the caller's business.
    """

    def __init__(
        self,
        tensors: Tensors,
        *,
        axes: str | None = None,
        dtype: str | None = None,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        """``dtype``: what an element is, if torch's type is only the carrier (``fp8_e4m3`` in uint8). ``shard`` of
        ``shards``: which rank's share of the heads it is, of those that hold different ones."""
        flat, layers, planes = _flattened(tensors)
        names = _names(axes, listed=layers is not None, planes=planes)
        first = flat[0]
        for tensor in flat:
            _check_alike(tensor, first, names)
        _check_apart(flat)
        sizes = {name: math.prod(n for n, axis in zip(first.shape, names, strict=True) if axis == name)
                 for name in _AXES}
        outer = ([] if layers is None else ["layer"]) + ([] if planes is None else ["plane"])
        self.layout = KVLayout(
            dtype=dtype or str(first.dtype).removeprefix("torch."), item_bytes=first.element_size(),
            page_size=sizes["token"], layers=layers or sizes["layer"], planes=planes or sizes["plane"],
            kv_heads=sizes["head"], head_dim=sizes["dim"],
            order=" ".join([*outer, *(name for name in names if name != "page")]), shard=shard, shards=shards,
        )  # fmt: skip
        self.pages = sizes["page"]
        self.bytes_per_page = self.layout.bytes_per_page
        self.device = first.device
        carrier, self._numpy = _CARRIERS[first.element_size()]
        # a carrier of the same size: a view of other strides than contiguous ones is one, too
        self._parts = [tensor.detach().view(carrier).movedim(names.index("page"), 0) for tensor in flat]
        self._carrier = carrier
        self._inner = tuple(self._parts[0].shape[1:])
        self._step = math.prod(self._inner)  # elements of a page in one part
        self._arrays = [part.numpy() for part in self._parts] if self.device.type == "cpu" else []

    def gather(self, pages: PageIds | torch.Tensor, rows: torch.Tensor) -> None:
        """Copies pages into ``rows`` (uint8 ``[len(pages), bytes_per_page]``, each row contiguous, on this device).

        On a GPU it is enqueued on the current stream. There ``pages`` may be an int64 tensor of the device, whose ids
        are not checked; ids of any other kind are, with CopyFailed.
        """
        if self._arrays and not isinstance(pages, torch.Tensor):
            numbers = self.checked(pages).tolist()
            self._check_rows(rows, len(numbers))
            places = self.places(rows)
            for at, page in enumerate(numbers):
                self.copy_out(page, places, at)
            return
        ids = self.device_ids(pages)
        with torch.inference_mode():  # the engine may have made its tensors in this mode
            for at, part in enumerate(self._parts):
                torch.index_select(part, 0, ids, out=self._column(rows, at, len(ids)))

    def scatter(self, rows: torch.Tensor, pages: PageIds | torch.Tensor) -> None:
        """Copies ``rows`` into pages, none of them twice: the inverse of :meth:`gather`, with the same arguments."""
        if self._arrays and not isinstance(pages, torch.Tensor):
            numbers = self.checked(pages).tolist()
            self._check_rows(rows, len(numbers))
            places = self.places(rows)
            for at, page in enumerate(numbers):
                self.copy_in(places, at, page)
            return
        ids = self.device_ids(pages)
        with torch.inference_mode():
            for at, part in enumerate(self._parts):
                part.index_copy_(0, ids, self._column(rows, at, len(ids)))

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page onto another one, all layers; on a GPU it is enqueued on the current stream."""
        self.checked([source, target])
        if self._arrays:
            for array in self._arrays:
                np.copyto(array[target], array[source])
            return
        with torch.inference_mode():
            for part in self._parts:
                part[target].copy_(part[source])

    def page_bytes(self, page: int) -> npt.NDArray[np.uint8]:
        """The bytes of a page, uint8 ``[bytes_per_page]``, a copy on the CPU. On a GPU it waits for the device."""
        rows = torch.empty(1, self.bytes_per_page, dtype=torch.uint8, device=self.device)
        self.gather([page], rows)
        out: npt.NDArray[np.uint8] = rows[0].cpu().numpy()
        return out

    def checked(self, pages: PageIds) -> npt.NDArray[np.int64]:
        """``pages`` as an array, int64; raises CopyFailed if one is not of this pool."""
        ids = np.asarray(pages, dtype=np.int64)
        if ids.ndim != 1 or (ids.size and (ids.min() < 0 or ids.max() >= self.pages)):
            raise CopyFailed(f"pages {ids.tolist()} are not all pages of the pool, which has 0 to {self.pages - 1}")
        return ids

    def device_ids(self, pages: PageIds | torch.Tensor) -> torch.Tensor:
        """``pages`` as an int64 tensor of this device; what is one already is taken as it is."""
        if isinstance(pages, torch.Tensor):
            return pages
        return torch.from_numpy(self.checked(pages)).to(self.device)

    def places(self, rows: torch.Tensor) -> list[npt.NDArray[np.integer]]:
        """Where the pages' parts lie in ``rows``, on the CPU: for each part an array ``[len(rows), ...]``."""
        self._check_rows(rows, len(rows))
        items = rows.numpy().view(self._numpy)
        return [items[:, at : at + self._step].reshape(len(rows), *self._inner)
                for at in range(0, items.shape[1], self._step)]

    def copy_out(self, page: int, places: Places, row: int) -> None:
        """Copies a page to a row of what :meth:`places` gave; neither number is checked. For pools on the CPU."""
        for array, place in zip(self._arrays, places, strict=True):
            np.copyto(place[row], array[page])

    def copy_in(self, places: Places, row: int, page: int) -> None:
        """The inverse of :meth:`copy_out`."""
        for array, place in zip(self._arrays, places, strict=True):
            np.copyto(array[page], place[row])

    def _column(self, rows: torch.Tensor, at: int, n: int) -> torch.Tensor:
        """Where part ``at`` of each page lies in ``rows``, in the part's shape."""
        self._check_rows(rows, n)
        size = self._step * self.layout.item_bytes
        return rows[:, at * size : (at + 1) * size].view(self._carrier).view(n, *self._inner)

    def _check_rows(self, rows: torch.Tensor, n: int) -> None:
        fits = rows.dtype == torch.uint8 and tuple(rows.shape) == (n, self.bytes_per_page)
        if not fits or rows.stride(1) != 1 or rows.device != self.device:
            raise CopyFailed(f"rows for {n} pages must be uint8 [{n}, {self.bytes_per_page}] on {self.device}, each "
                             f"row contiguous, not {rows.dtype} {list(rows.shape)} on {rows.device}")
        item = self.layout.item_bytes
        if rows.data_ptr() % item or (n > 1 and rows.stride(0) % item):
            raise CopyFailed(f"each row must begin at a multiple of {item} bytes, the size of an element")


def _flattened(tensors: Tensors) -> tuple[list[torch.Tensor], int | None, int | None]:
    """All tensors in the order of a row; how many layers and planes the lists stand for, None where none is listed."""
    if isinstance(tensors, torch.Tensor):
        return [tensors], None, None
    layers = _listed(tensors)
    if not layers:
        raise LayoutMismatch("no tensors: give the pool's, one for all layers or a list with one per layer")
    flat: list[torch.Tensor] = []
    widths = set()
    for layer in layers:
        planes = [layer] if isinstance(layer, torch.Tensor) else _listed(layer)
        widths.add(None if isinstance(layer, torch.Tensor) else len(planes))
        for plane in planes:
            if not isinstance(plane, torch.Tensor):
                raise _no_tensor(plane)
            flat.append(plane)
    if len(widths) != 1 or 0 in widths:
        raise LayoutMismatch("every layer must have the same number of tensors, at least one")
    return flat, len(layers), widths.pop()


def _listed(tensors: object) -> list[Any]:
    if isinstance(tensors, Iterable) and not isinstance(tensors, (np.ndarray, str, bytes, Mapping)):
        return list(tensors)
    raise _no_tensor(tensors)


def _no_tensor(given: object) -> LayoutMismatch:
    return LayoutMismatch(f"the pool's memory is given as torch tensors, and this is a {type(given).__name__}; numpy "
                          "arrays go through torch.from_numpy, which copies nothing")


def _names(axes: str | None, *, listed: bool, planes: int | None) -> list[str]:
    given = [] if not listed else ["layer"] if planes is None else ["layer", "plane"]
    if axes is None:
        return [name for name in _AXES if name not in given]
    names = axes.split()
    for name in names:
        if name not in _AXES:
            raise LayoutMismatch(f"axes: {name!r} is none of {', '.join(_AXES)}")
        if name != "dim" and names.count(name) > 1:
            raise LayoutMismatch(f"axes: {name} comes twice in {axes!r}; only dim may")
        if name in given:
            raise LayoutMismatch(f"axes: {name} is an axis of the list already, and cannot be one of each tensor")
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise LayoutMismatch(f"axes: {axes!r} lacks {' and '.join(missing)}")
    return names


def _check_alike(tensor: torch.Tensor, first: torch.Tensor, names: list[str]) -> None:
    if tensor.ndim != len(names):
        raise LayoutMismatch(f"a tensor {list(tensor.shape)} has {tensor.ndim} axes, and {len(names)} are named "
                             f"({' '.join(names)}); say with axes what they are")
    if not tensor.numel():
        raise LayoutMismatch(f"a tensor {list(tensor.shape)} holds no page")
    if tensor.element_size() not in _CARRIERS or tensor.layout != torch.strided or tensor.is_quantized:
        raise LayoutMismatch(f"{tensor.dtype} tensors of layout {tensor.layout} are no KV memory that can be copied")
    if tensor.is_conj() or tensor.is_neg():
        raise LayoutMismatch("a view that torch conjugates or negates when it is read does not show the pool's bytes")
    for what in ("shape", "dtype", "device"):
        if getattr(tensor, what) != getattr(first, what):
            raise LayoutMismatch(f"the tensors of a pool must be alike, and their {what} is {getattr(first, what)} and "
                                 f"{getattr(tensor, what)}", {what: (getattr(first, what), getattr(tensor, what))})


def _check_apart(tensors: list[torch.Tensor]) -> None:
    """No element in two places: writing one page would write another one. Ranges that interleave are apart."""
    spans = []
    for tensor in tensors:
        sizes, strides = tuple(tensor.shape), tensor.stride()
        if not _separate(sizes, strides):
            raise LayoutMismatch(f"elements of a tensor {list(sizes)} with strides {list(strides)} share memory")
        reach = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size(), strides))
    spans.sort()
    item, sizes = tensors[0].element_size(), tuple(tensors[0].shape)
    for i, (start, end, strides) in enumerate(spans):
        for other, _, theirs in spans[i + 1 :]:
            if other >= end:
                break
            # two that interleave are one tensor with one axis more
            apart, odd = divmod(other - start, item)
            if odd or strides != theirs or not _separate((*sizes, 2), (*strides, apart)):
                raise LayoutMismatch("two tensors of the pool share memory; each page must have bytes of its own")


def _separate(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether every index has an element of its own; sorted by stride, each axis steps over all that lie within."""
    reach = 1
    for stride, n in sorted((stride, n) for n, stride in zip(sizes, strides, strict=True) if n > 1):
        if stride < reach:
            return False
        reach += stride * (n - 1)
    return True
