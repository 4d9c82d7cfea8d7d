"""``distkv bench core``: what the bookkeeping of one rank costs, beside the machine's own floors.

Times are thread CPU microseconds. The targets are those of the project's plan, for the full sizes; a time that misses
its target is reported and is not a failure, since machines differ; a count that is wrong is one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import xxhash

from distkv.bench import files, growth, memory, operations, overhead
from distkv.bench import floors as machine
from distkv.bench.rows import Row, table
from distkv.bench.workloads import QUICK, Sizes

__all__ = ["main", "run"]


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; 0 if every count is right, 1 if one is not."""
    parser = argparse.ArgumentParser(prog="distkv bench core", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    files.add_option(parser)
    parser.add_argument("--quick", action="store_true", help="small sizes, in seconds; targets are not compared")
    given = parser.parse_args(arguments)
    files.refuse_unwritable(given.json)
    sizes = QUICK if given.quick else Sizes()
    report = run(sizes, compare=not given.quick)
    rows, floors, growing = report
    print(f"one rank, prompt of {sizes.prompt:,} tokens, pages of {sizes.page_size}; thread CPU time\n")
    print(table(rows))
    print("\nfloors of this machine in the same run\n")
    print(table(floors))
    print("\ngrowth: time per doubling of one size, all else as it was\n")
    print(growth.table(growing))
    for row in rows:
        if row.note:
            print(f"- {row.name}: {row.note}")
    files.write(given.json, {
        "machine": files.machine(numpy=np.__version__, xxhash=xxhash.VERSION), "rows": [r.as_dict() for r in rows],
        "floors": [r.as_dict() for r in floors], "growth": [g.as_dict() for g in growing], "quick": given.quick,
    })  # fmt: skip
    return 1 if any(row.exactly and not row.reached for row in rows) else 0


def run(sizes: Sizes, *, compare: bool = True) -> tuple[list[Row], list[Row], list[growth.Growth]]:
    """All rows, the floors, and the growth. Without ``compare``, only the counts keep their targets."""
    found = machine.floors(sizes)
    rows = [
        *operations.lookups(sizes, found), *operations.naming(sizes, found), *operations.storing(sizes, found),
        *operations.evicting(sizes, found), *operations.whole_requests(sizes), *memory.per_token(sizes),
        *operations.collectives(sizes), *overhead.without_reuse(sizes),
    ]
    if not compare:
        rows = [row if row.exactly else row.without_target() for row in rows]
    return rows, machine.rows(found), list(growth.all_of(sizes))
