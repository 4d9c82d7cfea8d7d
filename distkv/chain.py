"""Chains of keys: the names of a conversation's pages, kept with it and extended with it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import asdict, replace

import numpy as np

from distkv.encoding import encode
from distkv.errors import KeyNamingError
from distkv.keylog import KeyLog, Naming
from distkv.keys import KEY_FUNCTIONS, TOKEN_BYTES, Adapter, Fingerprint, Hash64, Span, spans_after, token_bytes


class Namer:
    """Makes chains for one cache: the fingerprint, and how pages are cut out and hashed. Immutable."""

    def __init__(self, fingerprint: Fingerprint, page_size: int, key_function: str = "xxh3_64",
                 hash64: Hash64 | None = None, next_token_depth: int = 0) -> None:
        """``next_token_depth``: tokens behind a page that its KV depends on. ``hash64`` replaces the named function,
        for tests."""
        self.fingerprint = fingerprint
        self.page_size = page_size
        self.key_function = key_function
        self.hash64 = hash64 or KEY_FUNCTIONS[key_function]
        self.next_token_depth = next_token_depth
        self.naming = Naming(page_size, self.hash64, next_token_depth)
        depth = ("next_token_depth", next_token_depth) if next_token_depth else ()  # without one: the names of old
        self.identity = encode("distkv-1", *(f for pair in asdict(fingerprint).items() for f in pair), page_size,
                               *depth)

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
        return Namer(fingerprint, self.page_size, self.key_function, self.hash64, self.next_token_depth)

    def probe(self) -> str:
        """The last key of a fixed chain that has every part of the encoding, in hex; equal on ranks that name alike."""
        size = 2 * self.page_size + self.next_token_depth
        span = Span(self.page_size - 1, 1, bytes(range(16)), "embedding")
        chain = self.chain(np.arange(size, dtype=np.int32), adapter=Adapter("probe", 1), salt="probe", spans=[span])
        return f"{chain.keys[1]:016x}"


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
        self._log = KeyLog(namer.naming, self.seed)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"KeyChain({self._length} tokens, {self.pages} named pages)"

    @property
    def pages(self) -> int:
        """Number of pages that have a key: the full ones, as far as the tokens behind them are known that their KV
        depends on (``next_token_depth``, 0 by default)."""
        known = self._length - self.namer.next_token_depth
        return known // self.namer.page_size if known > 0 else 0

    @property
    def keys(self) -> list[int]:
        """The keys of the log's named pages; the first ``pages`` of them are this chain's. Not to be modified."""
        return self._log.keys

    @property
    def buffer(self) -> bytearray:
        """The log's token ids as little-endian int32; the first ``4 * len(chain)`` bytes are this chain's. Not to be
        modified, and no view of it may outlive the call that took it (a view forbids appending)."""
        return self._log.tokens

    @property
    def extras(self) -> dict[int, bytes]:
        """What the keys of the log's named pages cover beside their tokens, by page number; a page may have none. It is
        the next tokens as int32, ``next_token_depth`` of them, and the encoded spans. Not to be modified."""
        return self._log.extras

    @property
    def has_extras(self) -> bool:
        """Whether any page of the log has extras."""
        return bool(self._log.extra_pages)

    def count_extras(self, start: int, stop: int) -> int:
        """How many of the pages ``start .. stop - 1`` have extras."""
        pages = self._log.extra_pages
        return bisect_left(pages, stop) - bisect_left(pages, start) if pages else 0

    def extras_between(self, start: int, stop: int) -> dict[int, bytes]:
        """The extras of those of the pages ``start .. stop - 1`` that have any."""
        return self._log.extras_between(start, stop)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans that lie in this chain."""
        spans = self._log.spans
        if not spans:
            return ()
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
            self._log = self._log.copy(self._length, self.pages, self.spans)
        self._log.append(data, spans)
        self._length += len(data) // TOKEN_BYTES

    def branch(self, n_tokens: int | None = None) -> KeyChain:
        """A chain of this chain's first ``n_tokens`` tokens (all by default), without a copy.

        Raises KeyNamingError if that would cut a span in two.
        """
        n = self._length if n_tokens is None else n_tokens
        if not 0 <= n <= self._length:
            raise KeyNamingError(f"cannot branch at token {n}: the chain has {self._length}")
        cut = self._log.span_around(n)
        if cut is not None:
            raise KeyNamingError(f"branching at token {n} would cut the span {cut.start} .. {cut.end - 1} in two")
        return self._view(n)

    def follow(self, tokens: object, spans: Iterable[Span] = ()) -> KeyChain:
        """The chain of ``tokens`` that reuses the names of the common prefix: for the next turn of a conversation.

        A span of this chain whose whole range ``tokens`` repeat, at the same positions, is kept, so that an item never
        loses its name by being left out; ``spans`` are the others of the new prompt, and may repeat kept ones. The
        result is a branch; this chain stays as it is.

        Raises KeyNamingError where it would have to guess: a span that overlaps a kept one of the common prefix and
        is another, and a span of this chain that the new tokens leave in its midst, unless one of ``spans`` says
        what the repeated part of it is now. ``branch(n).follow(...)`` with n before such a span knows nothing of it.
        """
        data = memoryview(token_bytes(tokens))
        common = self._common_tokens(data)
        old_spans = self.spans
        new_spans = sorted(spans, key=lambda s: s.start)
        if old_spans:
            new_spans = spans_after(old_spans, new_spans, common, self._log.tokens, data)
        for old, new in zip(old_spans, new_spans, strict=False):
            if old != new:
                common = min(common, old.start, new.start)
        for extra in (*old_spans[len(new_spans):], *new_spans[len(old_spans):]):
            common = min(common, extra.start)
        cut = self._log.span_around(common)
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
