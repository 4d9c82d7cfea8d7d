from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine import tiny
from tests.engine.conversion import Converted, convert_together

_CONVERSION = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where SmolLM2 is tested it is converted once, which takes one core 20 s: that begins while other tests run.

    The first test that needs it waits for the conversion's lock, or converts it if this has failed.
    """
    if not session.config.option.collectonly and any("smollm2" in item.name for item in session.items):
        code = "from distkv.engine.sources import model_folder\nmodel_folder('smollm2')"
        session.config.stash[_CONVERSION] = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    conversion = session.config.stash.get(_CONVERSION, None)
    if conversion is not None:
        conversion.kill()
        conversion.wait()


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


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The models are too small for two: on a busy machine each kernel would wait for the other thread, for 8 ms."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """A small GGUF file, and its folder in a cache. A conversion takes seconds, so there is one for all who read it."""
    folder = tmp_path_factory.mktemp("gguf")
    return convert_together(tiny.gguf_file(folder / "tiny.gguf"), folder / "cache")
