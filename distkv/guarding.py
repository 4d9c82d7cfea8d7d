"""What ends a group of caches: faults outside the ballot, and the error that every later call raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distkv.agreement import Agreement
from distkv.books import Books
from distkv.errors import DistKVError, GroupError, PeerFailed, SequenceError
from distkv.faults import Fault
from distkv.group import Group, Ticket

__all__ = ["Guarding"]


class Guarding:
    """How a fault of one rank reaches all; a part of :class:`distkv.PrefixCache`, which owns the state."""

    _group: Group
    _books: Books
    _agreement: Agreement
    _broken: DistKVError | None
    _ticket: Ticket | None

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Around what an engine does between steps and cannot undo: ``with cache.guard("forward"): ...``, ``"commit"``.

        An exception inside ends the group. One of this rank's own is told to all ranks, which raise PeerFault, and goes
        on its way. One that says that another rank is gone (a collective of the engine's that broke) is replaced by the
        error that names rank and step of the cause; see :meth:`fail`.
        """
        try:
            yield
        except PeerFailed:
            raise
        except BaseException as error:  # an interrupt ends this rank as well
            named = self.fail(error, what)
            if named is error:
                raise
            raise named from error

    def fail(self, error: BaseException, what: str) -> BaseException:
        """Ends the group for ``error``, which this rank caught while it was doing ``what``; returns what to raise.

        That is ``error`` itself if it is this rank's own, and otherwise the GroupError that names its cause. Afterwards
        every rank's ``submit``, ``begin_step`` and ``end_step`` raise an error that names rank and step. Does not
        raise; may wait for some heartbeats, to find out which rank is gone.
        """
        cause = error if error is self._broken else self._group.explain(error)
        if isinstance(cause, DistKVError):
            self._break(cause)
            return cause
        fault = Fault.of(error, what, rank=self._group.rank, step=self._books.step)
        self._group.report(fault)
        self._break(fault.error(rank=fault.seen_by))
        return error

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """What is raised inside ends the step and gives its holds back; a group error but PeerFailed ends the group."""
        try:
            yield
        except PeerFailed:
            raise
        except GroupError as error:
            named = self._group.explain(error) or error
            self._break(named)
            if named is error:
                raise
            raise named from error
        except BaseException as error:  # an interrupt too must leave nothing held
            self._agreement.give_up()
            if self._group.size > 1 and not isinstance(error, SequenceError):  # a call out of turn changed nothing
                self.fail(error, "step")
            raise

    def _check_open(self) -> None:
        if self._broken is None and self._group.fault is not None:
            error = self._group.fault.error(rank=self._group.rank)
            self._break(self._group.explain(error) or error)
        if self._broken is not None:
            raise self._broken

    def _break(self, error: DistKVError) -> None:
        self._agreement.give_up()
        self._ticket = None
        self._broken = self._broken or error
