"""Forks: sequences that go on from what another one has computed, on the very same pages. Sans-IO.

Full pages are shared for good. A partly filled last page, the tail, is shared until somebody writes to it, who then
copies it first: see :meth:`distkv.ledger.Ledger.write_tail`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from distkv.books import Books
from distkv.encoding import encode
from distkv.errors import KeyNamingError, RequestError, SequenceError
from distkv.keys import token_bytes
from distkv.reasons import Reason
from distkv.request import Request, RequestRecord
from distkv.sequence import Lifecycle, Sequence

__all__ = ["Branch", "Fork", "data_of", "default_branches"]

MAX_CHILDREN = 1 << 16
"""Of a fork that says how many: more is a mistake, and would fill the memory with names before room is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One child of a fork. The same on every rank."""

    id: str
    """Names it, as the id of a request does."""
    suffix: object = ()
    """Token ids behind what its parent has committed, which it is to compute; see :func:`distkv.keys.token_bytes`."""
    output_limit: int | None = None
    """Most tokens that may be generated behind them. None: what is left of its parent's own limit, without what the
    parent has grown by."""


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    """A fork that was checked: what its children will be, and what they need. Nothing is taken yet."""

    parent: Sequence
    requests: tuple[Request, ...]
    needs: dict[str, int]
    """Pages by label, for all children together."""

    @classmethod
    def of(cls, parent: Sequence, branches: object, books: Books) -> Fork:
        """Raises SequenceError for a parent that cannot be forked now, RequestError for a wrong branch."""
        committed, size = parent.committed, books.page_size
        tokens = shared_tokens(parent)
        partial = bool(tokens % size)
        if tokens < committed and any(pages.ledger.windowed for pages in parent.lists):
            raise SequenceError(f"sequence {parent.id!r} cannot be forked: with cache.next_token_depth a fork computes "
                                "the last page again, and a windowed label may not have the window before it any more")
        if parent.seq_len != committed:
            raise SequenceError(f"sequence {parent.id!r} cannot be forked: {parent.seq_len - committed} of its tokens "
                                "are opened and not committed; commit or truncate them first")
        if partial and any(pages.ledger.copy_page is None for pages in parent.lists):
            raise SequenceError(f"sequence {parent.id!r} cannot be forked: its last page is partly filled and will "
                                "have to be copied, and the cache was given nothing to copy pages with; pass kv= or "
                                "copy_page= to PrefixCache")
        if not isinstance(branches, Iterable):
            raise _no_branch(parent, branches)
        requests = tuple(_request(parent, branch) for branch in branches)
        totals = [books.total(len(request.chain) + request.output_limit) for request in requests]
        shared = -(-tokens // size)
        needs = {pages.ledger.label: sum(pages.ledger.fork_needs(pages, total, shared, partial=partial)
                                         for total in totals)
                 for pages in parent.lists}
        return cls(parent, requests, needs)

    def make(self, books: Books, owner: Lifecycle) -> tuple[Sequence, ...]:
        """The children. Their pages were promised: nothing here can fail."""
        parent, size = self.parent, books.page_size
        committed = shared_tokens(parent)
        children = []
        for request in self.requests:
            total = books.total(len(request.chain) + request.output_limit)
            lists = tuple(pages.shared(total, -(-committed // size)) for pages in parent.lists)
            record = RequestRecord(
                request_id=request.id, prompt_tokens=len(request.chain), matched=committed // size,
                restorable=committed // size, agreed=committed // size, cached_tokens=committed, host_tokens=0,
                reason=Reason.FORKED)
            child = Sequence(books, request, request.chain, lists, committed, record, owner)
            child.epoch = parent.epoch
            children.append(child)
        if committed % size:
            for pages in parent.lists:
                pages.share_tail(committed // size, [child.pages_of(pages.ledger.label) for child in children])
        return tuple(children)


def shared_tokens(parent: Sequence) -> int:
    """How many leading tokens a fork has the KV of: all committed ones.

    With ``next_token_depth``, those of the full pages whose next tokens are committed, too: the KV of the others will
    not be the same in parent and children, which compute it again.
    """
    naming = parent.chain.namer.naming
    return naming.page_size * naming.pages_in(parent.committed) if naming.next_token_depth else parent.committed


def _no_branch(parent: Sequence, given: object) -> RequestError:
    return RequestError(parent.id, f"a fork takes a number of children or distkv.Branch objects, not {given!r:.100}")


def _request(parent: Sequence, branch: object) -> Request:
    """The request that a child runs on."""
    if not isinstance(branch, Branch):
        raise _no_branch(parent, branch)
    try:
        chain = parent.chain.branch(parent.committed)
    except KeyNamingError as error:  # in the midst of a media item, all of which its first half depends on
        raise SequenceError(f"sequence {parent.id!r} cannot be forked: its {parent.committed} committed tokens end "
                            f"inside a span ({error}); commit the rest of it first") from error
    suffix = bytes(token_bytes(branch.suffix))
    chain.extend_bytes(suffix)
    limit = branch.output_limit
    if limit is None:
        limit = max(0, parent.prompt_tokens + parent.request.output_limit - len(chain))
    if len(chain) < 1:
        raise RequestError(branch.id, "a fork of a sequence without a committed token needs a suffix")
    return replace(parent.request, id=branch.id, chain=chain, output_limit=limit, matched_cap=None)


def default_branches(parent: Sequence, n: int, taken: Iterable[str]) -> tuple[Branch, ...]:
    """``n`` children with names of their own, ``parent/1`` and so on, and the parent's limit.

    Raises RequestError for more than ``MAX_CHILDREN``.
    """
    if n > MAX_CHILDREN:
        raise RequestError(parent.id, f"a fork makes at most {MAX_CHILDREN} children, not {n}")
    names: list[str] = []
    number, known = 1, set(taken)
    while len(names) < n:
        name = f"{parent.id}/{number}"
        if name not in known:
            names.append(name)
        number += 1
    return tuple(Branch(id=name) for name in names)


def data_of(fork: Fork) -> bytes:
    """What the digest has of a fork beside its numbers: names, tokens and limits of the children."""
    committed = fork.parent.committed
    return encode(*(item for request in fork.requests
                    for item in (request.id, request.output_limit,
                                 np.asarray(request.chain.slice(committed, len(request.chain))).tobytes())))
