"""Host memory from files as machines and containers have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from distkv.memory import HostMemory, host_memory

GIB = 1 << 30
MEMINFO = "MemTotal:       67108864 kB\nMemFree:         1024 kB\nMemAvailable:   33554432 kB\nHugePages_Total:    0\n"


def machine(folder: Path, files: dict[str, object]) -> HostMemory:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return host_memory(folder / "proc", folder / "cgroup")


def v2(group: str, limit: object, used: int, cached: int) -> dict[str, object]:
    stat = f"anon 5\nfile {cached}\ninactive_file {cached // 2}\nactive_file {cached - cached // 2}\nshmem 0\n"
    folder = f"cgroup{group}"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used, f"{folder}/memory.stat": stat}


def v1(group: str, limit: int, used: int, cached: int) -> dict[str, object]:
    folder = f"cgroup/memory{group}"
    return {f"{folder}/memory.limit_in_bytes": limit, f"{folder}/memory.usage_in_bytes": used,
            f"{folder}/memory.stat": f"cache {cached}\ntotal_inactive_file {cached}\ntotal_active_file 0\n"}


@pytest.mark.parametrize(("files", "room"), [
    ({}, 32 * GIB),
    ({"proc/self/cgroup": "0::/\n", **v2("", 8 * GIB, 7 * GIB + 512, 7 * GIB)}, 8 * GIB - 512),
    ({"proc/self/cgroup": "0::/\n", **v2("", "max\n", 7 * GIB, 0)}, 32 * GIB),
    ({"proc/self/cgroup": "0::/\n", **v2("", 64 * GIB, GIB, 0)}, 32 * GIB),
    ({"proc/self/cgroup": "0::/\n", **v2("", 2 * GIB, 3 * GIB, 0)}, 0),
    # not in a namespace: our own group has no limit, one above it has
    ({"proc/self/cgroup": "0::/a/b\n", **v2("/a/b", "max", GIB, 0), **v2("/a", 4 * GIB, 2 * GIB, GIB)}, 3 * GIB),
    ({"proc/self/cgroup": "0::/../elsewhere\n", **v2("", 8 * GIB, GIB, 0)}, 7 * GIB),
    ({"proc/self/cgroup": "5:cpu,memory:/docker/x\n", **v1("/docker/x", 8 * GIB, 7 * GIB, 6 * GIB)}, 7 * GIB),
    ({"proc/self/cgroup": "5:memory:/docker/x\n", **v1("", 8 * GIB, 7 * GIB, 6 * GIB)}, 7 * GIB),  # a namespace of v1
    ({"proc/self/cgroup": "5:memory:/\n", **v1("", 9223372036854771712, GIB, 0)}, 32 * GIB),
    ({"proc/self/cgroup": "a line\n\n0:\n", **v1("", 8 * GIB, 7 * GIB, 0)}, GIB),
])  # fmt: skip
def test_the_tightest_limit_without_what_the_page_cache_gives_back(tmp_path: Path, files: dict[str, object],
                                                                   room: int) -> None:
    found = machine(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert found.room == room
    assert found.total == 64 * GIB


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert machine(tmp_path, {}) == HostMemory()
    assert HostMemory().room is None
    odd = machine(tmp_path, {"proc/meminfo": "MemAvailable\nMemTotal: many kB\n\0", "proc/self/cgroup": "0::/x",
                             "cgroup/memory.max": "nonsense"})  # fmt: skip
    assert odd == HostMemory()
    limited = machine(tmp_path, {"cgroup/memory.max": GIB})
    assert limited.room == GIB, "the limit alone is something to go by"


def test_this_machine() -> None:
    found = host_memory()
    assert found.room is None or 0 <= found.room <= (found.total or found.room)
