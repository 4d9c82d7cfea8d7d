"""The scripted engine: ends in any order that the rules allow, and each rule, switched off, is seen to fail."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distkv.errors import CopyFailed, InvariantError
from distkv.host.copies import Copy, CopyState, Kind
from distkv.host.scripted import Rules, ScriptedCopies
from tests.host.plans import Plan, row_of, small_pool, small_rows

STORE, LOAD = Kind.STORE, Kind.LOAD


class Memory:
    """Pages as letters; what a failed copy leaves behind is a question mark."""

    def __init__(self, device: str, host: str) -> None:
        self.device, self.host = list(device), list(host)

    def read(self, copy: Copy) -> str:
        return self.device[copy.device] if copy.kind is STORE else self.host[copy.host]

    def write(self, copy: Copy, data: str | None) -> None:
        place, at = (self.host, copy.host) if copy.kind is STORE else (self.device, copy.device)
        place[at] = data or "?"

    def engine(self, **kwargs: object) -> ScriptedCopies:
        return ScriptedCopies(read=self.read, write=self.write, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(40))
def test_any_order_leaves_the_bytes_of_sequential_order(seed: int) -> None:
    """Kernels run at once here; what they must wait for is the fence's."""
    assert plan_holds(seed, Rules())


@pytest.mark.parametrize("rule", ["after", "source", "fence"])
def test_without_a_rule_some_order_leaves_other_bytes(rule: str) -> None:
    assert not all(plan_holds(seed, Rules(**{rule: False})) for seed in range(40))


def plan_holds(seed: int, rules: Rules) -> bool:
    dice = random.Random(seed)
    data, kv = small_pool()
    rows = small_rows(kv)
    for host in range(rows.pages):
        rows.row(host).copy_(row_of(kv, -1))

    def read(copy: Copy) -> object:
        if copy.kind is STORE:
            return kv.page_bytes(copy.device)
        return rows.row(copy.host).numpy().copy()

    def write(copy: Copy, read_before: object) -> None:
        row = torch.as_tensor(read_before)
        if copy.kind is STORE:
            rows.row(copy.host).copy_(row)
        else:
            kv.scatter(row.unsqueeze(0), [copy.device])

    engine = ScriptedCopies(read=read, write=write, rules=rules)
    plan = Plan(engine, data, rows, dice, write=lambda page, number: data[:, :, page].fill_(number),
                turn=lambda: engine.tick(dice, 0.3))
    try:
        plan.run(60)
    except AssertionError:
        return False
    return True


def on_and_off(rule: str) -> list[Rules]:
    return [Rules(), Rules(**{rule: False})]


@pytest.mark.parametrize("rules", on_and_off("after"), ids=["on", "off"])
def test_after(rules: Rules) -> None:
    memory = Memory("ab", "__")
    engine = memory.engine(rules=rules)
    spill = Copy(STORE, 0, 0)
    memory.host[1] = "h"
    load = Copy(LOAD, 0, 1, after=(spill,))
    engine.submit([spill, load])
    if rules.after:
        with pytest.raises(InvariantError, match=r"cannot end now"):
            engine.finish(load)
        engine.finish(spill)
        engine.finish(load)
    else:
        engine.finish(load)
        engine.finish(spill)
    assert (memory.device[0], memory.host[0]) == ("h", "a" if rules.after else "h")


@pytest.mark.parametrize("rules", on_and_off("source"), ids=["on", "off"])
def test_source(rules: Rules) -> None:
    memory = Memory("ab", "_")
    engine = memory.engine(rules=rules)
    store = Copy(STORE, 0, 0)
    load = Copy(LOAD, 1, 0, source=store)
    engine.submit([store, load])
    assert engine.begin(load) is not rules.source
    engine.finish(store)
    engine.finish(load)
    assert memory.device[1] == ("a" if rules.source else "_")


@pytest.mark.parametrize("rules", on_and_off("barrier"), ids=["on", "off"])
def test_barrier(rules: Rules) -> None:
    """A store does not read early; a load may read, and does not write."""
    memory = Memory("ab", "_h")
    retired: set[Copy] = set()
    engine = memory.engine(rules=rules, barrier=lambda copy: copy in retired)
    store, load = Copy(STORE, 0, 0), Copy(LOAD, 1, 1)
    engine.submit([store, load])
    assert engine.begin(store) is not rules.barrier
    assert engine.begin(load)
    if rules.barrier:
        with pytest.raises(InvariantError):
            engine.finish(load)
    memory.device[0] = "A"  # the kernel launched before
    retired.update((store, load))
    engine.finish(store)
    engine.finish(load)
    assert memory.host[0] == ("A" if rules.barrier else "a")
    assert memory.device[1] == "h"


@pytest.mark.parametrize("rules", on_and_off("fence"), ids=["on", "off"])
def test_fence(rules: Rules) -> None:
    memory = Memory("abc", "___")
    engine = memory.engine(rules=rules)
    first, second, other = Copy(STORE, 0, 0), Copy(STORE, 1, 1), Copy(STORE, 2, 2)
    load = Copy(LOAD, 1, 0, source=first, after=(second,))
    engine.submit([first, second, other, load])
    engine.stall(second)
    engine.fence([load])
    assert engine.running == ([other] if rules.fence else [first, second, other, load])
    assert load.state is CopyState.RUNNING, "heard of at a poll"
    assert set(engine.poll()) == ({first, second, load} if rules.fence else set())
    assert memory.device[1] == ("a" if rules.fence else "b")


def test_a_fence_lets_the_kernels_before_it_retire() -> None:
    memory = Memory("a", "_")
    retired: list[Copy] = []

    def retire(copy: Copy) -> None:
        memory.device[0] = "k"
        retired.append(copy)

    engine = memory.engine(barrier=lambda copy: copy in retired, retire=retire)
    store = Copy(STORE, 0, 0)
    engine.submit([store])
    engine.fence([store])
    assert (memory.host, retired) == (["k"], [store])
    without = memory.engine(barrier=lambda copy: False)
    again = Copy(STORE, 0, 0)
    without.submit([again])
    with pytest.raises(InvariantError):
        without.fence([again])


def test_reading_and_writing_are_apart() -> None:
    memory = Memory("ab", "_")
    engine = memory.engine()
    store = Copy(STORE, 0, 0)
    engine.submit([store])
    engine.begin(store)
    memory.device[0] = "x"
    engine.finish(store)
    assert memory.host == ["a"]


def test_a_move_is_one_call_at_a_good_end() -> None:
    moved: list[Copy] = []
    engine = ScriptedCopies(move=moved.append)
    good, bad = Copy(STORE, 0, 0), Copy(STORE, 1, 1)
    engine.submit([good, bad])
    assert not moved
    engine.finish(bad, OSError("no"))
    engine.finish(good)
    assert moved == [good]


def test_failures() -> None:
    memory = Memory("abcd", "____")
    engine = memory.engine()
    bad, doomed, good = Copy(STORE, 0, 0), Copy(STORE, 1, 1), Copy(STORE, 2, 2)
    reads, waits = Copy(LOAD, 3, 0, source=bad), Copy(LOAD, 3, 2, after=(bad,), source=good)
    engine.submit([bad, doomed, good, reads, waits])
    engine.doom(doomed)
    error = OSError("no")
    engine.finish(bad, error)
    assert bad.state is CopyState.RUNNING
    assert reads not in engine.running, "what reads it fails with it"
    late = Copy(LOAD, 3, 0, source=bad)
    engine.submit([late])
    engine.finish_all()
    assert engine.running == []
    assert set(engine.poll()) == {bad, doomed, good, reads, waits, late}
    assert engine.poll() == []
    failed = {copy for copy in engine.submitted if copy.state is CopyState.FAILED}
    assert failed == {bad, doomed, reads, late}
    assert bad.error is error
    assert all(isinstance(copy.error, CopyFailed) for copy in (doomed, reads, late))
    assert (memory.host, memory.device) == (["?", "?", "c", "_"], ["a", "b", "c", "c"])


def test_a_stalled_copy_runs_until_it_is_released() -> None:
    engine = ScriptedCopies()
    stuck, behind, free = Copy(LOAD, 0, 0), Copy(STORE, 1, 0), Copy(STORE, 2, 2)
    behind.after = (stuck,)
    engine.submit([stuck, behind, free])
    engine.stall(stuck)
    dice = random.Random(0)
    for _ in range(200):
        engine.tick(dice)
    engine.finish_all()
    assert engine.running == [stuck, behind]
    with pytest.raises(InvariantError):
        engine.finish(stuck)
    engine.release(stuck)
    engine.finish_all()
    assert engine.running == []


def test_overdue_when_the_script_says_so() -> None:
    engine = ScriptedCopies()
    load, ended, store = Copy(LOAD, 0, 0), Copy(LOAD, 1, 1), Copy(STORE, 2, 2)
    engine.submit([load, ended, store])
    for copy in (load, ended, store):
        engine.expire(copy)
    engine.finish(ended)
    assert not load.overdue
    assert engine.poll() == [ended]
    assert [copy.overdue for copy in (load, ended, store)] == [True, False, False]
    assert load.state is CopyState.RUNNING


def test_close_fails_all_but_what_is_stuck() -> None:
    memory = Memory("abc", "___")
    engine = memory.engine()
    stuck, runs = Copy(STORE, 0, 0), Copy(STORE, 1, 1)
    engine.submit([stuck, runs])
    engine.stall(stuck)
    engine.close()
    engine.close()
    assert engine.poll() == [runs]
    assert runs.state is CopyState.FAILED
    late = Copy(STORE, 2, 2)
    engine.submit([late])
    assert late.state is CopyState.FAILED
    assert memory.host == ["_"] * 3


def test_what_the_rules_forbid_is_an_error() -> None:
    engine = ScriptedCopies()
    copy = Copy(STORE, 0, 0)
    calls: list[Callable[[Copy], object]] = [engine.finish, engine.begin, engine.stall, engine.release, engine.doom]
    for call in calls:
        with pytest.raises(InvariantError, match=r"does not run"):
            call(copy)


def test_load_s_is_what_the_test_sets() -> None:
    engine = ScriptedCopies()
    assert engine.load_s(3) is None
    engine.page_s = 0.5
    assert engine.load_s(3) == 1.5
    engine.wait(1000.0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ticks_end_everything_and_nothing_too_early(data: st.DataObject) -> None:
    """Any graph of copies: what ends has all that it waits for behind it, and a source that failed takes its loads."""
    ended: list[Copy] = []
    engine = ScriptedCopies(write=lambda copy, _: ended.append(copy))
    copies: list[Copy] = []
    for number in range(data.draw(st.integers(1, 12))):
        stores = [copy for copy in copies if copy.kind is STORE]
        source = data.draw(st.sampled_from(stores)) if stores and data.draw(st.booleans()) else None
        after = tuple(data.draw(st.lists(st.sampled_from(copies), unique=True, max_size=3))) if copies else ()
        copies.append(Copy(STORE if source is None else LOAD, number, number, after=after, source=source))
    engine.submit(copies)
    dice = random.Random(data.draw(st.integers(0, 1000)))
    p_end = data.draw(st.sampled_from([0.2, 0.9]))
    while engine.running:
        engine.tick(dice, p_end, 0.3)
    assert set(engine.poll()) == set(copies)
    for copy in copies:
        source_failed = copy.source is not None and copy.source.state is CopyState.FAILED
        assert (copy in ended) is not source_failed
        assert not source_failed or copy.state is CopyState.FAILED
        if copy in ended:
            before = ended[: ended.index(copy)]
            waits = [*copy.after, *([copy.source] if copy.source else [])]
            assert all(other in before or other not in ended for other in waits)
