"""The frozen types that go in and out of the cache: requests, messages, results, records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distkv.books import SCOPES, Scope
from distkv.chain import KeyChain
from distkv.errors import MessageError, RequestError
from distkv.ledger import MAIN
from distkv.reasons import Reason

if TYPE_CHECKING:
    from distkv.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be answered. The same on every rank, but for the chain object, which each rank makes itself."""

    id: str
    """Names the request on all ranks while it waits and runs."""
    chain: KeyChain
    """The prompt, by ``cache.chain``. At least one token."""
    output_limit: int
    """Most tokens that may be generated. The request is promised room for prompt + output_limit tokens at admission,
    and for what may be drafted ahead of them (``cache.lookahead_tokens``). 0: the prompt is computed and nothing is
    generated, to have it in the cache before it is asked for."""
    labels: tuple[str, ...] = (MAIN,)
    """The labels whose pools it needs pages of: all of them with one matched length, or none. Those of sliding layers
    come with ``main``."""
    matched_cap: int | None = None
    """Rank 0's own matched length in pages (``cache.peek``), which caps every rank's lookup for the first ballot."""
    read: bool = True
    """False: nothing is taken from the cache."""
    write: bool = True
    """False: nothing of it is stored."""
    priority: int = 0
    """For the engine's use; admission is first in, first out."""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str):
            raise RequestError(str(self.id), f"its id is a {type(self.id).__name__}, which must be a str")
        if not isinstance(self.chain, KeyChain):
            raise RequestError(self.id, f"chain is a {type(self.chain).__name__}; cache.chain(tokens) makes a KeyChain")
        for name, value in (("output_limit", self.output_limit), ("matched_cap", self.matched_cap or 0)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise RequestError(self.id, f"{name} is {value!r}, which must be a whole number")
        labels = self.labels
        if not isinstance(labels, tuple) or not labels or not all(isinstance(label, str) for label in labels):
            raise RequestError(self.id, f"labels is {labels!r}, which must be a tuple of at least one label's name")
        if len(set(labels)) < len(labels):
            raise RequestError(self.id, f"labels is {labels!r}, which names one twice")
        if len(self.chain) < 1:
            raise RequestError(self.id, "the prompt is empty; at least one token has to be computed")
        if self.output_limit < 0:
            raise RequestError(self.id, f"output_limit is {self.output_limit}, which must be 0 or more")
        if self.matched_cap is not None and self.matched_cap < 0:
            raise RequestError(self.id, f"matched_cap is {self.matched_cap}, which must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What all ranks are told for one step, in one order: bump or reset, then aborts, resumes, and new requests."""

    requests: tuple[Request, ...] = ()
    """New requests, in the order in which they are to be admitted."""
    aborts: tuple[str, ...] = ()
    """Ids of waiting or running requests. Unknown ids are ignored: they may have ended in the meantime."""
    weights_version: str | None = None
    """Not None: the weights are these from now on; nothing computed before is used again."""
    reset: bool | Scope = False
    """True or "all": the cache forgets everything; "device" or "host": of that tier. Running sequences finish and do
    not store, but after a reset of the host alone they do. See ``PrefixCache.reset``."""
    resumes: tuple[str, ...] = ()
    """Ids of suspended requests, which go to the head of the queue in this order. Unknown ids are ignored."""

    def __post_init__(self) -> None:
        for name, kind in (("requests", Request), ("aborts", str), ("resumes", str)):
            given = getattr(self, name)
            if not isinstance(given, (tuple, list)) or not all(isinstance(item, kind) for item in given):
                raise MessageError(f"Message.{name} must be a tuple of {kind.__name__}, not {given!r:.100}")
            object.__setattr__(self, name, tuple(given))
        if not isinstance(self.reset, bool) and self.reset not in SCOPES:
            raise MessageError(f"Message.reset must be True, False or one of {', '.join(SCOPES)}, not {self.reset!r}")
        if self.weights_version is not None and not isinstance(self.weights_version, str):
            raise MessageError(f"Message.weights_version must be a str or None, not {self.weights_version!r}")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that was not admitted in this step."""

    request_id: str
    why: str
    """``no room``: the first that does not fit; ``being read in``: the first waits for the load of pages of its own,
    which another request reads in; ``behind it``: it may fit, but admission is first in, first out."""
    pages_short: int = 0
    """How many more pages the group would have to promise to the first; 0 for those behind it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that can never run, or whose id is taken (DuplicateRequest: the id is then another one's, which goes
    on). It is not waiting any more."""

    request_id: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class Forked:
    """A fork that had to wait for its pages, and has them."""

    parent: Sequence
    children: tuple[Sequence, ...]
    """They may run from now on, and belong to the caller as those of ``StepResult.ready`` do."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step decided: the same on every rank, but for requests aborted while the ballot was in flight."""

    step: int
    ready: tuple[Sequence, ...] = ()
    """Sequences that may run from now on. The engine runs each until it calls ``finish``, ``abort`` or ``suspend``."""
    loading: tuple[Sequence, ...] = ()
    """Sequences that were admitted and are being read in, on this rank or another; they get ready, or wait again."""
    grown: tuple[Sequence, ...] = ()
    """Sequences that got the pages for which ``PrefixCache.grow`` made them wait."""
    forked: tuple[Forked, ...] = ()
    """Forks that ``Sequence.fork`` made wait, and that are made now."""
    to_preempt: tuple[str, ...] = ()
    """Ids of running sequences, the last admitted: one that asked for more pages does not get them unless these are
    suspended (or others end). Empty if nothing waits to grow."""
    waiting: tuple[Waiting, ...] = ()
    """Those of the first ``cache.queue_slots`` requests that were not admitted, in queue order. More may wait behind
    them, see ``PrefixCache.waiting_ids``; after a step without a ballot it is empty."""
    refused: tuple[Refused, ...] = ()
    """Requests that were refused since the last result."""
    leftover: int = 0
    """Pages that the whole group can still promise until the next ballot, the same number on every rank."""
    collective: bool = False
    """Whether a collective was needed; never in a group of one."""


@dataclass(frozen=True, slots=True)
class ResetResult:
    """What a reset did on this rank, in pages."""

    freed: int
    """Device pages that became free."""
    host_freed: int
    """Host pages that became free."""
    still_held: int
    """Device pages that running requests, or passes that have not retired, or the ballot in flight still have. They
    become free when those end."""
    in_flight: int
    """Copies between the tiers that have not ended; their pages become free when they do."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What the cache did for one request. Lengths in pages but for the two in tokens."""

    request_id: str
    prompt_tokens: int
    matched: int
    """Pages that this rank had on the device."""
    restorable: int
    """Pages that this rank had on the device or the host."""
    agreed: int
    """Pages that every rank had, on the device or the host: the ones that are used."""
    cached_tokens: int
    """``agreed * page_size``."""
    host_tokens: int
    """Those of them that some rank had to read in from the host."""
    reason: Reason
    """Why ``agreed`` is not more."""
