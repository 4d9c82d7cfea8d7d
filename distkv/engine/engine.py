"""The engine: requests in on rank 0, and the order in which every rank takes a step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from distkv.cache import PrefixCache
from distkv.engine.batch import Launcher
from distkv.engine.config import ServeConfig
from distkv.engine.execution import Execution
from distkv.engine.handoff import Handoff, News
from distkv.engine.intake import Intake, new_request
from distkv.engine.invariant import enable
from distkv.engine.model import Model
from distkv.engine.pool import KVPool
from distkv.engine.record import Recording
from distkv.engine.requests import Completion, Prompt, check_prompt, checked_fields
from distkv.engine.schedule import Grid, Scheduler
from distkv.engine.state import Pending, tell
from distkv.engine.tensor_parallel import check_group, place_in
from distkv.engine.windowed import WINDOW, with_label
from distkv.errors import DistKVError, DuplicateRequest, MessageError, ModelError
from distkv.faults import Fault
from distkv.group import Group
from distkv.keys import Fingerprint
from distkv.ledger import MAIN
from distkv.torch_group import abort

__all__ = ["Engine"]

logger = logging.getLogger(__name__)


class Engine:
    """One rank of the engine. Rank 0 takes requests; every rank calls :meth:`step` equally often.

    The engine owns its pool and its cache. It does not own groups: those of ``model.mesh`` carry what a pass sends,
    ``handoff_group`` (``model.group`` if it is None) rank 0's messages, ``cache_group`` the cache's one collective, and
    none is destroyed or reconfigured here; but if a rank fails, all but the last are aborted, so that nobody waits in
    them for it. ``handoff_group`` and ``cache_group`` have all of the model's ranks, tp and sp alike, in its order;
    ``cache_group`` is None only for a model on one rank. Raises ``ModelError`` otherwise, ``ConfigError`` for a pool
    that the memory cannot hold, ``GroupMismatch`` for ranks that were started differently, and ``NotInvariant``.
    ``scheduler`` defaults to :class:`~distkv.engine.schedule.Grid`.

    The order of a step is told by three settings. Plainly: the cache's step, then a batch. With ``engine.overlap`` the
    batch comes between begin and end of the cache's step. With ``cache.asynchronous`` a batch is launched while the one
    before is in flight, before its tokens are known; the groups then have to be three different ones.
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
        mesh = model.mesh
        if (config.parallel.tp, config.parallel.sp) != (mesh.tp, mesh.sp):
            raise ModelError(f"parallel.tp is {config.parallel.tp} and parallel.sp {config.parallel.sp}, but the model "
                             f"lies on tp {mesh.tp} x sp {mesh.sp}")  # fmt: skip
        handoff_group = handoff_group or mesh.group
        # ranks that compute one model must decide together: each alone, they would read pages that do not match
        cache_place = (cache_group.rank, cache_group.size) if cache_group is not None else (0, 1)
        check_group("cache_group", cache_place, (mesh.rank, mesh.size))
        check_group("handoff_group", place_in(handoff_group), (mesh.rank, mesh.size))
        if config.cache.asynchronous and handoff_group in mesh.in_passes:
            raise ModelError("cache.asynchronous is true: the model's sums then run in a thread, beside the hand-off "
                             "and the cache's ballot; give handoff_group and cache_group groups of their own")
        if model.query_tiles is not None and not config.engine.batch_invariant:
            raise ModelError("the model was made batch-invariant by an earlier engine, but engine.batch_invariant is "
                             "false; load it again")  # fmt: skip
        self.config, self.model, self.tokenizer = config, model, tokenizer
        labelled = with_label(config, model.windows, model.context, any_scheduler=scheduler is not None)
        self.pools = model.pools(config)
        """This rank's paged memory by label: ``main``, and of a hybrid model the pool of its sliding layers."""
        self.pool: KVPool = self.pools[MAIN]
        launcher = Launcher(model, self.pool, lambda: self.cache.fence(), asynchronous=config.cache.asynchronous,
                            window=self.pools.get(WINDOW))
        # First of all that the ranks do together: what follows is to be the same on all, and here they compare it.
        self.cache = PrefixCache(labelled, _fingerprint(config, model), cache_group,
                                 kv={label: pool.paged(mesh.rank, mesh.size) for label, pool in self.pools.items()})
        if config.engine.batch_invariant:
            try:
                enable(model, handoff_group)
            except BaseException:
                self.cache.close()
                raise
        self.steps = 0
        self.closed = False
        self.failed = False
        """True on every rank after rank 0 shut down with ``failed=True``."""
        self._broken: str | None = None
        self._handoff = Handoff(handoff_group, config.engine.idle_timeout_s)
        self._rank = self._handoff.rank
        self._intake = Intake()
        grid = Grid(chunk_tokens=config.chunk_tokens, batch_tokens=config.engine.batch_tokens)
        self._work = Execution(
            self.cache, model, launcher, scheduler or grid, tokenizer, config.engine, self._intake.ended,
        )  # fmt: skip
        self._overlap = config.engine.overlap
        self._abort_waits = _aborting({*mesh.in_passes, handoff_group})
        self._forget_faults = cache_group.on_fault(self._abort_waits) if cache_group is not None else lambda: None

    @property
    def recording(self) -> Recording | None:
        """Set it to record what is computed, see :mod:`distkv.engine.record`."""
        return self._work.recording

    @recording.setter
    def recording(self, recording: Recording | None) -> None:
        self._work.recording = recording
        self.cache.watch_copies(recording.copied if recording is not None else None)

    # ---- rank 0: requests in

    def submit(self, prompt: Prompt) -> str:
        """Takes a request on rank 0; it is handed to all ranks at the next step. Returns its id.

        Raises ``PromptError`` for a field of the wrong type and a prompt that the model cannot run,
        ``DuplicateRequest`` for an id in use, and ``DistKVError`` after the end of the engine. A request that would
        never fit into the smallest pool is taken, and ends as ``refused`` with the error.
        """
        self._only_rank_0("submit")
        self._check_open()
        prompt = checked_fields(prompt)
        name = prompt.id if prompt.id is not None else self._intake.new_name()
        if name in self._work.pending:
            raise DuplicateRequest(name)
        limit = prompt.output_limit if prompt.output_limit is not None else self.config.engine.output_limit
        ids = check_prompt(name, prompt.tokens, limit, self.model.vocab_size, self.model.context)
        new = new_request(prompt, name, ids, limit, cache=self.config.engine.cache == "on")
        began = time.monotonic()
        pending = Pending(len(ids), limit, prompt, new, self._work.chains.name(new), began)
        self._work.pending[name] = self._intake.backlog[name] = pending
        return name

    def abort(self, request_id: str) -> bool:
        """Ends a request on rank 0's word, at the next step. False when it is unknown or has ended."""
        self._only_rank_0("abort")
        if request_id not in self._work.pending:
            return False
        if self._intake.abort(request_id):
            self._work.over(request_id, "aborted")
        return True

    def suspend(self, request_id: str) -> bool:
        """Makes a running request give its place away, on rank 0's word, at the end of the next step.

        It waits again, ahead of all others, and goes on from there to the same end; the pages that it alone has go to
        the host tier's share of suspended requests. One that does not run then is left as it is. False when it is
        unknown or was not handed to the cache yet.
        """
        self._only_rank_0("suspend")
        return request_id in self._work.pending and self._intake.suspend(request_id)

    def bump(self, weights_version: str) -> None:
        """New weights: what was cached under the old version is not used again. Rank 0; at the next step."""
        self._only_rank_0("bump")
        self._check_open()
        if not isinstance(weights_version, str):
            raise MessageError(f"the weights' version must be a str, not {weights_version!r}")
        self._intake.say(weights_version=weights_version)

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
            self._work.put_back([c for c in self._work.take_ended() if c.id not in names])
            raise
        done: dict[str, Completion] = {}
        others: list[Completion] = []
        while len(done) < len(names):
            for ended in self.step():
                if ended.id in names:
                    done[ended.id] = ended
                else:
                    others.append(ended)
        self._work.put_back(others)  # the next step returns what was submitted apart
        return [done[name] for name in names]

    def shutdown(self, failed: bool = False) -> None:
        """Rank 0: one last step, which ends the other ranks' :meth:`follow`. A second call does nothing.

        ``failed`` says that rank 0's own work went wrong: then :attr:`failed` is True on every rank afterwards. For a
        broken engine this only closes it: the others were told of the fault when it broke.
        """
        if self.closed:
            return
        if self._broken is not None:
            self.closed = self.failed = True
            return
        self._intake.say(shutdown=True, failed=failed)
        self.step()

    def follow(self) -> None:
        """The other ranks' loop: steps until rank 0 shuts down."""
        while not self.closed:
            self.step()

    @property
    def broken(self) -> bool:
        """Whether a step raised: then the group is over, and all ranks know."""
        return self._broken is not None

    @property
    def busy(self) -> bool:
        """Whether a request is queued, waiting or running, or has ended and was not returned by a step yet."""
        return bool(self._work.pending or self._work.ended)

    # ---- every rank: one step

    def step(self) -> list[Completion]:
        """One turn of the loop; returns what has ended since the last one. All ranks call it equally often.

        A ``PeerFailed`` of the cache is logged and the step goes on with what is running. Any other exception of a
        step (of the group, the model, the scheduler) is raised and breaks the engine: this rank may have done part of
        what the others did, so every later step and submit raises an error that names the first one, and nothing more
        is stored. The other ranks are told (see ``PrefixCache.guard``), and their steps raise an error that names this
        rank and its step, wherever they wait for it. Not so an exception of a prompt's ``on_token``: see there.
        """
        self._check_open()
        # made and encoded before anything is taken off the queue, so that a message that cannot be sent loses nothing
        mine = self._intake.message(self.config.engine.max_running - len(self._work.news), self._cap)
        payload = mine.encode()
        self.steps += 1
        try:
            news = self._handoff.exchange(mine if self._rank == 0 else None, payload)
            self._intake.sent(mine)
            if news.shutdown:
                self.closed, self.failed = True, news.failed
                self._work.close()
                return self._work.take_ended()
            self._turn(news)
        except BaseException as error:
            named = self.cache.fail(error, "step")
            self._abort_waits(None)  # the process ends only when nothing of it waits; the watchdog may be too late
            self._broken = f"step {self.steps} raised {type(named).__name__}: {named}"
            if named is error:
                raise
            raise named from error
        tell(self._work.take_said())
        return self._work.take_ended()

    def _turn(self, news: News) -> None:
        """One step after the hand-over. The cache's collective is in flight from ``begin`` to ``end``."""
        work = self._work
        work.begin(news)
        if self.cache.asynchronous:  # the batch of the last step is in flight meanwhile
            if work.in_flight(new.id for new in news.requests):
                work.land()  # a name that was used again must not mean two requests
            work.end()
            launched = work.launch()
            work.land(leave=launched)
            if not launched:
                self.cache.retired(self.cache.steps)  # nothing is in flight
                work.wait_for_copies()
            return
        launched = self._overlap and work.launch()
        work.land()
        work.end()
        if launched:
            return
        if work.launch():
            work.land()
        else:
            work.wait_for_copies()

    def close(self) -> None:
        """Gives the cache back. Groups and model stay with whoever made them."""
        self.closed = True
        self._work.close()
        self.cache.close()
        self._forget_faults()

    def _cap(self, pending: Pending, first: bool) -> int | None:
        """Rank 0's match in pages, to spare the others longer lookups; only where it cannot be stale.

        A request that has to wait may find more when its turn comes than it does now, so it goes without a cap.
        """
        assert pending.chain is not None
        assert pending.new is not None
        if not first or self.cache.waiting_ids or not pending.new.read:
            return None
        return self.cache.peek(pending.chain) or None

    def _check_open(self) -> None:
        if self.closed:
            raise DistKVError("the engine was shut down")
        if self._broken is not None:
            raise DistKVError(f"the engine is broken since an earlier step, and takes no more: {self._broken}")

    def _only_rank_0(self, what: str) -> None:
        if self._rank:
            raise DistKVError(f"{what}() is for rank 0; this is rank {self._rank}, which follows")


def _fingerprint(config: ServeConfig, model: Model) -> Fingerprint:
    attention = "distkv-engine-tiles" if config.engine.batch_invariant else "distkv-engine-sdpa"
    return Fingerprint(
        model=model.identity, tp=model.mesh.tp, sp=model.mesh.sp, dtype=config.model.dtype,
        attention=attention,
        kv_layout="layers,planes,pages,tokens,heads,dim",
    )  # fmt: skip


def _aborting(groups: set[dist.ProcessGroup | None]) -> Callable[[Fault | None], None]:
    """What aborts these groups, each once: nobody has to wait in them for a rank that does not come. For any thread."""
    lock = threading.Lock()

    def abort_all(_: Fault | None) -> None:
        with lock:
            while groups:
                group = groups.pop()
                if group is not None:
                    abort(group)

    return abort_all
