"""The step as a state machine: the waiting queue, the ballot in flight, and the commit. Sans-IO.

``begin`` gives the vector for the group, or None if the step needs no collective; ``end`` takes the minimum. What is
decided is a function of the list at begin and of the minimum. The collective in between is somebody else's.
"""

from __future__ import annotations

from itertools import islice

from distkv import ballot as ballots
from distkv import rows
from distkv.admission import own
from distkv.agreed import Agreed
from distkv.ballot import Ask, Decision, Slots, Vector
from distkv.books import Books, Call
from distkv.errors import GroupDivergence, PeerFailed, SequenceError
from distkv.grid import Grid
from distkv.keys import tag_of
from distkv.pending import Pending
from distkv.preemption import Growth
from distkv.prefetch import prefetch
from distkv.request import Forked, Message, StepResult, Waiting
from distkv.rows import Ballot
from distkv.sequence import Sequence

__all__ = ["Agreement"]


def _wants(pending: Pending, at: int, key: int) -> bool:
    """Whether the request may use the page of this name at this position of its chain, from either tier."""
    return pending.read_in and at < pending.limit and pending.chain.keys[at] == key


class Agreement(Agreed):
    """One step after another, on what this rank has agreed on with the others. Owns the ballot in flight."""

    def __init__(self, books: Books, rank: int, slots: Slots, heartbeat: int, smallest_pools: tuple[int, ...], *,
                 alone: bool) -> None:
        """``alone``: a group of one, in which no minimum is a collective."""
        super().__init__(books, smallest_pools)
        self.rank = rank
        self.slots = slots
        self.heartbeat = heartbeat
        self.alone = alone
        self.prefetch = False
        """Whether requests that wait have their host pages loaded already."""
        self._began = False
        self._collective = False
        self._last_ballot = 0
        self._fault: Exception | None = None

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
        self.preemption.begin()
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
            self.books.poll_all()
            self._apply(message)
            return self._fill() if due else None
        except Exception as error:  # noqa: BLE001
            # Handed on: the vote tells the other ranks, and end() raises it here as the cause of PeerFailed.
            self._fault = self._fault or error
            if not due:
                return None  # voted in the next step that has a collective
            if self.ballot is None:
                self.ballot = self._new_ballot()
            self.ballot.let_go()
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
        free = len(queue)
        if self.loading:
            free = next((i for i, pending in enumerate(queue) if self._being_read_in(pending)), free)
        if self._fault is not None:
            raise self._fault
        # Before any lookup: one that fails must leave the digest as it is on the other ranks.
        read_in = [tag_of(sequence.id) for sequence in islice(self.loading.values(), self.slots.loading)]
        self.books.note(Call.STEP, self.books.step, self.books.epoch, *(p.tag for p in queue), *read_in)
        if self.prefetch and not self.preemption.growing:  # or they would take what a growing sequence waits for
            prefetch(queue[:free], self.books)
        self.ballot = ballot = self._new_ballot()
        ballot.behind = tuple(queue[free:])
        rows.fill(ballot, self.books, queue[:free], self.slots.boundaries)
        return ballots.encode(ballot, self.books.digest, self.slots)

    def _being_read_in(self, pending: Pending) -> bool:
        """Whether pages of this request are being read in for another one: agreed, as names and lengths are."""
        return any(sequence.read_in is not None
                   and _wants(pending, at := sequence.read_in.first, sequence.chain.keys[at])
                   for sequence in self.loading.values())

    def _new_ballot(self) -> Ballot:
        self._last_ballot = self.books.step
        self._leftover = self._nothing  # whatever becomes of this ballot
        ballot = Ballot(self.books.step, self.books.generation, tuple(ledger.room for ledger in self.books.ledgers))
        if self.loading:
            ballot.loads = tuple(islice(self.loading.values(), self.slots.loading))
        if self.preemption.growing:
            ballot.growths, ballot.victims = self.preemption.asked(), self.preemption.victims(self.running)
        return ballot

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
            self.ballot.let_go()
            self.ballot = None
        if self.parked:
            self._let_parked_go()
        self.queue.end_of_step()

    # ---- inside

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
        decision = self._decide(ballot, minimum, void)
        admitted = list(zip(ballot.rows, decision.admitted, strict=False))
        grants = [own(row, *agreed, self.books) for row, agreed in admitted if not row.pending.aborted]
        ballot.let_go()
        for row, _ in admitted:
            self.queue.admitted(row.pending)
        self.queue.drop_aborted()
        ready = self._read_in(ballot, minimum)
        grown, forked = self._grow(ballot.growths[: decision.grown], void) if decision.grown else ((), ())
        for grant in grants:
            sequence = grant.sequence(self.books, void, self)
            self.running[sequence.id] = sequence
            if sequence.read_in_progress:
                self.loading[sequence.id] = sequence
            else:
                ready.append(self._ready(sequence))
        for tier in self.books.tiers:
            tier.flush()
        self._leftover = decision.leftover
        return self._result(tuple(ready), grown, forked, decision, ballot)

    def _decide(self, ballot: Ballot, minimum: Vector, void: bool) -> Decision:
        """The decision. A row that shares pages with one that is to be read in waits for it, with all behind it."""
        asks, growths = [self._ask(row.pending) for row in ballot.rows], [growth.needs for growth in ballot.growths]
        decision = ballots.decide(minimum, self.slots, asks, growths, void=void)
        reads: list[tuple[int, int]] = []  # a page that is to be read in: its position and its key
        for i, (row, (matched, restorable)) in enumerate(zip(ballot.rows, decision.admitted, strict=False)):
            if any(_wants(row.pending, at, key) for at, key in reads):
                ballot.behind = (*(other.pending for other in ballot.rows[i:]), *ballot.behind)
                for other in ballot.rows[i:]:
                    other.let_go()
                del ballot.rows[i:]
                return ballots.decide(minimum, self.slots, asks[:i], growths, void=void)
            if restorable > matched:
                reads.append((matched, row.pending.chain.keys[matched]))
        return decision

    def _ask(self, pending: Pending) -> Ask:
        """What a request asks for: the same on every rank, and the same at begin and at end."""
        windowed = self.slots.boundaries and any(self.books.ledgers[i].grid for i in pending.labels)
        return Ask(pending.needs, Grid(pending.limit, self.slots.boundaries) if windowed else None)

    def _grow(self, growths: tuple[Growth, ...], void: bool) -> tuple[tuple[Sequence, ...], tuple[Forked, ...]]:
        """What running sequences asked for is theirs. Returns those that have grown, and the forks.

        Forks wait for the next step if a reset or new weights came since begin (``void``): what ended in it is gone.
        """
        if void:
            growths = tuple(growth for growth in growths if growth.fork is None)
        grown: list[Sequence] = []
        forked: list[Forked] = []
        for growth in self.preemption.granted(growths):
            if growth.fork is None:
                growth.sequence._grow(growth.pages)
                grown.append(growth.sequence)
            else:
                forked.append(Forked(growth.sequence, self._forked(growth.fork)))
        return tuple(grown), tuple(forked)

    def _read_in(self, ballot: Ballot, minimum: Vector) -> list[Sequence]:
        """Sequences that all ranks have read in whole run; those whose reading ended short wait again."""
        ready: list[Sequence] = []
        if not ballot.loads:
            return ready
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

    def _result(self, ready: tuple[Sequence, ...] = (), grown: tuple[Sequence, ...] = (),
                forked: tuple[Forked, ...] = (), decision: Decision | None = None,
                ballot: Ballot | None = None) -> StepResult:
        refused, self._refused = tuple(self._refused), []
        waiting: list[Waiting] = []
        to_preempt: tuple[str, ...] = ()
        if ballot is not None and decision is not None:
            rows = ballot.rows[len(decision.admitted) :]
            for i, row in enumerate(rows):
                if not row.pending.aborted:
                    why = ("behind it", 0) if i else ("no room", decision.short)
                    waiting.append(Waiting(row.pending.request.id, *why))
            if ballot.behind:
                waiting += self._behind(ballot, first=not rows)
            if decision.grown < len(ballot.growths):
                to_preempt = ballot.victims
        return StepResult(
            step=self.books.step, ready=ready, loading=tuple(self.loading.values()), waiting=tuple(waiting),
            refused=refused, grown=grown, forked=forked, to_preempt=to_preempt, leftover=self._leftover[0],
            collective=self._collective,
        )

    @staticmethod
    def _behind(ballot: Ballot, *, first: bool) -> list[Waiting]:
        """Those that had no row, because the first of them waits for a load."""
        those = [p for p in ballot.behind if not p.aborted]
        return [Waiting(p.request.id, "being read in" if first and p is ballot.behind[0] else "behind it")
                for p in those]
