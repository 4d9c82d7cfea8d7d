"""What the programs print: lines while they work, and the quickstart's table at the end."""

from __future__ import annotations

import logging
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from distkv import _streams
from distkv._text import counted
from distkv.engine.compare import GateReport
from distkv.engine.requests import Completion
from distkv.errors import DistKVError
from distkv.stats import Stats

__all__ = [
    "Output",
    "OutputLost",
    "Refusal",
    "Turn",
    "errors_by_rank",
    "print_report",
    "quiet",
    "quiet_transformers",
    "request_id",
    "short",
    "tier_line",
    "title",
    "with_titles",
]

_IDS = re.compile(r"request '([^']*/\d+/(?:on|off))'")


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message, answered twice."""

    conversation: str
    number: int
    off: Completion
    on: Completion

    @property
    def same_answer(self) -> bool:
        """Whether both runs gave the same tokens."""
        return self.off.token_ids == self.on.token_ids


@dataclass(frozen=True, slots=True)
class Refusal:
    """One user message that the engine could not take, and why. The rest of its conversation is left out."""

    conversation: str
    number: int
    reason: str


class OutputLost(DistKVError):
    """What the program prints goes nowhere. ``code`` is its exit code; the user was told, if somebody listens."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__("the output cannot be written")


class _Lines(logging.StreamHandler[TextIO]):
    """Log lines as a part of the output: for one that cannot be written there is no traceback, see :class:`Output`."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class Output:
    """Lines for whoever waits, from rank 0 alone, at once, with the time since the start.

    No line raises for what it is written to: the other ranks may be waiting for this one. ``check`` does, where they
    can be told, and ``exit_code`` says it at the end.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._began = time.monotonic()
        self._lost: OutputLost | None = None

    def line(self, text: str = "") -> None:
        """Prints one line."""
        self._write(sys.stdout, text)

    def phase(self, text: str) -> None:
        """Prints what begins now."""
        self.line(f"[{time.monotonic() - self._began:5.1f} s] {text}")

    def error(self, text: str) -> None:
        """Prints one line where errors go."""
        self._write(sys.stderr, text)

    def check(self) -> None:
        """Raises ``OutputLost`` if a line could not be written."""
        if self._lost is not None:
            raise self._lost

    def exit_code(self, code: int) -> int:
        """``code``, or that of output that went nowhere."""
        return self._lost.code if self._lost is not None else code

    def _write(self, stream: TextIO, text: str) -> None:
        if self._rank:
            return
        try:
            stream.write(text + "\n")
            stream.flush()
        except OSError as error:
            code = _streams.lost(error)
            self._lost = self._lost or OutputLost(2 if code is None else code)


def quiet(rank: int) -> None:
    """Plain log lines of our own, only from rank 0."""
    logging.basicConfig(format="         %(message)s", level=logging.WARNING, handlers=[_Lines(sys.stdout)])
    logging.getLogger("distkv").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    quiet_transformers()


def quiet_transformers() -> None:
    """No progress bars and no warnings of transformers."""
    import transformers

    theirs: Any = transformers.utils.logging  # has no types
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()


def request_id(conversation: str, number: int, mode: str) -> str:
    """The engine's name of a turn with the cache ``on`` or ``off``."""
    return f"{conversation}/{number}/{mode}"


def title(name: str) -> str:
    """A turn as people call it: ``line 3, turn 1``."""
    conversation, number, _ = name.rsplit("/", 2)
    return f"{conversation}, turn {number}"


def with_titles(text: str) -> str:
    """``text`` with titles in place of the engine's names of requests."""
    return _IDS.sub(lambda found: title(found.group(1)), text)


def errors_by_rank(errors: Sequence[str | None]) -> list[str]:
    """One line for each distinct error of the ranks (None: no error), with the ranks unless all have the same one."""
    ranks: dict[str, list[int]] = {}
    for rank, error in enumerate(errors):
        if error is not None:
            ranks.setdefault(error, []).append(rank)
    lines = []
    for error, those in ranks.items():
        some = len(those) < len(errors)
        where = f", rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))}" if some else ""
        lines.append(f"distkv{where}: {error}")
    return lines


def print_report(
    rows: Sequence[Turn | Refusal], report: GateReport, differences: Sequence[str], differing: set[str], out: Output,
    tier: str = "",
) -> None:
    """The table, the sums, what the host ``tier`` did, and what the check of the bits found."""
    turns = [row for row in rows if isinstance(row, Turn)]
    out.line()
    out.line("                     prompt   on the   on the            first token, s    same     same")
    out.line("conversation  turn   tokens   device     host  computed      off       on   answer   bits")
    for row in rows:
        start = f"{short(row.conversation, 12):<12}  {row.number:>4}"
        if isinstance(row, Refusal):
            out.line(f"{start}  refused: {row.reason}")
            continue
        off, on = row.off, row.on
        same = f"{_yes(row.same_answer):<6}   {_yes(on.id not in differing)}"
        parts = f"{on.prompt_tokens:>7}  {on.device_tokens:>7}  {on.host_tokens:>7}  {on.computed_tokens:>8}"
        out.line(f"{start}  {parts}  {off.ttft_s or 0:>7.2f}  {on.ttft_s or 0:>7.2f}   {same}")
    out.line()
    if not turns:
        out.line("No turn was answered, so there is nothing to check.")
        return
    sums = ("prompt_tokens", "cached_tokens", "host_tokens")
    prompt, cached, host = (sum(getattr(t.on, name) for t in turns) for name in sums)
    from_host = f", {host} of them read in from the host" * bool(host)
    out.line(f"prefill tokens saved: {cached} of {prompt} ({cached / prompt:.0%}){from_host}")
    if tier:
        out.line(tier)
    off_s, on_s = (statistics.median(getattr(t, mode).ttft_s or 0.0 for t in turns) for mode in ("off", "on"))
    out.line(f"median time to first token: {off_s:.2f} s without the cache, {on_s:.2f} s with it")
    what = f"{counted(report.rows, 'row')} of logits and {counted(report.pages, 'page')} on each rank"
    if differences:
        out.line(f"bits: {counted(len(differences), 'DIFFERENCE', 'DIFFERENCES')} in {what}")
        for line in differences[:5]:
            out.line(f"  {with_titles(line)}")
    else:
        out.line(f"bits: {what} are the same as without the cache")


def tier_line(stats: Stats, memory: str | None) -> str:
    """What a rank's host tier did; empty if it has none. ``memory``: pinned or not."""
    if not stats.host_pages:
        return ""
    line = (f"host tier of rank 0: {counted(stats.stores, 'page')} spilled, {stats.loads} read in; "
            f"{stats.host_pages - stats.host_free} of {counted(stats.host_pages, 'page')} in use, {memory}")
    failed = stats.store_failures + stats.load_failures
    for number, what in ((stats.dropped, "dropped for want of a place"), (failed, "not copied, for an error"),
                         (stats.suspended, "suspensions")):
        line += f", {number} {what}" * bool(number)
    return line


def short(text: str, n: int) -> str:
    """``text`` on one line of at most ``n`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= n else text[: n - 3] + "..."


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
