"""What ``distkv plan`` says of the host tier: its pages, its bytes, and whether a node has them."""

from __future__ import annotations

from dataclasses import dataclass

from distkv.config import HostConfig
from distkv.host.budget import host_pages
from distkv.inspection.output import gib, size

__all__ = ["HostPlan", "make_host_plan"]


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """What the host tier takes. Bytes; "per rank" is what one process takes, "per node" all of a host."""

    field: str
    """The setting that gives its size."""
    pages: int
    """Of one rank, those of preemption_pages included."""
    preemption_pages: int
    """Kept for suspended requests."""
    bytes_per_page: int
    per_rank: int
    per_node: int
    preemption_per_rank: int
    """Of ``per_rank``, what is kept for suspended requests."""
    metadata_per_rank: int
    """Bookkeeping of the tier when every page is used, about as much for a page as in the pool."""
    tokens: int
    """Tokens of cached prefixes that the tier holds beside the pool's; without what is kept for suspended requests."""
    memory: int | None
    """Of a node, for all its ranks; None: unknown."""
    memory_of: str
    beside_per_node: int
    """What else the ranks take of ``memory``: bookkeeping, and on CPUs weights and pool."""
    beside: str
    """In words."""
    most_pages: int | None
    """Host pages per rank that fit into ``memory`` beside the rest."""

    @property
    def fits(self) -> bool:
        """False only if the memory is known and too small."""
        return self.most_pages is None or self.pages <= self.most_pages

    def lines(self) -> list[tuple[str, str]]:
        """The lines of the plan for people: a name and a text each."""
        pages = f"{self.pages:,} pages of {size(self.bytes_per_page)} on each rank (host.{self.field})"
        if self.preemption_pages:
            share = size(self.preemption_per_rank)
            pages += f"; {self.preemption_pages:,} of them ({share} per rank) for suspended requests"
        takes = f"{size(self.per_rank)} per rank, {size(self.per_node)} per node"
        books = f"about {size(self.metadata_per_rank)} of books per rank when every page is used"
        return [
            ("host tier", pages),
            ("", f"{takes}; {books}"),
            ("", f"{self.tokens:,} tokens of cached prefixes, beside what the pool holds"),
            ("host memory", self._verdict()),
        ]

    def _verdict(self) -> str:
        if self.memory is None or self.most_pages is None:
            return f"of {self.memory_of}: unknown; give --host-memory GIB"
        rest = f"{self.beside} ({size(self.beside_per_node)})"
        most_bytes = size(self.most_pages * self.bytes_per_page)
        most = f"at most {self.most_pages:,} host pages ({most_bytes}) per rank fit beside {rest}"
        verdict = f"it fits; {most}" if self.fits else f"IT DOES NOT FIT; {most}: lower host.{self.field}"
        return f"{gib(self.memory)} of {self.memory_of}: {verdict}"


def make_host_plan(host: HostConfig, *, bytes_per_page: int, page_size: int, ranks_on_node: int,
                   metadata_per_page: int, beside_per_rank: int, beside: str, memory: int | None,
                   memory_of: str) -> HostPlan | None:
    """The plan of the tier, or None if none is asked for. Raises ConfigError for a size of less than a page.

    ``memory``: bytes of a node. ``beside_per_rank``: what each rank takes of it for something else, named ``beside``.
    """
    pages = host_pages(host, bytes_per_page, ranks_on_node)
    if not pages:
        return None
    each = bytes_per_page + metadata_per_page
    most = None if memory is None else max(0, memory // ranks_on_node - beside_per_rank) // each
    field = next(name for name in ("pages", "gib_per_rank", "gib_per_node") if getattr(host, name) is not None)
    return HostPlan(
        field=field, pages=pages, preemption_pages=host.preemption_pages, bytes_per_page=bytes_per_page,
        per_rank=pages * bytes_per_page, per_node=pages * bytes_per_page * ranks_on_node,
        preemption_per_rank=host.preemption_pages * bytes_per_page, metadata_per_rank=metadata_per_page * pages,
        tokens=(pages - host.preemption_pages) * page_size, memory=memory, memory_of=memory_of,
        beside_per_node=beside_per_rank * ranks_on_node, beside=beside, most_pages=most,
    )  # fmt: skip
