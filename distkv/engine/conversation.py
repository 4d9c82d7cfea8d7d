"""Conversations: from a file of chat messages, or the built-in one about a document, and their token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from distkv.errors import InputFileError, ModelError

__all__ = ["Conversation", "Message", "built_in", "chat_tokens", "read_conversations"]

Message = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``."""

_ROLES = ("system", "user", "assistant")
_FORM = 'a line is {"messages": [{"role": "user", "content": "..."}, ...]}'


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order. User messages are answered in order; an assistant message that follows one is its answer."""

    name: str
    messages: tuple[Message, ...]

    def turns(self) -> list[int]:
        """Indexes of the user messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    def added(self, number: int) -> list[Message]:
        """What the ``number``-th user message (from 0) adds to the history of those before: itself, and whatever lies
        between them and is no answer, which is the system message."""
        places = self.turns()
        first = places[number - 1] + 1 if number else 0
        return [m for m in self.messages[first : places[number] + 1] if m["role"] != "assistant"]

    def given_answer(self, turn: int) -> str | None:
        """The file's own answer to the user message at index ``turn``, or None if the model's is to be used."""
        after = self.messages[turn + 1] if turn + 1 < len(self.messages) else None
        return after["content"] if after is not None and after["role"] == "assistant" else None


def built_in() -> list[Conversation]:
    """One conversation of several turns about a document in the package: sections 1 to 6 of the Apache License 2.0."""
    document = (files("distkv.engine") / "data" / "document.txt").read_text(encoding="utf-8")
    questions = (files("distkv.engine") / "data" / "questions.txt").read_text(encoding="utf-8")
    system = f"You answer questions about the following document, briefly and in its own words.\n\n{document.strip()}"
    messages = [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": line.strip()} for line in questions.splitlines() if line.strip()]
    return [Conversation("license", tuple(messages))]


def read_conversations(path: str | Path) -> list[Conversation]:
    """Conversations of a JSON Lines file in the chat format of OpenAI's API, one a line.

    ``content`` is a text, or a list of ``{"type": "text", "text": ...}`` parts. Empty lines are skipped. Raises
    ``InputFileError`` with file, line and what to change.
    """
    source = str(path)
    if not source:
        raise InputFileError("''", 0, "is no name of a file of messages")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputFileError(source, 0, "there is no such file") from None
    except IsADirectoryError:
        raise InputFileError(source, 0, "is a folder, not a file of messages") from None
    except UnicodeDecodeError as error:
        raise InputFileError(source, 0, f"is not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputFileError(source, 0, f"cannot be read: {reason}") from None
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append(Conversation(f"line {number}", _messages(source, number, line)))
    if not found:
        raise InputFileError(source, 0, f"has no conversation; {_FORM}")
    return found


def _messages(source: str, number: int, line: str) -> tuple[Message, ...]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputFileError(source, number, f"not valid JSON ({error}); {_FORM}, on one line") from None
    given = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(given, list) or not given:
        raise InputFileError(source, number, f'needs a list "messages" with at least one message; {_FORM}')
    messages: list[Message] = []
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise InputFileError(source, number, f"{where} must be an object with role and content")
        role = message.get("role")
        if role not in _ROLES:
            raise InputFileError(source, number, f"{where}.role must be one of {', '.join(_ROLES)}, not {role!r}")
        if role == "system" and i:
            raise InputFileError(source, number, f"{where}: a system message must be the first one")
        if role == "assistant" and (not messages or messages[-1]["role"] != "user"):
            raise InputFileError(source, number, f"{where}: an assistant message must follow a user message")
        messages.append({"role": role, "content": _content(source, number, where, message.get("content"))})
    if not any(message["role"] == "user" for message in messages):
        raise InputFileError(source, number, "has no user message, so there is nothing to answer")
    return tuple(messages)


def _content(source: str, number: int, where: str, content: Any) -> str:
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        texts = [part.get("text") if part.get("type") == "text" else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise InputFileError(
                source, number, f'{where}.content has a part that is not {{"type": "text", "text": "..."}}; '
                "images, audio and files are not read",
            )  # fmt: skip
        content = "".join(str(text) for text in texts)
    if not isinstance(content, str) or not content.strip():
        raise InputFileError(source, number, f"{where}.content must be a text that is not empty")
    if any("\ud800" <= c <= "\udfff" for c in content):
        raise InputFileError(source, number, f"{where}.content has half of a surrogate pair (\\ud800 to \\udfff)")
    return content


def chat_tokens(tokenizer: Any, messages: Sequence[Message]) -> np.ndarray:
    """Token ids (int32 ``[n]``) of messages under the tokenizer's chat template, up to where the answer begins."""
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError("the model's tokenizer has no chat template, so it cannot take part in a conversation")
    try:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
    except Exception as error:  # a template is a program in the model's folder; handed on
        raise ModelError(f"the chat template of the model's tokenizer refused the conversation: {error}") from error
    return np.asarray(ids["input_ids"] if hasattr(ids, "keys") else ids, dtype=np.int32)
