"""mpirun with what distkv needs around it; started by ``mpirun.sh``.

Checks arguments and configuration once, and has mpirun start one process per rank. The exit code is mpirun's: under
Open MPI that of the first rank that failed; MPICH joins all ranks' bit by bit, and where the package's own modules ran
1 and 2 together are taken for the 2 that came first. 2 if arguments or configuration cannot be used; 130 after Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import _front as front

VARIABLES = """\
Options of mpirun come before --, as in: mpirun.sh --hostfile hosts -n 8 -- CONFIG

Environment, all optional:

MASTER_ADDR      on several hosts: name or address of rank 0's host that the others reach; default: its host name
OMP_NUM_THREADS  threads per process; on one host the default is its cores over the processes
GLOO_SOCKET_IFNAME
                 the interface for gloo; default: the one that leads to rank 0
"""

_COUNTS = ("-n", "-np", "--n", "--np", "-c")
_MANAGERS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")  # which tell mpirun the hosts
_END_S = 15.0  # for mpirun to end its processes


def main(arguments: Sequence[str]) -> int:
    """Start the ranks and wait for them; returns the exit code."""
    # Pending until they are waited for; mpirun and the ranks never see Ctrl-C, and this process says it in one line.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})
    problem = front.use_this_checkout()
    if problem:
        return front.fail(problem)
    options: list[str] = []
    if "--" in arguments:
        at = list(arguments).index("--")
        options, arguments = list(arguments[:at]), arguments[at + 1 :]
    given = front.parse("mpirun.sh", "Start one process per rank with mpirun.", VARIABLES, arguments)
    return given if isinstance(given, int) else front.explained(lambda: _start(given, options))


def _start(given: front.Given, options: list[str]) -> int:
    config = front.load_config(given)
    program = _mpirun()
    ranks = config.parallel.ranks
    on_this_host = not options and not any(name in os.environ for name in _MANAGERS)
    numbered = any(option in _COUNTS for option in options)
    if given.is_ours:
        front.check(config, given, ranks if on_this_host else None)
    of_kind = _options(program, ranks, alone=on_this_host)
    command = [program, *of_kind, *options, *([] if numbered else ["-n", str(ranks)]), sys.executable, str(front.RANK),
               "--module", given.module, *given.of_module]  # fmt: skip
    environment = dict(os.environ)
    if on_this_host:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    code = _wait(subprocess.Popen(command, env=environment, preexec_fn=_take_signals))
    return _as_torchrun(code) if given.is_ours else code


def _as_torchrun(code: int) -> int:
    """MPICH joins the ranks' codes bit by bit, and has the bare number of a signal, which no code of ours is."""
    return {3: 2, **{number: 128 + number for number in (6, 9, 11, 15)}}.get(code, code)


def _mpirun() -> str:
    """mpirun beside this Python, whose library mpi4py has loaded then, or in PATH. Raises ConfigError."""
    from distkv.errors import ConfigError

    if importlib.util.find_spec("mpi4py") is None:
        raise ConfigError("mpi4py", f"{sys.executable} has it not: pip install mpi4py, and mpich if there is no MPI")
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("mpirun", path=places)
    if program is None:
        raise ConfigError("PATH", "has no mpirun: pip install mpich, or load your site's module for MPI")
    return program


def _options(program: str, ranks: int, *, alone: bool) -> list[str]:
    """What Open MPI has to be told and MPICH does not know: it refuses root and more ranks than cores, and gives each
    rank one core, whatever OMP_NUM_THREADS says."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    if "Open MPI" not in said and "OpenRTE" not in said:
        return []
    found = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    if alone:
        found += ["--bind-to", "none"]
        if ranks > (os.cpu_count() or 1):
            found.append("--oversubscribe")
    return found


def _take_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})


def _wait(process: subprocess.Popen[bytes]) -> int:
    """mpirun's exit code; the first SIGINT or SIGTERM ends it and all ranks."""
    while process.poll() is None:
        number = signal.sigwait({signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})
        if number == signal.SIGCHLD:
            continue
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(f"launch: {signal.Signals(number).name}: all ranks were ended", file=sys.stderr, flush=True)
        return 128 + number
    code = process.returncode
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
