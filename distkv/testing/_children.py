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
from pathlib import Path

from distkv.testing._rank import Job, Report

__all__ = ["Child", "end_all"]

logger = logging.getLogger(__name__)

TOKEN = "DISTKV_TESTING_TOKEN"

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


class Child:
    """The process of one rank, and the files that it leaves in ``folder``."""

    def __init__(self, job: Job, folder: Path, env: Mapping[str, str]) -> None:
        self.rank = job.rank
        self._base = folder / f"rank{job.rank}"
        self._base.with_suffix(".job").write_bytes(pickle.dumps(job))
        arguments = [self._file("stacks"), self._file("job"), json.dumps(sys.path)]
        with open(self._file("output"), "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        self._exit_code: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it. Looking does not reap the process."""
        if self._exit_code is None:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                exited = status.si_code == os.CLD_EXITED
                self._exit_code = status.si_status if exited else -status.si_status
        return self._exit_code

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal and not continued (Linux; elsewhere False)."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

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
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(word)
            self._process.stdin.flush()

    def kill(self) -> None:
        """Kill the rank and all processes of its session that did not leave it, and reap the rank."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._exit_code = self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _file(self, suffix: str) -> str:
        return str(self._base.with_suffix("." + suffix))


def end_all(children: Iterable[Child], token: str) -> None:
    """Kill and reap every child, and everything that descends from one. Safe to call twice."""
    for child in children:
        child.kill()
    # A process that is killed may just have started another, so look until nothing is found.
    give_up = time.monotonic() + 10
    strays: list[int] = []
    while time.monotonic() < give_up:
        strays = list(_with_token(token))
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not strays:
            return
        time.sleep(0.01)
    logger.error("these processes of ranks could not be ended: %s", strays)


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
