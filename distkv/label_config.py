"""The configuration of labels: pools of pages beside the first one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distkv._settings import Section, setting

__all__ = ["LabelConfig"]

_MAX_PAGES = (1 << 31) - 1  # page ids are int32


@dataclass(frozen=True, kw_only=True)
class LabelConfig(Section):
    """A pool beside ``main``, with page tables and an index of its own: pages of two labels never mix. The cache's
    section ``pool`` is the pool of ``main``."""

    name: str = setting(agreed=True, low=1, high=64)
    """By which requests and calls name it."""

    kind: Literal["full", "rolling", "sliding"] = setting("full", agreed=True)
    """full: like ``main``, for a second stream of the same tokens (guidance). rolling: a running sequence keeps a
    protected prefix and the newest tokens, and the engine says what to give up (``protect_prefix``,
    ``release_oldest``). sliding: for the layers of the model with sliding-window attention; every request that uses
    ``main`` uses it, and pages that the window has left are given up as tokens are committed."""

    pages: int = setting(1024, agreed=False, low=1, high=_MAX_PAGES)
    """Pages in this rank's pool, scratch pages included. The memory is the engine's."""

    scratch_pages: int = setting(0, agreed=False, low=0, high=_MAX_PAGES)
    """Pages of the pool that the cache never hands out. Less than pages."""

    host_pages: int = setting(0, agreed=False, low=0, high=_MAX_PAGES)
    """Pages of a host tier of its own, to which evicted pages go. 0: none. How copies are made is said in ``host``."""

    window_tokens: int | None = setting(None, agreed=True, low=1, high=1 << 24)
    """rolling and sliding: tokens that attention reads. sliding: the new token and those before it, as the model's own
    ``sliding_window`` counts; rolling: the protected prefix included."""

    allowance_tokens: int | None = setting(None, agreed=True, low=0, high=1 << 24)
    """rolling and sliding: tokens behind the window that are kept as well. sliding: a conversation may go on from any
    page boundary in so many tokens before its end, where it was edited; else it starts over. Pages are promised to
    every running sequence for it. null: sliding one page of tokens (and ``cache.next_token_depth``), so that the last
    full page can be gone on from, wherever the end lies; rolling none."""

    chunk_tokens: int | None = setting(None, agreed=True, low=1, high=1 << 24)
    """rolling and sliding: most tokens that a sequence has opened and not committed. null: one page of tokens. With
    ``cache.asynchronous`` also those that are committed, as long as passes that use them have not retired: twice what
    one pass computes, if the next one is launched before the last has ended."""

    def check_fields(self) -> None:
        if self.name == "main":
            raise self.wrong("name", "is main, which is the label of section pool; choose another one")
        if self.scratch_pages >= self.pages:
            raise self.wrong("scratch_pages", f"must be less than pages, which is {self.pages}, got "
                                              f"{self.scratch_pages}")
        if self.kind != "full" and self.window_tokens is None:
            raise self.wrong("window_tokens", f"is missing, and a {self.kind} label needs it: the tokens that "
                                              "attention reads")
        if self.kind == "full":
            for name in ("window_tokens", "allowance_tokens", "chunk_tokens"):
                if getattr(self, name) is not None:
                    raise self.wrong(name, "is for rolling and sliding labels, and this one is full")
