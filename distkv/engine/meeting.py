"""How ranks meet that torchrun has not started: under srun, under mpirun, alone; for any module that they run.

torchrun has a store at MASTER_ADDR and MASTER_PORT before it starts a rank. Here rank 0 opens one, and the variables
that torchrun would have set are set when it can be reached: ``init_process_group()`` then finds the others.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import torch.distributed as dist

from distkv import slurm
from distkv._interfaces import towards
from distkv.engine import mpi_launch
from distkv.errors import ConfigError, GroupTimeout
from distkv.layout import Layout, ranks_on_host
from distkv.torch_group import deadline

__all__ = ["hand_over", "meet"]

logger = logging.getLogger(__name__)

_MEETING = "the meeting of the tasks of srun"
_CONNECT_S = 5.0  # for a host to say whether anything listens at a port
_PAUSE_S = 0.2
_LOOPBACK = "127.0.0.1"

_kept: list[dist.Store] = []  # rank 0's store, which the others use for as long as this process runs


def hand_over(layout: Layout, seconds: float) -> None:
    """Sets torch's variables in this process, once rank 0 can be reached where they say. Every rank calls it, once.

    Nothing is done under torchrun, which has set them. Raises ConfigError if MASTER_ADDR or MASTER_PORT cannot be used,
    and GroupTimeout if rank 0 is not found within ``seconds``.
    """
    if layout.source == "torchrun":
        return
    address, port = meet(layout, seconds)
    os.environ.update(
        RANK=str(layout.rank),
        LOCAL_RANK=str(layout.local_rank),
        WORLD_SIZE=str(layout.world_size),
        LOCAL_WORLD_SIZE=str(ranks_on_host(layout.world_size)),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is there; rank 0 connects to it as the others do
    )


def meet(layout: Layout, seconds: float) -> tuple[str, int]:
    """Address and port of rank 0's store, the same on all ranks, where this rank has reached it. See :func:`hand_over`.
    """
    if layout.source == "mpirun":
        joined, address, port = mpi_launch.rendezvous(layout.rank, layout.world_size, seconds)
        _kept.append(joined)
        return address, port
    if layout.world_size == 1:
        store = dist.TCPStore(_LOOPBACK, 0, 1, is_master=True, wait_for_workers=False, timeout=deadline(seconds))
        _kept.append(store)
        return _LOOPBACK, store.port
    return _meet_in_slurm(layout, seconds)


def _meet_in_slurm(layout: Layout, seconds: float) -> tuple[str, int]:
    """There is no message before the meeting, so rank 0 takes the first port that is free of some that all ranks know,
    and marks its store: whatever else listens at one of them, another job's store too, is passed over."""
    env = os.environ
    ports = [layout.master_port] if env.get("MASTER_PORT", "").strip() else slurm.ports(env)
    mark = f"distkv/{env.get('SLURM_JOB_ID', env.get('SLURM_JOBID', ''))}.{slurm.step_of(env)}"
    one_host = len(slurm.node_list(env)) == 1
    address = _LOOPBACK if one_host and not env.get("MASTER_ADDR", "").strip() else str(layout.master_addr)
    _check_resolves(address)
    # Left to itself gloo takes the address that the host's name resolves to, which may be none or the loopback.
    interface = towards(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    known = [port for port in ports if port is not None]
    if layout.rank == 0:
        store = _open(known, layout.world_size, mark, seconds)
        _kept.append(store)
        return address, store.port
    return address, _find(address, known, mark, layout, seconds)


def _open(ports: Sequence[int], size: int, mark: str, seconds: float) -> dist.TCPStore:
    """Rank 0's store at the first of the ports that is free, on all interfaces, with the mark."""
    for port in ports:
        try:
            store = dist.TCPStore(_LOOPBACK, port, size, is_master=True, wait_for_workers=False,
                                  timeout=deadline(seconds))  # fmt: skip
        except RuntimeError:  # which does not say why in a way to rely on
            logger.debug("port %d cannot be had", port, exc_info=True)
            continue
        store.set(mark, "here")
        return store
    shown = f"port {ports[0]}" if len(ports) == 1 else f"any of {len(ports)} ports from {ports[0]} on"
    raise ConfigError("MASTER_PORT", f"rank 0 cannot listen at {shown} of {socket.gethostname()}, where other programs "
                      "do; set it to a free port of that host")  # fmt: skip


def _find(address: str, ports: Sequence[int], mark: str, layout: Layout, seconds: float) -> int:
    """The port at which a store with the mark answers.

    torch waits for ever for a listener that says nothing, so each question has a thread of its own, which may stay.
    """
    end = time.monotonic() + seconds
    asked: dict[int, Future[bool]] = {}
    while time.monotonic() < end:
        for port in ports:
            if port not in asked:
                asked[port] = _ask(address, port, mark, seconds)
        wait(asked.values(), _PAUSE_S, FIRST_COMPLETED)
        for port in [port for port, answer in asked.items() if answer.done()]:
            if asked.pop(port).result():
                return port
        time.sleep(_PAUSE_S)
    raise GroupTimeout(f"{_MEETING} at {address}, port {' or '.join(map(str, ports[:2]))}", seconds, rank=layout.rank,
                       step=-1)  # fmt: skip


def _ask(address: str, port: int, mark: str, seconds: float) -> Future[bool]:
    answer: Future[bool] = Future()

    def ask() -> None:
        try:
            socket.create_connection((address, port), _CONNECT_S).close()  # torch would try again until its deadline
            store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=deadline(seconds))
            answer.set_result(store.check([mark]))
        except (OSError, RuntimeError):  # nobody yet, or no store
            answer.set_result(False)

    threading.Thread(target=ask, name="meeting", daemon=True).start()
    return answer


def _check_resolves(address: str) -> None:
    try:
        socket.getaddrinfo(address, None)
    except socket.gaierror as error:
        raise ConfigError("MASTER_ADDR", f"{address!r}, the first host, has no address here ({error.strerror}); set it "
                                         "to one that all hosts of the job reach") from error  # fmt: skip
