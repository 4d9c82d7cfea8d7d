"""The facade: one rank's prefix cache, and the steps in which all ranks decide together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from distkv import labels
from distkv.agreement import Agreement
from distkv.ballot import Slots
from distkv.books import SCOPES, Books, Scope
from distkv.chain import KeyChain, Namer
from distkv.config import Config
from distkv.errors import DistKVError, MessageError, SequenceError
from distkv.group import Group, SoloGroup, Ticket
from distkv.guarding import Guarding
from distkv.host.copies import CopyEngine
from distkv.host.kv import PagedKV
from distkv.host.opening import ask_of, check_memory, open_on_all, open_tiers
from distkv.host.tier import close_all
from distkv.keys import Adapter, Fingerprint, Hash64, Span
from distkv.labels import by_label
from distkv.ledger import MAIN, CopyPage
from distkv.local_calls import LocalCalls
from distkv.lockstep import Lockstep
from distkv.request import Message, Request, ResetResult, StepResult
from distkv.sequence import Sequence
from distkv.start import check_arguments, meet
from distkv.stats import free_of, reset_result

_NOTHING = Message()


class PrefixCache(LocalCalls, Guarding):
    """Keeps the KV pages of finished requests and gives them to the next request with the same prefix.

    Owns the bookkeeping of one rank's pages, and the host tier behind them; the pool's bytes are the engine's. One
    thread calls it, the engine's loop, and every rank makes the same calls in the same order: ``step`` (or
    ``begin_step`` and ``end_step``), the calls of the sequences that it returns, ``submit``, ``abort``, ``resume``,
    ``bump``, ``reset``, ``grow``. What each may call at its own time is in :class:`distkv.local_calls.LocalCalls`:
    ``fence``, ``wait_for_copies``, ``settle``, ``prefill_took``, ``retired`` (not in lockstep), ``tables``, ``peek``,
    ``stats``, ``check`` and what looks at the cached pages.
    """

    def __init__(self, config: Config, fingerprint: Fingerprint, group: Group | None = None, *,
                 kv: PagedKV | Mapping[str, PagedKV] | None = None,
                 copies: CopyEngine | Mapping[str, CopyEngine] | None = None,
                 copy_page: CopyPage | None = None, hash64: Hash64 | None = None) -> None:
        """Compares agreed fields over ``group`` (None: this rank alone) and raises GroupMismatch if they differ.

        The group stays the caller's, and is this cache's alone until ``close``. ``kv`` is the engine's paged memory,
        which a host tier copies from and to, and in which forks copy a page; for labels beside ``main`` a mapping of
        label to memory. It may be None for a cache of bookkeeping alone. On CUDA the stream that is current in
        a call of this cache is taken for the one that computes. ``copies`` replaces the copy engine (or, by label,
        engines) that belongs to it, ``hash64`` the configured key function, both for tests; ``copy_page(label, source,
        target)`` what forks copy pages with, for engines whose memory distkv does not see. Raises MessageError for a
        wrong argument, and for a group that another cache has; ConfigError on every rank, with nothing taken, for a
        host tier that the memory of a node cannot hold; HostMemoryError, on every rank, if one cannot have it after
        all.
        """
        check_arguments(config, fingerprint, group)
        kvs, engines = by_label(kv, config, "kv"), by_label(copies, config, "copies")
        check_memory(kvs, engines)
        self.config = config
        self._group = group if group is not None else SoloGroup()
        self._group.configure(config.group)
        cache, pools = config.cache, labels.pools(config)
        namer = Namer(fingerprint, cache.page_size, cache.key_function, hash64, cache.next_token_depth)
        usable = [pool.usable for pool in pools.values()]
        start = meet(self._group, config, namer, usable, host=ask_of(config, kvs, engines))
        tiers = open_on_all(self._group, start, lambda: open_tiers(config, start, pools, kvs, engines))
        try:
            self._books = Books(pools[MAIN], namer, tier=tiers.get(MAIN), copy_page=labels.copier(MAIN, kvs, copy_page),
                                store_at_fill=cache.index_on == "fill", asynchronous=cache.asynchronous,
                                lockstep=cache.agreement == "lockstep",
                                others=labels.ledgers(config, pools, tiers, kvs, copy_page),
                                lookahead_tokens=cache.lookahead_tokens)
        except BaseException:
            close_all(tiers.values())
            raise
        windowed = any(ledger.grid for ledger in self._books.ledgers)
        slots = Slots(cache.queue_slots, config.host.loading_slots, len(pools),
                      cache.window_boundaries if windowed else 0)
        kind, every = (Lockstep, cache.check_every) if self._books.lockstep else (Agreement, cache.heartbeat)
        self._agreement = kind(self._books, self._group.rank, slots, every, start.smallest_pools,
                               alone=self._group.size == 1)
        self._agreement.prefetch = config.host.prefetch
        self._ticket: Ticket | None = None
        self._broken: DistKVError | None = None
        self._group.cache = weakref.ref(self)

    # ---- names and lookups

    def chain(self, tokens: object = (), *, adapter: Adapter | None = None, salt: str | None = None,
              spans: Iterable[Span] = ()) -> KeyChain:
        """The key chain of a prompt; see :class:`distkv.KeyChain`. May be called in any thread."""
        return self._books.namer.chain(tokens, adapter=adapter, salt=salt, spans=spans)

    # ---- calls that all ranks make in the same order

    def submit(self, request: Request) -> None:
        """Puts a request at the end of the queue. What can never run shows up as refused in the next result.

        After an error that ended the group, or ``close``, it raises that error: nothing would ever admit it.
        """
        self._check_open()
        self._agreement.submit(request)

    def abort(self, request_id: str) -> None:
        """Ends a waiting, running or suspended request and stores nothing more of it. Unknown ids are ignored."""
        self._agreement.abort(request_id)

    def resume(self, request_id: str, *, output_limit: int | None = None) -> None:
        """Puts a suspended request at the head of the queue, to be admitted again. Unknown ids are ignored.

        It goes on from its named tokens, as a prompt. ``output_limit``: most tokens that it may still generate; None:
        what is left of its own. One that is too large for the pool shows up as refused in the next result. Raises
        RequestError, and it stays suspended, for a limit that is no whole number of 0 or more.
        """
        self._check_open()
        self._agreement.resume(request_id, output_limit)

    def bump(self, weights_version: str) -> None:
        """New weights: what was computed before is never used again. Running sequences finish and do not store."""
        if not isinstance(weights_version, str):
            raise MessageError(f"bump takes the version of the new weights, a str, not {weights_version!r}")
        self._agreement.next_epoch(weights_version)

    def reset(self, scope: Scope = "all", running: Literal["finish", "abort"] = "finish") -> ResetResult:
        """Forgets cached pages: of both tiers, or only of the device or of the host. Says what came of it here.

        ``running``: sequences keep their pages, finish and do not store (but after a reset of the host they do), or
        are aborted, as they have to be if the bytes of the pool are lost. What is being read in waits again. Whoever
        gives the pool's memory up or writes it himself calls ``settle`` first: copies to the host still read it.
        """
        if scope not in SCOPES or running not in ("finish", "abort"):
            raise MessageError(f"reset({scope!r}, {running!r}): the scope is all, device or host; running sequences "
                               "finish or abort")
        before = free_of(self._books)
        if running == "abort":
            for request_id in (*self._agreement.running, *self._agreement.kept):
                self._agreement.abort(request_id)
        self._agreement.next_epoch(None, scope)
        return reset_result(self._books, before)

    def grow(self, sequence: Sequence, pages: int, *, wait: bool = False) -> bool:
        """Reserves ``pages`` more for a running sequence, out of the leftover of the last step. True: it has them.

        If the leftover is smaller (it is 0 between begin and end of a step) it raises NoRoom, with nothing reserved;
        with ``wait`` it returns False, and the next steps serve it ahead of all requests: see ``StepResult.grown`` and
        ``to_preempt``.
        """
        return self._agreement.grow(sequence, pages, wait=wait)

    # ---- the step

    def step(self, message: Message = _NOTHING) -> StepResult:
        """:meth:`begin_step` and :meth:`end_step`."""
        self.begin_step(message)
        return self.end_step()

    def begin_step(self, message: Message = _NOTHING) -> None:
        """Applies the message, fills this rank's ballot and enters the collective, if the step needs one.

        It does not raise for what fails on this rank alone: that is voted as a fault, and :meth:`end_step` raises
        PeerFailed on every rank. A lookup that failed leaves no trace, and the group goes on; a message that could be
        applied on some ranks only makes them differ, and the next ballot ends the group with GroupDivergence. After
        an error that ended the group it raises that error again; a fault of another rank is one (see :meth:`guard`).
        """
        self._check_open()
        if not isinstance(message, Message):
            raise MessageError(f"a step takes a distkv.Message, not a {type(message).__name__}")
        vector = self._agreement.begin(message)
        self._group.board.step = self._books.step
        if vector is None:
            return
        with self._ended_by_errors():
            self._ticket = self._group.start(vector, self._books.step)

    def end_step(self) -> StepResult:
        """Takes the group's minimum and commits what follows from it.

        Raises PeerFailed if a rank could not fill its ballot: nothing was admitted anywhere and the group goes on.
        Raises GroupDivergence, GroupTimeout, PeerLost or PeerFault, which end the group. Holds are given back in every
        case.
        """
        self._check_open()
        ticket, self._ticket = self._ticket, None
        with self._ended_by_errors():
            result = self._agreement.end(ticket.wait() if ticket is not None else None)
        if self.config.pool.check:
            self.check()
        return result

    # ---- what there is

    @property
    def running(self) -> Mapping[str, Sequence]:
        """Admitted sequences that have not ended, those that are being read in included, by request id."""
        return MappingProxyType(self._agreement.running)

    @property
    def suspended(self) -> Mapping[str, Request]:
        """Suspended requests that were neither resumed nor aborted, by id."""
        return MappingProxyType(self._agreement.preemption.suspended)

    @property
    def kept(self) -> Mapping[str, Sequence]:
        """Prefixes that were kept by ``Sequence.keep`` and not let go, by id: to be forked, or aborted."""
        return MappingProxyType(self._agreement.kept)

    @property
    def waiting_ids(self) -> tuple[str, ...]:
        """Ids of waiting requests, in queue order."""
        return self._agreement.queue.ids

    @property
    def leftover(self) -> int:
        """Pages that :meth:`grow` may take: the same number on every rank, 0 while a ballot is in flight."""
        return self._agreement.leftovers[0]

    @property
    def leftovers(self) -> Mapping[str, int]:
        """:attr:`leftover` of each label."""
        return dict(zip(self.labels, self._agreement.leftovers, strict=True))

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, ``main`` first."""
        return tuple(ledger.label for ledger in self._books.ledgers)

    @property
    def pool_pages(self) -> int:
        """Usable pages of the smallest pool of the group: what one request may use of ``main`` at most."""
        return self._agreement.smallest_pools[0]

    def close(self) -> None:
        """Aborts what waits and runs, on this rank only; every further step raises. The group is left as it is.

        What cannot be given back after an error that ended the group stays, and is not raised: it would hide that one.
        """
        first: DistKVError | None = None
        try:
            for sequence in (*self._agreement.running.values(), *self._agreement.kept.values()):
                try:
                    if sequence.ended == "kept" or not sequence.ended:  # else an error met it half-way through its end
                        sequence.abort()
                except DistKVError as error:
                    first = first or error
            self._agreement.forget_waiting()
        except DistKVError as error:
            first = first or error
        finally:  # whatever the books have come to, threads and memory end here
            close_all(self._books.tiers)
        was_broken = self._broken is not None
        self._break(SequenceError("the cache was closed"))
        if self._group.cache is not None and self._group.cache() is self:
            self._group.cache = None
        if first is not None and not was_broken:
            raise first
