"""What the ranks compare when a group starts."""

from __future__ import annotations

import json
from dataclasses import asdict

from distkv.chain import Namer
from distkv.config import Config, agreed_fields
from distkv.errors import GroupMismatch, MessageError
from distkv.group import Group
from distkv.keys import Fingerprint

_PROBE = "key function (key of a probe)"
_NAMING = ("cache.page_size", "cache.key_function")
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


def agree_at_start(group: Group, config: Config, namer: Namer, usable_pages: int) -> int:
    """Compares the agreed fields and a probe key over the group, in one exchange.

    Returns the smallest pool of the group, in usable pages. Raises GroupMismatch, on every rank, naming each field
    that differs and every rank's value. Local fields (pool sizes) may differ, but not in lockstep.
    """
    fields = agreed_fields(config)
    if config.cache.agreement == "lockstep":
        fields |= {f"pool.{name} (equal in lockstep)": str(getattr(config.pool, name)) for name in _POOL}
    fields |= {f"fingerprint.{name}": str(value) for name, value in asdict(namer.fingerprint).items()}
    fields[_PROBE] = namer.probe()
    mine = json.dumps({"fields": fields, "pages": usable_pages}, sort_keys=True).encode()
    all_ranks = [json.loads(data) for data in group.exchange(mine)]
    names = sorted({name for rank in all_ranks for name in rank["fields"]})
    differing = {}
    for name in names:
        values = [str(rank["fields"].get(name, "(not there)")) for rank in all_ranks]
        if len(set(values)) > 1:
            differing[name] = values
    # The probe's key follows from these fields: it is named only if none of them explains it.
    explained = any(name.startswith("fingerprint.") or name in _NAMING for name in differing)
    if explained:
        differing.pop(_PROBE, None)
    if differing:
        raise GroupMismatch(differing, rank=group.rank)
    return min(int(rank["pages"]) for rank in all_ranks)
