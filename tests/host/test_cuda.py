"""The CUDA engine's launches, waits and books, on streams that a test runs one operation at a time in any order.

What streams and events promise is modelled here; that CUDA keeps it is for ``multigpu_tests``.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from distkv.errors import CopyFailed, LayoutMismatch
from distkv.host.copies import Copy, CopyState, Kind
from distkv.host.cuda import CudaCopies
from distkv.host.kv import PagedKV
from distkv.host.memory import HostRows
from tests.host.plans import HOST_PAGES, PAGES, Plan, row_of, small_pool, small_rows

STORE, LOAD = Kind.STORE, Kind.LOAD


class Event:
    """Done when its stream has come to where it was recorded. With every look at it the device does something."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.recorded = self.done = False

    def record(self, stream: Stream) -> None:
        self.recorded = True
        stream.launch(lambda: setattr(self, "done", True))

    def query(self) -> bool:
        if self.device.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.device.run(1)
        return self.done or not self.recorded

    def elapsed_time(self, end: Event) -> float:
        assert self.done and end.done
        return 6.0


class Stream:
    def __init__(self, *, obeys: bool = True) -> None:
        self.queue: deque[Event | Callable[[], object]] = deque()
        self.obeys = obeys

    def launch(self, kernel: Callable[[], object]) -> None:
        self.queue.append(kernel)

    def wait_event(self, event: Event) -> None:
        if event.recorded and self.obeys:
            self.queue.append(event)

    @property
    def ready(self) -> bool:
        return bool(self.queue) and (not isinstance(self.queue[0], Event) or self.queue[0].done)


class Device:
    """What the engine uses of ``torch.cuda``."""

    def __init__(self, dice: random.Random, *, copies_obey: bool = True, compute_obeys: bool = True) -> None:
        self.dice, self.copies_obey = dice, copies_obey
        self.compute = self.current = Stream(obeys=compute_obeys)
        self.streams = [self.compute]
        self.broken = False

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        self.streams.append(Stream(obeys=self.copies_obey))
        return self.streams[-1]

    def Event(self, enable_timing: bool = False) -> Event:  # noqa: N802
        return Event(self)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def run(self, operations: int) -> None:
        for _ in range(operations):
            ready = [stream for stream in self.streams if stream.ready]
            if ready:
                head = self.dice.choice(ready).queue.popleft()
                if not isinstance(head, Event):
                    head()

    def synchronize(self) -> None:
        while any(stream.ready for stream in self.streams):
            self.run(1)
        assert not any(stream.queue for stream in self.streams), "a stream waits for ever"


class OnModel(CudaCopies):
    """On a model of a device, and with a staging buffer for ``fit`` pages. ``trouble`` fails at launch what has it."""

    def __init__(self, device: Device, kv: PagedKV, rows: HostRows, *, fit: int = 3, limit_s: float = 10.0) -> None:
        self.device = device
        self.trouble: set[Copy] = set()
        self.batches: list[list[Copy]] = []
        super().__init__(kv, rows, load_timeout_s=limit_s)
        self._fit = fit

    def _module(self) -> Any:
        return self.device

    def _upload(self, pages: list[int]) -> torch.Tensor:
        return torch.tensor(pages)

    def _move(self, kind: Kind, copies: list[Copy]) -> None:
        self.batches.append(copies)
        if self.trouble & set(copies):
            raise RuntimeError("CUDA out of memory")
        self.device.current.launch(lambda: CudaCopies._move(self, kind, copies))


def make(seed: int = 0, **kwargs: Any) -> tuple[torch.Tensor, OnModel]:
    data, kv = small_pool()
    return data, OnModel(Device(random.Random(seed)), kv, small_rows(kv), **kwargs)


def drain(engine: OnModel, copies: list[Copy]) -> None:
    told: list[Copy] = []
    while len(told) < len(copies):
        engine.wait(10.0)
        told += engine.poll()
    assert set(told) == set(copies)


def plan_holds(seed: int, **obedience: bool) -> bool:
    dice = random.Random(seed)
    data, kv = small_pool()
    rows = small_rows(kv)
    for host in range(rows.pages):
        rows.row(host).copy_(row_of(kv, -1))
    device = Device(dice, **obedience)
    engine = OnModel(device, kv, rows, fit=1 + seed % 3)

    def write(page: int, number: int) -> None:
        device.compute.launch(lambda: data[:, :, page].fill_(number))

    plan = Plan(engine, data, rows, dice, write=write, turn=lambda: device.run(dice.randrange(6)),
                quiet=device.synchronize)
    try:
        plan.run(50)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_the_device_leaves_the_bytes_of_launch_order(seed: int) -> None:
    assert plan_holds(seed)


@pytest.mark.parametrize("who", ["copies_obey", "compute_obeys"])
def test_streams_that_do_not_wait_leave_other_bytes(who: str) -> None:
    assert not all(plan_holds(seed, **{who: False}) for seed in range(30))


def test_copies_go_in_batches_of_one_kind() -> None:
    _, engine = make()
    stores = [Copy(STORE, page, page % HOST_PAGES) for page in range(5)]
    loads = [Copy(LOAD, 5, 1, source=stores[1])]
    engine.submit([*stores, *loads])
    assert engine.batches == [stores[:3], stores[3:], loads]
    drain(engine, [*stores, *loads])
    assert all(copy.state is CopyState.DONE for copy in [*stores, *loads])


def test_two_copies_of_which_one_waits_are_not_moved_together() -> None:
    data, engine = make()
    for host in (0, 1):
        engine.rows.row(host).copy_(row_of(engine._kv, 70 + host))
    first = Copy(LOAD, 3, 0)
    second = Copy(LOAD, 3, 1, after=(first,))
    engine.submit([first, second])
    drain(engine, [first, second])
    assert engine.batches == [[first], [second]]
    assert data[:, :, 3].unique().tolist() == [71]


def test_loads_do_not_queue_behind_stores() -> None:
    """The stores' stream does not get a turn at all."""
    data, engine = make()
    engine.rows.row(4).copy_(row_of(engine._kv, 70))
    store, load = Copy(STORE, 0, 0), Copy(LOAD, 3, 4)
    engine.submit([store, load])
    engine.device.streams.remove(engine._streams[STORE])
    drain(engine, [load])
    assert data[:, :, 3].unique().tolist() == [70]
    assert store.state is CopyState.RUNNING


def test_a_batch_that_cannot_be_launched_fails_and_the_next_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    _, engine = make(fit=2)
    bad, with_it, good = Copy(STORE, 0, 0), Copy(STORE, 1, 1), Copy(STORE, 2, 2)
    reads, waits = Copy(LOAD, 3, 0, source=bad), Copy(LOAD, 4, 2, source=good, after=(bad,))
    engine.trouble = {bad}
    with caplog.at_level(logging.WARNING):
        engine.submit([bad, with_it, good, reads, waits])
    assert "2 copies between the GPU and the host failed: CUDA out of memory" in caplog.text
    assert bad.state is CopyState.RUNNING, "something of it may have been launched"
    late = Copy(LOAD, 5, 0, source=bad)
    engine.submit([late])
    drain(engine, [bad, with_it, good, reads, waits, late])
    assert [copy.state is CopyState.FAILED for copy in (bad, with_it, good, reads, waits, late)] == [
        True, True, False, True, False, True
    ]
    assert isinstance(reads.error, CopyFailed)
    assert "out of memory" in str(bad.error)


def test_close_waits_for_what_an_interrupted_launch_has_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = make()
    copy, move = Copy(STORE, 0, 0), engine._move

    def interrupted(kind: Kind, copies: list[Copy]) -> None:
        move(kind, copies)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_move", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.submit([copy])
    engine.close()
    assert not engine.device.streams[1].queue
    assert engine.poll() == [copy]
    assert copy.state is CopyState.FAILED


def test_a_device_that_fails_ends_all_copies() -> None:
    _, engine = make()
    copies = [Copy(STORE, 0, 0), Copy(LOAD, 1, 1)]
    engine.submit(copies)
    engine.device.broken = True
    engine.fence(copies)
    drain(engine, copies)
    assert all("illegal memory access" in str(copy.error) for copy in copies)
    engine.close()


def test_loads_are_measured() -> None:
    _, engine = make()
    stores, loads = [Copy(STORE, 0, 0)], [Copy(LOAD, page, 0) for page in range(3)]
    engine.submit(stores)
    drain(engine, stores)
    assert engine.load_s(1) is None
    engine.submit(loads)
    drain(engine, loads)
    assert engine.load_s(5) == pytest.approx(0.010)


def test_close_waits_and_gives_back() -> None:
    _, engine = make()
    copies = [Copy(STORE, page, page) for page in range(3)]
    engine.submit(copies)
    engine.close()
    engine.close()
    assert not engine.device.streams[1].queue
    assert not engine._staging
    drain(engine, copies)
    late, wrong = Copy(STORE, 0, 0), Copy(STORE, PAGES, 0)
    engine.submit([late, wrong])
    assert late.state is wrong.state is CopyState.FAILED


def test_memory_that_is_still_in_use_is_not_given_back(caplog: pytest.LogCaptureFixture) -> None:
    _, engine = make(limit_s=0.0)
    copy = Copy(LOAD, 0, 0)
    engine.submit([copy])
    engine.device.streams.clear()
    with caplog.at_level(logging.ERROR):
        engine.close()
    assert "not given back" in caplog.text
    assert engine.rows.row(0) is not None
    assert engine.poll() == []
    assert copy.overdue


def test_rows_of_another_layout() -> None:
    _, kv = small_pool()
    with pytest.raises(LayoutMismatch, match=r"dtype is 'float32' here and 'int32' there"):
        OnModel(Device(random.Random(0)), kv, HostRows(replace(kv.layout, dtype="float32"), 2))
