"""Ranks that start in milliseconds: forked from a process that has imported torch, not from nothing.

::

    with warm_start(["torch.distributed", "transformers"]):      # in a conftest.py, around the whole session
        ...                                                      # run_ranks and run_outcomes start ranks by forking

Nothing else changes: each rank is a process of its own, in a session of its own, with its own environment, output, exit
code, signals and random numbers (the ``random`` module and numpy's are seeded anew; torch's default seed is a constant
in every new interpreter, and here too). What ranks share is the seed of ``hash``, and the addresses of what was
imported: a test that is to find decisions that depend on the order of a set must start fresh (``fresh=True``).

A run starts fresh interpreters all the same if this machine has a GPU that torch can use, if its backend is nccl, or
if its ``env`` changes what libraries read when they are loaded (``PYTHON*``, ``OMP_*``, ``LD_*``, ``TORCH_*``, ...).
Linux, Python >= 3.11; elsewhere all runs start fresh.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from distkv.testing._warm_process import PLACEHOLDER, TOKEN, Start

__all__ = ["ForkedProcess", "WarmProcess", "current", "warm_start"]

logger = logging.getLogger(__name__)

# What the interpreter and the usual libraries read when they are loaded.
_READ_EARLY = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "CUDA_",
               "NVIDIA_", "TORCH_", "PYTORCH_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "XDG_", "HOME",
               "LC_", "LANG", "TZ")  # fmt: skip
_ANSWER_S = 120.0  # imports on a machine under load

_CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from distkv.testing._warm_process import main
main(int(sys.argv[1]))
"""


class WarmEnded(RuntimeError):
    """The warm process is gone, and with it the ranks that were forked from it."""


class WarmProcess:
    """Starts the process when it is first needed, and again after it was killed. May be used by several threads."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = tuple(modules)
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._env: dict[str, str] = {}
        self._imported: set[str] = set()
        self._unfit: str | None = None

    @property
    def pid(self) -> int | None:
        """None while there is no such process."""
        return self._process.pid if self._process is not None else None

    def ready(self, env: Mapping[str, str]) -> bool:
        """Whether ranks with this environment can be forked; starts the process if it can be of use.

        Of the modules it imports those that this process has imported by now: the ranks will most likely need them.
        """
        with self._lock:
            if self._unfit is not None or not hasattr(os, "pidfd_open") or _has_gpu():
                return False
            if self._process is not None and self._process.poll() is not None:
                self.close()
            if self._process is None:
                self._launch(env)
            if any(env.get(name) != self._env.get(name) for name in {*env, *self._env}
                   if name.startswith(_READ_EARLY)):  # fmt: skip
                return False
            wanted = [name for name in self._modules if name in sys.modules and name not in self._imported]
            if wanted:
                self._imported.update(wanted)
                try:
                    self._unfit = self.ask({"do": "import", "modules": wanted})
                except WarmEnded as ended:
                    self._unfit = str(ended)
            if self._unfit is not None:
                logger.warning("ranks start in fresh interpreters: %s", self._unfit)
                self.close()
            return self._unfit is None

    def _launch(self, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._env = {**env, TOKEN: PLACEHOLDER}
        self._imported = set()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL, env=self._env, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        ours.settimeout(_ANSWER_S)
        self._connection = ours

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        """One request, one answer. If that is cut short, by an interrupt too, the process and all its ranks are ended.

        Otherwise a rank might have been forked that nobody knows of. Raises WarmEnded.
        """
        with self._lock:
            if self._connection is None:
                raise WarmEnded("the process that ranks are forked from has ended")
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], list(descriptors))
                answer = self._connection.recv(1 << 16)
                if not answer:
                    raise WarmEnded("the process that ranks are forked from has ended")
            except OSError as error:
                self.close()
                raise WarmEnded(f"the process that ranks are forked from does not answer: {error}") from error
            except BaseException:
                self.close()
                raise
            return json.loads(answer)

    def close(self) -> None:
        """End the process and all ranks that were forked from it. Safe to call twice."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None


class ForkedProcess:
    """One rank, forked. Its parent is the warm process, which reaps it when it is asked to."""

    def __init__(self, warm: WarmProcess, start: Start) -> None:
        path = Path(start.job).with_suffix(".start")
        path.write_bytes(pickle.dumps(start))
        self._warm = warm
        reader, writer = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(writer, "wb")
        try:
            answer = warm.ask({"do": "fork", "start": str(path)}, [reader])
            if not isinstance(answer, int):
                raise WarmEnded(f"no rank can be forked: {answer}")
            self.pid = answer
            self._descriptor = os.pidfd_open(self.pid)
        except BaseException:
            self.stdin.close()
            raise
        finally:
            os.close(reader)
        self._exit_code: int | None = None

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it. It is not reaped."""
        if self._exit_code is None and self._has_ended():
            try:
                self._exit_code = self._warm.ask({"do": "look", "pid": self.pid})
            except WarmEnded:
                self._exit_code = -signal.SIGKILL
        return self._exit_code

    def reap(self) -> int:
        """Waits for its end, after which its id is free."""
        if self._descriptor >= 0:
            try:
                self._exit_code = self._warm.ask({"do": "reap", "pid": self.pid})
            except WarmEnded:  # the kernel has killed it, and whoever inherited it reaps it
                self._exit_code = -signal.SIGKILL
                _wait_until(self._has_ended, 10.0)
            os.close(self._descriptor)
            self._descriptor = -1
        assert self._exit_code is not None
        return self._exit_code

    def _has_ended(self) -> bool:
        return self._descriptor < 0 or bool(select.select([self._descriptor], [], [], 0)[0])


_current: WarmProcess | None = None


def current() -> WarmProcess | None:
    """The innermost :func:`warm_start`'s, if there is one in this process."""
    return _current


@contextlib.contextmanager
def warm_start(modules: Sequence[str]) -> Iterator[WarmProcess]:
    """Within it ranks are forked from one warm process, which ends with it, or with this process however that ends.

    ``modules``: importable names, all of libraries that start no thread when they are imported; each is imported by the
    warm process once this one has imported it. With threads, ranks start fresh.
    """
    global _current
    outer, _current = _current, WarmProcess(["distkv.testing._rank", *modules])
    try:
        yield _current
    finally:
        _current.close()
        _current = outer


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _wait_until(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
