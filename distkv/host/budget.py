"""How many host pages each rank has, and whether the memory of its node holds them: settled before any is taken.

Every rank tells the others where it is and what it asks for (:class:`HostAsk`, and its ``host`` settings), and each
works out all shares from the same answers, so that all start or all raise the same error.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distkv._text import counted, size
from distkv.config import HostConfig
from distkv.errors import ConfigError
from distkv.layout import ranks_on_host
from distkv.memory import HostMemory

__all__ = ["HostAsk", "NodeBudget", "Share", "host_pages", "nodes_of", "ranks_text", "settle"]

_GIB = 1 << 30
_MAX_PAGES = (1 << 31) - 1  # page ids are int32


@dataclass(frozen=True, kw_only=True)
class HostAsk:
    """Where one rank is, what memory it sees there, and what its pages take. The defaults: bookkeeping without bytes,
    all ranks in one place."""

    name: str = "this node"
    """The host's name, for messages."""
    node: str = ""
    """Equal on two ranks exactly if they share one limit of memory: on one machine, in one container."""
    machine: str = ""
    """Equal on two ranks on one machine, whatever containers they are in. Empty: unknown."""
    available: int | None = None
    """Bytes that can be had on the node, read when this rank's own pool and weights were there; None: unknown."""
    machine_available: int | None = None
    """Bytes that can be had on the machine, for all its containers together; None: unknown."""
    local_ranks: int = 0
    """Processes on this host as the launcher has counted them, those of other groups included; 0: it does not say."""
    bytes_per_page: int | None = None
    """Of this rank's KV memory; None: the cache has only its bookkeeping."""
    label_pages: int = 0
    """Host pages of other labels than ``main``."""
    label_bytes: int = 0
    """What they take."""
    layout: str | None = None
    """How the bytes of a page are laid out, but for what differs from shard to shard: has to be equal on all ranks."""
    problem: tuple[str, str] | None = None
    """Why this rank cannot start: the setting, and what is wrong with it. Told, so that none waits for it."""

    @classmethod
    def here(cls, memory: HostMemory, *, bytes_per_page: int | None = None, layout: str | None = None,
             proc: Path = Path("/proc")) -> HostAsk:
        """This process's. ``memory``: see :func:`distkv.memory.host_memory`."""
        name, boot = socket.gethostname(), _line(proc / "sys" / "kernel" / "random" / "boot_id")
        try:  # containers on one machine may have one host name, and have mounts of their own
            container = os.readlink(proc / "self" / "ns" / "mnt")
        except OSError:
            container = ""
        return cls(name=name, node=f"{name} {boot} {container}", machine=boot, available=memory.room,
                   machine_available=memory.available, local_ranks=ranks_on_host(0), bytes_per_page=bytes_per_page,
                   layout=layout)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank takes for its host tier."""

    rank: int
    pages: int
    """Those of preemption_pages included; 0: this rank has no tier."""
    bytes_per_page: int
    field: str
    """The setting that says how many."""
    label_pages: int = 0
    label_bytes: int = 0
    """What the host pages of other labels take."""

    @property
    def bytes(self) -> int:
        """Memory of all its pages."""
        return self.pages * self.bytes_per_page + self.label_bytes

    @property
    def mostly_labels(self) -> bool:
        """Whether the pages of other labels take more than those of ``main``."""
        return self.label_bytes > self.pages * self.bytes_per_page


@dataclass(frozen=True, kw_only=True)
class NodeBudget:
    """What the ranks of one node take together, and what there is."""

    name: str
    shares: tuple[Share, ...]
    """One for each rank of the node, in order of rank."""
    available: int | None
    """Bytes; None: unknown, and nothing is refused."""

    @property
    def asked(self) -> int:
        """Bytes, of all ranks."""
        return sum(share.bytes for share in self.shares)

    def check(self) -> None:
        """Raises ConfigError, for the setting of the rank that takes most, if there is less than is asked for."""
        if self.available is None or self.asked <= self.available:
            return
        asking = [share for share in self.shares if share.bytes]
        largest = max(asking, key=lambda share: share.bytes)
        raise ConfigError("labels" if largest.mostly_labels else f"host.{largest.field}", (
            f"the host tier takes {size(self.asked)} on {self.name} ({_ranks(asking)}; {_pages(asking)}), and "
            f"{size(self.available)} can be had there; {_remedy(largest, self.available, asking)}"
        ))  # fmt: skip

    def line(self) -> str:
        """The plan of this node, for people."""
        asking = [share for share in self.shares if share.pages or share.label_pages]
        has = "an unknown amount" if self.available is None else size(self.available)
        return (f"host tier on {self.name} ({_ranks(self.shares)}): {size(self.asked)} of {has} that can be had, "
                f"{_pages(asking)}")


def host_pages(host: HostConfig, bytes_per_page: int | None, ranks_on_node: int, *, where: str = "") -> int:
    """The host pages of one rank; 0 if no tier is asked for.

    ``bytes_per_page`` is None for a cache without KV memory, which can have a tier of so many pages only. ``where``
    goes behind the numbers of a message (`` on rank 3``). Raises ConfigError for a size of less than one page, or of no
    more than ``preemption_pages``.
    """
    if not host.configured:
        return 0
    if host.pages is not None:
        return host.pages  # the section has checked it
    field, value = _asked(host)
    path, given = f"host.{field}", f"is {value:g} GiB{where}"
    if bytes_per_page is None:
        raise ConfigError(path, f"{given}, and the cache has no KV memory whose pages have a size: give host.pages, or "
                                "the cache its memory")
    sharing = ranks_on_node if field == "gib_per_node" else 1
    share = int(value * _GIB) // sharing
    pages, page = share // bytes_per_page, size(bytes_per_page)
    if sharing > 1:
        given += f", {size(share)} for each of {sharing} ranks"
    if pages < 1:
        least = _gib_up(bytes_per_page * sharing)
        raise ConfigError(path, f"{given}, which is less than one page of {page}; give at least {least}")
    if pages > _MAX_PAGES:
        raise ConfigError(path, f"{given}, which is {pages:,} pages of {page}; at most {_MAX_PAGES:,} can be counted")
    if host.preemption_pages >= pages:
        raise ConfigError("host.preemption_pages", f"is {host.preemption_pages}, and must be less than the host pages: "
                                                   f"{path} {given}, which holds {counted(pages, 'page')} of {page}")
    return pages


def nodes_of(asks: Sequence[HostAsk]) -> list[list[int]]:
    """The ranks of each node, in order of their first rank."""
    return _grouped([ask.node for ask in asks])


def settle(hosts: Sequence[HostConfig], asks: Sequence[HostAsk]) -> list[NodeBudget]:
    """What every rank takes, node by node (:func:`nodes_of`), from the settings and places of all ranks, by rank.

    Raises ConfigError, with the same text for the same arguments, if a size is impossible (:func:`host_pages`), or if a
    node, or a machine with several of them (containers), has less memory than its ranks take.
    """
    nodes = nodes_of(asks)
    # gib_per_node is shared with the groups beside this one; each group checks its own bytes
    count = {rank: max(len(ranks), *(asks[other].local_ranks for other in ranks)) for ranks in nodes for rank in ranks}
    shares = []
    for rank, (host, ask) in enumerate(zip(hosts, asks, strict=True)):
        pages = host_pages(host, ask.bytes_per_page, count[rank], where=f" on rank {rank}" if len(asks) > 1 else "")
        shares.append(Share(rank=rank, pages=pages, bytes_per_page=ask.bytes_per_page or 0, field=_asked(host)[0],
                            label_pages=ask.label_pages, label_bytes=ask.label_bytes))
    budgets = [NodeBudget(name=asks[ranks[0]].name, shares=tuple(shares[rank] for rank in ranks),
                          available=_least(asks[rank].available for rank in ranks)) for ranks in nodes]
    for budget in budgets:
        budget.check()
    for ranks in _grouped([ask.machine or ask.node for ask in asks]):
        names = sorted({asks[rank].name for rank in ranks})
        NodeBudget(name="the machine of " + ", ".join(names), shares=tuple(shares[rank] for rank in ranks),
                   available=_least(asks[rank].machine_available for rank in ranks)).check()
    return budgets


def _asked(host: HostConfig) -> tuple[str, float]:
    """The setting that gives the size, and its value."""
    given = ((name, getattr(host, name)) for name in ("pages", "gib_per_rank", "gib_per_node"))
    return next(((name, value) for name, value in given if value is not None), ("pages", 0))


def _grouped(names: Sequence[str]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        groups.setdefault(name, []).append(rank)
    return list(groups.values())


def _least(values: Iterable[int | None]) -> int | None:
    """The smallest: the rank that read last has seen what all others had taken by then."""
    return min((value for value in values if value is not None), default=None)


def _remedy(largest: Share, available: int, shares: Sequence[Share]) -> str:
    each = max(0, available // len(shares) - largest.label_bytes)
    together = max(0, available - sum(share.label_bytes for share in shares))
    if largest.mostly_labels:
        return f"lower host_pages of the labels, which take {size(largest.label_bytes)} of a rank"
    if largest.field == "pages":
        return f"at most {each // largest.bytes_per_page:,} pages for each of {counted(len(shares), 'rank')}"
    return f"at most {_gib_down(together if largest.field == 'gib_per_node' else each)}"


def _gib_down(n: int) -> str:
    return f"{n * 1000 // _GIB / 1000:g} GiB"


def _gib_up(n: int) -> str:
    return f"{-(-n * 1000 // _GIB) / 1000:g} GiB"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2``, ``ranks 0 to 7``: for messages."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _ranks(shares: Sequence[Share]) -> str:
    return ranks_text([share.rank for share in shares])


def _pages(shares: Sequence[Share]) -> str:
    """``4 x 1,024 pages of 8.00 MiB``, ranks that take the same once."""
    alike = Counter((share.pages, share.bytes_per_page) for share in shares)
    labels = Counter((share.label_pages, share.label_bytes) for share in shares if share.label_pages)
    parts = [f"{n} x {pages:,} pages of {size(each)}" for (pages, each), n in alike.items() if pages or not labels]
    parts += [f"{n} x {pages:,} pages of other labels, {size(each)}" for (pages, each), n in labels.items()]
    return " + ".join(parts) or "no pages"


def _line(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
