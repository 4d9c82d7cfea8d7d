"""A copy engine for tests and simulations: no thread and no clock, every end is the script's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from distkv.errors import CopyFailed, InvariantError
from distkv.host._engine import TrackedCopies, source_failed
from distkv.host.copies import Copy, Kind

__all__ = ["Dice", "Rules", "ScriptedCopies"]


class Dice(Protocol):
    """What is used of ``random.Random``, or of numpy's Generator."""

    def random(self) -> float:
        """From 0 up to 1."""

    def shuffle(self, x: list[Any], /) -> None:
        """In place."""


@dataclass(kw_only=True)
class Rules:
    """What this engine keeps to. A test that switches one off must be seen to fail."""

    after: bool = True
    """A copy does not write before those in ``after`` have ended."""
    source: bool = True
    """A load does not read before its store has ended, and fails with it."""
    barrier: bool = True
    """A store does not read, and a load does not write, before the kernels launched before its submit have retired."""
    fence: bool = True
    """What comes after a fence comes after its copies."""


@dataclass(slots=True, eq=False)
class _Play:
    begun: bool = False
    data: Any = None
    stalled: bool = False
    error: BaseException | None = None
    """What it will end with, if that is settled."""


class ScriptedCopies(TrackedCopies):
    """Copies that begin and end when the script says, in any order that the rules allow, and as early as they allow.

    A copy reads when it begins and writes when it ends. Both are calls, so that a test can model the bytes and sees
    what was read too early or written too late: ``read(copy)`` gives what ``write(copy, data)`` gets; data is None
    where the copy fails, whose target then holds anything. ``move(copy)`` instead of both: at an end that goes well.
    A copy that fails because its source did reads and writes nothing.

    ``barrier(copy)``: whether the kernels launched before its submit have retired; they have, if it is None.
    ``retire(copy)`` is called by a fence that finds they have not, and lets them: the compute stream is in order.

    What has ended is heard of at ``poll``, as from any engine. ``fence`` ends its copies, and what they wait for, at
    once. A state that the script asks for and the rules forbid raises InvariantError.
    """

    def __init__(
        self,
        *,
        read: Callable[[Copy], Any] | None = None,
        write: Callable[[Copy, Any], None] | None = None,
        move: Callable[[Copy], None] | None = None,
        barrier: Callable[[Copy], bool] | None = None,
        retire: Callable[[Copy], None] | None = None,
        rules: Rules | None = None,
    ) -> None:
        super().__init__()
        self.rules = rules or Rules()
        self.submitted: list[Copy] = []
        """Every copy that was ever taken, in this order."""
        self.page_s: float | None = None
        """Seconds that loading a page takes, for ``load_s``."""
        self._read, self._write, self._moved, self._barrier, self._retire = read, write, move, barrier, retire
        self._plays: dict[Copy, _Play] = {}
        self._over: dict[Copy, BaseException | None] = {}
        self._expired: set[Copy] = set()

    # ---- the script

    @property
    def running(self) -> list[Copy]:
        """Copies that have not ended, in the order of their submission. One that ended is out, polled or not."""
        return list(self._plays)

    def begin(self, copy: Copy) -> bool:
        """Lets it read, if the rules allow it now. Gives whether it has."""
        play = self._play(copy)
        if not play.begun and self._may_read(copy):
            play.begun = True
            play.data = self._read(copy) if self._read else None
        return play.begun

    def finish(self, copy: Copy, error: BaseException | None = None) -> None:
        """Ends it now, well or with ``error``; it begins, if it had not."""
        play = self._play(copy)
        if play.stalled or not self.begin(copy) or not self._may_write(copy):
            raise InvariantError(f"{copy} cannot end now: it is stalled, or what it waits for has not ended")
        self._stop(copy, play.error or error)

    def doom(self, copy: Copy, error: BaseException | None = None) -> None:
        """Whatever ends it, it ends with an error."""
        self._play(copy).error = error or CopyFailed(f"{copy.kind.value} of page {copy.device}: the script says so")

    def stall(self, copy: Copy) -> None:
        """It does not end until :meth:`release`, or a fence that waits for it."""
        self._play(copy).stalled = True

    def release(self, copy: Copy) -> None:
        """The opposite of :meth:`stall`."""
        self._play(copy).stalled = False

    def expire(self, copy: Copy) -> None:
        """The load is overdue from the next poll on, if it still runs then."""
        self._expired.add(copy)

    def tick(self, dice: Dice, p_end: float = 0.5, p_fail: float = 0.0) -> int:
        """Every copy that may begins with probability ``p_end``, and ends with it, of those ``p_fail`` with an error.

        In a random order, one step of each at most, so that others come between. Gives how many have ended.
        """
        before = len(self._over)
        order = self.running
        dice.shuffle(order)
        for copy in order:
            play = self._plays.get(copy)
            if play is None or play.stalled or dice.random() >= p_end:
                continue
            if not play.begun:
                self.begin(copy)
            elif self._may_write(copy):
                if dice.random() < p_fail:
                    self.doom(copy)
                self._stop(copy, play.error)
        return len(self._over) - before

    def finish_all(self) -> None:
        """Ends all that is not stalled and waits for nothing that is."""
        left = -1
        while left != len(self._plays):
            left = len(self._plays)
            for copy in self.running:
                play = self._plays.get(copy)
                if play is not None and not play.stalled and self.begin(copy) and self._may_write(copy):
                    self._stop(copy, play.error)

    # ---- the interface

    def wait(self, timeout_s: float) -> None:
        """Does nothing: only the script ends a copy."""

    def load_s(self, pages: int) -> float | None:
        """By ``page_s``."""
        return None if self.page_s is None else pages * self.page_s

    def close(self) -> None:
        """All that is not stalled fails, and touches nothing any more."""
        self._closed = True
        for copy in self.running:
            if not self._plays[copy].stalled:
                self._forget(copy, CopyFailed("the copy engine was closed before this copy ended"))

    def _start(self, copies: list[Copy]) -> None:
        for copy in copies:
            self.submitted.append(copy)
            self._plays[copy] = _Play()
            if self.rules.source and copy.source is not None and self._over.get(copy.source) is not None:
                self._forget(copy, source_failed(copy))

    def _collect(self) -> Iterable[tuple[Copy, BaseException | None]]:
        over, self._over = self._over, {}
        return over.items()

    def _fence(self, copies: list[Copy]) -> None:
        if not self.rules.fence:
            return
        wanted: set[Copy] = set()
        todo = list(copies)
        while todo:
            copy = todo.pop()
            if copy in self._plays and copy not in wanted:
                wanted.add(copy)
                todo += copy.after if copy.source is None else (*copy.after, copy.source)
        for copy in self.running:  # whoever is waited for was submitted before
            if copy not in wanted or copy not in self._plays:
                continue
            if self._retire is not None and not self._retired(copy):
                self._retire(copy)
            self.release(copy)
            self.finish(copy)

    def _mark_overdue(self) -> None:
        for copy in self._expired & self._running.keys():
            copy.overdue = copy.kind is Kind.LOAD
        self._expired.clear()

    # ---- what the rules allow

    def _may_read(self, copy: Copy) -> bool:
        if copy.kind is Kind.STORE:
            return self._retired(copy)
        return not self.rules.source or copy.source not in self._plays

    def _may_write(self, copy: Copy) -> bool:
        waits = self.rules.after and any(other in self._plays for other in copy.after)
        return not waits and (copy.kind is Kind.STORE or self._retired(copy))

    def _retired(self, copy: Copy) -> bool:
        return not self.rules.barrier or self._barrier is None or self._barrier(copy)

    def _stop(self, copy: Copy, error: BaseException | None) -> None:
        play = self._plays[copy]
        if self._write is not None:
            self._write(copy, None if error is not None else play.data)
        if self._moved is not None and error is None:
            self._moved(copy)
        self._forget(copy, error)

    def _forget(self, copy: Copy, error: BaseException | None) -> None:
        del self._plays[copy]
        self._over[copy] = error
        if error is not None and self.rules.source:
            for other in [other for other in self._plays if other.source is copy]:
                self._forget(other, source_failed(other))

    def _play(self, copy: Copy) -> _Play:
        play = self._plays.get(copy)
        if play is None:
            raise InvariantError(f"{copy} does not run")
        return play
