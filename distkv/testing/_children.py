"""Starting, watching and ending the processes of ranks. Nothing here knows what the ranks do.

Each rank leads a session of its own, so that one signal reaches it and its children. Every process that descends
from it also carries a token in its environment; those that left the session are found by it (Linux).
A process is not reaped before its group was signalled: until then its id cannot be taken by a stranger.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol

from distkv.testing._rank import Job, Report
from distkv.testing._warm_process import TOKEN, Start
from distkv.testing.warm import ForkedProcess, WarmProcess

__all__ = ["TOKEN", "Child", "end_all"]

logger = logging.getLogger(__name__)

# Runs before anything is imported, so that even a rank that is stuck in an import shows where.
_BOOTSTRAP = """
import faulthandler, json, signal, sys
stacks = open(sys.argv[1], "w")
faulthandler.enable(stacks)
faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
sys.path[:] = json.loads(sys.argv[3])
from distkv.testing._rank import main
main(sys.argv[2])
"""


class Process(Protocol):
    """A started rank. ``exit_code`` does not reap it and is None while it runs; ``reap`` waits for its end."""

    pid: int
    stdin: IO[bytes]

    def exit_code(self) -> int | None: ...

    def reap(self) -> int: ...


class FreshProcess:
    """One rank in an interpreter of its own; a child of this process."""

    def __init__(self, start: Start) -> None:
        with open(start.output, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, start.stacks, start.job, json.dumps(start.path)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=start.env,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self.pid = self._process.pid
        self.stdin = self._process.stdin

    def exit_code(self) -> int | None:
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def reap(self) -> int:
        return self._process.wait()


class Child:
    """The process of one rank, and the files that it leaves in ``folder``. Forked if there is a ``warm`` process."""

    def __init__(self, job: Job, folder: Path, env: Mapping[str, str], warm: WarmProcess | None = None) -> None:
        self.rank = job.rank
        self._base = folder / f"rank{job.rank}"
        parent = warm.pid if warm is not None else os.getpid()
        self._base.with_suffix(".job").write_bytes(pickle.dumps(replace(job, parent=parent or 0)))
        start = Start(
            env=dict(env),
            path=list(sys.path),
            folder=os.getcwd(),
            job=self._file("job"),
            output=self._file("output"),
            stacks=self._file("stacks"),
        )
        self._process: Process = ForkedProcess(warm, start) if warm is not None else FreshProcess(start)
        self._exit_code: int | None = None
        self._is_reaped = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it. Looking does not reap the process."""
        if self._exit_code is None:
            self._exit_code = self._process.exit_code()
        return self._exit_code

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal and not continued (Linux; elsewhere False)."""
        return _state(self.pid) in ("T", "t")

    @property
    def report(self) -> Report | None:
        """How the target ended; None while it runs or if it ended without a word."""
        try:
            report = pickle.loads(Path(self._file("report")).read_bytes())
        except FileNotFoundError:
            return None
        assert isinstance(report, Report)
        return report

    @property
    def has_reported(self) -> bool:
        return os.path.exists(self._file("report"))

    @property
    def output(self) -> str:
        """What the rank and its children wrote to stdout and stderr."""
        return Path(self._file("output")).read_text(errors="replace")

    @property
    def stacks(self) -> str:
        """The stacks of all threads: after :meth:`dump_stacks`, or after a crash."""
        try:
            return Path(self._file("stacks")).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def dump_stacks(self) -> None:
        """Have the rank write its threads' stacks. A stopped one is continued for it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            os.kill(self.pid, signal.SIGCONT)

    def release(self, word: bytes) -> None:
        """Let a rank that returned go: ``b"e"`` in order, ``b"k"`` at once."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(word)
            self._process.stdin.flush()

    def kill(self) -> None:
        """Kill the rank and all processes of its session that did not leave it, and reap the rank."""
        if not self._is_reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._exit_code = self._process.reap()
            self._is_reaped = True
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _file(self, suffix: str) -> str:
        return str(self._base.with_suffix("." + suffix))


def end_all(children: Iterable[Child], token: str) -> None:
    """Kill and reap every child, and everything that descends from one. Safe to call twice."""
    known = set(_with_token(token))  # before they are killed: one that is on its way out has no environment any more
    for child in children:
        child.kill()
    # A process that is killed may just have started another, so look until nothing is found.
    give_up = time.monotonic() + 10
    left: set[int] = set()
    while time.monotonic() < give_up:
        strays = set(_with_token(token))
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        known |= strays
        left = {pid for pid in known if _state(pid) not in (None, "Z", "X")}
        if not left:
            return
        time.sleep(0.01)
    logger.error("these processes of ranks could not be ended: %s", sorted(left))


def _state(pid: int) -> str | None:
    """The letter that ``ps`` shows; None if there is no such process (or no ``/proc``)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]


def _with_token(token: str) -> Iterable[int]:
    """Living processes whose environment has the token."""
    wanted = f"{TOKEN}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found = wanted in (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, a zombie, or not ours
            continue
        if found and int(entry.name) != os.getpid():
            yield int(entry.name)
