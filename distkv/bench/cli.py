"""``distkv bench PART ...``: hands over to the part's own command line, loaded when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

__all__ = ["main"]

PARTS = {
    "core": ("distkv.bench.core", "what the bookkeeping of one rank costs, beside the machine's own floors"),
    "group": ("distkv.bench.group", "one ballot over each transport, several sizes, 2 to 4 ranks"),
    "engine": ("distkv.bench.engine", "the reference engine with and without the cache, and batch_invariant"),
    "tier": ("distkv.bench.tier", "the host tier: copies, bookkeeping, and what a host hit is worth"),
    "peers": ("distkv.bench.peers", "distkv, vLLM's and SGLang's prefix caches in one run, and the ratios"),
}


def main(arguments: Sequence[str]) -> int:
    """Runs one part; returns its exit code: 2 if there is no such part or it is not in this installation."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, PARTS))
        lines = [f"  {name:{width}}  {text}" for name, (_, text) in PARTS.items()]
        print("\n".join(["usage: distkv bench PART ...", "", *lines, "", "distkv bench PART --help says more."]))
        return 0 if arguments else 2
    part = PARTS.get(arguments[0])
    if part is None:
        print(f"distkv: bench has the parts {', '.join(PARTS)}, not {arguments[0]!r}", file=sys.stderr)
        return 2
    try:
        run: Callable[[Sequence[str]], int] = importlib.import_module(part[0]).main
    except ModuleNotFoundError as error:
        if error.name != part[0]:
            raise
        print(f"distkv: bench {arguments[0]} is not part of this installation: no module {part[0]}", file=sys.stderr)
        return 2
    return run(arguments[1:])
