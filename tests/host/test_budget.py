"""How many host pages each rank has, whether its node holds them, and that all ranks come to the same answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from distkv import CacheConfig, Config, ConfigError, DistKVError, Fingerprint, GroupMismatch, HostConfig, PoolConfig
from distkv.chain import Namer
from distkv.group import LocalGroup
from distkv.host.budget import HostAsk, host_pages, nodes_of, settle
from distkv.memory import HostMemory, host_memory
from distkv.start import Start, meet

MIB, GIB = 1 << 20, 1 << 30


def host(**fields: Any) -> HostConfig:
    return HostConfig(**fields)


# ---- one rank


@pytest.mark.parametrize(("fields", "bytes_per_page", "ranks", "pages"), [
    ({}, MIB, 4, 0),
    ({}, None, 4, 0),
    ({"pages": 7, "preemption_pages": 6}, MIB, 4, 7),
    ({"pages": 7}, None, 1, 7),
    ({"gib_per_rank": 1}, MIB, 4, 1024),
    ({"gib_per_rank": 0.5}, MIB, 1, 512),
    ({"gib_per_rank": 1}, GIB, 1, 1),
    ({"gib_per_rank": 1.999}, GIB, 1, 1),  # whole pages only
    ({"gib_per_rank": 1}, 3 * MIB, 1, 341),
    ({"gib_per_node": 1}, MIB, 4, 256),
    ({"gib_per_node": 1}, MIB, 3, 341),
    ({"gib_per_node": 1, "preemption_pages": 340}, MIB, 3, 341),
])  # fmt: skip
def test_sizes_become_whole_pages(fields: dict[str, Any], bytes_per_page: int | None, ranks: int, pages: int) -> None:
    assert host_pages(host(**fields), bytes_per_page, ranks) == pages


@pytest.mark.parametrize(("fields", "bytes_per_page", "ranks", "path", "parts"), [
    ({"gib_per_rank": 1}, GIB + 1, 1, "host.gib_per_rank", ["is 1 GiB", "less than one page of 1.00 GiB", "1.001 GiB"]),
    ({"gib_per_node": 2}, GIB, 3, "host.gib_per_node",
     ["is 2 GiB on rank 5", "682.67 MiB for each of 3 ranks", "at least 3 GiB"]),
    ({"gib_per_rank": 1, "preemption_pages": 4}, GIB // 4, 1, "host.preemption_pages",
     ["is 4", "less than the host pages", "host.gib_per_rank is 1 GiB on rank 5", "4 pages of 256.00 MiB"]),
    ({"gib_per_node": 1, "preemption_pages": 3}, GIB // 4, 2, "host.preemption_pages", ["2 pages of 256.00 MiB"]),
    ({"gib_per_rank": 1}, None, 1, "host.gib_per_rank", ["no KV memory", "host.pages"]),
    ({"gib_per_rank": 1000}, 1, 1, "host.gib_per_rank", ["at most 2,147,483,647"]),
])  # fmt: skip
def test_impossible_sizes_are_named_with_their_numbers(fields: dict[str, Any], bytes_per_page: int | None, ranks: int,
                                                       path: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        host_pages(host(**fields), bytes_per_page, ranks, where=" on rank 5")
    assert caught.value.path == path
    for part in parts:
        assert part in str(caught.value)


# ---- nodes


def ask(node: str, available: int | None = None, page: int | None = MIB, machine: str = "",
        machine_has: int | None = None, layout: str | None = None) -> HostAsk:
    return HostAsk(name=node, node=node, machine=machine, available=available, machine_available=machine_has,
                   bytes_per_page=page, layout=layout)  # fmt: skip


def test_ranks_of_a_node_need_not_be_neighbours() -> None:
    assert nodes_of([ask("a"), ask("b"), ask("a"), ask("b"), ask("c")]) == [[0, 2], [1, 3], [4]]
    budgets = settle([host(gib_per_node=1)] * 5, [ask("a"), ask("b"), ask("a"), ask("b"), ask("c")])
    assert {share.rank: share.pages for b in budgets for share in b.shares} == {0: 512, 2: 512, 1: 512, 3: 512, 4: 1024}


def test_groups_beside_this_one_share_what_is_given_for_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    (budget,) = settle([host(gib_per_node=1)] * 2, [dataclasses.replace(ask("a"), local_ranks=n) for n in (0, 8)])
    assert [share.pages for share in budget.shares] == [128, 128]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    assert HostAsk.here(HostMemory()).local_ranks == 6


@pytest.mark.parametrize(("fields", "asks", "parts"), [
    # exactly what there is
    ({"pages": 1024}, [ask("a", 2 * GIB)] * 2, ["2 x 1,024 pages of 1.00 MiB"]),
    ({"gib_per_rank": 1}, [ask("a", 2 * GIB)] * 2, ["ranks 0, 1", "2.00 GiB of 2.00 GiB"]),
    ({"gib_per_node": 2}, [ask("a", 2 * GIB)] * 2, ["2.00 GiB of 2.00 GiB"]),
    ({"gib_per_rank": 1}, [ask("a", GIB), ask("b", GIB)], ["host tier on a (rank 0)", "host tier on b (rank 1)"]),
    # unknown is not refused, nor are pages without bytes
    ({"gib_per_rank": 1}, [ask("a"), ask("a")], ["unknown amount"]),
    ({"pages": 10}, [ask("a", 0, page=None)], ["0 B of 0 B"]),
    # containers of one machine, and of two
    ({"gib_per_rank": 1}, [ask("c1", GIB, machine="m", machine_has=2 * GIB), ask("c2", GIB, machine="m")], ["on c2"]),
    ({"gib_per_rank": 1}, [ask("c1", GIB, machine="m", machine_has=GIB), ask("c2", GIB, machine="n")], ["on c1"]),
])  # fmt: skip
def test_what_its_ranks_take_fits_into_a_node(fields: dict[str, Any], asks: list[HostAsk], parts: list[str]) -> None:
    text = "\n".join(budget.line() for budget in settle([host(**fields)] * len(asks), asks))
    for part in parts:
        assert part in text


@pytest.mark.parametrize(("fields", "asks", "parts"), [
    ({"pages": 1025}, [ask("a", 2 * GIB)] * 2, ["on a (ranks 0, 1; 2 x 1,025 pages of 1.00 MiB)",
                                                "2.00 GiB can be had", "at most 1,024 pages for each of 2 ranks"]),
    ({"gib_per_rank": 1.5}, [ask("a", 2 * GIB)] * 2, ["takes 3.00 GiB on a", "2.00 GiB can be had", "at most 1 GiB"]),
    ({"gib_per_node": 3}, [ask("a", 2 * GIB)] * 4, ["takes 3.00 GiB on a (ranks 0 to 3;", "at most 2 GiB"]),
    # each rank alone would fit; the other node has room
    ({"gib_per_rank": 1}, [ask("a", 9 * GIB), ask("b", GIB), ask("a"), ask("b")], ["on b (ranks 1, 3;"]),
    # the rank that read last has seen what the others had taken
    ({"gib_per_rank": 1}, [ask("a", 9 * GIB), ask("a", GIB)], ["1.00 GiB can be had"]),
    ({"gib_per_rank": 1}, [ask("a"), ask("a", GIB)], ["takes 2.00 GiB"]),
    # containers: each has room, their machine has not
    ({"gib_per_rank": 1}, [ask("c1", GIB, machine="m", machine_has=GIB), ask("c2", GIB, machine="m")],
     ["the machine of c1, c2", "takes 2.00 GiB", "1.00 GiB can be had"]),
])  # fmt: skip
def test_what_its_ranks_take_does_not_fit_into_a_node(fields: dict[str, Any], asks: list[HostAsk],
                                                      parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        settle([host(**fields)] * len(asks), asks)
    assert caught.value.path == "host." + next(iter(fields))
    for part in parts:
        assert part in str(caught.value)


def test_what_labels_take_is_not_there_for_main() -> None:
    """The error names who takes more, and what it advises fits."""
    asks = [dataclasses.replace(ask("a", 900 * MIB), label_pages=100, label_bytes=100 * MIB)] * 2
    for field, advised in (("gib_per_node", "0.683 GiB"), ("gib_per_rank", "0.341 GiB")):
        with pytest.raises(ConfigError, match=f"at most {advised}") as caught:
            settle([host(**{field: 1})] * 2, asks)
        assert caught.value.path == f"host.{field}"
        settle([host(**{field: float(advised.split()[0])})] * 2, asks)
    with pytest.raises(ConfigError, match="lower host_pages of the labels") as caught:
        settle([host(pages=5)] * 2, [dataclasses.replace(each, label_bytes=500 * MIB) for each in asks])
    assert caught.value.path == "labels"


def test_the_setting_of_the_rank_that_takes_most_is_the_one_to_lower() -> None:
    with pytest.raises(ConfigError, match=r"host\.pages: .*1 x 1,024 pages .* 1 x 2,048 pages") as caught:
        settle([host(gib_per_rank=1), host(pages=2048), host()], [ask("a", GIB)] * 3)
    assert "ranks 0, 1;" in str(caught.value), "a rank without a tier takes nothing"


@pytest.mark.parametrize(("files", "room"), [
    ({}, 2 * GIB),
    ({"cgroup/memory.max": GIB, "cgroup/memory.current": 0}, GIB),
    ({"cgroup/memory.max": 2 * GIB, "cgroup/memory.current": GIB + 2 * MIB,
      "cgroup/memory.stat": f"inactive_file {MIB}\nactive_file {MIB}\n"}, GIB),
    ({"proc/self/cgroup": "5:memory:/x\n", "cgroup/memory/x/memory.limit_in_bytes": GIB,
      "cgroup/memory/x/memory.usage_in_bytes": 0}, GIB),
])  # fmt: skip
def test_the_control_group_counts(tmp_path: Path, files: dict[str, object], room: int) -> None:
    for name, content in {"proc/meminfo": f"MemAvailable: {2 * GIB // 1024} kB\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(str(content))
    here = HostAsk.here(host_memory(tmp_path / "proc", tmp_path / "cgroup"), bytes_per_page=MIB, proc=tmp_path / "none")
    assert (here.available, here.machine_available) == (room, 2 * GIB)
    settle([host(gib_per_rank=room / GIB)], [here])
    with pytest.raises(ConfigError, match="can be had there"):
        settle([host(pages=room // MIB + 1)], [here])


def test_two_processes_of_one_place_are_on_one_node_and_another_boot_is_another_machine(tmp_path: Path) -> None:
    first, second = (HostAsk.here(HostMemory()) for _ in range(2))
    assert first == second and first.node and first.name
    (tmp_path / "sys" / "kernel" / "random").mkdir(parents=True)
    (tmp_path / "sys" / "kernel" / "random" / "boot_id").write_text("elsewhere\n")
    other = HostAsk.here(HostMemory(), proc=tmp_path)
    assert other.machine == "elsewhere" and other.node != first.node and other.name == first.name
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "mnt").symlink_to("mnt:[1]")
    container = HostAsk.here(HostMemory(), proc=tmp_path)
    assert container.machine == other.machine and container.node != other.node


# ---- the exchange at start


def start(configs: Sequence[Config], asks: Sequence[HostAsk | None]) -> list[Start | DistKVError]:
    """:func:`meet` on every rank of an in-process group, or what it raised there."""
    def one(config: Config, group: LocalGroup, host: HostAsk | None) -> Start | DistKVError:
        namer = Namer(Fingerprint(model="m", weights_version="0"), config.cache.page_size, config.cache.key_function)
        try:
            return meet(group, config, namer, (config.pool.pages,), host=host)
        except DistKVError as error:
            return error

    members = LocalGroup.make(len(configs), timeout_s=0)
    with ThreadPoolExecutor(len(configs)) as threads:
        return list(threads.map(one, configs, members, asks))


def of(pages: int = 64, **fields: Any) -> Config:
    return Config(pool=PoolConfig(pages=pages), host=host(**fields))


def test_every_rank_knows_its_own_share_and_the_whole_plan() -> None:
    found = start([of(40, gib_per_node=1), of(gib_per_node=1), of(pages=5)],
                  [ask("a", 4 * GIB), ask("a", 4 * GIB), ask("b", GIB)])  # fmt: skip
    assert all(isinstance(each, Start) for each in found), found
    assert [(s.smallest_pools, s.host_pages, s.ranks_on_node) for s in found if isinstance(s, Start)] == [
        ((5,), 512, 2), ((5,), 512, 2), ((5,), 0, 1)]  # fmt: skip
    plans = {s.plan for s in found if isinstance(s, Start)}
    assert len(plans) == 1
    lines = plans.pop()
    assert len(lines) == 3 and "no host tier on rank 2" in lines[-1]


def test_without_a_tier_there_is_no_plan() -> None:
    found = start([of(3), of(4)], [None, None])
    assert found == [Start(smallest_pools=(3,), host_pages=0, ranks_on_node=2, plan=())] * 2


@pytest.mark.parametrize(("fields", "words"), [
    ([{"gib_per_rank": 1}, {"gib_per_rank": 1}, {"pages": 1}], "takes 2.00 GiB on a"),
    ([{"pages": 1}, {"pages": 1}, {"gib_per_rank": 0.0001}], "on rank 2, which is less than one page"),
])  # fmt: skip
def test_every_rank_raises_the_same_error_wherever_it_is(fields: list[dict[str, Any]], words: str) -> None:
    found = start([of(**each) for each in fields], [ask("a", GIB), ask("a", GIB), ask("b", GIB)])
    assert all(isinstance(error, ConfigError) for error in found)
    assert len({str(error) for error in found}) == 1 and words in str(found[0])


def test_another_layout_of_the_pages_or_of_the_ballot_is_a_mismatch() -> None:
    found = start([of(pages=4)] * 2, [ask("a", layout="float32, 4 heads"), ask("a", layout="bfloat16, 4 heads")])
    assert all(isinstance(error, GroupMismatch) for error in found)
    assert "layout of the KV memory differs (rank 0: float32, 4 heads, rank 1: bfloat16" in str(found[0])
    slots = [Config(host=host(loading_slots=n), cache=CacheConfig()) for n in (8, 9)]
    assert "host.loading_slots differs" in str(start(slots, [None, None])[0])
