"""The memory that a batch's tables are written to: allocated once, and not reused before its copy has ended.

Sans-IO: numpy arrays, or anything that numpy can view without a copy, as torch's CPU tensors, pinned ones included.
What lies on a GPU is filled by a copy from such a buffer, and :class:`TableRing` keeps a buffer until its copy has
ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from distkv.errors import TableError

__all__ = ["Event", "TableBuffers", "TableRing"]

_FIELDS = {  # of each buffer: dtype, and the measures of its shape with what is added to each
    "indptr": (np.int32, (("rows", 1),)),
    "indices": (np.int32, (("indices", 0),)),
    "last_page_len": (np.int32, (("rows", 0),)),
    "seq_lens": (np.int32, (("rows", 0),)),
    "query_start": (np.int32, (("rows", 1),)),
    "slot_mapping": (np.int64, (("tokens", 0),)),
    "positions": (np.int64, (("tokens", 0),)),
    "block_table": (np.int32, (("rows", 0), ("pages_per_row", 0))),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class TableBuffers:
    """Fixed memory for the tables of any batch up to a size. Made once; each fill overwrites the last.

    Fields are named as those of :class:`Tables`, with room for more. A field may be a numpy array or a CPU tensor of
    torch, which is viewed and not copied; it has to be contiguous and of the dtype that Tables says. The caller owns
    the memory. Raises TableError for a field that is not so.
    """

    indptr: Any
    indices: Any
    last_page_len: Any
    seq_lens: Any
    query_start: Any
    slot_mapping: Any
    positions: Any
    block_table: Any

    def __post_init__(self) -> None:
        for name, (dtype, shape) in _FIELDS.items():
            object.__setattr__(self, name, _view(name, getattr(self, name), np.dtype(dtype), len(shape)))

    @classmethod
    def make(cls, *, rows: int, tokens: int, pages_per_row: int, indices: int | None = None) -> TableBuffers:
        """New numpy buffers for at most ``rows`` rows (padded ones included), ``tokens`` new tokens in all,
        ``pages_per_row`` pages of one row, and ``indices`` pages of all rows (default: rows * pages_per_row)."""
        shapes = cls.shapes(rows=rows, tokens=tokens, pages_per_row=pages_per_row, indices=indices)
        return cls(**{name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()})

    @staticmethod
    def shapes(*, rows: int, tokens: int, pages_per_row: int,
               indices: int | None = None) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype (``int32`` or ``int64``) of every buffer, for whoever allocates them. Pinned, with torch::

            shapes = TableBuffers.shapes(rows=64, tokens=64, pages_per_row=1024)
            TableBuffers(**{name: torch.zeros(shape, dtype=getattr(torch, dtype), pin_memory=True)
                            for name, (shape, dtype) in shapes.items()})
        """
        sizes = {"rows": rows, "tokens": tokens, "pages_per_row": pages_per_row,
                 "indices": rows * pages_per_row if indices is None else indices}
        for name, size in sizes.items():
            if size < 1:
                raise TableError(f"buffers for {size} {name} hold nothing", name, 1, size)
        return {name: (tuple(sizes[measure] + more for measure, more in shape), np.dtype(dtype).name)
                for name, (dtype, shape) in _FIELDS.items()}

    def check_room(self, *, rows: int, tokens: int, indices: int, pages_per_row: int) -> None:
        """Raises TableError, which names the buffer and by how much it is too small, unless a batch of this size fits.

        ``pages_per_row`` is the batch's widest row.
        """
        batch = {"rows": rows, "tokens": tokens, "pages_per_row": pages_per_row, "indices": indices}
        for name, (_, shape) in _FIELDS.items():
            for axis, (measure, more) in enumerate(shape):
                needed, has = batch[measure] + more, getattr(self, name).shape[axis]
                if needed > has:
                    where = f"{name} (axis {axis})" if len(shape) > 1 else name
                    raise TableError(f"the buffer {where} has {has} elements and this batch needs {needed}, "
                                     f"{needed - has} more; make the buffers larger or the batch smaller",
                                     name, needed, has)


def _view(name: str, buffer: object, dtype: np.dtype[Any], axes: int) -> npt.NDArray[Any]:
    try:
        view = np.asarray(buffer)
    except TypeError as error:  # a tensor that is not on the CPU
        raise TableError(f"the buffer {name} cannot be written from the host ({error}); fill a CPU buffer and copy it",
                         name) from error
    if view.dtype != dtype or view.ndim != axes or not view.flags.c_contiguous or not view.flags.writeable:
        raise TableError(f"the buffer {name} must be a contiguous, writable {dtype} array with {axes} axis(es), not "
                         f"{view.dtype} {list(view.shape)}", name)
    if view.size and view.ctypes.data != np.asarray(buffer).ctypes.data:  # two copies lie at two places
        raise TableError(f"the buffer {name} is a {type(buffer).__name__}, which numpy can only copy", name)
    return view


class Event(Protocol):
    """What tells that a copy has ended: ``torch.cuda.Event`` is one."""

    def synchronize(self) -> object:
        """Returns when everything before the event has ended."""


class TableRing:
    """Buffers that are used in turn, none before the copy that reads it has ended.

    ::

        buffers = ring.acquire()                            # waits for this buffer's last copy, if that still runs
        tables = cache.tables(batch, out=buffers, pad_to=64)
        ...                                                 # enqueue the copies to the GPU, record an event behind them
        ring.release(event)

    An engine that never has more than ``len(buffers) - 1`` copies in flight never waits. One thread calls it.
    """

    def __init__(self, buffers: Iterable[TableBuffers]) -> None:
        """Takes over at least one buffer; the memory stays the caller's."""
        self._buffers = list(buffers)
        if not self._buffers:
            raise TableError("a ring needs at least one buffer", "buffers", 1, 0)
        self._events: list[Event | None] = [None] * len(self._buffers)
        self._next = 0
        self._acquired = False

    def __len__(self) -> int:
        return len(self._buffers)

    def acquire(self) -> TableBuffers:
        """The next buffer, when its last copy has ended. Raises TableError if the one before was not released."""
        if self._acquired:
            raise TableError("the buffer acquired before was not released; each acquire needs one release", "ring")
        event, self._events[self._next] = self._events[self._next], None
        if event is not None:
            event.synchronize()
        self._acquired = True
        return self._buffers[self._next]

    def release(self, event: Event | None = None) -> None:
        """Gives the buffer back. ``event``: what ends when it may be overwritten; None: it may be at once."""
        if not self._acquired:
            raise TableError("no buffer is acquired", "ring")
        self._events[self._next] = event
        self._next = (self._next + 1) % len(self._buffers)
        self._acquired = False
