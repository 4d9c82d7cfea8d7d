"""Beam search: the answers and scores of transformers, ties, few candidates, and no more pages than were promised."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distkv.engine import gate
from distkv.engine.beam import Beams, BeamSearch, Hypothesis
from distkv.engine.engine import Engine
from distkv.engine.model import Model, load_model
from distkv.engine.page_check import check_cache
from distkv.engine.record import Recording
from distkv.engine.requests import Prompt
from distkv.errors import PromptError, RequestTooLarge
from tests.engine import tiny

Folders = Callable[[str, int], Path]
STOPS = frozenset(range(2, tiny.VOCAB, 17))
"""So many tokens that searches end before the limit."""
LIMIT = 12
PAD = tiny.VOCAB - 1


@pytest.fixture(scope="module")
def model(folders: Folders) -> Model:
    made = load_model(tiny.config(folders("llama", 4)).model)
    made.stop_ids = STOPS
    return made


def engine_of(model: Model, folder: Path, *, pages: int = 64, asynchronous: bool = False, **engine: Any) -> Engine:
    config = tiny.config(folder, pages=pages, **engine)
    made = Engine(replace(config, cache=replace(config.cache, asynchronous=asynchronous)), model)
    made.recording = Recording(made.pool)
    return made


# ---- the search alone


def searched(how: Beams, stops: set[int], limit: int, rows: Callable[[tuple[int, ...]], np.ndarray]) -> BeamSearch:
    """A whole search; ``rows`` gives the logits behind an answer."""
    search, live = BeamSearch(how, stops, limit), [()]
    while live:
        assert len(live) <= how.width
        assert len(set(live)) == len(live)
        live = [(*live[parent], token) for parent, token in search.step([rows(beam) for beam in live])]
    return search


def log_softmax(row: np.ndarray) -> list[float]:
    total = math.log(math.fsum(math.exp(x) for x in row.tolist()))
    return [x - total for x in row.tolist()]


cases = st.tuples(
    st.integers(2, 4), st.integers(1, 4), st.floats(-1, 2), st.sets(st.integers(0, 3), max_size=2), st.integers(0, 999),
    st.booleans(),
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(cases)
def test_beams_enough_for_all_answers_find_the_best_ones(case: tuple[int, int, float, set[int], int, bool]) -> None:
    """Wider than there are beginnings, and never ended early, the search is one of all answers."""
    vocab, limit, penalty, stops, seed, masked = case
    stops = {token for token in stops if token < vocab}

    def rows(beam: tuple[int, ...]) -> np.ndarray:
        row = np.random.default_rng([seed, *beam]).standard_normal(vocab).astype(np.float32)
        if masked:
            row[len(beam) % vocab] = -np.inf
        return row

    width = vocab**limit + 1
    how = Beams(width=width, length_penalty=penalty, early_stopping="never")
    wanted = []
    for length in range(1, limit + 1):
        for answer in itertools.product(range(vocab), repeat=length):
            if stops & set(answer[:-1]) or (length < limit and answer[-1] not in stops):
                continue
            score = math.fsum(log_softmax(rows(answer[:i]))[token] for i, token in enumerate(answer))
            if score > -math.inf:
                wanted.append(Hypothesis(score / length**penalty, answer, answer[-1] in stops))
    wanted.sort(key=lambda each: -each.score)
    found = searched(how, stops, limit, rows).best(len(wanted) + 1)
    assert len(found) == len(wanted)
    assert np.allclose([each.score for each in found], [each.score for each in wanted])
    assert {(each.tokens, each.stopped) for each in found} == {(each.tokens, each.stopped) for each in wanted}


def test_ties_go_to_the_lower_token_and_then_to_the_better_beam() -> None:
    search = BeamSearch(Beams(width=3), {7}, 9)
    flat = np.zeros(8, np.float32)
    assert search.step([flat]) == [(0, 0), (0, 1), (0, 2)]
    assert search.step([flat, flat, flat]) == [(0, 0), (1, 0), (2, 0)]
    peaks = [np.where(np.arange(8) == token, 3, 0).astype(np.float32) for token in (5, 4, 4)]
    assert search.step(peaks) == [(1, 4), (2, 4), (0, 5)]
    assert (search.finished, search.gave) == ([], frozenset())


def test_rows_of_fewer_candidates_than_beams() -> None:
    """One beam, then two, then as many as there are."""
    def rows(*open_: int) -> np.ndarray:
        return np.where(np.isin(np.arange(8), open_), 0, -np.inf).astype(np.float32)

    search = BeamSearch(Beams(width=3), {7}, 4)
    assert search.step([rows(2)]) == [(0, 2)]
    assert search.step([rows(1, 7)]) == [(0, 1)]
    assert search.step([rows(0, 1, 2, 3)]) == [(0, 0), (0, 1), (0, 2)]
    assert search.step([rows(7), rows(7), rows(7)]) == []
    assert [(each.tokens, each.stopped) for each in search.best(3)] == [
        ((2, 7), True), ((2, 1, 0, 7), True), ((2, 1, 1, 7), True)
    ]  # fmt: skip
    assert search.gave == {0, 1}


# ---- the engine


@pytest.mark.parametrize(("length_penalty", "early_stopping"), [
    (1.0, False), (1.0, True), (0.0, False), (1.7, "never"), (-0.5, "never")
])  # fmt: skip
def test_answers_and_scores_are_those_of_transformers(
    model: Model, folders: Folders, length_penalty: float, early_stopping: Any
) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folders("llama", 4), dtype=torch.float32)
    engine = engine_of(model, folders("llama", 4))
    stopped, steps = 0, 0
    for i in range(4):
        tokens, width = tiny.tokens(1 + 13 * i, 1000 + i), 2 + i % 4
        prompt = Prompt(tokens=tokens, beams=width, n=width, length_penalty=length_penalty, output_limit=LIMIT,
                        early_stopping=early_stopping)  # fmt: skip
        ours = engine.generate([prompt])[0]
        wanted = theirs.generate(
            torch.from_numpy(tokens.astype(np.int64))[None], attention_mask=torch.ones(1, len(tokens)),
            num_beams=width, num_return_sequences=width, do_sample=False, max_new_tokens=LIMIT, pad_token_id=PAD,
            length_penalty=length_penalty, early_stopping=early_stopping, eos_token_id=sorted(STOPS),
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        assert [choice.score for choice in ours.choices] == pytest.approx(wanted.sequences_scores.tolist(), abs=1e-4)
        for choice, row in zip(ours.choices, wanted.sequences[:, len(tokens) :].tolist(), strict=True):
            assert list(choice.token_ids) == row[: len(choice.token_ids)]
            assert set(row[len(choice.token_ids) :]) <= {PAD}
            assert (choice.finish_reason == "stop") == (choice.token_ids[-1] in STOPS)
            stopped += choice.finish_reason == "stop"
        assert (ours.token_ids, ours.finish_reason) == (ours.choices[0].token_ids, ours.choices[0].finish_reason)
        steps += ours.steps
    assert stopped > 0
    assert steps < 4 * (LIMIT + 3) or early_stopping == "never"
    assert (engine.cache.stats().pages_live, engine.cache.stats().pages_reserved) == (0, 0)
    engine.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_beams_have_place_where_their_pages_were_promised(model: Model, folders: Folders, asynchronous: bool) -> None:
    """In the smallest pool, beside a request that wants what they let go of; one page less is refused."""
    prompt = Prompt(tokens=tiny.tokens(25, 7), beams=4, n=3, output_limit=30, id="beams", early_stopping="never")
    model.stop_ids = frozenset()
    try:
        roomy = engine_of(model, folders("llama", 4))
        wanted = roomy.generate([prompt])[0]
        roomy.close()
        pages = 1 + 4 * 3  # 55 tokens are 4 pages, of which the first is shared
        engine = engine_of(model, folders("llama", 4), pages=pages, asynchronous=asynchronous)
        greedy = [Prompt(tokens=tiny.tokens(20, i), output_limit=20) for i in range(4)]
        first, *others = engine.generate([prompt, *greedy])
        assert [choice.token_ids for choice in first.choices] == [choice.token_ids for choice in wanted.choices]
        assert len(first.choices) == 3
        assert [done.finish_reason for done in others] == ["length"] * 4
        assert first.suspended == 0
        assert engine.cache.stats().forked > 6
        engine.step()
        assert (engine.cache.stats().pages_live, engine.cache.stats().pages_reserved) == (0, 0)
        assert engine.recording is not None
        report = gate.check(model, engine.recording, continued=True)
        assert report.differences == ()
        assert check_cache(model, engine.cache, engine.pool, recording=engine.recording).differences == ()
        engine.close()
        small = engine_of(model, folders("llama", 4), pages=pages - 1)
        refused = small.generate([prompt])[0]
        assert isinstance(refused.error, RequestTooLarge)
        assert (refused.error.pages_needed, refused.error.pages_possible, refused.choices) == (13, 12, ())
        assert "in 4 sequences" in str(refused.error)
        small.close()
    finally:
        model.stop_ids = STOPS


def test_a_search_that_is_suspended_begins_again(model: Model, folders: Folders) -> None:
    """By hand, before its beams are there and when they are; and one that is aborted has the best so far."""
    engine = engine_of(model, folders("llama", 4))
    prompt = Prompt(tokens=tiny.tokens(40, 7), beams=3, n=2, output_limit=LIMIT, early_stopping="never")
    wanted = engine.generate([prompt])[0].choices
    for at in (2, 4, 7):
        name, done = engine.submit(prompt), []
        for _ in range(at):
            done += engine.step()
        assert engine.suspend(name)
        while engine.busy:
            done += engine.step()
        assert [(done[0].suspended, done[0].choices)] == [(1, wanted)]
    name = engine.submit(prompt)
    for _ in range(7):
        engine.step()
    engine.abort(name)
    (aborted,) = engine.step()
    assert aborted.finish_reason == "aborted"
    assert [choice.finish_reason for choice in aborted.choices] == ["aborted"] * 2
    assert all(0 < len(choice.token_ids) < LIMIT for choice in aborted.choices)
    engine.step()
    assert (engine.cache.stats().pages_live, engine.cache.stats().pages_reserved) == (0, 0)
    engine.close()


def test_a_conversation_goes_on_from_the_best_answer(model: Model, folders: Folders) -> None:
    engine = engine_of(model, folders("llama", 4))
    model.stop_ids = frozenset()
    try:
        for how in ({"beams": 3, "n": 3}, {"n": 3, "temperature": 0.9, "seed": 3}):
            prompt = Prompt(tokens=tiny.tokens(40, 9), conversation=str(how), output_limit=26, **how)
            done = engine.generate([prompt])[0]
            turn = np.concatenate([prompt.tokens, np.array(done.token_ids, np.int32), tiny.tokens(5, 2)])
            named = engine._work.chains.kept[str(how), None, None].tokens
            assert len(named) >= 65, "the KV of a sample's last token was not computed"
            assert named.tolist() == turn[: len(named)].tolist()
            assert engine.generate([replace(prompt, tokens=turn, n=1, beams=1)])[0].cached_tokens == 64
    finally:
        model.stop_ids = STOPS
        engine.close()


@pytest.mark.parametrize(("fields", "why"), [
    ({"beams": 0}, "beams must be 1 to 1024, not 0"), ({"n": 0}, "n must be 1 to 1024, not 0"),
    ({"n": 1025}, "n must be 1 to 1024"), ({"n": True}, "n must be a whole number"),
    ({"beams": 3, "n": 4}, "n must be at most beams, which is 3, not 4"),
    ({"beams": 2, "temperature": 0.5}, "temperature must be 0, not 0.5"),
    ({"beams": 2, "on_token": print}, "on_token must be None with beam search"),
    ({"length_penalty": math.inf}, "length_penalty must be a number from -10 to 10"),
    ({"early_stopping": "always"}, "early_stopping must be True, False or 'never', not 'always'"),
])  # fmt: skip
def test_wrong_fields_are_named(model: Model, folders: Folders, fields: dict[str, Any], why: str) -> None:
    engine = engine_of(model, folders("llama", 4))
    with pytest.raises(PromptError, match=why):
        engine.submit(Prompt(tokens=[1, 2], **fields))
    engine.close()
