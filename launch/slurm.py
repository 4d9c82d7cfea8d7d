"""srun with what distkv needs around it; started by ``slurm.sbatch`` in the batch script of a job.

Checks arguments, configuration and environment once, and then becomes srun, which starts one task for each rank. The
exit code is srun's: the highest of the tasks', 128 + the signal for one that was killed; 2 if arguments, configuration
or environment cannot be used.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

import _front as front

VARIABLES = """\
Run it inside a job: as sbatch launch/slurm.sbatch CONFIG, or in the shell of salloc. In a task that srun has started it
runs one rank.

SLURM_NTASKS     tasks of the job (--ntasks, --ntasks-per-node); default: the configuration's ranks
MASTER_ADDR      where the ranks meet; default: the first host of the step
MASTER_PORT      a free port of that host; default: the first that is free of some that follow from the job's and the
                 step's number
OMP_NUM_THREADS  threads per task; default: --cpus-per-task

srun reads SLURM_CPU_BIND, SLURM_MPI_TYPE and more: see its manual.
"""

WAIT_S = 60  # for the other ranks to say what they have seen, when one has ended


def main(arguments: Sequence[str]) -> int:
    """Becomes srun; returns the exit code if that cannot be."""
    problem = front.use_this_checkout()
    if problem:
        return front.fail(problem)
    given = front.parse("slurm.sbatch", "Start one task for each rank with srun.", VARIABLES, arguments)
    return given if isinstance(given, int) else front.explained(lambda: _start(given))


def _start(given: front.Given) -> int:
    from distkv.errors import ConfigError

    config = front.load_config(given)
    if not os.environ.get("SLURM_JOB_ID"):
        raise ConfigError("SLURM_JOB_ID", "is not set, so this is no job of Slurm: sbatch launch/slurm.sbatch CONFIG, "
                                          "or launch/torchrun.sh without Slurm")  # fmt: skip
    srun = shutil.which("srun")
    if srun is None:
        raise ConfigError("PATH", "has no srun; load your site's module for Slurm")
    ranks = config.parallel.ranks
    tasks = _tasks(ranks, strict=given.is_ours)
    if given.is_ours:
        front.check(config, given, None)  # this node may have no GPU
    # All tasks see all GPUs of their node, as under torchrun. A site's default may be to kill all when one has failed.
    options = [f"--ntasks={tasks}", "--kill-on-bad-exit=0", f"--wait={WAIT_S}", "--gpu-bind=none"]
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    if cpus:
        options.append(f"--cpus-per-task={cpus}")  # which srun has not inherited from sbatch since Slurm 22.05
    module = ["--module", given.module, *given.of_module]
    os.execv(srun, [srun, *options, sys.executable, str(front.RANK), *module])


def _tasks(ranks: int, *, strict: bool) -> int:
    from distkv.errors import ConfigError

    text = os.environ.get("SLURM_NTASKS", "").strip() or str(ranks)
    if not (text.isascii() and text.isdigit() and 0 < int(text[:10]) < 1_000_000):
        raise ConfigError("SLURM_NTASKS", f"must be a whole number, got {text!r}")
    if strict and int(text) != ranks:
        raise ConfigError("SLURM_NTASKS", f"is {text}, but the configuration has {ranks} ranks (parallel.tp x "
                          "parallel.sp); ask for as many with --ntasks or --ntasks-per-node x --nodes, or change "
                          "it")  # fmt: skip
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
