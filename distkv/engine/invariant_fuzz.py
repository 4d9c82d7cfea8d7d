"""``python -m distkv.engine.invariant_fuzz``: random schedules of a model, each against single passes, bit for bit.

What the self-test at start does a few times, as often as wanted. It ends at the first difference, with its seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch

from distkv.engine.config import ModelConfig
from distkv.engine.invariant import enable
from distkv.engine.invariant_case import differences, random_case
from distkv.engine.model import load_model
from distkv.errors import DistKVError, NotInvariant

__all__ = ["main"]

DType = Literal["float32", "bfloat16"]


def main(arguments: Sequence[str] | None = None) -> int:
    """0: the same bits under all schedules; 1: a difference, or a machine that was refused; 2: unusable input."""
    parser = argparse.ArgumentParser(prog="python -m distkv.engine.invariant_fuzz", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="as model.source (default: smollm2)")
    parser.add_argument("--dtype", choices=get_args(DType), default="float32")
    parser.add_argument("--schedules", type=int, default=264, help="how many (default: 264)")
    parser.add_argument("--longest", type=int, default=300, help="tokens of the longest sequence (default: 300)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page (default: 16)")
    parser.add_argument("--threads", type=int, help="torch's threads (default: torch's own)")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule (default: 0)")
    given = parser.parse_args(arguments)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    try:
        return _fuzz(given)
    except NotInvariant as error:
        print(error)
        return 1
    except DistKVError as error:
        print(error, file=sys.stderr)
        return 2


def _fuzz(given: argparse.Namespace) -> int:
    model = load_model(ModelConfig(source=given.model, dtype=given.dtype))
    began = time.monotonic()
    enable(model)
    print(f"self-test: {time.monotonic() - began:.1f} s, queries in tiles of {model.query_tiles}", flush=True)
    batches = tokens = sequences = shared = 0
    longest = min(given.longest, model.context)
    for seed in range(given.seed, given.seed + given.schedules):
        case = random_case(np.random.default_rng(seed), vocab=model.vocab_size, page_size=given.page_size,
                           longest=longest, batch=max(longest, 64))  # fmt: skip
        found = differences(model, case)
        if found:
            print(f"schedule {seed}: {len(found)} difference(s)", *found[:5], sep="\n  ")
            return 1
        batches, sequences = batches + len(case.batches), sequences + len(case.tokens)
        tokens += sum(len(ids) for ids in case.tokens)
        shared += sum(pages > 0 for _, pages in case.donors)
    print(
        f"same bits: {given.schedules} schedules of {given.model} in {given.dtype}, {torch.get_num_threads()} "
        f"thread(s): {sequences} sequences ({shared} of them on pages of another one), {tokens} tokens, "
        f"{batches} batches, {time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
