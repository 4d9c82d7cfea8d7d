"""What Slurm's variables mean: node lists, the step that a process belongs to, and ports that jobs do not share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product

from distkv.errors import ConfigError

__all__ = ["expand", "node_list", "ports", "step_of", "tasks_on_node"]

MOST_NODES = 65_536
PORTS = range(15_000, 30_000)
"""Registered ports: below those that Linux gives to outgoing connections (32768 on)."""

_CANDIDATES = 16
_OWN_STEPS = 0xFFFF_FFF0  # batch script, interactive and other steps of Slurm's own have numbers from here on
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_PART = re.compile(r"([^\[\],]*)(?:\[([^\[\]]*)\])?")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand(text: str, name: str = "SLURM_JOB_NODELIST") -> list[str]:
    """The hosts of a node list such as ``node[01-03,7],gpu-a[1-2]b``, in its order; numbers keep their zeros.

    As ``scontrol show hostnames``, of which a container has none. Raises ConfigError, whose path is ``name``, for a
    list that cannot be read, or of more than 65,536 hosts.
    """
    hosts: list[str] = []
    for entry in _entries(text.strip(), text, name):
        pieces = [_numbers(found[2], text, name) if found[2] is not None else [""] for found in entry]
        size = 1
        for piece in pieces:
            size *= len(piece)
        if len(hosts) + size > MOST_NODES:
            raise _wrong(text, name, f"it names more than {MOST_NODES} hosts")
        words = [found[1] for found in entry]
        hosts += ["".join(word + number for word, number in zip(words, numbers, strict=True))
                  for numbers in product(*pieces)]  # fmt: skip
    return hosts


def _entries(rest: str, text: str, name: str) -> list[list[re.Match[str]]]:
    """Each entry between commas outside brackets, as pieces: a word and perhaps a bracket behind it."""
    entries: list[list[re.Match[str]]] = [[]]
    at = 0
    while at < len(rest):
        if rest[at] == ",":
            entries.append([])
            at += 1
            continue
        found = _PART.match(rest, at)
        if found is None or not found[0]:
            raise _wrong(text, name, f"the bracket at character {at + 1} has no partner")
        entries[-1].append(found)
        at = found.end()
    if any(not entry or any(" " in found[0] or "\t" in found[0] for found in entry) for entry in entries):
        raise _wrong(text, name, "an entry is empty or has a space in it")
    return entries


def _numbers(ranges: str, text: str, name: str) -> list[str]:
    found: list[str] = []
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise _wrong(text, name, f"[{ranges}] is no list of numbers and ranges")
        first, last = match[1], match[2] or match[1]
        count = int(last) - int(first) + 1
        if count < 1:
            raise _wrong(text, name, f"the range {piece} runs backwards")
        if len(found) + count > MOST_NODES:
            raise _wrong(text, name, f"it names more than {MOST_NODES} hosts")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _wrong(text: str, name: str, problem: str) -> ConfigError:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return ConfigError(name, f"is no node list such as node[01-03,7],gpu1: {problem}, got {shown!r}")


def step_of(env: Mapping[str, str]) -> int | None:
    """The number of the step that ``srun`` has started this process in; None in a batch script, where nobody has."""
    text = (env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or "").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        return None
    step = int(text)
    return step if step < _OWN_STEPS else None


def node_list(env: Mapping[str, str]) -> list[str]:
    """The hosts of this step, or of the job where the step's are not told; none if neither is. Raises ConfigError."""
    name = next((name for name in _NODE_LISTS if env.get(name, "").strip()), None)
    return expand(env[name], name) if name is not None else []


def tasks_on_node(env: Mapping[str, str]) -> int | None:
    """How many tasks of the step are on this host, by ``SLURM_STEP_TASKS_PER_NODE`` such as ``4(x3),2``."""
    node = env.get("SLURM_NODEID", "").strip()
    if step_of(env) is None or not (node.isascii() and node.isdigit() and len(node) < 10):
        return None
    before = 0
    for piece in env.get("SLURM_STEP_TASKS_PER_NODE", "").strip().split(","):
        match = _COUNT.fullmatch(piece)
        if match is None:
            return None
        before += int(match[2] or 1)
        if int(node) < before:
            return int(match[1])
    return None


def ports(env: Mapping[str, str]) -> list[int]:
    """Ports at which the tasks of this step may meet, the same on all of them, best first.

    The first differs between any two jobs whose ids are less than 15,000 apart, and the rest are for when something
    else listens there: another step of the job, or another program.
    """
    job, step = _id(env, "SLURM_JOB_ID", "SLURM_JOBID"), step_of(env) or 0
    first = job + step * 7919
    return [PORTS[(first + number * 911) % len(PORTS)] for number in range(_CANDIDATES)]


def _id(env: Mapping[str, str], *names: str) -> int:
    text = next((env[name].strip() for name in names if env.get(name, "").strip()), "")
    if not text:
        raise ConfigError(names[0], "missing, although SLURM_PROCID is set; let srun's variables reach the process, or "
                                    "set MASTER_PORT to a free port of the first host")  # fmt: skip
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise ConfigError(names[0], f"must be a whole number, got {text!r}")
    return int(text)
