"""Pages as rows of bytes: every bit comes back, no other page is touched, and what is no pool is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distkv.errors import CopyFailed, LayoutMismatch
from distkv.host.kv import KVLayout, PagedKV

PAGES = 7
SIZES = {"layer": 3, "plane": 2, "page": PAGES, "token": 4, "head": 2, "dim": 5}
ENGINE = "layer plane page token head dim"
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8]


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit pattern may come: NaNs with a payload, negative zeros, subnormal numbers."""
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).squeeze(-1)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def one_tensor(axes: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return noise(tuple(SIZES[name] for name in axes.split()), dtype, seed)


def per_layer(axes: str, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [one_tensor(axes, dtype, seed + layer) for layer in range(SIZES["layer"])]


def per_plane(axes: str, dtype: torch.dtype, seed: int = 0) -> list[list[torch.Tensor]]:
    return [[one_tensor(axes, dtype, 2 * layer + plane) for plane in range(2)] for layer in range(SIZES["layer"])]


def interleaved(axes: str, dtype: torch.dtype, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of a layer are one tensor of the engine's, page by page side by side."""
    both = [noise((PAGES, 2, 4, 2, 5), dtype, seed + layer) for layer in range(SIZES["layer"])]
    return [(tensor[:, 0], tensor[:, 1]) for tensor in both]


def strided(axes: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every other page, and every other head, of a larger tensor whose axes lie in another order."""
    big = noise((5, 2 * PAGES, 4, 4, 2, 3), dtype, seed)
    return big[:, ::2, :, 1::2].permute(5, 4, 1, 2, 3, 0)


KINDS: dict[str, tuple[Any, str, str]] = {
    "engine": (one_tensor, ENGINE, "layer plane token head dim"),
    "page first": (one_tensor, "page layer plane token head dim", "layer plane token head dim"),
    "page last": (one_tensor, "token plane layer head dim page", "token plane layer head dim"),
    "heads first": (one_tensor, "layer page plane head token dim", "layer plane head token dim"),
    "one plane": (one_tensor, "layer page token dim", "layer token dim"),
    "list": (per_layer, "plane page token head dim", "layer plane token head dim"),
    "list, heads first": (per_layer, "page plane head token dim", "layer plane head token dim"),
    "list of planes": (per_plane, "page token head dim", "layer plane token head dim"),
    "interleaved": (interleaved, "page token head dim", "layer plane token head dim"),
    "strided": (strided, ENGINE, "layer plane token head dim"),
}


def tensors_of(pool: Any) -> list[torch.Tensor]:
    if isinstance(pool, torch.Tensor):
        return [pool]
    return [tensor for layer in pool for tensor in ([layer] if isinstance(layer, torch.Tensor) else layer)]


def page_of(pool: Any, axes: str, page: int) -> bytes:
    """What a row must be, by slicing alone."""
    at = axes.split().index("page")
    return b"".join(bits(tensor.select(at, page)) for tensor in tensors_of(pool))


@pytest.mark.parametrize("on_device", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_comes_back_and_other_pages_stay(kind: str, dtype: torch.dtype, on_device: bool) -> None:
    """With ids as a tensor it is torch that copies, as it does on a GPU."""
    make, axes, order = KINDS[kind]
    pool = make(axes, dtype)
    kv = PagedKV(pool, axes=axes)
    assert kv.pages == PAGES
    assert kv.layout.order == order
    assert kv.bytes_per_page == len(page_of(pool, axes, 0)) == kv.layout.bytes_per_page

    def ids(pages: list[int]) -> Any:
        return torch.tensor(pages) if on_device else pages

    before = [page_of(pool, axes, page) for page in range(PAGES)]
    around = torch.full((5, kv.bytes_per_page), 0xA5, dtype=torch.uint8)
    kv.gather(ids([5, 0, 3]), around[1:4])
    assert [bits(row) for row in around] == [b"\xa5" * kv.bytes_per_page, before[5], before[0], before[3],
                                             b"\xa5" * kv.bytes_per_page]
    kv.scatter(around[1:4], ids([2, 6, 0]))
    assert [page_of(pool, axes, page) for page in range(PAGES)] == [
        before[3], before[1], before[5], before[3], before[4], before[5], before[0]
    ]
    kv.copy_page(1, 4)
    assert page_of(pool, axes, 4) == kv.page_bytes(4).tobytes() == before[1]


def test_strided_memory_outside_the_pool_stays() -> None:
    big = noise((2, 2, 8, 4, 2, 3), torch.float16)
    before = big.clone()
    kv = PagedKV(big[:, :, 1:7:2])
    kv.scatter(torch.zeros(3, kv.bytes_per_page, dtype=torch.uint8), [0, 1, 2])
    assert not big[:, :, 1:7:2].any()
    for page in (0, 2, 4, 6, 7):
        assert bits(big[:, :, page]) == bits(before[:, :, page])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_axes_and_any_pages(data: st.DataObject) -> None:
    axes = " ".join(data.draw(st.permutations(ENGINE.split())))
    pool = one_tensor(axes, data.draw(st.sampled_from(TYPES)))
    pages = data.draw(st.lists(st.integers(0, PAGES - 1), unique=True))
    kv = PagedKV(pool, axes=axes)
    before = [page_of(pool, axes, page) for page in range(PAGES)]
    rows = torch.empty(len(pages), kv.bytes_per_page, dtype=torch.uint8)
    kv.gather(pages, rows)
    assert [bits(row) for row in rows] == [before[page] for page in pages]
    kv.scatter(rows.flip(0), pages)
    for page, source in zip(pages, reversed(pages), strict=True):
        assert page_of(pool, axes, page) == before[source]
    for page in set(range(PAGES)) - set(pages):
        assert page_of(pool, axes, page) == before[page]


def test_a_pool_made_in_inference_mode() -> None:
    with torch.inference_mode():
        pool = noise((2, 2, 4, 2, 1, 3), torch.bfloat16)
    kv = PagedKV(pool)
    for ids in ([1], torch.tensor([1])):
        kv.scatter(torch.zeros(1, kv.bytes_per_page, dtype=torch.uint8), ids)
    assert not pool[:, :, 1].any()


def test_a_heads_elements_may_be_split() -> None:
    pool = noise((PAGES, 2, 3, 4, 2), torch.bfloat16)  # [pages, heads, dim / 2, tokens, 2]
    kv = PagedKV([pool], axes="page head dim token dim")
    assert (kv.layout.kv_heads, kv.layout.head_dim, kv.layout.page_size, kv.layout.planes) == (2, 6, 4, 1)
    assert kv.page_bytes(3).tobytes() == bits(pool[3])


def test_layouts_of_equal_size_are_told_apart() -> None:
    layout = KVLayout(dtype="bfloat16", item_bytes=2, page_size=16, layers=2, planes=2, kv_heads=4, head_dim=8,
                      order="layer plane token head dim", shard=1, shards=2)
    layout.check_same(replace(layout))
    others = [
        replace(layout, dtype="float16"),
        replace(layout, page_size=32, kv_heads=2),
        replace(layout, page_size=8, head_dim=16),
        replace(layout, layers=4, planes=1),
        replace(layout, order="layer plane head token dim"),
        replace(layout, shard=0),
    ]
    for other in others:
        assert other.bytes_per_page == layout.bytes_per_page
        with pytest.raises(LayoutMismatch) as caught:
            layout.check_same(other)
        changed = {name for name in vars(layout) if getattr(layout, name) != getattr(other, name)}
        assert set(caught.value.differences) == changed
        assert all(name in str(caught.value) for name in changed)


def test_a_carrier_is_not_the_type() -> None:
    pool = noise((1, 2, 3, 4, 1, 8), torch.uint8)
    one, other = PagedKV(pool, dtype="fp8_e4m3"), PagedKV(pool, dtype="fp8_e5m2")
    with pytest.raises(LayoutMismatch, match=r"dtype is 'fp8_e4m3' here and 'fp8_e5m2' there"):
        one.layout.check_same(other.layout)


def layer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape or (2, 3, 4, 1, 5), dtype=dtype)


WHOLE = layer(4, 3, 4, 1, 5)
REFUSED: dict[str, tuple[Any, str | None, str]] = {
    "none": ([], None, "no tensors"),
    "pages": ([layer(), layer(2, 4, 4, 1, 5)], None, "their shape is"),
    "dtype": ([layer(), layer(dtype=torch.float16)], None, "their dtype is torch.float32 and torch.float16"),
    "device": ([layer(), layer().to("meta")], None, "their device is cpu and meta"),
    "axes": (layer(), None, "has 5 axes, and 6 are named"),
    "unknown": (layer(), "plane block token head dim", "'block' is none of"),
    "twice": (layer(), "page page token head dim", "page comes twice"),
    "no token": (layer(), "layer plane page head dim", "lacks token"),
    "listed": ([layer()], "layer page token head dim", "layer is an axis of the list already"),
    "ragged": ([[layer(), layer()], [layer()]], "page plane token head dim", "same number of tensors"),
    "empty": ([layer(2, 0, 4, 1, 5)], None, "holds no page"),
    "expanded": ([layer(1, 3, 4, 1, 5).expand(2, 3, 4, 1, 5)], None, "share memory"),
    "unfolded": (torch.zeros(1, 1, 20, 1, 1).unfold(2, 8, 4), "plane head page dim dim token", "share memory"),
    "one tensor twice": ([WHOLE, WHOLE], None, "two tensors of the pool share memory"),
    "numpy": (np.zeros((2, 3, 4, 1, 5)), None, "this is a ndarray; numpy arrays go through"),
    "numpy layers": ([np.zeros((2, 3, 4, 1, 5))], None, "this is a ndarray"),
    "nothing": (None, None, "this is a NoneType"),
    "no value": ([[layer(), None]], None, "this is a NoneType"),
    "by name": ({"0": layer()}, None, "this is a dict"),
    "conjugated": (layer(2, 2, 3, 4, 1, 5, dtype=torch.complex64).conj(), None, "conjugates or negates"),
    "a layer of it": ([WHOLE[:3], WHOLE[1:]], None, "two tensors of the pool share memory"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_pool_is_refused(why: str) -> None:
    tensors, axes, message = REFUSED[why]
    with pytest.raises(LayoutMismatch, match=message):
        PagedKV(tensors, axes=axes)


def test_pages_and_rows_that_are_none_move_nothing() -> None:
    pool = one_tensor(ENGINE, torch.float32)
    kv, before = PagedKV(pool), bits(pool)
    n = kv.bytes_per_page
    rows = torch.zeros(2, n, dtype=torch.uint8)
    for pages in ([0, PAGES], [-1, 0]):
        with pytest.raises(CopyFailed, match=r"0 to 6"):
            kv.scatter(rows, pages)
        with pytest.raises(CopyFailed, match=r"0 to 6"):
            kv.copy_page(*pages)
    shifted = torch.zeros(2 * n + 1, dtype=torch.uint8)[1:].view(2, n)
    for wrong in (rows[:1], rows[:, 1:], rows.to(torch.int8), torch.zeros(n, 2, dtype=torch.uint8).T, shifted):
        with pytest.raises(CopyFailed, match=r"rows? "):
            kv.scatter(wrong, [0, 1])
    assert bits(pool) == before
