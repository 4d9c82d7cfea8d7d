"""Where a recorded page's bits come from: the batches that filled it, and the pages that it was computed above.

Two requests may compute equal tokens at the same time. The first to end stores its pages, the other one's first pages
are duplicates, and of that one only what is longer is stored: above pages that it was not computed from. Equal for the
cache, but where bits depend on the schedule the last bits of the two may differ.
"""

from __future__ import annotations

from dataclasses import replace

import xxhash

from distkv.engine.record import Place, RecordedRequest, Recording
from distkv.errors import GateFailed

__all__ = ["Lineage"]


class Lineage:
    """The versions of the pages of a recording whose pieces lie within pages. Equal versions have equal bits."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._own: dict[str, dict[int, tuple[Place, ...]]] = {}
        self._versions: dict[tuple[tuple[Place, ...] | str, int], int] = {}

    def versions(self, request: RecordedRequest, pages: int) -> list[int]:
        """Of its first pages. Raises ``GateFailed`` for a page that was filled before the recording began."""
        return [self._version(self.writer(request, page), self._filled(request, page), page) for page in range(pages)]

    def writer(self, request: RecordedRequest, page: int) -> RecordedRequest:
        """The request that computed a page of ``request``'s table: itself, or whoever filled the cached one.

        Of forks that filled a page one after the other the last, which has below it what all of them had.
        """
        if page >= len(request.origin):
            return request
        if not request.origin[page]:
            raise GateFailed(f"request {request.id!r}: page {page} was filled before the recording began")
        number, i = request.origin[page][-1]
        return self._recording.requests[self._recording.batches[number].chunks[i].request_id]

    def as_seen(self, request: RecordedRequest, page: int) -> bool:
        """Whether the pages before a cached page are those that it was computed above."""
        return self.versions(request, page) == self.versions(self.writer(request, page), page)

    def prefix(self, request: RecordedRequest, pages: int) -> RecordedRequest:
        """The first pages of a request, as a request of their own."""
        end = pages * self._recording.pool.page_size
        computed = [place for place in request.computed if self._start(place) < end]
        return replace(request, origin=request.origin[:pages], computed=computed, committed=end)

    def _start(self, place: Place) -> int:
        return self._recording.batches[place[0]].chunks[place[1]].start

    def _filled(self, request: RecordedRequest, page: int) -> tuple[Place, ...]:
        """Where the tokens of a page of ``request``'s table were computed."""
        before = request.origin[page] if page < len(request.origin) else ()
        return (*before, *self._places(request).get(page, ()))

    def _version(self, writer: RecordedRequest, places: tuple[Place, ...], page: int) -> int:
        """The version of a page that was computed at these places, above the pages of ``writer``."""
        key = (places or writer.id, page)  # none: they were part of a piece that began in an earlier page
        if key not in self._versions:
            what = (places, self.versions(writer, page))
            self._versions[key] = xxhash.xxh3_64_intdigest(repr(what).encode())
        return self._versions[key]

    def _places(self, request: RecordedRequest) -> dict[int, tuple[Place, ...]]:
        if request.id not in self._own:
            found: dict[int, tuple[Place, ...]] = {}
            for place in sorted(request.computed):
                page = self._start(place) // self._recording.pool.page_size
                found[page] = (*found.get(page, ()), place)
            self._own[request.id] = found
        return self._own[request.id]
