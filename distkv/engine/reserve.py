"""How much room a request is promised at a time, and what happens when there is no more: growth and suspension.

All of it follows from what the ranks have agreed on, so every rank does the same in the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from distkv.cache import PrefixCache
from distkv.engine.handoff import NewRequest
from distkv.engine.state import Running

__all__ = ["Reserve", "victim"]


class Reserve:
    """The rule of ``engine.reserve_tokens``; None: all that a request may use is promised at its admission.

    The request that was admitted first is never suspended, and whatever has pages gives them up in the end, by its end
    or by suspension, the last admitted first. Since no request is larger than the smallest pool, each one gets on.
    """

    def __init__(self, cache: PrefixCache, reserve_tokens: int | None) -> None:
        self._cache = cache
        self._page_size = cache.config.cache.page_size
        self._lookahead = cache.config.cache.lookahead_tokens
        self._tokens = reserve_tokens

    def limit(self, prompt: int, output_limit: int, *, beams: bool = False) -> int:
        """For how many tokens of the answer a request is to have room at its admission.

        For all of them if it is too large for the group: the cache refuses it then. And for all with ``beams``, which
        have to run at the same time.
        """
        if self._tokens is None or beams or self._pages(prompt + output_limit) > self._cache.pool_pages:
            return output_limit
        return min(output_limit, self._tokens)

    def pages_of(self, new: NewRequest) -> int:
        """Pages that a request has to be able to have at once: of its sequences, which share its prompt's full pages.

        Beams go on together to the end. Samples can be suspended, but not before they are there.
        """
        prompt, limit = len(new.tokens), new.output_limit
        if new.beams is None and self._tokens is not None:
            limit = min(limit, self._tokens)
        each = self._pages(prompt + limit + self._lookahead)
        return each + (new.sequences - 1) * (each - prompt // self._page_size)

    def has_room(self, running: Running) -> bool:
        """Whether the next token has a place."""
        return running.sequence.seq_len < running.sequence.promised * self._page_size

    def grow(self, all_running: Iterable[Running]) -> None:
        """Asks for more room for those that have none left and go on."""
        if self._tokens is None:
            return
        for running in all_running:
            more = min(self._pages(self._tokens), self._pages(len(running.tokens)) - running.sequence.promised)
            if more > 0 and not running.growing and not self.has_room(running):
                running.growing = not self._cache.grow(running.sequence, more, wait=True)

    def suspend(self, running: Running) -> Running:
        """Suspends a request and puts it at the head of the queue, to go on from its last known token.

        Returns what it goes on with once it is admitted. What passes in flight compute for it is dropped.
        """
        name, known, total = running.sequence.id, running.known, len(running.tokens)
        running.sequence.suspend()
        self._cache.resume(name, output_limit=self.limit(known, total - known))
        tokens = running.tokens.copy()  # a pass in flight still writes into the old one
        return replace(running, tokens=tokens, promised=known, suspended=running.suspended + 1, growing=False)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)


def victim(name: str, running: Mapping[str, Running]) -> str:
    """Who is to be suspended when the cache names the last admitted sequence; "": nobody.

    The request that was admitted first is never suspended, though by its forks it may have come to have the last
    sequence: beams go on together or not at all.
    """
    first = min(running.values(), key=lambda each: each.turn).request
    if running[name].request != first or running[name].family is None:
        return name
    others = [(other.turn, i, each) for i, (each, other) in enumerate(running.items()) if other.request != first]
    return max(others)[2] if others else ""
