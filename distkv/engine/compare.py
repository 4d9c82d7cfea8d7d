"""Two runs of the same requests, compared bit for bit: the logits of every position sampled, the KV of every token.

No tolerance: two swapped pages move logits by as much as rounding does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distkv.engine.pool import KVPool
from distkv.engine.record import Recorded, RecordedRequest, Recording
from distkv.errors import GateFailed

__all__ = ["Difference", "GateReport", "PageDifference", "compare", "differing_pages"]


class PageDifference(NamedTuple):
    """Bytes of one page that are not what they should be, in one layer, in its keys or its values."""

    page: int
    """Index of the page in its request, or in the prefix that was checked."""
    pool_page: int
    """Id of the page in this rank's pool; of its host page with ``host``."""
    layer: int
    plane: int
    """0: keys, 1: values."""
    token: int
    """Position of the first token that differs, from the start of the sequence."""
    offset: int
    """Its place in the page."""
    tokens: int
    """How many tokens of the page differ."""
    host: bool = False
    """Whether it is the host tier's page."""

    def text(self, kind: str = "") -> str:
        """In words; ``kind`` is said of the page (cached or the request's own)."""
        many = f", {self.tokens} tokens in all" if self.tokens > 1 else ""
        plane = "values" if self.plane else "keys"
        where = "host" if self.host else "pool"
        return (f"page {self.page}{f' ({kind})' if kind else ''}, layer {self.layer}, {plane} differ: {where} page "
                f"{self.pool_page}, token {self.token} ({self.offset} of the page){many}")  # fmt: skip


class Difference(NamedTuple):
    """One difference between two runs. In their order the first is the nearest to the cause, also among ranks."""

    request: int
    """Number of the request, in the order in which they were compared."""
    token: int
    """Position from which on it differs."""
    layer: int
    """After all layers: the logits."""
    rank: int
    name: str
    """The request's id."""
    text: str
    """What differs, in words."""

    def __str__(self) -> str:
        return f"request {self.name!r}, rank {self.rank}: {self.text}"


@dataclass(frozen=True, slots=True)
class GateReport:
    """What was compared on this rank. ``found`` is empty if all bits are the same."""

    requests: int
    rows: int
    """Rows of logits."""
    pages: int
    cached_tokens: int
    found: tuple[Difference, ...] = ()

    @property
    def differences(self) -> tuple[str, ...]:
        """One line each."""
        return tuple(map(str, self.found))

    @property
    def differing(self) -> frozenset[str]:
        """Ids of the requests that differ."""
        return frozenset(difference.name for difference in self.found)

    def raise_if_failed(self) -> None:
        """Raises ``GateFailed`` with the first differences."""
        if self.found:
            shown = "; ".join(self.differences[:3])
            raise GateFailed(
                f"{len(self.found)} difference(s) between the cached run and the uncached one: {shown}",
                self.differences,
            )


def differing_pages(
    differs: np.ndarray, page_ids: np.ndarray, page_size: int, first_page: int = 0, layers: Sequence[int] | None = None
) -> Iterator[PageDifference]:
    """``differs`` (bool ``[tokens, layers, 2]``, from page ``first_page`` on) by page, layer and plane, in order.

    ``page_ids`` are the pool pages of the whole sequence; ``layers`` the numbers of the layers in the model.
    """
    for page in np.unique(np.flatnonzero(differs.any(axis=(1, 2))) // page_size).tolist():
        part = differs[page * page_size : (page + 1) * page_size]
        index = first_page + page
        for layer, plane in np.argwhere(part.any(axis=0)).tolist():
            offset = int(part[:, layer, plane].argmax())
            number = layer if layers is None else layers[layer]
            yield PageDifference(index, int(page_ids[index]), number, plane, index * page_size + offset, offset,
                                 int(part[:, layer, plane].sum()))  # fmt: skip


def compare(recording: Recording, expected: Mapping[str, Recorded], *, rank: int = 0) -> GateReport:
    """Compares the requests of a recording that are in ``expected`` (by their name in the recording) with it.

    ``rank`` is for the texts.
    """
    found: list[Difference] = []
    rows, pages, cached = 0, 0, 0
    for number, (name, wanted) in enumerate(expected.items()):
        request = recording.requests[name]
        found += [
            Difference(number, token, layer, rank, name, text)
            for token, layer, text in _differences(request, wanted, recording.pool)
        ]
        rows, pages = rows + len(request.logits), pages + len(request.page_ids)
        cached += request.cached_tokens
    return GateReport(len(expected), rows, pages, cached, tuple(sorted(found)))


def _differences(request: RecordedRequest, wanted: Recorded, pool: KVPool) -> Iterator[tuple[int, int, str]]:
    """(token, layer, text) of each."""
    assert request.kv is not None
    assert wanted.kv is not None
    both = min(len(request.kv), len(wanted.kv))
    if len(request.kv) != len(wanted.kv):
        yield both, 0, f"{len(request.kv)} tokens were computed, against {len(wanted.kv)}"
    differs = request.kv[:both] != wanted.kv[:both]
    for found in differing_pages(differs, request.page_ids, pool.page_size, layers=pool.numbers):
        yield found.token, found.layer, found.text("cached" if found.page < len(request.origin) else "own")
    layers = pool.numbers[-1] + 1
    if request.logits.keys() != wanted.logits.keys():
        yield both, layers, "logits were taken at other positions"
    for position, value in request.logits.items():
        if wanted.logits.get(position, value) != value:
            yield position, layers, f"the logits at position {position} differ"
