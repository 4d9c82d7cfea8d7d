"""What this machine offers, one question at a time. A question that cannot be answered says so; none raises or hangs.

What may end a process or wait for ever when it is imported (MPI starts itself, CUDA talks to a driver) is asked in a
process of its own, within a deadline. Nothing here starts a process group.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from distkv.inspection.output import gib, size
from distkv.memory import HostMemory, host_memory

__all__ = ["Finding", "Machine", "findings"]

logger = logging.getLogger(__name__)

_ASK_S = 60.0
_SMALL_SHM = 1 << 30
FLOORS = {"torch": (2, 6), "numpy": (1, 26), "xxhash": (3, 4)}
ENGINE = ("transformers", "tokenizers", "safetensors", "accelerate", "gguf", "jinja2", "pyyaml")
CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")

_CUPY_CODE = """
import json, cupy
found = {"version": cupy.__version__, "available": bool(cupy.cuda.is_available())}
try:
    memory = cupy.cuda.alloc_pinned_memory(4096)
    found["pinned"] = memory.mem.size >= 4096
except RuntimeError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""
_MPI_CODE = """
import json
from mpi4py import MPI
print(json.dumps({"library": MPI.Get_library_version().splitlines()[0].strip(" \\0"),
                  "standard": ".".join(map(str, MPI.Get_version()))}))
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer to one question. ``warning``: it works, but will disappoint; says what to do."""

    name: str
    value: str
    warning: str = ""


def ask(code: str, environ: Mapping[str, str], seconds: float = _ASK_S) -> dict[str, Any] | str:
    """What a Python program prints as JSON, run in a process of its own; a text if it fails, and why."""
    # under a launcher the child would take itself for one of the ranks
    env = {k: v for k, v in environ.items() if not k.startswith(("PMI", "OMPI_", "MPI_LOCAL", "HYDRA"))}
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, errors="replace", env=env,
                              timeout=seconds, check=False, stdin=subprocess.DEVNULL)  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:g} s"
    except OSError as error:
        return f"{sys.executable} cannot be started: {error}"
    try:
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
        return last[:200]
    return answer


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the answers are read. The defaults are this machine; tests give others."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    shm: Path = Path("/dev/shm")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    ask: Callable[[str, Mapping[str, str]], dict[str, Any] | str] = ask

    def memory(self) -> HostMemory:
        """See :func:`distkv.memory.host_memory`."""
        return host_memory(self.proc, self.cgroup)

    def cores(self) -> int:
        """Cores that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def mpirun(self) -> str | None:
        """Path of mpirun: in PATH, or beside this Python."""
        places = os.pathsep.join([self.environ.get("PATH", ""), str(Path(sys.executable).parent)])
        return shutil.which("mpirun", path=places)

    def version(self, package: str) -> str | None:
        """Version of an installed package; None if it is not installed."""
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None


def findings(machine: Machine) -> list[Finding]:
    """Every question, in order. One whose answer fails in a way nobody thought of says that."""
    found = []
    for name, question in _QUESTIONS.items():
        try:
            found.append(question(machine))
        except Exception as error:  # handed to the user: the other answers are worth having
            logger.debug("%s", name, exc_info=True)
            found.append(Finding(name=name, value="unknown", warning=f"{type(error).__name__}: {error}"))
    return found


def _python(machine: Machine) -> Finding:
    return Finding(name="python", value=f"{platform.python_version()}, {platform.system()} {platform.machine()}")


def _packages(machine: Machine) -> Finding:
    versions = {package: machine.version(package) for package in FLOORS}
    old = [f"{package} {versions[package]} is older than {low[0]}.{low[1]}" for package, low in FLOORS.items()
           if versions[package] and as_numbers(str(versions[package])) < low]
    return Finding(name="packages", value=_listed(versions), warning="; ".join(old))


def _engine(machine: Machine) -> Finding:
    versions = {package: machine.version(package) for package in ENGINE}
    missing = [package for package, version in versions.items() if version is None]
    return Finding(name="engine", value=_listed(versions),
                   warning=f"{', '.join(missing)} missing: pip install '.[engine]' in the checkout" if missing else "")


def _gpus(machine: Machine) -> Finding:
    import torch

    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        return Finding(name="GPUs", value=f"none that torch can use (it was built {built})")
    names = [f"{torch.cuda.get_device_name(i)} ({gib(torch.cuda.get_device_properties(i).total_memory)})"
             for i in range(torch.cuda.device_count())]
    return Finding(name="GPUs", value=f"{len(names)}: {', '.join(names)}; CUDA {torch.version.cuda}")


def _transports(machine: Machine) -> Finding:
    import torch
    import torch.distributed as dist

    has = []
    if dist.is_available():
        has += ["gloo"] if dist.is_gloo_available() else []
        if dist.is_nccl_available():
            has.append("nccl " + ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    return Finding(name="torch groups", value=", ".join(has) or "none",
                   warning="" if has else "this torch has no gloo: more than one rank cannot meet")


def _mpi(machine: Machine) -> Finding:
    mpirun, package = machine.mpirun(), machine.version("mpi4py")
    runs = f"mpirun: {mpirun or 'not found'}"
    if package is None:
        return Finding(name="MPI", value=f"mpi4py is not installed; {runs}")
    found = machine.ask(_MPI_CODE, machine.environ)
    if isinstance(found, str):
        return Finding(name="MPI", value=f"mpi4py {package} does not load; {runs}",
                       warning=f"{found} (an MPI library is needed: pip install mpich, or the system's)")
    library = " ".join(str(found["library"]).split())
    return Finding(name="MPI", value=f"mpi4py {package}, {library}; {runs}",
                   warning="" if mpirun else "mpirun is neither in PATH nor beside this Python")


def why_not_pinned(machine: Machine) -> str:
    """Why CuPy cannot pin memory here; empty if it can."""
    package, found = _cupy(machine)
    if package is None:
        return "CuPy is not installed"
    if isinstance(found, str):
        return f"{package} does not load: {found}"
    return "" if found.get("pinned") else str(found.get("error", "CuPy gives no reason"))


def _cupy(machine: Machine) -> tuple[str | None, dict[str, Any] | str]:
    """The package, and what it says when it pins a little memory (a text: why it does not load)."""
    package = next((name for name in CUPY if machine.version(name)), None)
    return package, machine.ask(_CUPY_CODE, machine.environ) if package else {}


def memlock() -> tuple[int | None, int | None]:
    """Bytes that this process may lock, soft and hard limit; None: without limit."""
    soft, hard = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    return soft, hard


def _pinned(machine: Machine) -> Finding:
    package, found = _cupy(machine)
    if package is None:
        return Finding(name="pinned memory", value="CuPy is not installed (pip install '.[cupy]' in the checkout)")
    if isinstance(found, str):
        return Finding(name="pinned memory", value=f"{package} {machine.version(package)} does not load", warning=found)
    can = "pinned 4 KB" if found.get("pinned") else f"cannot pin: {found.get('error', 'no reason given')}"
    return Finding(name="pinned memory", value=f"{package} {found['version']} {can}")


def _memlock(machine: Machine) -> Finding:
    soft, hard = ("unlimited" if n is None else size(n) for n in memlock())
    return Finding(name="pinned limit", value=f"RLIMIT_MEMLOCK {soft} (hard limit {hard})")


def _cores(machine: Machine) -> Finding:
    return Finding(name="cores", value=f"{machine.cores()} for this process, of {os.cpu_count()}")


def _threads(machine: Machine) -> Finding:
    import torch

    env = {name: machine.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    said = ", ".join(f"{name}={value}" if value is not None else f"{name} not set" for name, value in env.items())
    active = (env["OMP_WAIT_POLICY"] or "").upper() == "ACTIVE"
    return Finding(name="threads", value=f"{said}; torch uses {torch.get_num_threads()}",
                   warning="ranks that share cores spin against each other: OMP_WAIT_POLICY=PASSIVE" if active else "")


def _memory(machine: Machine) -> Finding:
    memory = machine.memory()
    if memory.room is None:
        return Finding(name="memory", value="unknown", warning=f"{machine.proc}/meminfo says no MemAvailable")
    parts = [f"{gib(memory.room)} can be had"]
    if memory.total is not None:
        parts.append(f"{gib(memory.total)} in the machine")
    if memory.limit is not None:
        parts.append(f"limit of the control group {gib(memory.limit)}, {gib(memory.limit_used or 0)} used")
    return Finding(name="memory", value=", ".join(parts))


def _shm(machine: Machine) -> Finding:
    try:
        stat = os.statvfs(machine.shm)
    except OSError as error:
        return Finding(name="shared memory", value=f"no {machine.shm} ({error.strerror})",
                       warning="NCCL between GPUs of one host needs it")
    total, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    return Finding(name="shared memory", value=f"{machine.shm}: {size(free)} free of {size(total)}",
                   warning="small for NCCL: start the container with --shm-size=1g or --ipc=host"
                   if total < _SMALL_SHM else "")


def _listed(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{package} {version or '-'}" for package, version in versions.items())


def as_numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as (2, 13): the first two numbers, as far as they are numbers."""
    numbers = []
    for part in version.split("+")[0].split(".")[:2]:
        digits = "".join(c for c in part if c.isdigit())
        numbers.append(int(digits) if digits else 0)
    return tuple(numbers)


_QUESTIONS: dict[str, Callable[[Machine], Finding]] = {
    "python": _python, "packages": _packages, "engine": _engine, "GPUs": _gpus, "torch groups": _transports,
    "MPI": _mpi, "pinned memory": _pinned, "pinned limit": _memlock, "cores": _cores, "threads": _threads,
    "memory": _memory, "shared memory": _shm,
}  # fmt: skip
