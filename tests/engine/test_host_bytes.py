"""What lies on the host: the fence of each pass, the check of its bytes, and ``distkv verify`` over both tiers."""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from distkv.config import HostConfig
from distkv.engine import verify
from distkv.engine.engine import Engine
from distkv.engine.model import Model, load_model
from distkv.engine.page_check import CacheCheck, check_cache
from distkv.engine.record import Recording
from distkv.engine.requests import Prompt
from distkv.errors import GateFailed
from distkv.host import open as opening
from distkv.host.copies import Copy, Kind
from distkv.host.threads import ThreadedCopies
from tests.engine import tiny

Folders = Callable[[str, int], Path]
FIRST, SECOND = tiny.tokens(70, 1), tiny.tokens(90, 2)


@pytest.fixture(scope="module", params=[True, False], ids=["invariant", "as recorded"])
def model(folders: Folders, request: pytest.FixtureRequest) -> Model:
    settings = tiny.config(folders("llama", 4), batch_invariant=request.param)
    model = load_model(settings.model)
    Engine(settings, model).close()
    return model


def engine_of(model: Model, folder: Path, **host: object) -> Engine:
    """A pool in which the second prompt has no place beside the first."""
    settings = tiny.config(folder, pages=8, batch_invariant=model.query_tiles is not None)
    tier = HostConfig(**{"pages": 20, "skip_slow_loads": False, **host})
    engine = Engine(replace(settings, host=tier), model)
    engine.recording = Recording(engine.pool)
    return engine


def filled(model: Model, folder: Path, **host: object) -> Engine:
    engine = engine_of(model, folder, **host)
    for tokens in (FIRST, SECOND):
        engine.generate([Prompt(tokens=tokens)])
    return engine


def checked(engine: Engine) -> CacheCheck:
    return check_cache(engine.model, engine.cache, engine.pool, recording=engine.recording)


class OnlyWhenWaitedFor(ThreadedCopies):
    """A store reads its page when somebody waits for it, and not before: as late as any store may."""

    go = threading.Event()

    def _move(self, copy: Copy) -> None:
        if copy.kind is Kind.STORE:
            self.go.wait()
        super()._move(copy)

    def _fence(self, copies: list[Copy]) -> None:
        self.go.set()
        super()._fence(copies)
        self.go.clear()

    def wait(self, timeout_s: float) -> None:
        self.go.set()
        super().wait(timeout_s)

    def close(self) -> None:
        self.go.set()
        super().close()


@pytest.mark.parametrize("fenced", [True, False])
def test_a_pass_waits_for_the_stores_of_the_pages_that_it_writes(
    model: Model, folders: Folders, monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    monkeypatch.setattr(opening, "ThreadedCopies", OnlyWhenWaitedFor)
    OnlyWhenWaitedFor.go.clear()
    engine = engine_of(model, folders("llama", 4))
    if not fenced:
        monkeypatch.setattr(engine.cache, "fence", lambda: None)
    for tokens in (FIRST, SECOND):
        engine.generate([Prompt(tokens=tokens)])
    assert engine.cache.stats().stores >= 2
    found = checked(engine)
    assert found.host_pages >= 2
    assert bool(found.differences) != fenced
    engine.close()


@pytest.mark.parametrize("policy", ["evict", "finish"])
def test_one_bit_on_the_host_is_found_and_named(model: Model, folders: Folders, policy: str) -> None:
    """Whether the page is there alone or a copy of one on the device."""
    engine = filled(model, folders("llama", 4), write_policy=policy)
    clean = checked(engine)
    stats = engine.cache.stats()
    assert clean == CacheCheck(stats.pages_cached, (), stats.host_ready)
    assert clean.host_pages >= (2 if policy == "evict" else 9)
    places = [(prefix, i, int(host)) for prefix in engine.cache.cached_prefixes(hosts=True)
              for i, host in enumerate(prefix.hosts) if host >= 0]
    prefix, number, host = places[-1]
    assert (prefix.pages[number] >= 0) == (policy == "finish")
    row = engine.cache.host_row(host).view(2, 2, tiny.PAGE, -1)  # layers, planes, tokens, bytes
    row[1, 0, 5, 3] ^= 4
    (found,) = checked(engine).differences
    token = number * tiny.PAGE + 5
    wanted = f"page {number}, layer 1, keys differ: host page {host}, token {token} (5 of the page)"
    assert found.difference.text() == wanted
    assert found.tokens.tolist() == prefix.tokens[: (number + 1) * tiny.PAGE].tolist()
    engine.close()


def test_a_copy_that_does_not_end_is_no_proof(
    model: Model, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = filled(model, folders("llama", 4))
    monkeypatch.setattr(engine.cache, "settle", lambda: False)
    with pytest.raises(GateFailed, match="did not end"):
        checked(engine)
    engine.close()


# ---- distkv verify


def command(path: Path, model: Path, *, pages: int, reserve: str = "2", host: str = "{pages: 40, preemption_pages: 8}",
            schedules: int = 0) -> tuple[int, str, str]:  # fmt: skip
    path.write_text(f"""
        cache: {{page_size: 16}}
        pool: {{pages: {pages}}}
        host: {host}
        model: {{source: {model}}}
        engine: {{output_limit: 4, batch_tokens: 64, batch_invariant: true, reserve_tokens: {reserve}}}
    """)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        code = verify.main([str(path), "--random", "--schedules", str(schedules)])
    return code, out.getvalue(), err.getvalue()


def test_verify_says_how_much_came_back_and_went_on(
    folders: Folders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code, out, err = command(tmp_path / "c.yaml", folders("llama", 4), pages=12, schedules=2)
    assert code == 0, out + err
    found = re.search(r"of these, (\d+) tokens came back from the host, requests went on after (\d+) suspensions, and "
                      r"(\d+) host pages had the bytes", out)  # fmt: skip
    assert found and all(map(int, found.groups())), out
    assert re.search(r"run 1, .* pages and \d+ on the host.*: same bits, \d+ tokens from the cache, \d+ of them from "
                     r"the host", out)  # fmt: skip
    assert sum(message.startswith("host tier: 40 pages") for message in caplog.messages) == 1, "said once"


@pytest.mark.parametrize(("given", "words"), [
    ({"pages": 64}, "nothing came back from the host tier, so reading in was not verified: lower pool.pages"),
    ({"pages": 64, "host": "{}"}, "engine.reserve_tokens is set, but no request was suspended, so going on was not"),
])  # fmt: skip
def test_verify_does_not_pass_for_what_was_not_put_to_use(
    folders: Folders, tmp_path: Path, given: dict[str, object], words: str
) -> None:
    code, out, err = command(tmp_path / "c.yaml", folders("llama", 4), **given)  # type: ignore[arg-type]
    assert code == 1, out
    assert words in err


class Damaging(ThreadedCopies):
    """One bit of the first page that is stored is wrong on the host."""

    done = False

    def _move(self, copy: Copy) -> None:
        super()._move(copy)
        if copy.kind is Kind.STORE and not self.done:
            type(self).done = True
            self.rows.row(copy.host)[100] ^= 1


def test_verify_finds_a_bit_that_was_lost_on_the_host(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "ThreadedCopies", Damaging)
    code, out, err = command(tmp_path / "c.yaml", folders("llama", 4), pages=8)
    assert Damaging.done
    assert code == 1, out
    assert re.search(r"^  request 'random \d, turn \d', rank 0: (in the cache, )?page \d+.*, layer 0, keys differ: "
                     r"(host|pool) page \d+, token \d+", err, re.MULTILINE), err  # fmt: skip
