from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For models that are too small for two: on a busy machine each kernel would wait for the other thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
