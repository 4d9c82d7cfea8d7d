"""Host memory that this process can still get: what the machine has, and what the control group leaves of it.

Containers see the host's /proc/meminfo, so the limit of the control group has to be read too; and what that group's
files take of the page cache counts as used there although the kernel gives it back when it is asked. Both versions of
control groups, in a namespace or not. Linux; elsewhere everything is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostMemory", "host_memory"]

_NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2**63 for no limit."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of memory; None is unknown (``limit``: none)."""

    total: int | None = None
    """Of the machine."""
    available: int | None = None
    """What new programs could get of the machine without swapping (MemAvailable)."""
    limit: int | None = None
    """The tightest limit of the control groups that this process is in."""
    limit_used: int | None = None
    """Held by the group with that limit, without page cache that can be given back."""

    @property
    def room(self) -> int | None:
        """What this process can still get: the smaller of the two. None if both are unknown."""
        bounds = [] if self.available is None else [self.available]
        if self.limit is not None:
            bounds.append(max(0, self.limit - (self.limit_used or 0)))
        return min(bounds, default=None)


def host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Reads both; what cannot be read is None. ``proc`` and ``cgroup`` are where these file systems are mounted."""
    info = _numbers(proc / "meminfo", ":", 1024)
    # the tightest: that which leaves least
    limit, used = min(_limits(proc, cgroup), key=lambda pair: pair[0] - pair[1], default=(None, None))
    return HostMemory(total=info.get("MemTotal"), available=info.get("MemAvailable"), limit=limit, limit_used=used)


def _limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """(limit, used without reclaimable page cache) of every control group with a limit, from ours up to the root."""
    for folder in _folders(proc, cgroup, version=2):
        yield from _limit(folder, "memory.max", "memory.current", ("inactive_file", "active_file"))
    for folder in _folders(proc, cgroup, version=1):
        yield from _limit(folder, "memory.limit_in_bytes", "memory.usage_in_bytes",
                          ("total_inactive_file", "total_active_file"))


def _limit(folder: Path, limit_file: str, used_file: str, reclaimable: tuple[str, str]) -> Iterator[tuple[int, int]]:
    limit, used = _number(folder / limit_file), _number(folder / used_file)
    if limit is None or limit >= _NO_LIMIT:
        return
    stat = _numbers(folder / "memory.stat", " ", 1)
    yield limit, max(0, (used or 0) - sum(stat.get(name, 0) for name in reclaimable))


def _folders(proc: Path, cgroup: Path, *, version: int) -> Iterator[Path]:
    """Our control group's folder and those above it. In a namespace of its own the group is the mount's root."""
    root = cgroup if version == 2 else cgroup / "memory"
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        ours = (number == "0" and not controllers) if version == 2 else "memory" in controllers.split(",")
        if ours and ".." not in Path(path).parts:
            own = root / path.lstrip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root) and folder != root)
    yield root


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None  # "max" is no limit


def _numbers(path: Path, separator: str, unit: int) -> dict[str, int]:
    found = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(separator)
        value = rest.split()[:1]
        if value and value[0].isascii() and value[0].isdigit():
            found[name] = int(value[0]) * unit
    return found
