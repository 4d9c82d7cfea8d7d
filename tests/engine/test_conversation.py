"""Files of chat messages: what is read, and the error for each thing that is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distkv.engine.conversation import built_in, read_conversations
from distkv.errors import InputFileError

USER = {"role": "user", "content": "a question"}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "messages.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_conversations_are_read_in_order_with_their_own_answers(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "part"}]
    path = written(
        tmp_path,
        {"messages": [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "given"}, USER]},
        "",
        {"messages": [{"role": "user", "content": parts}], "model": "ignored"},
    )
    first, second = read_conversations(path)
    assert (first.name, second.name) == ("line 1", "line 3")
    assert first.turns() == [1, 3]
    assert [first.given_answer(turn) for turn in first.turns()] == ["given", None]
    assert second.messages == ({"role": "user", "content": "a part"},)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", 'needs a list "messages"'),
        ({"messages": []}, "at least one message"),
        ({"messages": [1]}, r"messages\[0\] must be an object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role must be one of system, user, assistant"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content must be a text"),
        ({"messages": [{"role": "user", "content": "  "}]}, "not empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "images"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "has a part that is not"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"messages": [{"role": "system", "content": "x"}]}, "nothing to answer"),
        ({"messages": [USER, {"role": "system", "content": "x"}]}, "must be the first"),
        ({"messages": [{"role": "assistant", "content": "x"}, USER]}, "must follow a user message"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, words: str) -> None:
    path = written(tmp_path, {"messages": [USER]}, line)
    with pytest.raises(InputFileError, match=words) as caught:
        read_conversations(path)
    assert caught.value.line == 2
    assert str(caught.value).startswith(f"{path}, line 2: ")


def test_a_file_without_conversations_or_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no conversation"):
        read_conversations(written(tmp_path, ""))
    with pytest.raises(InputFileError, match=r"missing.jsonl: there is no such file$"):
        read_conversations(tmp_path / "missing.jsonl")
    with pytest.raises(InputFileError, match=r": is a folder, not a file of messages$"):
        read_conversations(tmp_path)
    with pytest.raises(InputFileError, match="is no name of a file"):
        read_conversations("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputFileError, match=r"binary: is not UTF-8 text \(byte 0\)$"):
        read_conversations(tmp_path / "binary")


def test_the_example_is_a_conversation_about_a_document() -> None:
    (example,) = built_in()
    assert len(example.turns()) == 5
    assert example.messages[0]["role"] == "system"
    assert "Grant of Copyright License" in example.messages[0]["content"]
