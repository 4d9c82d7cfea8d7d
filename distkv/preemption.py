"""Sequences that have to grow, and requests that were suspended so that others can. Sans-IO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distkv.books import Books, Call
from distkv.keys import tag_of
from distkv.request import Request
from distkv.sequence import Sequence

__all__ = ["Preemption"]


class Preemption:
    """Owns the list of sequences that wait for more pages, and the suspended requests. The same on every rank."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.suspended: dict[str, Request] = {}
        """By id, until they are resumed or aborted."""
        self._growing: list[tuple[Sequence, int]] = []

    @property
    def growing(self) -> bool:
        """Whether a sequence waits for more pages."""
        return bool(self._growing and self.asked())

    def asked(self) -> tuple[tuple[Sequence, int], ...]:
        """Running sequences that wait for more pages, and for how many, in order of asking."""
        self._growing = [(sequence, pages) for sequence, pages in self._growing if not sequence.ended]
        return tuple(self._growing)

    def asked_by(self, sequence: Sequence) -> int:
        """Pages for which this one waits."""
        return sum(pages for other, pages in self._growing if other is sequence)

    def grow_later(self, sequence: Sequence, pages: int) -> None:
        """The next ballots serve it ahead of all requests. A second call asks for that much more."""
        self.books.note(Call.GROW, tag_of(sequence.id), pages, 1)
        self._growing.append((sequence, pages))

    def grant(self, growths: tuple[tuple[Sequence, int], ...]) -> tuple[Sequence, ...]:
        """These get their pages; those that have ended since the ballot began need none."""
        for growth in growths:
            if growth in self._growing:  # else it has ended, and was dropped
                self._growing.remove(growth)
        alive = [(sequence, pages) for sequence, pages in growths if not sequence.ended]
        for sequence, pages in alive:
            sequence._grow(pages)
        return tuple(sequence for sequence, _ in alive)

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
        if self.books.tier is not None:
            self.books.tier.forget(request_id)

    def clear(self) -> None:
        """Nothing is suspended and nothing waits to grow, on this rank."""
        for request_id in list(self.suspended):
            self.forget(request_id)
        self._growing.clear()
