"""Rows of a benchmark: what was measured, beside what, and whether a target was reached; as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from distkv.bench.timing import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured quantity. ``value`` is the median of a timed row and the count of a counted one."""

    name: str
    unit: str
    value: float
    sample: Sample | None = None
    floor: str = ""
    """Name of the floor that ``floor_value`` is the median of: what this machine needs for the part that no
    bookkeeping can save."""
    floor_value: float | None = None
    target: float | None = None
    at_least: bool = False
    """Whether the target is a least value, such as a hit share, and not a most."""
    exactly: bool = False
    """Whether the target is a count that must be met: anything else is a defect and not a slow machine."""
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the target was reached; None if there is none."""
        if self.target is None:
            return None
        if self.exactly:
            return self.value == self.target
        return self.value >= self.target if self.at_least else self.value <= self.target

    def without_target(self) -> Row:
        """The same measurement, compared with nothing."""
        return replace(self, target=None)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        sample = self.sample
        timed = {"median": sample.median, "mean": sample.mean, "p99": sample.p99, "n": sample.n} if sample else {}
        ratio = self.value / self.floor_value if self.floor_value else None
        bound = "exactly" if self.exactly else "at least" if self.at_least else "at most"
        return {"name": self.name, "unit": self.unit, "value": self.value, **timed, "floor": self.floor,
                "floor_value": self.floor_value, "ratio_to_floor": ratio, "target": self.target,
                "bound": bound if self.target is not None else None, "reached": self.reached, "note": self.note}


def number(value: float | None) -> str:
    """Three digits that matter, and no more."""
    if value is None:
        return ""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table."""
    head = ["what", "unit", "median or count", "mean", "p99", "n", "floor", "x floor", "target", "reached"]
    lines = []
    for row in rows:
        sample = row.sample
        bound = "= " if row.exactly else ">= " if row.at_least else "<= "
        lines.append([
            row.name, row.unit, number(row.value),
            *((number(sample.mean), number(sample.p99), number(sample.n)) if sample else ("", "", "")),
            f"{row.floor}: {number(row.floor_value)}" if row.floor else "",
            f"{row.value / row.floor_value:.1f}" if row.floor_value else "",
            bound + number(row.target) if row.target is not None else "",
            {True: "yes", False: "NO", None: ""}[row.reached],
        ])
    return markdown(head, lines)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are also aligned for a terminal."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    out = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
           for line in (head, *lines)]
    out.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(out)
