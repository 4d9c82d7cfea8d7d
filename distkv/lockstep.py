"""Lockstep: each rank decides alone, from state that is equal on all of them. Sans-IO.

A decision is a deterministic function of the calls and of this rank's pool and index. Ranks with equal pools that are
given equal calls therefore decide alike, and nothing has to be sent. What is sent, every ``check_every`` steps, is a
digest: of all calls and their places between begin and end, of what each lookup found and each eviction dropped, and of
the state of every page. So ranks that depart from each other are noticed at the next digest, at the latest.
"""

from __future__ import annotations

from distkv import ballot as ballots
from distkv.agreement import Agreement
from distkv.ballot import Slots, Vector
from distkv.books import Books, Call
from distkv.errors import GroupDivergence, PeerFault, SequenceError
from distkv.request import StepResult


class Lockstep(Agreement):
    """An agreement whose minimum is this rank's own ballot.

    A rank that cannot fill its ballot cannot have the others vote on it: it raises what went wrong there from ``end``,
    and the group is over.
    """

    def __init__(self, books: Books, rank: int, slots: Slots, check_every: int, smallest_pools: tuple[int, ...], *,
                 alone: bool) -> None:
        super().__init__(books, rank, slots, check_every, smallest_pools, alone=alone)
        self.check_every = check_every
        self._alone: Vector | None = None

    def _heartbeat_due(self) -> bool:
        return True  # a decision costs nothing here, and keeps the leftover fresh

    def _to_send(self, own: Vector | None) -> Vector | None:
        """Keeps the ballot; the group gets a digest if it is due."""
        self._alone = own
        due = self.books.step % self.check_every == 0
        if self._fault is not None:
            return ballots.fault(self.rank) if due else None
        assert own is not None
        self.books.note(Call.FOUND, data=own.tobytes())
        if not due:
            return None
        self.books.note_state()
        return ballots.check(self.books.digest)

    def end(self, minimum: Vector | None) -> StepResult:
        """Commits what follows from this rank's own ballot; ``minimum`` is that of the digests, if they were due.

        Raises GroupDivergence if they differ, the error of a ballot that this rank could not fill, and PeerFault if
        another rank could not. All of these end the group.
        """
        if not self._began:
            raise SequenceError("end_step without begin_step")
        try:
            self._raise_failed(minimum)
            self.books.note(Call.END)
        except BaseException:
            self.give_up()
            raise
        own, self._alone = self._alone, None
        return super().end(own)

    def _raise_failed(self, minimum: Vector | None) -> None:
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        if minimum is None:
            return
        failed = ballots.failed_rank(minimum)
        if failed is not None:
            raise PeerFault(failed, "ballot", "it could not fill it; see its log", rank=self.rank, step=self.books.step)
        if ballots.diverged(minimum):
            raise GroupDivergence(rank=self.rank, step=self.books.step, lockstep=True, calls=self._history())
