"""Words for people, as messages and tables use them."""

from __future__ import annotations

__all__ = ["counted"]


def counted(n: int, one: str, many: str | None = None) -> str:
    """``1 page``, ``2 pages``; ``many`` where the plural is not made with an s."""
    return f"{n} {one if n == 1 else many or one + 's'}"
