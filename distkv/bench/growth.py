"""How the cost of an operation grows with one size while all else stays: the exponent of a power law, fitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distkv.bench.rows import markdown, number
from distkv.bench.timing import measure, repeat, settled
from distkv.bench.workloads import FINGERPRINT, Conversation, Sizes, new_cache, store, tokens, with_tails
from distkv.books import Books
from distkv.chain import Namer
from distkv.pages import PagePool, Pages
from distkv.request import Message, Request


@dataclass(frozen=True, slots=True)
class Growth:
    """Medians of one operation over doublings of one size."""

    operation: str
    size: str
    most: float
    """The largest exponent that the operation may have: 1 where it touches what grows, 0 where it does not."""
    points: tuple[tuple[int, float], ...]
    """(size, microseconds)"""

    @property
    def exponent(self) -> float:
        """Slope of log time over log size, by least squares: 1 is linear, 0 is no growth."""
        sizes, times = np.log(np.array(self.points).T)
        return float(np.polyfit(sizes, times, 1)[0])

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"operation": self.operation, "size": self.size, "most": self.most, "exponent": self.exponent,
                "points": [list(point) for point in self.points]}


def table(found: Sequence[Growth]) -> str:
    """The growths as a Markdown table."""
    lines = [[g.operation, g.size, f"{g.points[0][0]:,} .. {g.points[-1][0]:,}",
              ", ".join(number(time) for _, time in g.points), f"{g.exponent:.2f}", f"{g.most:.0f}"] for g in found]
    return markdown(["operation", "against", "sizes", "us", "exponent", "may be"], lines)


def all_of(sizes: Sizes) -> Iterator[Growth]:
    """Growth against prompt length, entries, tails, waiting requests and pool; of eviction of an interior and reset."""
    for operation, size, most, start, timer in (
        ("match + page table", "prompt tokens", 1.0, sizes.prompt >> sizes.growth_steps, _match_by_prompt),
        ("match of a short prompt", "entries", 0.0, 256, _match_by_entries),
        ("store of new tokens", "entries", 0.0, 256, _store_by_entries),
        ("evict one page", "tails", 0.0, 64, _evict_by_tails),
        ("evict one interior page", "pool pages", 0.0, 1_024, _interior_by_pool),
        ("step, none of the first K fits", "waiting requests", 0.0, 16, _step_by_waiting),
        ("whole short request", "pool pages", 0.0, 4_096, _request_by_pool),
        ("reset", "entries", 1.0, 256, _reset_by_entries),
    ):
        points = []
        for doubling in range(sizes.growth_steps + 1):
            n = start << doubling
            with settled():
                points.append((n, timer(sizes, n)))
        yield Growth(operation, size, most, tuple(points))


def _match_by_prompt(sizes: Sizes, n: int) -> float:
    state = Conversation(Sizes(prompt=n, turns=max(1, sizes.turns * n // sizes.prompt)))
    return repeat(lambda: state.books.match(state.chain, state.chain.pages), sizes.repeats).median


def _filled(sizes: Sizes, entries: int) -> Books:
    return with_tails(entries * sizes.page_size // sizes.new, sizes, spare=64)


def _match_by_entries(sizes: Sizes, n: int) -> float:
    books, rng = _filled(sizes, n), np.random.default_rng(41)
    chain = books.namer.chain(tokens(rng, 32 * sizes.page_size))
    store(books, chain, np.zeros(0, np.int32))
    return repeat(lambda: books.match(chain, chain.pages), sizes.repeats).median


def _store_by_entries(sizes: Sizes, n: int) -> float:
    books, rng = _filled(sizes, n), np.random.default_rng(42)
    chain = books.namer.chain(tokens(rng, sizes.new))
    books.promise(chain.pages)
    pages = books.take(chain.pages)
    return measure(lambda _: books.store(chain, pages, 0), lambda: None, sizes.repeats,
                   after=lambda: books.index.drop(int(pages[0]))).median


def _evict_by_tails(sizes: Sizes, n: int) -> float:
    books = with_tails(n, sizes)
    return measure(books.index.evict, lambda: 1, n).median


def _interior_by_pool(sizes: Sizes, n: int) -> float:
    """A cold page under which another owner's page hangs: it computed the first one a second time."""
    books = Books(PagePool(n), Namer(FINGERPRINT, sizes.page_size))
    rng = np.random.default_rng(43)
    chain = books.namer.chain(tokens(rng, 2 * sizes.page_size))
    _warm(books, sizes, n // 2)

    def cold_above_live() -> Pages:
        books.promise(3)
        first, again = books.take(1), books.take(2)
        books.store(chain.branch(sizes.page_size), first, 0)
        books.store(chain, again, 0)
        books.release(first, 0)
        kept.append(again)
        return first

    kept: list[Pages] = []
    return measure(lambda _: books.index.evict_interior(), cold_above_live, sizes.repeats,
                   after=lambda: books.release(kept.pop(), 0)).median


def _warm(books: Books, sizes: Sizes, pages: int) -> None:
    """Other pages that are live, so that none of them is a candidate."""
    rng = np.random.default_rng(47)
    for _ in range(pages * sizes.page_size // sizes.new):
        chain = books.namer.chain(tokens(rng, sizes.new))
        books.promise(chain.pages)
        books.store(chain, books.take(chain.pages), 0)


def _step_by_waiting(sizes: Sizes, n: int) -> float:
    cache, rng = new_cache(64, sizes.page_size), np.random.default_rng(44)
    large = cache.chain(tokens(rng, 60 * sizes.page_size))
    waiting = tuple(Request(id=f"w{i}", chain=large, output_limit=sizes.page_size) for i in range(n + 1))
    cache.step(Message(requests=waiting))  # the first runs, the others wait for its pages
    return repeat(cache.step, sizes.repeats).median


def _request_by_pool(sizes: Sizes, n: int) -> float:
    cache, rng = new_cache(n, sizes.page_size), np.random.default_rng(45)
    chain = cache.chain(tokens(rng, 8 * sizes.page_size))
    ids = iter(range(10**9))

    def one(request: Request) -> None:
        (sequence,) = cache.step(Message(requests=(request,))).ready
        sequence.open(sequence.prompt_tokens - sequence.committed)
        sequence.commit(sequence.prompt_tokens - sequence.committed)
        sequence.finish()

    return measure(one, lambda: Request(id=str(next(ids)), chain=chain, output_limit=1), sizes.repeats).median


def _reset_by_entries(sizes: Sizes, n: int) -> float:
    return measure(lambda books: books.next_epoch(None), lambda: _filled(sizes, n), 5, warm=1).median
