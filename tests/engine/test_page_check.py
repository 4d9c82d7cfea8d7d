"""Cached pages computed again: clean ones pass, and one wrong bit, a swap or a foreign page is found and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from distkv.engine.compare import PageDifference
from distkv.engine.engine import Engine
from distkv.engine.page_check import CacheCheck, check_cache, check_pages
from distkv.engine.requests import Prompt
from distkv.errors import GateFailed
from tests.engine import tiny

PROMPT = tiny.tokens(70, 1)
OTHER = tiny.tokens(40, 2)
BRANCH = np.concatenate([PROMPT[:40], tiny.tokens(30, 3)])


def filled(folder: Path, *, batch_invariant: bool) -> Engine:
    """Three prefixes, two of which share two pages, and one that is cached twice, under two salts."""
    engine = tiny.engine(tiny.config(folder, batch_invariant=batch_invariant))
    engine.generate([Prompt(tokens=PROMPT), Prompt(tokens=OTHER)])
    engine.generate([Prompt(tokens=BRANCH)])
    engine.generate([Prompt(tokens=OTHER, salt="another")])
    return engine


@pytest.fixture(scope="module", params=[True, False], ids=["invariant", "as recorded"])
def engine(folders: Callable[[str, int], Path], request: pytest.FixtureRequest) -> Engine:
    return filled(folders("llama", 4), batch_invariant=request.param)


@pytest.fixture(autouse=True)
def undamaged(engine: Engine) -> Iterator[None]:
    before = engine.pool.data.clone()
    yield
    engine.pool.data.copy_(before)


def pages_of(engine: Engine, prompt: np.ndarray, salt: str | None = None) -> list[int]:
    """The cached pages of a prompt."""
    n = len(prompt) // tiny.PAGE
    for prefix in engine.cache.cached_prefixes():
        if prefix.salt == salt and np.array_equal(prefix.tokens[: n * tiny.PAGE], prompt[: n * tiny.PAGE]):
            return [int(page) for page in prefix.pages[:n]]
    raise AssertionError("the prompt is not cached")


def checked(engine: Engine) -> CacheCheck:
    return check_cache(engine.model, engine.cache, engine.pool, recording=engine.recording)


def flip_a_bit(engine: Engine, layer: int, plane: int, page: int, offset: int) -> None:
    engine.pool.data[layer, plane, page, offset, 1].view(torch.int32)[3] ^= 1


def test_every_cached_page_has_the_bytes_of_its_tokens(engine: Engine) -> None:
    found = checked(engine)
    assert found == CacheCheck(4 + 2 + 2 + 2, ()), "the branch shares two of its four"
    assert found.pages == engine.cache.stats().entries


def test_one_bit_is_found_and_named(engine: Engine) -> None:
    pages = pages_of(engine, PROMPT)
    flip_a_bit(engine, 1, 0, pages[2], 5)
    expected = PageDifference(page=2, pool_page=pages[2], layer=1, plane=0, token=37, offset=5, tokens=1)
    assert check_pages(engine.model, engine.pool, PROMPT, pages, recording=engine.recording) == [expected]
    (found,) = checked(engine).differences
    assert found.difference == expected
    assert np.array_equal(found.tokens, PROMPT[:48])
    assert found.difference.text() == f"page 2, layer 1, keys differ: pool page {pages[2]}, token 37 (5 of the page)"


def test_pages_before_the_first_are_not_compared(engine: Engine) -> None:
    pages = pages_of(engine, PROMPT)
    flip_a_bit(engine, 0, 1, pages[1], 0)

    def found(first: int) -> list[PageDifference]:
        return check_pages(engine.model, engine.pool, PROMPT, pages, first=first, recording=engine.recording)

    assert [d.page for d in found(1)] == [1]
    assert found(2) == []


def test_two_swapped_pages_are_found_and_named(engine: Engine) -> None:
    a, b = pages_of(engine, PROMPT)[1:3]
    engine.pool.data[:, :, [a, b]] = engine.pool.data[:, :, [b, a]]
    found = {(d.page, d.pool_page, d.layer, d.plane) for d, _ in checked(engine).differences}
    assert found == {(n, page, layer, plane) for n, page in ((1, a), (2, b)) for layer in (0, 1) for plane in (0, 1)}


def test_a_page_of_another_prefix_is_found_and_named(engine: Engine) -> None:
    page, foreign = pages_of(engine, PROMPT)[3], pages_of(engine, BRANCH)[3]
    engine.pool.data[:, :, page] = engine.pool.data[:, :, foreign]
    found = [d for d, _ in checked(engine).differences]
    assert {(d.page, d.pool_page) for d in found} == {(3, page)}
    assert (found[0].layer, found[0].token) == (0, 48)


def test_equal_tokens_under_another_salt_are_pages_of_their_own(engine: Engine) -> None:
    page = pages_of(engine, OTHER, "another")[1]
    assert page not in pages_of(engine, OTHER)
    flip_a_bit(engine, 0, 0, page, 15)
    assert [(d.page, d.pool_page, d.token) for d, _ in checked(engine).differences] == [(1, page, 31)]


def test_where_the_schedule_counts_a_recording_is_needed(engine: Engine) -> None:
    if engine.config.engine.batch_invariant:
        assert check_pages(engine.model, engine.pool, PROMPT, pages_of(engine, PROMPT)) == []
        return
    with pytest.raises(GateFailed, match=r"engine\.batch_invariant, or give the recording"):
        check_pages(engine.model, engine.pool, PROMPT, pages_of(engine, PROMPT))
