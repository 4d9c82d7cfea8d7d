"""One case of batch invariance: sequences under a random schedule against each of them alone, in one pass.

A schedule packs random chunks of random sequences into batches; some sequences begin with pages of another one, as
after a cache hit. What is compared is bits: every logit that a batch gave, and every key and value in the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distkv.engine.attention import Batch
from distkv.engine.model import Model
from distkv.engine.pool import KVPool

__all__ = ["Case", "Piece", "differences", "random_case"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``start .. start + n - 1`` of sequence ``who``; ``keep`` are those whose logits are wanted."""

    who: int
    start: int
    n: int
    keep: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences, which of them share pages, and the batches that compute them.

    ``donors[i]`` is ``(j, pages)``: sequence i begins with the first ``pages`` pages of j, which may be none, in place.
    """

    tokens: list[np.ndarray]
    donors: list[tuple[int, int]]
    batches: list[list[Piece]]
    page_size: int


def random_case(
    random: np.random.Generator, *, vocab: int, page_size: int, longest: int, sequences: int = 4, batch: int = 512
) -> Case:
    """1 to ``sequences`` sequences of 1 to ``longest`` tokens, in batches of about ``batch`` tokens at most."""
    count = int(random.integers(1, sequences + 1))
    tokens: list[np.ndarray] = []
    donors: list[tuple[int, int]] = []
    for i in range(count):
        length = _length(random, longest) if random.integers(0, 2) else int(random.integers(1, longest + 1))
        own = random.integers(0, vocab, length).astype(np.int32)
        donor = int(random.integers(0, i)) if i else 0
        most = min(len(tokens[donor]), len(own) - 1) // page_size if i else 0
        shared = int(random.integers(0, most + 1)) if most else 0
        while 0 < shared <= donors[donor][1]:  # whoever computes these pages is the one to wait for
            donor = donors[donor][0]
        own[: shared * page_size] = tokens[donor][: shared * page_size] if i else own[:0]
        tokens.append(own)
        donors.append((donor, shared))
    done = [shared * page_size for _, shared in donors]
    batches = []
    while any(at < len(ids) for at, ids in zip(done, tokens, strict=True)):
        # a sequence that begins with another's pages waits until these were computed, in an earlier batch
        able = [i for i in range(count) if done[i] < len(tokens[i]) and done[donors[i][0]] >= donors[i][1] * page_size]
        chosen = random.permutation(able)[: int(random.integers(1, len(able) + 1))]
        pieces, room = [], batch
        for i in chosen.tolist():
            n = min(_length(random, longest), len(tokens[i]) - done[i], room)
            if n:
                keep = {done[i] + n - 1} | {done[i] + int(k) for k in random.integers(0, n, int(random.integers(0, 3)))}
                pieces.append(Piece(i, done[i], n, tuple(sorted(keep))))
                room -= n
        for piece in pieces:
            done[piece.who] += piece.n
        batches.append(pieces)
    return Case(tokens, donors, batches, page_size)


def _length(random: np.random.Generator, longest: int) -> int:
    """1, a few, some, or many: each in a quarter of all draws."""
    most = (1, 20, max(1, longest // 4), longest)[int(random.integers(0, 4))]
    return int(random.integers(1, min(most, longest) + 1))


def differences(model: Model, case: Case) -> list[str]:
    """Where the schedule's bits are not those of each sequence alone in one pass; empty if they are the same.

    Every rank of ``model.mesh`` calls it with the same case, and looks at its own pages.
    """
    size = case.page_size
    pages = [-(-len(ids) // size) for ids in case.tokens]
    pool = model.pool(sum(pages), size)
    # never written, so never to be seen; 0 times NaN is NaN
    pool.data.fill_(float("nan"))
    tables = _tables(case, pages)
    seen: list[dict[int, torch.Tensor]] = [{} for _ in case.tokens]
    for batch in case.batches:
        rows = [(case.tokens[p.who][p.start : p.start + p.n], p.start, p, tables[p.who]) for p in batch]
        for piece, logits in zip(batch, _forward(model, pool, rows), strict=True):
            seen[piece.who].update(zip(piece.keep, logits, strict=True))
    found = []
    for i, ids in enumerate(case.tokens):
        alone = model.pool(pages[i], size)
        alone.data.fill_(float("nan"))
        whole = Piece(i, 0, len(ids), tuple(sorted(seen[i])))
        logits = _forward(model, alone, [(ids, 0, whole, np.arange(pages[i]))])[0]
        found += [
            f"sequence {i} of {len(ids)} tokens: the logits at position {at} differ"
            for at, want in zip(whole.keep, logits, strict=True) if not torch.equal(seen[i][at], want)
        ]  # fmt: skip
        found += _page_differences(i, pool, tables[i], alone, len(ids))
    return found


def _tables(case: Case, pages: Sequence[int]) -> list[np.ndarray]:
    tables: list[np.ndarray] = []
    free = 0
    for (donor, shared), n in zip(case.donors, pages, strict=True):
        own = np.arange(free, free + n - shared)
        free += n - shared
        tables.append(np.concatenate([tables[donor][:shared], own]) if tables else own)
    return tables


def _forward(
    model: Model, pool: KVPool, rows: Sequence[tuple[np.ndarray, int, Piece, np.ndarray]]
) -> list[torch.Tensor]:
    """Computes one batch; the logits that each piece wants."""
    full, keep, counts, at = [], [], [], 0
    for ids, start, piece, table in rows:
        positions = np.arange(start, start + len(ids))
        slots = table[positions // pool.page_size] * pool.page_size + positions % pool.page_size
        full.append((ids, start, slots, table))
        keep += [at + position - start for position in piece.keep]
        counts.append(len(piece.keep))
        at += len(ids)
    return list(torch.split(model.forward(Batch.build(pool, full, model.dtype), keep), counts))


def _page_differences(who: int, pool: KVPool, table: np.ndarray, alone: KVPool, tokens: int) -> list[str]:
    found = []
    to = pool.data.device
    for layer in range(pool.layers):
        ours = pool.gather(layer, torch.from_numpy(table).to(to), tokens)
        theirs = alone.gather(layer, torch.arange(alone.pages, device=to), tokens)
        for plane, mine, other in zip(("keys", "values"), ours, theirs, strict=True):
            wrong = (mine != other).flatten(1).any(dim=1).nonzero().flatten().tolist()
            if wrong:
                found.append(f"sequence {who} of {tokens} tokens: layer {layer}, {plane} of token {wrong[0]} differ "
                             f"(and of {len(wrong) - 1} more)")  # fmt: skip
    return found
