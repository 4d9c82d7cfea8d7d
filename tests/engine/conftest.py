from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine import tiny


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Folders of tiny models, each made once: ``folders("llama", kv_heads)``."""
    made: dict[tuple[str, int], Path] = {}

    def folder(kind: str, kv_heads: int) -> Path:
        key = (kind, kv_heads)
        if key not in made:
            made[key] = tiny.model_folder(tmp_path_factory.mktemp(f"{kind}{kv_heads}"), kind, kv_heads=kv_heads)
        return made[key]

    return folder
