"""docs/api.md says what the source says, and leaves nothing public out."""

from __future__ import annotations

import re
from pathlib import Path

import distkv
from distkv.api_reference import page

PAGE = Path(__file__).parents[1] / "docs" / "api.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/api.md is old: run `make docs`"


def test_the_page_has_every_public_name() -> None:
    assert set(re.findall(r"^### `(\w+)", page(), re.MULTILINE)) == set(distkv.__all__)
    assert "0x" not in page(), "an address, which the next run does not have"
