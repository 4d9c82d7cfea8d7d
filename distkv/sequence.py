"""A running request: its page table, its tokens, and which of them are real."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from distkv.books import Call
from distkv.errors import SequenceError
from distkv.keys import TOKEN_BYTES, token_bytes
from distkv.pagelist import PageList
from distkv.rolling import RollingCalls
from distkv.sequence_state import Lifecycle, Slots

if TYPE_CHECKING:
    from collections.abc import Sequence as AbstractSequence

    from distkv.forks import Branch
    from distkv.request import Request

__all__ = ["Lifecycle", "Sequence", "Slots"]


class Sequence(RollingCalls):
    """One admitted request, from admission to ``finish`` or ``abort``. Made by the cache, called by the engine.

    It owns its pages (an owner count each) and a reservation for the rest of its ``T`` pages, so ``open`` cannot
    fail inside them. Three calls write: ``open(n)`` makes place for n tokens, ``append(ids)`` names tokens behind the
    prompt, ``commit(n)`` says that the KV of the next n opened tokens is real. Only committed tokens are ever named
    in ``chain`` or stored in the index. Every call is the same on all ranks, in the same order.

    It has a page table in each of its labels' pools; what one call opens is opened in all of them.
    """

    # ---- writing

    def open(self, n: int) -> Slots:
        """Makes place for the next ``n`` tokens. Returns their slots in the first label's pool, int64 [n].

        If its last page is shared with a fork and partly filled, it is copied first (see :meth:`fork`). Raises
        SequenceError, with nothing opened, if the tokens would not fit into the reservation.
        """
        self._must_run("open", n)
        if self.forking:
            self._must_not_fork()
        if n < 1:
            raise SequenceError(f"open needs at least 1 token, not {n}")
        end = self._opened + n
        filled = -(-end // self._books.page_size)
        for pages in self.lists:
            if filled - pages.owned > pages.reserved or filled > pages.total:  # a window has pages left at its end
                raise self._too_many(n, pages, filled - pages.owned)
        for pages in self.lists:  # before anything is opened: copying is what may fail here
            if pages.tail >= 0:
                pages.own_tail()
        for pages in self.lists:
            if filled > pages.owned:
                pages.take(filled)
            pages.filled = filled
        start, self._opened = self._opened, end
        self._books.note(Call.OPEN, self._tag, n)
        return self.slots(start, end)

    def _too_many(self, n: int, pages: PageList, more: int) -> SequenceError:
        to_end = pages.total - pages.owned
        text = (f"sequence {self.id!r} cannot open {n} tokens behind {self._opened}: that needs {more} more page(s), "
                f"and {min(pages.reserved, to_end)} are reserved")
        lookahead = self._books.lookahead_tokens
        ahead = f" + lookahead {lookahead}" if lookahead else ""
        if more > to_end or not pages.ledger.windowed:
            return SequenceError(f"{text} (prompt {self.prompt_tokens} + limit {self.request.output_limit}{ahead})")
        waiting = f" ({pages.retiring} more when their passes have retired)" if pages.retiring else ""
        return SequenceError(f"{text} of label {pages.ledger.label!r}{waiting}; {pages.ledger.remedy}")

    def append(self, ids: object) -> None:
        """Names the tokens behind the last named one (see :func:`distkv.keys.token_bytes` for what is taken)."""
        self._must_run("append")
        data = bytes(token_bytes(ids))
        self._names += data
        self._books.note(Call.APPEND, self._tag, data=data)

    def commit(self, n: int) -> None:
        """The KV of the next ``n`` opened and named tokens is real. With ``index_on: fill``, full pages are stored.

        Raises SequenceError, with nothing committed, if fewer are opened or named.
        """
        self._must_run("commit", n)
        end = self._committed + n
        if n < 0 or end > self._opened or end > self.named:
            raise SequenceError(f"sequence {self.id!r} cannot commit {n} tokens behind {self._committed}: "
                                f"{self._opened} are opened and {self.named} are named")
        new = TOKEN_BYTES * (end - len(self.chain))
        if new > 0:
            self.chain.extend_bytes(self._names[:new])
            del self._names[:new]
        before, self._committed = self._committed, end
        self._books.note(Call.COMMIT, self._tag, n)
        if self._books.store_at_fill:
            pages_in = self.chain.namer.naming.pages_in
            if pages_in(end) > pages_in(before):
                self._store()
        for pages in self._sliding:
            gone = pages.release(pages.ledger.first_kept(end))
            if len(gone):
                self._books.give_up(gone, pages)

    def truncate(self, n: int) -> None:
        """Takes back the last ``n`` opened tokens, their slots and (behind the prompt) their names.

        Their pages stay the sequence's, for its next tokens: they were promised to it, and a forward in flight may
        still write them. Raises SequenceError, with nothing taken back, if one of the tokens is committed.
        """
        self._must_run("truncate", n)
        if not 0 <= n <= self._opened - self._committed:
            raise SequenceError(f"sequence {self.id!r} cannot take back {n} tokens: "
                                f"{self._opened - self._committed} are opened and not committed")
        self._opened -= n
        for pages in self.lists:
            pages.filled = -(-self._opened // self._books.page_size)
        if n:
            del self._names[TOKEN_BYTES * max(0, self._opened - len(self.chain)) :]
        self._books.note(Call.TRUNCATE, self._tag, n)

    # ---- forks

    def fork(self, branches: int | AbstractSequence[Branch] = 1, *, wait: bool = False) -> tuple[Sequence, ...]:
        """Sequences that go on from the committed tokens of this one, on the very same pages. All of them or none.

        ``branches``: how many, or a :class:`distkv.Branch` for each, with its name, suffix and limit. Full pages are
        shared for good. A partly filled last page is shared until one of its owners opens a token in it: that call
        copies the page first, on the device, in the order of what the current stream computes; the last owner left
        writes without a copy. Named tokens that are not committed stay this sequence's own.

        What the children need is taken out of the leftover of the last step. If that is smaller it raises NoRoom, with
        nothing changed; with ``wait`` it returns no children, and the next steps serve this ahead of all requests: see
        ``StepResult.forked``. Raises SequenceError while a token is opened and not committed, and RequestError for a
        wrong or taken name. Like ``PrefixCache.grow`` it is called at the same place on all ranks: between two steps,
        or by all of them between begin and end of one.
        """
        if self.ended != "kept":
            self._must_run("fork")
        return self._owner.fork(self, branches, wait=wait)

    def keep(self) -> None:
        """Ends the request and keeps its committed prefix, a partly filled last page included, to be forked later.

        Its full pages are stored, as by :meth:`finish`; what was reserved is given back. The prefix stays, and its
        pages live, until :meth:`abort`, or a reset of the device or new weights. It is in ``PrefixCache.kept`` by its
        id. Raises SequenceError if such a reset came since its admission: requests to come must not go on from it.
        """
        self._must_run("keep")
        if self.epoch != self._books.epoch:
            raise SequenceError(f"sequence {self.id!r} cannot be kept: a reset or new weights came since its "
                                "admission; finish it")
        if self._opened != self._committed:
            raise SequenceError(f"sequence {self.id!r} cannot be kept: {self._opened - self._committed} of its tokens "
                                "are opened and not committed; commit or truncate them first")
        self._books.note(Call.KEEP, self._tag)
        self._store()
        self.ended = "kept"
        self.forking = False
        self._give_up_promises()
        self._owner._ended(self)

    def _give_up_promises(self) -> None:
        """What no fork would share is given back: reservations, and pages behind the committed tokens."""
        for pages in self.lists:
            self._books.release(*pages.keep(-(-self._committed // self._books.page_size)), pages.ledger)

    # ---- the end

    def finish(self) -> None:
        """Ends the request: its committed full pages, prompt and generated, go to the index; all else is freed.

        With ``asynchronous``, pages stay live until ``cache.retired`` of this step.
        """
        self._must_run("finish")
        self._books.note(Call.FINISH, self._tag)
        self._store()
        self._end("finished")

    def abort(self) -> None:
        """Ends the request and stores nothing more. Also while it is read in: its loads then end on their own.

        Of a prefix that was kept: lets it go.
        """
        if self.ended != "kept":
            self._must_run("abort", reading=True)
        self._books.note(Call.ABORT, self._tag)
        self._end("aborted")

    def suspend(self) -> Request:
        """Ends the sequence and keeps the request: its committed full pages are stored, as by :meth:`finish`.

        What of them nobody else has moves to the host tier's share of suspended requests, if there is room; the last,
        partial page is computed again, and so is what cannot be kept. Returns the request that goes on from here, with
        all named tokens as its prompt, which ``PrefixCache.resume`` puts at the head of the queue.
        """
        self._must_run("suspend")
        self._books.note(Call.SUSPEND, self._tag)
        self._store()
        for pages in self.lists:
            if pages.ledger.tiered is not None and pages.stored:
                pages.ledger.tiered.keep(self.id, pages.pages[: pages.stored])
        chain = self.chain.branch()
        if self._names:
            chain.extend_bytes(self._names)
        limit = max(0, self.prompt_tokens + self.request.output_limit - len(chain))
        rest = replace(self.request, chain=chain, output_limit=limit, matched_cap=None)
        self.to_resume = rest
        self._end("suspended")
        return rest

    def _loaded(self) -> None:
        """All ranks have read it in: what was loaded enters the index here, and it runs."""
        assert self.read_in is not None
        self.read_in.enter()
        self.read_in = None

    def _give_back(self) -> None:
        """Reading it in ended short, or for nothing: it gives back what it has, and its request waits again."""
        self._end("put back")

    def _grow(self, pages: int) -> None:
        """Reserves ``pages`` more. For :meth:`distkv.PrefixCache.grow` alone, which knows the agreed leftover."""
        self._must_run("grow", pages)
        for each in self.lists:
            each.grow(pages)

    def _store(self) -> None:
        """Offers all full pages to the indexes of its labels, as far as their next tokens are committed, too.

        Those that came from the index are offered in any case: there the next tokens are the prompt's.
        """
        full = max(self.chain.namer.naming.pages_in(self._committed), self._main.stored)
        if not full or not self.request.write or self.epoch != self._books.epoch:
            return
        for pages in self.lists:
            pages.ledger.store_all(pages, self.chain, full, self._main)

    def _end(self, how: str) -> None:
        self.parked = self._owner._forks_in_flight(self)
        self.ended = how
        if self.parked:
            self._give_up_promises()
        else:
            self._leave()
        self._owner._ended(self)

    def _leave(self) -> None:
        """Gives back all its pages."""
        self.parked = False
        read_in, self.read_in = self.read_in, None
        writing = {}
        if read_in is not None:
            writing = read_in.give_back(self._books, current=self.epoch == self._books.epoch)
        for pages in self.lists:
            held, reserved, protected = pages.leave()
            copies = writing.get(pages.ledger.label)
            self._books.release(held[~np.isin(held, copies)] if copies else held, reserved, pages.ledger, protected)
