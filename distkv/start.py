"""What the ranks tell each other when a group starts: what has to be equal, and what each has to know of all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distkv.chain import Namer
from distkv.config import Config, HostConfig, agreed_fields
from distkv.errors import ConfigError, GroupMismatch, MessageError
from distkv.group import Group
from distkv.host.budget import HostAsk, ranks_text, settle
from distkv.keys import Fingerprint

_PROBE = "key function (key of a probe)"
_LAYOUT = "layout of the KV memory"
_NAMING = ("cache.page_size", "cache.key_function", "cache.next_token_depth")
_SIZES = ("pages", "gib_per_rank", "gib_per_node", "preemption_pages")
_POOL = ("pages", "scratch_pages")


def check_arguments(config: object, fingerprint: object, group: object) -> None:
    """Raises MessageError, on this rank, for what no cache can be made of."""
    if not isinstance(config, Config):
        raise MessageError(f"PrefixCache needs a distkv.Config, not a {type(config).__name__}; its sections go "
                           "into one: Config(cache=CacheConfig(...), pool=PoolConfig(...))")
    if not isinstance(fingerprint, Fingerprint):
        raise MessageError(f"PrefixCache needs a distkv.Fingerprint, not a {type(fingerprint).__name__}")
    if group is None:
        return
    if not isinstance(group, Group):
        raise MessageError(f"PrefixCache needs a distkv.Group or None, not a {type(group).__name__}; wrap a process "
                           "group of torch.distributed in TorchGroup(...), an MPI communicator in MpiGroup(...)")
    if group.cache is not None and group.cache() is not None:
        raise MessageError("the group has a cache already: close that one first, or make another group over the same "
                           "ranks; their steps, deadlines and faults would be mixed up")


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a rank knows after the exchange. Nothing is taken yet."""

    smallest_pools: tuple[int, ...]
    """Usable pages of the smallest pool of the group, for each label."""
    host_pages: int
    """Host pages of this rank, those of preemption_pages included; 0: no host tier."""
    ranks_on_node: int
    """Ranks of this group on this rank's node, itself included."""
    plan: tuple[str, ...]
    """The host tier of every node, a line each, and what speaks against it; empty if no rank has one."""


def meet(group: Group, config: Config, namer: Namer, usable_pages: Sequence[int], *,
         host: HostAsk | None = None) -> Start:
    """Compares the agreed fields, a probe key and the KV layout, and settles the host tier, in one exchange.

    Raises GroupMismatch, on every rank, naming each field that differs and every rank's value. Local fields (pool
    sizes) may differ, but not in lockstep. Then ConfigError, the same on every rank, if a rank's host tier is
    impossible or is not to be had on its node: before anything of it is taken. ``host``: where this rank is; None: all
    ranks in one place, and pages without bytes.
    """
    host = host if host is not None else HostAsk()
    fields = agreed_fields(config)
    if config.cache.agreement == "lockstep":
        fields |= {f"pool.{name} (equal in lockstep)": str(getattr(config.pool, name)) for name in _POOL}
        fields |= {f"labels.{label.name}.{name} (equal in lockstep)": str(getattr(label, name))
                   for label in config.labels for name in _POOL}
    fields |= {f"fingerprint.{name}": str(value) for name, value in asdict(namer.fingerprint).items()}
    fields[_LAYOUT] = str(host.layout)
    fields[_PROBE] = namer.probe()
    sizes = {name: getattr(config.host, name) for name in _SIZES}
    mine = {"fields": fields, "pages": list(usable_pages), "host": sizes, "ask": asdict(host)}
    told = group.exchange(json.dumps(mine, sort_keys=True).encode())
    all_ranks = [json.loads(data) for data in told]
    for number, rank in enumerate(all_ranks):
        if rank["ask"]["problem"] is not None:
            path, text = rank["ask"]["problem"]
            raise ConfigError(path, text + (f" (seen on rank {number}; no rank starts)" if len(all_ranks) > 1 else ""))
    _compare([rank["fields"] for rank in all_ranks], group.rank)
    smallest = tuple(min(map(int, pages)) for pages in zip(*(rank["pages"] for rank in all_ranks), strict=True))
    return _settled(all_ranks, group.rank, smallest)


def _compare(fields: Sequence[dict[str, str]], rank: int) -> None:
    names = sorted({name for each in fields for name in each})
    differing = {}
    for name in names:
        values = [str(each.get(name, "(not there)")) for each in fields]
        if len(set(values)) > 1:
            differing[name] = values
    # The probe's key follows from these fields: it is named only if none of them explains it.
    explained = any(name.startswith("fingerprint.") or name in _NAMING for name in differing)
    if explained:
        differing.pop(_PROBE, None)
    if differing:
        raise GroupMismatch(differing, rank=rank)


def _settled(all_ranks: Sequence[dict[str, Any]], rank: int, smallest: tuple[int, ...]) -> Start:
    hosts = [HostConfig(**each["host"]) for each in all_ranks]
    budgets = settle(hosts, [HostAsk(**each["ask"]) for each in all_ranks])
    mine = next(budget for budget in budgets if any(share.rank == rank for share in budget.shares))
    pages = {share.rank: share.pages for budget in budgets for share in budget.shares}
    any_tier = any(pages.values()) or any(each["ask"]["label_pages"] for each in all_ranks)
    lines = [budget.line() for budget in budgets] if any_tier else []
    without = sorted(other for other, has in pages.items() if not has)
    if any(pages.values()) and without:
        lines.append(f"no host tier on {ranks_text(without)}: what is not on every rank is loaded on none")
    return Start(smallest_pools=smallest, host_pages=pages[rank], ranks_on_node=len(mine.shares), plan=tuple(lines))
