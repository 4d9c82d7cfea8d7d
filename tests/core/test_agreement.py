"""Several ranks in one process: the step, failures that end it, and failures that end the group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from torch.distributed import ProcessGroup

from distkv import (
    CacheConfig,
    Config,
    DistKVError,
    Fingerprint,
    GroupDivergence,
    GroupError,
    GroupMismatch,
    GroupTimeout,
    LocalGroup,
    Message,
    MessageError,
    PeerFailed,
    PeerLost,
    PoolConfig,
    PrefixCache,
    Reason,
    Request,
    SequenceError,
    Span,
    StepResult,
)
from distkv.group import Group
from distkv.testing.group import InjectedFault, SimulatedGroup
from tests.core.helpers import FINGERPRINT, config, prefill, request, serve, solo

LONG = list(range(100, 140))


def group_of(n: int = 3, pages: list[int] | None = None, **cache: Any) -> SimulatedGroup:
    return SimulatedGroup([config(pages[r] if pages else 16, **cache) for r in range(n)], FINGERPRINT)


def step(group: SimulatedGroup, **message: Any) -> list[StepResult | GroupError]:
    """``requests`` are given as (id, tokens, output limit)."""
    wanted = message.pop("requests", ())
    group.begin(lambda cache: Message(requests=tuple(request(cache, *r) for r in wanted), **message))
    found = group.end()
    group.check()
    return found


def admitted(group: SimulatedGroup, *requests: Any) -> list[StepResult]:
    found = step(group, requests=requests)
    for outcome in found:
        assert isinstance(outcome, StepResult), outcome
        assert [s.id for s in outcome.ready] == [r[0] for r in requests]
    group.check_agreed()
    return found  # type: ignore[return-value]


def store(group: SimulatedGroup, request_id: str, tokens: list[int]) -> None:
    admitted(group, (request_id, tokens))
    group.each(lambda cache: prefill(cache.running[request_id]).finish())


# ---- what is agreed


def test_the_group_uses_what_all_have_and_gives_the_rest_back() -> None:
    """C4: rank 1 lost two pages of four; all use two, and the surplus is nobody's."""
    group = group_of()
    store(group, "1", LONG[:8])
    books = group.caches[1]._books
    pages = books.match(group.caches[1].chain(LONG[:8]), 4).pages
    books.index.drop(int(pages[2]))
    results = admitted(group, ("2", LONG[:9]))
    assert [r.ready[0].cached_tokens for r in results] == [4, 4, 4]
    records = [r.ready[0].record for r in results]
    assert [(r.matched, r.agreed) for r in records] == [(4, 2), (2, 2), (4, 2)]
    assert [r.reason for r in records] == [Reason.GROUP_MINIMUM, Reason.EVICTED, Reason.GROUP_MINIMUM]
    assert [cache.stats().pages_live for cache in group.caches] == [2, 2, 2]
    group.each(lambda cache: prefill(cache.running["2"]).finish())
    group.check()
    assert [r.ready[0].cached_tokens for r in admitted(group, ("3", LONG[:9]))] == [8, 8, 8], "rank 1 is healed"


def test_unequal_pools_admit_by_the_smallest() -> None:
    group = group_of(pages=[16, 6, 9])
    assert [cache.pool_pages for cache in group.caches] == [6, 6, 6]
    for outcome in step(group, requests=[("a", LONG[:13]), ("b", LONG[:8]), ("c", [1] * 5)]):
        assert isinstance(outcome, StepResult)
        assert [r.request_id for r in outcome.refused] == ["a"]
        assert [s.id for s in outcome.ready] == ["b"]
        assert [(w.request_id, w.why, w.pages_short) for w in outcome.waiting] == [("c", "no room", 1)]
        assert outcome.leftover == 2
    group.check_agreed()


def test_the_queue_is_strictly_in_order() -> None:
    """A small request behind a large one waits, however much room there is for it; and only K are looked at."""
    group = group_of(queue_slots=2)
    admitted(group, ("0", LONG[:20]))
    requests = [("a", LONG[:14]), ("b", [1]), ("c", [2])]
    for outcome in step(group, requests=requests):
        assert isinstance(outcome, StepResult)
        assert outcome.ready == ()
        assert [(w.request_id, w.why, w.pages_short) for w in outcome.waiting] == [
            ("a", "no room", 1), ("b", "behind it", 0)]
    assert group.caches[0].waiting_ids == ("a", "b", "c")
    group.each(lambda cache: cache.abort("0"))
    for outcome in step(group):
        assert isinstance(outcome, StepResult)
        assert [s.id for s in outcome.ready] == ["a", "b"], "as many as were looked at"
    assert [[s.id for s in r.ready] for r in step(group)] == [["c"]] * 3  # type: ignore[union-attr]


def test_what_was_in_the_way_is_aborted_while_the_ballot_is_in_flight() -> None:
    group = group_of(queue_slots=2)
    admitted(group, ("0", LONG[:20]))
    step(group, requests=[("a", LONG[:14]), ("b", [1]), ("c", [2])])
    group.begin(lambda cache: Message())
    group.each(lambda cache: cache.abort("a"))
    for outcome in group.end():
        assert isinstance(outcome, StepResult)
        assert [(w.request_id, w.why, w.pages_short) for w in outcome.waiting] == [
            ("b", "behind it", 0)]
    assert [[s.id for s in r.ready] for r in step(group)] == [["b", "c"]] * 3  # type: ignore[union-attr]


def test_rank_zero_caps_the_others() -> None:
    group = group_of(2)
    store(group, "1", LONG[:8])
    group.begin(lambda cache: Message(requests=(
        Request(id="2", chain=cache.chain(LONG[:9]), output_limit=0, matched_cap=1),)))
    assert [r.ready[0].cached_tokens for r in group.end()] == [2, 2]  # type: ignore[union-attr]


# ---- how often there is a collective


class Counting(Group):
    """Counts the collectives of the group behind it."""

    def __init__(self, behind: Group) -> None:
        self.behind, self.rank, self.size = behind, behind.rank, behind.size
        self.started: list[int] = []
        self.exchanges = 0

    def exchange(self, data: bytes) -> list[bytes]:
        self.exchanges += 1
        return self.behind.exchange(data)

    def start(self, vector: np.ndarray, step: int) -> Any:
        self.started.append(step)
        assert vector.dtype == np.int64
        self.sizes = {*getattr(self, "sizes", ()), len(vector)}
        return self.behind.start(vector, step)


def test_one_collective_a_step_or_none() -> None:
    (member,) = LocalGroup.make(1)
    counting = Counting(member)
    cache = PrefixCache(config(pages=4, heartbeat=5, queue_slots=3), FINGERPRINT, counting)
    assert counting.exchanges == 1
    for _ in range(12):
        assert not cache.step().collective, "there is nobody else"
    assert counting.started == [5, 10]
    cache.step(Message(requests=(request(cache, "1", LONG[:8]), request(cache, "2", [1]))))  # 13
    cache.step()  # 14: one waits
    prefill(cache.running["1"]).finish()
    assert len(cache.step().ready) == 1  # 15
    for _ in range(4):
        cache.step(Message(aborts=("nobody",), reset=True))  # 16 .. 19: needs no agreement
    cache.step()  # 20: five steps after the last
    assert counting.started == [5, 10, 13, 14, 15, 20]
    assert counting.sizes == {4 + 3 * 3 + 2 * 8}
    assert (cache.stats().steps, cache.stats().collectives) == (20, 0)
    assert counting.exchanges == 1


def test_collectives_are_counted_where_there_are_others() -> None:
    group = SimulatedGroup([config(heartbeat=5)] * 2, FINGERPRINT)
    for number in range(1, 13):
        wanted = number % 5 == 0 or number == 12
        requests = [("1", LONG[:5])] if number == 12 else []
        assert [outcome.collective for outcome in step(group, requests=requests)] == [wanted] * 2  # type: ignore[union-attr]
    assert [cache.stats().collectives for cache in group.caches] == [3, 3]


# ---- PeerFailed


@pytest.mark.parametrize("ranks", [[0], [2], [1, 2]])
@pytest.mark.parametrize("after", [0, 1])
def test_a_fault_in_begin_ends_the_step_only(ranks: list[int], after: int) -> None:
    group = group_of()
    store(group, "1", LONG[:8])
    for rank in ranks:
        group.fail_next_begin(rank, after)
    outcomes = step(group, requests=[("2", LONG[:9]), ("3", LONG[:7])])
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, PeerFailed)
        assert (outcome.failed_rank, outcome.rank, outcome.step) == (ranks[0], rank, 2)
        assert isinstance(outcome.__cause__, InjectedFault if rank in ranks else type(None))
    group.check_agreed()
    for cache in group.caches:
        assert (cache.stats().pages_held, cache.leftover, cache.waiting_ids) == (0, 0, ("2", "3"))
        assert cache.stats().peer_failures == 1
    results = step(group)
    assert [[s.cached_tokens for s in r.ready] for r in results] == [[8, 6]] * 3  # type: ignore[union-attr]
    group.check_agreed()


def test_a_fault_of_a_group_of_one() -> None:
    group = group_of(1)
    group.fail_next_begin(0)
    (outcome,) = step(group, requests=[("1", LONG[:5])])
    assert isinstance(outcome, PeerFailed)
    assert [r.ready[0].id for r in step(group)] == ["1"]  # type: ignore[union-attr]


def fail_once(cache: PrefixCache, call: str) -> None:
    """The next use of this call of the agreement raises, before it has done anything."""
    def failing(*_: Any) -> None:
        delattr(cache._agreement, call)
        raise InjectedFault("planted")

    setattr(cache._agreement, call, failing)


def test_a_message_that_cannot_be_applied_on_any_rank_ends_the_step_only() -> None:
    group = group_of()
    group.each(lambda cache: fail_once(cache, "submit"))
    for outcome in step(group, requests=[("1", [1])]):
        assert isinstance(outcome, PeerFailed)
        assert outcome.failed_rank == 0
        assert isinstance(outcome.__cause__, InjectedFault)
    group.check()
    group.check_agreed()
    assert [[s.id for s in r.ready] for r in step(group, requests=[("2", [1])])] == [["2"]] * 3  # type: ignore[union-attr]


def test_a_message_that_cannot_be_applied_on_one_rank_is_told_and_then_seen() -> None:
    """PeerFailed names the rank; what it missed is a difference of histories, which the next ballot finds."""
    group = group_of()
    fail_once(group.caches[1], "submit")
    for rank, outcome in enumerate(step(group, requests=[("1", [1])])):
        assert isinstance(outcome, PeerFailed)
        assert (outcome.failed_rank, rank == 1) == (1, isinstance(outcome.__cause__, InjectedFault))
    group.check()
    assert all(isinstance(outcome, GroupDivergence) for outcome in step(group)), "and nobody waits for rank 1 in vain"


def test_a_fault_in_a_step_without_a_collective_is_voted_in_the_next_that_has_one() -> None:
    group = group_of(heartbeat=64)
    group.each(lambda cache: fail_once(cache, "abort"))
    group.begin(lambda cache: Message(aborts=("5",)))
    assert all(isinstance(outcome, StepResult) and not outcome.collective for outcome in group.end())
    for outcome in step(group, requests=[("1", [1])]):
        assert isinstance(outcome, PeerFailed)
        assert isinstance(outcome.__cause__, InjectedFault)
    assert [[s.id for s in r.ready] for r in step(group)] == [["1"]] * 3  # type: ignore[union-attr]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_begin_leaves_nothing_held(error: type[BaseException]) -> None:
    """It is not a fault to be voted on: it is raised at once, and the rank can go on or close."""
    cache = solo()
    serve(cache, "1", LONG[:7])
    honest, left = cache._books.match, [1]

    def interrupted(*arguments: Any) -> Any:
        if not left:
            raise error
        left.pop()
        return honest(*arguments)

    cache._books.match = interrupted  # type: ignore[method-assign]
    with pytest.raises(error):
        cache.begin_step(Message(requests=(request(cache, "2", LONG[:7]), request(cache, "3", LONG[:7]))))
    del cache._books.match  # type: ignore[method-assign]
    cache.check()
    assert (cache.stats().pages_held, cache.waiting_ids) == (0, ("2", "3"))
    with pytest.raises(SequenceError):
        cache.end_step()
    assert [s.cached_tokens for s in cache.step().ready] == [6, 6]
    cache.close()
    cache.check()


class Interrupted(Group):
    """A transport that is interrupted: when it starts, or while it waits."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.when = ""

    def exchange(self, data: bytes) -> list[bytes]:
        return [data]

    def start(self, vector: np.ndarray, step: int) -> Any:
        self.vector = vector
        if self.when == "start":
            raise KeyboardInterrupt
        return self

    def wait(self) -> np.ndarray:
        if self.when == "wait":
            raise KeyboardInterrupt
        return self.vector


@pytest.mark.parametrize("when", ["start", "wait"])
def test_an_interrupt_in_the_collective_leaves_nothing_held(when: str) -> None:
    transport = Interrupted()
    cache = PrefixCache(config(), FINGERPRINT, transport)
    serve(cache, "1", LONG[:7])
    transport.when = when
    with pytest.raises(KeyboardInterrupt):
        cache.step(Message(requests=(request(cache, "2", LONG[:7]),)))
    cache.check()
    assert cache.stats().pages_held == 0
    transport.when = ""
    assert [s.cached_tokens for s in cache.step().ready] == [6]
    cache.check()


# ---- GroupDivergence


def tail_with(span_digest: bytes) -> Callable[[PrefixCache], Request]:
    return lambda cache: request(cache, "n", [1, 2, 3], spans=[Span(2, 1, span_digest)])


CALLS: dict[str, tuple[Callable[[PrefixCache], object], Callable[[PrefixCache], object]]] = {
    "open": (lambda c: c.running["r"].open(1), lambda c: None),
    "open another number": (lambda c: c.running["r"].open(1), lambda c: c.running["r"].open(2)),
    "append": (lambda c: c.running["r"].append([1]), lambda c: None),
    "append other ids": (lambda c: c.running["r"].append([1]), lambda c: c.running["r"].append([2])),
    "append in two calls": (lambda c: c.running["r"].append([1, 2]),
                            lambda c: (c.running["r"].append([1]), c.running["r"].append([2]))),
    "commit": (lambda c: c.running["d"].commit(1), lambda c: None),
    "truncate": (lambda c: c.running["d"].truncate(1), lambda c: None),
    "finish": (lambda c: c.running["r"].finish(), lambda c: None),
    "finish or abort": (lambda c: c.running["r"].finish(), lambda c: c.running["r"].abort()),
    "finish another": (lambda c: c.running["r"].finish(), lambda c: c.running["d"].finish()),
    "abort": (lambda c: c.abort("r"), lambda c: None),
    "abort of what is unknown": (lambda c: c.abort("x"), lambda c: None),
    "abort of what waits": (lambda c: c.abort("w"), lambda c: None),
    "grow": (lambda c: c.grow(c.running["r"], 1), lambda c: None),
    "grow by another number": (lambda c: c.grow(c.running["r"], 1), lambda c: c.grow(c.running["r"], 2)),
    "reset": (lambda c: c.reset(), lambda c: None),
    "bump": (lambda c: c.bump("2"), lambda c: None),
    "bump to another version": (lambda c: c.bump("2"), lambda c: c.bump("3")),
    "reset or bump to nothing": (lambda c: c.reset(), lambda c: c.bump("")),
    "submit": (lambda c: c.submit(request(c, "n", [1])), lambda c: None),
    "submit another id": (lambda c: c.submit(request(c, "n", [1])), lambda c: c.submit(request(c, "m", [1]))),
    "submit other tokens": (lambda c: c.submit(request(c, "n", [1, 2, 3])),
                            lambda c: c.submit(request(c, "n", [1, 2, 4]))),
    "submit other early tokens": (lambda c: c.submit(request(c, "n", [1, 2, 3])),
                                  lambda c: c.submit(request(c, "n", [0, 2, 3]))),
    "submit another salt": (lambda c: c.submit(request(c, "n", [1])),
                            lambda c: c.submit(request(c, "n", [1], salt="s"))),
    "submit another limit": (lambda c: c.submit(request(c, "n", [1], 1)), lambda c: c.submit(request(c, "n", [1], 5))),
    "submit without reading": (lambda c: c.submit(request(c, "n", LONG[:5])),
                               lambda c: c.submit(request(c, "n", LONG[:5], read=False))),
    "submit without writing": (lambda c: c.submit(request(c, "n", [1])),
                               lambda c: c.submit(request(c, "n", [1], write=False))),
    "submit other media at the end": (lambda c: c.submit(tail_with(b"1" * 16)(c)),
                                      lambda c: c.submit(tail_with(b"2" * 16)(c))),
    "another order": (lambda c: (c.running["r"].append([1]), c.running["d"].append([1])),
                      lambda c: (c.running["d"].append([1]), c.running["r"].append([1]))),
}


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(("call", "in_flight"), [
    (call, in_flight) for call in CALLS for in_flight in (False, True)
    if not (in_flight and call.startswith("grow"))  # nothing can grow while a ballot is in flight
])
def test_a_call_that_one_rank_does_not_make_is_seen_by_all(call: str, odd: int, in_flight: bool) -> None:
    group = group_of(3, pages=[24, 24, 24], heartbeat=1)
    admitted(group, ("r", LONG[:6], 10), ("d", [7] * 3, 9))
    group.each(lambda cache: [prefill(s) for s in cache.running.values()])
    group.each(lambda cache: (cache.running["d"].append([7]), cache.running["d"].open(1)))
    if call == "abort of what waits":
        step(group, requests=[("w", [1] * 40)])
    right, wrong = CALLS[call]

    def make() -> None:
        for rank, cache in enumerate(group.caches):
            (wrong if rank == odd else right)(cache)

    if in_flight:
        group.begin(lambda cache: Message())
        make()
        assert all(isinstance(outcome, StepResult) for outcome in group.end())
    else:
        make()
    outcomes = step(group)
    assert [type(outcome) for outcome in outcomes] == [GroupDivergence] * 3
    compared = [str(outcomes[rank]).rpartition(": ")[2].split("; ") for rank in (odd, 1)]
    assert compared[0] != compared[1] == str(outcomes[2 - odd]).rpartition(": ")[2].split("; ")
    for rank, cache in enumerate(group.caches):
        assert (outcomes[rank].rank, outcomes[rank].step) == (rank, cache.stats().steps)  # type: ignore[union-attr]
        for again in (cache.step, cache.begin_step, cache.end_step):
            with pytest.raises(GroupDivergence) as caught:
                again()
            assert caught.value is outcomes[rank]
        cache.close()
        cache.check()
        assert cache.stats().pages_live == cache.stats().pages_held == 0


def test_a_divergence_names_the_first_call_that_differs() -> None:
    """Two ranks' texts side by side: the same up to it, and from there on no digest that the other has."""
    group = group_of(2, heartbeat=1)
    admitted(group, ("first", LONG[:6], 4), ("second", [7] * 3, 4))
    group.each(lambda cache: [prefill(s) for s in cache.running.values()])
    group.each(lambda cache: cache.running["first"].finish())
    for cache, token in zip(group.caches, (5, 6), strict=True):
        cache.running["second"].append([token])
    outcomes = step(group)
    texts = [outcome.calls.split("; ") for outcome in outcomes]  # type: ignore[union-attr]
    differ = [mine != other for mine, other in zip(*texts, strict=True)]
    first = differ.index(True)
    assert all(differ[first:])
    assert not any(differ[:first])
    assert [line.rpartition(" ")[0] for line in texts[0][:first + 1]] == [
        "submit first 5 6", "submit second 4 3", "step 1 0", "open first 6", "commit first 6", "open second 3",
        "commit second 3", "finish first", "append second"]
    assert f"[digest] by [digest]: {'; '.join(texts[1])}" in str(outcomes[1])


def test_an_epoch_that_reaches_the_ranks_on_different_sides_of_a_step() -> None:
    """Then some would use the matches of the ballot in flight, and some not."""
    group = group_of(2)
    store(group, "1", LONG[:8])
    group.begin(lambda cache: Message(requests=(request(cache, "2", LONG[:9]),)))
    group.caches[0].reset()
    group.end()
    group.caches[1].reset()
    assert all(isinstance(outcome, GroupDivergence) for outcome in step(group, requests=[("3", [1])]))


def test_an_abort_may_reach_the_ranks_on_different_sides_of_a_step() -> None:
    group = group_of(2)
    group.begin(lambda cache: Message(requests=(request(cache, "1", LONG[:9]), request(cache, "2", [1]))))
    group.caches[0].abort("1")
    group.end()
    group.caches[1].abort("1")
    group.check()
    group.check_agreed()
    admitted(group, ("3", [1]))


# ---- GroupMismatch


def start(configs: list[Config], fingerprints: list[Fingerprint] | None = None,
          hashes: list[Any] | None = None) -> list[PrefixCache | BaseException]:
    """A thread per rank; what each constructor gave or raised."""
    members = LocalGroup.make(len(configs), timeout_s=20)
    found: list[Any] = [None] * len(configs)

    def run(rank: int) -> None:
        try:
            fingerprint = fingerprints[rank] if fingerprints else FINGERPRINT
            found[rank] = PrefixCache(configs[rank], fingerprint, members[rank],
                                      hash64=hashes[rank] if hashes else None)
        except DistKVError as error:
            found[rank] = error

    in_threads(len(configs), run)
    return found


def in_threads(n: int, run: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"


def mixed(**cache: Any) -> list[Config]:
    return [config(), Config(cache=CacheConfig(**{"page_size": 2, **cache}), pool=PoolConfig(pages=16)), config()]


@pytest.mark.parametrize(("configs", "field", "values"), [
    (mixed(page_size=4), "cache.page_size", ("2", "4")),
    (mixed(index_on="fill"), "cache.index_on", ("finish", "fill")),
    (mixed(queue_slots=9), "cache.queue_slots", ("8", "9")),
    (mixed(heartbeat=9), "cache.heartbeat", ("64", "9")),
    (mixed(key_function="xxh64"), "cache.key_function", ("xxh3_64", "xxh64")),
    (mixed(asynchronous=True), "cache.asynchronous", ("False", "True")),
])
def test_ranks_that_are_configured_differently(configs: list[Config], field: str, values: tuple[str, str]) -> None:
    for rank, error in enumerate(start(configs)):
        assert isinstance(error, GroupMismatch)
        assert (error.rank, error.step, list(error.values)) == (rank, -1, [field])
        shown = [value.strip("\"'").lower() for value in error.values[field]]
        assert shown == [values[0].lower(), values[1].lower(), values[0].lower()]
        assert f"{field} differs (rank 0: " in str(error)
        assert "rank 1: " in str(error)


@pytest.mark.parametrize("field", list(Fingerprint.__dataclass_fields__))
def test_ranks_with_different_fingerprints(field: str) -> None:
    value = getattr(FINGERPRINT, field)
    fields = {f: getattr(FINGERPRINT, f) for f in Fingerprint.__dataclass_fields__}
    other = Fingerprint(**{**fields, field: value + 1 if isinstance(value, int) else value + "'"})
    for error in start([config()] * 2, [FINGERPRINT, other]):
        assert isinstance(error, GroupMismatch)
        assert list(error.values) == [f"fingerprint.{field}"]


def test_a_key_function_that_differs_behind_its_name() -> None:
    """B3: the probe key tells."""
    def other(data: Any, seed: int) -> int:
        return xxhash.xxh3_64_intdigest(data, seed ^ 1)

    for error in start([config()] * 3, hashes=[None, None, other]):
        assert isinstance(error, GroupMismatch)
        assert [name.split()[0] for name in error.values] == ["key"]
        (values,) = error.values.values()
        assert values[0] == values[1] != values[2]


def test_pools_may_differ() -> None:
    for cache in start([config(pages=20), config(pages=12, scratch=3), Config(
            cache=CacheConfig(page_size=2), pool=PoolConfig(pages=99, check=False))]):
        assert isinstance(cache, PrefixCache)
        assert cache.pool_pages == 9


# ---- a rank per thread


def test_ranks_in_threads() -> None:
    found = start([config(pages=p) for p in (16, 12, 20)])
    caches = [c for c in found if isinstance(c, PrefixCache)]
    cached: list[list[int]] = [[] for _ in caches]

    def run(rank: int) -> None:
        cache = caches[rank]
        for i in range(60):
            prompt = [i % 3] * (1 + i % 9) + [i % 2] * 3
            (sequence,) = cache.step(Message(requests=(request(cache, str(i), prompt),))).ready
            cached[rank].append(sequence.cached_tokens)
            prefill(sequence).finish()
            cache.step()

    in_threads(3, run)
    assert cached[0] == cached[1] == cached[2]
    assert sum(cached[0]) > 0
    for cache in caches:
        cache.check()
    meeting = caches[0]._group._meeting  # type: ignore[attr-defined]
    assert not (meeting.rounds or meeting.readers), "nothing is kept of rounds that are over"


def test_a_rank_that_leaves() -> None:
    members = LocalGroup.make(3, timeout_s=20)
    errors: list[Any] = [None] * 3
    held = [-1] * 3

    def run(rank: int) -> None:
        cache = PrefixCache(config(), FINGERPRINT, members[rank])
        serve(cache, "1", LONG[:5])
        if rank == 2:
            members[rank].leave()
            return
        for attempt in range(2):
            try:
                cache.step(Message(requests=(request(cache, f"2{attempt}", LONG[:5]),)))
            except GroupError as error:
                errors[rank] = (*(errors[rank] or ()), error)
        held[rank] = cache.stats().pages_held
        cache.check()
        cache.close()
        cache.check()

    in_threads(3, run)
    for rank in (0, 1):
        first, second = errors[rank]
        assert isinstance(first, PeerLost)
        assert first is second, "the group has ended: every later step raises the same"
        assert (first.rank, first.step) == (rank, 2)
        assert "[2]" in str(first)
        assert held[rank] == 0


def test_a_rank_that_is_late() -> None:
    members = LocalGroup.make(2, timeout_s=0.2)
    errors: list[Any] = [None]

    def run(rank: int) -> None:
        cache = PrefixCache(config(), FINGERPRINT, members[rank])
        if rank == 0:
            with pytest.raises(GroupTimeout) as caught:
                cache.step(Message(requests=(request(cache, "1", [1]),)))
            errors[0] = caught.value
            with pytest.raises(GroupTimeout):
                cache.step()
            cache.check()

    in_threads(2, run)
    assert (errors[0].rank, errors[0].step, errors[0].seconds) == (0, 1, 0.2)


def test_a_driver_that_forgets_a_rank_is_told_at_once() -> None:
    group = group_of(2)
    group.caches[0].begin_step(Message(requests=(request(group.caches[0], "1", [1]),)))
    with pytest.raises(GroupTimeout):
        group.caches[0].end_step()


# ---- calls in the wrong order


def test_begin_and_end_come_in_turn() -> None:
    group = group_of(2)
    for cache in group.caches:
        with pytest.raises(SequenceError):
            cache.end_step()
    group.begin(lambda cache: Message(requests=(request(cache, "1", LONG[:5]),)))
    for cache in group.caches:
        with pytest.raises(SequenceError):
            cache.begin_step()
        with pytest.raises(SequenceError):
            cache.step()
    assert [[s.id for s in r.ready] for r in group.end()] == [["1"]] * 2  # type: ignore[union-attr]
    for cache in group.caches:
        with pytest.raises(SequenceError):
            cache.end_step()
    group.check()
    admitted(group, ("2", [1]))


def test_what_is_no_message_changes_nothing() -> None:
    cache = solo()
    wanted = request(cache, "2", [1])
    for nothing in (None, "reset", (), wanted):
        with pytest.raises(MessageError, match=r"takes a distkv.Message"):
            cache.step(nothing)  # type: ignore[arg-type]
    for fields in ({"requests": wanted}, {"requests": (1,)}, {"aborts": "abc"}, {"aborts": (5,)},
                   {"weights_version": 2}):
        with pytest.raises(MessageError, match=next(iter(fields))):
            Message(**fields)  # type: ignore[arg-type]
    assert cache.stats().steps == 0
    serve(cache, "1", LONG[:5])


def test_what_is_no_configuration_and_no_fingerprint() -> None:
    with pytest.raises(MessageError, match=r"needs a distkv.Config, not a CacheConfig"):
        PrefixCache(CacheConfig(), FINGERPRINT)  # type: ignore[arg-type]
    with pytest.raises(MessageError, match=r"needs a distkv.Fingerprint, not a str"):
        PrefixCache(Config(), "toy")  # type: ignore[arg-type]
    with pytest.raises(MessageError, match=r"not a ProcessGroup; wrap .* in TorchGroup\(\.\.\.\)"):
        PrefixCache(Config(), FINGERPRINT, ProcessGroup(0, 1))  # type: ignore[arg-type]


def test_two_caches_after_each_other_on_one_group_compare_what_is_theirs() -> None:
    """The exchange at start is a round of its own: the second cache does not read what the first one brought."""
    members = LocalGroup.make(2, timeout_s=20)
    smallest: list[list[int]] = [[], []]

    def run(rank: int) -> None:
        for pages in (8 + rank, 80 - rank):
            cache = PrefixCache(config(pages), FINGERPRINT, members[rank])
            smallest[rank].append(cache.pool_pages)
            cache.close()

    in_threads(2, run)
    assert smallest == [[8, 79], [8, 79]]


def test_a_group_has_one_cache_at_a_time() -> None:
    (member,) = LocalGroup.make(1)
    first = PrefixCache(config(), FINGERPRINT, member)
    with pytest.raises(MessageError, match="the group has a cache already: close that one"):
        PrefixCache(config(), FINGERPRINT, member)
    first.close()
    second = PrefixCache(config(), FINGERPRINT, member)
    first.close()  # once more: the group is the second's
    with pytest.raises(MessageError, match="has a cache already"):
        PrefixCache(config(), FINGERPRINT, member)
    del second
    serve(PrefixCache(config(), FINGERPRINT, member), "1", LONG[:5])


def test_everything_between_begin_and_end() -> None:
    group = group_of(2)
    store(group, "0", LONG[:8])
    admitted(group, ("1", LONG[:5], 6))
    group.begin(lambda cache: Message(requests=(request(cache, "2", LONG[:9], 2),)))
    group.each(lambda cache: prefill(cache.running["1"]))
    group.each(lambda cache: cache.submit(request(cache, "3", [1])))
    group.each(lambda cache: cache.running["1"].finish())
    group.check()
    outcomes = group.end()
    assert [[s.cached_tokens for s in r.ready] for r in outcomes] == [[8]] * 2  # type: ignore[union-attr]
    assert [cache.waiting_ids for cache in group.caches] == [("3",)] * 2
    group.check()
    group.check_agreed()
    assert [[s.id for s in r.ready] for r in step(group)] == [["3"]] * 2  # type: ignore[union-attr]


def test_a_cap_holds_for_the_first_ballot_only() -> None:
    """Rank 0's match is from when the request was handed over; while it waits, more of it may be cached."""
    cache = solo(pages=8)
    serve(cache, "warm", LONG[:9])
    (running,) = cache.step(Message(requests=(request(cache, "runs", [9] * 8),))).ready
    capped = request(cache, "capped", LONG[:9], 1, matched_cap=1)
    assert [(w.request_id, w.pages_short) for w in cache.step(Message(requests=(capped,))).waiting] == [("capped", 1)]
    running.abort()
    (sequence,) = cache.step().ready
    assert sequence.cached_tokens == 8
    cache.check()
