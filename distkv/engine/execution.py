"""What every rank does with the requests that it was told of: the cache's step, batches, tokens, and their end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from distkv.cache import PrefixCache
from distkv.chain import KeyChain
from distkv.engine.answers import Answers
from distkv.engine.batch import Flight, Landed, Launcher
from distkv.engine.config import EngineConfig
from distkv.engine.family import Family
from distkv.engine.handoff import NewRequest, News
from distkv.engine.model import Model
from distkv.engine.record import Recording
from distkv.engine.requests import FinishReason
from distkv.engine.reserve import Reserve, victim
from distkv.engine.schedule import Runnable, Scheduler
from distkv.engine.state import Pending, Running, check_plan
from distkv.errors import DistKVError, DuplicateRequest, NoRoom, PeerFailed, RequestTooLarge
from distkv.request import Message, Request, StepResult
from distkv.sequence import Sequence as CacheSequence

__all__ = ["Execution"]

logger = logging.getLogger(__name__)


class Execution(Answers):
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
        super().__init__(cache, tokenizer, settings.keep_conversations, on_end)
        self.cache = cache
        self.model = model
        self.scheduler = scheduler
        self.recording: Recording | None = None
        self.running: dict[str, Running] = {}
        """By the id of the sequence, which is the request's for all but the forks of one."""
        self.suspended: dict[str, Running] = {}
        """What suspended requests go on with when they are admitted again."""
        self.flights: deque[Flight] = deque()
        """Batches that were launched and have not landed, the oldest first."""
        self._reserve = Reserve(cache, settings.reserve_tokens)
        self._loading = False
        self._turn = 0
        self._to_suspend: tuple[str, ...] = ()
        self._launcher = launcher

    # ---- the cache's step

    def begin(self, news: News) -> None:
        """Begins the cache's step with what rank 0 told. Aborted requests are over now, in flight or not."""
        self._to_suspend = news.suspends
        aborts = [each for name in news.aborts for each in (self._sequences_of(name) or [name])]
        for name in news.aborts:  # before the requests, as the cache does it: one of them may have the same id
            if name in self.pending:
                self.over(name, "aborted")
        requests = []
        for new in news.requests:
            pending = self.pending.setdefault(new.id, Pending(len(new.tokens), new.output_limit, new=new))
            self.news[new.id] = new
            need = self._reserve.pages_of(new) if new.sequences > 1 else 0
            if need > self.cache.pool_pages:
                error = RequestTooLarge(new.id, need, self.cache.pool_pages, sequences=new.sequences)
                self.over(new.id, "refused", error)
                continue
            requests.append(self._request(new, pending.chain))
            pending.chain = None
        if news.weights_version is not None or news.reset:
            self.chains.kept.clear()
        self.cache.begin_step(Message(
            requests=tuple(requests), aborts=tuple(aborts), weights_version=news.weights_version, reset=news.reset
        ))  # fmt: skip

    def _request(self, new: NewRequest, chain: KeyChain | None) -> Request:
        """What the cache is told of a request; ``chain``: of its prompt, if it was made before."""
        limit = self._reserve.limit(len(new.tokens), new.output_limit, beams=new.beams is not None)
        return Request(
            id=new.id, chain=chain if chain is not None else self.chains.name(new), output_limit=limit,
            matched_cap=new.matched_cap, read=new.read, write=new.write, priority=new.priority,
        )  # fmt: skip

    def end(self) -> None:
        """Ends the cache's step: what was refused is over, what was admitted and read in runs, and what has to make
        place is suspended. A ``PeerFailed`` costs the step."""
        try:
            result = self.cache.end_step()
        except PeerFailed as error:
            logger.warning("%s; going on", error)
            return
        for refused in result.refused:
            fork = self.suspended.get(refused.request_id) if not isinstance(refused.error, DuplicateRequest) else None
            self.over(fork.request if fork is not None else refused.request_id, "refused", refused.error)
        for sequence in result.grown:
            if sequence.id in self.running:
                self.running[sequence.id].growing = False
        for forked in result.forked:
            family = self.running[forked.parent.id].family
            assert family is not None
            family.forked(forked.parent, forked.children)
        for sequence in result.ready:
            self._admit(sequence)
        self._loading = bool(result.loading)
        self._preempt(result)
        for name in self._to_suspend:
            for each in self._sequences_of(name):
                self._suspend(each)
        self._reserve.grow(self.running.values())

    def _preempt(self, result: StepResult) -> None:
        """Suspends what has to make place, if somebody still waits for it.

        For a growing answer at once. For a fork only when nobody goes on: it is the first to get what others give back,
        and a prompt that was suspended while it waits for its fork would come back to wait again.
        """
        for name in result.to_preempt:
            if len(self.running) < 2 or name not in self.running:  # for one that has ended since
                continue
            stuck = not (self.flights or self._loading or any(self._able(running) for running in self.running.values()))
            if stuck or any(running.growing for running in self.running.values()):  # else those that had the room have
                self._suspend(victim(name, self.running))

    def _admit(self, sequence: CacheSequence) -> None:
        name = sequence.id
        running = self.suspended.pop(name, None)
        if running is not None:
            running.sequence = sequence
        else:
            new = self.news[name]
            tokens = np.empty(len(new.tokens) + new.output_limit, dtype=np.int32)
            tokens[: len(new.tokens)] = new.tokens
            running = Running(sequence, tokens, len(new.tokens), len(new.tokens), new.sampling, request=name)
            if not self.pending[name].suspended:
                self.pending[name].admitted(sequence)
            if new.sequences > 1 and new.output_limit:
                running.family = Family(new, self.model.stop_ids, self)
        self._turn += 1
        running.turn = self._turn
        self.running[name] = running
        if self.recording is not None:
            known = running.tokens[: running.known]
            self.recording.admitted(name, known, sequence.cached_tokens, sequence.page_indices)

    def _suspend(self, name: str) -> None:
        running = self.running.get(name)
        if running is None:  # it has ended meanwhile, or it waits or is read in
            return
        if running.family is not None and running.family.search is not None:
            self._search_again(running.family.new)
            return
        del self.running[name]
        self._record_end(name, running)
        self.suspended[name] = self._reserve.suspend(running)
        if running.family is not None:
            running.family.forget()

    def _search_again(self, new: NewRequest) -> None:
        """A search is suspended: its beams end, and it begins again at the end of the queue.

        Beams that came back one by one could not count on sharing pages, and might never all find room.
        """
        for number, name in enumerate(self._sequences_of(new.id)):
            self.drop(self.running[name], store=not number)
        self.pending[new.id].suspended += 1
        self.cache.submit(self._request(replace(new, matched_cap=None), None))

    def _sequences_of(self, request: str) -> list[str]:
        """Names of the sequences of a request, suspended ones included."""
        new = self.news.get(request)
        if new is None or new.sequences == 1:
            return [request]
        return [name for those in (self.running, self.suspended) for name, running in those.items()
                if running.request == request]  # fmt: skip

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
        runnable = [_runnable(name, r) for name, r in self.running.items() if self._able(r)]
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
        rows = {i: row for row, i in enumerate(flight.sampled)}
        for i, chunk in enumerate(flight.chunks):
            running = flight.running[i]
            if self.running.get(chunk.request_id) is not running:
                continue
            running.steps += 1
            running.sequence.commit(chunk.n)
            if i not in rows:
                if running.sequence.committed == len(running.tokens):  # all of a prompt that wants no answer
                    self._finish(running, "length")
            elif running.family is not None:
                running.family.landed(running, landed.logits[rows[i]])
            else:
                self._next(running, landed.tokens[rows[i]])

    def _able(self, running: Running) -> bool:
        """Whether there is something to compute, and room for it: the prompt, or a token of the answer."""
        goes_on = running.promised < len(running.tokens) or running.sequence.seq_len < running.sequence.prompt_tokens
        return goes_on and not running.held and self._reserve.has_room(running)

    def _next(self, running: Running, token: int) -> None:
        self.take(running, token)
        if token in self.model.stop_ids:
            self._finish(running, "stop")
        elif running.known == len(running.tokens):
            self._finish(running, "length")

    def _finish(self, running: Running, reason: FinishReason) -> None:
        new, pending = self.news[running.request], self.pending[running.request]
        self.drop(running, store=True)
        if running.sample == 0:
            self.chains.keep(new, running.sequence.chain)
        for number in [running.sample] if new.output_limit else range(new.n):
            pending.chose(number, pending.answer(running), self.tokenizer, reason)
        if len(pending.choices) == new.n:
            self.complete(new)

    def _record_end(self, name: str, running: Running) -> None:
        if self.recording is not None:
            known = running.tokens[: running.known]
            self.recording.ended(name, known, running.sequence.committed, running.sequence.page_indices)

    # ---- what families ask for

    def take(self, running: Running, token: int) -> None:
        """See :class:`~distkv.engine.family.Owner`."""
        running.sequence.append([token])
        running.tokens[running.known] = token
        running.known += 1
        if running.family is None or running.family.search is None:
            self.hears(running.request, running.sample, token)

    def born(self, parent: Running, child: Running) -> None:
        """See :class:`~distkv.engine.family.Owner`."""
        self.running[child.sequence.id] = child
        if self.recording is not None:
            self.recording.forked(parent.sequence.id, child.sequence.id, child.tokens[: child.known],
                                  child.sequence.cached_tokens, child.sequence.page_indices)

    def drop(self, running: Running, *, store: bool) -> None:
        """See :class:`~distkv.engine.family.Owner`."""
        del self.running[running.sequence.id]
        self.pending[running.request].count(running)
        if store:
            self._record_end(running.sequence.id, running)
            running.sequence.finish()
        else:
            running.sequence.abort()

    def complete(self, new: NewRequest) -> None:
        """See :class:`~distkv.engine.family.Owner`."""
        self.over(new.id, self.pending[new.id].choices[0].finish_reason)

    def cannot_fork(self, new: NewRequest, error: NoRoom) -> None:
        """See :class:`~distkv.engine.family.Owner`."""
        for name in self._sequences_of(new.id):
            self.drop(self.running[name], store=False)
        self.over(new.id, "refused", error)

    # ---- the end

    def over(self, name: str, reason: FinishReason, error: DistKVError | None = None) -> None:
        """A request has ended; :meth:`take_ended` gives its completion, with what there is of answers that have not."""
        pending = self.pending[name]
        searched = None
        for each in self._sequences_of(name):
            those = self.running if each in self.running else self.suspended
            running = those.get(each)
            if running is None or running.request != name:  # it never ran; a fork may have its name
                continue
            del those[each]
            pending.count(running)
            searched = running.family.search if running.family is not None else None
            if searched is None:
                pending.chose(running.sample, pending.answer(running), self.tokenizer, reason)
        if searched is not None:
            for number, found in enumerate(searched.best(pending.n)):
                pending.chose(number, found.tokens, self.tokenizer, reason, found.score)
        self.closed(name, reason, error)

    def close(self) -> None:
        """Waits for the batches in flight, whose tokens are dropped."""
        self._launcher.close()
        self.flights.clear()


def _runnable(name: str, running: Running) -> Runnable:
    sequence = running.sequence
    return Runnable(name, sequence.seq_len, running.promised, running.promised > sequence.prompt_tokens)
