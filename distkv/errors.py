"""Every error that distkv raises, in one tree.

::

    DistKVError
    +-- ConfigError              a field of the configuration is wrong          ends: the start
    +-- MessageError             a message or a cache made of the wrong things   ends: the call
    +-- KeyNamingError           tokens, spans, salt or adapter cannot be named ends: the call
    +-- RequestError             a request cannot be taken as it stands         ends: the request
    |   +-- RequestTooLarge      it would never fit into the smallest pool
    |   +-- DuplicateRequest     its id is waiting or running already
    |   +-- PromptError          the engine cannot run its prompt (empty, too long, ids outside the vocabulary)
    +-- InputFileError           a line of a file of requests cannot be read    ends: the start
    +-- ModelError               a model cannot be found, loaded or split       ends: the start
    |   +-- NotInvariant         this machine cannot keep engine.batch_invariant
    +-- GateFailed               a cached run's bits are not an uncached run's  ends: the check
    +-- SequenceError            a call that the sequence's state forbids       ends: the call
    +-- NoRoom                   pages are short now, later there may be room   ends: the call
    +-- TableError               a batch's tables do not fit into their buffers ends: the call
    +-- LayoutMismatch           KV pages of another kind than these            ends: the start
    +-- HostMemoryError          memory for the host tier cannot be had         ends: the start
    +-- CopyFailed               a page did not get to the other tier           ends: the copy
    +-- InvariantError           the books are wrong: a defect of distkv        ends: the process
    +-- GroupError
        +-- GroupMismatch        agreed fields differ at start                  ends: the start
        +-- PeerFailed           a rank could not fill its ballot               ends: the step only
        +-- PeerFault            a rank failed in its forward pass or in commit ends: the group
        +-- GroupTimeout         no answer within the deadline                  ends: the group
        +-- PeerLost             the connection to a rank broke                 ends: the group
        +-- GroupDivergence      ranks were not given the same calls            ends: the group

"Ends the call" leaves the state as it was before the call. "Ends the step only" admits nothing, gives all
holds back on every rank, counts the step, and the group goes on with the next one. After an error that
ends the group no further step can be taken: every later step raises the same error again. Only PeerFailed is
recoverable; of what ends the group, GroupDivergence comes on all ranks in one step, PeerFault on the ranks that did not
fail, at their next call or wherever they wait, and GroupTimeout and PeerLost on whoever is left.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "CopyFailed",
    "DistKVError",
    "DuplicateRequest",
    "GateFailed",
    "GroupDivergence",
    "GroupError",
    "GroupMismatch",
    "GroupTimeout",
    "HostMemoryError",
    "InputFileError",
    "InvariantError",
    "KeyNamingError",
    "LayoutMismatch",
    "MessageError",
    "ModelError",
    "NoRoom",
    "NotInvariant",
    "PeerFailed",
    "PeerFault",
    "PeerLost",
    "PromptError",
    "RequestError",
    "RequestTooLarge",
    "SequenceError",
    "TableError",
]


class DistKVError(Exception):
    """The root: ``except DistKVError`` catches whatever distkv raises on purpose."""


class ConfigError(DistKVError):
    """A field of the configuration is unknown, doubled, of the wrong type, or impossible.

    ``path`` is the dotted path of the field (``cache.page_size``), empty for the file as a whole.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path


class KeyNamingError(DistKVError, ValueError):
    """Token ids, spans, salt or adapter that cannot be named without ambiguity."""


class MessageError(DistKVError, TypeError):
    """A message, or an argument of the cache's constructor, that is not what it has to be."""


class RequestError(DistKVError, ValueError):
    """A request that cannot be taken as it stands. Ends the request; ``request_id`` names it."""

    def __init__(self, request_id: str, problem: str) -> None:
        super().__init__(f"request {request_id!r}: {problem}")
        self.request_id = request_id


class RequestTooLarge(RequestError):
    """A request that would use more pages than the smallest pool of the group has, so it can never run."""

    def __init__(self, request_id: str, pages_needed: int, pages_possible: int, label: str | None = None, *,
                 sequences: int = 1) -> None:
        """``label``: that is short of pages; None: ``main``. ``sequences``: that it needs at the same time."""
        many, fewer = (f", in {sequences} sequences", ", n or beams") if sequences > 1 else ("", "")
        of, where = (f" of label {label!r}", f"pages of label {label!r}") if label is not None else ("", "pool.pages")
        super().__init__(
            request_id,
            f"needs {pages_needed} pages{of} for its prompt, output_limit and cache.lookahead_tokens{many}, but the "
            f"smallest pool of the group has {pages_possible} usable ones (without scratch pages); shorten the prompt, "
            f"lower output_limit{fewer}, or raise {where} on every rank",
        )
        self.pages_needed = pages_needed
        self.pages_possible = pages_possible


class DuplicateRequest(RequestError):
    """The id is already waiting or running."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id, "an earlier request with this id is still waiting or running; ids name one")


class PromptError(RequestError):
    """A prompt that the engine's model cannot run: empty, beyond its context, or with ids it has no tokens for."""


class InputFileError(DistKVError, ValueError):
    """A line of an input file that cannot be used. ``line`` counts from 1; 0 means the file as a whole."""

    def __init__(self, path: str, line: int, problem: str) -> None:
        super().__init__(f"{path}, line {line}: {problem}" if line else f"{path}: {problem}")
        self.path = path
        self.line = line


class ModelError(DistKVError, ValueError):
    """A model that cannot be found, read, split over the ranks, or run with paged attention."""


class NotInvariant(ModelError):
    """The self-test of ``engine.batch_invariant`` found other bits in another batch. Ends the start, on all ranks.

    ``what`` names the kernel, its sizes, the type and the number of threads, or another rank's error that ended the
    test there; ``failed_rank`` is the rank that saw it.
    """

    def __init__(self, what: str, failed_rank: int = 0) -> None:
        super().__init__(
            f"engine.batch_invariant cannot be kept on this machine (seen on rank {failed_rank}): {what}. Set it to "
            "false, or try another number of threads (OMP_NUM_THREADS)"
        )
        self.what = what
        self.failed_rank = failed_rank


class GateFailed(DistKVError):
    """The gate: bits of a cached run differ from those of an uncached run, or nothing was there to be compared.

    ``differences`` has one line each, with the request, the rank, and the page and layer or the position.
    """

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


class SequenceError(DistKVError, RuntimeError):
    """A call that the sequence's state forbids, such as ``commit`` of tokens never opened. Ends the call."""


class NoRoom(DistKVError):
    """Pages are short. Ends the call, with nothing taken; ``pages_short`` says by how many."""

    def __init__(self, pages_short: int, where: str) -> None:
        super().__init__(f"{where}: {pages_short} page(s) short")
        self.pages_short = pages_short


class TableError(DistKVError, ValueError):
    """Tables of a batch that cannot be made in the buffers given. Nothing was written to any of them.

    ``buffer`` names what is wrong; ``needed`` and ``has`` are elements (rows, pages), 0 where size is not the matter.
    """

    def __init__(self, message: str, buffer: str, needed: int = 0, has: int = 0) -> None:
        super().__init__(message)
        self.buffer = buffer
        self.needed = needed
        self.has = has


class LayoutMismatch(DistKVError, ValueError):
    """KV pages of another kind than these, or tensors that are no pages at all. ``differences`` maps field to both.

    Bytes of one kind mean nothing in a page of another one, equal size or not.
    """

    def __init__(self, problem: str, differences: dict[str, tuple[object, object]] | None = None) -> None:
        super().__init__(problem)
        self.differences = differences or {}


class HostMemoryError(DistKVError, MemoryError):
    """Memory for the host tier that cannot be had, or not pinned. What was had before is given back.

    ``asked`` and ``got`` are bytes: of the whole tier, and of the chunks before the one that failed.
    """

    def __init__(self, problem: str, *, asked: int, got: int) -> None:
        super().__init__(problem)
        self.asked = asked
        self.got = got


class CopyFailed(DistKVError, RuntimeError):
    """A page that did not get to the other tier. It is an error of this copy alone: see ``Copy.error``."""


class InvariantError(DistKVError, AssertionError):
    """``check()`` found the books wrong. This is a defect of distkv, never of the caller: please report it."""


class GroupError(DistKVError):
    """Something about the group of ranks. ``step`` is the cache's step number, or -1 where there is none."""

    def __init__(self, message: str, *, rank: int, step: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step


class GroupMismatch(GroupError):
    """Ranks were started with different agreed fields. ``values`` maps field to the value of each rank."""

    def __init__(self, values: dict[str, list[str]], *, rank: int) -> None:
        lines = []
        for field, per_rank in values.items():
            shown = ", ".join(f"rank {r}: {v}" for r, v in enumerate(per_rank))
            lines.append(f"{field} differs ({shown})")
        super().__init__(
            "the ranks of the group were started differently: " + "; ".join(lines)
            + ". Give these fields the same value on every rank.",
            rank=rank,
            step=-1,
        )
        self.values = values


def _of(step: int) -> str:
    return f" of step {step}" if step >= 0 else ""


class PeerFailed(GroupError):
    """A rank could not fill its ballot; every rank raises this in the same step. Ends the step only: the group goes on.

    ``failed_rank`` is the lowest rank that failed. On that rank ``__cause__`` is the original exception.
    """

    def __init__(self, failed_rank: int, *, rank: int, step: int) -> None:
        super().__init__(
            f"step {step}: rank {failed_rank} failed while it filled its ballot; nothing was admitted on any "
            f"rank and all holds were given back (this is rank {rank}; the cause is in rank {failed_rank}'s log)",
            rank=rank,
            step=step,
        )
        self.failed_rank = failed_rank


class PeerFault(GroupError):
    """A rank failed outside the ballot, where it cannot be undone: in its forward pass, in commit. Ends the group.

    Every other rank raises this, whatever it was doing; the rank itself raises what went wrong there, and this at every
    later call. ``failed_rank``, ``step`` and ``kind`` say where, ``text`` is the exception's type and message.
    """

    def __init__(self, failed_rank: int, kind: str, text: str, *, rank: int, step: int) -> None:
        super().__init__(
            f"rank {failed_rank} failed in the {kind}{_of(step)}: {text} (this is rank {rank}). The group is over: "
            "make a new one with new caches",
            rank=rank,
            step=step,
        )
        self.failed_rank = failed_rank
        self.kind = kind
        self.text = text


class GroupTimeout(GroupError):
    """Another rank did not answer within the deadline: it is stopped, stuck or gone. Ends the group.

    ``failed_rank``: which one, if it is known; then ``step`` is that rank's last known step.
    """

    def __init__(self, operation: str, seconds: float, *, rank: int, step: int, failed_rank: int | None = None,
                 story: str = "") -> None:
        super().__init__(
            story + f" (seen on rank {rank})" if story else
            f"{operation}{_of(step)} did not end within {seconds:g} s on rank {rank}: another rank is stopped, "
            "stuck or gone. Look at the other ranks' logs; group.timeout_s sets the deadline",
            rank=rank,
            step=step,
        )
        self.operation = operation
        self.seconds = seconds
        self.failed_rank = failed_rank


class PeerLost(GroupError):
    """A connection broke: the process of another rank ended. Ends the group.

    ``failed_rank``: which one, if it is known; then ``step`` is that rank's last known step.
    """

    def __init__(self, operation: str, detail: str, *, rank: int, step: int, failed_rank: int | None = None,
                 story: str = "") -> None:
        super().__init__(
            story + f" (seen on rank {rank})" if story else
            f"{operation}{_of(step)} lost a peer on rank {rank}: {detail}. Look at the other ranks' logs",
            rank=rank,
            step=step,
        )
        self.operation = operation
        self.failed_rank = failed_rank


class GroupDivergence(GroupError):
    """The ranks were not given the same calls in the same order since the last ballot; all raise in one step.

    ``lockstep``: since the last digest, or a rank's pages are not in the others' state. ``calls``: this rank's last
    calls, each with the digest behind it; the first digest that another rank's error has not is behind the call that
    was another one there.
    """

    def __init__(self, *, rank: int, step: int, lockstep: bool = False, calls: str = "") -> None:
        since = "digest" if lockstep else "ballot"
        more = ("; in lockstep at the same places between begin_step and end_step, retired included, and no rank may "
                "lose a page") if lockstep else ""
        super().__init__(
            f"step {step}: the ranks' histories differ (seen on rank {rank}): since the last {since} the ranks were "
            "not given the same requests, appends, commits, forks, finishes, aborts or bumps in the same order. Every "
            f"call that changes the cache has to come from one ordered message that all ranks apply{more}"
            + (f". Compare this rank's last calls with another's, [digest] by [digest]: {calls}" if calls else ""),
            rank=rank,
            step=step,
        )
        self.calls = calls
