"""Runs: chains of index entries without a branch, the unit in which the index stores its entries."""

from __future__ import annotations

from array import array

import numpy as np

from distkv.chain import KeyChain
from distkv.keys import TOKEN_BYTES, Adapter
from distkv.pages import Ids, Pages


class Root:
    """Where the chains of one adapter and salt begin. ``identity`` is compared byte for byte, never by its hash."""

    __slots__ = ("adapter", "children", "identity", "salt")

    def __init__(self, chain: KeyChain) -> None:
        self.identity = chain.root
        self.adapter: Adapter | None = chain.adapter
        self.salt: str | None = chain.salt
        self.children: dict[int, Run] = {}


class Run:
    """Consecutive entries of one chain; only the last one may have children. Owned and changed by the index alone.

    ``start`` is the chain position, in pages, of the first entry. ``tokens`` are int32 little-endian bytes, ``pages``
    the places of the bytes, ``keys`` the keys, each one per entry. ``extras`` maps chain positions to encoded extras,
    and is None for the common run without any. ``parent`` is the run, or the root, that this one continues.

    A place is a page of the device pool or, counted on from there, one of the host tier. Device residency is
    prefix-closed: the first ``resident`` entries are on the device and no other is; ``warm`` children begin there.
    """

    __slots__ = ("children", "extras", "keys", "pages", "parent", "resident", "slot", "start", "tokens", "warm")

    def __init__(self, slot: int, parent: Run | Root, start: int) -> None:
        self.slot = slot
        self.parent = parent
        self.start = start
        self.tokens = bytearray()
        self.pages: array[int] = array("i")
        self.keys: list[int] = []
        self.extras: dict[int, bytes] | None = None
        self.children: dict[int, Run] | None = None
        self.resident = 0
        self.warm = 0

    def __len__(self) -> int:
        return len(self.pages)

    def __repr__(self) -> str:
        return f"Run(slot {self.slot}, pages {self.start} .. {self.start + len(self) - 1} of its chain)"

    @property
    def end(self) -> int:
        """Chain position behind the last entry."""
        return self.start + len(self.pages)

    def page_ids(self, first: int = 0, stop: int | None = None) -> Pages:
        """A copy of the places of entries ``first .. stop - 1`` of this run, of which there is at least one."""
        return np.frombuffer(self.pages[first:stop], np.int32)

    def set_resident(self, n: int) -> None:
        """So many leading entries are on the device from now on; the run above counts its warm children."""
        parent = self.parent
        if isinstance(parent, Run):
            parent.warm += (n > 0) - (self.resident > 0)
        self.resident = n

    def has(self, chain: KeyChain, used: int) -> bool:
        """Whether the first ``used`` entries have the tokens and extras of ``chain`` at their positions.

        A memcmp without a copy; the caller answers for ``len(chain) >= start + used`` pages.
        """
        size = TOKEN_BYTES * chain.namer.page_size
        at = self.start * size
        if used == len(self.pages):
            same = chain.buffer.startswith(self.tokens, at)
        else:
            with memoryview(self.tokens) as view, view[: used * size] as part:
                same = chain.buffer.startswith(part, at)
        return same and not ((self.extras or chain.has_extras) and not self.has_extras(chain, used))

    def has_extras(self, chain: KeyChain, used: int) -> bool:
        """Whether the first ``used`` entries have the extras of ``chain``: O(extras of this run), not O(pages)."""
        mine, end = self.extras or {}, self.start + used
        if mine and used < len(self.pages):
            mine = {i: data for i, data in mine.items() if i < end}
        return len(mine) == chain.count_extras(self.start, end) and mine.items() <= chain.extras.items()

    def append(self, chain: KeyChain, first: int, pages: Ids) -> None:
        """Adds the chain's pages ``first .. first + len(pages) - 1``, whose bytes lie in device ``pages``.

        All entries before them are on the device.
        """
        size = TOKEN_BYTES * chain.namer.page_size
        stop = first + len(pages)
        self.tokens += chain.buffer[first * size : stop * size]
        self.pages.frombytes(pages.astype(np.int32).tobytes())
        self.keys += chain.keys[first:stop]
        if chain.count_extras(first, stop):
            if self.extras is None:
                self.extras = {}
            self.extras.update(chain.extras_between(first, stop))
        self.set_resident(len(self.pages))

    def pop(self) -> tuple[int, int]:
        """Drops the last entry. Returns its place and key."""
        n, resident = len(self.pages), self.resident
        position, size = self.start + n - 1, len(self.tokens) // n
        if resident == n:
            if n == 1:
                self.set_resident(0)
            else:
                self.resident = n - 1
        del self.tokens[-size:]
        if self.extras and self.extras.pop(position, None) is not None and not self.extras:
            self.extras = None
        return self.pages.pop(), self.keys.pop()

    def cut(self, keep: int) -> None:
        """Drops the entries behind the first ``keep``."""
        self.set_resident(min(self.resident, keep))
        size = len(self.tokens) // len(self.pages)
        del self.tokens[keep * size :]
        del self.pages[keep:]
        del self.keys[keep:]
        if self.extras:
            self.extras = {i: data for i, data in self.extras.items() if i < self.start + keep} or None

    def split_off(self, at: int, slot: int) -> Run:
        """Moves the entries behind the first ``at``, and the children, to a new run that continues this one."""
        size = len(self.tokens) // len(self.pages)
        tail = Run(slot, self, self.start + at)
        tail.tokens = self.tokens[at * size :]
        tail.pages = self.pages[at:]
        tail.keys = self.keys[at:]
        if self.extras:
            tail.extras = {i: data for i, data in self.extras.items() if i >= tail.start} or None
        tail.children = self.children
        for child in (tail.children or {}).values():
            child.parent = tail
        tail.resident, tail.warm = max(0, self.resident - at), self.warm
        self.cut(at)
        self.children = {slot: tail}
        self.warm = int(tail.resident > 0)
        return tail
