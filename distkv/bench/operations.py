"""The rows of one rank: each operation on the state that its target is defined on."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from distkv.ballot import Vector
from distkv.bench import floors as machine
from distkv.bench.rows import Row
from distkv.bench.timing import Sample, measure, repeat, settled
from distkv.bench.workloads import FINGERPRINT, Conversation, Sizes, agents, new_cache, tokens, with_tails
from distkv.chain import KeyChain, Namer
from distkv.errors import InvariantError
from distkv.group import SoloGroup, Ticket
from distkv.request import Message, Request

Floors = dict[str, Sample]


def timed(name: str, sample: Sample, *, target: float | None = None, floor: str = "",
          floors: Floors | None = None, note: str = "") -> Row:
    """The row of a timed operation, beside its floor."""
    value = floors[floor].median if floors and floor else None
    return Row(name=name, unit="us", value=sample.median, sample=sample, target=target, floor=floor,
               floor_value=value, note=note)


def lookups(sizes: Sizes, floors: Floors) -> Iterator[Row]:
    """A verified match with its page table, and a miss on the first page."""
    state = Conversation(sizes)
    limit = (sizes.prompt - 1) // sizes.page_size
    match = state.books.match(state.chain, limit)
    if match.pages.tolist() != state.pages[:limit].tolist():
        raise InvariantError("the lookup that is timed does not give the pages that were stored")
    missing = state.prompt.copy()
    missing[0] ^= 1
    miss = state.books.namer.chain(missing)
    with settled():
        found = repeat(lambda: state.books.match(state.chain, limit), sizes.repeats)
        yield timed(f"match + page table, {sizes.turns} turns", found, target=60, floors=floors,
                    floor=machine.MEMCMP, note=f"{limit} pages in {len(state.books.index.runs())} runs, verified")
        none = repeat(lambda: state.books.match(miss, limit), sizes.repeats)
        yield timed("miss on the first page", none, target=5, floors=floors, floor=machine.PROBES)


def naming(sizes: Sizes, floors: Floors) -> Iterator[Row]:
    """Keys of a cold prompt from what engines have, and of the new tokens of a turn."""
    namer = Namer(FINGERPRINT, sizes.page_size)
    rng = np.random.default_rng(5)
    prompt = tokens(rng, sizes.prompt)
    as_list = prompt.tolist()
    with settled():
        for name, ids, target in (("int32 array", prompt, 400.0), ("int64 array", prompt.astype(np.int64), None),
                                  ("array('i')", array("i", as_list), None), ("list", as_list, None)):
            def cold(ids: object = ids) -> KeyChain:
                return namer.chain(ids)

            n = sizes.repeats if target else max(5, sizes.repeats // 10)
            yield timed(f"keys of a cold prompt, {name}", repeat(cold, n), target=target, floors=floors,
                        floor=machine.HASH_PAGES)
        yield from _kept(sizes, floors, namer, prompt)


def _kept(sizes: Sizes, floors: Floors, namer: Namer, prompt: np.ndarray) -> Iterator[Row]:
    rng = np.random.default_rng(6)
    turns = 32
    more = [tokens(rng, sizes.new) for _ in range(turns)]
    kept: list[KeyChain] = []

    def next_turn() -> tuple[KeyChain, np.ndarray]:
        """The conversation, which goes on for 32 turns and then begins again."""
        if not kept or len(kept[0]) >= sizes.prompt + turns * sizes.new:
            kept[:] = [namer.chain(prompt)]
        kept[0] = kept[0].branch()
        return kept[0], more[(len(kept[0]) - sizes.prompt) // sizes.new]

    def extend(given: tuple[KeyChain, np.ndarray]) -> None:
        given[0].extend(given[1])

    sample = measure(extend, next_turn, max(sizes.repeats, 2 * turns))
    yield timed(f"{sizes.new} new tokens on a kept chain", sample, target=15, floors=floors, floor=machine.HASH_NEW,
                note=f"a conversation of {sizes.prompt} tokens that goes on for {turns} turns")
    first = measure(lambda chain: chain.extend(more[0]), lambda: namer.chain(prompt), sizes.repeats // 3)
    yield timed(f"{sizes.new} new tokens, first turn only", first, floors=floors, floor=machine.HASH_NEW)
    old = namer.chain(prompt)
    whole = np.concatenate([prompt, more[0]])
    again = repeat(lambda: old.follow(whole), max(5, sizes.repeats // 10))
    yield timed("whole prompt of the next turn, by follow()", again, floors=floors, floor=machine.MEMCMP,
                note="compared with the kept chain, whose log another turn has gone on with: the copy is charged")


def storing(sizes: Sizes, floors: Floors) -> Iterator[Row]:
    """Entering new pages behind a long prefix, as finish does: with the match known, and verified anew."""
    state = Conversation(sizes)
    books, chain = state.books, state.longer(1)
    books.promise(sizes.new // sizes.page_size)
    new = books.take(sizes.new // sizes.page_size)
    pages = np.concatenate([state.pages, new])

    def undo() -> None:
        books.index.drop(int(new[0]))

    with settled():
        for name, known, target in (("", sizes.pages, 40.0), (", verified anew", 0, None)):
            sample = measure(lambda n: books.store(chain, pages, n), partial(int, known), sizes.repeats, after=undo)
            yield timed(f"store {sizes.new} new tokens on a long sequence{name}", sample, target=target,
                        floors=floors, floor=machine.FANCY)


def evicting(sizes: Sizes, floors: Floors) -> Iterator[Row]:
    """One page among many tails, when a request is short of one."""
    books = with_tails(sizes.tails, sizes)
    n = min(sizes.repeats * 4, sizes.tails // 2)
    freed = []
    with settled():
        sample = measure(books.index.evict, lambda: 1, n, after=lambda: freed.append(books.pool.free))
    steps = {after - before for before, after in pairwise(freed)}
    yield timed(f"evict one page among {sizes.tails} tails", sample, target=8, floors=floors, floor=machine.HEAP)
    yield Row(name="pages freed when one is short", unit="pages", value=max(steps | {freed[0]}), target=1,
              exactly=True, note=f"the most and the least of {len(freed)} calls: {min(steps)}")


def whole_requests(sizes: Sizes) -> Iterator[Row]:
    """The agent workload: all that a request costs, and what share of its prompts was cached."""
    with settled():
        found = agents(sizes)
    name = f"whole request, {sizes.sessions} sessions x {sizes.session_turns} turns"
    plain = ", ".join(f"{one.median:.0f}" for one in found.rounds)
    note = (f"of each request the least of {sizes.rounds} rounds, whose own medians are {plain} us; admission alone "
            f"{found.admission.median:.0f} us; {found.evicted} pages evicted in a round")
    yield timed(name, found.whole, target=150, note=note)
    for part, value, target in (("mean", found.whole.mean, 250), ("p99", found.whole.p99, 1000)):
        yield Row(name=f"{name}: {part}", unit="us", value=value, target=target)
    yield Row(name=f"{name}: hit share", unit="share", value=found.hit_share, target=0.641, at_least=True,
              note=f"{found.cached_tokens} of {found.prompt_tokens} prompt tokens, {found.requests} requests")


class CountingGroup(SoloGroup):
    """One rank that counts the collectives it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.started = 0

    def start(self, ballot: Vector, step: int) -> Ticket:
        self.started += 1
        return super().start(ballot, step)


def collectives(sizes: Sizes) -> Iterator[Row]:
    """How many collectives a step needs: while requests wait, and when nothing does."""
    group = CountingGroup()
    cache = new_cache(64, sizes.page_size, group, heartbeat=1_000)
    rng = np.random.default_rng(8)
    busy, idle = [], []
    for i in range(100):
        request = Request(id=str(i), chain=cache.chain(tokens(rng, 2 * sizes.page_size)), output_limit=1)
        before = group.started
        ready = cache.step(Message(requests=(request,))).ready
        busy.append(group.started - before)
        for sequence in ready:
            sequence.open(sequence.prompt_tokens - sequence.committed)
            sequence.commit(sequence.prompt_tokens - sequence.committed)
            before = group.started
            cache.step()
            idle.append(group.started - before)
            sequence.finish()
    yield Row(name="collectives of a step with a waiting request", unit="collectives", value=max(busy), target=1,
              exactly=True, note=f"the least of {len(busy)} steps: {min(busy)}")
    yield Row(name="collectives of a step in which nothing waits", unit="collectives", value=max(idle), target=0,
              exactly=True, note="but for the heartbeat, one every cache.heartbeat steps")
