"""Sequences that have to grow, and requests that were suspended so that others can. Sans-IO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distkv.books import Books, Call
from distkv.forks import Fork
from distkv.keys import tag_of
from distkv.request import Request
from distkv.sequence import Sequence

__all__ = ["Growth", "Preemption"]


@dataclass(slots=True, eq=False)
class Growth:
    """Something that a running sequence asked for, and does not have yet. The next ballots serve it first."""

    sequence: Sequence
    needs: tuple[int, ...]
    """Pages of each of the cache's labels."""
    pages: int = 0
    """Pages that the sequence is to grow by."""
    fork: Fork | None = None
    """Or the fork that it asked for."""

    @property
    def wanted(self) -> bool:
        """Whether it is still of use to somebody."""
        sequence = self.sequence
        return not sequence.ended or (self.fork is not None and (sequence.ended == "kept" or sequence.parked))


class Preemption:
    """Owns the list of sequences that wait for more pages, and the suspended requests. The same on every rank."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.suspended: dict[str, Request] = {}
        """By id, until they are resumed or aborted."""
        self._growing: list[Growth] = []

    @property
    def growing(self) -> bool:
        """Whether a sequence waits for more pages."""
        return bool(self._growing and self.asked())

    def asked(self) -> tuple[Growth, ...]:
        """What running sequences wait for, in order of asking."""
        return tuple(growth for growth in self._growing if growth.wanted)

    def begin(self) -> None:
        """A step begins: what nobody wants any more is forgotten. Until then the names of its forks stay taken,
        because a rank may hear of the end of a parent before or after its fork was made."""
        if self._growing:
            self._growing = [growth for growth in self._growing if growth.wanted]

    @property
    def names(self) -> list[str]:
        """Of the children of forks that wait."""
        return [request.id for growth in self._growing if growth.fork is not None for request in growth.fork.requests]

    def asked_by(self, sequence: Sequence) -> int:
        """Pages by which this one waits to grow."""
        return sum(growth.pages for growth in self._growing if growth.sequence is sequence)

    def later(self, growth: Growth) -> None:
        """The next ballots serve it ahead of all requests."""
        self._growing.append(growth)

    def granted(self, growths: tuple[Growth, ...]) -> tuple[Growth, ...]:
        """These have got their pages: they wait no longer. Returns those that are still of use."""
        self._growing = [growth for growth in self._growing if growth not in growths]
        return tuple(growth for growth in growths if growth.wanted)

    @staticmethod
    def victims(running: Mapping[str, Sequence]) -> tuple[str, ...]:
        """The last admitted sequence, unless it is the only one that can run: the first always goes on to its end.

        Nobody while the last is read in; in one of the next steps it can be suspended.
        """
        able = [name for name, sequence in running.items() if sequence.read_in is None]
        return (able[-1],) if len(able) > 1 and able[-1] == list(running)[-1] else ()

    def suspend(self, request: Request) -> None:
        """A sequence was suspended, and this is what goes on from there."""
        self.suspended[request.id] = request

    def resume(self, request_id: str, output_limit: int | None) -> Request | None:
        """The request, which is not suspended any more; None if there is none of this name.

        Raises RequestError, and it stays suspended, for a limit that is none.
        """
        request = self.suspended.get(request_id)
        if request is not None and output_limit is not None:
            request = replace(request, output_limit=output_limit)  # which raises for what is no limit
        self.books.note(Call.RESUME, tag_of(request_id), -1 if output_limit is None else output_limit)
        self.suspended.pop(request_id, None)
        return request

    def forget(self, request_id: str) -> None:
        """The request will not be resumed, or runs: what the host tier kept for it is free to go."""
        self.suspended.pop(request_id, None)
        for tier in self.books.tiers:
            tier.forget(request_id)

    def clear(self) -> None:
        """Nothing is suspended and nothing waits to grow, on this rank."""
        for request_id in list(self.suspended):
            self.forget(request_id)
        self._growing.clear()
