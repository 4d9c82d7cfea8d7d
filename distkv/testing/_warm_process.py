"""What runs in the warm process: it has imported what ranks import, has computed nothing, and forks ranks on request.

Started by ``distkv.testing.warm``. It has one thread, or it refuses to fork: a forked process has only the thread that
called fork, and locks of the others would stay locked. It ends when its caller is gone, and the kernel ends its ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PLACEHOLDER", "TOKEN", "Start", "main"]

TOKEN = "DISTKV_TESTING_TOKEN"
PLACEHOLDER = "0" * 32  # as long as the token of a run, which takes its place

_streams: list[Any] = []  # faulthandler writes to a descriptor, which lives as long as its file


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a rank finds: the environment (with the token), the path, the folder, and files for what it writes."""

    env: dict[str, str]
    path: list[str]
    folder: str
    job: str
    output: str
    stacks: str


def main(descriptor: int) -> None:
    """Answers requests until the caller ends. Returns in a rank, after it has run its job."""
    with socket.socket(fileno=descriptor) as connection:
        job = _serve(connection, os.getppid())
    if job is None:
        os._exit(0)
    from distkv.testing._rank import main as run

    run(job)


def _serve(connection: socket.socket, caller: int) -> str | None:
    """Returns None when the caller is gone, and in a forked rank the path of its job."""
    while os.getppid() == caller:
        if not select.select([connection], [], [], 1.0)[0]:
            continue
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
        if not data:
            break
        request = json.loads(data)
        answer: Any = None
        if request["do"] == "import":
            answer = _import(request["modules"])
        elif request["do"] == "fork":
            start = _fork(request["start"], descriptors[0])
            if isinstance(start, Start):
                return start.job
            answer = start
        else:
            found = os.waitid(os.P_PID, request["pid"], os.WEXITED | (0 if request["do"] == "reap" else os.WNOWAIT))
            assert found is not None
            answer = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        connection.send(json.dumps(answer).encode())
    return None


def _import(modules: list[str]) -> str | None:
    """Returns why ranks cannot be forked from here, or None."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{name} cannot be imported: {error}"
    gc.collect()
    gc.freeze()  # pages that the collector does not write to stay shared
    return _unfit()


def _unfit() -> str | None:
    tasks = os.listdir("/proc/self/task")
    return f"what it has imported runs {len(tasks) - 1} more threads" if len(tasks) > 1 else None


def _fork(path: str, stdin: int) -> int | str | Start:
    """Its pid, once it leads a session of its own; or why not; or, in the rank, what it was started with."""
    problem = _unfit()
    if problem is not None:
        os.close(stdin)
        return problem
    ready, tell = os.pipe()
    pid = os.fork()
    if pid:
        os.close(tell)
        os.close(stdin)
        os.read(ready, 1)
        os.close(ready)
        return pid
    start: Start = pickle.loads(Path(path).read_bytes())
    os.setsid()
    _mark(start.env[TOKEN])
    os.close(ready)
    os.write(tell, b"s")
    os.close(tell)
    _become(start, stdin)
    return start


def _mark(token: str) -> None:
    """Put the token into the memory that ``/proc/PID/environ`` shows, which changes of ``os.environ`` do not reach."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    where = getenv(TOKEN.encode())
    assert where is not None, "it was started with a placeholder"
    assert len(token) == len(PLACEHOLDER)
    ctypes.memmove(where, token.encode(), len(token))


def _become(start: Start, stdin: int) -> None:
    """As in a new interpreter: descriptors, environment, paths, and random numbers of its own."""
    output = os.open(start.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    for descriptor, number in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    os.close(stdin)
    os.close(output)
    stacks = open(start.stacks, "w")  # noqa: SIM115  # for the life of the process
    _streams.append(stacks)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    os.environ.clear()
    os.environ.update(start.env)
    os.chdir(start.folder)
    sys.path[:] = start.path
    importlib.invalidate_caches()
    tempfile.tempdir = None
    with contextlib.suppress(KeyError):
        sys.modules["numpy.random"].seed()  # torch's seed is the same constant in every new interpreter, so it is left
