from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine import hybrid, tiny
from tests.engine.conversion import Converted, convert_together


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


@pytest.fixture(scope="session")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> hybrid.Folders:
    """Folders of tiny models with sliding windows, each made once: ``hybrids("gemma3")``; ``-small``: of two layers."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = hybrid.folder(tmp_path_factory.mktemp(kind), kind.removesuffix("-small"),
                                       layers=2 if kind.endswith("-small") else 3)  # fmt: skip
        return made[kind]

    return folder


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """What :mod:`tests.engine.hybrid` has opened is closed when the test has ended, however it ended."""
    yield
    while hybrid.opened:
        hybrid.opened.pop().close()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The models are too small for two: on a busy machine each kernel would wait for the other thread, for 8 ms."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """A small GGUF file, and its folder in a cache. A conversion takes seconds, so there is one for all who read it."""
    folder = tmp_path_factory.mktemp("gguf")
    return convert_together(tiny.gguf_file(folder / "tiny.gguf"), folder / "cache")
