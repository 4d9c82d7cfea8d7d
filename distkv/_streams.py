"""What a program does when nobody reads its output any more, or when it cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from typing import TextIO

__all__ = ["BROKEN_PIPE", "flush", "lost"]

BROKEN_PIPE = 141
"""Exit code where the reader left, as in ``| head -1``: what a shell sees of a program that SIGPIPE ended."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def flush() -> None:
    """Writes out what waits in stdout: an error that came up only at Python's own end would be a stray traceback."""
    if sys.stdout is not None:  # it was closed before Python started
        sys.stdout.flush()


def lost(error: OSError) -> int | None:
    """The exit code if ``error`` says that output is lost, and None if it is something else's.

    141, without a word, for a pipe whose reader left; 2 and one line on stderr for a full disk. What is written to that
    stream from now on goes nowhere.
    """
    if isinstance(error, BrokenPipeError):
        broken = [stream for stream in (sys.stdout, sys.stderr) if _reader_left(stream)]
        for stream in broken:
            _to_nowhere(stream)
        return BROKEN_PIPE if broken else None
    if error.errno not in _FULL or error.filename is not None:  # what is opened by name is no output of this kind
        return None
    _to_nowhere(sys.stdout)
    with contextlib.suppress(OSError):
        sys.stderr.write(f"distkv: the output cannot be written: {error.strerror}\n")
        sys.stderr.flush()
    return 2


def _reader_left(stream: TextIO) -> bool:
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # closed, or without a descriptor
        return False


def _to_nowhere(stream: TextIO) -> None:
    """The descriptor leads to the null device, and what waits in the stream goes there, too."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
        stream.flush()
