"""A lock among the processes of one host, for what only one of them should do."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distkv.errors import ModelError

__all__ = ["locked"]

logger = logging.getLogger(__name__)


@contextmanager
def locked(path: Path, what: str, limit_s: float) -> Iterator[None]:
    """An exclusive lock on the file ``path``, which is made, and stays. ``what`` says what is done under it.

    Blocks at most ``limit_s`` seconds, then raises ``ModelError``; at once if the file cannot be made. The kernel gives
    the lock back when its process ends, however it ends.
    """
    try:
        file = path.open("w")
    except OSError as error:
        raise ModelError(f"{what}: cannot make the lock {path}: {error.strerror}; make its folder writable") from error
    with file:
        end, told = time.monotonic() + limit_s, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ModelError(
                        f"{what}: another process has held the lock {path} for {limit_s:g} s; end it (fuser {path} "
                        "names it) and start again"
                    ) from None
            if not told:
                logger.info("%s: another rank or program does it; waiting", what)
                told = True
            time.sleep(0.1)
        yield
