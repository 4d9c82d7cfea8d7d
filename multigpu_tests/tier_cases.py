"""Real caches with a host tier on real ranks: real bytes in real memory, copied by the engine that fits the device."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from distkv import CacheConfig, Config, HostConfig, Message, PagedKV, PoolConfig, PrefixCache, Request, Sequence
from distkv.host.copies import Copy, Kind
from distkv.torch_group import TorchGroup
from multigpu_tests.cases import FINGERPRINT, counted_collectives

PAGE, LAYERS, HEADS, DIM = 4, 3, 2, 8
STEPS = 60
_SLOW = 200_000  # cycles of a GPU: long enough for a copy that does not wait to come first


class Memory:
    """One rank's paged memory, and what a model would write: a function of a token and of all before it."""

    def __init__(self, rank: int, pages: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.pool = torch.zeros(LAYERS, 2, pages, PAGE, HEADS, DIM, device=device)
        self.kv = PagedKV(self.pool)
        self._flat = self.pool.flatten(2, 3)

    def values(self, sequence: Sequence, start: int, stop: int) -> torch.Tensor:
        """What belongs at these positions: float32 [positions]."""
        tokens = torch.from_numpy(sequence.tokens(0, stop)).double()
        weights = torch.arange(1, stop + 1).double().sqrt()
        return (torch.cumsum(tokens * weights, 0)[start:stop] + self.rank).float()

    def write(self, sequence: Sequence, start: int, stop: int) -> None:
        """The forward pass over these positions."""
        slots = torch.from_numpy(sequence.slots(start, stop)).to(self.device)
        values = self.values(sequence, start, stop).to(self.device)
        if self.device.type == "cuda":
            torch.cuda._sleep(_SLOW)  # type: ignore[no-untyped-call]
        self._flat[:, :, slots] = values[:, None, None].expand(-1, HEADS, DIM)

    def check(self, sequence: Sequence, stop: int) -> None:
        """Every byte of its first tokens is its own."""
        slots = torch.from_numpy(sequence.slots(0, stop)).to(self.device)
        found = self._flat[:, :, slots].cpu()
        wanted = self.values(sequence, 0, stop)[:, None, None].expand(LAYERS, 2, stop, HEADS, DIM)
        assert torch.equal(found, wanted), f"{sequence} on rank {self.rank} has other bytes than its own"


def device_of(rank: int) -> torch.device:
    """This rank's GPU under NCCL, else the CPU."""
    return torch.device("cuda", rank) if torch.distributed.get_backend() == "nccl" else torch.device("cpu")


def fails_at_times(engine: Any, every: int) -> None:
    """Every so many loads of this copy engine fail, in the middle of what they do."""
    honest, calls = engine._move, itertools.count(1)

    def move(*what: Any) -> None:
        honest(*what)
        load = what[0].kind is Kind.LOAD if isinstance(what[0], Copy) else what[0] is Kind.LOAD
        if load and next(calls) % every == 0:
            raise RuntimeError("a load that failed on purpose")

    engine._move = move


def tier(rank: int, world_size: int, policy: str) -> dict[str, Any]:
    """A random workload, the same on all ranks, with pools and tiers of different sizes; rank 1's loads fail at times.

    Bytes are compared whenever a sequence gets ready and when it ends.
    """
    device = device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    memory = Memory(rank, 14 + 2 * rank, device)
    host = HostConfig(pages=24 + 8 * rank, preemption_pages=6, write_policy=policy)  # type: ignore[arg-type]
    config = Config(cache=CacheConfig(page_size=PAGE, queue_slots=4),
                    pool=PoolConfig(pages=14 + 2 * rank, check=True), host=host)
    group = TorchGroup(timeout_s=20.0)
    cache = PrefixCache(config, FINGERPRINT, group, kv=memory.kv)
    tier = cache._books.tier
    assert tier is not None
    if rank == 1:
        fails_at_times(tier.engine, 5)
    rng, log = random.Random(7), []
    with counted_collectives() as calls:
        for number in itertools.count():
            requests = tuple(_request(cache, number * 2 + i, rng) for i in range(rng.randint(0, 2) * (number < STEPS)))
            result = cache.step(Message(requests=requests))
            log.append([[s.id for s in result.ready], [s.id for s in result.loading], result.leftover])
            for sequence in result.ready:
                memory.check(sequence, sequence.cached_tokens)
            _work(cache, memory, rng)
            if not cache.running and not cache.waiting_ids and not cache.suspended and number >= STEPS:
                break
            if result.loading and not result.ready:
                cache.wait_for_copies(0.05)
    stats = cache.stats()
    pinned = bool(tier.engine.rows.is_pinned)
    cache.close()
    group.close()
    return {"log": log, "stats": stats, "calls": dict(calls), "pinned": pinned, "device": device.type,
            "engine": type(tier.engine).__name__}


def _request(cache: PrefixCache, number: int, rng: random.Random) -> Request:
    stem = rng.choice([list(range(12)), list(range(20)), [5] * 16, [7, 8] * 8])
    chain = cache.chain(stem + [rng.randint(0, 3) for _ in range(rng.randint(1, 6))])
    return Request(id=f"r{number}", chain=chain, output_limit=rng.randint(1, 8))


def _work(cache: PrefixCache, memory: Memory, rng: random.Random) -> None:
    """One pass over everything that runs; now and then one is suspended, and comes back later."""
    runs = [s for s in cache.running.values() if not s.read_in_progress]
    opened = []
    for sequence in runs:
        start = sequence.committed
        n = min(8, sequence.named - start)
        sequence.open(n)
        opened.append((sequence, start, start + n))
    cache.fence()
    for sequence, start, stop in opened:
        memory.write(sequence, start, stop)
    for sequence, start, stop in opened:
        sequence.commit(stop - start)
        if stop < sequence.named:
            continue
        if stop >= sequence.prompt_tokens + sequence.request.output_limit - 1:
            memory.check(sequence, stop)
            sequence.finish()
        elif rng.random() < 0.15:
            sequence.append([rng.randint(0, 9)])
            sequence.suspend()
        else:
            sequence.append([rng.randint(0, 9)])
    for request_id in list(cache.suspended):
        if rng.random() < 0.3:
            cache.resume(request_id)
