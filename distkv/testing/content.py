"""What the pages of a simulated rank hold in both tiers, and the forward passes and copies that read and write them.

A pass is launched into a stream, as on a GPU: it runs later, behind those launched before it, and reads and writes its
pages only then. Who reads what somebody else has written by then, raises Disagreement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from distkv.host.copies import Copy, Kind
from distkv.sequence import Sequence
from distkv.testing.group import Disagreement

Slots = list[int | None]
"""One value for each token of a page: it stands for the whole prefix up to there, and so for the token's KV."""


@dataclass(slots=True, eq=False)
class PageCopy:
    """A copy of a page onto another one, in the stream of the passes: what the first writer of a shared tail makes."""

    step: int
    source: int
    target: int


@dataclass(slots=True, eq=False)
class Pass:
    """A forward pass in flight, of ``sequence`` alone: it reads ``read`` tokens and writes from token ``first`` on."""

    step: int
    sequence: Sequence
    epoch: int
    pages: list[int]
    """Of the sequence, in order."""
    values: list[int]
    """Of its tokens, in order, as far as it reads."""
    read: int
    first: int
    written: list[int]
    uses: frozenset[int]
    """Pages that nobody else may write until its step was retired."""


class Content:
    """The modelled bytes of one rank, and its stream of passes.

    ``asynchronous``: a pass uses its pages until its step is retired; until then nobody else may launch a write of
    them. ``lagging``: passes run when :meth:`run` says so, otherwise when they are launched.
    """

    def __init__(self, size: int, pages: int, host_pages: int = 0, *, asynchronous: bool = False,
                 lagging: bool = False) -> None:
        self.size = size
        self.asynchronous = asynchronous
        self.lagging = lagging
        self.device: Slots = [None] * (size * pages)
        self.written_in: list[int] = [-1] * pages
        """The epoch in which the content of a page came there."""
        self.host: list[Slots] = [[None] * size] * host_pages
        self.stored_in: list[int] = [-1] * host_pages
        """Resets of the host tier before a page was stored."""
        self.host_resets = 0
        self.launched_passes = 0
        self.run_passes = 0
        self._stream: deque[Pass | PageCopy] = deque()
        self._flights: list[Pass] = []
        self._shared: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._values: dict[str, tuple[Sequence, list[int]]] = {}

    # ---- passes

    def launched(self, sequence: Sequence, n: int, step: int) -> None:
        """A pass was launched that writes the last ``n`` opened tokens. Raises Disagreement for a foreign write."""
        pages = sequence.page_indices.tolist()
        first = sequence.seq_len - n
        if self.asynchronous:
            # The tail is its own since its fork. Whoever has it too, or had it, reads what is in front of that.
            self._must_not_use({*pages[first // self.size :]} - {self._shared.get(sequence)}, sequence)
        values = self._values_of(sequence, first, sequence.seq_len)
        self._launch(Pass(step, sequence, sequence.epoch, pages, values, first, first, values[first:],
                          frozenset(pages) if self.asynchronous else frozenset()))

    def _must_not_use(self, pages: AbstractSet[int | None], sequence: Sequence | None) -> None:
        for flight in self._flights:
            if flight.sequence is not sequence and not pages.isdisjoint(flight.uses):
                raise Disagreement(f"{sequence} writes pages {pages & flight.uses}, which the pass of "
                                   f"{flight.sequence} in step {flight.step} uses and which is still in flight")

    def copied(self, source: int, target: int, step: int) -> None:
        """A page is copied onto another one, by the stream."""
        self._must_not_use({target}, None)
        self._launch(PageCopy(step, source, target))

    def forked(self, parent: Sequence, children: Iterable[Sequence], step: int) -> None:
        """These go on from the committed tokens of another one, and find their bytes."""
        for sequence in (parent, *children):
            if sequence.committed % self.size and not sequence.ended:
                self._shared[sequence] = int(sequence.page_indices[-1])
            if sequence is not parent:
                self.expect(sequence, step)

    def expect(self, sequence: Sequence, step: int) -> None:
        """Whoever reads the pages that the sequence got from the cache, from now on, finds the bytes of its prefix."""
        read = sequence.cached_tokens
        pages = sequence.page_indices.tolist()
        self._launch(Pass(step, sequence, sequence.epoch, pages, self._values_of(sequence, 0, read), read, read, [],
                          frozenset()))

    def run(self, count: int) -> None:
        """The next ``count`` passes of the stream run."""
        for _ in range(min(count, len(self._stream))):
            self._run(self._stream.popleft())

    def run_up_to(self, launched: int) -> None:
        """The first ``launched`` passes have run afterwards."""
        self.run(launched - self.run_passes)

    def retired(self, step: int) -> None:
        """The passes up to this step have ended."""
        while self._stream and self._stream[0].step <= step:
            self.run(1)
        self._flights = [flight for flight in self._flights if flight.step > step]

    def _launch(self, flight: Pass | PageCopy) -> None:
        self.launched_passes += 1
        self._stream.append(flight)
        if isinstance(flight, Pass) and flight.uses:
            self._flights.append(flight)
        if not self.lagging and not self.asynchronous:
            self.run(1)

    def _run(self, flight: Pass | PageCopy) -> None:
        self.run_passes += 1
        size, device = self.size, self.device
        if isinstance(flight, PageCopy):
            at, to = flight.source * size, flight.target * size
            device[to : to + size] = device[at : at + size]
            self.written_in[flight.target] = self.written_in[flight.source]
            return
        for at in range(0, flight.read, size):
            page, stop = flight.pages[at // size], min(at + size, flight.read)
            found = device[page * size : page * size + stop - at]
            if found != flight.values[at:stop] or self.written_in[page] != flight.epoch:
                raise Disagreement(f"page {at // size} of {flight.sequence} was matched but holds {found} of epoch "
                                   f"{self.written_in[page]} in page {page}, not {flight.values[at:stop]}")
        for at, value in enumerate(flight.written, flight.first):
            page = flight.pages[at // size]
            device[page * size + at % size] = value
            self.written_in[page] = flight.epoch

    def _values_of(self, sequence: Sequence, keep: int, stop: int) -> list[int]:
        """The values of its first ``stop`` tokens, of which ``keep`` were asked for before and have not changed."""
        known, values = self._values.get(sequence.id, (None, []))
        if known is not sequence:
            values, keep = [], 0
        values = values[:keep]
        last = values[-1] if values else sequence.chain.seed
        for token in sequence.tokens(len(values), stop).tolist():
            last = hash((last, token))
            values.append(last)
        self._values[sequence.id] = sequence, values
        return values

    # ---- copies

    def read(self, copy: Copy) -> tuple[Slots, bool]:
        """What the copy moves, and whether that was of use: a host page that was stored before a reset is not."""
        if copy.kind is Kind.STORE:
            return self.device[copy.device * self.size : (copy.device + 1) * self.size], True
        return self.host[copy.host], self.stored_in[copy.host] == self.host_resets

    def write(self, copy: Copy, data: tuple[Slots, bool] | None, era: int) -> None:
        """The copy ends. ``data``: what it has read; None: it failed, and its target holds anything.

        ``era``: what it brings is of this epoch (a load), or of so many resets of the host tier (a store).
        """
        garbage: Slots = [None] * self.size
        slots, good = data if data is not None else (garbage, False)
        if copy.kind is Kind.STORE:
            self.host[copy.host] = slots
            self.stored_in[copy.host] = era
        else:
            self.device[copy.device * self.size : (copy.device + 1) * self.size] = slots
            self.written_in[copy.device] = era if good else -1
