"""The ordered hand-off: once in every engine step rank 0 tells all ranks what happened since the last one.

It is the engine's collective, on the engine's group, and not the cache's. One broadcast of fixed size carries a message
that fits (a step without news, an abort, a short prompt); a longer one is followed by a second for the rest.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distkv.engine.beam import Beams
from distkv.engine.sampling import Sampling
from distkv.errors import DistKVError
from distkv.torch_group import deadline, named_failures

__all__ = ["Handoff", "NewRequest", "News"]

_INLINE = 1024
_HEAD = 16
_MAGIC = 0x766B7364  # catches two programs, or two versions, that share a group by mistake


@dataclass(frozen=True, kw_only=True, eq=False)
class NewRequest:
    """One request as it goes to all ranks. ``matched_cap``: rank 0's own match in pages, or None for no cap."""

    id: str
    tokens: np.ndarray  # int32 [n]
    output_limit: int
    salt: str | None = None
    adapter: tuple[str, int] | None = None
    """Name and generation."""
    conversation: str | None = None
    read: bool = True
    write: bool = True
    priority: int = 0
    matched_cap: int | None = None
    sampling: Sampling | None = None
    """None: greedy."""
    n: int = 1
    beams: Beams | None = None
    """None: no beam search."""

    @property
    def sequences(self) -> int:
        """How many sequences it may come to."""
        return self.beams.width if self.beams is not None else self.n


@dataclass(frozen=True, kw_only=True)
class News:
    """What all ranks apply in one order, the cache's: a bump or reset, then aborts, then requests. At the end of the
    cache's step, suspends.

    ``shutdown`` ends the followers' loop, and the rest of its message is not applied; ``failed`` goes with it and says
    that rank 0's own work went wrong.
    """

    requests: tuple[NewRequest, ...] = ()
    aborts: tuple[str, ...] = ()
    suspends: tuple[str, ...] = ()
    """Running requests; others of this name are left as they are."""
    weights_version: str | None = None
    reset: bool = False
    shutdown: bool = False
    failed: bool = False

    def encode(self) -> bytes:
        """Header as JSON, then the token ids of all requests as little-endian int32."""
        requests = [
            {
                **vars(r),
                "sampling": asdict(r.sampling) if r.sampling is not None else None,
                "beams": asdict(r.beams) if r.beams is not None else None,
                "tokens": len(r.tokens),
            }
            for r in self.requests
        ]
        header = json.dumps({**vars(self), "requests": requests}).encode()
        tokens = b"".join(np.ascontiguousarray(r.tokens, dtype="<i4").tobytes() for r in self.requests)
        return len(header).to_bytes(4, "little") + header + tokens

    @classmethod
    def decode(cls, data: bytes) -> News:
        """The inverse of :meth:`encode`."""
        end = 4 + int.from_bytes(data[:4], "little")
        header: dict[str, Any] = json.loads(data[4:end])
        tokens = np.frombuffer(data, dtype="<i4", offset=end).astype(np.int32, copy=False)
        requests, at = [], 0
        for fields in header.pop("requests"):
            n = fields.pop("tokens")
            if fields["adapter"] is not None:
                fields["adapter"] = (fields["adapter"][0], fields["adapter"][1])
            if fields["sampling"] is not None:
                fields["sampling"] = Sampling(**fields["sampling"])
            if fields["beams"] is not None:
                fields["beams"] = Beams(**fields["beams"])
            requests.append(NewRequest(tokens=tokens[at : at + n], **fields))
            at += n
        header |= {name: tuple(header[name]) for name in ("aborts", "suspends")}
        return cls(requests=tuple(requests), **header)


_NOTHING = News()


@dataclass
class Handoff:
    """Rank 0's messages to all ranks over ``group`` (None: one rank, nothing is sent).

    A rank that waits longer than ``timeout_s`` for a message raises GroupTimeout; a broken connection is PeerLost.
    """

    group: dist.ProcessGroup | None
    timeout_s: float = 600.0

    @property
    def device(self) -> torch.device:
        """Where the group's backend wants the bytes."""
        nccl = self.group is not None and dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return dist.get_rank(self.group) if self.group is not None else 0

    def exchange(self, news: News | None, encoded: bytes | None = None) -> News:
        """One message: rank 0 gives ``news``, the others None; every rank gets the same back. Blocks.

        ``encoded`` is ``news.encode()`` where the caller has it already.
        """
        if self.group is None:
            return news or _NOTHING
        buffer = torch.zeros(_INLINE, dtype=torch.uint8)
        payload = b""
        if self.rank == 0:
            payload = b"" if news is None or news == _NOTHING else encoded or news.encode()
            first = (_MAGIC.to_bytes(8, "little") + len(payload).to_bytes(8, "little") + payload)[:_INLINE]
            buffer[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        buffer = self._broadcast(buffer)
        head = buffer[:_HEAD].numpy().tobytes()
        if int.from_bytes(head[:8], "little") != _MAGIC:
            raise DistKVError("the engine's group carried something else than its messages; is another program on it?")
        size = int.from_bytes(head[8:], "little")
        if not size:
            return _NOTHING
        inline = min(size, _INLINE - _HEAD)
        data = buffer[_HEAD : _HEAD + inline].numpy().tobytes()
        if size > inline:
            rest = torch.zeros(size - inline, dtype=torch.uint8)
            if self.rank == 0:
                rest = torch.frombuffer(bytearray(payload[inline:]), dtype=torch.uint8)
            data += self._broadcast(rest).numpy().tobytes()
        return News.decode(data)

    def _broadcast(self, data: torch.Tensor) -> torch.Tensor:
        there = data.to(self.device)
        with named_failures("the hand-off from rank 0", self.timeout_s, rank=self.rank):
            work = dist.broadcast(there, group=self.group, group_src=0, async_op=True)
            assert work is not None
            work.wait(deadline(self.timeout_s))
        return there.cpu()
