"""Under mpirun: how the ranks meet for gloo and NCCL, and the communicator for the cache.

MPI carries the cache's collective if ``group.transport`` is mpi. The model's and the hand-off's groups are torch's,
which has no MPI in the wheels; MPI tells the ranks where rank 0 listens.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

import torch.distributed as dist

from distkv._interfaces import towards
from distkv.errors import ConfigError
from distkv.layout import bare_address, ranks_on_host
from distkv.mpi_group import MpiGroup, mpi
from distkv.torch_group import deadline, named_failures

__all__ = ["cache_group", "finalize", "meet", "rendezvous"]

_MEETING = "the meeting of the ranks over MPI"
_PROBE_S = 10.0  # for rank 0 to reach itself

_ours: list[Any] = []  # the MPI module, if this process initialised it here


def meet(rank: int, size: int, seconds: float) -> dist.Store:
    """The store of :func:`rendezvous`, for ``init_process_group``."""
    return rendezvous(rank, size, seconds)[0]


def rendezvous(rank: int, size: int, seconds: float) -> tuple[dist.Store, str, int]:
    """The store that rank 0 opens and the others connect to, and its address and port, the same on all ranks.

    Rank 0 listens before it says where, so no port is guessed. On one host that is the loopback, whatever MASTER_ADDR
    says: it may be exported for another program. On several it is MASTER_ADDR if that is set, else rank 0's host name.
    Raises ConfigError on all ranks if rank 0 cannot listen or MASTER_ADDR does not lead to it, or on the rank that has
    no MPI or one of another kind than mpirun's; GroupTimeout if a rank does not come.
    """
    world = MpiGroup(_mpi_of_ours().COMM_WORLD, timeout_s=seconds)
    if (world.rank, world.size) != (rank, size):
        raise ConfigError("", f"mpirun says that this is rank {rank} of {size}, and mpi4py rank {world.rank} of "
                              f"{world.size}: they are of two MPI libraries; use the mpirun of mpi4py's")  # fmt: skip
    hosts = set(world.exchange(socket.gethostname().encode(), purpose=_MEETING))
    on_one_host = len(hosts) == 1 and ranks_on_host(size) == size
    if on_one_host and "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
    server, answer = _listen(size, seconds, on_one_host=on_one_host) if rank == 0 else (None, {})
    told = json.loads(world.exchange(json.dumps(answer).encode(), purpose=_MEETING)[0])
    if "problem" in told:
        raise ConfigError(told["path"], told["problem"])
    address, port = told["address"], told["port"]
    interface = None if on_one_host else towards(address)
    if interface not in (None, "lo"):  # which on rank 0 may be what its host's name leads to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if server is not None:
        return server, address, port
    with named_failures(f"connecting to rank 0 at {address}, port {port}", seconds, rank=rank):
        store = dist.TCPStore(address, port, size, is_master=False, timeout=deadline(seconds))
    return store, address, port


def _listen(size: int, seconds: float, *, on_one_host: bool) -> tuple[dist.Store | None, dict[str, Any]]:
    """Rank 0's store, which listens on all interfaces, and what the others are told: where, or the problem."""
    host = socket.gethostname()
    try:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=deadline(seconds))
    except RuntimeError as error:  # told to all ranks
        return None, {"path": "", "problem": f"rank 0 cannot open a store for the ranks on {host}: {error}"}
    wanted = os.environ.get("MASTER_ADDR", "").strip()
    if on_one_host or not wanted:
        return store, {"address": "127.0.0.1" if on_one_host else host, "port": store.port}
    try:
        wanted = bare_address(wanted)
        socket.create_connection((wanted, store.port), min(seconds, _PROBE_S)).close()
    except ConfigError as error:  # told to all ranks
        return None, {"path": error.path, "problem": str(error).removeprefix(f"{error.path}: ")}
    except OSError as error:
        return None, {"path": "MASTER_ADDR", "problem": f"is {wanted}, but rank 0 is on {host} and cannot be reached "
                      f"there ({error}); set it to a name or an address of that host, or unset it"}  # fmt: skip
    return store, {"address": wanted, "port": store.port}


def cache_group(first: int, tp: int, timeout_s: float, beside: dist.ProcessGroup | None) -> MpiGroup:
    """The cache's group of ranks ``first .. first + tp - 1``, of which this process is one. Every rank calls it once.

    ``beside``: a process group of the same ranks, whose store the watchdog uses. Raises ConfigError for processes that
    mpirun has not started.
    """
    world = _mpi_of_ours().COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (dist.get_rank(), dist.get_world_size()):
        raise ConfigError("group.transport", f"is mpi, but mpirun has not started these {dist.get_world_size()} "
                                             "processes; start them with mpirun -n, or set it to auto or gloo")
    get = getattr(beside, "get_group_store", None)
    store: Any = get() if get is not None else None
    communicator = world.Split(first // tp, dist.get_rank())
    if not hasattr(store, "clone"):
        return MpiGroup(communicator, timeout_s=timeout_s)
    return MpiGroup(communicator, timeout_s=timeout_s, store=lambda name: dist.PrefixStore(name, store.clone()))


def finalize() -> None:
    """Ends MPI, if it was started here. Not after an error: it would wait for ranks that do not come.

    Then the process ends without it, and mpirun ends the others.
    """
    if _ours and not _ours[0].Is_finalized():
        _ours[0].Finalize()


def _mpi_of_ours() -> Any:
    if "mpi4py.MPI" not in sys.modules:
        try:
            import mpi4py
        except ImportError:
            return mpi()  # whose error names the extra
        mpi4py.rc.finalize = False  # at the end of the process it would wait for a rank that is stopped
        _ours.append(mpi())
    return sys.modules["mpi4py.MPI"]
