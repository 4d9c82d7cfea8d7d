"""The README's example runs as it stands and prints what the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    found = re.search(r"<!-- example.*?```python\n(.*?)```\s+```\n(.*?)```", text, re.DOTALL)
    assert found is not None
    script = tmp_path / "example.py"
    script.write_text(found[1], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(README.parent)}
    command = [sys.executable, "-W", "error", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == found[2]


def test_every_path_that_the_readme_names_exists() -> None:
    text = README.read_text(encoding="utf-8")
    for path in re.findall(r"\]\(([^)#:]+)\)|`((?:distkv|launch|configs|tests|docs)/[\w/.-]*)", text):
        assert (README.parent / (path[0] or path[1])).exists(), path


def test_nothing_in_the_readme_waits_to_be_filled_in() -> None:
    assert not re.search(r"@@|TODO|TBD|XXX", README.read_text(encoding="utf-8"))
