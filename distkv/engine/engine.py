"""The engine's loop: take the ordered message, step the cache, run a batch, sample, commit."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from distkv.cache import PrefixCache
from distkv.engine.attention import Batch
from distkv.engine.config import ServeConfig
from distkv.engine.handoff import Handoff, NewRequest, News
from distkv.engine.model import Model
from distkv.engine.pool import KVPool
from distkv.engine.record import Recording
from distkv.engine.requests import Completion, FinishReason, Prompt, check_prompt
from distkv.engine.sampling import greedy
from distkv.engine.schedule import Chunk, Grid, Runnable, Scheduler
from distkv.engine.state import ConversationNames, Pending, Running
from distkv.errors import DistKVError, DuplicateRequest, ModelError, PeerFailed
from distkv.group import Group
from distkv.keys import Fingerprint
from distkv.request import Message, Request
from distkv.sequence import Sequence as CacheSequence

__all__ = ["Engine"]

logger = logging.getLogger(__name__)


class Engine:
    """One rank of the engine. Rank 0 takes requests; every rank calls :meth:`step` equally often.

    The engine owns its pool and its cache. It does not own groups: ``model.tp_group`` carries the model's sums,
    ``handoff_group`` (the same if it is None) rank 0's messages, ``cache_group`` the cache's one collective, and none
    is destroyed or reconfigured here.
    ``scheduler`` defaults to :class:`~distkv.engine.schedule.Grid`.
    """

    def __init__(
        self,
        config: ServeConfig,
        model: Model,
        tokenizer: Any = None,
        *,
        cache_group: Group | None = None,
        handoff_group: dist.ProcessGroup | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        if config.parallel.tp != model.tp_size:
            raise ModelError(f"parallel.tp is {config.parallel.tp}, but the model lies on {model.tp_size} rank(s)")
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.cache = PrefixCache(config, _fingerprint(config, model), cache_group)
        self.pool: KVPool = model.pool(config.pool.pages, config.cache.page_size)
        self.recording: Recording | None = None
        self.scheduler = scheduler or Grid(chunk_tokens=config.chunk_tokens, batch_tokens=config.engine.batch_tokens)
        self.steps = 0
        self.closed = False
        self.failed = False
        """True on every rank after rank 0 shut down with ``failed=True``."""
        self._handoff = Handoff(handoff_group or model.tp_group, config.engine.idle_timeout_s)
        self._rank = self._handoff.rank
        self._chains = ConversationNames(self.cache, config.engine.keep_conversations)
        self._backlog: deque[str] = deque()
        self._outgoing = News()
        self._pending: dict[str, Pending] = {}
        self._news: dict[str, NewRequest] = {}
        self._running: dict[str, Running] = {}
        self._ended: list[Completion] = []
        self._names = itertools.count(1)

    # ---- rank 0: requests in

    def submit(self, prompt: Prompt) -> str:
        """Takes a request on rank 0; it is handed to all ranks at the next step. Returns its id.

        Raises ``PromptError`` for a prompt that the model cannot run and ``DuplicateRequest`` for an id in use. A
        request that would never fit into the smallest pool is taken, and ends as ``refused`` with the error.
        """
        self._only_rank_0("submit")
        name = prompt.id if prompt.id is not None else f"r{next(self._names)}"
        if name in self._pending:
            raise DuplicateRequest(name)
        limit = prompt.output_limit if prompt.output_limit is not None else self.config.engine.output_limit
        ids = check_prompt(name, prompt.tokens, limit, self.model.vocab_size, self.model.context)
        on = self.config.engine.cache == "on"
        new = NewRequest(
            id=name, tokens=ids, output_limit=limit, salt=prompt.salt, priority=prompt.priority,
            adapter=(prompt.adapter.name, prompt.adapter.generation) if prompt.adapter is not None else None,
            conversation=prompt.conversation, read=prompt.read and on, write=prompt.write and on,
        )  # fmt: skip
        began = time.monotonic()
        self._pending[name] = Pending(len(ids), limit, prompt, new, self._chains.name(new), began)
        self._backlog.append(name)
        return name

    def abort(self, request_id: str) -> bool:
        """Ends a request on rank 0's word, at the next step. False when it is unknown or has ended."""
        self._only_rank_0("abort")
        if request_id not in self._pending:
            return False
        if request_id in self._backlog:
            self._backlog.remove(request_id)
            self._end(request_id, "aborted")
        else:
            self._outgoing = replace(self._outgoing, aborts=(*self._outgoing.aborts, request_id))
        return True

    def bump(self, weights_version: str) -> None:
        """New weights: what was cached under the old version is not used again. Rank 0; at the next step."""
        self._only_rank_0("bump")
        self._outgoing = replace(self._outgoing, weights_version=weights_version)

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Submits all on rank 0, steps until all have ended, and returns the completions in the same order.

        The other ranks run :meth:`follow` meanwhile. Nothing is submitted if one of the prompts is wrong.
        """
        names: list[str] = []
        try:
            names.extend(self.submit(prompt) for prompt in prompts)
        except DistKVError:
            for name in names:
                self.abort(name)
            self._ended = [c for c in self._ended if c.id not in names]
            raise
        done: dict[str, Completion] = {}
        others: list[Completion] = []
        while len(done) < len(names):
            for completion in self.step():
                if completion.id in names:
                    done[completion.id] = completion
                else:
                    others.append(completion)
        self._ended = others + self._ended  # the next step returns what was submitted apart
        return [done[name] for name in names]

    def shutdown(self, failed: bool = False) -> None:
        """Rank 0: one last step, which ends the other ranks' :meth:`follow`. A second call does nothing.

        ``failed`` says that rank 0's own work went wrong: then :attr:`failed` is True on every rank afterwards.
        """
        if not self.closed:
            self._outgoing = replace(self._outgoing, shutdown=True, failed=failed)
            self.step()

    def follow(self) -> None:
        """The other ranks' loop: steps until rank 0 shuts down."""
        while not self.closed:
            self.step()

    @property
    def busy(self) -> bool:
        """Whether a request is queued, waiting or running, or has ended and was not returned by a step yet."""
        return bool(self._pending or self._ended)

    # ---- every rank: one step

    def step(self) -> list[Completion]:
        """One turn of the loop; returns what has ended since the last one. All ranks call it equally often.

        A ``PeerFailed`` of the cache is logged and the step goes on with what is running. Errors that end the group,
        and errors of the model, are raised and end the engine.
        """
        if self.closed:
            raise DistKVError("the engine was shut down")
        news = self._handoff.exchange(self._news_of_rank_0() if self._rank == 0 else None)
        self.steps += 1
        if news.shutdown:
            self.closed, self.failed = True, news.failed
            return self._take_ended()
        self._step_cache(news)
        chunks = self.scheduler.plan([_runnable(name, r) for name, r in self._running.items()])
        if chunks:
            self._run(chunks)
        return self._take_ended()

    def close(self) -> None:
        """Gives the cache back. Groups and model stay with whoever made them."""
        self.closed = True
        self.cache.close()

    def _news_of_rank_0(self) -> News:
        handed: list[NewRequest] = []
        room = self.config.engine.max_running - len(self._news)
        while self._backlog and room > 0:
            pending = self._pending[self._backlog.popleft()]
            assert pending.new is not None
            assert pending.chain is not None
            handed.append(replace(pending.new, matched_cap=self._cap(pending, first=not handed)))
            room -= 1
        news, self._outgoing = replace(self._outgoing, requests=tuple(handed)), News()
        return news

    def _cap(self, pending: Pending, *, first: bool) -> int | None:
        """Rank 0's match in pages, to spare the others longer lookups; only where it cannot be stale.

        A request that has to wait may find more when its turn comes than it does now, so it goes without a cap.
        """
        assert pending.chain is not None
        assert pending.new is not None
        if not first or self.cache.waiting_ids or not pending.new.read:
            return None
        return self.cache.peek(pending.chain) or None

    def _step_cache(self, news: News) -> None:
        requests = []
        for new in news.requests:
            pending = self._pending.setdefault(new.id, Pending(len(new.tokens), new.output_limit))
            self._news[new.id] = new
            chain = pending.chain if pending.chain is not None else self._chains.name(new)
            pending.chain = None
            request = Request(
                id=new.id, chain=chain, output_limit=new.output_limit, matched_cap=new.matched_cap,
                read=new.read, write=new.write, priority=new.priority,
            )  # fmt: skip
            requests.append(request)
        if news.weights_version is not None or news.reset:
            self._chains.kept.clear()
        message = Message(
            requests=tuple(requests), aborts=news.aborts, weights_version=news.weights_version, reset=news.reset
        )
        try:
            result = self.cache.step(message)
        except PeerFailed as error:
            logger.warning("%s; going on", error)
            return
        finally:
            for name in news.aborts:
                if name in self._pending:
                    self._end(name, "aborted")
        for refused in result.refused:
            self._end(refused.request_id, "refused", refused.error)
        for sequence in result.ready:
            self._admit(sequence)

    def _admit(self, sequence: CacheSequence) -> None:
        new = self._news[sequence.id]
        tokens = np.empty(len(new.tokens) + new.output_limit, dtype=np.int32)
        tokens[: len(new.tokens)] = new.tokens
        self._running[sequence.id] = Running(sequence, tokens, len(new.tokens))
        if self.recording is not None:
            self.recording.admitted(sequence.id, new.tokens, sequence.cached_tokens, sequence.page_indices)

    # ---- the batch

    def _run(self, chunks: Sequence[Chunk]) -> None:
        rows, tables, sampled, keep, at = [], [], [], [], 0
        for i, chunk in enumerate(chunks):
            running = self._running[chunk.request_id]
            slots = running.sequence.open(chunk.n)
            end = chunk.start + chunk.n
            tables.append(running.sequence.page_indices)
            rows.append((running.tokens[chunk.start : end], chunk.start, slots, tables[-1]))
            at += chunk.n
            if end == running.known:
                sampled.append(i)
                keep.append(at - 1)
        logits = self.model.forward(Batch.build(self.pool, rows, self.model.dtype), keep)
        if self.recording is not None:
            self.recording.ran(chunks, [ids for ids, *_ in rows], tables, sampled, logits)
        tokens = dict(zip(sampled, greedy(logits), strict=True))
        for i, chunk in enumerate(chunks):
            self._commit(chunk, tokens.get(i))

    def _commit(self, chunk: Chunk, token: int | None) -> None:
        running = self._running[chunk.request_id]
        running.steps += 1
        if token is None:
            running.sequence.commit(chunk.n)
            return
        running.sequence.append([token])
        running.sequence.commit(chunk.n)
        running.tokens[running.known] = token
        running.known += 1
        pending = self._pending[chunk.request_id]
        if pending.first is None:
            pending.first = time.monotonic()
        if pending.ask is not None and pending.ask.on_token is not None:
            pending.ask.on_token(token)
        if token in self.model.stop_ids:
            self._finish(chunk.request_id, "stop")
        elif running.known == len(running.tokens):
            self._finish(chunk.request_id, "length")

    def _finish(self, name: str, reason: FinishReason) -> None:
        running = self._running[name]
        if self.recording is not None:
            known = running.tokens[: running.known]
            self.recording.ended(name, known, running.sequence.committed, running.sequence.page_indices)
        running.sequence.finish()
        self._chains.keep(self._news[name], running.sequence.chain)
        self._end(name, reason)

    def _end(self, name: str, reason: FinishReason, error: DistKVError | None = None) -> None:
        pending, running = self._pending.pop(name), self._running.pop(name, None)
        self._news.pop(name, None)
        out: tuple[int, ...] = ()
        if running is not None:
            out = tuple(int(t) for t in running.tokens[pending.prompt_tokens : running.known])
        text = self.tokenizer.decode(list(out), skip_special_tokens=True) if self.tokenizer is not None else None
        timed = pending.ask is not None and pending.first is not None
        completion = Completion(
            id=name, token_ids=out, text=text, prompt_tokens=pending.prompt_tokens,
            cached_tokens=running.sequence.cached_tokens if running is not None else 0,
            ttft_s=pending.first - pending.submitted if timed and pending.first is not None else None,
            steps=running.steps if running is not None else 0, finish_reason=reason, error=error,
        )  # fmt: skip
        self._ended.append(completion)

    def _take_ended(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def _only_rank_0(self, what: str) -> None:
        if self._rank:
            raise DistKVError(f"{what}() is for rank 0; this is rank {self._rank}, which follows")


def _runnable(name: str, running: Running) -> Runnable:
    committed = running.sequence.committed
    return Runnable(name, committed, running.known, running.known > running.sequence.prompt_tokens)


def _fingerprint(config: ServeConfig, model: Model) -> Fingerprint:
    return Fingerprint(
        model=model.identity, tp=model.tp_size, dtype=config.model.dtype, attention="distkv-engine-sdpa",
        kv_layout="layers,planes,pages,tokens,heads,dim",
    )  # fmt: skip
