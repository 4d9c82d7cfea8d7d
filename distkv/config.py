"""The configuration of the cache: what there is, what is allowed, and a strict loader.

A field is **agreed** (it has to be equal on every rank; compared when a group starts, see :func:`agreed_fields`)
or **local** (each rank may have its own). ``docs/configuration.md`` is written from this file by
``python -m distkv.config_reference``.

An application with fields of its own derives from :class:`Config`, adds sections (:class:`Section`,
:func:`setting`) and loads its file with the same :func:`load`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from distkv._loading import from_mapping
from distkv._settings import Section, agreed_fields, setting
from distkv.errors import ConfigError

__all__ = [
    "CacheConfig",
    "Config",
    "GroupConfig",
    "PoolConfig",
    "Section",
    "agreed_fields",
    "from_mapping",
    "load",
    "setting",
]

T = TypeVar("T")

_MAX_FILE_BYTES = 1 << 20
_MAX_PAGES = (1 << 31) - 1  # page ids are int32


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Section):
    """How the cache names, keeps and hands out pages. Equal on every rank."""

    page_size: int = setting(128, agreed=True, low=1, high=4096)
    """Tokens of one page, in every layer. Any whole number; the attention kernel may ask for a power of two.
    Smaller pages match more of a prompt, larger ones cost less bookkeeping per token."""

    index_on: Literal["finish", "fill"] = setting("finish", agreed=True)
    """When a full page can be found by other requests: when its request has finished, or as soon as the page is
    committed, so that equal prompts in flight share it."""

    queue_slots: int = setting(8, agreed=True, low=1, high=1024)
    """How many waiting requests, in queue order, one step considers. It sets the size of the collective."""

    heartbeat: int = setting(64, agreed=True, low=1, high=1_000_000)
    """A group with nothing to agree on still exchanges a ballot every so many steps, so that a rank that has
    stopped or departed from the others is noticed. Of no use in lockstep, which has check_every."""

    agreement: Literal["minimum", "lockstep"] = setting("minimum", agreed=True)
    """How the ranks come to one decision. minimum: in each step that has something to decide they exchange what each of
    them has; pools may differ, and a rank may lose pages. lockstep: each decides alone from equal state, and a digest
    of the state is exchanged every check_every steps. That needs equal pools and equal calls, retired included, at
    equal places between begin_step and end_step; a rank that departs is noticed at the next digest, and ends the
    group."""

    check_every: int = setting(64, agreed=True, low=1, high=1_000_000)
    """Steps between two digests in lockstep. A digest costs one small collective and a pass over this rank's pages."""

    key_function: Literal["xxh3_64", "xxh64"] = setting("xxh3_64", agreed=True)
    """The hash that names pages. It only nominates: stored token ids are compared before a page is used."""

    asynchronous: bool = setting(False, agreed=True)
    """Whether the engine launches work that ends after finish or abort returned. If true, the pages of an ended
    sequence stay in use until the engine calls ``retired(step)``; if false they are free at once."""


@dataclass(frozen=True, kw_only=True)
class PoolConfig(Section):
    """This rank's pages. May differ from rank to rank, but not in lockstep; the smallest pool decides what can be
    admitted."""

    pages: int = setting(1024, agreed=False, low=1, high=_MAX_PAGES)
    """Pages in this rank's pool, scratch pages included. The memory is the engine's: pages x page_size x bytes of
    one token."""

    scratch_pages: int = setting(0, agreed=False, low=0, high=_MAX_PAGES)
    """Pages of the pool that the cache never hands out, for padded rows of a batch to write to. Less than pages."""

    check: bool = setting(False, agreed=False)
    """Whether the invariants of the books are checked after every step. Slow; for tests and for finding a defect."""

    def check_fields(self) -> None:
        if self.scratch_pages >= self.pages:
            raise self.wrong(
                "scratch_pages", f"must be less than pages, which is {self.pages}, got {self.scratch_pages}"
            )


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Section):
    """How the ranks talk to each other."""

    transport: Literal["auto", "gloo", "mpi", "nccl"] = setting("auto", agreed=True)
    """What carries the one collective of a step: gloo over the host, NCCL on the GPUs, MPI over the host (for processes
    that mpirun has started, with mpi4py), or auto, which takes the backend of the process group that the engine gives,
    and for a group of our own NCCL if every rank has a GPU and gloo otherwise. Under MPI a process that dies ends the
    whole job at once, and no rank has time to say why (so does MPICH's mpirun); a stopped one ends at the deadline."""

    timeout_s: float = setting(30.0, agreed=False, low=0.001, high=86_400)
    """Seconds to wait for the other ranks in a step before GroupTimeout ends the group; and for so long a rank may give
    no sign of life to the watchdog before it is taken for stopped. The signs come from a thread, so a long step is no
    silence; only code that holds Python's lock (the GIL) for longer than this looks like a stopped process."""

    heartbeat_s: float | None = setting(None, agreed=True, low=0, high=3600)
    """Seconds between two signs of life of a rank, through the store of the process group. null: an eighth of
    timeout_s, 0.5 at most. A quarter of timeout_s at most. 0: no watchdog; a rank that is lost or fails outside the
    ballot is then noticed by deadlines alone."""

    def beat_s(self, timeout_s: float) -> float:
        """``heartbeat_s`` with its default resolved, for a group whose deadline is ``timeout_s``."""
        return self.heartbeat_s if self.heartbeat_s is not None else min(0.5, timeout_s / 8)

    def check_fields(self) -> None:
        if self.heartbeat_s is not None and self.heartbeat_s > self.timeout_s / 4:
            raise self.wrong("heartbeat_s", f"must be at most a quarter of timeout_s, which is {self.timeout_s:g}, got "
                                            f"{self.heartbeat_s:g}: silence is told by beats that did not come")


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Everything that can be set, in three sections; each may be left out, and each field has a default."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    """How the cache names, keeps and hands out pages."""

    # A host tier, once there is one, is refused here in lockstep: its copies end at another time on each rank.
    pool: PoolConfig = field(default_factory=PoolConfig)
    """This rank's pages."""

    group: GroupConfig = field(default_factory=GroupConfig)
    """How the ranks talk to each other."""


@overload
def load(path: str | os.PathLike[str]) -> Config: ...
@overload
def load(path: str | os.PathLike[str], cls: type[T]) -> T: ...
def load(path: str | os.PathLike[str], cls: type[Any] = Config) -> Any:
    """Read a YAML file into ``cls``: :class:`Config`, a class derived from it, or any configuration dataclass.

    Strict: a file that cannot be read, is not one YAML mapping, or has a key that is unknown, doubled, of the
    wrong type or impossible raises one ConfigError with the dotted path, file and line, what is allowed, and the
    nearest right name. Needs PyYAML (``pip install "distkv-cache[yaml]"``).
    """
    mapping, lines = read(path)
    return from_mapping(mapping, cls, source=os.fspath(path), lines=lines)


def read(path: str | os.PathLike[str]) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """The mapping in a YAML file, and the line of every dotted path in it. Raises ConfigError; see :func:`load`."""
    source = os.fspath(path)
    return _parser()(_read(source), source)


def _parser() -> Callable[[str, str], tuple[Mapping[str, Any], Mapping[str, int]]]:
    try:
        from distkv import _yaml
    except ModuleNotFoundError as error:
        if error.name != "yaml":
            raise
        raise ConfigError(
            "", 'reading a configuration file needs PyYAML: pip install "distkv-cache[yaml]"'
        ) from None
    return _yaml.parse


def _read(source: str) -> str:
    try:
        with Path(source).open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError("", f"cannot read the configuration file {source!r}: {reason}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError("", f"{source} is larger than {_MAX_FILE_BYTES} bytes: is it a configuration file?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError("", f"{source} is not UTF-8 text (byte {error.start}): is it a YAML file?") from None
