"""A request in the waiting queue: what it needs of each label, and what of it enters the digest. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass

from distkv.books import Books, Call
from distkv.chain import KeyChain
from distkv.encoding import encode
from distkv.keys import TOKEN_BYTES, tag_of
from distkv.request import Request

__all__ = ["Pending"]


@dataclass(slots=True, eq=False)
class Pending:
    """A request in the waiting queue."""

    request: Request
    chain: KeyChain
    total: int
    """``T``: pages for prompt, output limit and lookahead."""
    tag: int
    labels: tuple[int, ...] = (0,)
    """The numbers of its labels, in the order of the configuration."""
    needs: tuple[int, ...] = ()
    """Pages to be promised of each of the cache's labels, before any discount; 0 for those that it does not use."""
    ballots: int = 0
    """How many ballots it has been in, that in flight included."""
    aborted: bool = False
    """Aborted while the ballot was in flight: decided upon as if it were not, then let go."""
    read_in: bool = True
    """False: it takes what is on the device alone, because reading it in ended short."""

    @classmethod
    def of(cls, request: Request, chain: KeyChain, books: Books) -> Pending:
        """The queue's entry for a new request, whose prompt ``chain`` names and whose labels there are."""
        total = books.total(len(chain) + request.output_limit)
        labels = books.labels_of(request.labels)
        needs: tuple[int, ...] = (total,)
        if len(books.ledgers) > 1:
            needs = tuple(ledger.promised_for(total) if i in labels else 0 for i, ledger in enumerate(books.ledgers))
        return cls(request, chain, total, tag_of(request.id), labels, needs)

    def note(self, books: Books) -> None:
        """Rolls the digest over everything that the others' request of this name has to have in common with it."""
        chain = self.chain
        at = chain.pages * chain.namer.page_size
        tail = bytes(chain.buffer[TOKEN_BYTES * at : TOKEN_BYTES * len(chain)])
        behind = [s for s in chain.spans if s.end > at]  # the last key has the others
        tail += encode(*(x for s in behind for x in (s.start, s.length, s.digest, s.kind)))
        last_key = chain.keys[chain.pages - 1] if chain.pages else chain.seed
        books.note(Call.SUBMIT, self.tag, self.total, len(chain), self.limit, self.request.write, last_key,
                   *(self.labels if self.labels != (0,) else ()), data=tail)

    @property
    def limit(self) -> int:
        """Most pages that may be matched: those that have a name, and at least one prompt token is always computed.

        Rank 0's cap is from when the request was handed over, so it holds for the first ballot only.
        """
        if not self.request.read:
            return 0
        whole = min((len(self.chain) - 1) // self.chain.namer.page_size, self.chain.pages)
        return whole if self.cap is None else min(whole, self.cap)

    @property
    def cap(self) -> int | None:
        """Rank 0's cap, while it holds."""
        return self.request.matched_cap if self.ballots <= 1 else None
