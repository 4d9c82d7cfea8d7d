"""What the ranks have agreed on: the queue, the running sequences, and the calls that change them. Sans-IO.

Every rank makes the same calls in the same order; each enters the rolling digest, so that ranks that were given others
are noticed by the next ballot.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np

from distkv.ballot import less, short_of
from distkv.books import Books, Call, Scope
from distkv.chain import KeyChain
from distkv.encoding import encode
from distkv.errors import DuplicateRequest, NoRoom, RequestError, RequestTooLarge, SequenceError
from distkv.forks import Branch, Fork, data_of, default_branches
from distkv.keys import tag_of
from distkv.ledger import MAIN
from distkv.pending import Pending
from distkv.preemption import Growth, Preemption
from distkv.reasons import Reason
from distkv.request import Message, Refused, Request
from distkv.rows import Ballot
from distkv.sequence import Sequence
from distkv.stats import Counters
from distkv.waiting import WaitingQueue

__all__ = ["Agreed"]

_GONE = 32
"""Ended sequences whose names are remembered, for errors."""


class Agreed:
    """Owns the queue, the running and the suspended; :class:`distkv.agreement.Agreement` decides on them."""

    def __init__(self, books: Books, smallest_pools: tuple[int, ...]) -> None:
        """``smallest_pools``: of each label, the usable pages of the smallest pool of the group."""
        self.books = books
        self.smallest_pools = smallest_pools
        self.queue = WaitingQueue()
        self.running: dict[str, Sequence] = {}
        self.loading: dict[str, Sequence] = {}
        """Those of the running that are being read in, in order of admission."""
        self.kept: dict[str, Sequence] = {}
        """Prefixes that no request runs on, kept to be forked."""
        self.parked: list[Sequence] = []
        """Ended ones that the ballot in flight may still fork."""
        self.preemption = Preemption(books)
        self.counters = Counters()
        self.reasons: Counter[Reason] = Counter()
        self.ballot: Ballot | None = None
        """In flight, between begin and end of a step."""
        self._refused: list[Refused] = []
        self._nothing = (0,) * len(books.ledgers)
        self._leftover = self._nothing
        self._gone: deque[str] = deque(maxlen=_GONE)

    def submit(self, request: Request) -> None:
        """Puts a request at the end of the queue, or among the refused of the next result."""
        pending = self._queued(request)
        if pending is not None:
            self.queue.add(pending)

    def resume(self, request_id: str, output_limit: int | None = None) -> None:
        """Puts a suspended request at the head of the queue. Unknown ids are ignored: it may have been aborted."""
        request = self.preemption.resume(request_id, output_limit)
        if request is None:
            return
        pending = self._queued(request)
        if pending is not None:
            self.queue.put_back([pending], in_flight=self.ballot is not None)
        else:
            self.preemption.forget(request_id)

    def _queued(self, request: Request) -> Pending | None:
        """Its entry for the queue; None: it is refused."""
        unknown = self.books.unknown_label(request.labels)
        if unknown is not None:
            self.books.note(Call.SUBMIT, tag_of(request.id), data=encode(*request.labels))
            sliding = unknown in {ledger.label for ledger in self.books.ledgers}
            names = ", ".join(ledger.label for ledger in self.books.ledgers if not ledger.grid)
            self._refuse(request.id, RequestError(request.id, (
                f"label {unknown!r} is a sliding one, which comes with main; leave it out of labels" if sliding else
                f"there is no label {unknown!r} that a request may ask for; it may ask for {names}")))
            return None
        pending = self._pending(request, request.chain)
        pending.note(self.books)
        error = self._why_refused(pending)
        if error is not None:
            self._refuse(request.id, error)
        return pending if error is None else None

    def abort(self, request_id: str) -> None:
        """Ends a waiting or running request. Unknown ids are ignored."""
        sequence = self.running.get(request_id) or self.kept.get(request_id)
        if sequence is not None:
            sequence.abort()
            return
        # The same note as Sequence.abort: the ranks may hear of it before or after the end of a step.
        self.books.note(Call.ABORT, tag_of(request_id))
        self.queue.abort(request_id, in_flight=self.ballot is not None)
        self.preemption.forget(request_id)

    def fork(self, parent: Sequence, branches: int | Seq[Branch], *, wait: bool) -> tuple[Sequence, ...]:
        """See :meth:`distkv.sequence.Sequence.fork`."""
        if isinstance(branches, (int, np.integer)) and not isinstance(branches, bool):
            branches = default_branches(parent, int(branches), self._taken)
        fork = Fork.of(parent, branches, self.books)
        names = [request.id for request in fork.requests]
        if not names or parent.forking:
            raise SequenceError(f"sequence {parent.id!r} cannot be forked: "
                                + ("it waits for another fork" if parent.forking else "there is no child to make"))
        taken = self._taken
        for name in names:
            if name in taken:
                raise DuplicateRequest(name)
            taken.add(name)
        what = f"forking sequence {parent.id!r} into {len(names)}"
        growth = Growth(parent, self._needs(fork.needs), fork=fork)
        if wait:
            asked = self.preemption.asked_by(parent)  # which is served before
            self._must_ever_fit({pages.ledger.label: pages.promised + pages.growth(asked)
                                 + fork.needs[pages.ledger.label] for pages in parent.lists}, what)
        later = bool(wait and (self.preemption.growing or short_of(growth.needs, self.leftovers) > 0))
        if not later:
            self._must_fit(growth.needs, what)
        # Whether a ballot is in flight: children run from now on, ahead of what it admits.
        self.books.note(Call.FORK, parent._tag, len(names), later, self.ballot is not None, data=data_of(fork))
        if later:
            parent.forking = True
            self.preemption.later(growth)
            return ()
        self._took(growth.needs)
        return self._forked(fork)

    def _forked(self, fork: Fork) -> tuple[Sequence, ...]:
        """The children of a fork that has its pages; they run."""
        children = fork.make(self.books, self)
        fork.parent.forking = False
        self.counters.forked += len(children)
        self.running.update((child.id, child) for child in children)
        return children

    @property
    def _taken(self) -> set[str]:
        """Names that no new request or fork may have; a new set."""
        return {*self.queue.ids, *self.running, *self.kept, *self.preemption.suspended, *self.preemption.names}

    def forget_waiting(self) -> None:
        """Nothing waits any more, on this rank: for closing."""
        self.queue.clear()
        self.preemption.clear()
        self._let_parked_go()

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
        if scope != "host":  # a kept prefix would be forked for a new request
            for sequence in list(self.kept.values()):
                sequence.abort()

    @property
    def leftovers(self) -> tuple[int, ...]:
        """The agreed room of each label less what was granted and grown since; 0 while a ballot is in flight."""
        return self._nothing if self.ballot is not None else self._leftover

    def grow(self, sequence: Sequence, pages: int, *, wait: bool = False) -> bool:
        """Reserves ``pages`` more out of the leftover; False: it is smaller, and the next ballots serve this first.

        Without ``wait`` it raises NoRoom instead, with nothing reserved; with it, only for what no pool can hold.
        """
        if not isinstance(sequence, Sequence) or sequence._owner is not self:  # its pages are of another pool
            raise SequenceError(f"grow takes a sequence of this cache, not {sequence!r}")
        sequence._must_run("grow", pages)
        if pages < 0:
            raise SequenceError(f"cannot grow sequence {sequence.id!r} by {pages} pages")
        what = f"growing sequence {sequence.id!r}"
        asked = pages + self.preemption.asked_by(sequence)
        if wait:
            self._must_ever_fit({each.ledger.label: each.promised + each.growth(asked) for each in sequence.lists},
                                what)
        growth = Growth(sequence, self._needs({each.ledger.label: each.growth(pages) for each in sequence.lists}),
                        pages)
        if wait and (self.preemption.growing or short_of(growth.needs, self.leftovers) > 0):
            self.books.note(Call.GROW, sequence._tag, pages, 1)
            self.preemption.later(growth)
            return False
        self._must_fit(growth.needs, what)
        sequence._grow(pages)
        self.books.note(Call.GROW, sequence._tag, pages)
        self._took(growth.needs)
        return True

    def _needs(self, pages: Mapping[str, int]) -> tuple[int, ...]:
        """Pages by label, as one number for each of the cache's labels."""
        return tuple(pages.get(ledger.label, 0) for ledger in self.books.ledgers)

    def _must_fit(self, needs: tuple[int, ...], what: str) -> None:
        """Raises NoRoom if the leftover is smaller."""
        short, label = max((need - left, ledger.label) for need, left, ledger
                           in zip(needs, self.leftovers, self.books.ledgers, strict=True))
        if short > 0:
            ended = self.books.retiring_sequences
            raise NoRoom(short, what + (f" in label {label!r}" if label != MAIN else "")
                         + (f" (pages of {ended} ended one(s) wait for retired)" if ended else ""))

    def _must_ever_fit(self, promised: Mapping[str, int], what: str) -> None:
        """Raises NoRoom for what the smallest pool of the group cannot hold, even if nothing else were in it."""
        for ledger, smallest in zip(self.books.ledgers, self.smallest_pools, strict=True):
            beyond = promised.get(ledger.label, 0) - smallest
            if beyond > 0:
                raise NoRoom(beyond, f"{what} beyond the smallest pool of the group, which has {smallest} pages"
                             + (f" of label {ledger.label!r}" if ledger.label != MAIN else ""))

    def _took(self, needs: tuple[int, ...]) -> None:
        self._leftover = less(self._leftover, needs)

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
        return Pending.of(request, self.books.renamed(chain).branch(), self.books)

    def _why_refused(self, pending: Pending) -> RequestError | None:
        request_id = pending.request.id
        for need, smallest, ledger in zip(pending.needs, self.smallest_pools, self.books.ledgers, strict=True):
            if need > smallest:
                return RequestTooLarge(request_id, need, smallest, None if ledger.label == MAIN else ledger.label)
        taken = (request_id in self.queue or request_id in self.running or request_id in self.preemption.suspended
                 or request_id in self.kept or request_id in self.preemption.names)
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

    def _forks_in_flight(self, sequence: Sequence) -> bool:
        """Whether the ballot in flight decides on a fork of this one. Its pages then stay until that has ended: a rank
        may hear of its end before or after the fork was made."""
        return self.ballot is not None and any(growth.fork is not None and growth.sequence is sequence
                                               for growth in self.ballot.growths)

    def _let_parked_go(self) -> None:
        """What the ballot counted on for forks goes: they are made, or never will be."""
        parked, self.parked = self.parked, []
        for sequence in parked:
            sequence._leave()

    def _ended(self, sequence: Sequence) -> None:
        if sequence.parked:
            self.parked.append(sequence)
        if self.kept.get(sequence.id) is sequence:
            del self.kept[sequence.id]
            return
        del self.running[sequence.id]
        self.loading.pop(sequence.id, None)
        if sequence.ended == "kept":
            self.kept[sequence.id] = sequence
        elif sequence.to_resume is not None:
            self.preemption.suspend(sequence.to_resume)
            self.counters.suspended += 1
        elif sequence.ended != "put back":
            self._gone.append(sequence.id)

    def _history(self) -> str:
        names = (*self._gone, *self.queue.ids, *self.running, *self.kept, *self.preemption.suspended)
        return self.books.history({tag_of(name): name for name in names})
