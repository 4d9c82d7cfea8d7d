"""Copies by threads: every byte arrives, in an order that the copies name, and a failure stays with its copy."""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from distkv.errors import CopyFailed, HostMemoryError, InvariantError, LayoutMismatch
from distkv.host._engine import TrackedCopies
from distkv.host.copies import Copy, CopyState, Kind
from distkv.host.kv import PagedKV
from distkv.host.memory import HostRows
from distkv.host.open import open_copies
from distkv.host.threads import ThreadedCopies
from tests.host.plans import HOST_PAGES, PAGES, Plan, row_of, small_pool, small_rows

LIMIT_S = 60.0
STORE, LOAD = Kind.STORE, Kind.LOAD


class Gated(ThreadedCopies):
    """Tells in which order copies move, and lets a test hold the first ones back or fail some."""

    def __init__(self, kv: PagedKV, *, threads: int = 1, load_timeout_s: float = LIMIT_S) -> None:
        self.begun: list[Copy] = []
        self.moved: list[Copy] = []
        self.gates: dict[Copy, threading.Event] = {}
        self.errors: dict[Copy, BaseException] = {}
        self.arrived = threading.Semaphore(0)
        super().__init__(kv, small_rows(kv), threads=threads, load_timeout_s=load_timeout_s)

    def _move(self, copy: Copy) -> None:
        self.begun.append(copy)
        self.arrived.release()
        if copy in self.gates:
            self.gates[copy].wait(LIMIT_S)
        if copy in self.errors:
            raise self.errors[copy]
        super()._move(copy)
        self.moved.append(copy)

    def hold(self, copy: Copy) -> threading.Event:
        self.gates[copy] = threading.Event()
        return self.gates[copy]


class UntilClosing(threading.Event):
    """A gate that opens when the engine is told to close, and not before."""

    def __init__(self, engine: ThreadedCopies) -> None:
        super().__init__()
        self.engine = engine

    def wait(self, timeout: float | None = None) -> bool:
        with self.engine._todo:
            return self.engine._todo.wait_for(lambda: self.engine._closing, timeout)


def drain(engine: ThreadedCopies, copies: list[Copy]) -> list[Copy]:
    told: list[Copy] = []
    while len(told) < len(copies):
        engine.wait(LIMIT_S)
        told += engine.poll()
    assert set(told) == set(copies)
    return told


@pytest.fixture
def make() -> Iterator[Callable[..., Gated]]:
    """Engines that are closed whatever happens, with all gates open."""
    engines: list[Gated] = []

    def made(*, threads: int = 1, load_timeout_s: float = LIMIT_S) -> Gated:
        engines.append(Gated(small_pool()[1], threads=threads, load_timeout_s=load_timeout_s))
        return engines[-1]

    yield made
    for engine in engines:
        for gate in engine.gates.values():
            gate.set()
        engine.close()
        assert not any(thread.is_alive() for thread in engine._threads)


@pytest.mark.parametrize("seed", range(12))
def test_random_copies_leave_the_bytes_of_sequential_order(seed: int) -> None:
    dice = random.Random(seed)
    data, kv = small_pool()
    rows = small_rows(kv)
    engine = ThreadedCopies(kv, rows, threads=1 + seed % 4)
    try:
        Plan(engine, data, rows, dice, write=lambda page, number: data[:, :, page].fill_(number)).run(120)
    finally:
        engine.close()


def test_pages_go_out_and_come_back() -> None:
    """Through what chooses the engine."""
    pool = torch.randn(3, 2, 8, 4, 2, 5).to(torch.bfloat16)
    before = pool.clone()
    engine = open_copies(PagedKV(pool), 4, threads=2)
    assert isinstance(engine, ThreadedCopies)
    try:
        stores = [Copy(STORE, page, host) for host, page in enumerate([1, 6, 3])]
        engine.submit(stores)
        assert all(copy.state is CopyState.RUNNING for copy in stores)
        engine.fence(stores)
        pool[:, :, [1, 6, 3, 5]] = float("nan")
        loads = [Copy(LOAD, page, host) for host, page in enumerate([5, 1, 3])]
        engine.submit(loads)
        assert all(copy.state is CopyState.DONE for copy in drain(engine, stores + loads))
    finally:
        engine.close()
    wanted = before.clone()
    wanted[:, :, [5, 1, 3]] = before[:, :, [1, 6, 3]]
    wanted[:, :, 6] = float("nan")
    assert torch.equal(pool.view(torch.int16), wanted.view(torch.int16))


def test_loads_overtake_stores_that_wait(make: Callable[..., Gated]) -> None:
    engine = make()
    stores = [Copy(STORE, page, page) for page in range(4)]
    gate = engine.hold(stores[0])
    engine.submit(stores)
    engine.arrived.acquire(timeout=LIMIT_S)
    loads = [Copy(LOAD, 4, 4), Copy(LOAD, 5, 4)]
    engine.submit(loads)
    gate.set()
    drain(engine, stores + loads)
    assert engine.moved == [stores[0], *loads, *stores[1:]]


def test_what_a_load_or_a_fence_waits_for_overtakes_too(make: Callable[..., Gated]) -> None:
    engine = make()
    stores = [Copy(STORE, page, page % 5) for page in range(6)]
    stores[5].after = (stores[0], stores[4])
    gate = engine.hold(stores[0])
    engine.submit(stores)
    engine.arrived.acquire(timeout=LIMIT_S)
    load = Copy(LOAD, 4, 0, source=stores[5])
    engine.submit([load])

    def open_when_the_fence_waits() -> None:
        while not engine._awaited:
            time.sleep(0)
        gate.set()

    threading.Thread(target=open_when_the_fence_waits).start()
    engine.fence([stores[2]])
    assert stores[2] in engine.moved
    drain(engine, [*stores, load])
    assert engine.moved == [stores[0], stores[2], stores[4], stores[5], load, stores[1], stores[3]]


def test_a_fence_returns_when_its_copies_have_ended(make: Callable[..., Gated]) -> None:
    engine = make(threads=2)
    good, bad, other = Copy(STORE, 0, 0), Copy(STORE, 1, 1), Copy(STORE, 2, 2)
    engine.errors[bad] = OSError("no")
    gates = [engine.hold(copy) for copy in (good, bad)]
    engine.submit([good, bad, other])
    for _ in gates:
        engine.arrived.acquire(timeout=LIMIT_S)
    threading.Thread(target=lambda: [gate.set() for gate in gates]).start()
    engine.fence([good, bad])
    assert good in engine.moved
    drain(engine, [good, bad, other])
    engine.fence([good, bad, other])


def test_a_failure_is_the_copys_and_that_of_loads_that_read_it(make: Callable[..., Gated]) -> None:
    engine = make(threads=2)
    bad, good = Copy(STORE, 0, 0), Copy(STORE, 1, 1)
    reads, waits = Copy(LOAD, 2, 0, source=bad), Copy(LOAD, 3, 1, source=good, after=(bad,))
    overwrites = Copy(STORE, 4, 0, after=(bad, reads))
    error = engine.errors[bad] = OSError("no such page")
    engine.submit([bad, good, reads, waits, overwrites])
    drain(engine, [bad, good, reads, waits, overwrites])
    assert bad.state is CopyState.FAILED and bad.error is error
    assert reads.state is CopyState.FAILED and isinstance(reads.error, CopyFailed)
    assert [copy.state for copy in (good, waits, overwrites)] == [CopyState.DONE] * 3
    assert reads not in engine.begun
    late = Copy(LOAD, 5, 0, source=bad)
    engine.submit([late])
    assert late.state is CopyState.FAILED
    assert drain(engine, [late]) == [late]


def test_a_load_of_a_store_that_failed_and_was_not_polled(make: Callable[..., Gated]) -> None:
    engine = make()
    bad = Copy(STORE, 0, 0)
    engine.errors[bad] = OSError("no such page")
    engine.submit([bad])
    engine.fence([bad])
    load = Copy(LOAD, 1, 0, source=bad)
    engine.submit([load])
    drain(engine, [bad, load])
    assert isinstance(load.error, CopyFailed)
    assert load not in engine.begun


def test_a_page_that_is_none_fails_alone(make: Callable[..., Gated]) -> None:
    engine = make()
    wrong = [Copy(STORE, PAGES, 0), Copy(STORE, -1, 0), Copy(LOAD, 0, HOST_PAGES), Copy(LOAD, 0, -1)]
    good = Copy(STORE, 1, 1)
    engine.submit([*wrong, good])
    assert all(copy.state is CopyState.FAILED and isinstance(copy.error, CopyFailed) for copy in wrong)
    drain(engine, [*wrong, good])
    assert good.state is CopyState.DONE
    assert engine.begun == [good]


def test_what_cannot_be_submitted_takes_nothing(make: Callable[..., Gated]) -> None:
    engine = make()
    one, two = Copy(STORE, 0, 0), Copy(STORE, 1, 1)
    for batch in ([one, one], [one, Copy(LOAD, 2, 2, source=two)], [one, Copy(STORE, 2, 2, after=(two,))]):
        with pytest.raises(InvariantError, match=r"submitted"):
            engine.submit(batch)
    assert one.state is CopyState.PREPARED
    with pytest.raises(InvariantError, match=r"a fence waits for"):
        engine.fence([one])
    engine.submit([one, two])
    with pytest.raises(InvariantError, match=r"store of page 0 to host page 0 was submitted before"):
        engine.submit([one])
    drain(engine, [one, two])


def test_a_load_that_takes_too_long_is_overdue_and_still_ends(caplog: pytest.LogCaptureFixture) -> None:
    engine = Gated(small_pool()[1], threads=2, load_timeout_s=1e-9)
    load, store = Copy(LOAD, 0, 0), Copy(STORE, 1, 1)
    gates = [engine.hold(load), engine.hold(store)]
    engine.submit([load, store])
    assert not load.overdue
    assert engine.poll() == []
    assert load.overdue and load.state is CopyState.RUNNING
    assert not store.overdue
    for _ in gates:
        engine.arrived.acquire(timeout=LIMIT_S)
    with caplog.at_level(logging.WARNING):
        engine.close()
    assert "left behind" in caplog.text
    for gate in gates:
        gate.set()
    for thread in engine._threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert set(engine.poll()) == {load, store}
    assert load.state is CopyState.DONE and load.overdue


def test_an_idle_engine_leaves_nothing_behind_however_short_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    engine = Gated(small_pool()[1], threads=4, load_timeout_s=1e-9)
    chunk = weakref.ref(engine.rows.row(0).untyped_storage())
    engine.close()
    assert not any(thread.is_alive() for thread in engine._threads)
    assert (caplog.records, chunk()) == ([], None)


def test_loads_are_measured_and_stores_are_not(make: Callable[..., Gated]) -> None:
    engine = make(threads=2)
    store = Copy(STORE, 0, 0)
    engine.submit([store])
    drain(engine, [store])
    assert engine.load_s(4) is None
    load = Copy(LOAD, 1, 0)
    engine.submit([load])
    drain(engine, [load])
    one = engine.load_s(1)
    assert one is not None and one > 0
    assert engine.load_s(2) == one, "side by side"
    assert engine.load_s(5) == pytest.approx(3 * one)


def test_close_ends_what_runs_and_fails_what_waits() -> None:
    engine = Gated(small_pool()[1])
    chunk = weakref.ref(engine.rows.row(0).untyped_storage())
    runs, waits, follows = Copy(STORE, 0, 0), Copy(STORE, 1, 1), Copy(STORE, 2, 0)
    follows.after = (runs,)
    engine.gates[runs] = UntilClosing(engine)
    engine.submit([runs, waits, follows])
    engine.arrived.acquire(timeout=LIMIT_S)
    engine.close()
    engine.close()
    assert engine.moved == [runs]
    assert not any(thread.is_alive() for thread in engine._threads)
    assert set(engine.poll()) == {runs, waits, follows}
    assert runs.state is CopyState.DONE
    assert all(copy.state is CopyState.FAILED and isinstance(copy.error, CopyFailed) for copy in (waits, follows))
    late = Copy(STORE, 1, 1)
    engine.submit([late])
    assert late.state is CopyState.FAILED
    assert "closed" in str(late.error)
    assert chunk() is None


def test_nothing_is_left_of_an_engine_that_could_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    _, kv = small_pool()
    before = threading.enumerate()
    with pytest.raises(LayoutMismatch, match=r"page_size is 7 here and 3 there"):
        ThreadedCopies(kv, HostRows(replace(kv.layout, page_size=7), 2))
    start, started = threading.Thread.start, []

    def third_fails(self: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", third_fails)
    rows = small_rows(kv)
    chunk = weakref.ref(rows.row(0).untyped_storage())
    with pytest.raises(RuntimeError, match=r"can't start"):
        ThreadedCopies(kv, rows, threads=4)
    assert len(started) == 2
    assert threading.enumerate() == before
    assert chunk() is None
    with pytest.raises(HostMemoryError, match=r"cannot start: can't start new thread.*host\.copy_threads"):
        open_copies(kv, 2, threads=1)


def test_a_program_that_does_not_close_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way ends before its memory is torn down, and what never ends does not keep the program."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    engine = Gated(small_pool()[1], load_timeout_s=LIMIT_S)
    store = Copy(STORE, 1, 1)
    engine.gates[store] = UntilClosing(engine)
    engine.submit([store])
    engine.arrived.acquire(timeout=LIMIT_S)
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        at_exit[0]()
    assert not engine._closing, "a fork has none of the threads, and waits for none"
    at_exit[0]()
    assert not at_exit
    assert not any(thread.is_alive() for thread in engine._threads)
    assert [copy.state for copy in engine.poll()] == [CopyState.DONE]
    stuck = Gated(small_pool()[1], load_timeout_s=1e-9)
    gate = stuck.hold(store := Copy(STORE, 1, 1))
    stuck.submit([store])
    at_exit[0]()
    assert all(thread.daemon for thread in stuck._threads)
    gate.set()
    for thread in stuck._threads:
        thread.join(LIMIT_S)


def test_an_interrupt_leaves_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come between the lines of a condition's ``__enter__``; between those of a lock's there are none."""
    _, kv = small_pool()
    engine = ThreadedCopies(kv, small_rows(kv), threads=1, load_timeout_s=LIMIT_S)

    def interrupted(condition: threading.Condition) -> bool:
        condition.acquire()
        raise KeyboardInterrupt

    store = Copy(STORE, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "__enter__", interrupted)
        engine.submit([store])
        engine.fence([store])
        assert [copy.state for copy in engine.poll()] == [CopyState.DONE]
        engine.close()


def test_only_pools_that_can_be_copied(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LayoutMismatch, match=r"this one is on meta"):
        open_copies(PagedKV(torch.zeros(1, 2, 2, 2, 1, 1, device="meta")), 2)
    with caplog.at_level(logging.INFO, logger="distkv.host.open"):
        open_copies(small_pool()[1], 3, threads=1).close()
    (record,) = caplog.records
    assert record.getMessage().startswith("host tier: 3 pages, 0.00 GiB, pageable; a page is int32, 3 tokens, 2 layers")


def test_rows_hold_what_the_pool_held(make: Callable[..., Gated]) -> None:
    engine = make()
    copy = Copy(STORE, 4, 2)
    engine.submit([copy])
    drain(engine, [copy])
    assert torch.equal(engine.rows.row(2), row_of(engine._kv, 4))


def test_a_load_that_waits_for_others_that_go_on_is_not_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst takes as long as it takes; what counts is a copy of its own, or that nothing ends any more."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class OneByOne(TrackedCopies):
        def __init__(self) -> None:
            super().__init__(load_timeout_s=10.0)
            self.over: list[Copy] = []

        def _start(self, copies: list[Copy]) -> None: ...
        def _fence(self, copies: list[Copy]) -> None: ...
        def wait(self, timeout_s: float) -> None: ...
        def close(self) -> None: ...

        def _collect(self) -> list[tuple[Copy, BaseException | None]]:
            over, self.over = self.over, []
            return [(copy, None) for copy in over]

    engine, loads = OneByOne(), [Copy(LOAD, i, i) for i in range(5)]
    engine.submit(loads)
    for copy in loads[:-1]:
        now[0] += 9.0
        engine.over.append(copy)
        assert engine.poll() == [copy]
        assert not any(copy.overdue for copy in loads)
    now[0] += 9.0
    assert not engine.poll() and not loads[-1].overdue
    now[0] += 2.0
    engine.poll()
    assert loads[-1].overdue
