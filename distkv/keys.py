"""Names of pages: the fingerprint, the chain of keys, and what else a page depends on.

``key_i = H(key_{i-1}, tokens_i, extras_i)`` with a 64-bit H (xxh3_64 seeded with the previous key), rooted in
everything constant that KV bytes depend on. A key *nominates* a page; the index then compares the token ids, the
extras and the parent links, so a collision costs a miss and never gives a wrong page.

The bytes of one page are its token ids as little-endian int32, always ``page_size`` of them, followed by its extras:
the ids of the ``next_token_depth`` tokens behind it (usually none), then what spans are there, in the encoding of
:mod:`distkv.encoding`. The ids have a fixed length and the rest is self-delimiting, so two different pages never have
the same bytes. The root covers the page size and the depth.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from distkv.errors import KeyNamingError

Hash64 = Callable[[Any, int], int]
"""(bytes-like data, 64-bit seed) -> 64-bit key."""

KEY_FUNCTIONS: dict[str, Hash64] = {"xxh3_64": xxhash.xxh3_64_intdigest, "xxh64": xxhash.xxh64_intdigest}
"""Key functions by the name that the configuration gives."""

TOKEN_BYTES = 4
_MAX_TOKEN = 2**31 - 1
_LITTLE = sys.byteorder == "little"
_MASK_64 = 2**64 - 1
_PACK = [struct.Struct(f"<B{n - 1}Q" if n else "").pack for n in range(17)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Everything constant that the KV bytes depend on, the same on every rank. A rank's own index is not part of it."""

    model: str
    """Name of the model, as the operator knows it."""
    weights_version: str = ""
    """Version of the weights; a bump changes it."""
    tokenizer: str = ""
    """Name or digest of the tokenizer, if token ids alone do not say it."""
    tp: int = 1
    """Tensor-parallel degree."""
    sp: int = 1
    """Sequence-parallel (Ulysses) degree."""
    dtype: str = ""
    """dtype of the KV pages, such as ``float32``."""
    kv_layout: str = ""
    """Order of the axes of the paged tensors."""
    attention: str = ""
    """Attention backend; another backend writes other bits."""
    positions: str = ""
    """Position scheme (RoPE base, scaling), if the model's name does not say it."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA or other adapter that changes the KV bytes. A new ``generation`` of a name shares nothing with the old."""

    name: str
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Positions ``start .. start + length - 1`` of a prompt whose input is not given by token ids alone.

    ``kind="media"`` is an image, audio or video item behind placeholder ids: it attends inside itself without
    causality, so its whole digest enters every page that it touches. ``kind="embedding"`` is a run of raw input
    embeddings. ``digest`` has at least 16 bytes; :func:`distkv.content_digest` makes one.
    """

    start: int
    length: int
    digest: bytes
    kind: str = "media"

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("length", self.length)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise KeyNamingError(f"a span's {name} is a whole number, not {value!r}")
        if not isinstance(self.digest, bytes):
            raise KeyNamingError(f"a span's digest is bytes, not {type(self.digest).__name__}; use content_digest()")
        if self.start < 0 or self.length < 1:
            raise KeyNamingError(f"a span needs start >= 0 and length >= 1, not {self.start} and {self.length}")
        if len(self.digest) < 16:
            raise KeyNamingError(f"a span's digest has at least 16 bytes, not {len(self.digest)}; use content_digest()")
        if self.kind not in ("media", "embedding"):
            raise KeyNamingError(f"a span's kind is 'media' or 'embedding', not {self.kind!r}")

    @property
    def end(self) -> int:
        """The first position behind the span."""
        return self.start + self.length


def spans_after(own: Sequence[Span], given: list[Span], common: int, own_ids: bytearray,
                ids: memoryview) -> list[Span]:
    """All spans of a prompt that follows one with the spans ``own``, where ``given`` were said of it; both sorted.

    The prompts share their first ``common`` tokens; ``own_ids`` and ``ids`` are their token bytes. An own span whose
    whole range is repeated at the same positions is kept. Raises KeyNamingError instead of a guess: see
    :meth:`distkv.KeyChain.follow`.
    """
    spans = list(given)
    for span in own:
        low, high = span.start, span.end
        at = bisect_right(given, low, key=lambda s: s.end)
        over = given[at] if at < len(given) and given[at].start < high else None
        if high <= common:
            if over is not None and over != span:
                raise KeyNamingError(f"the span {over.start} .. {over.end - 1} is another than the chain's own {low} "
                                     f".. {high - 1}, whose tokens are repeated; to replace it, follow branch({low})")
        elif low < common:
            if over is None or over.start > low or over.end < common:
                raise KeyNamingError(f"the tokens depart at {common}, inside the span {low} .. {high - 1}: give the "
                                     f"span that the new prompt has there, or, if it has none, follow branch({low})")
            continue
        elif ids[TOKEN_BYTES * low : TOKEN_BYTES * high] != own_ids[TOKEN_BYTES * low : TOKEN_BYTES * high]:
            continue  # behind the common tokens, and something else
        if over is None:
            spans.append(span)
    return sorted(spans, key=lambda s: s.start)


def token_bytes(ids: object) -> bytes | memoryview:
    """Token ids as little-endian int32 bytes: ``4 * n`` bytes.

    Takes a list or tuple of ints, ``array.array``, a memoryview, a 1-D numpy array of any integer dtype, or a 1-D
    torch CPU tensor. int32 input is not copied (the result is then a view, valid as long as the input is unchanged).
    Raises KeyNamingError for other types, other shapes, and ids outside 0 .. 2**31 - 1.
    """
    if type(ids) is list and ids and type(ids[0]) is int and _LITTLE:
        data = _bytes_of_list(ids)
        if data is not None:
            return data
    if isinstance(ids, (str, bytes)):
        raise KeyNamingError(f"token ids are numbers, not {type(ids).__name__}: tokenize the text first")
    if hasattr(ids, "detach"):
        tensor: Any = ids
        if tensor.device.type != "cpu":
            raise KeyNamingError(f"token ids on {tensor.device} cannot be named; copy them to the CPU first")
        try:
            ids = tensor.detach().numpy()
        except TypeError as error:  # bfloat16, sparse, quantised
            raise KeyNamingError(f"token ids must be integers: {error}") from None
    try:
        found = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise KeyNamingError(f"token ids must be a flat sequence of integers: {error}") from None
    if found.ndim != 1:
        raise KeyNamingError(f"token ids must be one-dimensional, not of shape {found.shape}")
    if not found.size:
        return b""
    if found.dtype.kind not in "iu":
        raise KeyNamingError(f"token ids must be integers, not {found.dtype}")
    low, high = int(found.min()), int(found.max()) if found.dtype != np.int32 else 0
    if low < 0 or high > _MAX_TOKEN:
        raise KeyNamingError(f"token ids must lie in 0 .. {_MAX_TOKEN}, not {low if low < 0 else high}; "
                             "give positions that are not tokens as spans over a placeholder id")
    return np.ascontiguousarray(found, dtype="<i4").data.cast("B")


def _bytes_of_list(ids: list[int]) -> bytes | memoryview | None:
    """Token ids of a list as bytes, without the detour over an int64 array. None: :func:`token_bytes` says why not."""
    try:
        numbers = array("i", ids)
    except (TypeError, OverflowError):
        return None
    low = ids[0] if len(ids) == 1 else np.frombuffer(numbers, np.int32).min()
    return None if low < 0 else memoryview(numbers).cast("B")


def tag_of(name: str) -> int:
    """A 64-bit tag of a request id for the rolling digest. Independent of the process."""
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


def roll(digest: int, call: tuple[int, ...], data: bytes) -> int:
    """The rolling digest after one more call, ``(operation, *numbers)``: ``xxh3_64(call, data; seed = digest)``."""
    try:
        packed = _PACK[len(call)](*call)
    except (IndexError, struct.error):  # many numbers, or one outside 0 .. 2**64 - 1
        packed = struct.pack(f"<B{len(call) - 1}Q", call[0], *[int(n) & _MASK_64 for n in call[1:]])
    return xxhash.xxh3_64_intdigest(packed + data, digest)
