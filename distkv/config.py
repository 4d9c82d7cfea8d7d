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
from distkv._settings import Derived, Section, agreed_fields, setting
from distkv.errors import ConfigError
from distkv.label_config import LabelConfig

__all__ = [
    "CacheConfig",
    "Config",
    "GroupConfig",
    "HostConfig",
    "LabelConfig",
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
_MAX_GIB = 1 << 20


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

    window_boundaries: int = setting(64, agreed=True, low=1, high=4096)
    """With a sliding label: at how many places of a prompt one step asks whether a prefix can be used there. They lie
    on a grid: every page of a prompt of so many pages, every second one of a prompt twice as long, and so on. It sets
    the size of the collective."""

    key_function: Literal["xxh3_64", "xxh64"] = setting("xxh3_64", agreed=True)
    """The hash that names pages. It only nominates: stored token ids are compared before a page is used."""

    lookahead_tokens: int = setting(0, agreed=True, low=0, high=65_536)
    """Tokens that the engine may draft ahead of what is accepted. A request is promised pages for prompt, output limit
    and so many tokens, so drafts behind the last token of an answer need not be clipped."""

    next_token_depth: int = setting(0, agreed=True, low=0, high=256)
    """For draft layers in the cached KV (EAGLE, MTP) whose keys and values at a position also depend on the tokens
    behind it: on how many. A page is then shared only by requests that have these tokens behind it in common, too, and
    one whose next tokens are not known yet is not stored. 0: a position depends on nothing behind it."""

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
class HostConfig(Section):
    """The host tier: memory of the CPU to which pages go that the pool has no place for, and from which they come back.
    There is one if pages, gib_per_rank or gib_per_node is given (one of them). Not in lockstep."""

    pages: int | None = setting(None, agreed=False, low=1, high=_MAX_PAGES)
    """Host pages of this rank, those of preemption_pages included. A page takes the bytes that it has in the pool of
    this rank."""

    gib_per_rank: float | None = setting(None, agreed=False, above=0, high=_MAX_GIB)
    """Instead of pages: GiB (2**30 bytes) of host memory for this rank, of which whole pages are taken. At least one
    page."""

    gib_per_node: float | None = setting(None, agreed=False, above=0, high=_MAX_GIB)
    """Instead of pages: GiB of host memory for all ranks of this rank's node together, shared equally: those of the
    group, or all that the launcher has started there if they are more. A container is a node of its own."""

    preemption_pages: int = setting(0, agreed=False, low=0, high=_MAX_PAGES)
    """How many of the host pages are kept for suspended requests; the tier has the others. Less than all. Of use only
    where sequences are suspended: with ``engine.reserve_tokens``, or if an engine of your own calls ``suspend``. Give
    the pages of as many requests as may be suspended at a time; what finds no place is cached as any other page is, and
    computed again if it is lost."""

    write_policy: Literal["evict", "finish"] = setting("evict", agreed=False)
    """When a page is copied to the host. evict: when the pool gives it up. finish: when its request has finished, so
    that giving it up needs no copy, as long as the tier has room; pages that are never given up are then copied for
    nothing."""

    loading_slots: int = setting(8, agreed=True, low=1, high=1024)
    """How many sequences that are being read in one step asks about, the first admitted first. More than so many at a
    time wait their turn to get ready; their loads go on. It sets the size of the collective."""

    load_timeout_s: float = setting(10.0, agreed=False, low=0.001, high=86_400)
    """Seconds that a load may take, without its wait for others that go on. Then the request goes on without it, on
    every rank, and computes those pages again."""

    skip_slow_loads: bool = setting(True, agreed=False)
    """Whether pages are computed again where loading them would take longer, as far as both have been measured. Does
    nothing until the engine has told what prompts cost, by ``PrefixCache.prefill_took``."""

    prefetch: bool = setting(True, agreed=False)
    """Whether pages are loaded for requests that still wait, into pages of this rank that nobody needs. At admission
    they count as tokens of the device, not as ``host_tokens``: see ``prefetched`` and ``loads`` of the statistics."""

    copy_threads: int = setting(2, agreed=False, low=1, high=256)
    """Threads that copy pages when the pool is on the CPU. A GPU copies with streams of its own."""

    chunk_gib: float = setting(1.0, agreed=False, above=0, high=_MAX_GIB)
    """GiB of host memory that are taken, and pinned, at a time; whole pages, at least one. Less if other processes of
    the host use CUDA: while one piece is pinned all of them stall, the longer the larger it is."""

    require_pinned: bool = setting(False, agreed=False)
    """Whether a start without pinned memory is an error. Otherwise plain memory is taken where none can be pinned, and
    copies to and from a GPU are slower. For pinned memory CuPy is needed."""

    @property
    def configured(self) -> bool:
        """Whether a host tier is asked for."""
        return bool(self._sizes())

    def _sizes(self) -> list[str]:
        return [name for name in ("pages", "gib_per_rank", "gib_per_node") if getattr(self, name) is not None]

    def check_fields(self) -> None:
        sizes = self._sizes()
        if len(sizes) > 1:
            raise self.wrong(sizes[1], f"is given, and {sizes[0]} too: give the size once, as pages, gib_per_rank or "
                                       "gib_per_node")
        if self.preemption_pages and not sizes:
            raise self.wrong("preemption_pages", f"is {self.preemption_pages}, and there is no host tier to take them "
                                                 "from: give pages, gib_per_rank or gib_per_node")
        if self.pages is not None and self.preemption_pages >= self.pages:
            raise self.wrong("preemption_pages", f"must be less than pages, which is {self.pages}, got "
                                                 f"{self.preemption_pages}")


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
    """Everything that can be set, in four sections; each may be left out, and each field has a default."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    """How the cache names, keeps and hands out pages."""

    pool: PoolConfig = field(default_factory=PoolConfig)
    """This rank's pages."""

    host: HostConfig = field(default_factory=HostConfig)
    """The host tier."""

    group: GroupConfig = field(default_factory=GroupConfig)
    """How the ranks talk to each other."""

    labels: tuple[LabelConfig, ...] = setting((), agreed=False)
    """Pools beside that of ``main``, each with the fields of its own section."""

    def check_fields(self) -> None:
        names = [label.name for label in self.labels]
        for name in names:
            if names.count(name) > 1:
                raise self.wrong("labels", f"has two labels of the name {name!r}")
        if self.cache.agreement == "lockstep" and any(label.host_pages for label in self.labels):
            raise self.wrong("labels", "a label with host_pages and cache.agreement lockstep exclude each other; set "
                                       "cache.agreement to minimum")
        if self.host.configured and self.cache.agreement == "lockstep":
            raise self.wrong("host", "a host tier and cache.agreement lockstep exclude each other: copies end at "
                                     "another time on each rank, and may fail on one; set cache.agreement to minimum")

    def derived(self) -> Mapping[str, Derived]:
        host, found = self.host, {}
        if host.gib_per_node is not None:
            found["host.gib_per_rank"] = Derived(f"{host.gib_per_node:g} / ranks of the node", "host.gib_per_node")
        if host.configured and host.pages is None:
            given = "host.gib_per_rank" if host.gib_per_rank is not None else "host.gib_per_node"
            found["host.pages"] = Derived("host.gib_per_rank / bytes of a page", given)
        return found


@overload
def load(path: str | os.PathLike[str]) -> Config: ...
@overload
def load(path: str | os.PathLike[str], cls: type[T]) -> T: ...
def load(path: str | os.PathLike[str], cls: type[Any] = Config) -> Any:
    """Read a YAML file into ``cls``: :class:`Config`, a class derived from it, or any configuration dataclass.

    Strict: a file that cannot be read, is not one YAML mapping, or has a key that is unknown, doubled, of the
    wrong type or impossible raises one ConfigError with the dotted path, file and line, what is allowed, and the
    nearest right name. Needs PyYAML (in the checkout: ``pip install ".[yaml]"``).
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
            "", 'reading a configuration file needs PyYAML: pip install ".[yaml]" in the checkout of distkv'
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
