"""Several pools in one cache: admitted to all or none with one length; rolling labels, their protected prefix and the
negative control of why a windowed pool has no live discount."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from distkv import (
    Config,
    ConfigError,
    GroupMismatch,
    LabelConfig,
    MessageError,
    NoRoom,
    PagedKV,
    PrefixCache,
    RequestError,
    Sequence,
    SequenceError,
    TableError,
)
from distkv.config import from_mapping
from distkv.errors import InvariantError, RequestTooLarge
from distkv.testing.group import SimulatedGroup
from distkv.windows import RollingLedger, WindowedLedger
from tests.core.helpers import FINGERPRINT, admit, request
from tests.core.label_caches import SIZE, Ranks, config, full, grown, rolling, sliding
from tests.simulation import window_rules_off as off

A = list(range(100, 140))
BOTH = ("main", "cfg")


def solo(*labels: LabelConfig, **options: Any) -> PrefixCache:
    return PrefixCache(config(*labels, **options), FINGERPRINT, copy_page=lambda label, source, target: None)


# ---- two pools


def test_one_length_the_minimum_over_labels_and_ranks() -> None:
    ranks = Ranks(config(full()), config(full(30)))
    ranks.serve("a", A[:20], labels=BOTH)
    assert ranks.serve("b", [*A[:20], 1], labels=BOTH) == 20
    for rank, at in ((0, 7), (1, 5)):
        ledger = ranks.caches[rank]._ledger("cfg")
        ledger.index.drop(int(ledger.index.match(ranks.caches[rank].chain(A[:20]), 10).pages[at]))
    ranks.begin(("c", [*A[:20], 1], 0), labels=BOTH)
    outcomes: Any = ranks.group.end()
    records = [outcome.ready[0].record for outcome in outcomes]
    assert [(r.matched, r.agreed, str(r.reason)) for r in records] == [(7, 5, "group minimum"), (5, 5, "evicted")]
    ranks.check()
    for cache in ranks.caches:
        assert [len(pages.table) for pages in cache.running["c"].lists] == [5, 5]
        assert not cache._books.pool.holds.any()
    ranks.group.each(lambda cache: cache.abort("c"))
    assert ranks.serve("d", [*A[:20], 1]) == 20  # main has it all
    assert ranks.serve("e", [*A[:20], 1], labels=("cfg",)) == 10


def test_a_label_without_main() -> None:
    ranks = Ranks(config(full(), sliding()))
    assert ranks.serve("a", A[:20], labels=("cfg",)) == 0
    stats = ranks.caches[0].stats()
    assert (stats.entries, stats.labels["cfg"].entries, stats.labels["win"].entries) == (0, 10, 0)
    assert ranks.serve("b", [*A[:20], 1], labels=("cfg",)) == 20
    assert ranks.serve("c", [*A[:20], 1]) == 0


def test_admitted_to_all_or_none() -> None:
    cache = solo(full(8), pages=40)
    first = admit(cache, "a", [1] * 10, labels=BOTH)
    assert cache.leftovers == {"main": 35, "cfg": 3}
    cache.submit(request(cache, "b", [2] * 10, labels=BOTH))
    cache.submit(request(cache, "c", [2] * 2))
    result = cache.step()
    waiting = [(w.request_id, w.why, w.pages_short) for w in result.waiting]
    assert waiting == [("b", "no room", 2), ("c", "behind it", 0)]
    assert cache.leftovers == {"main": 35, "cfg": 3}
    assert cache.stats().pages_held == cache.stats().labels["cfg"].pages_held == 0
    grown(cache, first, 10)
    first.finish()
    assert [s.id for s in cache.step().ready] == ["b", "c"]


def test_the_discount_is_of_each_label() -> None:
    cache = solo(full(40), index_on="fill")
    admit(cache, "a", A[:12], 8, labels=BOTH)
    grown(cache, cache.running["a"], 12)
    grown(cache, admit(cache, "other", A[:13]), 1)
    main, cfg = cache._books.ledgers
    before = main.room, cfg.room
    cache.running["a"].finish()
    between = main.room, cfg.room
    assert between[0] - before[0] == 4  # its first 6 pages are still live, by the other
    assert between[1] - before[1] == 10
    admit(cache, "b", [*A[:12], 1, 2], 0, labels=BOTH)
    assert between[0] - main.room == between[0] - cache.leftovers["main"] == 1
    assert between[1] - cfg.room == between[1] - cache.leftovers["cfg"] == 7


def test_pages_of_two_labels_never_mix() -> None:
    cache = solo(full(50), pages=20)
    sequence = grown(cache, admit(cache, "a", A[:20], labels=BOTH), 20)
    for label, pages in zip(BOTH, sequence.lists, strict=True):
        assert sequence.pages_of(label) is pages
        tables = cache.tables([], label=label)
        assert tables.rows == 0
    main, cfg = cache._books.ledgers
    assert main.pool is not cfg.pool
    assert (main.pool.live, cfg.pool.live) == (10, 10)
    sequence.finish()
    assert (cache.stats().pages_cached, cache.stats().labels["cfg"].pages_cached) == (10, 10)
    cache.reset()
    assert cache.stats().labels["cfg"].pages_free == 50


def test_what_is_refused_names_its_label() -> None:
    cache = solo(full(4), sliding())
    for labels, limit, error, text in (
        (BOTH, 9, RequestTooLarge, r"needs 5 pages of label 'cfg'"),
        (("main", "nowhere"), 0, RequestError, r"there is no label 'nowhere' .*may ask for main, cfg$"),
        (("main", "win"), 0, RequestError, r"label 'win' is a sliding one, which comes with main"),
    ):
        cache.submit(request(cache, "a", [1], limit, labels=labels))
        refused, = cache.step().refused
        assert type(refused.error) is error
        with pytest.raises(error, match=text):
            raise refused.error
    with pytest.raises(MessageError, match="there is no label 'nowhere'; the configuration has main, cfg, win"):
        cache.tables([], label="nowhere")
    with pytest.raises(TableError, match=r"set labels\.cfg\.scratch_pages to"):
        cache.tables([], label="cfg", pad_to=1)
    for labels, text in (((), "at least one"), (["main"], "must be a tuple"), (("main", "main"), "names one twice"),
                         ((1,), "must be a tuple")):
        with pytest.raises(RequestError, match=text):
            request(cache, "b", [1], labels=labels)
    with pytest.raises(MessageError, match="has something for label 'x'"):
        PrefixCache(config(full()), FINGERPRINT, copies={"x": None})  # type: ignore[dict-item]
    memory = PagedKV(torch.zeros(50, 4, 1, dtype=torch.float32), axes="page token dim")
    with pytest.raises(MessageError, match="one object for two labels"):
        PrefixCache(config(full()), FINGERPRINT, kv={"main": memory, "cfg": memory})


def test_growth_and_suspension_in_two_labels() -> None:
    cache = solo(full(12), pages=40)
    sequence = grown(cache, admit(cache, "a", A[:12], 4, labels=BOTH), 14)
    assert cache.grow(sequence, 2)
    assert [pages.reserved for pages in sequence.lists] == [3, 3]
    with pytest.raises(NoRoom, match="in label 'cfg': "):
        cache.grow(sequence, 3)
    cache.check()
    sequence.suspend()
    cache.check()
    assert cache.stats().labels["cfg"].pages_live == 0
    cache.resume("a")
    again, = cache.step().ready
    assert (again.cached_tokens, again.labels) == (12, BOTH)
    with pytest.raises(NoRoom, match="of label 'cfg'"):
        cache.grow(again, 30, wait=True)
    grown(cache, again, 2).finish()
    cache.check()


def test_a_host_tier_of_a_second_label() -> None:
    ranks = Ranks(*[config(full(12, host=20), pages=60, host=30)] * 2)
    ranks.serve("a", A[:20], labels=BOTH)
    ranks.serve("b", [3] * 20, labels=BOTH)  # takes the place of a in cfg alone
    ranks.copied()
    result = ranks.step(("c", [*A[:20], 1], 0), labels=BOTH)
    sequence, = result.loading
    assert (sequence.cached_tokens, sequence.record.host_tokens, sequence.record.matched) == (20, 16, 2)
    ranks.copied()
    assert ranks.step().ready == (sequence,)
    ranks.computes("c", 1)
    ranks.group.each(lambda cache: cache.running["c"].suspend())
    ranks.group.each(lambda cache: cache.resume("c"))
    ranks.copied()
    ranks.step()
    ranks.copied()
    ranks.step()
    ranks.group.each(lambda cache: cache.abort("c"))
    ranks.check()


def test_ranks_that_are_asked_for_other_labels_are_noticed() -> None:
    ranks = Ranks(*[config(full())] * 2)
    for cache, labels in zip(ranks.caches, (("main",), ("cfg",)), strict=True):
        cache.submit(request(cache, "a", A[:4], labels=labels))
    ranks.begin()
    assert {type(outcome).__name__ for outcome in ranks.group.end()} == {"GroupDivergence"}


@pytest.mark.parametrize(("theirs", "named"), [
    ((), "labels"), ((full(),), r"labels"),
    ((sliding(), full()), r"labels\[0\]\.name"), ((full(), sliding(window=5)), "window_tokens"),
    ((full(), sliding(allowance=2)), "allowance_tokens"), ((full(), sliding(chunk=6)), "chunk_tokens"),
    ((full(name="other"), sliding()), "labels"), ((full(7), sliding(9)), None),
])
def test_ranks_agree_on_their_labels(theirs: tuple[LabelConfig, ...], named: str | None) -> None:
    configs = [config(full(), sliding()), config(*theirs)]
    if named is None:
        SimulatedGroup(configs, FINGERPRINT)
        return
    with pytest.raises(GroupMismatch, match=named):
        SimulatedGroup(configs, FINGERPRINT)


@pytest.mark.parametrize(("given", "path", "text"), [
    ({"name": "main"}, "name", "choose another"), ({"name": ""}, "name", "1 to 64"), ({"pages": 0}, "pages", "from 1"),
    ({"pages": 4, "scratch_pages": 4}, "scratch_pages", "less than pages"),
    ({"kind": "slide"}, "kind", "sliding"), ({"kind": "sliding"}, "window_tokens", "is missing"),
    ({"kind": "rolling"}, "window_tokens", "is missing"), ({"window_tokens": 4}, "window_tokens", "this one is full"),
    ({"chunk_tokens": 4}, "chunk_tokens", "this one is full"), ({"allowance_tokens": 0}, "allowance_tokens", "full"),
    ({"kind": "sliding", "window_tokens": 0}, "window_tokens", "from 1"), ({"windows": 3}, "windows", "window_tokens"),
])
def test_wrong_labels_in_a_file(given: dict[str, Any], path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        from_mapping({"labels": [{"name": "x", **given}]}, Config)
    assert path in str(error.value)


def test_two_labels_of_one_name_and_lockstep_with_a_host() -> None:
    with pytest.raises(ConfigError, match="two labels of the name 'cfg'"):
        config(full(), full())
    with pytest.raises(ConfigError, match="host_pages and cache"):
        config(full(host=4), agreement="lockstep")


def test_lockstep_with_two_labels() -> None:
    ranks = Ranks(*[config(full(12), pages=30, agreement="lockstep", check_every=1)] * 2)
    for n in range(4):
        assert ranks.serve(f"a{n}", [*A[:10], n], labels=BOTH) == (10 if n else 0)
    ledger = ranks.caches[1]._ledger("cfg")
    ledger.index.drop(int(ledger.index.match(ranks.caches[1].chain(A[:10]), 5).pages[0]))
    ranks.begin()
    assert {type(outcome).__name__ for outcome in ranks.group.end()} == {"GroupDivergence"}


# ---- rolling labels

ROLL = ("main", "roll")


def test_only_the_protected_run_is_stored() -> None:
    cache = solo(rolling(window=12))
    sequence = grown(cache, admit(cache, "a", A[:10], 30, labels=ROLL), 10)
    sequence.protect_prefix(5)  # three pages
    assert sequence.release_oldest(4) == 4
    assert sequence.prefix_epoch == 1
    pages = sequence.pages_of("roll")
    assert (pages.protected, pages.first, pages.gone, len(pages.table)) == (3, 5, 2, 3)
    grown(cache, sequence, 4)
    sequence.finish()
    cache.check()
    stats = cache.stats()
    assert (stats.labels["roll"].entries, stats.entries) == (3, 7)
    assert stats.labels["roll"].pages_live == 0
    again = admit(cache, "b", [*A[:10], 1], labels=ROLL)
    assert again.cached_tokens == 6
    assert again.pages_of("roll").protected == 3
    grown(cache, again, 4).release_oldest(4)
    with pytest.raises(SequenceError, match="no slots"):
        again.slots(4, 10, "roll")


def test_without_protection_nothing_is_stored() -> None:
    cache = solo(rolling())
    grown(cache, admit(cache, "a", A[:10], labels=ROLL), 10).finish()
    assert cache.stats().labels["roll"].entries == 0
    assert admit(cache, "b", [*A[:10], 1], labels=ROLL).cached_tokens == 0


def test_a_seeded_prefix_is_not_pulled_from_under_the_index() -> None:
    cache = solo(rolling(window=12), index_on="fill")
    first = grown(cache, admit(cache, "a", A[:10], 30, labels=ROLL), 4)
    first.protect_prefix(4)
    grown(cache, first, 6)
    second = admit(cache, "b", [*A[:4], *[1] * 9], labels=ROLL)
    assert second.cached_tokens == 4
    shared = second.pages_of("roll").table.tolist()
    grown(cache, second, 9)
    for sequence in (first, second):
        assert sequence.release_oldest(6) == 6
        assert sequence.pages_of("roll").table[:2].tolist() == shared
    pool = cache._ledger("roll").pool
    assert pool.owners[shared].tolist() == [2, 2]
    first.finish()
    second.abort()
    cache.check()
    assert pool.cached()[shared].all()


def test_a_shared_page_is_decremented() -> None:
    """Of a fork: one releases, the other has the page still."""
    cache = solo(rolling(window=12))
    parent = grown(cache, admit(cache, "a", A[:10], 10, labels=ROLL), 10)
    child, = parent.fork()
    pages = parent.pages_of("roll").table.copy()
    assert parent.release_oldest(6) == 6
    pool = cache._ledger("roll").pool
    assert pool.owners[pages].tolist() == [1, 1, 1, 2, 2]
    cache.check()
    assert child.pages_of("roll").table.tolist() == pages.tolist()
    parent.finish()
    grown(cache, child, 4)
    child.finish()
    cache.check()
    assert cache.stats().labels["roll"].pages_free == 40


def test_protect_and_release_say_what_is_wrong() -> None:
    cache = solo(rolling(window=8, chunk=4), full())
    plain = admit(cache, "p", A[:4], labels=BOTH)
    for call in (plain.protect_prefix, plain.release_oldest):
        with pytest.raises(SequenceError, match="has no rolling label; it has main, cfg"):
            call(0)
    sequence = grown(cache, admit(cache, "a", A[:20], 20, labels=ROLL), 12)
    for n, text in ((13, "12 are committed"), (-1, "12 are committed"), (12, "window has 7 pages, and one")):
        if n == 12:
            sequence.release_oldest(0)
        if text.startswith("window"):
            continue
        with pytest.raises(SequenceError, match=text):
            sequence.protect_prefix(n)
    with pytest.raises(SequenceError, match="whole number"):
        sequence.release_oldest(1.5)  # type: ignore[arg-type]
    with pytest.raises(SequenceError, match="cannot release -1"):
        sequence.release_oldest(-1)
    assert sequence.prefix_epoch == 0
    with pytest.raises(SequenceError, match=r"of label 'roll'; release_oldest first"):
        sequence.open(5)
    assert sequence.release_oldest(3) == 2
    with pytest.raises(SequenceError, match=r"pages 0 \.\. 0 were released"):
        sequence.protect_prefix(2)
    sequence.open(4)
    cache.check()


def test_as_much_as_the_window_cannot_be_protected() -> None:
    cache = solo(rolling(window=3, chunk=2))
    most = cache._ledger("roll").promised_for(99)
    sequence = admit(cache, "a", A[:20], 20, labels=ROLL)
    grown(cache, sequence, 2 * most, 2)
    with pytest.raises(SequenceError, match=rf"its window has {most} pages, and one has to be left to write to"):
        sequence.protect_prefix(2 * most)
    sequence.protect_prefix(2 * most - 2)
    for _ in range(4):
        sequence.release_oldest(2)
        grown(cache, sequence, 2, 2)


def test_a_request_of_a_rolling_label_alone_ends_at_its_limit() -> None:
    """Its window has pages left there, which are no more tokens."""
    cache = solo(rolling(window=8))
    sequence = admit(cache, "r", A[:8], 3, labels=("roll",))
    for _ in range(3):
        grown(cache, sequence, 4)
        sequence.release_oldest(4)
    assert sequence.pages_of("roll").reserved > 0
    with pytest.raises(SequenceError, match=r"1 more page.*0 are reserved \(prompt 8 \+ limit 3\)"):
        sequence.open(1)
    cache.check()
    assert cache.grow(sequence, 1)
    grown(cache, sequence, 2)
    sequence.finish()
    cache.check()
    assert cache._books.ledgers[1].pool.live == 0


def test_a_rolling_label_alone_has_no_largest_limit() -> None:
    """Neither the pool nor the page table is larger for it."""
    cache = solo(rolling(window=8))
    sequence = admit(cache, "r", A[:8], 1 << 62, labels=("roll",))
    assert cache.grow(sequence, 1 << 62)
    for _ in range(60):
        grown(cache, sequence, 4)
        last = int(sequence.pages_of("roll").table[-1])
        assert sequence.slots(sequence.committed - 1, sequence.committed).tolist() == [SIZE * last + 1]
        sequence.release_oldest(4)
    assert len(sequence.pages_of("roll").pages) < 256
    sequence.finish()
    cache.check()


def test_less_than_a_page_counts_with_the_next_call() -> None:
    cache = solo(rolling(window=12))
    sequence = grown(cache, admit(cache, "a", A[:10], 10, labels=ROLL), 10)
    assert [sequence.release_oldest(1) for _ in range(6)] == [0, 2, 0, 2, 0, 2]
    assert sequence.release_oldest(100) == 4  # all that is committed
    assert sequence.release_oldest(1) == 0
    assert sequence.prefix_epoch == 4
    grown(cache, sequence, 3)
    assert sequence.release_oldest(1) == 0  # what was asked for beyond the committed ones is not owed
    cache.check()


# ---- the model of shared/model: why a windowed pool has no live discount


def window_of_three(*, check: bool = True) -> list[str]:
    """Pool of 7 pages, 3 promised to each: A runs on two, B matches both, C wants the rest, and A goes on."""
    settings = config(sliding(7, window=4, chunk=1), index_on="fill")
    cache = PrefixCache(replace(settings, pool=replace(settings.pool, check=check)), FINGERPRINT)
    a = admit(cache, "a", A[:20])

    def compute(sequence: Sequence, tokens: int) -> None:
        for _ in range(tokens):
            sequence.open(1)
            sequence.commit(1)
            if check:
                cache.check()

    compute(a, 8)
    cache.submit(request(cache, "b", [*A[:8], *[1] * 12]))
    cache.submit(request(cache, "c", [5] * 20))
    ready = [s.id for _ in range(2) for s in cache.step().ready]
    b = cache.running["b"]
    assert b.cached_tokens == 8
    for name in ready[1:]:
        compute(cache.running[name], 6)
    compute(a, 8)
    compute(b, 8)
    for sequence in cache.running.values():  # three pages each, until the token is committed
        sequence.open(1)
    return ready


def test_no_live_discount() -> None:
    assert window_of_three() == ["b"]  # C waits: A and B may come to 6 pages
    for rule in (off.no_live_discount, off.room_by_claims):
        with rule(), pytest.raises(InvariantError, match="more pages are promised"):
            window_of_three()


def test_with_a_live_discount_a_promised_page_is_not_there() -> None:
    """As a full label promises: then a sequence that gives a shared page up cannot open the one that it is promised."""
    with off.no_live_discount(), off.room_by_claims(), pytest.raises(NoRoom, match="opening pages inside a reserv"):
        window_of_three(check=False)


def test_an_ended_sequence_protects_until_its_passes_have_retired() -> None:
    def case() -> None:
        cache = solo(rolling(10, window=12, chunk=4), index_on="fill", asynchronous=True)
        first = admit(cache, "a", A[:10], labels=ROLL)
        grown(cache, first, 8)
        first.protect_prefix(8)
        grown(cache, first, 2)
        cache.submit(request(cache, "b", [*A[:8], *[1] * 20], labels=ROLL))
        cache.begin_step()
        first.abort()
        cache.end_step()
        cache.check()
        cache.step()
        cache.check()
        cache.retired(cache.steps - 1)
        cache.step()
        assert cache.running["b"].cached_tokens == 8
        cache.check()

    case()
    with off.protected_until_retired(), pytest.raises(InvariantError):
        case()


def test_the_discount_of_a_protected_prefix() -> None:
    cache = solo(rolling(20, window=12, chunk=4), index_on="fill")
    ledger = cache._ledger("roll")
    assert isinstance(ledger, RollingLedger)
    assert isinstance(ledger, WindowedLedger)
    first = grown(cache, admit(cache, "a", A[:20], 20, labels=ROLL), 8)
    first.protect_prefix(8)
    grown(cache, first, 2)
    cache.step()
    before = cache.leftovers["roll"]
    second = admit(cache, "b", [*A[:8], *[1] * 20], labels=ROLL)
    assert second.cached_tokens == 8
    assert before - cache.leftovers["roll"] == ledger.most - 4
    assert ledger.spared == 4
    first.finish()
    assert ledger.spared == 0
    cache.check()
    second.abort()
    cache.check()
    assert not ledger.protectors.any()


def test_a_host_tier_without_memory_names_the_label() -> None:
    with pytest.raises(ConfigError, match=r"labels\.cfg\.host_pages: asks for a host tier.*for label cfg"):
        PrefixCache(config(full(host=4)), FINGERPRINT)
    memory = PagedKV(torch.zeros(40, 2, 1), axes="page token dim")
    with pytest.raises(ConfigError, match=r"labels\.cfg\.pages: is 30, but the engine's tensors have 40 pages"):
        PrefixCache(config(full(30)), FINGERPRINT, kv={"cfg": memory})


def test_what_one_copy_engine_raises_at_its_end_leaves_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(config(full(host=4), sliding(host=4), host=4))
    closed: list[str] = []

    def closing(label: str) -> None:
        closed.append(label)
        if label == "main":
            raise RuntimeError("planted")

    for label, engine in ranks.engines[0].items():
        monkeypatch.setattr(engine, "close", lambda label=label: closing(label))
    with pytest.raises(RuntimeError, match="planted"):
        ranks.caches[0].close()
    assert sorted(closed) == ["cfg", "main", "win"]


def test_the_plan_has_the_host_pages_of_labels(caplog: pytest.LogCaptureFixture) -> None:
    memory = PagedKV(torch.zeros(40, 2, 1, dtype=torch.float32), axes="page token dim")
    with caplog.at_level("INFO"):
        cache = PrefixCache(config(full(host=6)), FINGERPRINT, kv={"cfg": memory})
    assert "1 x 6 pages of other labels, 48 B" in caplog.text
    cache.close()


def test_bytes_go_to_the_host_of_a_label_and_back() -> None:
    """With the real copy engine: what the pages hold is what they held."""
    pools = {name: torch.zeros(12, 2, 1, dtype=torch.int32) for name in BOTH}
    settings = config(full(12, host=20), pages=12, host=20)
    cache = PrefixCache(settings, FINGERPRINT, kv={
        name: PagedKV(pool, axes="page token dim") for name, pool in pools.items()})

    def serve(name: str, tokens: list[int]) -> int:
        cache.submit(request(cache, name, tokens, labels=BOTH))
        for _ in range(200):
            ready = cache.step().ready
            if ready:
                break
            cache.wait_for_copies()
        sequence, = ready
        for label, pool in pools.items():
            flat = pool.reshape(-1)
            found = flat[torch.from_numpy(sequence.slots(0, sequence.cached_tokens, label))].tolist()
            assert found == [token + len(label) for token in tokens[: sequence.cached_tokens]]
        start = sequence.cached_tokens
        sequence.open(len(tokens) - start)
        cache.fence()
        for label, pool in pools.items():
            slots = torch.from_numpy(sequence.slots(start, len(tokens), label))
            pool.reshape(-1)[slots] = torch.tensor(tokens[start:], dtype=torch.int32) + len(label)
        sequence.commit(len(tokens) - start)
        sequence.finish()
        cache.check()
        return start

    assert serve("a", A[:20]) == serve("b", A[20:]) == 0
    assert serve("c", [*A[:20], 1]) == 20
    assert cache.stats().labels["cfg"].loads >= 8
    assert cache.settle()
    cache.close()
