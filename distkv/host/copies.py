"""One page on its way between the pool and the host tier, and what every copy engine does with it.

Who decides which page goes where is the books' business (:mod:`distkv.host.tier`). An engine moves bytes, in the order
that a :class:`Copy` asks for, and tells when they have arrived; nothing is readable before it has said so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distkv.host.memory import HostRows

__all__ = ["Copy", "CopyEngine", "CopyState", "Kind"]


class Kind(Enum):
    """Which way a page goes."""

    STORE = "store"
    """Device to host: a spill."""
    LOAD = "load"
    """Host to device."""


class CopyState(Enum):
    """Where a copy is. Only its engine changes it, in ``submit``, ``poll`` and ``fence``."""

    PREPARED = "prepared"
    """Made, and not handed to an engine yet."""
    RUNNING = "running"
    """Handed over. Its source must not be written and its target neither read nor written."""
    DONE = "done"
    """All bytes are there."""
    FAILED = "failed"
    """It has ended and its target holds nothing of use; ``error`` says why. Nothing of it touches memory any more."""


@dataclass(slots=True, eq=False)
class Copy:
    """One page, one way. Made by the tier, moved by an engine, owned by whoever asked for it."""

    kind: Kind
    device: int
    """Page of the pool."""
    host: int
    """Page of the host tier."""
    after: tuple[Copy, ...] = ()
    """Copies that must have ended, well or not, before this one touches its target."""
    source: Copy | None = None
    """The store that fills the host page which this load reads. If it fails, so does this one."""
    state: CopyState = CopyState.PREPARED
    error: BaseException | None = None
    overdue: bool = False
    """A load that has run, or waited without another one ending, for longer than the limit. It still runs: its pages
    stay in use until it ends."""
    order: int = 0
    """Set by its engine: the how-manieth copy it is."""
    use: int = 0
    """The books' own: for the how-manieth time the host page was taken when a load of it was ordered."""

    @property
    def ended(self) -> bool:
        """Whether nothing of it touches memory any more."""
        return self.state in (CopyState.DONE, CopyState.FAILED)


class CopyEngine(ABC):
    """Moves pages. All methods are called by one thread, the cache's; none but ``fence`` and ``wait`` blocks.

    Order of bytes. A store reads what the kernels launched before its ``submit`` have written. A load writes after
    all kernels launched before its ``submit`` have read. A copy waits for those that it names. What is launched after
    a ``fence(copies)`` comes behind those copies. Loads overtake stores that wait.
    """

    rows: HostRows | None = None
    """The memory of the host pages; None for an engine that moves no bytes."""

    @abstractmethod
    def submit(self, copies: Sequence[Copy]) -> None:
        """Takes prepared copies, which are running afterwards (or have failed). Does not raise for a single copy."""

    @abstractmethod
    def poll(self) -> Sequence[Copy]:
        """The copies that have ended since the last call, in any order; marks loads that are overdue."""

    @abstractmethod
    def fence(self, copies: Iterable[Copy]) -> None:
        """What the engine's compute launches from now on comes after these copies, whether they end well or not."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Until a running copy has ended, or for so long; at once if none runs. For an engine that has nothing else to
        do; changes nothing."""

    @abstractmethod
    def load_s(self, pages: int) -> float | None:
        """Seconds that loading so many pages takes, as measured so far; None if nothing has been measured."""

    @abstractmethod
    def close(self) -> None:
        """Waits for what runs, within the engine's time limit, and gives back threads, streams and memory."""
