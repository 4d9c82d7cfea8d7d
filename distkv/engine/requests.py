"""What goes into the engine and what comes out."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from distkv.errors import DistKVError, PromptError
from distkv.keys import Adapter

__all__ = ["Choice", "Completion", "FinishReason", "Prompt", "check_prompt", "checked_fields"]

FinishReason = Literal["stop", "length", "aborted", "refused"]

_MOST = 1024
"""Answers of one request."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request to the engine."""

    tokens: Sequence[int] | np.ndarray
    """Token ids, at least one."""
    output_limit: int | None = None
    """Tokens of the answer at most; None: ``engine.output_limit``. 0: the prompt is computed, to have it cached."""
    id: str | None = None
    """Must be unique among requests that are waiting or running; None: the engine makes one."""
    salt: str | None = None
    """Only requests with the same salt share pages."""
    adapter: Adapter | None = None
    """Only requests with the same adapter share pages."""
    conversation: str | None = None
    """Turns of one conversation share their names, so that a turn hashes its new tokens alone."""
    read: bool = True
    write: bool = True
    priority: int = 0
    temperature: float = 0.0
    """0: the most likely token each time. Above: tokens are drawn, from logits divided by it."""
    top_k: int | None = None
    """Only the so many most likely tokens are drawn; None: all."""
    top_p: float = 1.0
    """In (0, 1]: only the fewest most likely tokens (of ``top_k``) whose share of the probability is at least this."""
    seed: int | None = None
    """0 to 2**64 - 1. Equal seeds give equal tokens for equal prompts wherever the logits have equal bits; None: rank
    0 takes one at random. Neither it nor the three before change what is shared in the cache."""
    n: int = 1
    """Answers wanted, 1 to 1024. Without ``beams`` they are samples: the prompt is computed once, and forked into
    ``n``. Sample ``i`` has the tokens of a request of its own with the seed ``(seed + i) % 2**64``; with temperature 0
    all are equal. With ``beams`` the ``n`` best."""
    beams: int = 1
    """Above 1, to 1024: beam search, which keeps so many of the likeliest beginnings of an answer. Without sampling."""
    length_penalty: float = 1.0
    """Of beam search, -10 to 10: an answer's score is the sum of its tokens' log probabilities, divided by its length
    to the power of this. Above 0 it favours long answers."""
    early_stopping: bool | Literal["never"] = False
    """Of beam search. True: it ends with ``beams`` whole answers. False: when the best beam's score as it is now is no
    better than the worst of so many. "never": when no beam can become better than that."""
    on_token: Callable[[int], None] | None = None
    """Called on rank 0 with each token of the answer, after the batch that gave it: the request may have ended by then.
    An exception of it is logged, and it is not called again; the request itself goes on. Of several samples it hears
    the first alone; with beam search, whose tokens are known at its end, there cannot be one."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer to a request. ``token_ids`` has the stop token if there was one, ``text`` has not."""

    index: int
    token_ids: tuple[int, ...]
    text: str | None
    """None without a tokenizer."""
    finish_reason: FinishReason
    score: float | None = None
    """Of beam search, see ``Prompt.length_penalty``; natural logarithms."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The end of one request. ``token_ids``, ``text`` and ``finish_reason`` are those of its first choice, unless it
    was aborted or refused. ``token_ids`` has the stop token if there was one, ``text`` has not."""

    id: str
    token_ids: tuple[int, ...]
    text: str | None
    """None without a tokenizer."""
    prompt_tokens: int
    cached_tokens: int
    """Those of the prompt that were in the cache, on the device or the host; the others were computed."""
    ttft_s: float | None
    """Seconds from submit to the first token; None without a token, and on other ranks than rank 0."""
    steps: int
    """Engine steps in which it was computed; of several answers the most."""
    finish_reason: FinishReason
    error: DistKVError | None = None
    """Why it was refused."""
    host_tokens: int = 0
    """Those of the cached tokens that were read in from the host, on this rank or another."""
    suspended: int = 0
    """How many times it was suspended to make room for others, all samples together. What it had to compute again is
    not counted here."""
    choices: tuple[Choice, ...] = ()
    """All ``Prompt.n`` answers, by sample or the best first. Beam search may find fewer, in a tiny vocabulary. One that
    was aborted has what there was. None of a refused request."""

    @property
    def device_tokens(self) -> int:
        """Those of the cached tokens that every rank had on the device."""
        return self.cached_tokens - self.host_tokens

    @property
    def computed_tokens(self) -> int:
        """Those of the prompt that were not in the cache."""
        return self.prompt_tokens - self.cached_tokens


def checked_fields(prompt: Prompt) -> Prompt:
    """The prompt with plain ints and bools in place of numpy's. Raises ``PromptError``, which names the wrong field.

    What is wrong must be found here, on rank 0: once a request is on its way to all ranks it is too late.
    """
    if not isinstance(prompt, Prompt):
        raise PromptError("?", f"a request is a Prompt, not a {type(prompt).__name__}")
    name = str(prompt.id) if prompt.id is not None else "(without id)"
    for field in ("id", "salt", "conversation"):
        value = getattr(prompt, field)
        if value is not None and not isinstance(value, str):
            raise PromptError(name, f"{field} must be a str or None, not {value!r}")
    adapter = prompt.adapter
    if adapter is not None:
        if not isinstance(adapter, Adapter) or not isinstance(adapter.name, str):
            raise PromptError(name, f"adapter must be an Adapter with a name, or None, not {adapter!r}")
        adapter = Adapter(str(adapter.name), _whole(name, "adapter.generation", adapter.generation))
    if prompt.on_token is not None and not callable(prompt.on_token):
        raise PromptError(name, f"on_token must be callable or None, not {prompt.on_token!r}")
    for field in ("read", "write"):
        if not isinstance(getattr(prompt, field), (bool, np.bool_)):
            raise PromptError(name, f"{field} must be True or False, not {getattr(prompt, field)!r}")
    if prompt.early_stopping != "never" and not isinstance(prompt.early_stopping, (bool, np.bool_)):
        raise PromptError(name, f"early_stopping must be True, False or 'never', not {prompt.early_stopping!r}")
    limit, top_k, seed = prompt.output_limit, prompt.top_k, prompt.seed
    checked = replace(
        prompt, adapter=adapter, read=bool(prompt.read), write=bool(prompt.write),
        output_limit=None if limit is None else _whole(name, "output_limit", limit),
        priority=_whole(name, "priority", prompt.priority),
        temperature=_number(name, "temperature", prompt.temperature, "0 or above", lambda x: x >= 0),
        top_p=_number(name, "top_p", prompt.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1),
        top_k=None if top_k is None else _whole(name, "top_k", top_k, 1, None),
        seed=None if seed is None else _whole(name, "seed", seed, 0, 2**64 - 1),
        n=_whole(name, "n", prompt.n, 1, _MOST), beams=_whole(name, "beams", prompt.beams, 1, _MOST),
        length_penalty=_number(name, "length_penalty", prompt.length_penalty, "from -10 to 10", lambda x: abs(x) <= 10),
        early_stopping="never" if prompt.early_stopping == "never" else bool(prompt.early_stopping),
    )  # fmt: skip
    if checked.beams > 1:
        _check_beams(name, checked)
    return checked


def _check_beams(request_id: str, prompt: Prompt) -> None:
    if prompt.temperature:
        raise PromptError(request_id, f"beams is {prompt.beams}, but beam search draws no tokens: temperature must be "
                                      f"0, not {prompt.temperature}")  # fmt: skip
    if prompt.n > prompt.beams:
        raise PromptError(request_id, f"n must be at most beams, which is {prompt.beams}, not {prompt.n}")
    if prompt.on_token is not None:
        raise PromptError(request_id, "on_token must be None with beam search: its tokens are known at its end")


def _whole(request_id: str, field: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise PromptError(request_id, f"{field} must be a whole number, not {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise PromptError(request_id, f"{field} must be a whole number, not {value!r}") from None
    if low is not None and (number < low or (high is not None and number > high)):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise PromptError(request_id, f"{field} must be {allowed}, not {number}")
    return number


def _number(request_id: str, field: str, value: Any, allowed: str, holds: Callable[[float], bool]) -> float:
    # numpy's numbers count as Real, its bools and a torch tensor do not
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        number = float(value) if real else math.nan
    except OverflowError:  # an int beyond all floats
        number = math.inf
    if not (math.isfinite(number) and holds(number)):
        raise PromptError(request_id, f"{field} must be a number {allowed}, not {value!r}")
    return number


def check_prompt(
    request_id: str, tokens: Sequence[int] | np.ndarray, limit: int, vocab: int, context: int
) -> np.ndarray:
    """The prompt as int32 ``[n]``. Raises ``PromptError``: empty, ids outside the vocabulary, beyond the context."""
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PromptError(request_id, f"its prompt must be a list of token ids: {error}") from error
    if ids.ndim != 1:
        what = f"an array of shape {list(ids.shape)}" if ids.ndim else repr(tokens)[:60]
        raise PromptError(request_id, f"its prompt must be a flat list of token ids, not {what}")
    if not len(ids):
        raise PromptError(request_id, "its prompt is empty; at least one token is needed")
    if ids.dtype.kind not in "iu":
        raise PromptError(request_id, f"its prompt must be token ids (whole numbers), not {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise PromptError(
            request_id,
            f"token id {wrong} is outside the model's vocabulary of {vocab}; was it made with another tokenizer?",
        )
    if limit < 0:
        raise PromptError(request_id, f"output_limit must be at least 0, got {limit}")
    if len(ids) + limit > context:
        raise PromptError(
            request_id,
            f"{len(ids)} prompt tokens and an output limit of {limit} are {len(ids) + limit - context} more than the "
            f"model's context of {context}; shorten the prompt or lower output_limit",
        )
    return ids.astype(np.int32)
