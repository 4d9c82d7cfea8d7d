"""Sampling: the right distribution, the same token for the same seed and position whatever else happens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distkv.engine.requests import Prompt
from distkv.engine.sampling import Sampling, _nucleus, choose, draw, largest, uniform
from distkv.errors import ModelError, PromptError
from tests.engine import tiny

DRAWS = 3000
LOGITS = (np.random.default_rng(5).standard_normal(40) * 2).astype(np.float32)


def expected(temperature: float, top_k: int | None, top_p: float) -> dict[int, float]:
    """The distribution by its definition, in plain Python."""
    order = sorted(range(len(LOGITS)), key=lambda i: (-LOGITS[i], i))[:top_k]
    weights = {i: math.exp((float(LOGITS[i]) - float(LOGITS.max())) / temperature) for i in order}
    total, kept = math.fsum(weights.values()), dict[int, float]()
    for i in order:
        if math.fsum(kept.values()) >= top_p * total:
            break
        kept[i] = weights[i]
    return {i: w / math.fsum(kept.values()) for i, w in kept.items()}


def chi_square(drawn: list[int], share: dict[int, float]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; tokens expected less than 5 times are taken together."""
    counts, cells, rest = Counter(drawn), list[tuple[float, float]](), [0.0, 0.0]
    for token, p in share.items():
        seen, due = counts.pop(token, 0), p * len(drawn)
        if due >= 5:
            cells.append((seen, due))
        else:
            rest = [rest[0] + seen, rest[1] + due]
    assert not counts, "tokens that were cut off"
    if rest[1]:
        cells.append((rest[0], rest[1]))
    return sum((seen - due) ** 2 / due for seen, due in cells), len(cells) - 1


@pytest.mark.parametrize("by", ["position", "seed"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, None, 1.0), (0.6, None, 0.9), (1.7, 7, 1.0), (1.3, 12, 0.8)]
)
def test_tokens_have_the_distribution_that_was_asked_for(
    temperature: float, top_k: int | None, top_p: float, by: str
) -> None:
    how: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    drawn = [
        draw(LOGITS, Sampling(**how, seed=i if by == "seed" else 11), i if by == "position" else 11)
        for i in range(DRAWS)
    ]  # fmt: skip
    value, freedom = chi_square(drawn, expected(temperature, top_k, top_p))
    assert value < freedom + 4 * math.sqrt(2 * freedom)
    assert len(set(drawn)) > freedom / 2
    if top_p == 1.0:  # the statistic tells another temperature
        value, freedom = chi_square(drawn, expected(temperature * 1.3, top_k, top_p))
        assert value > freedom + 4 * math.sqrt(2 * freedom)


def test_random_numbers_are_even_and_of_53_bits() -> None:
    numbers = np.array([uniform(seed, at) for seed in (0, 1, 2**64 - 1) for at in range(3000)])
    assert 0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    assert len(set(numbers)) == len(numbers)
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    assert ((counts - len(numbers) / 64) ** 2).sum() / (len(numbers) / 64) < 63 + 4 * math.sqrt(2 * 63)
    for step in (1, 2, 64):  # no relation between neighbours
        assert abs(np.corrcoef(numbers[:-step], numbers[step:])[0, 1]) < 0.04
    assert all(n * 2**53 == int(n * 2**53) for n in numbers)
    # for good: a seed that was written down gives its tokens later, too
    assert [uniform(7, 1234), uniform(2**64 - 1, 0)] == [0.4372189420838897, 0.23494158814525556]


weights_and_share = st.tuples(
    st.lists(st.integers(0, 6), min_size=1, max_size=30).filter(any), st.integers(1, 64)
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(weights_and_share, st.integers(1, 30))
def test_what_is_kept_is_the_fewest_likely_tokens_lowest_ids_first(case: tuple[list[int], int], k: int) -> None:
    weights, share = case  # whole numbers and a share of so many 64ths: exact
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    kept: list[int] = []
    while sum(weights[i] for i in kept) * 64 < share * sum(weights):
        kept.append(order[len(kept)])
    assert _nucleus(np.array(weights, float), share / 64).tolist() == kept
    k = min(k, len(weights))
    assert largest(np.array(weights, float), k).tolist() == order[:k]


def test_extreme_temperatures_shares_and_logits_are_exact() -> None:
    top = int(LOGITS.argmax())
    for sampling in (
        Sampling(temperature=5e-324), Sampling(temperature=1e-9), Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1e300, top_p=5e-324, top_k=1),
    ):  # fmt: skip
        assert {draw(LOGITS, sampling, at) for at in range(50)} == {top}
    flat = [draw(LOGITS, Sampling(temperature=1e308), at) for at in range(2000)]
    assert set(flat) == set(range(len(LOGITS)))
    masked = np.where(np.arange(40) % 2, LOGITS, -np.inf).astype(np.float32)
    assert {draw(masked, Sampling(temperature=3.0, top_k=39), at) % 2 for at in range(300)} == {1}


def test_a_row_is_chosen_by_itself_in_any_batch() -> None:
    rows = torch.from_numpy(np.random.default_rng(1).standard_normal((24, 300)).astype(np.float32))
    rows[3, 250] = rows[3, 17] = 9.0
    asked: list[tuple[Sampling | None, int]] = [
        (None if i % 3 == 0 else Sampling(temperature=0.5 + i, top_p=0.95, seed=i), 5 * i) for i in range(24)
    ]
    together = choose(rows, asked)
    assert together[3] == 17
    for order in (range(23, -1, -1), range(5, 9)):
        some = list(order)
        assert choose(rows[some], [asked[i] for i in some]) == [together[i] for i in some]
    assert choose(rows[:0], []) == []
    assert choose(rows.to(torch.bfloat16)[:1], asked[:1]) == [int(rows[0].to(torch.bfloat16).float().numpy().argmax())]
    rows[5, 7] = float("nan")
    with pytest.raises(ModelError, match="not numbers"):
        choose(rows, asked)


HOT: dict[str, Any] = {"temperature": 1.5, "top_p": 0.95, "output_limit": 20}


def test_an_engine_repeats_by_seed_and_differs_without(folders: Callable[[str, int], Path]) -> None:
    """Alone, cold and warm in the same schedule; among others the logits need the batch-invariant mode."""
    made = tiny.engine(tiny.config(folders("llama", 4)))
    prompt = tiny.tokens(40, 1)

    def answer(seed: int | None, **fields: Any) -> tuple[int, ...]:
        return made.generate([Prompt(tokens=prompt, seed=seed, **{**HOT, **fields})])[0].token_ids

    cold, warm = answer(3), answer(3)
    assert cold == warm
    assert answer(3, read=False) == cold
    assert len({cold, answer(4), answer(None), answer(None), answer(4, temperature=0.0)}) == 5
    assert answer(9, temperature=0.0) == answer(None, temperature=0.0)
    assert made.generate([Prompt(tokens=prompt, **HOT)])[0].cached_tokens == 2 * tiny.PAGE, "not in the keys"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *[("temperature", v, "must be a number 0 or above") for v in (-0.1, math.nan, math.inf, True, "1", 10**400)],
        *[("top_p", v, "must be a number above 0 and at most 1") for v in (0, -0.5, 1.01, math.nan, None, False)],
        *[("top_k", v, "must be at least 1, not") for v in (0, -1)],
        *[("top_k", v, "must be a whole number") for v in (1.0, True, "3")],
        *[("seed", v, "must be 0 to 18446744073709551615, not") for v in (-1, 2**64)],
        *[("seed", v, "must be a whole number") for v in (0.5, False)],
        ("temperature", torch.tensor(1.0), "must be a number"),
        ("temperature", np.bool_(True), "must be a number"),
    ],
)
def test_a_field_that_cannot_be_sampled_with_is_named(field: str, value: Any, words: str) -> None:
    from distkv.engine.requests import checked_fields

    with pytest.raises(PromptError, match=rf"request 'a': {field} {words}"):
        checked_fields(Prompt(tokens=[1], id="a", **{field: value}))


def test_numbers_of_numpy_become_plain() -> None:
    from distkv.engine.intake import new_request
    from distkv.engine.requests import checked_fields

    given: dict[str, Any] = {"temperature": np.float32(0.5), "top_p": 1, "top_k": np.int64(4), "seed": np.uint64(2**63)}
    new = new_request(checked_fields(Prompt(tokens=[1], **given)), "a", np.array([1], np.int32), 1, cache=True)
    assert new.sampling == Sampling(temperature=0.5, top_p=1.0, top_k=4, seed=2**63)
    assert {type(getattr(new.sampling, f)) for f in given} == {float, int}
