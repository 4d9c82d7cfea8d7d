"""``distkv doctor [CONFIG]``: what this machine offers, and what of a configuration will not work on it.

Exit code 0: nothing stands in the way. 1: something of the configuration will not work here, each with its remedy. 2:
the configuration or the command cannot be used. Starts nothing, loads no weights, downloads nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distkv._text import counted
from distkv.config import load
from distkv.engine.config import ServeConfig
from distkv.engine.launch import check_devices
from distkv.engine.report import quiet_transformers
from distkv.engine.sources import cache_folder, config_place
from distkv.errors import ConfigError, DistKVError
from distkv.inspection.host_plan import HostPlan
from distkv.inspection.machine import ENGINE, Machine, as_numbers, findings, memlock, why_not_pinned
from distkv.inspection.output import columns, gib, size
from distkv.inspection.plan import make_plan
from distkv.inspection.shape import ModelShape, read_shape

__all__ = ["Problem", "main", "problems"]

logger = logging.getLogger(__name__)

_TRANSFORMERS = (5, 24)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What of a configuration will not work on this machine. A ``warning`` will work, and disappoint."""

    field: str
    problem: str
    remedy: str
    warning: bool = False


def problems(config: ServeConfig, machine: Machine, *, nodes: int = 1) -> list[Problem]:
    """Everything of ``config`` that stands in the way of a start here, its ranks spread over ``nodes`` hosts."""
    found: list[Problem] = []
    for check in (_devices, _mpi, _model, _cores, _host):
        try:
            found.extend(check(config, machine, nodes))
        except DistKVError as error:
            field, _, text = str(error).partition(": ") if isinstance(error, ConfigError) else ("model", "", str(error))
            problem, _, remedy = text.rpartition("; ")
            found.append(Problem(field=field, problem=problem or text, remedy=remedy if problem else ""))
        except Exception as error:  # handed to the user: the other checks are worth having
            logger.debug("%s", check.__name__, exc_info=True)
            found.append(Problem(field="doctor", problem=f"{type(error).__name__}: {error}", remedy="please report it",
                                 warning=True))  # fmt: skip
    return found


def _devices(config: ServeConfig, machine: Machine, nodes: int) -> Iterator[Problem]:
    check_devices(config.model.device, config.group.transport, 0, max(1, config.parallel.ranks // nodes))
    yield from ()


def _mpi(config: ServeConfig, machine: Machine, nodes: int) -> Iterator[Problem]:
    if config.group.transport != "mpi":
        return
    if machine.version("mpi4py") is None:
        yield Problem(field="group.transport", problem="is mpi, and mpi4py is not installed",
                      remedy="pip install '.[mpi]' mpich in the checkout of distkv, or set gloo")
    if machine.mpirun() is None:
        yield Problem(field="group.transport", problem="is mpi, and there is no mpirun",
                      remedy="pip install mpich, or put the system's mpirun into PATH")


def _model(config: ServeConfig, machine: Machine, nodes: int) -> Iterator[Problem]:
    transformers = machine.version("transformers")
    if transformers is None or as_numbers(transformers) < _TRANSFORMERS:
        has = f"transformers {transformers}" if transformers else "no transformers"
        yield Problem(field="model", problem=f"needs transformers {'.'.join(map(str, _TRANSFORMERS))}; there is {has}",
                      remedy="pip install '.[engine]' in the checkout of distkv")
        return
    yield from _source(config, machine)
    shape = read_shape(config.model.source, config.model.cache_dir)
    yield from _fits(config, shape, nodes)


def _source(config: ServeConfig, machine: Machine) -> Iterator[Problem]:
    folder, gguf = config_place(config.model.source, config.model.cache_dir)  # raises what is missing
    if gguf is None:
        if not any(folder.glob("*.safetensors")):
            yield Problem(field="model.source", problem=f"{folder} has no .safetensors file",
                          remedy="other weight formats are not read: save the model with save_pretrained")
        return
    missing = [name for name in ENGINE if machine.version(name) is None]
    if missing:
        lacks = f"{gguf.name} has to be converted, for which {', '.join(missing)} is missing"
        yield Problem(field="model.source", problem=lacks, remedy="pip install '.[engine]' in the checkout of distkv")
    place = _existing(cache_folder(config.model.cache_dir))
    if not os.access(place, os.W_OK):
        yield Problem(field="model.cache_dir", problem=f"{gguf.name} is converted into {place}, which is not writable",
                      remedy="set model.cache_dir to a folder that can")


def _existing(folder: Path) -> Path:
    return next((place for place in (folder, *folder.parents) if place.exists()), folder)


def _fits(config: ServeConfig, shape: ModelShape, nodes: int) -> Iterator[Problem]:
    plan = make_plan(config, shape, nodes=nodes)
    if plan.memory is not None and not plan.pool_fits:
        yield Problem(
            field="pool.pages",
            problem=f"{plan.pages:,} pages take {size(plan.pool_per_rank)} beside {size(plan.weights_per_rank)} of "
                    f"weights on each of {counted(plan.ranks_per_node, 'rank')}, and {gib(plan.memory)} of "
                    f"{plan.memory_of}",
            remedy=f"at most {plan.most_pages:,} pages fit" if plan.most_pages else "a smaller model, or more memory",
        )  # fmt: skip
    if plan.host is not None:
        yield from _tier_fits(config, plan.host, plan.ranks_per_node)
    if config.engine.output_limit >= plan.longest_request:
        yield Problem(
            field="engine.output_limit",
            problem=f"is {config.engine.output_limit}, and a request has room for {plan.longest_request:,} tokens of "
                    "prompt and answer: every request that does not say less is refused",
            remedy="lower it, or raise pool.pages",
        )  # fmt: skip


def _tier_fits(config: ServeConfig, host: HostPlan, ranks: int) -> Iterator[Problem]:
    if not host.fits:
        most = host.most_pages or 0
        yield Problem(
            field=f"host.{host.field}",
            problem=f"the host tier takes {size(host.per_node)} on a node ({host.pages:,} pages on each of "
                    f"{counted(ranks, 'rank')}) beside {size(host.beside_per_node)} for {host.beside}, and "
                    f"{gib(host.memory or 0)} of {host.memory_of}",
            remedy=f"at most {most:,} pages ({size(most * host.bytes_per_page)}) for each rank fit" if most
                   else "no host tier, or more memory",
        )  # fmt: skip
        return
    soft = memlock()[0]
    if soft is not None and host.per_rank > soft and _on_gpu(config, ranks):
        yield Problem(field="host", problem=f"{size(host.per_rank)} are pinned on each rank, and RLIMIT_MEMLOCK is "
                                            f"{size(soft)}; some drivers and containers count one against the other",
                      remedy="ulimit -l unlimited, or --ulimit memlock=-1 for a container, if pinning fails",
                      warning=True)  # fmt: skip


def _host(config: ServeConfig, machine: Machine, nodes: int) -> Iterator[Problem]:
    ranks = max(1, config.parallel.ranks // nodes)
    if not config.host.configured:
        return
    on_gpu = _on_gpu(config, ranks)
    if on_gpu or config.host.require_pinned:
        why, install = why_not_pinned(machine), ("pip install '.[cupy]' in the checkout of distkv, for a GPU "
                                                  "that CUDA can use")
        if why and config.host.require_pinned:
            yield Problem(field="host.require_pinned", problem=f"is true, and memory cannot be pinned here: {why}",
                          remedy=f"{install}; or set it to false")
        elif why:
            yield Problem(field="host", problem=f"memory cannot be pinned here: {why}; copies to and from the GPU are "
                                                "slower", remedy=install, warning=True)
    threads, cores = config.host.copy_threads, machine.cores()
    if not on_gpu and threads > cores:
        yield Problem(field="host.copy_threads", problem=f"{counted(threads, 'thread')} of each rank copy pages on "
                                                         f"{counted(cores, 'core')}", remedy="lower it", warning=True)


def _on_gpu(config: ServeConfig, ranks: int) -> bool:
    try:
        return check_devices(config.model.device, config.group.transport, 0, ranks).type == "cuda"
    except ConfigError:  # _devices says so
        return False


def _cores(config: ServeConfig, machine: Machine, nodes: int) -> Iterator[Problem]:
    ranks, cores = max(1, config.parallel.ranks // nodes), machine.cores()
    if ranks > cores:
        yield Problem(field="parallel", problem=f"{counted(ranks, 'rank')} share {counted(cores, 'core')}, slowly",
                      remedy="lower it, or give this process more cores", warning=True)


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="distkv doctor", description=__doc__.split("\n")[0])
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="configuration file (YAML)")
    parser.add_argument("--nodes", type=int, default=1, help="hosts that the ranks are spread over (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    given = parser.parse_args(arguments)
    if given.nodes < 1:
        print("distkv: --nodes must be at least 1", file=sys.stderr)
        return 2
    config = load(given.config, ServeConfig) if given.config is not None else None
    machine = Machine()
    if config is not None and machine.version("transformers"):
        quiet_transformers()
    found = findings(machine)
    wrong = problems(config, machine, nodes=given.nodes) if config is not None else []
    failed = any(not problem.warning for problem in wrong)
    if given.json:
        print(json.dumps({"machine": [dataclasses.asdict(finding) for finding in found], "config": given.config,
                          "works": not failed, "problems": [dataclasses.asdict(p) for p in wrong]}, indent=1))
        return int(failed)
    rows = []
    for finding in found:
        rows.append((finding.name, finding.value))
        if finding.warning:
            rows.append(("", f"! {finding.warning}"))
    print(columns(rows))
    if config is not None:
        print(f"\n{given.config}: " + ("nothing stands in the way here" if not failed else "this will not work here"))
        for problem in wrong:
            print(f"{'note ' if problem.warning else 'WRONG'}  {problem.field}: {problem.problem}")
            if problem.remedy:
                print(f"       -> {problem.remedy}")
    return int(failed)
