"""The boundaries at which a windowed prefix may be used: a fixed number of places on an absolute grid. Sans-IO.

A rank has the window's state at some page boundaries and not at others, so the minimum of the ranks' longest ones may
be a boundary that some rank does not have. The ranks agree on each boundary by itself, by one element of the ballot:
its place is the same on all of them, because it follows from the prompt's length and the configuration alone.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["DEVICE", "HOST", "MISSING", "Grid"]

MISSING = 0
"""This rank does not have the boundary's window."""
HOST = 1
"""It has it, and has to read some of it in."""
DEVICE = 2
"""It has it on the device."""


class Grid:
    """Boundaries ``step, 2 * step, ...`` in pages, up to ``limit``; ``step`` is the power of two that is fine enough.

    Grids nest: what lies on a coarse one lies on every finer one.
    """

    __slots__ = ("count", "step")

    def __init__(self, limit: int, slots: int) -> None:
        """``limit``: most pages that may be matched; ``slots``: elements in the ballot, at least 1."""
        self.step = 1
        while self.step * slots < limit:
            self.step *= 2
        self.count = limit // self.step

    def below(self, pages: int) -> range:
        """The numbers (from 1) of boundaries of at most ``pages`` pages, the longest first."""
        return range(min(self.count, pages // self.step), 0, -1)

    def boundary(self, number: int) -> int:
        """Pages in front of the boundary of this number."""
        return number * self.step

    def longest(self, elements: Sequence[int], pages: int) -> tuple[int, int]:
        """The longest boundary of at most ``pages`` pages that is there, and how: (pages, DEVICE or HOST).

        ``elements[i]`` is that of boundary ``i + 1``. (0, DEVICE) if there is none: nothing is always there.
        """
        for i in self.below(pages):
            if elements[i - 1] != MISSING:
                return self.boundary(i), int(elements[i - 1])
        return 0, DEVICE
