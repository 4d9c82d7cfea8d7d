"""What a sequence protects and releases in labels that roll: the engine says what. Sans-IO."""

from __future__ import annotations

from distkv.books import Call
from distkv.errors import SequenceError
from distkv.pagelist import PageList
from distkv.sequence_state import SequenceState
from distkv.windows import RollingLedger

__all__ = ["RollingCalls"]


class RollingCalls(SequenceState):
    """The calls for labels with a window that the engine moves; a part of :class:`distkv.Sequence`."""

    def protect_prefix(self, n: int) -> None:
        """The pages of the first ``n`` committed tokens, rounded up to whole pages, are never released: rolling labels.

        They are what is stored of such a label at the end, and count into its ``window_tokens``. What was found in the
        cache is protected already. Raises SequenceError for tokens that are not committed or were released, and for
        more than the window has place for.
        """
        self._must_run("protect_prefix", n)
        self._must_not_fork()
        end = -(-n // self._books.page_size)
        if not 0 <= n <= self._committed:
            raise SequenceError(f"sequence {self.id!r} cannot protect {n} tokens: {self._committed} are committed")
        rolling = self._rolling("protect_prefix")
        for pages, ledger in rolling:
            if pages.gone and end > pages.protected:
                raise SequenceError(f"sequence {self.id!r} cannot protect {n} tokens of label {pages.ledger.label!r}: "
                                    f"pages {pages.protected} .. {pages.first - 1} were released")
            if end >= ledger.most:
                raise SequenceError(f"sequence {self.id!r} cannot protect {n} tokens of label {ledger.label!r}: its "
                                    f"window has {ledger.most} pages, and one has to be left to write to")
        self._books.note(Call.PROTECT, self._tag, n)
        for pages, _ in rolling:
            pages.protect(end)

    def release_oldest(self, n: int) -> int:
        """Gives up the pages of the oldest ``n`` tokens behind the protected prefix, in every rolling label.

        Whole pages only, and committed tokens only; what is less than a page counts with the next call. Each page loses
        this sequence as an owner: one that others have stays with them. What is behind the first released token is not
        stored. Returns how many tokens were given up, in pages: positions stay what they are, and attention sees the
        protected prefix and what is left. :attr:`prefix_epoch` grows if any was.
        """
        self._must_run("release_oldest", n)
        self._must_not_fork()
        if n < 0:
            raise SequenceError(f"sequence {self.id!r} cannot release {n} tokens")
        size, rolling = self._books.page_size, self._rolling("release_oldest")
        released = left = 0
        self._books.note(Call.RELEASE, self._tag, n)
        for pages, _ in rolling:
            begin = max(pages.first, pages.protected)
            end = min(begin + (self._to_release + n) // size, self._committed // size)
            gone = pages.release(end)
            if len(gone):
                self._books.give_up(gone, pages)
            released = max(released, len(gone) * size)
            left = max(0, self._committed - max(begin, end) * size)
        self._to_release = min(self._to_release + n - released, left)
        self.prefix_epoch += bool(released)
        return released

    def _rolling(self, call: str) -> list[tuple[PageList, RollingLedger]]:
        found = [(pages, pages.ledger) for pages in self.lists if isinstance(pages.ledger, RollingLedger)]
        if not found:
            raise SequenceError(f"{call} on sequence {self.id!r}, which has no rolling label; it has "
                                + ", ".join(self.labels))
        return found
