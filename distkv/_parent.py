"""A child process that must not outlive its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, however it dies (Linux; elsewhere nothing)."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)
