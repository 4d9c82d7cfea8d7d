"""The step as a state machine: the waiting queue, the ballot in flight, and the commit. Sans-IO.

``begin`` gives the vector for the group, or None if the step needs no collective; ``end`` takes the minimum. What is
decided is a function of the list at begin and of the minimum. The collective in between is somebody else's.
"""

from __future__ import annotations

from collections import Counter, deque

from distkv import ballot as ballots
from distkv.ballot import Ballot, Decision, Pending, Row, Vector
from distkv.books import Books, Call
from distkv.encoding import encode
from distkv.errors import (
    DuplicateRequest,
    GroupDivergence,
    NoRoom,
    PeerFailed,
    RequestError,
    RequestTooLarge,
    SequenceError,
)
from distkv.keys import tag_of
from distkv.pages import Positions
from distkv.reasons import Reason
from distkv.request import Message, Refused, Request, RequestRecord, StepResult, Waiting
from distkv.sequence import Sequence
from distkv.stats import Counters

_GONE = 32
"""Ended sequences whose names are remembered, for errors."""


class Agreement:
    """What this rank has agreed on with the others. Owns the queue, the running sequences and the ballot in flight."""

    def __init__(self, books: Books, rank: int, queue_slots: int, heartbeat: int, smallest_pool: int, *,
                 alone: bool) -> None:
        """``alone``: a group of one, in which no minimum is a collective."""
        self.books = books
        self.rank = rank
        self.queue_slots = queue_slots
        self.heartbeat = heartbeat
        self.smallest_pool = smallest_pool
        self.alone = alone
        self.queue: list[Pending] = []
        self._waiting: dict[str, Pending] = {}  # those of the queue that are not aborted, by id
        self.running: dict[str, Sequence] = {}
        self.counters = Counters()
        self.reasons: Counter[Reason] = Counter()
        self.ballot: Ballot | None = None
        self._began = False
        self._collective = False
        self._aborted_in_flight = False
        self._refused: list[Refused] = []
        self._leftover = 0
        self._last_ballot = 0
        self._fault: Exception | None = None
        self._gone: deque[str] = deque(maxlen=_GONE)

    # ---- calls that all ranks make in the same order

    def submit(self, request: Request) -> None:
        """Puts a request at the end of the queue, or among the refused of the next result."""
        # A branch: what the caller appends to its chain from now on is not of this request.
        pending = Pending.of(request, self.books.renamed(request.chain).branch(), self.books.page_size)
        pending.note(self.books)
        error = self._why_refused(pending)
        if error is None:
            self.queue.append(pending)
            self._waiting[request.id] = pending
        else:
            self.counters.refused += 1
            self._refused.append(Refused(request.id, error))

    def abort(self, request_id: str) -> None:
        """Ends a waiting or running request. Unknown ids are ignored."""
        sequence = self.running.get(request_id)
        if sequence is not None:
            sequence.abort()
            return
        # The same note as Sequence.abort: the ranks may hear of it before or after the end of a step.
        self.books.note(Call.ABORT, tag_of(request_id))
        pending = self._waiting.pop(request_id, None)
        if pending is not None:
            pending.aborted = True
            if self.ballot is None:
                self.queue.remove(pending)
            else:
                self._aborted_in_flight = True

    def forget_waiting(self) -> None:
        """Nothing waits any more, on this rank: for closing."""
        self.queue.clear()
        self._waiting.clear()

    def next_epoch(self, weights_version: str | None) -> None:
        """A reset, or with a version a weights bump: matches of the ballot in flight count 0 at commit."""
        # Whether a ballot is in flight decides what becomes of its matches, so the digest has to tell.
        self.books.note(Call.NEXT_EPOCH, self.ballot is not None, data=encode(weights_version))
        self.books.next_epoch(weights_version)
        for pending in self.queue:
            pending.chain = self.books.renamed(pending.chain)

    @property
    def leftover(self) -> int:
        """The agreed room less what was granted and grown since; 0 while a ballot is in flight."""
        return 0 if self.ballot is not None else self._leftover

    def grow(self, sequence: Sequence, pages: int) -> None:
        """Reserves ``pages`` more out of the leftover. Raises NoRoom, with nothing reserved, if it is smaller."""
        if pages < 0:
            raise SequenceError(f"cannot grow sequence {sequence.id!r} by {pages} pages")
        if pages > self.leftover:
            ended = self.books.retiring_sequences
            raise NoRoom(pages - self.leftover, f"growing sequence {sequence.id!r}"
                         + (f" (pages of {ended} ended one(s) wait for retired)" if ended else ""))
        sequence._grow(pages)
        self._leftover -= pages

    # ---- the step

    def begin(self, message: Message) -> Vector | None:
        """Applies the message and fills the ballot. Gives this rank's part of the collective; None: there is none.

        Whether there is one is known from agreed facts alone, before anything that can fail on one rank: a request
        waits or comes in, or the heartbeat is due. What fails from there on is voted as a fault.
        """
        if self._began:
            raise SequenceError("begin_step was called twice; end_step comes in between")
        self._began = True
        self.books.step += 1
        self.counters.steps += 1
        vector = self._to_send(self._filled(message))
        self._collective = vector is not None and not self.alone
        self.counters.collectives += self._collective
        return vector

    def _filled(self, message: Message) -> Vector | None:
        """This rank's ballot, or its fault; None if nothing has to be decided."""
        due = bool(self.queue) or bool(message.requests) or self._heartbeat_due()
        try:
            self._apply(message)
            return self._fill() if due else None
        except Exception as error:  # noqa: BLE001
            # Handed on: the vote tells the other ranks, and end() raises it here as the cause of PeerFailed.
            self._fault = self._fault or error
            if not due:
                return None  # voted in the next step that has a collective
            if self.ballot is None:
                self.ballot = self._new_ballot()
            self.ballot.let_go(self.books)
            return ballots.fault(self.rank, self.queue_slots)
        except BaseException:  # an interrupt is not voted on
            self.give_up()
            raise

    def _heartbeat_due(self) -> bool:
        return self.books.step - self._last_ballot >= self.heartbeat

    def _to_send(self, own: Vector | None) -> Vector | None:
        """What of this rank's ballot goes to the group: all of it."""
        return own

    def _fill(self) -> Vector:
        self.ballot = self._new_ballot()
        if self._fault is not None:
            raise self._fault
        queue = self.queue[: self.queue_slots]
        self.books.note(Call.STEP, self.ballot.step, self.ballot.epoch, *(pending.tag for pending in queue))
        for pending in queue:
            pending.ballots += 1
        ballots.fill(self.ballot, self.books, queue)
        return ballots.encode(self.ballot, self.books.digest, self.queue_slots)

    def _new_ballot(self) -> Ballot:
        self._last_ballot = self.books.step
        self._leftover = 0  # whatever becomes of this ballot
        return Ballot(self.books.step, self.books.epoch, self.books.room)

    def end(self, minimum: Vector | None) -> StepResult:
        """Commits what follows from the minimum (None after a step without a collective).

        Raises PeerFailed, after which the group goes on, or GroupDivergence, which ends it. Holds are given back in
        every case.
        """
        if not self._began:
            raise SequenceError("end_step without begin_step")
        ballot = self.ballot
        if ballot is None or minimum is None:
            self._began = False
            return self._result()
        try:
            self._raise_faults(ballot, minimum)
            return self._commit(ballot, minimum)
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Ends the step, whatever became of it: every hold is given back."""
        self._began = False
        if self.ballot is not None:
            self.ballot.let_go(self.books)
            self.ballot = None
        self._drop_aborted()

    # ---- inside

    def _apply(self, message: Message) -> None:
        if message.weights_version is not None or message.reset:
            self.next_epoch(message.weights_version)
        for request_id in message.aborts:
            self.abort(request_id)
        for request in message.requests:
            self.submit(request)

    def _why_refused(self, pending: Pending) -> RequestError | None:
        request_id = pending.request.id
        if pending.total > self.smallest_pool:
            return RequestTooLarge(request_id, pending.total, self.smallest_pool)
        taken = request_id in self._waiting or request_id in self.running
        return DuplicateRequest(request_id) if taken else None

    def _raise_faults(self, ballot: Ballot, minimum: Vector) -> None:
        failed = ballots.failed_rank(minimum)
        if failed is not None:
            cause, self._fault = self._fault, None
            # If it was the message that failed there, that rank's queue is not the others': what all have seen makes
            # the next step due on all, and its digests tell.
            self._last_ballot = self.books.step - self.heartbeat
            self.counters.peer_failures += 1
            raise PeerFailed(failed, rank=self.rank, step=ballot.step) from cause
        if ballots.diverged(minimum):
            raise GroupDivergence(rank=self.rank, step=ballot.step, calls=self._history())

    def _commit(self, ballot: Ballot, minimum: Vector) -> StepResult:
        """Own the agreed pages of all admitted, then drop every hold, and only then may anything be opened."""
        void = ballot.epoch != self.books.epoch
        decision = ballots.decide(minimum, [row.pending.total for row in ballot.rows], void=void)
        admitted = list(zip(ballot.rows, decision.admitted, strict=False))
        granted = [(row, self._own(row, agreed)) for row, agreed in admitted if not row.pending.aborted]
        ballot.let_go(self.books)
        for row, _ in admitted:
            self.queue.remove(row.pending)
            if not row.pending.aborted:
                del self._waiting[row.pending.request.id]
        self._drop_aborted()
        ready = tuple(self._admit(row, pages, void) for row, pages in granted)
        self._leftover = decision.leftover
        return self._result(ready, decision, ballot)

    def _own(self, row: Row, agreed: int) -> Positions:
        pages = row.held[:agreed]
        self.books.pool.own(pages)
        return pages

    def _admit(self, row: Row, pages: Positions, void: bool) -> Sequence:
        pending, books = row.pending, self.books
        reason = self._reason(row, len(pages), void)
        record = RequestRecord(
            request_id=pending.request.id, prompt_tokens=len(pending.chain), matched=len(row.match),
            restorable=len(row.match), agreed=len(pages), cached_tokens=len(pages) * books.page_size, reason=reason,
        )
        books.promise(pending.total - len(pages))
        books.used(pages)
        books.index.collisions += row.match.collided
        sequence = Sequence(books, pending.request, pending.chain, pages, pending.total, record, self._ended)
        self.running[sequence.id] = sequence
        self.counters.requests += 1
        self.counters.prompt_tokens += record.prompt_tokens
        self.counters.cached_tokens += record.cached_tokens
        self.reasons[reason] += 1
        return sequence

    def _reason(self, row: Row, agreed: int, void: bool) -> Reason:
        match, pending = row.match, row.pending
        if not pending.request.read:
            return Reason.NOT_READ
        if void:
            return Reason.BUMP_OR_RESET
        cap = pending.cap
        whole = (len(pending.chain) - 1) // self.books.page_size
        if agreed < len(match) or (cap is not None and agreed == cap < whole):
            return Reason.GROUP_MINIMUM
        return self.books.index.memory.explain(pending.chain, len(match), match.leaf, match.used)

    def _ended(self, sequence: Sequence) -> None:
        del self.running[sequence.id]
        self._gone.append(sequence.id)

    def _history(self) -> str:
        return self.books.history({tag_of(name): name for name in (*self._gone, *self._waiting, *self.running)})

    def _drop_aborted(self) -> None:
        if self._aborted_in_flight:
            self._aborted_in_flight = False
            self.queue = [p for p in self.queue if not p.aborted]

    def _result(self, ready: tuple[Sequence, ...] = (), decision: Decision | None = None,
                ballot: Ballot | None = None) -> StepResult:
        refused, self._refused = tuple(self._refused), []
        waiting = []
        if ballot is not None and decision is not None:
            for i, row in enumerate(ballot.rows[len(decision.admitted) :]):
                if not row.pending.aborted:
                    why = ("behind it", 0) if i else ("no room", decision.short)
                    waiting.append(Waiting(row.pending.request.id, *why))
        return StepResult(
            step=self.books.step, ready=ready, waiting=tuple(waiting), refused=refused, leftover=self._leftover,
            collective=self._collective,
        )
