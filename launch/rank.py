"""One rank, in a process that srun or mpirun has started: runs the module, and hands torch's variables over before.

``mpirun -n 3 python launch/rank.py CONFIG``, ``srun -n 3 python launch/rank.py --module MODULE CONFIG ...``. The
package's own modules find the others by themselves; a module of yours finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR
and MASTER_PORT as under torchrun, so that ``init_process_group()`` works. The exit code is the module's.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

import _front as front


def main(arguments: Sequence[str]) -> int:
    """Runs the module and exits as it does; returns only if it could not be started."""
    problem = front.use_this_checkout()
    if problem:
        return front.fail(problem)
    given = front.parse("rank.py", "Run one rank, in a process that srun or mpirun has started.", "", arguments)
    if isinstance(given, int):
        return given
    code = 0 if given.is_ours else front.explained(_hand_over)
    if code == 0:
        code = _run(given)
    return code


def _hand_over() -> int:
    from distkv.engine.launch import START_S
    from distkv.engine.meeting import hand_over
    from distkv.errors import GroupError
    from distkv.layout import Layout

    try:
        hand_over(Layout.from_environment(), START_S)
    except GroupError as error:
        return front.fail(str(error))
    return 0


def _run(given: front.Given) -> int:
    sys.argv = [given.module, *given.of_module]
    sys.path[0] = os.getcwd()  # as python -m has it; this checkout is behind it
    sys.path.insert(1, str(front.ROOT))
    try:
        runpy.run_module(given.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if "distkv.engine.mpi_launch" in sys.modules:
        sys.modules["distkv.engine.mpi_launch"].finalize()  # else mpirun takes the end for a crash
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
