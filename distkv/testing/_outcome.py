"""How each rank of a run ended, in words too; and when a run is over."""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from distkv.errors import DistKVError
from distkv.testing._children import Child
from distkv.testing._rank import Raised

__all__ = ["POLL_S", "Outcome", "RanksFailed", "all_ended", "conclude", "first_failure"]

Status = Literal["returned", "raised", "exited", "killed", "stopped", "deadline", "ended"]

POLL_S = 0.02
_GRACE_S = 2.0  # for the other ranks to tell their own story after one has failed
_DUMP_S = 2.0  # for a rank to write its stacks
_LEAVE_S = 20.0  # for a rank that returned to end its process


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank ended.

    ``status``: ``returned`` (see ``result``), ``raised`` (see ``error``), ``exited`` (without a word: sys.exit or
    os._exit, see ``exit_code``), ``killed`` (by a signal that was not ours, ``-exit_code``), ``stopped`` (SIGSTOP;
    ended by the harness when the other ranks had ended), ``deadline`` (it was still running then), ``ended`` (by the
    harness, because another rank had failed). ``stacks`` has the threads of a rank that was still running.
    ``has_returned``: the target returned, whatever its process did then; one that does not end after that is
    ``deadline`` too. ``output`` is what it wrote to stdout and stderr. ``exit_code`` is None if the harness ended
    the process.
    """

    rank: int
    status: Status
    result: Any = None
    error: Raised | None = None
    has_returned: bool = False
    exit_code: int | None = None
    stacks: str = ""
    output: str = ""

    def raised(self, kind: type[BaseException]) -> bool:
        """Whether the rank raised an exception of this type, or of one derived from it."""
        return self.error is not None and f"{kind.__module__}.{kind.__qualname__}" in self.error.kinds

    def describe(self) -> str:
        """The outcome in words, with traceback, stacks and the end of the output."""
        if self.status == "returned":
            return f"rank {self.rank}: returned"
        what = {
            "raised": f"raised {self.error.kind}: {self.error.message}" if self.error else "raised",
            "exited": f"exited with code {self.exit_code}",
            "killed": f"was killed by signal {_signal_name(self.exit_code)}",
            "stopped": "was stopped by a signal and not continued",
            "deadline": "did not end within the deadline",
            "ended": "was still running when another rank failed, and was ended",
        }[self.status] + (" (its target had returned)" if self.has_returned else "")
        parts = [f"rank {self.rank}: {what}"]
        if self.error is not None:
            parts.append(self.error.traceback)
        if self.stacks:
            parts.append(f"-- stacks of rank {self.rank}'s threads\n{self.stacks}")
        if self.output.strip():
            parts.append(f"-- end of rank {self.rank}'s output\n{_tail(self.output)}")
        return "\n".join(part.rstrip() for part in parts)


class RanksFailed(DistKVError):
    """A run in which not every rank returned. ``outcomes`` has one per rank, in order of rank."""

    def __init__(self, title: str, outcomes: Sequence[Outcome]) -> None:
        failed = sum(outcome.status != "returned" for outcome in outcomes)
        described = "\n".join(outcome.describe() for outcome in outcomes)
        super().__init__(f"{failed} of {len(outcomes)} ranks of {title} failed\n{described}")
        self.outcomes = tuple(outcomes)


def all_ended(children: Sequence[Child]) -> bool:
    return all(_is_over(child) or child.is_stopped for child in children) and any(map(_is_over, children))


def first_failure(children: Sequence[Child]) -> bool:
    # A rank that returned waits to be released, so one that is gone by now has failed.
    return any(child.exit_code is not None for child in children) or all(child.has_reported for child in children)


def _is_over(child: Child) -> bool:
    return child.has_reported or child.exit_code is not None


def conclude(children: Sequence[Child], deadline: float) -> list[Outcome]:
    """Let go whoever returned, show where the others are, and say how each ended. What still runs is killed later."""
    late = time.monotonic() >= deadline
    if all(child.has_reported and child.exit_code is None for child in children):
        for child in children:
            child.release(b"e")
        _wait(lambda: all(child.exit_code is not None for child in children), _LEAVE_S)
        running = [child for child in children if child.exit_code is None]
    else:
        if not late:
            _wait(lambda: all(_is_over(child) or child.is_stopped for child in children), _GRACE_S)
        running = [child for child in children if not _is_over(child)]
    stopped = [child for child in running if child.is_stopped]
    for child in running:
        child.dump_stacks()
    _wait(lambda: all(child.stacks or child.exit_code is not None for child in running), _DUMP_S)
    if running:
        time.sleep(0.1)  # the stacks of many threads are not written in one go
    outcomes = []
    for child in children:
        status: Status | None = None
        if child in running:
            status = "stopped" if child in stopped else "deadline" if late or child.has_reported else "ended"
        outcomes.append(_outcome(child, status))
    return outcomes


def _outcome(child: Child, ended: Status | None) -> Outcome:
    """``ended``: why the harness ends this rank; None if it was over by itself."""
    report, code = child.report, child.exit_code
    outcome = Outcome(
        rank=child.rank,
        status="exited",
        error=report.raised if report is not None else None,
        has_returned=report is not None and report.result is not None,
        exit_code=None if ended else code,
        stacks=child.stacks,
        output=child.output,
    )
    if ended is not None:
        return replace(outcome, status=ended)
    if outcome.error is not None:
        return replace(outcome, status="raised")
    if report is not None and report.result is not None and code in (None, 0):
        return replace(outcome, status="returned", result=pickle.loads(report.result))
    return replace(outcome, status="killed" if code is not None and code < 0 else "exited")


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(POLL_S)


def _signal_name(code: int | None) -> str:
    try:
        return signal.Signals(-(code or 0)).name
    except ValueError:
        return str(code)


def _tail(text: str, lines: int = 60) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])
