"""What the ranks have agreed on: the queue, the running sequences, and the calls that change them. Sans-IO.

Every rank makes the same calls in the same order; each enters the rolling digest, so that ranks that were given others
are noticed by the next ballot.
"""

from __future__ import annotations

from collections import Counter, deque

from distkv.ballot import Ballot, Pending
from distkv.books import Books, Call, Scope
from distkv.chain import KeyChain
from distkv.encoding import encode
from distkv.errors import DuplicateRequest, NoRoom, RequestError, RequestTooLarge, SequenceError
from distkv.keys import tag_of
from distkv.preemption import Preemption
from distkv.reasons import Reason
from distkv.request import Message, Refused, Request
from distkv.sequence import Sequence
from distkv.stats import Counters
from distkv.waiting import WaitingQueue

__all__ = ["Agreed"]

_GONE = 32
"""Ended sequences whose names are remembered, for errors."""


class Agreed:
    """Owns the queue, the running and the suspended; :class:`distkv.agreement.Agreement` decides on them."""

    def __init__(self, books: Books, smallest_pool: int) -> None:
        self.books = books
        self.smallest_pool = smallest_pool
        self.queue = WaitingQueue()
        self.running: dict[str, Sequence] = {}
        self.loading: dict[str, Sequence] = {}
        """Those of the running that are being read in, in order of admission."""
        self.preemption = Preemption(books)
        self.counters = Counters()
        self.reasons: Counter[Reason] = Counter()
        self.ballot: Ballot | None = None
        """In flight, between begin and end of a step."""
        self._refused: list[Refused] = []
        self._leftover = 0
        self._gone: deque[str] = deque(maxlen=_GONE)

    def submit(self, request: Request) -> None:
        """Puts a request at the end of the queue, or among the refused of the next result."""
        pending = self._pending(request, request.chain)
        pending.note(self.books)
        error = self._why_refused(pending)
        if error is None:
            self.queue.add(pending)
        else:
            self._refuse(request.id, error)

    def resume(self, request_id: str, output_limit: int | None = None) -> None:
        """Puts a suspended request at the head of the queue. Unknown ids are ignored: it may have been aborted."""
        request = self.preemption.resume(request_id, output_limit)
        if request is None:
            return
        pending = self._pending(request, request.chain)
        pending.note(self.books)
        error = self._why_refused(pending)
        if error is None:
            self.queue.put_back([pending], in_flight=self.ballot is not None)
        else:
            self.preemption.forget(request_id)
            self._refuse(request_id, error)

    def abort(self, request_id: str) -> None:
        """Ends a waiting or running request. Unknown ids are ignored."""
        sequence = self.running.get(request_id)
        if sequence is not None:
            sequence.abort()
            return
        # The same note as Sequence.abort: the ranks may hear of it before or after the end of a step.
        self.books.note(Call.ABORT, tag_of(request_id))
        self.queue.abort(request_id, in_flight=self.ballot is not None)
        self.preemption.forget(request_id)

    def forget_waiting(self) -> None:
        """Nothing waits any more, on this rank: for closing."""
        self.queue.clear()
        self.preemption.clear()

    def next_epoch(self, weights_version: str | None, scope: Scope = "all") -> None:
        """A reset, or with a version a weights bump: matches of the ballot in flight count 0 at commit.

        Sequences that are being read in give back what they have and wait again, at the head of the queue.
        """
        # Whether a ballot is in flight decides what becomes of its matches, so the digest has to tell.
        self.books.note(Call.NEXT_EPOCH, self.ballot is not None, data=encode(weights_version, scope))
        self.books.next_epoch(weights_version, scope)
        for pending in self.queue:
            pending.chain = self.books.renamed(pending.chain)
        self._put_back(list(self.loading.values()), read_in=True)

    @property
    def leftover(self) -> int:
        """The agreed room less what was granted and grown since; 0 while a ballot is in flight."""
        return 0 if self.ballot is not None else self._leftover

    def grow(self, sequence: Sequence, pages: int, *, wait: bool = False) -> bool:
        """Reserves ``pages`` more out of the leftover; False: it is smaller, and the next ballots serve this first.

        Without ``wait`` it raises NoRoom instead, with nothing reserved; with it, only for what no pool can hold.
        """
        sequence._must_run("grow", pages)
        if pages < 0:
            raise SequenceError(f"cannot grow sequence {sequence.id!r} by {pages} pages")
        beyond = sequence.promised + self.preemption.asked_by(sequence) + pages - self.smallest_pool
        if wait and beyond > 0:
            raise NoRoom(beyond, f"growing sequence {sequence.id!r} beyond the smallest pool of the group, which has "
                                 f"{self.smallest_pool} pages")
        if wait and (pages > self.leftover or self.preemption.growing):
            self.preemption.grow_later(sequence, pages)
            return False
        if pages > self.leftover:
            ended = self.books.retiring_sequences
            raise NoRoom(pages - self.leftover, f"growing sequence {sequence.id!r}"
                         + (f" (pages of {ended} ended one(s) wait for retired)" if ended else ""))
        sequence._grow(pages)
        self.books.note(Call.GROW, tag_of(sequence.id), pages)
        self._leftover -= pages
        return True

    # ---- inside

    def _apply(self, message: Message) -> None:
        if message.weights_version is not None or message.reset:
            some = message.reset if isinstance(message.reset, str) and message.weights_version is None else "all"
            self.next_epoch(message.weights_version, some)
        for request_id in message.aborts:
            self.abort(request_id)
        for request_id in reversed(message.resumes):
            self.resume(request_id)
        for request in message.requests:
            self.submit(request)

    def _pending(self, request: Request, chain: KeyChain) -> Pending:
        # A branch: what the caller appends to its chain from now on is not of this request.
        return Pending.of(request, self.books.renamed(chain).branch(), self.books.page_size)

    def _why_refused(self, pending: Pending) -> RequestError | None:
        request_id = pending.request.id
        if pending.total > self.smallest_pool:
            return RequestTooLarge(request_id, pending.total, self.smallest_pool)
        taken = request_id in self.queue or request_id in self.running or request_id in self.preemption.suspended
        return DuplicateRequest(request_id) if taken else None

    def _refuse(self, request_id: str, error: RequestError) -> None:
        self.counters.refused += 1
        self._refused.append(Refused(request_id, error))

    def _put_back(self, sequences: list[Sequence], *, read_in: bool) -> None:
        """They give back what they have and are admitted again, ahead of all others; ``read_in``: from either tier."""
        pendings = []
        for sequence in sequences:
            sequence._give_back()
            pending = self._pending(sequence.request, sequence.chain)
            pending.ballots, pending.read_in = 1, read_in
            pendings.append(pending)
        self.queue.put_back(pendings)

    def _ready(self, sequence: Sequence) -> Sequence:
        """It runs from now on: this is when it counts."""
        record, counters = sequence.record, self.counters
        counters.requests += 1
        counters.prompt_tokens += record.prompt_tokens
        counters.cached_tokens += record.cached_tokens
        counters.host_tokens += record.host_tokens
        self.reasons[record.reason] += 1
        return sequence

    def _ended(self, sequence: Sequence) -> None:
        del self.running[sequence.id]
        self.loading.pop(sequence.id, None)
        if sequence.to_resume is not None:
            self.preemption.suspend(sequence.to_resume)
            self.counters.suspended += 1
        elif sequence.ended != "put back":
            self._gone.append(sequence.id)

    def _history(self) -> str:
        names = (*self._gone, *self.queue.ids, *self.running, *self.preemption.suspended)
        return self.books.history({tag_of(name): name for name in names})
