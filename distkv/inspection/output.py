"""Aligned columns and numbers for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distkv._text import size

__all__ = ["columns", "gib", "size"]


def columns(rows: Iterable[Sequence[str]]) -> str:
    """The rows as lines, each column as wide as its widest cell; the last is as long as it is."""
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*[row[:-1] for row in table], strict=True)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in table
    )


def gib(n: int) -> str:
    """Bytes in GiB, two digits."""
    return f"{n / (1 << 30):,.2f} GiB"
