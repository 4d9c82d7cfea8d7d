"""What the bytes of a KV page mean."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from distkv.errors import LayoutMismatch

__all__ = ["KVLayout"]


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Everything that the bytes of one page depend on, its content apart. Two pages may be exchanged if it is equal.

    Sizes are those of one rank.
    """

    dtype: str
    """The element's type as torch names it, or the engine where torch's is only a carrier: ``bfloat16``,
    ``float8_e4m3fn``, ``fp8_e5m2`` in a uint8 tensor."""
    item_bytes: int
    page_size: int
    """Tokens of a page."""
    layers: int
    planes: int
    """2: keys and values. 1: one latent plane, as MLA has it."""
    kv_heads: int
    head_dim: int
    order: str
    """The axes of a page's row, the outermost first: ``layer plane token head dim``."""
    shard: int = 0
    """Which share of the heads this is, of ``shards``."""
    shards: int = 1

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page, all layers and planes."""
        elements = self.layers * self.planes * self.page_size * self.kv_heads * self.head_dim
        return elements * self.item_bytes

    @property
    def text(self) -> str:
        """In one line, for the log and to be compared between ranks: without the shard."""
        return (f"{self.dtype}, {self.page_size} tokens, {self.layers} layers, {self.planes} planes, {self.kv_heads} "
                f"KV heads of {self.head_dim}, {self.bytes_per_page} bytes as {self.order}")

    def check_same(self, other: KVLayout) -> None:
        """Raises LayoutMismatch, which names every field that differs, unless pages of ``other`` are pages of this."""
        theirs = asdict(other)
        differences = {name: (mine, theirs[name]) for name, mine in asdict(self).items() if mine != theirs[name]}
        if differences:
            shown = "; ".join(f"{name} is {mine!r} here and {other!r} there"
                              for name, (mine, other) in differences.items())
            raise LayoutMismatch(f"KV pages of another layout: {shown}. Bytes are exchanged between equal ones only",
                                 differences)
