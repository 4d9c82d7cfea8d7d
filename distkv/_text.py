"""Words and numbers for people, as messages and tables use them."""

from __future__ import annotations

__all__ = ["counted", "size"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def counted(n: int, one: str, many: str | None = None) -> str:
    """``1 page``, ``2 pages``; ``many`` where the plural is not made with an s."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def size(n: int) -> str:
    """Bytes in the unit that fits: ``1,536 B``, ``1.50 MiB``."""
    value, unit = float(n), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{n:,} B" if unit == 0 else f"{value:,.2f} {_UNITS[unit]}"
