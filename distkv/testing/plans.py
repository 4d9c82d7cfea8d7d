"""What random schedules draw at their start and for each request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from distkv.cache import PrefixCache
from distkv.config import CacheConfig, Config, HostConfig, PoolConfig
from distkv.keys import Adapter
from distkv.request import Request

PAGE_SIZE = 2
How = Literal["minimum", "lockstep"]
_STEMS = ([1, 2, 1, 2, 0, 0], [1, 2, 1, 1, 0, 1], [0, 0, 0, 0], [2], [1, 2, 1, 2, 0, 0, 1, 1, 2, 0, 1, 0])


@dataclass(frozen=True, slots=True)
class Plan:
    """A request as a schedule wants it; each rank makes its own chain of it."""

    id: str
    tokens: tuple[int, ...]
    output_limit: int
    salt: str | None
    adapter: Adapter | None
    cap: int | None
    read: bool
    write: bool

    def request(self, cache: PrefixCache) -> Request:
        chain = cache.chain(list(self.tokens), salt=self.salt, adapter=self.adapter)
        return Request(id=self.id, chain=chain, output_limit=self.output_limit, matched_cap=self.cap,
                       read=self.read, write=self.write)

    @classmethod
    def draw(cls, rng: random.Random, number: int, past: Sequence[list[int]] = ()) -> Plan:
        """Mostly of a few stems, so that prompts share pages; now and then the id of another, or too large.

        ``past``: what was said before, one of which may go on.
        """
        goes_on = bool(past) and rng.random() < 0.7
        stem = rng.choice(past) if goes_on else rng.choice(_STEMS)
        tokens = stem + [rng.randint(0, 1) for _ in range(rng.choice([0, 1, 2, 2, 4, 6]))]
        return cls(
            id=str(number if rng.random() < 0.98 else max(1, number - 2)), tokens=tuple(tokens),
            output_limit=rng.randint(0, 8) if rng.random() < 0.97 else 200,
            salt=None if goes_on else rng.choice([None] * 6 + ["s"]),
            adapter=None if goes_on else rng.choice([None] * 6 + [Adapter("a")]),
            cap=rng.choice([None] * 6 + [1, 3]), read=rng.random() < 0.95, write=rng.random() < 0.95,
        )


def draw_configs(rng: random.Random, asynchronous: bool, agreement: How | None,
                 pools: list[int] | None, *, tier: bool = False) -> list[Config]:
    """One for each rank. ``agreement`` and ``pools`` (usable pages of each rank) are drawn if they are not given.

    ``tier``: some ranks, or all, have a host tier; the group is not in lockstep then.
    """
    drawn: How = "lockstep" if not tier and rng.random() < 0.5 else "minimum"
    cache = CacheConfig(page_size=PAGE_SIZE, index_on=rng.choice(["finish", "fill"]),
                        queue_slots=rng.choice([1, 2, 4, 8]), heartbeat=rng.choice([1, 4, 64]),
                        agreement=agreement or drawn, check_every=rng.choice([1, 4, 16]), asynchronous=asynchronous)
    equal = cache.agreement == "lockstep"
    base = rng.randint(*((7, 12) if tier else (8, 32)))
    ranks = rng.choice([1, 2, 2, 3, 3, 4]) if tier else rng.randint(1, 8)
    pools = pools or [base + (0 if equal else rng.randint(0, 3 if tier else 6)) for _ in range(ranks)]
    scratch = [0 if equal else rng.randint(0, 1) for _ in pools]
    hosts = draw_hosts(rng, len(pools)) if tier else [HostConfig()] * len(pools)
    return [Config(cache=cache, pool=PoolConfig(pages=pages + n, scratch_pages=n), host=host)
            for pages, n, host in zip(pools, scratch, hosts, strict=True)]


def draw_hosts(rng: random.Random, ranks: int) -> list[HostConfig]:
    """The host tier of each rank, of very unequal sizes; a few have none, but not all."""
    slots, without, roomy = rng.randint(1, 8), rng.choice([0.0, 0.0, 0.0, 0.3]), rng.random() < 0.6
    hosts = []
    for rank in range(ranks):
        pages = rng.randint(16, 60) if roomy else rng.choice([rng.randint(1, 6), rng.randint(4, 16)])
        if rank and rng.random() < without:
            hosts.append(HostConfig(loading_slots=slots))
        else:
            hosts.append(HostConfig(
                pages=pages, preemption_pages=min(pages - 1, rng.choice([0, 2, 4, 16])), loading_slots=slots,
                write_policy=rng.choice(["evict", "evict", "finish"]), prefetch=rng.random() < 0.6))
    return hosts
