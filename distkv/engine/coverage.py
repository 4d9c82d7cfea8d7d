"""Whether a recording can be computed again, and whether all ranks have the same one; found before they compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from distkv.engine.model import Model
from distkv.engine.record import RecordedRequest, Recording
from distkv.errors import GateFailed
from distkv.torch_group import TorchGroup

__all__ = ["check_recording"]


def check_recording(model: Model, recording: Recording, todo: Sequence[RecordedRequest]) -> None:
    """Raises ``GateFailed`` on every rank of the model's group unless ``todo`` can be computed again, together.

    Cached pages and computed chunks must be all tokens of a request, cached pages must have been computed for its
    tokens, and the ranks must have the same schedule.
    """
    problem = _problem(todo, recording, model.rank)
    _same_on_all_ranks(model, recording, todo, problem)
    if problem is not None:
        raise problem


def _problem(todo: Sequence[RecordedRequest], recording: Recording, rank: int) -> GateFailed | None:
    """What this rank's recording has that cannot be compared. Found before the ranks begin to compute together."""
    try:
        for request in todo:
            _check_covered(request, recording, rank)
            _check_origins(request, recording, rank)
    except GateFailed as problem:
        return problem
    return None


def _same_on_all_ranks(
    model: Model, recording: Recording, todo: Sequence[RecordedRequest], problem: GateFailed | None
) -> None:
    """Ranks compute together, so they need one plan; only ranks that evicted differently can have different ones.

    A rank with a ``problem`` of its own tells the others, which raise too: none may wait for it.
    """
    if model.group is None:
        return
    plan = [(r.id, r.origin, r.computed) for r in (*recording.requests.values(), *todo)]
    mine = xxhash.xxh3_64_digest(repr((plan, recording.batches)).encode()) if problem is None else b""
    group = TorchGroup(model.group, timeout_s=model.timeout_s)
    digests = group.exchange(mine, purpose="the gate's comparison of schedules")
    if problem is not None:
        return
    if b"" in digests:
        raise GateFailed(f"nothing was compared: rank {digests.index(b'')} cannot, see its own error")
    if any(digest != mine for digest in digests):
        raise GateFailed("the ranks took pages of different origin from their caches; give all ranks equal pools, and "
                         "pools large enough for the run to be checked")  # fmt: skip


def _check_covered(request: RecordedRequest, recording: Recording, rank: int) -> None:
    """Cached pages and computed chunks must be all tokens of a request: what nobody computed cannot differ either."""
    at = request.cached_tokens
    where = f"request {request.id!r}, rank {rank}"
    if -(-at // recording.pool.page_size) != len(request.origin):
        raise GateFailed(f"{where}: {at} tokens came from the cache, but {len(request.origin)} pages")
    for number, i in request.computed:
        chunk = recording.batches[number].chunks[i]
        if chunk.start != at:
            raise GateFailed(f"{where}: tokens {min(at, chunk.start)} to {max(at, chunk.start) - 1} were "
                             f"{'never computed' if chunk.start > at else 'computed twice'}")  # fmt: skip
        at += chunk.n
    if at != request.committed:
        raise GateFailed(f"{where}: {request.committed} tokens were committed, but {at} were cached or computed")


def _check_origins(request: RecordedRequest, recording: Recording, rank: int) -> None:
    """The chunks that filled a cached page must have had this request's tokens there, all of them and no others.

    A chunk that goes on in the next page would have to be computed with tokens that are not the request's.
    """
    size = recording.pool.page_size
    for page, origin in enumerate(request.origin):
        at, end = page * size, min((page + 1) * size, request.cached_tokens)
        for place in origin:
            chunk = recording.batches[place[0]].chunks[place[1]]
            low, high = max(chunk.start, page * size), min(chunk.start + chunk.n, (page + 1) * size)
            writer = recording.requests[chunk.request_id]
            same = np.array_equal(writer.tokens[low:high], request.tokens[low:high])
            if low != at or not low < high <= end or not same:
                break
            if (chunk.start, chunk.start + chunk.n) != (low, high):
                raise GateFailed(
                    f"request {request.id!r}, rank {rank}: page {page} came from the cache and was filled by tokens "
                    f"{chunk.start} to {chunk.start + chunk.n - 1} of {chunk.request_id!r}: under the same schedule "
                    "only pieces within one page can be computed again"
                )
            at = high
        if at != end:
            raise GateFailed(
                f"request {request.id!r}, rank {rank}: page {page} came from the cache, but it was not computed for "
                f"the request's tokens {page * size} to {end - 1}"
            )
