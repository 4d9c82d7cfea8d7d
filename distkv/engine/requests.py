"""What goes into the engine and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from distkv.errors import DistKVError, PromptError
from distkv.keys import Adapter

__all__ = ["Completion", "FinishReason", "Prompt", "check_prompt"]

FinishReason = Literal["stop", "length", "aborted", "refused"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request to the engine."""

    tokens: Sequence[int] | np.ndarray
    """Token ids, at least one."""
    output_limit: int | None = None
    """Tokens of the answer at most; None: ``engine.output_limit``."""
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
    on_token: Callable[[int], None] | None = None
    """Called on rank 0 with each token of the answer as soon as it is known."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The end of one request. ``token_ids`` has the stop token if there was one, ``text`` has not."""

    id: str
    token_ids: tuple[int, ...]
    text: str | None
    """None without a tokenizer."""
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float | None
    """Seconds from submit to the first token; None without a token, and on other ranks than rank 0."""
    steps: int
    """Engine steps in which it was computed."""
    finish_reason: FinishReason
    error: DistKVError | None = None
    """Why it was refused."""


def check_prompt(
    request_id: str, tokens: Sequence[int] | np.ndarray, limit: int, vocab: int, context: int
) -> np.ndarray:
    """The prompt as int32 ``[n]``. Raises ``PromptError``: empty, ids outside the vocabulary, beyond the context."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not len(ids):
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
    if limit < 1:
        raise PromptError(request_id, f"output_limit must be at least 1, got {limit}")
    if len(ids) + limit > context:
        raise PromptError(
            request_id,
            f"{len(ids)} prompt tokens and an output limit of {limit} are {len(ids) + limit - context} more than the "
            f"model's context of {context}; shorten the prompt or lower output_limit",
        )
    return ids.astype(np.int32)
