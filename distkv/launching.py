"""Starts one process per rank with torchrun: on this host, or on this and others. For command lines of this package.

::

    hosts = Hosts.from_environment(config.parallel.ranks)  # raises ConfigError, which names the variable and the fix
    take_interrupts()                                      # once, early: Ctrl-C is one line and not one per rank
    return start("distkv.engine.verify", [config_file], hosts)

``launch/torchrun.sh`` is a front of this; so is a command that starts its own ranks. Such a command is run by the ranks
again, and knows by ``Layout.from_environment().source`` that it is one of them: "alone" is the one that starts them.

What can be checked beforehand is checked here, once, so that a mistake is one message at once and not one per rank.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from distkv._interfaces import towards
from distkv.errors import ConfigError
from distkv.layout import bare_address

__all__ = ["VARIABLES", "Hosts", "start", "take_interrupts"]

VARIABLES = """\
Environment, all optional on one host:

NPROC            processes on this host; default: parallel.tp x parallel.sp over the number of hosts
NNODES           number of hosts (1)
NODE_RANK        this host's number, from 0; the first is where the others come to
MASTER_ADDR      name or address of host 0, the same on every host; an IPv6 address with or without brackets
MASTER_PORT      a port of host 0 that is free, the same on every host
JOIN_S           seconds within which all hosts have to come (300)
OMP_NUM_THREADS  threads per process; default: the cores of this host over the processes on it
TORCH_ELASTIC_SHUTDOWN_TIMEOUT
                 seconds from SIGTERM to SIGKILL for the processes when the start is interrupted (5)

With NNODES above 1, NODE_RANK, MASTER_ADDR and MASTER_PORT must be set on each host, and the same command is given on
each. The package, the configuration and the model must be the same there. GLOO_SOCKET_IFNAME is set to the interface
that leads to host 0, unless it is set already.
"""

_MEETING_SLACK_S = 10.0  # for torch to say itself that its deadline has passed
_INTERRUPT_S = 3.0  # for torchrun to end
_SHUTDOWN_S = 5  # from SIGTERM to SIGKILL when the start is interrupted; torch's 30 would be waited for a stopped rank

# SIGINT becomes SIGTERM here (see take_interrupts); this remembers what it was.
_interrupted = threading.Event()


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a start, and this one among them. ``addr`` and ``port``: where they meet; None on one host."""

    processes: int
    """On this host."""
    count: int = 1
    rank: int = 0
    addr: str | None = None
    port: int | None = None
    join_s: int = 300
    """Seconds within which all hosts have to come."""

    @classmethod
    def from_environment(cls, ranks: int, env: Mapping[str, str] | None = None) -> Hosts:
        """Reads the variables (see :data:`VARIABLES`) from ``env``, or the process's; ``ranks`` in all.

        Raises ConfigError, whose path is the variable's name, if one is missing, no number, contradicts another one,
        or if the port of host 0 is taken.
        """
        env = os.environ if env is None else env
        count, join_s = _number(env, "NNODES", 1), _number(env, "JOIN_S", 300)
        if count == 1:
            if _number(env, "NODE_RANK", 0, lowest=0):
                raise ConfigError("NODE_RANK", f"is {env['NODE_RANK'].strip()}, but there is one host; "
                                               "set NNODES to the number of hosts, or unset NODE_RANK")  # fmt: skip
            return cls(processes=_number(env, "NPROC", ranks), join_s=join_s)
        for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not env.get(name, "").strip():
                raise ConfigError(name, f"must be set on every host, because NNODES is {count}")
        rank = _number(env, "NODE_RANK", 0, lowest=0)
        if rank >= count:
            raise ConfigError("NODE_RANK", f"is {rank}, but hosts count from 0 to NNODES - 1 = {count - 1}")
        if not env.get("NPROC", "").strip() and ranks % count:
            raise ConfigError("NPROC", f"must be set on every host, because the configuration's ranks, {ranks}, are no "
                                       f"multiple of NNODES {count}")  # fmt: skip
        port = _number(env, "MASTER_PORT", 0)
        if rank == 0:
            _check_free(port)
        return cls(processes=_number(env, "NPROC", ranks // count), count=count, rank=rank,
                   addr=bare_address(env["MASTER_ADDR"]), port=port, join_s=join_s)  # fmt: skip

    def check_number(self, ranks: int) -> None:
        """Raises ConfigError if these processes cannot be ``ranks`` in all. On several hosts they need not be even."""
        least = self.processes + self.count - 1
        if (least != ranks) if self.count == 1 else (least > ranks):
            raise ConfigError("NPROC", f"is {self.processes} on this host, of NNODES {self.count}, but the "
                                       f"configuration has {ranks} ranks (parallel.tp x parallel.sp); start as many "
                                       "processes as that in all, or change it")  # fmt: skip

    def options(self) -> list[str]:
        """torchrun's options, up to the module."""
        options = ["--nproc-per-node", str(self.processes)]
        if self.count == 1:
            # Standalone takes any free port: several jobs on one host do not meet.
            return [*options, "--standalone", "--local-addr", "127.0.0.1"]
        addr = f"[{self.addr}]" if ":" in str(self.addr) else str(self.addr)
        return [
            *options, "--nnodes", str(self.count), "--node-rank", str(self.rank), "--master-addr", addr,
            "--master-port", str(self.port), "--rdzv-conf", f"timeout={self.join_s}",
        ]  # fmt: skip

    def defaults(self) -> dict[str, str]:
        """Environment of the ranks and of torchrun, for what is not set there: threads, deadlines, gloo's interface."""
        found = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // self.processes)),
                 "OMP_WAIT_POLICY": "PASSIVE",
                 "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SHUTDOWN_S)}  # fmt: skip
        # Left to itself gloo takes the address that the host's name resolves to, which may be none or the loopback.
        interface = towards(self.addr if self.addr is not None else "127.0.0.1")
        return found | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})


def start(
    module: str,
    arguments: Sequence[str],
    hosts: Hosts,
    *,
    name: str = "launch",
    explained: Collection[int] = (2,),
) -> int:
    """Runs ``python -m module arguments`` on every rank of this host and waits for them; returns the exit code.

    That of the first rank that failed (128 + the signal if it was killed), 2 if the hosts do not meet, 130 after
    Ctrl-C. Errors are one line on stderr after ``name``; none for exit codes that the ranks have ``explained``. After a
    rank has failed torchrun gives the others 30 s to end on SIGTERM, which a rank that is stopped takes in full; torch
    2.13 has no setting for it.
    Sets the environment's defaults (see :meth:`Hosts.defaults`) in this process, because the ranks inherit it.
    """
    for variable, value in hosts.defaults().items():
        os.environ.setdefault(variable, value)
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    if "LOGLEVEL" not in os.environ:  # torchrun's own variable
        # what torchrun logs when ranks fail or are ended is said below, in one line
        for logger in ("torch.distributed.elastic", "torch.distributed.run", *logging.root.manager.loggerDict):
            if logger.startswith(("torch.distributed.elastic", "torch.distributed.run")):
                logging.getLogger(logger).setLevel(logging.CRITICAL + 1)
    try:
        with _bounded_meeting(hosts, name):
            run(parse_args([*hosts.options(), "--module", module, *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = int(failure.exitcode)
        if code not in explained:
            _say(name, f"rank {rank} ended first, with exit code {code}; see what it wrote above")
        return code if code > 0 else 128 - code
    except SignalException as error:
        return _ended(error.sigval, name)
    except DistError as error:
        _say(name, _not_met(hosts, error))
        return 2
    return 0


def take_interrupts(name: str = "launch") -> None:
    """One line for Ctrl-C, from here; the ranks never see it. Call it once, before the ranks are started.

    torchrun would hand SIGINT on to the ranks, and each would print where it was. So it is blocked, which the ranks
    inherit, and a thread takes it and asks this process to end, which ends the ranks.
    """

    def wait() -> None:
        signal.sigwait({signal.SIGINT})
        _interrupted.set()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_INTERRUPT_S)
        if not _has_children():  # no handler of Python runs while torch waits for the other hosts
            os._exit(_ended(signal.SIGINT, name))

    def end(number: int, frame: FrameType | None) -> None:
        # Until torchrun takes SIGTERM over, and so before there are ranks. Raised in an import, SystemExit gets lost.
        os._exit(_ended(signal.Signals(number), name))

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=wait, daemon=True).start()


def _ended(number: signal.Signals, name: str) -> int:
    number = signal.SIGINT if _interrupted.is_set() else number
    _say(name, f"{number.name}: all ranks were ended")
    return 128 + number


@contextlib.contextmanager
def _bounded_meeting(hosts: Hosts, name: str) -> Iterator[None]:
    """Ends this process if it has started no rank by the deadline, whatever it waits in.

    torch's own deadline does not hold when something that is no store listens at the port.
    """
    is_over = threading.Event()

    def watch() -> None:
        end = time.monotonic() + hosts.join_s + _MEETING_SLACK_S
        while not is_over.wait(0.2) and not _has_children():
            if time.monotonic() > end:
                _say(name, _not_met(hosts, None))
                os._exit(2)

    if hosts.count > 1:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _say(name: str, text: str) -> None:
    sys.stderr.write(f"{name}: {text}\n")
    sys.stderr.flush()


def _not_met(hosts: Hosts, error: Exception | None) -> str:
    detail = f" ({str(error).strip().splitlines()[0]})" if error is not None else ""
    if hosts.count == 1:
        return f"the ranks did not meet{detail}"
    return (f"the {hosts.count} hosts did not meet at {hosts.addr} port {hosts.port} within {hosts.join_s} s (JOIN_S); "
            f"start the command on every host, NODE_RANK=0 where MASTER_ADDR leads to{detail}")  # fmt: skip


def _check_free(port: int) -> None:
    """Raises ConfigError if nobody can listen on this port; the ranks' store listens on all addresses of the host."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            why = "is taken by another program" if error.errno == errno.EADDRINUSE else "needs more rights"
            raise ConfigError("MASTER_PORT", f"port {port} of this host, which is host 0, {why}; "
                                             "set another one, on every host") from error  # fmt: skip


def _number(env: Mapping[str, str], name: str, default: int, lowest: int = 1) -> int:
    text = env.get(name, "").strip() or str(default)
    if not (text.isascii() and text.isdigit() and len(text) < 10 and lowest <= int(text) <= 65_535):
        raise ConfigError(name, f"must be a whole number from {lowest} to 65535, got {text!r}")
    return int(text)
