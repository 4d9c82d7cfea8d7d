"""The log that the branches of one conversation share: tokens, spans, and the keys of the pages in it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from struct import Struct

from distkv.encoding import encode
from distkv.keys import TOKEN_BYTES, Hash64, Span


class Naming:
    """How tokens are cut into pages, and what of them a page's key covers. Immutable.

    A page's KV may depend on the ``next_token_depth`` tokens behind the page, as that of draft layers does. Its key
    covers them too then, and a page has none until they are known.
    """

    __slots__ = ("hash64", "next_bytes", "next_token_depth", "page_bytes", "page_size", "pages_of")

    def __init__(self, page_size: int, hash64: Hash64, next_token_depth: int = 0) -> None:
        self.page_size = page_size
        self.hash64 = hash64
        self.next_token_depth = next_token_depth
        self.page_bytes = TOKEN_BYTES * page_size
        self.next_bytes = TOKEN_BYTES * next_token_depth
        self.pages_of = Struct(f"{self.page_bytes}s").iter_unpack
        """The pages of a buffer, one after another, as ``(bytes,)``."""

    def pages_in(self, n_tokens: int) -> int:
        """How many pages of ``n_tokens`` tokens have a key: the full ones whose next tokens are there."""
        known = n_tokens - self.next_token_depth
        return known // self.page_size if known > 0 else 0


class KeyLog:
    """Append-only, so a view of its first n tokens never changes. Owned by the chains that share it.

    ``tokens`` are int32 little-endian bytes, ``keys`` those of the pages that have one, ``spans`` all spans in order,
    ``extras`` what the key of a page covers beside its own tokens: the next tokens, then what spans are there.
    """

    __slots__ = ("extra_pages", "extras", "keys", "naming", "seed", "spans", "tokens")

    def __init__(self, naming: Naming, seed: int) -> None:
        self.naming = naming
        self.seed = seed
        self.tokens = bytearray()
        self.keys: list[int] = []
        self.spans: list[Span] = []
        self.extras: dict[int, bytes] = {}
        self.extra_pages: list[int] = []  # the keys of extras, which are ascending, for bisection

    def append(self, data: bytes | memoryview | bytearray, spans: Iterable[Span]) -> None:
        """Appends token bytes and the spans among them, and names the pages that can be named now."""
        self.tokens += data
        if spans:
            self.spans.extend(spans)
        end = (len(self.tokens) - self.naming.next_bytes) // self.naming.page_bytes
        if end > len(self.keys):
            self._name_pages(end)

    def copy(self, n_tokens: int, pages: int, spans: Iterable[Span]) -> KeyLog:
        """A log of its own of the first ``n_tokens`` tokens, which have ``pages`` keys and these ``spans``."""
        log = KeyLog(self.naming, self.seed)
        log.tokens = self.tokens[: TOKEN_BYTES * n_tokens]
        log.keys = self.keys[:pages]
        log.spans = list(spans)
        log.extras = self.extras_between(0, pages)
        log.extra_pages = list(log.extras)
        return log

    def extras_between(self, start: int, stop: int) -> dict[int, bytes]:
        """The extras of those of the pages ``start .. stop - 1`` that have any."""
        pages, extras = self.extra_pages, self.extras
        return {page: extras[page] for page in pages[bisect_left(pages, start) : bisect_left(pages, stop)]}

    def span_around(self, n: int) -> Span | None:
        """The span that begins before token ``n`` and ends behind it."""
        spans = self.spans
        if not spans:
            return None
        before = bisect_left(spans, n, key=lambda s: s.start) - 1  # the last that starts before n; spans do not overlap
        return spans[before] if before >= 0 and n < spans[before].end else None

    def _name_pages(self, end: int) -> None:
        """Names the pages up to ``end - 1`` that have no key yet."""
        first, key = len(self.keys), self.keys[-1] if self.keys else self.seed
        for page in self._touched(first, end) if self.spans else ():
            key = self._name_touched(page, self._name_plain(first, page, key))
            first = page + 1
        self._name_plain(first, end, key)

    def _name_plain(self, first: int, end: int, key: int) -> int:
        """Names the pages ``first .. end - 1``, which no span touches, behind ``key``. Returns the last key."""
        naming, hash64, keys = self.naming, self.naming.hash64, self.keys
        size, behind = naming.page_bytes, naming.next_bytes
        if not behind:
            with memoryview(self.tokens) as view, view[first * size : end * size] as new:
                keys += [key := hash64(page, key) for (page,) in naming.pages_of(new)]
            return key
        pages, ends = range(first, end), range(size, (end - first + 1) * size, size)
        data = bytes(self.tokens[first * size : end * size + behind])
        keys += [key := hash64(data[at - size : at + behind], key) for at in ends]
        self.extras.update(zip(pages, [data[at : at + behind] for at in ends], strict=True))
        self.extra_pages += pages
        return key

    def _name_touched(self, page: int, key: int) -> int:
        """Names one page that spans touch, behind ``key``. Returns its key."""
        naming = self.naming
        at, size = page * naming.page_bytes, naming.page_bytes
        covered = bytes(self.tokens[at : at + size + naming.next_bytes]) + self._spans_of(page)
        self.keys.append(key := naming.hash64(covered, key))
        self.extras[page] = covered[size:]
        self.extra_pages.append(page)
        return key

    def _touched(self, first: int, end: int) -> list[int]:
        """Those of the pages ``first .. end - 1`` that a span touches, they or their next tokens, in order."""
        size, depth, spans = self.naming.page_size, self.naming.next_token_depth, self.spans
        pages: list[int] = []
        for at in range(bisect_right(spans, first * size, key=lambda s: s.end), len(spans)):
            low = max((spans[at].start - depth) // size, pages[-1] + 1 if pages else first)
            pages.extend(range(low, min(end, (spans[at].end - 1) // size + 1)))
        return pages

    def _spans_of(self, page: int) -> bytes:
        """The spans that touch a page or its next tokens, encoded."""
        size = self.naming.page_size
        low, high = page * size, (page + 1) * size + self.naming.next_token_depth
        parts, spans = [], self.spans
        for at in range(bisect_right(spans, low, key=lambda s: s.end), len(spans)):
            span = spans[at]
            if span.start >= high:
                break
            first = max(span.start, low)
            parts.append(encode(span.kind, first - low, first - span.start, span.length, span.digest))
        return b"".join(parts)
