"""What the pages of a simulated rank hold, and the forward passes that still read and write them."""

from __future__ import annotations

from dataclasses import dataclass, field

from distkv.sequence import Sequence
from distkv.testing.group import Disagreement


@dataclass(slots=True, eq=False)
class Pass:
    """A forward pass in flight: ``sequence`` runs in it, and it reads or writes all its ``pages``."""

    step: int
    sequence: Sequence
    pages: frozenset[int]


@dataclass(slots=True)
class Content:
    """The modelled content of one rank's pages: the epoch and the whole prefix that each page was written for.

    ``asynchronous``: a pass ends when its step is retired, at some later time; until then nobody else may write its
    pages. Otherwise it has ended when the call that launched it returns.
    """

    size: int
    asynchronous: bool = False
    of_page: dict[int, object] = field(default_factory=dict)
    flights: list[Pass] = field(default_factory=list)

    def _prefix(self, sequence: Sequence, page: int) -> object:
        chain = sequence.chain
        return (sequence.epoch, chain.root, tuple(chain.slice(0, (page + 1) * self.size).tolist()))

    def launched(self, sequence: Sequence, n: int, step: int) -> None:
        """A pass was launched that writes the last ``n`` opened tokens. Raises Disagreement for a foreign write."""
        pages = sequence.page_indices.tolist()
        if self.asynchronous:
            written = set(pages[(sequence.seq_len - n) // self.size :])
            for flight in self.flights:
                if flight.sequence is not sequence and not written.isdisjoint(flight.pages):
                    raise Disagreement(f"{sequence} writes pages {sorted(written & flight.pages)}, which the pass of "
                                       f"{flight.sequence} in step {flight.step} uses and which is still in flight")
            self.flights.append(Pass(step, sequence, frozenset(pages)))

    def retired(self, step: int) -> None:
        """The passes up to this step have ended."""
        self.flights = [flight for flight in self.flights if flight.step > step]

    def written(self, sequence: Sequence, first: int, stop: int) -> None:
        """Tokens ``first .. stop - 1`` were committed: pages that they fill have their content now."""
        pages = sequence.page_indices
        for page in range(first // self.size, stop // self.size):
            self.of_page[int(pages[page])] = self._prefix(sequence, page)
        if stop % self.size:
            self.of_page.pop(int(pages[stop // self.size]), None)

    def expect(self, sequence: Sequence) -> None:
        """Every page that the sequence got from the cache has the bytes of its own prefix."""
        for page in range(sequence.cached_tokens // self.size):
            found = self.of_page.get(int(sequence.page_indices[page]))
            if found != self._prefix(sequence, page):
                raise Disagreement(f"page {page} of {sequence} was matched but holds {found}")
