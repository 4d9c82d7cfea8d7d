"""One canonical, typed, length-prefixed encoding of values, and digests over it.

Every value carries a type tag and its byte length, so no two different lists of values have the same encoding:
``("org_1", "2345")`` and ``("org_12345", "")`` differ, ``None`` and ``""`` differ, a float32 array and an int32 array
of the same bytes differ. All integers are little-endian. Nothing here depends on the process: no ``hash()``, no
``repr``, no pickle.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as AbstractSequence
from typing import Any

import numpy as np

from distkv.errors import KeyNamingError

DIGEST_BYTES = 32


def encode(*values: object) -> bytes:
    """The canonical encoding of ``values``, one after another.

    Takes None, bool, int, float, str, bytes, numpy arrays, torch CPU tensors, and lists or tuples of these.
    Raises KeyNamingError for anything else. Returns bytes that the caller owns.
    """
    return b"".join(_one(value) for value in values)


def content_digest(*values: object, processing: str | None = None) -> bytes:
    """A 32-byte digest of the content of a media item or an embedding (BLAKE2b over :func:`encode`).

    ``processing`` names how the content was prepared (decoder, resize, colour mode). The same bytes under another
    processing are another content. Shape, dtype and the borders between values are part of the digest.
    """
    return hashlib.blake2b(encode(processing, *values), digest_size=DIGEST_BYTES).digest()


def _frame(tag: bytes, payload: bytes) -> bytes:
    return tag + struct.pack("<Q", len(payload)) + payload


def _one(value: object) -> bytes:
    if value is None:
        return _frame(b"N", b"")
    if isinstance(value, bool):
        return _frame(b"T", b"\1" if value else b"\0")
    if isinstance(value, (int, np.integer)):
        number = int(value)
        return _frame(b"I", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True))
    if isinstance(value, (float, np.floating)):
        return _frame(b"F", struct.pack("<d", float(value)))
    if isinstance(value, str):
        return _frame(b"S", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray)):
        return _frame(b"B", bytes(value))
    if isinstance(value, np.ndarray):
        return _array(value)
    if hasattr(value, "detach") and hasattr(value, "element_size"):
        return _tensor(value)
    if isinstance(value, AbstractSequence):
        return _frame(b"L", struct.pack("<Q", len(value)) + encode(*value))
    raise KeyNamingError(
        f"a {type(value).__name__} has no canonical encoding; give None, bool, int, float, str, bytes, "
        "a numpy array, a torch CPU tensor, or a list of these"
    )


def _array(array: np.ndarray) -> bytes:
    if array.dtype.hasobject or array.dtype.kind == "V":  # a structured dtype's string does not name its fields
        raise KeyNamingError(f"an array of {array.dtype} has no canonical encoding; give it a numeric dtype")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return _frame(b"A", encode(little.dtype.str, [int(n) for n in array.shape], little.tobytes()))


def _tensor(tensor: Any) -> bytes:
    if tensor.device.type != "cpu":
        raise KeyNamingError(f"a tensor on {tensor.device} cannot be digested; copy it to the CPU first")
    plain = tensor.detach().contiguous()
    try:
        return _array(plain.numpy())
    except TypeError:  # bfloat16 and the fp8 dtypes, which numpy does not have
        raw = plain.reshape(-1).view(_byte_dtype(plain)).numpy().tobytes()
        return _frame(b"A", encode(str(plain.dtype), [int(n) for n in plain.shape], raw))


def _byte_dtype(tensor: Any) -> Any:
    import torch

    return torch.uint8
