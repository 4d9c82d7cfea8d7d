"""Reading in on several ranks: one gate, one length, whatever each rank has where."""

from __future__ import annotations

from typing import Any

import pytest

from distkv import GroupError, Message, Sequence, StepResult
from distkv.errors import CopyFailed
from distkv.host.copies import Copy, Kind
from distkv.host.scripted import ScriptedCopies
from distkv.testing.group import SimulatedGroup
from tests.core.helpers import FINGERPRINT, prefill, request
from tests.core.test_tiers import OTHERS, A, B, config


class Group:
    """Ranks with tiers of their own, and the script of each one's copies."""

    def __init__(self, pages: tuple[int, ...] = (6, 12, 8), hosts: tuple[int, ...] = (8, 8, 8), **options: Any) -> None:
        self.copies = [ScriptedCopies() for _ in pages]
        configs = [config(n, h, **options) for n, h in zip(pages, hosts, strict=True)]
        self.group = SimulatedGroup(configs, FINGERPRINT, copies=self.copies)
        self.caches = self.group.caches

    def step(self, *requests: tuple[str, list[int]], **message: Any) -> list[StepResult]:
        self.group.begin(lambda cache: Message(requests=tuple(request(cache, *r) for r in requests), **message))
        found: list[StepResult | GroupError] = list(self.group.end())  # type: ignore[arg-type]
        self.group.check()
        self.group.check_agreed()
        results = []
        for outcome in found:
            assert isinstance(outcome, StepResult), outcome
            results.append(outcome)
            assert [s.id for s in outcome.ready] == [s.id for s in results[0].ready]
            assert [s.id for s in outcome.loading] == [s.id for s in results[0].loading]
            assert (outcome.waiting, outcome.leftover) == (results[0].waiting, results[0].leftover)
        return results

    def settle(self) -> list[StepResult]:
        for cache, copies in zip(self.caches, self.copies, strict=True):
            cache.fence()
            copies.finish_all()
        return self.step()

    def serve(self, name: str, tokens: list[int]) -> list[Sequence]:
        results = self.step((name, tokens))
        for _ in range(4):
            if results[0].ready:
                break
            results = self.settle()
        sequences = [result.ready[0] for result in results]
        for cache, sequence in zip(self.caches, sequences, strict=True):
            cache.fence()
            prefill(sequence).finish()
        self.settle()
        return sequences

    def loads(self, rank: int) -> list[Copy]:
        return [copy for copy in self.copies[rank].running if copy.kind is Kind.LOAD]

    def cached(self) -> Group:
        """A and B were served: of A rank 0 has three pages on the host, rank 1 none, rank 2 one."""
        self.serve("1", A)
        self.serve("2", B)
        books = [cache._books for cache in self.caches]
        assert [b.on_device(b.match(c.chain(A), 4)) for b, c in zip(books, self.caches, strict=True)] == [1, 4, 3]
        return self


def test_all_wait_for_the_one_that_reads() -> None:
    group = Group().cached()
    results = group.step(("3", A))
    assert [len(result.loading) for result in results] == [1, 1, 1]
    assert [len(group.loads(rank)) for rank in range(3)] == [3, 0, 1]
    group.copies[2].finish_all()
    assert not group.step()[0].ready
    group.copies[0].finish_all()
    results = group.step()
    assert [s.cached_tokens for result in results for s in result.ready] == [8, 8, 8]
    assert {s.record.host_tokens for result in results for s in result.ready} == {6}
    assert [cache.stats().loads for cache in group.caches] == [3, 0, 1]


def test_the_agreed_length_counts_both_tiers_and_gives_the_rest_back() -> None:
    """C4: a rank that has more than the agreed restorable length lets go of it at once."""
    group = Group(hosts=(2, 8, 8)).cached()  # rank 0 could keep 2 of 3 pages: 1 + 2 of 4
    before = group.caches[1].stats()
    group.step(("3", A))
    sequence = group.caches[1].running["3"]
    assert len(sequence.owned_pages) == 3 and sequence.record.agreed == 3
    stats = group.caches[1].stats()
    assert stats.pages_live == before.pages_live + 3 and stats.pages_held == 0
    assert stats.host_loading == 0
    assert [s.cached_tokens for s in group.settle()[1].ready] == [6]
    prefill(sequence)
    group.caches[1].check()


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_load_that_fails_on_one_rank(broken: int) -> None:
    """E8: all ranks take what is left and compute from the same page; what is broken cannot be matched any more."""
    group = Group().cached()
    group.step(("3", A))
    group.copies[0].doom(group.loads(0)[broken], CopyFailed("a bit fell over"))
    results = group.settle()
    assert not results[0].ready and [w.request_id for w in results[0].waiting] == []
    assert group.caches[0].waiting_ids == ("3",)
    results = group.step()
    assert [s.cached_tokens for result in results for s in result.ready] == [2 + 2 * broken] * 3
    assert {str(s.record.reason) for result in results for s in result.ready} == {"load failed"}
    stats = [cache.stats() for cache in group.caches]
    assert [s.load_failures for s in stats] == [1, 0, 0] and {s.short_read_ins for s in stats} == {1}
    assert group.caches[0].peek(group.caches[0].chain(A)) == 1 + broken
    assert group.caches[1].peek(group.caches[1].chain(A)) == 4
    for cache, result in zip(group.caches, results, strict=True):
        prefill(result.ready[0]).finish()
        cache.check()
    group.settle()
    assert group.serve("4", A)[0].cached_tokens == 8, "computed again, stored again"


def test_a_load_that_takes_too_long() -> None:
    """It is over for the request; its pages are in use until it has really ended."""
    group = Group().cached()
    group.step(("3", A))
    slow = group.loads(0)[1]
    group.copies[0].stall(slow)
    group.copies[0].expire(slow)
    group.settle()
    results = group.step()
    assert [s.cached_tokens for s in (r.ready[0] for r in results)] == [4, 4, 4]
    assert group.caches[0].stats().copies_in_flight == 1
    assert slow.device not in results[0].ready[0].owned_pages
    for result in results:
        prefill(result.ready[0]).finish()
    group.copies[0].release(slow)
    group.settle()
    stats = group.caches[0].stats()
    assert (stats.copies_in_flight, stats.pages_live, stats.host_loading) == (0, 0, 0)


def test_who_shares_the_pages_waits_for_them() -> None:
    """Agreed on every rank, also where nothing is read; nobody overtakes; nothing is loaded twice."""
    group = Group(pages=(16, 20, 18), hosts=(8, 8, 8))
    for name, tokens in (("1", A), ("2", B), *((str(i + 3), t) for i, t in enumerate(OTHERS[:4]))):
        group.serve(name, tokens)
    books = group.caches[0]._books
    assert books.on_device(books.match(group.caches[0].chain(A), 4)) < 4
    results = group.step(("x", A))
    assert [s.id for s in results[1].loading] == ["x"]
    loads = len(group.loads(0))
    results = group.step(("y", [*A, 1]), ("z", OTHERS[0][:1]))
    assert [(w.request_id, w.why) for w in results[1].waiting] == [("y", "being read in"), ("z", "behind it")]
    assert len(group.loads(0)) == loads
    assert [s.id for s in group.settle()[2].ready] == ["x"]
    results = group.step()
    assert [s.id for s in results[0].ready] == ["y", "z"] and results[0].ready[0].cached_tokens == 8


def test_two_of_one_ballot_read_nothing_twice() -> None:
    """The second waits for the first one's load, and so does who comes behind it; on every rank."""
    group = Group(pages=(16, 20, 18))
    group.serve("1", A)
    for cache in group.caches[:2]:
        cache._books.index.evict(16)
    group.settle()
    results = group.step(("x", A), ("y", [*A, 1]), ("z", OTHERS[0][:1]))
    assert [(w.request_id, w.why) for w in results[2].waiting] == [("y", "being read in"), ("z", "behind it")]
    assert [len(group.loads(rank)) for rank in range(3)] == [4, 4, 0]
    assert [cache.stats().pages_held for cache in group.caches] == [0, 0, 0]
    assert [s.id for s in group.settle()[0].ready] == ["x"]
    assert [(s.id, s.cached_tokens) for s in group.step()[1].ready] == [("y", 8), ("z", 0)]


def test_an_abort_of_what_is_read_in() -> None:
    group = Group().cached()
    group.step(("3", A))
    loads = group.loads(0)
    group.step(aborts=("3",))
    assert [cache.stats().pages_live for cache in group.caches] == [3, 0, 1], "those that copies still write"
    for copies in group.copies:
        copies.finish_all()
    group.step()
    assert [cache.stats().pages_live for cache in group.caches] == [0, 0, 0] and all(copy.ended for copy in loads)
    assert group.serve("4", A)[0].cached_tokens == 8


def test_a_rank_that_finds_it_not_worth_its_time() -> None:
    group = Group().cached()
    group.copies[2].page_s = 1.0
    group.caches[2].prefill_took(1000, 0.001)
    group.step(("3", A))
    assert [len(group.loads(rank)) for rank in range(3)] == [2, 0, 0], "what it does not load is loaded on no rank"
    assert [s.cached_tokens for result in group.settle() for s in result.ready] == [6, 6, 6]


def test_more_read_ins_than_a_ballot_has_slots_for() -> None:
    group = Group((30, 30), (40, 40), host={"loading_slots": 1})
    for i, tokens in enumerate(OTHERS):
        group.serve(str(i), tokens)
    for cache in group.caches:
        assert cache._books.index.evict(20) == 20
    group.settle()
    wanted = [(f"r{i}", OTHERS[i]) for i in range(4)]
    results = group.step(*wanted)
    assert len(results[0].loading) == 4
    order = []
    for _ in range(4):
        order += [s.id for s in group.settle()[1].ready]
    assert order == ["r0", "r1", "r2", "r3"], "one a step, in order of admission"


@pytest.mark.parametrize("call", ["reset", "bump"])
def test_a_reset_while_pages_are_read_in(call: str) -> None:
    """The request waits again on every rank, ahead of the others, and computes everything."""
    group = Group(pages=(12, 14, 12))
    group.serve("1", A)
    for cache in group.caches:
        cache._books.index.evict(12)
    group.settle()
    group.step(("3", A), ("4", OTHERS[0]))
    assert [s.id for s in group.caches[0].running.values() if s.read_in_progress] == ["3"]
    sequence = group.caches[0].running["3"]
    group.group.begin(lambda cache: Message())
    for cache in group.caches:
        cache.reset() if call == "reset" else cache.bump("2")
    assert sequence.ended == "put back"
    outcomes = group.group.end()
    assert all(isinstance(outcome, StepResult) and not outcome.ready for outcome in outcomes)
    group.group.check()
    results = group.settle()
    assert [(s.id, s.cached_tokens) for s in results[2].ready] == [("3", 0)]


def beside_a_large_one() -> tuple[Group, list[Sequence]]:
    """Two ranks that prefetch, all that they have on the host, and a sequence that takes 10 pages of 16."""
    group = Group(pages=(16, 16), hosts=(16, 16), host={"prefetch": True})
    for i, tokens in enumerate((A, B, *OTHERS[:3])):
        group.serve(str(i), tokens)
    for cache in group.caches:
        cache._books.index.evict(16)
    group.settle()
    return group, [result.ready[0] for result in group.step(("big", [7] * 19))]


def test_prefetch_while_a_request_waits() -> None:
    """What the first of the queue needs stays free; the second's pages are there when its turn comes."""
    group, running = beside_a_large_one()
    group.step(("huge", [8] * 20), ("next", A))
    assert not group.loads(0)
    group.step()
    assert [len(group.loads(rank)) for rank in range(2)] == [4, 4]
    stats = group.caches[0].stats()
    assert (stats.prefetched, stats.pages_live) == (4, 4)
    for copies in group.copies:
        copies.finish_all()
    group.step()
    assert group.caches[0].stats().pages_live == 0, "cached pages again, on the device"
    for sequence in running:
        sequence.abort()
    results = group.step()
    assert [(s.id, s.cached_tokens, s.record.host_tokens) for s in results[0].ready] == [("huge", 0, 0), ("next", 8, 0)]


def test_prefetched_pages_may_come_in_any_order() -> None:
    """A page that is there before the one ahead of it is kept, not loaded again."""
    group = Group(pages=(16,), hosts=(16,), host={"prefetch": True})
    group.serve("1", A)
    group.caches[0]._books.index.evict(16)
    group.settle()
    (running,) = group.step(("big", [7] * 19))[0].ready
    group.step(("huge", [8] * 20), ("next", A))
    group.step()
    loads = group.loads(0)
    for copy in reversed(loads):
        group.copies[0].finish(copy)
        group.step()
    stats = group.caches[0].stats()
    assert (stats.loads, stats.prefetched, stats.pages_live) == (4, 4, 0)
    books = group.caches[0]._books
    assert books.on_device(books.match(group.caches[0].chain(A), 4)) == 4
    running.abort()


def test_a_prefetch_under_way_is_taken_over() -> None:
    """The request's turn comes before its pages have: nothing is loaded twice."""
    group, running = beside_a_large_one()
    group.step(("large", [8] * 14), ("next", A))
    group.step()
    loads = group.loads(0)
    for sequence in running:
        sequence.abort()
    results = group.step()
    assert [s.id for s in results[0].ready] == ["large"] and [s.id for s in results[0].loading] == ["next"]
    assert group.loads(0) == loads
    assert {copy.device for copy in loads} <= set(results[0].loading[0].owned_pages.tolist())
    assert [(s.id, s.cached_tokens) for s in group.settle()[0].ready] == [("next", 8)]
