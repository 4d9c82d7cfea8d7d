"""A sequence's calls: in order, out of order, beyond what was promised, and after its end."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from distkv import (
    DuplicateRequest,
    InvariantError,
    Message,
    NoRoom,
    PeerFault,
    Request,
    RequestError,
    RequestTooLarge,
    SequenceError,
)
from tests.core.helpers import Kv, admit, prefill, request, serve, solo

LONG = list(range(100, 140))


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
def test_page_table_at_every_length(page_size: int) -> None:
    """H8: (pages - 1) * page + last == len and 1 <= last <= page, token by token and all at once."""
    most = 4 * page_size + 1
    for length in range(1, most + 1):
        for at_once in (True, False):
            cache = solo(pages=8, page_size=page_size)
            sequence = admit(cache, "1", LONG[:length])
            slots: list[int] = []
            for n in [length] if at_once else [1] * length:
                slots += sequence.open(n).tolist()
                pages = len(sequence.page_indices)
                last = sequence.seq_len - (pages - 1) * page_size
                assert 1 <= last <= page_size
                assert sequence.page_indices.dtype == np.int32
            table = sequence.page_indices.tolist()
            assert slots == [table[t // page_size] * page_size + t % page_size for t in range(length)]
            assert sequence.slots(0, length).tolist() == slots
            assert len(set(table)) == pages == -(-length // page_size)
            sequence.commit(length)
            cache.check()
            sequence.finish()
            cache.check()
            assert cache.stats().entries == length // page_size


def test_the_loop_of_the_documentation() -> None:
    cache = solo(page_size=4)
    kv = Kv(4)
    sequence = admit(cache, "1", LONG[:10], output_limit=3)
    assert (sequence.position_id_start, sequence.prompt_tokens, sequence.cached_tokens) == (0, 10, 0)
    kv.opened(sequence.open(10))
    sequence.append([7])
    sequence.commit(10)
    for i, token in enumerate((8, 9)):
        assert sequence.position_id_start == 10 + i
        assert len(sequence.open(1)) == 1
        sequence.append([token])
        sequence.commit(1)
    kv.committed(sequence, 0)
    kv.expect(sequence)
    assert sequence.tokens(8, 13).tolist() == [108, 109, 7, 8, 9]
    assert sequence.tokens(11, 13).tolist() == [8, 9]
    assert sequence.tokens(2, 4).tolist() == [102, 103]
    with pytest.raises(SequenceError):
        sequence.tokens(10, 14)
    sequence.finish()
    assert sequence.chain.tokens.tolist() == [*LONG[:10], 7, 8]
    again = admit(cache, "2", sequence.chain.follow([*LONG[:10], 7, 8, 9, 1]))
    assert again.cached_tokens == 12


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (4, 9), (-1, 2), (3, 2), (0, 10**12)])
def test_slots_and_tokens_that_are_not_there(start: int, stop: int) -> None:
    """Neither the slots of pages that are promised and not opened, nor those of pages given back."""
    cache = solo()
    sequence = admit(cache, "1", LONG[:5], output_limit=9)
    sequence.open(5)
    for call in (sequence.slots, sequence.tokens):
        with pytest.raises(SequenceError):
            call(start, stop)
    assert sequence.slots(5, 5).tolist() == sequence.tokens(5, 5).tolist() == []
    sequence.abort()
    with pytest.raises(SequenceError):
        sequence.slots(0, 1)


def snapshot(cache: object, sequence: object) -> object:
    books = cache._books  # type: ignore[attr-defined]
    return (sequence.seq_len, sequence.committed, sequence.named, sequence.reserved,  # type: ignore[attr-defined]
            sequence.page_indices.tolist(), len(sequence.chain), books.reserved,  # type: ignore[attr-defined]
            books.digest, books.pool.free_ids().tolist())


@pytest.mark.parametrize(("call", "arguments"), [
    ("open", (0,)), ("open", (-1,)), ("open", (7,)), ("open", (2**40,)), ("open", (2**80,)), ("commit", (-1,)),
    ("commit", (4,)), ("commit", (2**80,)), ("truncate", (-1,)), ("truncate", (2,)), ("truncate", (2**80,)),
])
def test_calls_beyond_what_is_there_change_nothing(call: str, arguments: tuple[int, ...]) -> None:
    cache = solo()
    sequence = admit(cache, "1", LONG[:5], output_limit=4)  # 5 pages, 10 tokens
    sequence.open(4)
    sequence.commit(3)
    before = snapshot(cache, sequence)
    with pytest.raises(SequenceError):
        getattr(sequence, call)(*arguments)
    assert snapshot(cache, sequence) == before
    cache.check()


def test_commit_needs_opened_and_named_tokens() -> None:
    cache = solo()
    sequence = admit(cache, "1", LONG[:3], output_limit=5)
    sequence.open(5)
    with pytest.raises(SequenceError, match="named"):
        sequence.commit(4)
    sequence.append([1])
    sequence.commit(4)
    sequence.append([2, 3, 4])
    with pytest.raises(SequenceError, match="opened"):
        sequence.commit(2)
    sequence.commit(1)
    assert sequence.chain.tokens.tolist() == [*LONG[:3], 1, 2]


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_nothing_can_be_called_after_the_end(end: str) -> None:
    cache = solo()
    sequence = prefill(admit(cache, "1", LONG[:5], output_limit=4))
    getattr(sequence, end)()
    before = cache.stats()
    calls = {"open": (1,), "append": ([1],), "commit": (0,), "truncate": (0,), "finish": (), "abort": (),
             "suspend": (), "fork": (1,), "keep": (), "protect_prefix": (1,), "release_oldest": (1,)}
    for call, arguments in calls.items():
        with pytest.raises(SequenceError, match=r"was (finished|aborted)"):
            getattr(sequence, call)(*arguments)
    with pytest.raises(SequenceError):
        cache.grow(sequence, 0)
    cache.abort("1")
    assert cache.stats() == before
    assert not cache.running
    cache.check()
    assert {name for name, member in inspect.getmembers(type(sequence), inspect.isfunction)
            if not name.startswith("_")} == {*calls, "tokens", "slots", "pages_of"}, "a call that is not known here"


def test_reading_after_the_end() -> None:
    cache = solo()
    sequence = serve(cache, "1", LONG[:5], [1, 2, 3])
    assert (len(sequence.chain), sequence.committed, len(sequence.page_indices)) == (7, 7, 0)
    assert sequence.record.agreed == 0
    assert "finished" in repr(sequence)


@pytest.mark.parametrize("committed", range(8))
@pytest.mark.parametrize("opened", range(8))
def test_abort_at_every_point(opened: int, committed: int) -> None:
    """F3: before anything is opened, in the middle of a page, in the middle of the prompt, behind it."""
    cache = solo()
    serve(cache, "0", LONG[:2])
    sequence = admit(cache, "1", LONG[:5], output_limit=4)
    assert sequence.cached_tokens == 2
    if opened:
        sequence.append([1, 2, 3, 4])
        sequence.open(min(opened, 7))
    sequence.commit(min(committed, opened))
    sequence.abort()
    cache.check()
    stats = cache.stats()
    assert (stats.pages_live, stats.pages_reserved, stats.pages_free, stats.entries) == (0, 0, 15, 1)


def test_abort_of_what_waits() -> None:
    cache = solo(pages=4)
    blocker = admit(cache, "0", LONG[:2], output_limit=6)
    cache.step(Message(requests=(request(cache, "1", LONG[:8]), request(cache, "2", [1]))))
    assert cache.waiting_ids == ("1", "2")
    cache.abort("1")
    cache.abort("unknown")
    assert cache.waiting_ids == ("2",)
    cache.step(Message(aborts=("2", "2", "unknown")))
    assert cache.waiting_ids == ()
    blocker.finish()
    cache.check()
    assert cache.step().ready == ()


def test_abort_and_resubmission_in_one_message() -> None:
    cache = solo()
    old = admit(cache, "1", LONG[:5])
    result = cache.step(Message(aborts=("1",), requests=(request(cache, "1", LONG[:3]),)))
    assert (old.ended, [s.prompt_tokens for s in result.ready], result.refused) == ("aborted", [3], ())
    cache.check()


def test_abort_while_the_ballot_is_in_flight() -> None:
    """Admitted on paper and let go: the room it would have had goes to nobody in this step."""
    cache = solo(pages=4)
    serve(cache, "0", LONG[:2])
    cache.begin_step(Message(requests=(request(cache, "1", LONG[:8]), request(cache, "2", [1, 2]))))
    cache.abort("1")
    assert cache.waiting_ids == ("2",)
    result = cache.end_step()
    assert (result.ready, [w.request_id for w in result.waiting], result.leftover) == ((), ["2"], 0)
    cache.check()
    assert [s.id for s in cache.step().ready] == ["2"]


def test_abort_and_resubmission_while_the_ballot_is_in_flight() -> None:
    cache = solo()
    cache.begin_step(Message(requests=(request(cache, "1", LONG[:8]),)))
    cache.abort("1")
    cache.submit(request(cache, "1", [1]))
    result = cache.end_step()
    assert (result.ready, cache.waiting_ids, result.refused) == ((), ("1",), ())
    assert [s.prompt_tokens for s in cache.step().ready] == [1]
    cache.check()


def test_truncate_gives_names_and_slots_back_and_keeps_the_pages() -> None:
    cache = solo()
    sequence = prefill(admit(cache, "1", LONG[:3], output_limit=7))
    sequence.append([1, 2, 3, 4, 5])
    slots = sequence.open(5)
    before = cache.stats()
    sequence.truncate(5)
    assert (sequence.named, sequence.seq_len, len(sequence.page_indices), sequence.reserved) == (3, 3, 2, 1)
    assert cache.stats() == before, "a launched forward may still write them, and they are promised to it anyway"
    sequence.append([6, 7, 8])
    assert sequence.open(3).tolist() == slots[:3].tolist(), "the same pages are opened again"
    assert sequence.reserved == 1
    sequence.truncate(2)
    sequence.commit(1)
    with pytest.raises(SequenceError):
        sequence.truncate(1)
    assert sequence.chain.tokens.tolist() == [*LONG[:3], 6]
    cache.check()


def test_truncate_within_the_prompt_keeps_its_names() -> None:
    cache = solo()
    sequence = admit(cache, "1", LONG[:5])
    sequence.open(5)
    sequence.commit(1)
    sequence.truncate(4)
    assert (sequence.named, sequence.seq_len, len(sequence.page_indices)) == (5, 1, 1)
    prefill(sequence).finish()
    assert cache.peek(cache.chain(LONG)) == 2


def test_truncate_nothing() -> None:
    cache = solo()
    sequence = admit(cache, "1", LONG[:4], output_limit=2)
    sequence.truncate(0)
    prefill(sequence)
    sequence.append([1])
    sequence.truncate(0)
    assert sequence.named == 5, "a sampled token that is not fed yet stays named"


# ---- requests


def test_the_smallest_requests() -> None:
    cache = solo(page_size=3)
    one = prefill(admit(cache, "1", [5], output_limit=0))
    assert (one.reserved, one.seq_len) == (0, 1)
    one.append([6])
    one.open(2)
    with pytest.raises(SequenceError):
        one.open(1)
    one.finish()
    cache.check()
    assert serve(cache, "2", LONG[:3]).cached_tokens == 0
    assert serve(cache, "3", LONG[:4]).cached_tokens == 3


def test_a_prompt_that_wants_no_answer_warms_the_cache() -> None:
    cache = solo(pages=8)
    sequence = admit(cache, "1", LONG[:9], output_limit=0)
    for n in (4, 5):
        sequence.open(n)
        sequence.commit(n)
    assert (sequence.committed, sequence.named, sequence.reserved) == (9, 9, 0)
    sequence.open(1)  # the last page has a place more, and no further one was promised
    with pytest.raises(SequenceError, match=r"prompt 9 \+ limit 0"):
        sequence.open(1)
    with pytest.raises(SequenceError, match="9 are named"):
        sequence.commit(1)
    sequence.finish()
    cache.check()
    assert serve(cache, "2", LONG[:9], [1, 2]).cached_tokens == 8


@pytest.mark.parametrize("limit", [25, 2**31, 2**40, 2**63, 2**64 + 3, 2**200])
def test_a_request_that_can_never_run(limit: int) -> None:
    cache = solo(pages=16, scratch=2)
    result = cache.step(Message(requests=(request(cache, "big", LONG[:5], limit), request(cache, "small", [1]))))
    (refused,) = result.refused
    assert isinstance(refused.error, RequestTooLarge)
    assert (refused.request_id, refused.error.request_id) == ("big", "big")
    assert (refused.error.pages_possible, refused.error.pages_needed) == (14, -(-(5 + limit) // 2))
    assert "has 14 usable ones (without scratch pages)" in str(refused.error)
    assert [s.id for s in result.ready] == ["small"]
    assert (cache.stats().refused, cache.step().refused) == (1, ())
    cache.check()


def test_a_request_as_large_as_the_pool() -> None:
    cache = solo(pages=16, scratch=2)
    sequence = prefill(admit(cache, "1", LONG[:5], output_limit=23))
    sequence.append(range(24))
    sequence.open(23)
    sequence.commit(23)
    sequence.finish()
    cache.check()


def test_ids_name_one_request() -> None:
    cache = solo(pages=4)
    blocker = admit(cache, "a", LONG[:8])
    result = cache.step(Message(requests=tuple(request(cache, name, [i]) for i, name in enumerate("bab"))))
    assert [type(r.error) for r in result.refused] == [DuplicateRequest] * 2
    assert cache.waiting_ids == ("b",)
    blocker.finish()
    assert [s.chain.tokens.tolist() for s in cache.step().ready] == [[0]]
    assert admit(cache, "a", [1]).id == "a", "an id is free again when its request has ended"


@pytest.mark.parametrize("name", ["", "\u00e9\u4e2d\U0001f600", "\ud800", "a" * 10_000, "\0", "r1\n"])
def test_any_string_is_an_id(name: str) -> None:
    cache = solo()
    serve(cache, name, LONG[:5])
    cache.step(Message(aborts=(name,)))
    assert repr(admit(cache, name, LONG[:5]))
    cache.abort(name)
    assert not cache.running
    cache.check()


@pytest.mark.parametrize("options", [{"output_limit": -1}, {"matched_cap": -1}, {"tokens": []}])
def test_impossible_requests_are_refused_at_once(options: dict[str, object]) -> None:
    cache = solo()
    with pytest.raises(RequestError):
        request(cache, "1", **{"tokens": [1], "output_limit": 0, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"id": 5}, {"id": None}, {"id": b"x"}, {"output_limit": 1.5},
                                     {"output_limit": True}, {"matched_cap": 0.5}, {"chain": [1, 2]}])
def test_requests_of_wrong_types_are_refused_at_once(options: dict[str, object]) -> None:
    """Not in the middle of a step, where they would be a fault of this rank."""
    cache = solo()
    with pytest.raises(RequestError):
        Request(**{"id": "1", "chain": cache.chain([1]), "output_limit": 1, **options})  # type: ignore[arg-type]


def test_a_prompt_that_is_extended_while_it_waits() -> None:
    """The conversation's chain is the caller's: what is appended after submission is not of this request."""
    cache = solo(pages=4)
    blocker = admit(cache, "0", LONG[:8])
    chain = cache.chain(LONG[:4])
    cache.step(Message(requests=(request(cache, "1", chain, 1),)))
    chain.extend([1] * 20)
    blocker.abort()
    (sequence,) = cache.step().ready
    assert (sequence.prompt_tokens, sequence.record.prompt_tokens) == (4, 4)
    prefill(sequence).finish()
    assert len(chain) == 24
    cache.check()


def test_the_sequence_does_not_change_the_callers_chain() -> None:
    cache = solo()
    chain = cache.chain(LONG[:4])
    sequence = prefill(admit(cache, "1", chain, 4))
    sequence.append([1, 2])
    sequence.open(2)
    sequence.commit(2)
    assert (len(chain), len(sequence.chain)) == (4, 6)
    chain.extend([9])
    assert sequence.chain.tokens.tolist() == [*LONG[:4], 1, 2]


# ---- growth, epochs, asynchronous ends


def test_growth_comes_out_of_the_leftover() -> None:
    cache = solo(pages=8)
    result = cache.step(Message(requests=(request(cache, "1", LONG[:4], 2),)))
    (sequence,) = result.ready
    assert (result.leftover, cache.leftover) == (5, 5)
    cache.grow(sequence, 0)
    cache.grow(sequence, 3)
    assert (cache.leftover, sequence.reserved) == (2, 6)
    before = snapshot(cache, sequence)
    with pytest.raises(NoRoom) as caught:
        cache.grow(sequence, 3)
    assert caught.value.pages_short == 1
    with pytest.raises(SequenceError):
        cache.grow(sequence, -1)
    with pytest.raises(NoRoom):
        cache.grow(sequence, 2**80)
    other = solo(pages=8)
    (foreign,) = other.step(Message(requests=(request(other, "1", LONG[:4], 2),))).ready
    with pytest.raises(SequenceError, match="grow takes a sequence of this cache"):
        cache.grow(foreign, 1)
    assert foreign.reserved == 3 and snapshot(cache, sequence) == before
    prefill(sequence)
    sequence.append(range(8))
    sequence.open(8)
    assert len(sequence.page_indices) == 6
    cache.begin_step(Message(requests=(request(cache, "2", LONG[:9]),)))
    assert cache.leftover == 0
    with pytest.raises(NoRoom):
        cache.grow(sequence, 1)
    result = cache.end_step()
    assert (result.leftover, [w.pages_short for w in result.waiting]) == (2, [3])
    cache.check()


def test_a_finish_adds_to_the_leftover_only_through_the_next_ballot() -> None:
    cache = solo(pages=8, heartbeat=2)
    sequence = admit(cache, "1", LONG[:16])
    assert cache.leftover == 0
    sequence.abort()
    assert cache.leftover == 0
    assert (cache.step().leftover, cache.step().leftover) == (0, 8)


@pytest.mark.parametrize("how", ["reset", "bump", "message reset", "message bump"])
@pytest.mark.parametrize("index_on", ["finish", "fill"])
def test_a_new_epoch_while_running_and_waiting(how: str, index_on: str) -> None:
    """Running sequences go on and do not store; waiting ones find nothing old; new ones store again."""
    cache = solo(pages=12, index_on=index_on)
    serve(cache, "0", LONG[:6])
    running = admit(cache, "1", LONG[:9], output_limit=9)
    assert running.cached_tokens == 6
    waiting = cache.chain(LONG[:10])
    cache.step(Message(requests=(request(cache, "2", waiting, 4),)))
    assert cache.waiting_ids == ("2",)
    if how.startswith("message"):
        cache.step(Message(reset=how == "message reset", weights_version="2" if how == "message bump" else None))
    else:
        cache.reset() if how == "reset" else cache.bump("2")
    cache.check()
    assert (cache.stats().entries, cache.stats().epoch) == (0, 1)
    pages = running.page_indices.tolist()
    prefill(running)
    assert running.page_indices[:3].tolist() == pages
    running.finish()
    cache.check()
    assert cache.stats().entries == 0
    (sequence,) = cache.step().ready
    assert (sequence.id, sequence.cached_tokens) == ("2", 0)
    prefill(sequence).finish()
    assert cache.stats().entries == 5
    assert cache.peek(cache.chain(LONG)) == 5
    assert cache.peek(waiting) == 4, "a chain made before the bump is named anew"
    assert serve(cache, "3", waiting).cached_tokens == 8
    cache.check()


@pytest.mark.parametrize("bump", [True, False])
def test_a_new_epoch_while_the_ballot_is_in_flight(bump: bool) -> None:
    cache = solo()
    serve(cache, "0", LONG[:6])
    cache.begin_step(Message(requests=(request(cache, "1", LONG[:7]),)))
    assert cache.stats().pages_held == 3
    cache.bump("2") if bump else cache.reset()
    (sequence,) = cache.end_step().ready
    assert (sequence.cached_tokens, cache.stats().pages_held, cache.stats().pages_free) == (0, 0, 16)
    prefill(sequence).finish()
    assert cache.peek(cache.chain(LONG)) == 3, "it belongs to the new epoch"


def test_pages_of_an_asynchronous_engine_stay_until_their_forward_has_retired() -> None:
    """E4: released at step N while step N + 1 is in flight: not handed out before N + 1 has retired."""
    cache = solo(pages=4, asynchronous=True)
    sequence = prefill(admit(cache, "1", LONG[:5]))  # step 1
    pages = set(sequence.page_indices.tolist())
    cache.step()  # step 2 was begun, so a forward of step 2 may use the pages
    sequence.finish()
    cache.check()
    assert cache.peek(cache.chain(LONG)) == 2, "stored at once"
    assert (cache.stats().pages_live, cache.stats().pages_free) == (3, 1)
    other = admit(cache, "2", [1, 2])
    assert set((other.open(2) // 2).tolist()).isdisjoint(pages)
    result = cache.step(Message(requests=(request(cache, "3", [3]),)))
    assert [w.pages_short for w in result.waiting] == [1]
    cache.retired(1)
    assert cache.stats().pages_live == 4
    cache.retired(2)
    assert cache.stats().pages_live == 1
    assert [s.id for s in cache.step().ready] == ["3"]
    cache.check()


def test_ended_sequences_retire_in_order() -> None:
    cache = solo(asynchronous=True)
    for i in range(3):
        prefill(admit(cache, str(i), [i] * 4)).abort()  # steps 1, 2, 3
    live = [cache.stats().pages_live]
    for step in (0, 1, 1, 3, 3):
        cache.retired(step)
        cache.check()
        live.append(cache.stats().pages_live)
    assert live == [6, 6, 4, 4, 0, 0]


def test_close_after_an_error_does_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence met an error half-way through its end; the books refuse the other one, too."""
    cache = solo()
    half, other = prefill(admit(cache, "half", range(5))), admit(cache, "other", range(5, 9))
    planted = InvariantError("planted")

    def release(*_given: object) -> None:
        raise planted

    monkeypatch.setattr(cache._books, "release", release)
    with pytest.raises(InvariantError) as caught, cache.guard("commit"):
        half.finish()
    assert caught.value is planted
    cache.close()
    with pytest.raises(PeerFault, match="planted"):
        cache.step()
    assert half.ended == "finished"
    assert other.ended == "aborted"


def test_close_gives_everything_back() -> None:
    cache = solo(pages=8)
    prefill(admit(cache, "1", LONG[:6]))
    cache.begin_step(Message(requests=(request(cache, "2", LONG[:16]), request(cache, "3", [1]))))
    cache.close()
    cache.close()
    cache.check()
    stats = cache.stats()
    assert (stats.pages_live, stats.pages_held, stats.pages_reserved, cache.waiting_ids) == (0, 0, 0, ())
    for call in (cache.begin_step, cache.end_step, cache.step):
        with pytest.raises(SequenceError, match="closed"):
            call()
