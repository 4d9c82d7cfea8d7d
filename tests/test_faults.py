"""Faults outside the ballot: who hears of them, through what, and what every later call raises."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from distkv import (
    CacheConfig,
    Config,
    Fault,
    Fingerprint,
    GroupTimeout,
    LocalGroup,
    Message,
    PeerFailed,
    PeerFault,
    PeerLost,
    PoolConfig,
    PrefixCache,
    Request,
)
from distkv.faults import LOST, SILENT, FaultBoard
from distkv.testing.group import SimulatedGroup
from distkv.torch_group import transport_failed
from distkv.watchdog import Watchdog

WAIT_S = 60.0  # for what comes within a moment, on a machine that is busy


def group_of(n: int) -> SimulatedGroup:
    config = Config(cache=CacheConfig(page_size=2), pool=PoolConfig(pages=16, check=True))
    return SimulatedGroup([config] * n, Fingerprint(model="m"))


def one(cache: PrefixCache, name: str) -> Message:
    return Message(requests=(Request(id=name, chain=cache.chain([1, 2, 3, 4]), output_limit=1),))


def a_fault(rank: int = 1, **fields: object) -> Fault:
    return Fault(**{"rank": rank, "step": 3, "kind": "forward", "text": "ValueError: x", "seen_by": rank, **fields})  # type: ignore[arg-type]


# ---- the cache and a group in one process


def test_an_exception_under_guard_ends_every_rank_and_names_rank_step_and_cause() -> None:
    group = group_of(3)
    heard: list[tuple[int, Fault]] = []
    for rank, member in enumerate(group.members):
        member.on_fault(lambda fault, rank=rank: heard.append((rank, fault)))
    group.begin(lambda cache: one(cache, "a"))
    group.end()
    with pytest.raises(ValueError, match="planted"), group.caches[1].guard("forward"):
        raise ValueError("planted")
    with pytest.raises(ZeroDivisionError), group.caches[2].guard("commit"):  # later: the first one counts
        _ = 1 // 0
    for rank, cache in enumerate(group.caches):
        for call in (cache.step, cache.end_step, lambda cache=cache: cache.submit(one(cache, "b").requests[0])):
            kind = "commit" if rank == 2 else "forward"
            with pytest.raises(PeerFault, match=rf"in the {kind} of step 1: .*this is rank {rank}") as caught:
                call()
            assert (caught.value.rank, caught.value.step) == (rank, 1)
            assert caught.value.failed_rank == (2 if rank == 2 else 1)
        cache.check()
    assert sorted(rank for rank, _ in heard) == [0, 1, 2], "each once"
    first = Fault(rank=1, step=1, kind="forward", text="ValueError: planted", seen_by=1)
    assert {fault for _, fault in heard} == {first}


def test_a_fault_while_a_ballot_is_in_flight_gives_the_holds_back() -> None:
    group = group_of(2)
    group.caches[0].begin_step(one(group.caches[0], "a"))
    with pytest.raises(KeyboardInterrupt), group.caches[1].guard("forward"):
        raise KeyboardInterrupt
    with pytest.raises(PeerFault, match=r"rank 1 failed in the forward.*KeyboardInterrupt"):
        group.caches[0].end_step()
    group.caches[0].check()


def test_a_rank_that_waits_comes_out() -> None:
    waits, fails = LocalGroup.make(2, timeout_s=WAIT_S)
    ticket = waits.start(np.zeros(1, np.int64), 3)
    raised: list[BaseException] = []

    def wait() -> None:
        try:

            ticket.wait()
        except PeerFault as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert fails.report(a_fault()) == a_fault()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert len(raised) == 1


def test_guard_lets_through_what_does_not_end_the_group() -> None:
    group = group_of(2)
    with pytest.raises(PeerFailed), group.caches[0].guard("step"):
        raise PeerFailed(1, rank=0, step=1)
    group.begin(lambda cache: one(cache, "a"))
    assert all(not isinstance(outcome, Exception) for outcome in group.end())


def test_an_error_that_came_of_a_fault_is_replaced_by_it() -> None:
    group = group_of(2)
    group.members[1].report(a_fault())
    with pytest.raises(PeerFault, match="rank 1 failed in the forward of step 3") as caught, \
            group.caches[0].guard("forward"):
        raise PeerLost("a sum of the model", "closed", rank=0, step=-1)
    assert isinstance(caught.value.__cause__, PeerLost)


def test_callbacks_are_called_once_also_late_ones_and_one_that_fails_stops_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board, called = FaultBoard(), []

    def fails(_: Fault) -> None:
        raise OSError("planted")

    board.on_fault(fails)
    board.on_fault(lambda _: called.append("early"))
    board.on_fault(lambda _: called.append("taken back"))()
    board.tell()
    assert not called, "there is no fault yet"
    assert board.post(a_fault()) == board.post(a_fault(0)) == a_fault()
    with caplog.at_level(logging.ERROR):
        board.tell()
        board.tell()
    board.on_fault(lambda fault: called.append(fault.text))
    assert called == ["early", "ValueError: x"]
    assert "planted" in caplog.text


@pytest.mark.parametrize(("kind", "error"), [(SILENT, GroupTimeout), (LOST, PeerLost), ("commit", PeerFault)])
def test_a_fault_survives_the_store_and_has_an_error(kind: str, error: type[PeerFault]) -> None:
    fault = a_fault(2, kind=kind, text='rank 2 said "no"\n')
    assert Fault.decode(fault.encode()) == fault
    made = fault.error(rank=0)
    assert type(made) is error
    assert (made.failed_rank, made.rank, made.step) == (2, 0, 3)
    assert 'rank 2 said "no"' in str(made)


def test_which_exceptions_say_that_another_rank_is_gone() -> None:
    gone = [PeerLost("x", "y", rank=0, step=1), GroupTimeout("x", 1.0, rank=0, step=1), dist.DistNetworkError("x"),
            RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
            RuntimeError("Operation timed out!"), RuntimeError("Application timeout caused pair closure")]
    assert all(map(transport_failed, gone))
    own = [RuntimeError("shape mismatch"), ValueError("gloo/"), KeyboardInterrupt(), a_fault().error(rank=0)]
    assert not any(map(transport_failed, own))


# ---- watchdogs over a real store, all in this process


class Gate:
    """A store whose calls hang while it is shut, as those of a process that is stopped."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.open = threading.Event()
        self.open.set()

    def __getattr__(self, name: str) -> Callable[..., object]:
        self.open.wait()
        method: Callable[..., object] = getattr(self.store, name)
        return method


class Watched:
    """Three ranks' watchdogs."""

    def __init__(self, limit_s: float, beat_s: float) -> None:
        self.master: dist.TCPStore | None = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                                                          timeout=timedelta(seconds=WAIT_S))  # fmt: skip
        self.boards = [FaultBoard() for _ in range(3)]
        self.gates = [Gate(self.master.clone()) for _ in range(3)]
        self.dogs = [Watchdog(gate, board, rank, 3, limit_s=limit_s, beat_s=beat_s)
                     for rank, (gate, board) in enumerate(zip(self.gates, self.boards, strict=True))]
        self.told = [threading.Event() for _ in range(3)]
        self.forget = []
        for rank, (dog, board, told) in enumerate(zip(self.dogs, self.boards, self.told, strict=True)):
            board.step = 10 + rank
            self.forget.append(board.on_fault(lambda _, told=told: told.set()))
            dog.start()
        while any(dog._missing for dog in self.dogs):
            assert not any(told.wait(0.01) for told in self.told)

    def wait(self, ranks: Sequence[int]) -> list[Fault | None]:
        for rank in ranks:
            assert self.told[rank].wait(WAIT_S), f"rank {rank} was not told"
        return [self.boards[rank].fault for rank in ranks]

    def close(self) -> None:
        for gate in self.gates:
            gate.open.set()
        for dog in self.dogs:
            dog.close()
            dog.close()


@pytest.fixture
def watched() -> Iterator[Callable[[float, float], Watched]]:
    made: list[Watched] = []

    def make(limit_s: float, beat_s: float = 0.05) -> Watched:
        made.append(Watched(limit_s, beat_s))
        return made[-1]

    yield make
    for group in made:
        group.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("distkv-")]


def test_a_report_reaches_all_and_the_first_counts(watched: Callable[[float], Watched]) -> None:
    group = watched(WAIT_S)
    first = group.dogs[1].report(a_fault(1))
    assert first == a_fault(1)
    assert group.dogs[2].report(a_fault(2)) == first
    assert group.wait([0, 1, 2]) == [first] * 3
    assert group.dogs[0].explain(broken=True) == first


def test_a_rank_that_nobody_would_get_out_of_its_own_collectives_is_warned(
    watched: Callable[[float], Watched], caplog: pytest.LogCaptureFixture,
) -> None:
    group = watched(WAIT_S)
    group.forget[0]()
    group.forget[1]()  # the failed rank itself waits for nobody
    with caplog.at_level(logging.WARNING):
        group.dogs[1].report(a_fault(1))
        group.wait([2])
        for dog in group.dogs[:2]:
            dog._judge.join(WAIT_S)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "distkv.watchdog"]
    assert warning.startswith("rank 0: a peer failed (ValueError: x), and no callback of group.on_fault")


def test_a_silent_rank_is_named_and_one_whose_store_is_silent_says_so(watched: Callable[[float], Watched]) -> None:
    group = watched(2.0)
    group.gates[2].open.clear()
    on_0, on_1, on_2 = group.wait([0, 1, 2])
    assert on_0 == on_1
    assert on_0 is not None
    assert (on_0.rank, on_0.kind, on_0.step) == (2, SILENT, 12)
    assert on_2 is not None
    assert (on_2.rank, on_2.kind, on_2.seen_by) == (None, SILENT, 2)


def test_after_a_broken_connection_the_rank_without_a_sign_is_named_long_before_the_limit(
    watched: Callable[[float], Watched],
) -> None:
    group = watched(WAIT_S)
    group.gates[2].open.clear()
    fault = group.dogs[0].explain(broken=True)
    assert fault is not None
    assert (fault.rank, fault.kind, fault.step) == (2, LOST, 12)
    assert group.wait([0, 1]) == [fault] * 2
    group.gates[2].open.set()
    assert group.wait([2]) == [fault], "one that goes on hears what became of it"


def test_a_rank_that_leaves_is_not_accused_but_named_when_it_is_missed(watched: Callable[[float], Watched]) -> None:
    group = watched(1.0)
    group.dogs[2].close()
    assert not group.told[0].wait(2.0)
    fault = group.dogs[0].explain(broken=False)
    assert fault is not None
    assert (fault.rank, fault.kind) == (2, LOST)
    assert "has left the group" in fault.text


def test_no_fault_is_made_up_while_all_give_signs(watched: Callable[[float], Watched]) -> None:
    group = watched(WAIT_S)
    assert group.dogs[0].explain(broken=False) is None
    assert [board.fault for board in group.boards] == [None] * 3


def test_a_store_that_is_gone_is_named(watched: Callable[[float], Watched]) -> None:
    group = watched(WAIT_S)
    group.master = None
    for fault in group.wait([0, 1, 2]):
        assert fault is not None
        assert (fault.rank, fault.kind) == (None, LOST)
        assert "store" in fault.text
