"""Forks on real ranks: real bytes in real memory, pages copied by the device in the order of its stream."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from distkv import Branch, CacheConfig, Config, HostConfig, Message, NoRoom, PoolConfig, PrefixCache, Request, Sequence
from distkv.torch_group import TorchGroup
from multigpu_tests.cases import FINGERPRINT, counted_collectives
from multigpu_tests.tier_cases import PAGE, Memory, device_of

STEPS = 50


class Forks:
    """A random workload, the same on all ranks, of requests that fork, on pools and tiers of different sizes."""

    def __init__(self, rank: int, group: TorchGroup, device: torch.device) -> None:
        self.rng = random.Random(11)
        self.memory = Memory(rank, 20 + 2 * rank, device)
        config = Config(cache=CacheConfig(page_size=PAGE, queue_slots=4, heartbeat=1),
                        pool=PoolConfig(pages=20 + 2 * rank, check=True), host=HostConfig(pages=16 + 4 * rank))
        self.copies = 0
        self.cache = PrefixCache(config, FINGERPRINT, group, kv=self.memory.kv, copy_page=self.copy_page)
        self.log: list[Any] = []
        self.waited = 0

    def copy_page(self, label: str, source: int, target: int) -> None:
        self.copies += 1
        self.memory.kv.copy_page(source, target)

    def run(self) -> None:
        rng, cache = self.rng, self.cache
        for number in itertools.count():
            requests = tuple(self.request(3 * number + i) for i in range(rng.randint(0, 2) * (number < STEPS)))
            result = cache.step(Message(requests=requests))
            for sequence in result.ready:
                self.memory.check(sequence, sequence.cached_tokens)
            for forked in result.forked:
                self.are_there(forked.parent, forked.children)
            self.log.append([[s.id for s in result.ready], [f.parent.id for f in result.forked], result.leftover])
            self.computes()
            if number < STEPS:
                self.forks()
            for name in result.to_preempt:
                if name in cache.running:
                    cache.running[name].suspend()
            for name in list(cache.suspended):
                cache.resume(name)
            if rng.random() < 0.2 or number >= STEPS:
                for name in list(cache.kept):
                    cache.abort(name)
            if number >= STEPS and not (cache.running or cache.waiting_ids or cache.suspended):
                return
            if result.loading and not result.ready:
                cache.wait_for_copies(0.05)

    def request(self, number: int) -> Request:
        stem = self.rng.choice([list(range(12)), list(range(7)), [5] * 16])
        chain = self.cache.chain(stem + [self.rng.randint(0, 3) for _ in range(self.rng.randint(1, 6))])
        return Request(id=f"r{number}", chain=chain, output_limit=self.rng.randint(2, 10))

    def computes(self) -> None:
        """One pass over everything that can run: all is opened, tails are copied, and only then anything is written."""
        rng, opened = self.rng, []
        for sequence in [s for s in self.cache.running.values() if not s.read_in_progress and not s.forking]:
            start, limit = sequence.committed, sequence.prompt_tokens + sequence.request.output_limit
            if start >= limit:
                self.ends(sequence)
                continue
            if sequence.named == start:
                sequence.append([rng.randint(0, 9)])
            n = min(6, sequence.named - start)
            sequence.open(n)
            opened.append((sequence, start, start + n))
        self.cache.fence()
        for sequence, start, stop in opened:
            self.memory.write(sequence, start, stop)
            sequence.commit(stop - start)

    def ends(self, sequence: Sequence) -> None:
        self.memory.check(sequence, sequence.committed)
        sequence.keep() if self.rng.random() < 0.2 else sequence.finish()

    def forks(self) -> None:
        """Some parent forks: now, later or not at all, as all ranks know."""
        rng, cache = self.rng, self.cache
        parents = [s for s in (*cache.running.values(), *cache.kept.values())
                   if not s.read_in_progress and not s.forking and s.committed]
        if not parents or len(cache.running) > 8:
            return
        parent = rng.choice(parents)
        branches: Any = 3
        if rng.random() < 0.5:
            branches = [Branch(id=f"{parent.id}:{cache.steps}", suffix=[rng.randint(0, 3)],
                               output_limit=rng.randint(0, 5))]
        try:
            children = parent.fork(branches, wait=rng.random() < 0.5)
        except NoRoom as error:
            self.log.append(str(error))
            return
        self.waited += not children
        self.are_there(parent, children)
        self.log.append([child.id for child in children])

    def are_there(self, parent: Sequence, children: tuple[Sequence, ...]) -> None:
        for child in children:
            assert child.page_indices.tolist() == parent.page_indices.tolist()[: len(child.page_indices)]
            self.memory.check(child, child.committed)


def forks(rank: int, world_size: int) -> dict[str, Any]:
    """The bytes of every sequence are compared when it gets ready, is forked, and ends."""
    device = device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = TorchGroup(timeout_s=20.0)
    case = Forks(rank, group, device)
    with counted_collectives() as calls:
        case.run()
    stats = case.cache.stats()
    case.cache.close()
    group.close()
    return {"log": case.log, "stats": stats, "calls": dict(calls), "copies": case.copies, "waited": case.waited}
