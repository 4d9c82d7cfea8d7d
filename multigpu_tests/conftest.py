"""The same cases over NCCL where this machine has a GPU per rank, and over gloo where it has not."""

from __future__ import annotations

import pytest

from distkv.testing.processes import choose_backend, world_sizes

WORLD_SIZES = world_sizes((1, 2, 4))


def pytest_report_header(config: pytest.Config) -> str:
    """Says which transport the group cases use: a run without GPUs shows that it was one."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = ", ".join(f"world size {size}: {choose_backend(size)}" for size in WORLD_SIZES)
    return f"multigpu_tests: {gpus} GPU(s); {chosen}"


@pytest.fixture(scope="module", params=WORLD_SIZES, ids=lambda size: f"{size}-ranks-{choose_backend(size)}")
def world_size(request: pytest.FixtureRequest) -> int:
    """Number of ranks of the case; its id in the report names the transport too."""
    assert isinstance(request.param, int)
    return request.param
