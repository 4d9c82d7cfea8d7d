"""Names of pages: the fingerprint, the chain of keys, and what else a page depends on.

``key_i = H(key_{i-1}, tokens_i, extras_i)`` with a 64-bit H (xxh3_64 seeded with the previous key), rooted in
everything constant that KV bytes depend on. A key *nominates* a page; the index then compares the token ids, the
extras and the parent links, so a collision costs a miss and never gives a wrong page.

The bytes of one page are its token ids as little-endian int32, always ``page_size`` of them, followed by its extras
in the encoding of :mod:`distkv.encoding`; the first part has a fixed length and the second is self-delimiting, so
two different pages never have the same bytes.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import xxhash

from distkv.encoding import encode
from distkv.errors import KeyNamingError

Hash64 = Callable[[Any, int], int]
"""(bytes-like data, 64-bit seed) -> 64-bit key."""

KEY_FUNCTIONS: dict[str, Hash64] = {"xxh3_64": xxhash.xxh3_64_intdigest, "xxh64": xxhash.xxh64_intdigest}
"""Key functions by the name that the configuration gives."""

TOKEN_BYTES = 4
_MAX_TOKEN = 2**31 - 1
_MASK_64 = 2**64 - 1


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


def token_bytes(ids: object) -> bytes | memoryview:
    """Token ids as little-endian int32 bytes: ``4 * n`` bytes.

    Takes a list or tuple of ints, ``array.array``, a memoryview, a 1-D numpy array of any integer dtype, or a 1-D
    torch CPU tensor. int32 input is not copied (the result is then a view, valid as long as the input is unchanged).
    Raises KeyNamingError for other types, other shapes, and ids outside 0 .. 2**31 - 1.
    """
    if hasattr(ids, "detach"):
        tensor: Any = ids
        if tensor.device.type != "cpu":
            raise KeyNamingError(f"token ids on {tensor.device} cannot be named; copy them to the CPU first")
        try:
            ids = tensor.detach().numpy()
        except TypeError as error:  # bfloat16, sparse, quantised
            raise KeyNamingError(f"token ids must be integers: {error}") from None
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise KeyNamingError(f"token ids must be a flat sequence of integers: {error}") from None
    if array.ndim != 1:
        raise KeyNamingError(f"token ids must be one-dimensional, not of shape {array.shape}")
    if not array.size:
        return b""
    if array.dtype.kind not in "iu":
        raise KeyNamingError(f"token ids must be integers, not {array.dtype}")
    low, high = int(array.min()), int(array.max()) if array.dtype != np.int32 else 0
    if low < 0 or high > _MAX_TOKEN:
        raise KeyNamingError(f"token ids must lie in 0 .. {_MAX_TOKEN}, not {low if low < 0 else high}; "
                             "give positions that are not tokens as spans over a placeholder id")
    return np.ascontiguousarray(array, dtype="<i4").data.cast("B")


class Namer:
    """Makes chains for one cache: the fingerprint, the page size and the key function. Immutable."""

    def __init__(self, fingerprint: Fingerprint, page_size: int, key_function: str = "xxh3_64",
                 hash64: Hash64 | None = None) -> None:
        """``hash64`` replaces the named function, for tests."""
        self.fingerprint = fingerprint
        self.page_size = page_size
        self.key_function = key_function
        self.hash64 = hash64 or KEY_FUNCTIONS[key_function]
        self.identity = encode("distkv-1", *(f for pair in asdict(fingerprint).items() for f in pair), page_size)

    def root(self, adapter: Adapter | None, salt: str | None) -> bytes:
        """The identity of a request's root: two requests may share pages only if these bytes are equal."""
        if salt is not None and not isinstance(salt, str):
            raise KeyNamingError(f"a salt is a str or None, not {salt!r}")
        if adapter is None:
            return encode(self.identity, None, None, salt)
        if not isinstance(adapter, Adapter):
            raise KeyNamingError(f"an adapter is an Adapter(name, generation) or None, not {adapter!r}")
        if not isinstance(adapter.name, str) or not isinstance(adapter.generation, int):
            raise KeyNamingError(f"an adapter's name is a str and its generation an int, not {adapter!r}")
        return encode(self.identity, adapter.name, adapter.generation, salt)

    def chain(self, tokens: object = (), *, adapter: Adapter | None = None, salt: str | None = None,
              spans: Iterable[Span] = ()) -> KeyChain:
        """A new chain; see :class:`KeyChain`."""
        chain = KeyChain(self, adapter, salt)
        chain.extend(tokens, spans)
        return chain

    def with_weights(self, weights_version: str) -> Namer:
        """The namer for other weights of the same model."""
        fingerprint = replace(self.fingerprint, weights_version=weights_version)
        return Namer(fingerprint, self.page_size, self.key_function, self.hash64)

    def probe(self) -> str:
        """The last key of a fixed chain that has every part of the encoding, in hex; equal on ranks that name alike."""
        size = 2 * self.page_size
        span = Span(self.page_size - 1, 1, bytes(range(16)), "embedding")
        chain = self.chain(np.arange(size, dtype=np.int32), adapter=Adapter("probe", 1), salt="probe", spans=[span])
        return f"{chain.keys[1]:016x}"


class _Log:
    """What the branches of one conversation share: append-only, so a view of its first n tokens never changes."""

    __slots__ = ("extras", "keys", "spans", "tokens")

    def __init__(self) -> None:
        self.tokens = bytearray()
        self.keys: list[int] = []
        self.spans: list[Span] = []
        self.extras: dict[int, bytes] = {}


class KeyChain:
    """The names of a conversation's pages, kept with the conversation and extended with it.

    A chain is the first ``len(chain)`` tokens of a log. ``branch`` is O(1) and shares the log; extending a chain
    that ends where the log ends appends in place, any other extension first copies what it keeps. So a chain never
    changes by what is done to its branches, and a new turn hashes its new tokens alone. One thread at a time.
    """

    __slots__ = ("_length", "_log", "adapter", "namer", "root", "salt", "seed")

    def __init__(self, namer: Namer, adapter: Adapter | None = None, salt: str | None = None) -> None:
        self.namer = namer
        self.adapter = adapter
        self.salt = salt
        self.root = namer.root(adapter, salt)
        self.seed = namer.hash64(self.root, 0)
        self._log = _Log()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"KeyChain({self._length} tokens, {self.pages} full pages)"

    @property
    def pages(self) -> int:
        """Number of full pages, each of which has a key."""
        return self._length // self.namer.page_size

    @property
    def keys(self) -> list[int]:
        """The keys of the log's full pages; the first ``pages`` of them are this chain's. Not to be modified."""
        return self._log.keys

    @property
    def buffer(self) -> bytearray:
        """The log's token ids as little-endian int32; the first ``4 * len(chain)`` bytes are this chain's. Not to be
        modified, and no view of it may outlive the call that took it (a view forbids appending)."""
        return self._log.tokens

    @property
    def extras(self) -> dict[int, bytes]:
        """Encoded extras of the log's full pages that have any, by page number. Not to be modified."""
        return self._log.extras

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans that lie in this chain."""
        spans = self._log.spans
        return tuple(spans[: bisect_left(spans, self._length, key=lambda s: s.start)])

    @property
    def tokens(self) -> np.ndarray:
        """A copy of the token ids, int32 [len(chain)]."""
        return self.slice(0, self._length)

    def slice(self, start: int, stop: int) -> np.ndarray:
        """A copy of token ids ``start .. stop - 1``, int32 [stop - start]."""
        stop = min(stop, self._length)
        return np.frombuffer(bytes(self._log.tokens[TOKEN_BYTES * start : TOKEN_BYTES * stop]), dtype="<i4")

    def extend(self, tokens: object, spans: Iterable[Span] = ()) -> None:
        """Appends token ids (see :func:`token_bytes`); ``spans`` give absolute positions among the new tokens.

        All or nothing: raises KeyNamingError before anything changes.
        """
        data = token_bytes(tokens)
        added = sorted(spans, key=lambda s: s.start)
        if added:
            self._check_spans(added, self._length + len(data) // TOKEN_BYTES)
        self.extend_bytes(data, added)

    def extend_bytes(self, data: bytes | memoryview | bytearray, spans: Iterable[Span] = ()) -> None:
        """:meth:`extend` for ids that :func:`token_bytes` has checked already."""
        if not len(data):
            return
        if TOKEN_BYTES * self._length != len(self._log.tokens):
            self._copy_log()
        self._log.tokens += data
        self._log.spans.extend(spans)
        self._length += len(data) // TOKEN_BYTES
        self._name_new_pages()

    def branch(self, n_tokens: int | None = None) -> KeyChain:
        """A chain of this chain's first ``n_tokens`` tokens (all by default), without a copy.

        Raises KeyNamingError if that would cut a span in two.
        """
        n = self._length if n_tokens is None else n_tokens
        if not 0 <= n <= self._length:
            raise KeyNamingError(f"cannot branch at token {n}: the chain has {self._length}")
        cut = self._span_around(n)
        if cut is not None:
            raise KeyNamingError(f"branching at token {n} would cut the span {cut.start} .. {cut.end - 1} in two")
        return self._view(n)

    def follow(self, tokens: object, spans: Iterable[Span] = ()) -> KeyChain:
        """The chain of ``tokens`` that reuses the names of the common prefix: for the next turn of a conversation.

        ``spans`` are all spans of the new prompt. The result is a branch; this chain stays as it is.
        """
        data = memoryview(token_bytes(tokens))
        new_spans = sorted(spans, key=lambda s: s.start)
        common = self._common_tokens(data)
        old_spans = self.spans
        for old, new in zip(old_spans, new_spans, strict=False):
            if old != new:
                common = min(common, old.start, new.start)
        for extra in (*old_spans[len(new_spans):], *new_spans[len(old_spans):]):
            common = min(common, extra.start)
        cut = self._span_around(common)
        if cut is not None:
            common = cut.start
        chain = self._view(common)
        rest = [s for s in new_spans if s.start >= common]
        chain._check_spans(rest, len(data) // TOKEN_BYTES)
        chain.extend_bytes(data[TOKEN_BYTES * common :], rest)
        return chain

    def renamed(self, namer: Namer) -> KeyChain:
        """The same tokens, spans, adapter and salt under another namer (other weights): every page is named anew."""
        return namer.chain(self.tokens, adapter=self.adapter, salt=self.salt, spans=self.spans)

    # ---- inside

    def _view(self, n: int) -> KeyChain:
        chain = object.__new__(KeyChain)
        chain.namer, chain.adapter, chain.salt = self.namer, self.adapter, self.salt
        chain.root, chain.seed = self.root, self.seed
        chain._log, chain._length = self._log, n
        return chain

    def _span_around(self, n: int) -> Span | None:
        return next((s for s in self._log.spans if s.start < n < s.end), None)

    def _check_spans(self, spans: list[Span], end: int) -> None:
        at = self._length
        for span in spans:
            if span.start < at or span.end > end:
                raise KeyNamingError(f"the span {span.start} .. {span.end - 1} must lie among the new tokens "
                                     f"{self._length} .. {end - 1} and must not overlap another")
            at = span.end

    def _common_tokens(self, data: memoryview) -> int:
        n = min(self._length, len(data) // TOKEN_BYTES)
        if self._log.tokens.startswith(data[: TOKEN_BYTES * n]):
            return n
        old = np.frombuffer(self._log.tokens, dtype="<i4", count=n)
        return int((old != np.frombuffer(data, dtype="<i4", count=n)).argmax())

    def _copy_log(self) -> None:
        old, log = self._log, _Log()
        pages = self.pages
        log.tokens = old.tokens[: TOKEN_BYTES * self._length]
        log.keys = old.keys[:pages]
        log.spans = list(self.spans)
        log.extras = {page: data for page, data in old.extras.items() if page < pages}
        self._log = log

    def _name_new_pages(self) -> None:
        log, size, hash64 = self._log, TOKEN_BYTES * self.namer.page_size, self.namer.hash64
        first, end = len(log.keys), len(log.tokens) // size
        if first == end:
            return
        key = log.keys[-1] if log.keys else self.seed
        append = log.keys.append
        with memoryview(log.tokens) as view:
            if not log.spans:
                for start in range(first * size, end * size, size):
                    key = hash64(view[start : start + size], key)
                    append(key)
                return
            for page in range(first, end):
                extras = self._extras_of(page)
                data: bytes | memoryview = view[page * size : (page + 1) * size]
                if extras:
                    log.extras[page] = extras
                    data = bytes(data) + extras
                key = hash64(data, key)
                append(key)

    def _extras_of(self, page: int) -> bytes:
        size = self.namer.page_size
        low, high = page * size, (page + 1) * size
        parts, spans = [], self._log.spans
        for at in range(bisect_right(spans, low, key=lambda s: s.end), len(spans)):
            span = spans[at]
            if span.start >= high:
                break
            first = max(span.start, low)
            parts.append(encode(span.kind, first - low, first - span.start, span.length, span.digest))
        return b"".join(parts)


def tag_of(name: str) -> int:
    """A 64-bit tag of a request id for the rolling digest. Independent of the process."""
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


def roll(digest: int, operation: int, *numbers: int, data: bytes = b"") -> int:
    """The rolling digest after one more call: ``xxh3_64(operation, numbers, data; seed = digest)``."""
    packed = struct.pack(f"<B{len(numbers)}Q", operation, *[int(n) & _MASK_64 for n in numbers])
    return xxhash.xxh3_64_intdigest(packed + data, digest)
