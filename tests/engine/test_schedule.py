"""Pieces of prompts lie on an absolute grid, whoever else runs; a replay runs what it was given or says why not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distkv.config import CacheConfig
from distkv.engine.config import EngineConfig, ServeConfig
from distkv.engine.schedule import Chunk, Grid, Replay, Runnable
from distkv.errors import ConfigError, DistKVError

requests = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 300), st.booleans()).map(
        lambda t: (t[0], t[0] + (1 if t[2] else t[1]), t[2])
    ),
    max_size=12,
)


@given(requests, st.sampled_from([1, 16, 128]), st.integers(1, 512))
def test_pieces_depend_on_the_request_alone(given: list[tuple[int, int, bool]], chunk: int, batch: int) -> None:
    running = [Runnable(str(i), *fields) for i, fields in enumerate(given)]
    plan = Grid(chunk_tokens=chunk, batch_tokens=batch).plan(running)
    assert bool(plan) == bool(running)
    assert len({c.request_id for c in plan}) == len(plan)
    at = {r.request_id: r for r in running}
    for piece in plan:
        request = at[piece.request_id]
        end = piece.start + piece.n
        assert piece.start == request.committed
        assert end == request.known or end % chunk == 0
        assert piece.start // chunk == (end - 1) // chunk
    answers = {r.request_id for r in running if r.generating}
    assert answers <= {c.request_id for c in plan}, "an answer in progress never waits for a prompt"
    if len(plan) > max(1, len(answers)):
        assert sum(c.n for c in plan) <= max(batch, len(answers))


def test_prompts_go_in_order_of_admission() -> None:
    running = [Runnable("a", 0, 100, False), Runnable("b", 0, 100, False), Runnable("c", 0, 2, False)]
    plan = Grid(chunk_tokens=64, batch_tokens=100).plan(running)
    assert plan == [Chunk("a", 0, 64)], "c would fit, but it does not overtake b"


def test_a_replay_waits_for_its_requests_and_refuses_what_is_not_its_schedule() -> None:
    replay = Replay([[Chunk("a", 0, 16), Chunk("b", 0, 8)], [Chunk("a", 16, 16)]])
    a, b = Runnable("a", 0, 40, False), Runnable("b", 0, 8, False)
    assert replay.plan([]) == []
    assert replay.plan([a]) == []
    assert replay.plan([a, b]) == [Chunk("a", 0, 16), Chunk("b", 0, 8)]
    with pytest.raises(DistKVError, match="wants tokens 16 to 32 of 'a', which has 0 computed"):
        replay.plan([a])
    assert replay.plan([Runnable("a", 16, 40, False)]) == [Chunk("a", 16, 16)]
    with pytest.raises(DistKVError, match="used up"):
        replay.plan([Runnable("a", 32, 40, False)])


@pytest.mark.parametrize(
    ("page", "chunk", "batch", "least"), [(128, None, 64, "cache.page_size"), (128, 32, 31, "engine.chunk_tokens")]
)
def test_a_batch_holds_at_least_one_piece(page: int, chunk: int | None, batch: int, least: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.batch_tokens: must be at least {least}.*got {batch}"):
        ServeConfig(
            cache=CacheConfig(page_size=page), engine=EngineConfig(chunk_tokens=chunk, batch_tokens=batch)
        )
    ServeConfig(cache=CacheConfig(page_size=page), engine=EngineConfig(chunk_tokens=chunk, batch_tokens=128))
