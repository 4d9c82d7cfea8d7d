"""What a program that every rank runs has around its work: joining the others, one line for an error, an exit code.

The codes are those of the command line: 0 it holds, 1 it does not, 2 unusable input, 130 interrupted, 141 nobody reads
the output.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from distkv import _streams
from distkv.engine.config import ServeConfig
from distkv.engine.launch import START_S, Ranks, launched
from distkv.engine.meeting import hand_over
from distkv.engine.report import quiet
from distkv.errors import ConfigError, DistKVError, InputFileError
from distkv.layout import Layout

__all__ = ["end_with", "exit_code", "joined"]

logger = logging.getLogger(__name__)


def exit_code(work: Callable[[Layout], int], *, worded: Callable[[str], str] = str) -> int:
    """``work``'s exit code, or that of what it raises, which becomes one line on stderr, ``worded`` for people.

    Every rank reads the same file, so one of each host says what is wrong with it.
    """
    layout = Layout()
    try:
        layout = Layout.from_environment()
        code = work(layout)
        _streams.flush()
        return code
    except (ConfigError, InputFileError) as error:
        if layout.local_rank == 0:
            _say(f"distkv: {error}")
        return 2
    except DistKVError as error:
        _say(f"distkv, rank {layout.rank}: {worded(f'{type(error).__name__}: {error}')}")
        return 1
    except KeyboardInterrupt:
        _say("distkv: interrupted")
        return 130
    except OSError as error:
        lost = _streams.lost(error)
        if lost is None:
            raise
        return lost


@contextmanager
def joined(config: ServeConfig, layout: Layout) -> Iterator[Ranks]:
    """The ranks of ``config``, see :func:`distkv.engine.launch.launched`; logging is set up for a program."""
    if layout.source == "torchrun":
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever started the ranks says that they were ended
    quiet(layout.rank)
    logger.info("%s", layout)
    if layout.source == "slurm":
        hand_over(layout, START_S)
    with launched(
        layout, config.parallel.tp, config.group.timeout_s, sp=config.parallel.sp, device=config.model.device,
        transport=config.group.transport, idle_timeout_s=config.engine.idle_timeout_s,
        heartbeat_s=config.group.heartbeat_s,
    ) as ranks:  # fmt: skip
        yield ranks


def end_with(main: Callable[[], int]) -> NoReturn:
    """Ends this process with the exit code of ``main()``, 1 if it raised: for the programs that every rank runs."""
    code = 1
    try:
        code = main()
    except Exception:  # logged for the user; the launcher ends the other ranks
        logger.exception("this rank failed")
    try:
        _streams.flush()
        sys.stderr.flush()
    except OSError as error:
        code = code or _streams.lost(error) or 1
    # Everything of ours is closed and written by now. What is left is torch's: it aborts the process if groups that
    # broke are destroyed with work unfinished, and at times ("terminate called") when its threads meet the end of the
    # interpreter, although all went well.
    if "mpi4py" in sys.modules and not dist.is_initialized():
        sys.exit(code)  # MPI is finalised at the end of the interpreter, or mpirun takes it for a crash
    logging.shutdown()
    os._exit(code)


def _say(text: str) -> None:
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError as error:  # the exit code says the same
        _streams.lost(error)
