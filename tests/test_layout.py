"""The launcher's variables: taken as a whole or refused, never guessed."""

from __future__ import annotations

import logging

import pytest

from distkv.errors import ConfigError
from distkv.layout import Layout, ranks_on_host

TORCHRUN = {"RANK": "4", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_torchrun() -> None:
    layout = Layout.from_environment(TORCHRUN)
    assert layout == Layout(
        rank=4, local_rank=1, world_size=6, master_addr="10.0.0.1", master_port=29500, source="torchrun"
    )


@pytest.mark.parametrize("env", [{}, {"HOME": "/"}, {"MASTER_ADDR": "host", "MASTER_PORT": "1"}])
def test_without_a_launcher_it_is_one_rank(env: dict[str, str]) -> None:
    assert Layout.from_environment(env) == Layout(rank=0, local_rank=0, world_size=1, source="alone")


def test_mpirun_of_both_kinds() -> None:
    mpich = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0"}
    openmpi = {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    for env in (mpich, openmpi):
        assert Layout.from_environment(env) == Layout(rank=2, local_rank=0, world_size=3, source="mpirun")
    assert Layout.from_environment({"PMI_RANK": "2", "PMI_SIZE": "3"}).local_rank == 2


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"])
def test_how_many_ranks_share_this_host(name: str) -> None:
    assert ranks_on_host(8, {name: "2"}) == 2
    assert ranks_on_host(8, {}) == ranks_on_host(8, {name: "two"}) == 8


@pytest.mark.parametrize("missing", list(TORCHRUN))
def test_a_part_of_torchruns_variables_is_an_error(missing: str) -> None:
    for left in ({}, {missing: ""}, {missing: " "}):
        env = {name: value for name, value in TORCHRUN.items() if name != missing} | left
        with pytest.raises(ConfigError, match=f"{missing}: missing, although") as caught:
            Layout.from_environment(env)
        assert caught.value.path == missing


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("RANK", "6", "from 0 to WORLD_SIZE - 1 = 5, got 6"),
        ("RANK", "-1", "whole number, got '-1'"),
        ("RANK", "1.0", "whole number"),
        ("RANK", "one", "whole number"),
        ("RANK", "²", "whole number"),
        ("RANK", "1_0", "whole number"),
        ("RANK", "9" * 5000, "whole number"),
        ("RANK", "0", "larger than RANK"),
        ("LOCAL_RANK", "6", "from 0"),
        ("LOCAL_RANK", "5", "larger than RANK"),
        ("LOCAL_RANK", "x", "whole number"),
        ("WORLD_SIZE", "0", "at least 1"),
        ("WORLD_SIZE", "4", "got 4"),
        ("WORLD_SIZE", "", "missing"),
        ("MASTER_PORT", "0", "1 to 65535"),
        ("MASTER_PORT", "65536", "1 to 65535"),
        ("MASTER_PORT", "http", "whole number"),
    ],
)
def test_values_that_cannot_be(name: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Layout.from_environment({**TORCHRUN, name: value})
    assert text in str(caught.value)


def test_the_source_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="distkv"):
        Layout.from_environment(TORCHRUN)
        Layout.from_environment({})
    assert "rank 4 of 6 (local rank 1), started by torchrun" in caplog.text
    assert "no launcher" in caplog.text
