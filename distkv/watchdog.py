"""The watch over a group: a sign of life from every rank and the first fault, through a store beside the collectives.

Every rank writes a beat into the store and reads the others' beats and one key for the first fault. The collectives are
not touched: no rank waits for another one here, and a step pays nothing.

Two threads, because a store does not answer if the process that keeps it is stopped: one talks to the store, and the
other watches that one and calls the callbacks. Silence is counted in the reader's own time, and a reader that was
paused itself counts nothing for the pause, so that a stopped process that goes on does not accuse the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from distkv.faults import LOST, SILENT, Fault, FaultBoard

logger = logging.getLogger(__name__)

_NO_FAULT = "-"
_LEFT = "left"
_KEEPER = "the process that keeps the group's store (rank 0, or the launcher)"


class BeatStore(Protocol):
    """What is used of a ``torch.distributed.Store``. A store that breaks raises RuntimeError."""

    def set(self, key: str, value: str) -> None:
        """Writes without waiting."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def multi_get(self, keys: list[str]) -> Sequence[bytes]:
        """The values of keys that are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Writes if the value is the expected one (empty: or if there is none); returns what is there then."""


class Watchdog:
    """Watches one group from one rank, from :meth:`start` to :meth:`close`. Owns its two threads, and ``store``.

    ``store`` must be used by nobody else in this process, because a call of it may block; its keys must be new. All
    ranks start theirs at about the same time. ``limit_s``: so long without a beat, and one interval of its own more (at
    least four), and a rank is taken for stopped. ``beat_s``: the interval between beats.
    """

    def __init__(self, store: BeatStore, board: FaultBoard, rank: int, size: int, *, limit_s: float,
                 beat_s: float) -> None:
        self.limit_s, self.beat_s = limit_s, beat_s
        self._store, self._board, self._rank = store, board, rank
        self._keys = [f"beat/{r}" for r in range(size)] + ["fault"]
        self._peers = [r for r in range(size) if r != rank]
        self._beats: dict[int, bytes] = dict.fromkeys(self._peers, b"")
        self._quiet: dict[int, float] = dict.fromkeys(self._peers, 0.0)
        self._missing = set(self._peers)
        self._answers = 0
        self._heard = 0
        self._linger_s = 3 * beat_s if rank == 0 else 0.0
        self._to_report: Fault | None = None
        self._reported = threading.Event()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._talker = threading.Thread(target=self._talk, name=f"distkv-beat-{rank}", daemon=True)
        self._judge = threading.Thread(target=self._watch, name=f"distkv-watch-{rank}", daemon=True)

    def start(self) -> None:
        """Starts to beat and to watch."""
        self._talker.start()
        self._judge.start()

    def close(self) -> None:
        """Says that this rank leaves, and ends the threads; no callback is called afterwards. Never blocks for long:
        three beats on rank 0 after a fault, a second if the store does not answer.

        A thread that is stuck in a store that does not answer is left behind; it is a daemon and does nothing more.
        """
        self._closing.set()
        self._wake.set()
        self._board.known.set()
        for thread in (self._talker, self._judge):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(1.0 + self._linger_s)
        if self._talker.is_alive():
            logger.warning("the group's store does not answer; its thread is left behind")

    # ---- called by the rank's own thread

    def report(self, fault: Fault) -> Fault:
        """Writes a fault for all ranks, within a second or so; returns the first one of the group, as far as known."""
        self._to_report = fault
        self._wake.set()
        self._reported.wait(min(1.0, self.limit_s))
        return self._board.post(fault)

    def explain(self, *, broken: bool) -> Fault | None:
        """After a wait that failed: waits a little for a fault, or for the ranks that give no more sign of life.

        ``broken``: a connection broke; else a deadline passed. None if nothing is known after some beats.
        """
        # Read twice at once: a rank that failed has said so before its connections broke, and the last beat of one that
        # was killed may not be read yet.
        for _ in range(2):
            answers = self._answers
            self._wake.set()
            end = time.monotonic() + self.beat_s
            while answers == self._answers and time.monotonic() < end and not self._board.known.wait(0.005):
                pass
        before = dict(self._beats)
        self._board.known.wait(max(0.3, 3.5 * self.beat_s))  # within the deadline: see group.heartbeat_s
        if self._board.fault is not None or self._closing.is_set():
            return self._board.fault
        silent = [r for r in self._peers if self._beats[r] == before[r]]
        if not silent:
            return None
        lost = silent[0]
        step, left = self._last_step(lost), before[lost] == _LEFT.encode()
        if left:
            text = f"rank {lost} has left the group{_by(step)}: it closed it, or its process ended"
        elif broken:
            text = f"rank {lost} is gone{_by(step)}: connections broke, and it gives no sign of life"
        else:
            text = f"rank {lost} is stopped or gone{_by(step)}: it gives no sign of life"
        kind = LOST if broken or left else SILENT
        return self.report(Fault(rank=lost, step=step, kind=kind, text=text, seen_by=self._rank, seconds=self.limit_s))

    # ---- the thread that talks to the store

    def _talk(self) -> None:
        try:
            # the first one who comes makes the key
            self._store.compare_set("fault", "", _NO_FAULT)
            last = time.monotonic()
            while not self._closing.is_set():
                now = time.monotonic()
                for peer in self._peers:
                    self._quiet[peer] += min(now - last, 2 * self.beat_s)
                last = now
                self._beat()
                self._accuse()
                self._wake.wait(self.beat_s)
                self._wake.clear()
            self._wait_until_heard()
            self._store.set(self._keys[self._rank], _LEFT)
        except Exception as error:  # mostly RuntimeError, of the store; handed to the rank's own thread
            if not self._closing.is_set():
                logger.debug("the group's store broke", exc_info=True)
                text = f"{_KEEPER} is gone: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
                self._board.post(Fault(rank=None, step=self._board.step, kind=LOST, text=text, seen_by=self._rank))
        finally:
            self._reported.set()
            del self._store  # closes its connection

    def _wait_until_heard(self) -> None:
        """Rank 0 may keep the store: it does not leave after a fault before the others have read it, or some beats."""
        end = time.monotonic() + self._linger_s
        while self._board.fault is not None and time.monotonic() < end:
            self._beat()
            living = [r for r in self._peers if r != self._board.fault.rank and self._beats[r] != _LEFT.encode()]
            if all(_has_heard(self._beats[r]) for r in living):
                return
            time.sleep(0.02)

    def _beat(self) -> None:
        fault = self._to_report
        if fault is not None and not self._reported.is_set():
            first = self._store.compare_set("fault", _NO_FAULT, fault.encode())
            self._hear(first)
            self._reported.set()
        self._store.set(self._keys[self._rank], f"{self._answers} {self._board.step} {self.beat_s} {self._heard}")
        if self._missing:  # a value that is not there would be waited for
            self._missing = {r for r in self._missing if not self._store.check([self._keys[r]])}
        there = [r for r in self._peers if r not in self._missing]
        *beats, first = self._store.multi_get([self._keys[r] for r in there] + ["fault"])
        for peer, beat in zip(there, beats, strict=True):
            if beat != self._beats[peer] or beat == _LEFT.encode():
                self._beats[peer], self._quiet[peer] = beat, 0.0
        self._answers += 1
        self._hear(first)

    def _hear(self, first: bytes) -> None:
        if first.decode() != _NO_FAULT:
            self._heard = 1
            self._board.post(Fault.decode(first))

    def _accuse(self) -> None:
        """Reports a rank that was silent for too long, unless there is a fault already."""
        for peer in self._peers:
            beat = self._beats[peer]
            # the last beat may have been one interval old when the rank stopped: whoever pauses for the limit is safe
            interval = _interval_of(beat)
            limit = max(self.limit_s + interval, 4 * interval)
            if self._quiet[peer] <= limit or self._board.fault is not None:
                continue
            step = self._last_step(peer)
            text = (f"rank {peer} is stopped, stuck or gone{_by(step)}: no sign of life for {limit:g} s "
                    f"(group.timeout_s is {self.limit_s:g})")
            fault = Fault(rank=peer, step=step, kind=SILENT, text=text, seen_by=self._rank, seconds=limit)
            self._hear(self._store.compare_set("fault", _NO_FAULT, fault.encode()))

    def _last_step(self, peer: int) -> int:
        """The step in which a silent rank is. It took part in the ballots that this rank has behind it."""
        return max(_step_of(self._beats[peer]), self._board.step)

    # ---- the thread that watches the other one

    def _watch(self) -> None:
        heard, quiet, last = self._answers, 0.0, time.monotonic()
        while not self._board.known.wait(self.beat_s):
            now = time.monotonic()
            quiet = 0.0 if heard != self._answers else quiet + min(now - last, 2 * self.beat_s)
            heard, last = self._answers, now
            if quiet > self.limit_s:
                text = f"{_KEEPER} is stopped or gone: the store did not answer for {self.limit_s:g} s"
                self._board.post(Fault(rank=None, step=self._board.step, kind=SILENT, text=text, seen_by=self._rank,
                                       seconds=self.limit_s))
        fault = self._board.fault
        if not self._closing.is_set() and not self._board.tell() and fault is not None and fault.rank != self._rank:
            logger.warning("rank %d: a peer failed (%s), and no callback of group.on_fault is registered: this rank "
                           "may wait in collectives of its own until their deadline", self._rank, fault.text)


def _step_of(beat: bytes) -> int:
    parts = beat.split()
    return int(parts[1]) if len(parts) == 4 else -1


def _interval_of(beat: bytes) -> float:
    parts = beat.split()
    return float(parts[2]) if len(parts) == 4 else 0.0


def _has_heard(beat: bytes) -> bool:
    return beat.split()[3:] == [b"1"]


def _by(step: int) -> str:
    return f", in step {step} of the group" if step >= 0 else ", before the first step"
