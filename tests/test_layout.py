"""The launcher's variables: taken as a whole or refused, never guessed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from distkv import slurm
from distkv.errors import ConfigError
from distkv.layout import Layout, bare_address, ranks_on_host

Env = dict[str, str]

TORCHRUN = {"RANK": "4", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
ELASTIC = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "6", "MPI_LOCALRANKID": "0"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_SIZE": "6", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
# what srun gives to task 4 of 6, on the second of two nodes
TASK = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_STEP_NODELIST": "gpu[09-10]", "SLURM_JOB_NODELIST": "gpu[08-12]", "SLURMD_NODENAME": "gpu10",
}  # fmt: skip
# what a batch script finds that asked for 6 tasks and is no task itself
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "6", "SLURM_NODEID": "0",
         "SLURM_JOB_NODELIST": "gpu[09-10]", "SLURMD_NODENAME": "gpu09"}  # fmt: skip
PORT = slurm.ports(TASK)[0]
ALONE = Layout()


def without(env: Env, *names: str) -> Env:
    return {name: value for name, value in env.items() if name not in names}


def by_torchrun(addr: str = "10.0.0.1") -> Layout:
    return Layout(rank=4, local_rank=1, world_size=6, master_addr=addr, master_port=29500, source="torchrun")


def by_mpi(rank: int = 2, local_rank: int = 0, world_size: int = 6) -> Layout:
    return Layout(rank=rank, local_rank=local_rank, world_size=world_size, source="mpirun")


def by_slurm(addr: str = "gpu09", port: int = PORT, **fields: Any) -> Layout:
    place = {"rank": 4, "local_rank": 1, "world_size": 6, **fields}
    return Layout(**place, master_addr=addr, master_port=port, source="slurm")


RIGHT: dict[str, tuple[Env, Layout]] = {
    "nothing": ({}, ALONE),
    "nothing of a launcher's": ({"HOME": "/"}, ALONE),
    "MASTER_ADDR for another program": ({"MASTER_ADDR": "host", "MASTER_PORT": "1"}, ALONE),
    "torchrun": (ELASTIC, by_torchrun()),
    "another launcher that sets torchrun's": (TORCHRUN, by_torchrun()),
    "torchrun, IPv6": ({**ELASTIC, "MASTER_ADDR": "fd00::1"}, by_torchrun("fd00::1")),
    "torchrun, IPv6 in brackets": ({**ELASTIC, "MASTER_ADDR": "[fd00::1]"}, by_torchrun("fd00::1")),
    "srun starts torchrun on each node": (
        {**TASK, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", **ELASTIC},
        by_torchrun()),
    "torchrun in a batch script": ({**BATCH, **ELASTIC}, by_torchrun()),
    "each task of srun starts a torchrun of its own": (
        {**TASK, **ELASTIC, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        Layout(rank=0, local_rank=0, world_size=2, master_addr="10.0.0.1", master_port=29500, source="torchrun")),
    "torchrun's ranks need not be in srun's order": ({**TASK, **ELASTIC, "SLURM_PROCID": "1"}, by_torchrun()),
    "mpirun starts torchrun on each node": ({**MPICH, "PMI_RANK": "0", "PMI_SIZE": "2", **ELASTIC}, by_torchrun()),
    "a script under srun that hands its numbers on as torchrun's": ({**TASK, **TORCHRUN}, by_torchrun()),
    "MPICH or Intel": (MPICH, by_mpi()),
    "MPICH, and no local rank: one host": (without(MPICH, "MPI_LOCALRANKID"), by_mpi(2, 2)),
    "Cray": ({**without(MPICH, "MPI_LOCALRANKID"), "PMI_LOCAL_RANK": "1"}, by_mpi(2, 1)),
    "Open MPI": (OPENMPI, by_mpi()),
    "Open MPI, with PMIX": ({**OPENMPI, "PMIX_RANK": "2"}, by_mpi()),
    "MVAPICH": (MVAPICH, by_mpi(5, 1)),
    "MVAPICH by Hydra, which sets both": ({**MPICH, **MVAPICH, "PMI_RANK": "5"}, by_mpi(5, 1)),
    "mpirun in a batch script": ({**BATCH, **OPENMPI}, by_mpi()),
    "mpirun in a job, its daemons started by srun": (
        {**TASK, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", **MPICH}, by_mpi()),
    "srun": (TASK, by_slurm()),
    "srun --mpi=pmi2 with no MPI in the program": ({**TASK, "PMI_RANK": "4", "PMI_SIZE": "6"}, by_slurm()),
    "srun of some of the job's tasks": (
        {**TASK, "SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "6"}, by_slurm()),
    "srun that does not tell the step's number of tasks": (without(TASK, "SLURM_STEP_NUM_TASKS"), by_slurm()),
    "srun, the step's nodes unknown": (without(TASK, "SLURM_STEP_NODELIST"), by_slurm("gpu08")),
    "srun, with an address of ours": ({**TASK, "MASTER_ADDR": "gpu09-ib0"}, by_slurm("gpu09-ib0")),
    "srun, IPv6, and a port of ours": (
        {**TASK, "MASTER_ADDR": "[fd00::9]", "MASTER_PORT": "29400"}, by_slurm("fd00::9", 29400)),
    "srun, rank 0": ({**TASK, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "gpu09"},
                     by_slurm(rank=0, local_rank=0)),
    "srun on one host": ({**TASK, "SLURM_STEP_NODELIST": "gpu09", "MASTER_ADDR": "localhost"}, by_slurm("localhost")),
    "srun --pty bash": ({**TASK, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1",
                         "SLURM_STEP_NUM_TASKS": "1"}, ALONE),
    "the shell of salloc": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6", "SLURM_JOB_NODELIST": "gpu[09-10]"}, ALONE),
    "a batch script for one task": ({**BATCH, "SLURM_NTASKS": "1"}, ALONE),
    "a batch script for no number of tasks": (without(BATCH, "SLURM_NTASKS"), ALONE),
}

WRONG: dict[str, tuple[Env, str, str]] = {
    "a batch script for 6 tasks": (BATCH, "SLURM_NTASKS", "is 6, but this is one process that srun has not started"),
    "an interactive step's shell for 6 tasks": ({**BATCH, "SLURM_STEP_ID": "4294967290"}, "SLURM_NTASKS", "Put srun"),
    "srun, and a container that hides the step": (without(TASK, "SLURM_STEP_ID"), "SLURM_STEP_ID", "missing, although"),
    "srun, no local rank": (without(TASK, "SLURM_LOCALID"), "SLURM_LOCALID", "missing, although SLURM_PROCID is set"),
    "srun, no nodes": (without(TASK, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "SLURM_STEP_NODELIST",
                       "or set MASTER_ADDR to the first host"),
    "srun, no job": (without(TASK, "SLURM_JOB_ID"), "SLURM_JOB_ID", "or set MASTER_PORT"),
    "srun, a rank beyond the end": ({**TASK, "SLURM_PROCID": "6"}, "SLURM_PROCID", "to SLURM_STEP_NUM_TASKS - 1 = 5"),
    "srun, nodes that cannot be read": ({**TASK, "SLURM_STEP_NODELIST": "gpu[1-"}, "SLURM_STEP_NODELIST", "no partner"),
    "srun -m arbitrary": ({**TASK, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "SLURM_STEP_NODELIST",
                          "begins with gpu09, but rank 0 is on gpu10; set MASTER_ADDR"),
    "srun, the loopback on two hosts": ({**TASK, "MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR", "the first one (gpu09)"),
    "srun, localhost on two hosts": ({**TASK, "MASTER_ADDR": "localhost"}, "MASTER_ADDR", "another host on each of 2"),
    "srun, an address with a port": ({**TASK, "MASTER_ADDR": "gpu09:1"}, "MASTER_ADDR", "the port is MASTER_PORT"),
    "srun, a port that is none": ({**TASK, "MASTER_PORT": "http"}, "MASTER_PORT", "whole number"),
    "RANK exported in the batch script": ({**TASK, **TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}, "RANK",
                                          "is 0 of 6, but srun says 4 of 6: it was set before"),
    "WORLD_SIZE exported as the number of nodes": ({**TASK, **TORCHRUN, "RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE",
                                                   "is 2, but srun has started 6"),
    "RANK and so on with the loopback on two hosts": ({**TASK, **TORCHRUN, "MASTER_ADDR": "::1"}, "MASTER_ADDR",
                                                      "another host on each of 2 hosts"),
    "RANK exported before mpirun": ({**OPENMPI, **TORCHRUN}, "RANK", "is 4 of 6, but mpirun says 2 of 6"),
    "mpirun in a rank of something else": ({**MPICH, **TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
                                           "WORLD_SIZE", "is 1, but mpirun has started 6"),
    "one mpirun in another": ({**MPICH, **OPENMPI, "PMI_SIZE": "3"}, "OMPI_COMM_WORLD_RANK",
                              "is 2 of 6, but PMI_RANK is 2 of 3: one of Open MPI's mpirun and MPICH's"),
    "MPI, no size": (without(MPICH, "PMI_SIZE"), "PMI_SIZE", "missing, although PMI_RANK is set"),
    "MPI, no rank": (without(OPENMPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK", "missing, although"),
    "MPI, no local rank": (without(MVAPICH, "MV2_COMM_WORLD_LOCAL_RANK"), "MV2_COMM_WORLD_LOCAL_RANK", "missing"),
    "MPI, a rank beyond the end": ({**MPICH, "PMI_RANK": "6"}, "PMI_RANK", "from 0 to PMI_SIZE - 1 = 5, got 6"),
    "torchrun, an address with a port": ({**ELASTIC, "MASTER_ADDR": "a:7"}, "MASTER_ADDR", "without a port, got 'a:7'"),
    "torchrun, brackets around no IPv6": ({**ELASTIC, "MASTER_ADDR": "[host]"}, "MASTER_ADDR", "got '[host]'"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_the_environment_of_a_launcher_is_understood(case: str) -> None:
    env, wanted = RIGHT[case]
    assert Layout.from_environment(env) == wanted


@pytest.mark.parametrize("case", WRONG)
def test_an_environment_that_contradicts_itself_is_refused(case: str) -> None:
    env, path, text = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        Layout.from_environment(env)
    assert caught.value.path == path
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE",
     "PMI_LOCAL_SIZE"],
)
def test_how_many_ranks_share_this_host(name: str) -> None:
    assert ranks_on_host(8, {name: "2"}) == ranks_on_host(8, {**TASK, name: "2"}) == 2
    assert ranks_on_host(8, {}) == ranks_on_host(8, {name: "two"}) == 8


def test_how_many_tasks_of_srun_share_this_host() -> None:
    for node, tasks in enumerate([4, 4, 4, 2]):
        env = {**TASK, "SLURM_STEP_TASKS_PER_NODE": "4(x3),2", "SLURM_NODEID": str(node)}
        assert ranks_on_host(14, env) == tasks
    assert ranks_on_host(14, {**TASK, "SLURM_NODEID": "2"}) == 14, "no such node"
    assert ranks_on_host(14, {**BATCH, "SLURM_STEP_TASKS_PER_NODE": "3(x2)"}) == 14, "no task"


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
        for env in (TORCHRUN, {**TASK, "MASTER_ADDR": "[fd00::9]", "MASTER_PORT": "29400"}, MPICH, {}):
            Layout.from_environment(env)
    assert [record.getMessage() for record in caplog.records] == [
        "rank 4 of 6 (local rank 1), started by torchrun, meeting at 10.0.0.1:29500",
        "rank 4 of 6 (local rank 1), started by srun, meeting at [fd00::9]:29400",
        "rank 2 of 6 (local rank 0), started by mpirun",
        "rank 0 of 1 (local rank 0), no launcher",
    ]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,7],gpu-a[1-2]b", ["node01", "node02", "node03", "node7", "gpu-a1b", "gpu-a2b"]),
        ("n[01-03,07],gpu9", ["n01", "n02", "n03", "n07", "gpu9"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[9-10],m", ["n9", "n10", "m"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[5]", ["n5"]),
        (" n1.example.org ", ["n1.example.org"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert slurm.expand(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,,b", "a,", "n[1-3", "n1-3]", "n[[1]]", "n[]", "n[3-1]", "n[a-b]", "n[1-2-3]", "n[1 -2]", "a b",
     "n[-3]", "n[0-999999999]", "n[0-999][0-999]", "n[1-40000],m[1-40000]", "n[²]", "n[" + "1," * 100_000 + "1]"],
)
def test_node_lists_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="is no node list") as caught:
        slurm.expand(text, "SLURM_STEP_NODELIST")
    assert caught.value.path == "SLURM_STEP_NODELIST"
    assert len(str(caught.value)) < 600


def test_jobs_and_steps_meet_at_ports_of_their_own() -> None:
    def best(job: int, step: int = 0) -> int:
        return slurm.ports({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})[0]

    assert len({best(job) for job in range(4_000_000_000, 4_000_000_000 + len(slurm.PORTS))}) == len(slurm.PORTS)
    assert len({best(123_456, step) for step in range(1000)}) == 1000
    for job, step in ((1, 0), (99_999_999, 17)):
        ports = slurm.ports({"SLURM_JOBID": str(job), "SLURM_STEPID": str(step)})
        assert len(set(ports)) == len(ports) > 10
        assert all(1024 < port < 32_768 for port in ports), "neither reserved nor given to outgoing connections"


def test_addresses() -> None:
    for text, bare in (("h", "h"), ("10.0.0.1", "10.0.0.1"), ("::1", "::1"), ("[::1]", "::1"), (" [fe80::1%eth0] ",
                       "fe80::1%eth0")):  # fmt: skip
        assert bare_address(text) == bare
    for text in ("h:1", "[::1]:80", "[h]", "1::2::3", "[::1"):
        with pytest.raises(ConfigError, match="MASTER_ADDR: must be a name or an address without a port"):
            bare_address(text)
