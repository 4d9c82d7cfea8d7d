"""Pages of ended sequences stay theirs until the passes that use them have retired: bytes that are written late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distkv import Message, NoRoom, PrefixCache, Sequence, SequenceError
from distkv.books import Books
from tests.core.helpers import admit, request, solo


class Device:
    """KV memory of one value per slot, and passes that write when they are told to, not when they are launched."""

    def __init__(self, slots: int) -> None:
        self.kv = np.zeros(slots, np.int64)
        self.flights: list[tuple[np.ndarray, int]] = []

    def launch(self, sequence: Sequence, n: int, value: int) -> None:
        self.flights.append((sequence.open(n), value))

    def land(self) -> None:
        slots, value = self.flights.pop(0)
        self.kv[slots] = value


def free_at_once(self: Books, pages: Any, reserved: int, ledger: Any = None, *protected: Any) -> None:
    self.reserved -= reserved
    self.free(pages)


def aborted_in_flight(cache: PrefixCache) -> Device:
    """The pages of an aborted sequence are written after another one, which had to wait for pages, has written its."""
    device = Device(16)
    first = admit(cache, "a", [1] * 12)
    device.launch(first, 12, value=1)
    cache.begin_step(Message(requests=(request(cache, "b", [2] * 10),)))  # only 2 of the 8 pages are free
    cache.abort("a")
    cache.end_step()
    for _ in range(3):
        if "b" in cache.running:
            break
        cache.step()
    else:  # as it should be: b waits for the pass
        device.land()
        cache.retired(1)
        assert "b" not in cache.running
        cache.retired(2)  # the abort came in step 2: a pass of that step could have used the pages
        cache.step()
    device.launch(cache.running["b"], 10, value=2)
    slots = cache.running["b"].slots(0, 10)
    device.flights.reverse()  # b's pass is the faster one: another stream, another engine of copies
    while device.flights:
        device.land()
    device.kv[:] = np.where(np.isin(np.arange(16), slots), device.kv, 0)
    return device


def test_no_foreign_write_reaches_a_page() -> None:
    cache = solo(pages=8, asynchronous=True)
    assert sorted(aborted_in_flight(cache).kv.tolist()) == [0] * 6 + [2] * 10
    cache.check()


def test_without_retirement_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Books, "release", free_at_once)
    assert 1 in aborted_in_flight(solo(pages=8, asynchronous=True)).kv


def test_a_synchronous_engine_retires_at_once() -> None:
    cache = solo(pages=8)
    admit(cache, "a", [1] * 12).open(12)
    cache.abort("a")
    assert cache.stats().pages_free == 8
    cache.retired(1)  # of no use, and no harm
    assert cache.stats().pages_free == 8


def test_a_step_that_was_not_begun_cannot_have_retired() -> None:
    cache = solo(asynchronous=True)
    cache.step()
    cache.retired(1)
    for step in (2, 99, -1, True, 1.0, None):
        with pytest.raises(SequenceError, match=rf"retired\({step}\): 1 steps were begun.* 0 to 1 only"):
            cache.retired(step)  # type: ignore[arg-type]
    cache.retired(np.int64(1))


def test_live_until_retired_counts_in_the_room_and_in_the_discount() -> None:
    cache = solo(pages=8, asynchronous=True)
    sequence = admit(cache, "a", [1] * 8)
    sequence.open(8)
    sequence.commit(8)
    sequence.finish()
    assert (cache.stats().pages_live, cache.stats().pages_retiring, cache._books.room) == (4, 4, 4)
    with_discount = admit(cache, "b", [1] * 9, 7)  # 8 pages, of which 4 are cached and live still
    assert with_discount.cached_tokens == 8
    assert (cache.stats().pages_live, cache.stats().pages_retiring) == (4, 0), "they have an owner that runs"
    with pytest.raises(NoRoom, match=r"'b' \(pages of 1 ended one\(s\) wait for retired\): 1 page\(s\) short"):
        cache.grow(with_discount, cache.leftover + 1)
    cache.retired(cache.steps)
    assert cache.stats().pages_live == 4
    cache.check()
