"""Real caches on real ranks, one process each: targets for ``run_ranks``, whose results the tests compare."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from distkv.cache import PrefixCache
from distkv.config import CacheConfig, Config, PoolConfig
from distkv.errors import GroupError, PeerFailed
from distkv.group import Group
from distkv.keys import Fingerprint
from distkv.request import Message, Request
from distkv.sequence import Sequence
from distkv.torch_group import TorchGroup

_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast",
                "broadcast_object_list", "barrier", "all_to_all", "all_to_all_single", "reduce", "reduce_scatter",
                "gather", "scatter", "send", "recv", "monitored_barrier", "new_group")
STEPS = 160
FINGERPRINT = Fingerprint(model="case", weights_version="w1")


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Counts every call of a torch.distributed communication function in this process."""
    calls: Counter[str] = Counter()
    honest = {name: getattr(dist, name) for name in _COLLECTIVES}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return honest[name](*args, **kwargs)

        return call

    for name in honest:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in honest.items():
            setattr(dist, name, function)


def make_cache(pages: int = 24, group: Group | None = None, **cache: Any) -> PrefixCache:
    """A small cache over ``group`` (None: the default process group); ``cache`` are fields of CacheConfig."""
    fields = {"page_size": 4, "queue_slots": 4, **cache}
    config = Config(cache=CacheConfig(**fields), pool=PoolConfig(pages=pages, check=True))
    return PrefixCache(config, FINGERPRINT, group or TorchGroup(timeout_s=20.0))


def _request(cache: PrefixCache, number: int, rng: random.Random) -> Request:
    stem = rng.choice([list(range(12)), list(range(8)) + [9] * 8, [5] * 20])
    chain = cache.chain(stem + [rng.randint(0, 3) for _ in range(rng.randint(1, 6))])
    return Request(id=f"r{number}", chain=chain, output_limit=rng.randint(1, 8))


def _work(sequence: Sequence, rng: random.Random) -> None:
    if sequence.committed < sequence.prompt_tokens:
        n = min(8, sequence.prompt_tokens - sequence.committed)
        sequence.open(n)
        sequence.commit(n)
        sequence.append([rng.randint(0, 9)] if sequence.committed == sequence.prompt_tokens else [])
    elif sequence.committed + 1 < sequence.prompt_tokens + sequence.request.output_limit:
        sequence.open(1)
        sequence.append([rng.randint(0, 9)])
        sequence.commit(1)
    else:
        sequence.finish()


def decisions(rank: int, world_size: int, steps: int, uneven: bool, group: Group | None = None) -> dict[str, Any]:
    """A random workload, the same on all ranks. ``uneven``: other pool sizes, and cached pages lost on single ranks.

    Returns what was decided in every step, the page tables, and how many collectives the steps took.
    """
    rng, unlucky = random.Random(1), random.Random(rank)
    cache = make_cache(pages=24 + (rank if uneven else 0), group=group)
    log: list[Any] = []
    tables: list[Any] = []
    needed = number = 0
    with counted_collectives() as calls:
        for step in range(steps):
            if uneven and unlucky.random() < 0.3:
                _lose_cached_page(cache, unlucky)
            requests = []
            for _ in range(rng.choice([0, 0, 1, 2]) if step < steps - 40 else 0):
                number += 1
                requests.append(_request(cache, number, rng))
            needed += bool(requests) or bool(cache.waiting_ids)
            result = cache.step(Message(requests=tuple(requests)))
            log.append(([(s.id, s.cached_tokens) for s in result.ready], [w.request_id for w in result.waiting],
                        result.leftover, result.collective))
            for sequence in list(cache.running.values()):
                _work(sequence, rng)
            tables.append({s.id: s.page_indices.tolist() for s in cache.running.values()})
    stats = cache.stats()
    cache.close()
    return {"log": log, "tables": tables, "calls": dict(calls), "needed": needed, "collectives": stats.collectives,
            "hits": stats.cached_tokens, "ended": not cache.running, "evicted": stats.evicted}


def _lose_cached_page(cache: PrefixCache, rng: random.Random) -> None:
    cold = [int(p) for p in cache._books.pool.cached().nonzero()[0]]
    if cold:
        cache._books.index.drop(rng.choice(cold))


def idle(rank: int, world_size: int, steps: int, heartbeat: int) -> dict[str, int]:
    """Nothing waits: only the heartbeat ballots."""
    cache = make_cache(heartbeat=heartbeat)
    with counted_collectives() as calls:
        for _ in range(steps):
            cache.step()
    return dict(calls)


def _out_of_memory(*_: Any) -> Any:
    raise MemoryError("no memory for the lookup")


def failing_begin(rank: int, world_size: int, faulty: int, group: Group | None = None) -> list[str]:
    """Rank ``faulty`` raises in its second begin; then the group goes on."""
    cache = make_cache(group=group)
    seen = []
    for number in range(3):
        if number == 1 and rank == faulty:
            cache._books.match = _out_of_memory  # type: ignore[method-assign]
        request = Request(id=str(number), chain=cache.chain(list(range(9))), output_limit=2)
        try:
            result = cache.step(Message(requests=(request,)))
            seen.append(f"step {result.step}: {[s.id for s in result.ready]}")
        except PeerFailed as error:
            cause = type(error.__cause__).__name__
            by = f" by {cause}" if rank == faulty else ""
            seen.append(f"step {error.step}: PeerFailed of rank {error.failed_rank}{by}")
            cache._books.__dict__.pop("match", None)
    cache.check()
    return seen


def mismatch(rank: int, world_size: int, odd_rank: int, what: str) -> str:
    """Rank ``odd_rank`` is started differently; every rank returns the error that refuses it."""
    group, fingerprint, hash64 = TorchGroup(timeout_s=20.0), FINGERPRINT, None
    fields: dict[str, Any] = {}
    if rank == odd_rank:
        if what == "weights_version":
            fingerprint = replace(FINGERPRINT, weights_version="w2")
        elif what == "hash64":
            hash64 = _another_hash
        else:
            fields = {"page_size": 8} if what == "page_size" else {"key_function": "xxh64"}
    config = Config(cache=CacheConfig(**{"page_size": 4, **fields}), pool=PoolConfig(pages=16 + rank))
    try:
        PrefixCache(config, fingerprint, group, hash64=hash64)
    except GroupError as error:
        return f"{type(error).__name__}: {error}"
    return "started"


def _another_hash(data: Any, seed: int) -> int:
    return (sum(bytes(data)) * 31 + seed) % 2**64


def mismatches(rank: int, world_size: int, odd_rank: int) -> dict[str, str]:
    """Every kind of :func:`mismatch`, one after the other."""
    return {what: mismatch(rank, world_size, odd_rank, what)
            for what in ("page_size", "weights_version", "key_function", "hash64")}


def in_turn(rank: int, world_size: int) -> dict[str, Any]:
    """The cases that leave the group whole, in one start of the processes."""
    return {
        "even": decisions(rank, world_size, STEPS, uneven=False),
        "uneven": decisions(rank, world_size, STEPS, uneven=True),
        "idle": idle(rank, world_size, steps=30, heartbeat=1000),
        "beating": idle(rank, world_size, steps=30, heartbeat=10),
        "failing": failing_begin(rank, world_size, faulty=world_size - 1),
    }
