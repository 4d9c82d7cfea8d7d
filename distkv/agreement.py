"""The step as a state machine: the waiting queue, the ballot in flight, and the commit. Sans-IO.

``begin`` gives the vector for the group, or None if the step needs no collective; ``end`` takes the minimum. What is
decided is a function of the list at begin and of the minimum. The collective in between is somebody else's.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice

from distkv import ballot as ballots
from distkv.admission import own
from distkv.ballot import Ballot, Decision, Pending, Slots, Vector
from distkv.books import Books, Call, Scope
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
from distkv.preemption import Preemption
from distkv.prefetch import prefetch
from distkv.reasons import Reason
from distkv.request import Message, Refused, Request, StepResult, Waiting
from distkv.sequence import Sequence
from distkv.stats import Counters
from distkv.waiting import WaitingQueue

_GONE = 32
"""Ended sequences whose names are remembered, for errors."""


class Agreement:
    """What this rank has agreed on with the others. Owns the queue, the running sequences and the ballot in flight."""

    def __init__(self, books: Books, rank: int, slots: Slots, heartbeat: int, smallest_pool: int, *,
                 alone: bool) -> None:
        """``alone``: a group of one, in which no minimum is a collective."""
        self.books = books
        self.rank = rank
        self.slots = slots
        self.heartbeat = heartbeat
        self.smallest_pool = smallest_pool
        self.alone = alone
        self.queue = WaitingQueue()
        self.running: dict[str, Sequence] = {}
        self.loading: dict[str, Sequence] = {}
        """Those of the running that are being read in, in order of admission."""
        self.preemption = Preemption(books)
        self.prefetch = False
        """Whether requests that wait have their host pages loaded already."""
        self.counters = Counters()
        self.reasons: Counter[Reason] = Counter()
        self.ballot: Ballot | None = None
        self._began = False
        self._collective = False
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
            self.queue.add(pending)
        else:
            self._refuse(request.id, error)

    def resume(self, request_id: str, output_limit: int | None = None) -> None:
        """Puts a suspended request at the head of the queue. Unknown ids are ignored: it may have been aborted."""
        request = self.preemption.resume(request_id, output_limit)
        if request is None:
            return
        pending = Pending.of(request, self.books.renamed(request.chain).branch(), self.books.page_size)
        pending.note(self.books)
        error = self._why_refused(pending)
        if error is None:
            self.queue.put_back([pending])
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

        Without ``wait`` it raises NoRoom instead, with nothing reserved.
        """
        if pages < 0:
            raise SequenceError(f"cannot grow sequence {sequence.id!r} by {pages} pages")
        if wait and (pages > self.leftover or self.preemption.growing):
            sequence._must_run("grow")
            self.preemption.grow_later(sequence, pages)
            return False
        if pages > self.leftover:
            ended = self.books.retiring_sequences
            raise NoRoom(pages - self.leftover, f"growing sequence {sequence.id!r}"
                         + (f" (pages of {ended} ended one(s) wait for retired)" if ended else ""))
        sequence._grow(pages)
        self._leftover -= pages
        return True

    # ---- the step

    def begin(self, message: Message) -> Vector | None:
        """Applies the message and fills the ballot. Gives this rank's part of the collective; None: there is none.

        Whether there is one is known from agreed facts alone, before anything that can fail on one rank: a request
        waits or comes in, a sequence is being read in or asks for more pages, or the heartbeat is due. What fails from
        there on is voted as a fault.
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
        due = bool(self.queue or message.requests or message.resumes or self.loading or self.preemption.growing
                   or self._heartbeat_due())
        try:
            self.books.poll()
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
            return ballots.fault(self.rank, self.slots)
        except BaseException:  # an interrupt is not voted on
            self.give_up()
            raise

    def _heartbeat_due(self) -> bool:
        return self.books.step - self._last_ballot >= self.heartbeat

    def _to_send(self, own: Vector | None) -> Vector | None:
        """What of this rank's ballot goes to the group: all of it."""
        return own

    def _fill(self) -> Vector:
        queue = self.queue.first(self.slots.queue)
        for pending in queue:
            pending.ballots += 1
        free = next((i for i, pending in enumerate(queue) if self._being_read_in(pending)), len(queue))
        if self._fault is None and self.prefetch:
            prefetch(queue[:free], self.books)
        self.ballot = ballot = self._new_ballot()
        if self._fault is not None:
            raise self._fault
        read_in = [tag_of(sequence.id) for sequence in ballot.loads]
        self.books.note(Call.STEP, ballot.step, self.books.epoch, *(pending.tag for pending in queue), *read_in)
        ballot.behind = tuple(queue[free:])
        ballots.fill(ballot, self.books, queue[:free])
        return ballots.encode(ballot, self.books.digest, self.slots)

    def _being_read_in(self, pending: Pending) -> bool:
        """Whether pages of this request are being read in for another one: agreed, as names and lengths are."""
        if not pending.read_in:
            return False
        keys, limit = pending.chain.keys, pending.limit
        return any(sequence.read_in is not None and (at := sequence.read_in.first) < limit
                   and keys[at] == sequence.chain.keys[at] for sequence in self.loading.values())

    def _new_ballot(self) -> Ballot:
        self._last_ballot = self.books.step
        self._leftover = 0  # whatever becomes of this ballot
        loads = tuple(islice(self.loading.values(), self.slots.loading))
        return Ballot(self.books.step, self.books.generation, self.books.room, loads=loads,
                      growths=self.preemption.asked(), victims=self.preemption.victims(self.running))

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
        self.queue.drop_aborted()

    # ---- inside

    def _apply(self, message: Message) -> None:
        if message.weights_version is not None or message.reset:
            self.next_epoch(message.weights_version)
        for request_id in message.aborts:
            self.abort(request_id)
        for request_id in reversed(message.resumes):
            self.resume(request_id)
        for request in message.requests:
            self.submit(request)

    def _why_refused(self, pending: Pending) -> RequestError | None:
        request_id = pending.request.id
        if pending.total > self.smallest_pool:
            return RequestTooLarge(request_id, pending.total, self.smallest_pool)
        taken = request_id in self.queue or request_id in self.running or request_id in self.preemption.suspended
        return DuplicateRequest(request_id) if taken else None

    def _refuse(self, request_id: str, error: RequestError) -> None:
        self.counters.refused += 1
        self._refused.append(Refused(request_id, error))

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
        void = ballot.generation != self.books.generation
        decision = ballots.decide(minimum, [row.pending.total for row in ballot.rows],
                                  [pages for _, pages in ballot.growths], void=void)
        admitted = list(zip(ballot.rows, decision.admitted, strict=False))
        grants = [own(row, *agreed, self.books) for row, agreed in admitted if not row.pending.aborted]
        ballot.let_go(self.books)
        for row, _ in admitted:
            self.queue.admitted(row.pending)
        self.queue.drop_aborted()
        ready = self._read_in(ballot, minimum)
        grown = self.preemption.grant(ballot.growths[: decision.grown])
        for grant in grants:
            sequence = grant.sequence(self.books, void, self._ended)
            self.running[sequence.id] = sequence
            if sequence.read_in_progress:
                self.loading[sequence.id] = sequence
            else:
                ready.append(self._ready(sequence))
        if self.books.tier is not None:
            self.books.tier.flush()
        self._leftover = decision.leftover
        return self._result(tuple(ready), grown, decision, ballot)

    def _read_in(self, ballot: Ballot, minimum: Vector) -> list[Sequence]:
        """Sequences that all ranks have read in whole run; those whose reading ended short wait again."""
        ready: list[Sequence] = []
        short: list[Sequence] = []
        for sequence, pages in zip(ballot.loads, ballots.restored(minimum, self.slots, len(ballot.loads)), strict=True):
            if pages is None or sequence.read_in is None:  # still loading; or aborted or put back since begin
                continue
            if pages == sequence.read_in.pages:
                del self.loading[sequence.id]
                sequence._loaded()
                ready.append(self._ready(sequence))
            else:
                short.append(sequence)
        self.counters.short_read_ins += len(short)
        self._put_back(short, read_in=False)
        return ready

    def _put_back(self, sequences: list[Sequence], *, read_in: bool) -> None:
        """They give back what they have and are admitted again, ahead of all others; ``read_in``: from either tier."""
        pendings = []
        for sequence in sequences:
            sequence._give_back()
            pending = Pending.of(sequence.request, self.books.renamed(sequence.chain).branch(), self.books.page_size)
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

    def _result(self, ready: tuple[Sequence, ...] = (), grown: tuple[Sequence, ...] = (),
                decision: Decision | None = None, ballot: Ballot | None = None) -> StepResult:
        refused, self._refused = tuple(self._refused), []
        waiting: list[Waiting] = []
        to_preempt: tuple[str, ...] = ()
        if ballot is not None and decision is not None:
            rows = ballot.rows[len(decision.admitted) :]
            for i, row in enumerate(rows):
                if not row.pending.aborted:
                    why = ("behind it", 0) if i else ("no room", decision.short)
                    waiting.append(Waiting(row.pending.request.id, *why))
            waiting += self._behind(ballot, first=not rows)
            if decision.grown < len(ballot.growths):
                to_preempt = ballot.victims
        return StepResult(
            step=self.books.step, ready=ready, loading=tuple(self.loading.values()), waiting=tuple(waiting),
            refused=refused, grown=grown, to_preempt=to_preempt, leftover=self._leftover, collective=self._collective,
        )

    @staticmethod
    def _behind(ballot: Ballot, *, first: bool) -> list[Waiting]:
        """Those that had no row, because the first of them waits for a load."""
        those = [p for p in ballot.behind if not p.aborted]
        return [Waiting(p.request.id, "being read in" if first and p is ballot.behind[0] else "behind it")
                for p in those]
