"""A running request: its page table, its tokens, and which of them are real."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from distkv.books import Books, Call
from distkv.chain import KeyChain
from distkv.errors import SequenceError
from distkv.keys import TOKEN_BYTES, tag_of, token_bytes
from distkv.pages import Ids, Pages
from distkv.readin import ReadIn

if TYPE_CHECKING:
    from collections.abc import Callable

    from distkv.request import Request, RequestRecord

Slots = npt.NDArray[np.int64]
"""Flat slots, int64 [n]: page * page_size + offset."""


class Sequence:
    """One admitted request, from admission to ``finish`` or ``abort``. Made by the cache, called by the engine.

    It owns its pages (an owner count each) and a reservation for the rest of its ``T`` pages, so ``open`` cannot
    fail inside them. Three calls write: ``open(n)`` makes place for n tokens, ``append(ids)`` names tokens behind the
    prompt, ``commit(n)`` says that the KV of the next n opened tokens is real. Only committed tokens are ever named
    in ``chain`` or stored in the index. Every call is the same on all ranks, in the same order.
    """

    def __init__(self, books: Books, request: Request, chain: KeyChain, matched: Ids, total: int,
                 record: RequestRecord, on_end: Callable[[Sequence], None], read_in: ReadIn | None = None) -> None:
        """Takes over one owner count of each ``matched`` page and ``total - len(matched)`` reserved pages.

        ``read_in``: the loads that still write some of these pages; the sequence cannot run until they have ended.
        """
        self.id = request.id
        self.request = request
        self.record = record
        self.chain = chain.branch()
        """Prompt and committed tokens. After the end, the conversation's next turn goes on from it."""
        self.prompt_tokens = len(chain)
        self.cached_tokens = len(matched) * books.page_size
        """Leading tokens whose KV was in the cache at admission."""
        self.epoch = books.epoch
        self.reserved = total - len(matched)
        """Pages promised and not opened yet."""
        self.read_in = read_in
        """The loads that it waits for; None if it can run."""
        self.ended: str | None = None
        """How it ended: finished, aborted, suspended, or put back into the queue."""
        self.to_resume: Request | None = None
        """Of a suspended sequence: the request that goes on from here."""
        self._books = books
        self._on_end = on_end
        self._tag = tag_of(request.id)
        self._pages = np.empty(total, np.int32)
        self._pages[: len(matched)] = matched
        self._n_pages = len(matched)  # those that the opened tokens fill
        self._n_owned = len(matched)  # and those that truncated tokens have left: kept for the next open
        self._opened = self._committed = self.cached_tokens
        self._names = bytearray()  # ids behind the chain's end that are named and not committed
        self._stored = len(matched)

    def __repr__(self) -> str:
        return (f"Sequence({self.id!r}, {self._committed} committed of {self._opened} opened tokens, "
                f"{self._n_pages} pages, {self.reserved} reserved{', ' + self.ended if self.ended else ''})")

    # ---- what an engine reads

    @property
    def read_in_progress(self) -> bool:
        """True while pages of the host tier are being loaded, on any rank; the sequence must not run then."""
        return self.read_in is not None

    @property
    def promised(self) -> int:
        """Pages that it owns or has reserved."""
        return self._n_owned + self.reserved

    @property
    def page_indices(self) -> Pages:
        """Page ids in order, int32 [pages]. Valid until the next call on this sequence; not to be modified."""
        return self._pages[: self._n_pages]

    @property
    def owned_pages(self) -> Pages:
        """``page_indices`` and the pages behind them that truncated tokens have left, int32. Not to be modified."""
        return self._pages[: self._n_owned]

    @property
    def seq_len(self) -> int:
        """Opened tokens: ``(pages - 1) * page_size < seq_len <= pages * page_size``."""
        return self._opened

    @property
    def committed(self) -> int:
        """Tokens whose KV is real."""
        return self._committed

    @property
    def position_id_start(self) -> int:
        """Position of the first token that is not committed, where the next forward begins."""
        return self._committed

    @property
    def named(self) -> int:
        """Tokens whose ids are known: the prompt and what was appended."""
        return len(self.chain) + len(self._names) // TOKEN_BYTES

    def tokens(self, start: int, stop: int) -> Pages:
        """A copy of the ids of named tokens ``start .. stop - 1``, int32."""
        at = len(self.chain)
        if not 0 <= start <= stop <= self.named:
            raise SequenceError(f"sequence {self.id!r} has {self.named} named tokens, not {start} .. {stop - 1}")
        behind = np.frombuffer(bytes(self._names), "<i4")
        return np.concatenate([self.chain.slice(start, min(stop, at)), behind[max(0, start - at) : max(0, stop - at)]])

    def slots(self, start: int, stop: int) -> Slots:
        """Flat slots of opened tokens ``start .. stop - 1``, int64 [stop - start]. Raises SequenceError for others."""
        size = self._books.page_size
        if self.ended or not 0 <= start <= stop <= self._opened:
            raise SequenceError(f"sequence {self.id!r} has no slots {start} .. {stop - 1}: "
                                + (f"it was {self.ended}" if self.ended else f"{self._opened} tokens are opened"))
        first = start // size
        if first * size < stop <= (first + 1) * size:  # in one page, as a decoded token is
            shift = (int(self._pages[first]) - first) * size
            return np.arange(shift + start, shift + stop, dtype=np.int64)
        slots = self._pages[first : -(-stop // size), None] * np.int64(size) + np.arange(size)
        return slots.reshape(-1)[start - first * size : stop - first * size]

    # ---- writing

    def open(self, n: int) -> Slots:
        """Makes place for the next ``n`` tokens. Returns their slots, int64 [n].

        Raises SequenceError, with nothing opened, if they would not fit into the reservation.
        """
        self._must_run("open", n)
        if n < 1:
            raise SequenceError(f"open needs at least 1 token, not {n}")
        end = self._opened + n
        pages = -(-end // self._books.page_size)
        more = pages - self._n_owned
        if more > self.reserved:
            raise SequenceError(
                f"sequence {self.id!r} cannot open {n} tokens behind {self._opened}: that needs {more} more page(s), "
                f"and {self.reserved} are reserved (prompt {self.prompt_tokens} + limit {self.request.output_limit})"
            )
        if more > 0:
            self._pages[self._n_owned : pages] = self._books.take(more)
            self._n_owned = pages
            self.reserved -= more
        self._n_pages = pages
        start, self._opened = self._opened, end
        self._books.note(Call.OPEN, self._tag, n)
        return self.slots(start, end)

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
        filled = end // self._books.page_size > self._committed // self._books.page_size
        self._committed = end
        self._books.note(Call.COMMIT, self._tag, n)
        if filled and self._books.store_at_fill:
            self._store()

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
        self._n_pages = -(-self._opened // self._books.page_size)
        if n:
            del self._names[TOKEN_BYTES * max(0, self._opened - len(self.chain)) :]
        self._books.note(Call.TRUNCATE, self._tag, n)

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
        """Ends the request and stores nothing more. Also while it is read in: its loads then end on their own."""
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
        stored = self._store()
        if self._books.tiered is not None and stored:
            self._books.tiered.keep(self.id, self._pages[:stored])
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
        self.read_in.enter(self._books)
        self.read_in = None

    def _give_back(self) -> None:
        """Reading it in ended short, or for nothing: it gives back what it has, and its request waits again."""
        self._end("put back")

    def _grow(self, pages: int) -> None:
        """Reserves ``pages`` more. For :meth:`distkv.PrefixCache.grow` alone, which knows the agreed leftover."""
        self._must_run("grow", pages)
        self._pages = np.concatenate([self._pages, np.empty(pages, np.int32)])
        self.reserved += pages
        self._books.promise(pages)

    def _store(self) -> int:
        """Offers all full pages to the index. Returns how many leading ones are there."""
        full = self._committed // self._books.page_size
        if not full or not self.request.write or self.epoch != self._books.epoch:
            return 0
        self._stored = self._books.store(self.chain, self._pages[:full], min(self._stored, full))
        return self._stored

    def _end(self, how: str) -> None:
        self.ended = how
        pages: Ids = self.owned_pages
        self._n_pages = self._n_owned = 0
        reserved, self.reserved = self.reserved, 0
        if self.read_in is not None:
            pages = self.read_in.give_back(self._books, pages, current=self.epoch == self._books.epoch)
            self.read_in = None
        self._books.release(pages, reserved)
        self._on_end(self)

    def _must_run(self, call: str, count: object = 0, *, reading: bool = False) -> None:
        if not isinstance(count, (int, np.integer)):
            raise SequenceError(f"{call} takes a whole number, not {count!r}")
        if self.ended:
            raise SequenceError(f"{call} on sequence {self.id!r}, which was {self.ended}")
        if self.read_in is not None and not reading:
            raise SequenceError(f"{call} on sequence {self.id!r}, whose pages are still being read in")
