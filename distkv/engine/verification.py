"""A model on its requests: without the cache, with it in order and under random schedules; and what differs."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distkv._text import counted
from distkv.engine import gate
from distkv.engine.compare import Difference, GateReport, compare
from distkv.engine.config import ServeConfig
from distkv.engine.engine import Engine
from distkv.engine.fuzz import Trial, in_order, random_trial
from distkv.engine.gate import Recomputed
from distkv.engine.launch import Ranks
from distkv.engine.model import Model
from distkv.engine.page_check import CacheCheck, check_cache
from distkv.engine.record import Recorded, RecordedRequest, Recording
from distkv.engine.report import Output, OutputLost
from distkv.engine.requests import Prompt
from distkv.engine.turns import Talk
from distkv.engine.windowed import WINDOW
from distkv.errors import ConfigError, DistKVError, GroupError, ModelError, PromptError
from distkv.torch_group import TorchGroup

__all__ = ["Failed", "Verification", "expected_of"]

_SAME_SCHEDULE = (
    "         engine.batch_invariant is off, so bits depend on the schedule: each run is compared with itself, "
    "computed again without the cache in the same batches. With it on, any two schedules are compared."
)
_SHOWN = 5  # differences of each rank


class Failed(DistKVError):
    """The bits differ, or there was nothing to compare. Raised on all ranks alike; ``code`` is the exit code."""

    def __init__(self, lines: Iterable[str], code: int = 1) -> None:
        self.lines = tuple(lines)
        self.code = code
        super().__init__("; ".join(self.lines))


@dataclass(slots=True)
class _Counts:
    runs: int = 0
    requests: int = 0
    rows: int = 0
    pages: int = 0
    cached_tokens: int = 0
    checked_pages: int = 0
    host_tokens: int = 0
    suspended: int = 0
    forked: int = 0
    host_pages: int = 0


class Verification:
    """One rank's part. All ranks call ``prepare``, ``cold``, ``warm`` with 0, 1, 2 ... and ``conclude``."""

    def __init__(self, config: ServeConfig, model: Model, tokenizer: Any, ranks: Ranks, out: Output) -> None:
        # the checks are 3 % of the time with a model of two layers; what is on the host is to be used, slow or not
        self._config = replace(config, engine=replace(config.engine, cache="on"), pool=replace(config.pool, check=True),
                               host=replace(config.host, skip_slow_loads=False))
        self._model, self._tokenizer, self._ranks, self._out = model, tokenizer, ranks, out
        self._references: dict[str, RecordedRequest] = {}
        self._counts = _Counts()
        self._first: Engine | None = None

    def prepare(self) -> None:
        """Makes the first engine: what cannot be served shows here."""
        self._first = self._engine(self._config, None)

    @property
    def _invariant(self) -> bool:
        """Whether any two schedules give the same bits."""
        return self._model.query_tiles is not None

    def _engine(self, config: ServeConfig, trial: Trial | None) -> Engine:
        engine = Engine(config, self._model, self._tokenizer, cache_group=self._ranks.cache_group,
                        handoff_group=self._ranks.handoff_group,
                        scheduler=trial.scheduler if trial is not None else None)  # fmt: skip
        engine.recording = Recording(engine.pool)
        return engine

    # ---- the runs

    def cold(self, talks: Callable[[], list[Talk]]) -> None:
        """Answers every turn without the cache; ``talks`` is called on rank 0. Raises ``PromptError`` for one that the
        model or the pool cannot take."""
        engine = self._first
        assert engine is not None
        self._first = None
        if not self._invariant:
            self._out.line(_SAME_SCHEDULE)
        try:
            self._drive(engine, lambda: self._answer(engine, talks()))
        finally:
            engine.close()
        assert engine.recording is not None
        self._references = engine.recording.requests

    def _answer(self, engine: Engine, talks: list[Talk]) -> None:
        for talk in talks:
            number, prompt = 1, next(talk.turns, None)
            while prompt is not None:
                name = f"{talk.name}, turn {number}"
                done = engine.generate([Prompt(tokens=prompt, id=name, read=False, write=False)])[0]
                if done.error is not None:
                    raise PromptError(name, f"cannot run: {done.error}")
                self._out.phase(f"without the cache: {name}, {counted(done.prompt_tokens, 'token')} and "
                                f"{len(done.token_ids)} of the answer")  # fmt: skip
                self._out.check()
                number += 1
                try:
                    prompt = talk.turns.send(done)
                except StopIteration:
                    prompt = None

    def warm(self, number: int, seed: int, *, last: bool) -> None:
        """Run 0 is in order, every other one random; compares it. After the ``last`` all cached pages are checked.

        Raises ``Failed`` on all ranks when one finds a difference.
        """
        trial = self._trial(number, seed)
        engine = self._engine(trial.config, trial)
        try:
            self._drive(engine, lambda: _run(engine, trial))
            report = self._compared(engine, trial)
            pages = check_cache(self._model, engine.cache, engine.pool, window=engine.pools.get(WINDOW),
                                recording=engine.recording) if last else None  # fmt: skip
            stats = engine.cache.stats()
        finally:
            engine.close()
        self._counts.host_tokens += stats.host_tokens
        self._counts.suspended += stats.suspended
        self._counts.forked += stats.forked
        tiers = [f"{stats.host_tokens} of them from the host"] * bool(stats.host_tokens)
        if stats.suspended:
            tiers.append(f"{counted(stats.suspended, 'suspension')}")
        if stats.forked:
            tiers.append(f"{counted(stats.forked, 'fork')}")
        what = f"run {number}, seed {seed} ({trial.text})"
        self._take(what, report, pages, tiers)

    def _trial(self, number: int, seed: int) -> Trial:
        references = list(self._references.values())
        if number == 0:
            return in_order(self._config, references)
        random = np.random.default_rng([seed, number])
        # in a second pool, of layers with a window, there might be no place for forks
        forks = self._model.windows is None or not self._model.windows.apart
        return random_trial(self._config, references, random, self._model.vocab_size, within_pages=not self._invariant,
                            pressed=number == 1 and self._config.host.configured, forks=forks)

    def _compared(self, engine: Engine, trial: Trial) -> GateReport:
        recording = engine.recording
        assert recording is not None
        expected: Mapping[str, Recorded]
        # a sample is named as its request, with a number behind it; the names of requests have none
        parts = {part: original for name, original in trial.known.items() for each in (name, f"{name}/1", f"{name}/2")
                 for part in recording.parts(each)}  # fmt: skip
        if self._invariant:
            expected = {part: expected_of(recording.requests[part], self._references[it]) for part, it in parts.items()}
        else:
            expected = gate.recompute(self._model, recording, list(parts), continued=True)
        return replace(compare(recording, expected, rank=self._ranks.rank), requests=len(trial.known))

    def _drive(self, engine: Engine, work: Callable[[], None]) -> None:
        """Rank 0 does ``work`` with the engine, the others follow. An error of rank 0 ends all, with one exit code."""
        if self._ranks.rank:
            engine.follow()
            code = self._everyone(0, "the end of a run")[0]
            if code:
                raise Failed((), code)
            return
        try:
            work()
            self._out.check()
        except GroupError:
            raise
        except Exception as error:  # told to the other ranks, and handed on
            if engine.broken:
                raise  # they know, and take part in nothing more
            engine.shutdown(failed=True)
            unusable = isinstance(error, (ConfigError, ModelError, PromptError))
            code = error.code if isinstance(error, OutputLost) else 2 if unusable else 1
            self._everyone(code, "the end of a run")
            raise
        engine.shutdown()
        self._everyone(0, "the end of a run")

    # ---- what came of it

    def _take(self, what: str, report: GateReport, pages: CacheCheck | None, tiers: list[str]) -> None:
        found = [*report.found, *(self._page_differences(pages, report.requests) if pages is not None else ())]
        checked = (pages.pages, pages.host_pages) if pages is not None else (0, 0)
        told = self._everyone([found[:_SHOWN], len(found), report.cached_tokens, *checked], "the outcome of a run")
        counts = self._counts
        counts.runs += 1
        counts.requests += report.requests
        counts.rows += report.rows
        counts.pages += report.pages
        counts.cached_tokens += min(cached for _, _, cached, *_ in told)
        counts.checked_pages += min(pages for *_, pages, _ in told)
        counts.host_pages += min(pages for *_, pages in told)
        total = sum(n for _, n, *_ in told)
        if not total:
            cached = f"{counted(report.cached_tokens, 'token')} from the cache"
            self._out.phase(f"{what}: same bits, {', '.join([cached, *tiers])}")
            return
        first = sorted(Difference(*fields) for fields_of_rank, *_ in told for fields in fields_of_rank)
        raise Failed([f"{counted(total, 'DIFFERENCE', 'DIFFERENCES')} in {what}:",
                      *(f"  {difference}" for difference in first[:_SHOWN])])  # fmt: skip

    def _page_differences(self, check: CacheCheck, number: int) -> Iterable[Difference]:
        """Those of the pages in the cache, behind those of the requests."""
        for found, tokens in check.differences:
            names = (r.id for r in self._references.values() if np.array_equal(r.tokens[: len(tokens)], tokens))
            name = next(names, "a stranger")
            text = f"in the cache, {found.text()}"
            yield Difference(number, found.token, found.layer, self._ranks.rank, name, text)

    def conclude(self) -> None:
        """Prints what was compared. Raises ``Failed`` if there was nothing."""
        counts = self._counts
        if not counts.cached_tokens:
            page = counted(self._config.cache.page_size, "token")
            raise Failed(
                [f"nothing came from the cache, so nothing was verified: no prompts share a full page of {page}"]
            )
        if not (counts.rows and counts.pages and counts.checked_pages):
            compared = f"{counts.rows} rows of logits, {counts.pages} pages and {counts.checked_pages} cached pages"
            raise Failed([f"nothing was verified: {compared} were compared"])
        self._check_tiers()
        runs = f"{counted(counts.runs, 'run')} (1 in order, {counts.runs - 1} under random schedules)"
        self._out.line(
            f"same bits: {runs}, {counted(counts.requests, 'request')}, {counts.cached_tokens} tokens from the cache; "
            f"{counted(counts.rows, 'row')} of logits and {counted(counts.pages, 'page')} compared and "
            f"{counted(counts.checked_pages, 'cached page')} computed again on {_each(self._ranks.size)}"
        )
        if counts.forked:
            self._out.line(f"of these, {counted(counts.forked, 'sequence')} went on from another one's pages, as forks")
        if self._config.host.configured or counts.suspended:
            self._out.line(
                f"of these, {counted(counts.host_tokens, 'token')} came back from the host, requests went on after "
                f"{counted(counts.suspended, 'suspension')}, and {counted(counts.host_pages, 'host page')} had the "
                "bytes of what was computed again"
            )

    def _check_tiers(self) -> None:
        """Raises ``Failed`` for a part of the configuration that was not put to use."""
        counts, config = self._counts, self._config
        more = "lower pool.pages, or raise --schedules"
        if config.host.configured and not counts.host_tokens:
            raise Failed([f"nothing came back from the host tier, so reading in was not verified: {more}"])
        if config.engine.reserve_tokens is not None and not counts.suspended:
            what = "engine.reserve_tokens is set, but no request was suspended"
            raise Failed([f"{what}, so going on was not verified: {more}"])

    def _everyone(self, mine: Any, purpose: str) -> list[Any]:
        """What every rank says, by rank."""
        if self._ranks.handoff_group is None:
            return [mine]
        group = TorchGroup(self._ranks.handoff_group, timeout_s=self._config.engine.idle_timeout_s)
        return [json.loads(data) for data in group.exchange(json.dumps(mine).encode(), purpose=purpose)]


def expected_of(part: RecordedRequest, whole: RecordedRequest) -> Recomputed:
    """What a request, or a part of one that was suspended, has to have in common with the uncached run of it."""
    assert whole.kv is not None
    first = part.prompt_tokens - 1
    logits = {at: value for at, value in whole.logits.items() if first <= at < part.committed}
    return Recomputed(logits, whole.kv[: part.committed])


def _each(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"each of {ranks} ranks"


def _run(engine: Engine, trial: Trial) -> None:
    """Rank 0: lets the prompts come at their steps."""
    todo = deque(trial.arrivals)
    aborts: dict[str, int] = {}
    suspends: dict[str, int] = {}
    step = 0
    while todo or engine.busy:
        if not engine.busy:
            step = max(step, todo[0].step)
        while todo and todo[0].step <= step:
            arrival = todo.popleft()
            name = engine.submit(arrival.prompt)
            if arrival.aborted_at is not None:
                aborts[name] = arrival.aborted_at
            if arrival.suspended_at is not None:
                suspends[name] = arrival.suspended_at
        for name in [name for name, at in aborts.items() if at <= step]:
            del aborts[name]
            engine.abort(name)
        for name, sequence in engine.cache.running.items():
            if suspends.get(name, step) < step and not sequence.read_in_progress:
                del suspends[name]
                engine.suspend(name)
        for done in engine.step():
            if done.error is not None:
                raise done.error
        step += 1
