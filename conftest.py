from __future__ import annotations

from collections.abc import Iterator

import pytest

from distkv.testing.warm import WarmProcess, warm_start

# What most ranks of the tests import, and what takes them long. Only what this process has imported itself is imported.
OF_MOST_RANKS = [
    "torch.distributed",
    "pytest",
    "distkv.engine.engine",
    "distkv.engine.launch",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
]


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[WarmProcess]:
    """Ranks are forked where that is the same to them; see ``distkv.testing.warm``."""
    with warm_start(OF_MOST_RANKS) as process:
        yield process
