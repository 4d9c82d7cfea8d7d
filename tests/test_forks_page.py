"""The worked example of docs/forks.md, run as it stands: every number that the page says is what the pool says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from distkv import PrefixCache

PAGE = Path(__file__).parents[1] / "docs" / "forks.md"


def test_the_worked_example(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                            monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text("utf-8")
    name, code = re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", text, re.DOTALL)[0]
    shown = re.search(r"```\n(a has computed .*?)```", text, re.DOTALL)
    table = re.findall(r"^\| (a |b |both )(.+?) \| (\w+) \| (\w+) \| (\w+) \| ", text, re.MULTILINE)
    moments: list[dict[str, Any]] = []
    stats = PrefixCache.stats

    def noting(self: PrefixCache) -> Any:
        """The example asks for the live and then for the cached pages of each moment."""
        self.check()
        books = self._books
        states = [int(n) if n else "cached" if books.pool.indexed[page] else "free"
                  for page, n in enumerate(books.pool.owners[:3])]
        moments.append({"owners": states, "tails": dict(books.tails), "reserved": books.reserved, "room": books.room})
        return stats(self)

    monkeypatch.setattr(PrefixCache, "stats", noting)
    (tmp_path / name).write_text(code, encoding="utf-8")
    runpy.run_path(str(tmp_path / name))
    assert shown is not None
    assert capsys.readouterr().out == shown[1]
    moments = moments[::2]
    assert [[str(n) for n in moment["owners"]] for moment in moments] == [list(row[2:]) for row in table]
    assert [moment["owners"] for moment in moments] == [
        [1, 1, "free"], [2, 2, "free"], [2, 1, 1], [2, 1, 1], [2, 1, 1], [1, 1, "cached"], ["cached"] * 3]
    assert [moment["tails"] for moment in moments] == [{}, {1: 2}, {}, {}, {}, {}, {}]
    assert [moment["reserved"] for moment in moments] == [1, 2, 2, 2, 2, 1, 0]
    # pages less live ones, less reserved ones, less the page for the copy
    assert [moment["room"] for moment in moments] == [8 - 2 - 1, 8 - 2 - 2 - 1, 8 - 3 - 2, 8 - 3 - 2, 8 - 3 - 2,
                                                      8 - 2 - 1, 8]


def test_what_the_page_links_to_exists() -> None:
    text = PAGE.read_text("utf-8")
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (PAGE.parent / path).exists(), path
    titles = [f"{n}-{title.lower().replace(',', '').replace(' ', '-')}"
              for n, title in re.findall(r"^## (\d+)\. (.+)$", text, re.MULTILINE)]
    assert re.findall(r"^\d+\. \[.+?\]\(#(\S+?)\)", text, re.MULTILINE) == titles
