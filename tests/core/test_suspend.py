"""Suspension and growth: what a sequence leaves behind, how it goes on, and who has to make place for whom."""

from __future__ import annotations

import pytest

from distkv import Message, NoRoom, SequenceError
from distkv.host.copies import Kind
from tests.core.helpers import admit, prefill, request, solo
from tests.core.test_read_in import Group
from tests.core.test_tiers import OTHERS, A, B, C, Tiers


def test_a_suspended_sequence_comes_back_where_it_was() -> None:
    """F4: generated tokens count as prompt; only the last, partial page is computed again."""
    tiers = Tiers(pages=8, host={"preemption_pages": 4})
    sequence = prefill(tiers.ready("1", A, output_limit=6))
    sequence.append([1, 2])
    sequence.open(1)
    sequence.commit(1)
    rest = sequence.suspend()
    tiers.cache.check()
    assert sequence.ended == "suspended" and not tiers.cache.running
    assert rest.chain.tokens.tolist() == [*A, 1, 2] and rest.output_limit == 4
    assert dict(tiers.cache.suspended) == {"1": rest}
    stats = tiers.cache.stats()
    assert (stats.suspended, stats.host_kept, stats.pages_free) == (1, 0, 3), "five pages do not fit into a share of 4"
    tiers.cache.resume("1")
    (again,) = tiers.cache.step().ready
    assert (again.id, again.cached_tokens, again.prompt_tokens) == ("1", 10, 11)
    assert again.reserved == 3, "15 tokens in all, as before"
    prefill(again).finish()
    tiers.settle()


def test_its_pages_move_to_their_share() -> None:
    tiers = Tiers(pages=8, hosts=8, host={"preemption_pages": 5})
    tiers.cache.step()
    rest = prefill(tiers.ready("1", A, output_limit=6)).suspend()
    stats = tiers.cache.stats()
    assert (stats.host_kept, stats.pages_free, stats.host_storing) == (4, 8, 4)
    for i, tokens in enumerate([B, C, *OTHERS]):
        tiers.serve(str(i + 2), tokens)
        assert tiers.cache.stats().host_kept == 4, "whatever else comes"
    tiers.cache.resume("1")
    tiers.cache.step()
    again = tiers.settle().ready[0]
    assert (again.cached_tokens, again.record.host_tokens, tiers.cache.stats().host_kept) == (8, 8, 0)
    assert again.chain.tokens.tolist() == rest.chain.tokens.tolist()


def test_shared_pages_stay() -> None:
    tiers = Tiers(pages=12, hosts=8, host={"preemption_pages": 4})
    tiers.serve("1", A[:5])
    first, second = tiers.ready("2", A), tiers.ready("3", [*A[:5], 1, 2, 3])
    for sequence in (first, second):
        prefill(sequence)
    first.suspend()
    tiers.cache.check()
    stats = tiers.cache.stats()
    assert (stats.host_kept, stats.stores) == (2, 2), "the two pages that the other has stay with it"
    assert second.cached_tokens == 4 and stats.pages_live == 4
    second.finish()
    tiers.settle()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_suspended_sequence_in_flight(asynchronous: bool) -> None:
    """Passes that have not retired keep the device pages; the move is decided all the same."""
    tiers = Tiers(pages=8, hosts=8, host={"preemption_pages": 4}, asynchronous=asynchronous)
    sequence = prefill(tiers.ready("1", A))
    sequence.suspend()
    tiers.cache.check()
    stats = tiers.cache.stats()
    assert (stats.host_kept, stats.pages_retiring) == (4, 5 if asynchronous else 0)
    tiers.cache.retired(tiers.cache.steps)
    tiers.cache.check()
    assert tiers.cache.stats().pages_free == 8


def test_what_is_not_kept_is_computed_again() -> None:
    """No share, no write, an older epoch: nothing is lost but time."""
    for options, act in (({}, None), ({"write": False}, None), ({}, "bump")):
        tiers = Tiers(pages=6, hosts=4)
        sequence = prefill(tiers.ready("1", A, output_limit=2, **options))
        if act:
            tiers.cache.bump("2")
        sequence.suspend()
        for i, tokens in enumerate([B, C, *OTHERS]):
            tiers.serve(str(i + 2), tokens)
        tiers.cache.resume("1")
        (again,) = tiers.cache.step().ready
        assert again.cached_tokens == 0
        prefill(again).finish()
        tiers.settle()


def test_an_abort_of_a_suspended_request_frees_its_share() -> None:
    tiers = Tiers(pages=8, hosts=4, host={"preemption_pages": 3})
    sequence = prefill(tiers.ready("1", A[:7]))
    sequence.suspend()
    assert tiers.cache.stats().host_kept == 3
    result = tiers.cache.step(Message(requests=(request(tiers.cache, "1", B),)))
    assert [type(r.error).__name__ for r in result.refused] == ["DuplicateRequest"], "the name is taken"
    tiers.cache.abort("1")
    tiers.cache.check()
    assert tiers.cache.stats().host_kept == 0 and not tiers.cache.suspended
    tiers.cache.resume("1")
    tiers.cache.resume("nobody")
    assert not tiers.cache.step().ready
    assert tiers.serve("1", B) == 0


def test_two_suspended_requests_share_what_the_share_holds() -> None:
    """The second finds it full and keeps nothing; what the first keeps is untouched."""
    tiers = Tiers(pages=12, hosts=8, host={"preemption_pages": 5})
    sequences = [prefill(tiers.ready(name, tokens)) for name, tokens in (("1", A), ("2", B))]
    for sequence in sequences:
        sequence.suspend()
        tiers.cache.check()
    assert tiers.cache.stats().host_kept == 4
    for name in ("2", "1"):
        tiers.cache.resume(name)
        result = tiers.cache.step()
        ready = [*result.ready, *tiers.settle().ready]
        assert [(s.id, s.cached_tokens) for s in ready] == [(name, 8)]
        prefill(ready[0])
    assert tiers.cache.stats().host_kept == 0
    with pytest.raises(SequenceError, match="was suspended"):
        sequences[0].suspend()


def test_the_preemption_share_is_not_the_tiers() -> None:
    """The tier fills its own share and no more; a sequence that is suspended then still finds its place."""
    tiers = Tiers(pages=10, hosts=6, host={"preemption_pages": 4})
    for i, tokens in enumerate([B, C, *OTHERS]):
        tiers.serve(str(i + 2), tokens)
    stats = tiers.cache.stats()
    assert stats.host_free == 4 and stats.host_ready == 2
    prefill(tiers.ready("1", A)).suspend()
    tiers.cache.check()
    assert tiers.cache.stats().host_kept == 4


def test_growth_comes_before_requests() -> None:
    """A growing sequence that finds no room waits for the next steps, in which nobody is admitted before it."""
    cache = solo(pages=8)
    one, two = prefill(admit(cache, "1", A[:7], 0)), prefill(admit(cache, "2", B[:7], 0))
    assert not cache.grow(one, 2, wait=True), "the leftover is 0"
    with pytest.raises(NoRoom, match="1 page"):
        cache.grow(two, 1)
    result = cache.step(Message(requests=(request(cache, "3", [1]),)))
    assert (result.grown, result.to_preempt) == ((), ("2",))
    assert [(w.request_id, w.why, w.pages_short) for w in result.waiting] == [("3", "no room", 2)]
    assert not cache.grow(two, 1, wait=True), "and behind the other"
    two.suspend()
    result = cache.step()
    assert [s.id for s in result.grown] == ["1"] and one.reserved == 2
    assert [s.id for s in result.ready] == ["3"] and not result.to_preempt
    cache.resume("2", output_limit=0)
    result = cache.step()
    assert [(w.request_id, w.why) for w in result.waiting] == [("2", "no room")]
    one.finish()
    (again,) = cache.step().ready
    assert (again.id, again.cached_tokens) == ("2", 6)
    cache.check()


def test_growth_that_nothing_could_serve_is_refused() -> None:
    cache = solo(pages=8)
    one = prefill(admit(cache, "1", A[:7], 0))
    with pytest.raises(NoRoom, match="smallest pool of the group, which has 8 pages: 1 page"):
        cache.grow(one, 5, wait=True)
    assert cache.grow(one, 4, wait=True) and one.reserved == 4
    result = cache.step()
    assert not result.grown and not result.to_preempt


def test_who_is_alone_is_not_preempted() -> None:
    """Its room is still somebody's who is going: it waits for it."""
    cache = solo(pages=8, asynchronous=True)
    prefill(admit(cache, "0", C[:8], 0)).finish()
    one = prefill(admit(cache, "1", A[:7], 0))
    assert not cache.grow(one, 2, wait=True)
    assert not cache.step().to_preempt
    cache.retired(cache.steps)
    assert [s.id for s in cache.step().grown] == ["1"]


def test_an_end_while_it_waits_to_grow() -> None:
    cache = solo(pages=8)
    one, two = prefill(admit(cache, "1", A[:7], 0)), prefill(admit(cache, "2", B[:7], 0))
    assert not cache.grow(one, 2, wait=True)
    assert not cache.grow(two, 1, wait=True)
    cache.begin_step()
    one.abort()
    result = cache.end_step()
    assert not result.grown
    assert [s.id for s in cache.step().grown] == ["2"]
    cache.check()


def test_resumed_in_flight_on_one_rank_and_after_it_on_another() -> None:
    """The place in the queue is the same: behind what the step put back is nobody, whatever came first."""
    group = Group(pages=(12, 12), hosts=(8, 8), host={"preemption_pages": 4})
    group.serve("a", A)
    for cache in group.caches:
        cache._books.index.evict(12)
    group.settle()
    results = group.step(("1", B[:5]), ("2", A))
    assert [s.id for s in results[0].loading] == ["2"]
    for cache in group.caches:
        prefill(cache.running["1"]).suspend()
    for copies in group.copies:
        for copy in copies.running:
            if copy.kind is Kind.LOAD:
                copies.doom(copy)
        copies.finish_all()
    group.group.begin(lambda cache: Message())
    group.caches[0].resume("1")
    outcomes = group.group.end()
    group.caches[1].resume("1")
    group.group.check()
    assert all(not outcome.ready for outcome in outcomes)  # type: ignore[union-attr]
    assert group.caches[0].waiting_ids == group.caches[1].waiting_ids == ("1", "2")
    results = group.step()
    assert [s.id for s in (*results[0].loading, *results[0].ready)] == ["1", "2"]
