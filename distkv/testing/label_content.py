"""What the pages of a simulated rank hold in the pools of all its labels, and which of them a pass reads.

A layer with a sliding window reads the tokens that its window covers and no others, one of a rolling label what was not
released. A pass that would read a page that is not there, or one with other bytes, raises Disagreement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from distkv.ledger import MAIN
from distkv.sequence import Sequence
from distkv.testing.content import Content, PageCopy, Pass
from distkv.testing.group import Disagreement

_GONE = -1


@dataclass(slots=True, eq=False)
class LabelPass(Pass):
    """A pass in one label's pool, of which ``ranges`` of tokens are read."""

    ranges: tuple[tuple[int, int], ...] = ()


class LabelContent(Content):
    """The modelled bytes of one label's pool on one rank."""

    def __init__(self, label: str, window: int | None, size: int, pages: int, host_pages: int = 0, *,
                 asynchronous: bool = False, lagging: bool = False) -> None:
        """``window``: tokens that a sliding layer reads, the new one included; None: all that are there."""
        super().__init__(size, pages, host_pages, asynchronous=asynchronous, lagging=lagging)
        self.label = label
        self.window = window

    def launched(self, sequence: Sequence, n: int, step: int) -> None:
        first, stop = sequence.seq_len - n, sequence.seq_len
        pages = self._pages_of(sequence)
        written = {*pages[first // self.size :]}
        if _GONE in written:
            raise Disagreement(f"{sequence} writes a page of label {self.label} that it has not")
        if self.asynchronous:
            self._must_not_use(written - {self._shared.get(sequence)}, sequence)
        values = self._values_of(sequence, first, stop)
        uses = frozenset(page for page in pages if page != _GONE) if self.asynchronous else frozenset()
        self._launch(LabelPass(step, sequence, sequence.epoch, pages, values, first, first, values[first:], uses,
                               tuple(self._read(sequence, first))))

    def expect(self, sequence: Sequence, step: int) -> None:
        read = sequence.cached_tokens
        self._launch(LabelPass(step, sequence, sequence.epoch, self._pages_of(sequence),
                               self._values_of(sequence, 0, read), read, read, [], frozenset(),
                               tuple(self._read(sequence, read))))

    def forked(self, parent: Sequence, children: Iterable[Sequence], step: int) -> None:
        for sequence in (parent, *children):
            if sequence.committed % self.size and not sequence.ended:
                self._shared[sequence] = self._pages_of(sequence)[-1]
            if sequence is not parent:
                self.expect(sequence, step)

    def _pages_of(self, sequence: Sequence) -> list[int]:
        """By position; those that were given up are gone."""
        its = sequence.pages_of(self.label)
        pages: list[int] = its.pages[: its.filled].tolist()
        if its.gone:
            pages[its.protected : its.first] = [_GONE] * its.gone
        return pages

    def _read(self, sequence: Sequence, end: int) -> Iterator[tuple[int, int]]:
        """The ranges of tokens in front of ``end`` that what comes behind them reads."""
        its = sequence.pages_of(self.label)
        if self.window is not None:
            yield max(0, end - self.window + 1), end
        elif its.gone:
            yield 0, its.protected * self.size
            yield its.first * self.size, end
        else:
            yield 0, end

    def _run(self, flight: Pass | PageCopy) -> None:
        if not isinstance(flight, LabelPass):
            super()._run(flight)
            return
        self.run_passes += 1
        size, device = self.size, self.device
        for start, end in flight.ranges:
            while start < end:
                page, stop = flight.pages[start // size], min((start // size + 1) * size, end)
                slot = page * size + start % size
                found = device[slot : slot + stop - start] if page != _GONE else "nothing: it was given up"
                if found != flight.values[start:stop] or self.written_in[page] != flight.epoch:
                    raise Disagreement(f"page {start // size} of {flight.sequence} in label {self.label} was matched "
                                       f"but holds {found} of epoch {self.written_in[page]} in page {page}, not "
                                       f"{flight.values[start:stop]}")
                start = stop
        for at, value in enumerate(flight.written, flight.first):
            page = flight.pages[at // size]
            device[page * size + at % size] = value
            self.written_in[page] = flight.epoch


class RankContent:
    """The modelled bytes of all pools of one rank; called as the :class:`Content` of one."""

    def __init__(self, parts: Iterable[LabelContent]) -> None:
        self.parts = {part.label: part for part in parts}

    @property
    def launched_passes(self) -> int:
        """Of ``main``, which has most."""
        return self.parts[MAIN].launched_passes

    def _of(self, sequence: Sequence) -> list[LabelContent]:
        return [self.parts[label] for label in sequence.labels]

    def launched(self, sequence: Sequence, n: int, step: int) -> None:
        for part in self._of(sequence):
            part.launched(sequence, n, step)

    def expect(self, sequence: Sequence, step: int) -> None:
        for part in self._of(sequence):
            part.expect(sequence, step)

    def forked(self, parent: Sequence, children: tuple[Sequence, ...], step: int) -> None:
        for part in self._of(parent):
            part.forked(parent, children, step)

    def run(self, count: int) -> None:
        for part in self.parts.values():
            part.run(count)

    def retired(self, step: int) -> None:
        for part in self.parts.values():
            part.retired(step)

    def run_all(self) -> None:
        """Every pass that was launched runs."""
        for part in self.parts.values():
            part.run(part.launched_passes)

    def host_was_reset(self) -> None:
        """The host tier of every label has forgotten everything."""
        for part in self.parts.values():
            part.host_resets += 1
