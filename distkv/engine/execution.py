"""What every rank does with the requests that it was told of: the cache's step, batches, tokens, and their end."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from distkv.cache import PrefixCache
from distkv.engine.batch import Flight, Landed, Launcher
from distkv.engine.config import EngineConfig
from distkv.engine.handoff import NewRequest, News
from distkv.engine.model import Model
from distkv.engine.record import Recording
from distkv.engine.requests import Completion, FinishReason
from distkv.engine.reserve import Reserve
from distkv.engine.schedule import Chunk, Runnable, Scheduler
from distkv.engine.state import ConversationNames, Pending, Running, Said, check_plan, completion
from distkv.errors import DistKVError, PeerFailed
from distkv.request import Message, Request
from distkv.sequence import Sequence as CacheSequence

__all__ = ["Execution"]

logger = logging.getLogger(__name__)


class Execution:
    """Owns the requests from their hand-over to their end, the batch in flight and ``launcher``. Its cache is the
    engine's. Every rank makes the same calls in the same order; :class:`~distkv.engine.engine.Engine` has the order.
    """

    def __init__(
        self,
        cache: PrefixCache,
        model: Model,
        launcher: Launcher,
        scheduler: Scheduler,
        tokenizer: Any,
        settings: EngineConfig,
        on_end: Callable[[str], None],
    ) -> None:
        self.cache = cache
        self.model = model
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.recording: Recording | None = None
        self.chains = ConversationNames(cache, settings.keep_conversations)
        self.pending: dict[str, Pending] = {}
        self.news: dict[str, NewRequest] = {}
        self.running: dict[str, Running] = {}
        self.suspended: dict[str, Running] = {}
        """What suspended requests go on with when they are admitted again."""
        self.flights: deque[Flight] = deque()
        """Batches that were launched and have not landed, the oldest first."""
        self._reserve = Reserve(cache, settings.reserve_tokens)
        self._loading = False
        self._to_suspend: tuple[str, ...] = ()
        self._launcher = launcher
        self._on_end = on_end
        self._ended: list[Completion] = []
        self._said: list[Said] = []

    # ---- the cache's step

    def begin(self, news: News) -> None:
        """Begins the cache's step with what rank 0 told. Aborted requests are over now, in flight or not."""
        self._to_suspend = news.suspends
        for name in news.aborts:  # before the requests, as the cache does it: one of them may have the same id
            if name in self.pending:
                self.over(name, "aborted")
        requests = []
        for new in news.requests:
            pending = self.pending.setdefault(new.id, Pending(len(new.tokens), new.output_limit))
            self.news[new.id] = new
            chain = pending.chain if pending.chain is not None else self.chains.name(new)
            pending.chain = None
            request = Request(
                id=new.id, chain=chain, output_limit=self._reserve.limit(len(new.tokens), new.output_limit),
                matched_cap=new.matched_cap, read=new.read, write=new.write, priority=new.priority,
            )  # fmt: skip
            requests.append(request)
        if news.weights_version is not None or news.reset:
            self.chains.kept.clear()
        self.cache.begin_step(Message(
            requests=tuple(requests), aborts=news.aborts, weights_version=news.weights_version, reset=news.reset
        ))  # fmt: skip

    def end(self) -> None:
        """Ends the cache's step: what was refused is over, what was admitted and read in runs, and what has to make
        place is suspended. A ``PeerFailed`` costs the step."""
        try:
            result = self.cache.end_step()
        except PeerFailed as error:
            logger.warning("%s; going on", error)
            return
        for refused in result.refused:
            self.over(refused.request_id, "refused", refused.error)
        for sequence in result.grown:
            if sequence.id in self.running:
                self.running[sequence.id].growing = False
        for sequence in result.ready:
            self._admit(sequence)
        self._loading = bool(result.loading)
        for name in result.to_preempt:
            # else it was for one that has ended since, or those that had the room have
            if len(self.running) > 1 and any(running.growing for running in self.running.values()):
                self._suspend(name)
        for name in self._to_suspend:
            self._suspend(name)
        self._reserve.grow(self.running.values())

    def _admit(self, sequence: CacheSequence) -> None:
        name = sequence.id
        running = self.suspended.pop(name, None)
        if running is not None:
            running.sequence = sequence
        else:
            new = self.news[name]
            tokens = np.empty(len(new.tokens) + new.output_limit, dtype=np.int32)
            tokens[: len(new.tokens)] = new.tokens
            running = Running(sequence, tokens, len(new.tokens), len(new.tokens), new.sampling,
                              cached_tokens=sequence.cached_tokens, host_tokens=sequence.record.host_tokens)
        self.running[name] = running
        if self.recording is not None:
            known = running.tokens[: running.known]
            self.recording.admitted(name, known, sequence.cached_tokens, sequence.page_indices)

    def _suspend(self, name: str) -> None:
        running = self.running.pop(name, None)
        if running is None:  # it has ended meanwhile, or it waits or is read in
            return
        self._record_end(name, running)
        self.suspended[name] = self._reserve.suspend(running)

    def wait_for_copies(self) -> None:
        """For a step that has computed nothing: if requests are being read in, waits a moment for a copy to end."""
        if self._loading:
            self.cache.wait_for_copies()

    # ---- batches

    def launch(self) -> bool:
        """Plans a batch of what runs, and launches it. False if there is nothing to run.

        With batches in flight it runs ahead: of an answer that may end with the token that a batch in flight will give,
        the next token is computed already. It is dropped if the answer does end there.
        """
        able = ((name, r) for name, r in self.running.items() if _goes_on(r) and self._reserve.has_room(r))
        runnable = [_runnable(name, r) for name, r in able]
        chunks = self.scheduler.plan(runnable)
        if not chunks:
            return False
        check_plan(chunks, self.running, ahead=bool(self.flights))
        with self.cache.guard("forward"):
            running = [self.running[chunk.request_id] for chunk in chunks]
            self.flights.append(self._launcher.launch(chunks, running, self.cache.steps))
        return True

    def land(self, leave: int = 0) -> None:
        """Waits for all batches in flight but the last ``leave``, and commits them.

        Of a request that has ended meanwhile nothing is committed: its tokens are nobody's.
        """
        while len(self.flights) > leave:
            flight = self.flights.popleft()
            with self.cache.guard("forward"):
                landed = flight.wait()
            with self.cache.guard("commit"):
                self._commit_all(flight, landed)

    def in_flight(self, names: Iterable[str]) -> bool:
        """Whether one of these requests is in a batch in flight, though it may have ended."""
        flying = {chunk.request_id for flight in self.flights for chunk in flight.chunks}
        return not flying.isdisjoint(names)

    def _commit_all(self, flight: Flight, landed: Landed) -> None:
        self.cache.retired(flight.step)
        if self.recording is not None:
            self.recording.ran(flight.chunks, landed.ids, flight.tables, flight.sampled, landed.logits)
        if flight.prompt_tokens >= self.cache.config.cache.page_size:  # a shorter piece costs more than its tokens
            self.cache.prefill_took(flight.tokens, landed.seconds)
        tokens = dict(zip(flight.sampled, landed.tokens, strict=True))
        for i, chunk in enumerate(flight.chunks):
            if self.running.get(chunk.request_id) is not flight.running[i]:
                continue
            pending = self.pending[chunk.request_id]
            self._commit(chunk, tokens.get(i))
            if i in tokens and pending.ask is not None and pending.ask.on_token is not None:
                self._said.append((pending.ask.on_token, pending, tokens[i]))

    def _commit(self, chunk: Chunk, token: int | None) -> None:
        running = self.running[chunk.request_id]
        running.steps += 1
        if token is None:
            running.sequence.commit(chunk.n)
            if running.sequence.committed == len(running.tokens):  # all of a prompt that wants no answer
                self._finish(chunk.request_id, "length")
            return
        running.sequence.append([token])
        running.sequence.commit(chunk.n)
        running.known += 1
        pending = self.pending[chunk.request_id]
        if pending.first is None:
            pending.first = time.monotonic()
        if token in self.model.stop_ids:
            self._finish(chunk.request_id, "stop")
        elif running.known == len(running.tokens):
            self._finish(chunk.request_id, "length")

    def _finish(self, name: str, reason: FinishReason) -> None:
        running = self.running[name]
        self._record_end(name, running)
        running.sequence.finish()
        self.chains.keep(self.news[name], running.sequence.chain)
        self.over(name, reason)

    def _record_end(self, name: str, running: Running) -> None:
        if self.recording is not None:
            known = running.tokens[: running.known]
            self.recording.ended(name, known, running.sequence.committed, running.sequence.page_indices)

    # ---- the end

    def over(self, name: str, reason: FinishReason, error: DistKVError | None = None) -> None:
        """A request has ended; :meth:`take_ended` gives its completion."""
        pending = self.pending.pop(name)
        running = self.running.pop(name, None) or self.suspended.pop(name, None)
        self.news.pop(name, None)
        self._on_end(name)
        self._ended.append(completion(name, pending, running, self.tokenizer, reason, error))

    @property
    def ended(self) -> bool:
        """Whether :meth:`take_ended` would give something."""
        return bool(self._ended)

    def take_ended(self) -> list[Completion]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take_said(self) -> list[Said]:
        """Who is to be told of which token since the last call."""
        said, self._said = self._said, []
        return said

    def put_back(self, ended: Sequence[Completion]) -> None:
        """These are given by the next :meth:`take_ended`, first."""
        self._ended = [*ended, *self._ended]

    def close(self) -> None:
        """Waits for the batches in flight, whose tokens are dropped."""
        self._launcher.close()
        self.flights.clear()


def _goes_on(running: Running) -> bool:
    """Whether there is something to compute: the prompt, or a token of the answer."""
    return running.promised < len(running.tokens) or running.sequence.seq_len < running.sequence.prompt_tokens


def _runnable(name: str, running: Running) -> Runnable:
    sequence = running.sequence
    return Runnable(name, sequence.seq_len, running.promised, running.promised > sequence.prompt_tokens)
