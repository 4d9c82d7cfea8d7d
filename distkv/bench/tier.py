"""``distkv bench tier``: what the host tier costs and what it is worth, on one rank.

Four parts. copies: bandwidth of spills and loads by the real copy engine, as a share of a plain copy of the same bytes
in the same run (threads on a CPU, streams on a GPU). books: what a second tier costs each operation of the books. step:
what it adds to the steps of an engine, in bookkeeping. engine: time to the first token of a host hit, a device hit and
without the cache, by the reference engine, and how long its passes wait for spills; it needs a model.

Only the target of the copies is compared; one that is missed is reported and is not a failure, since machines differ.
A count that is wrong is one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from distkv.bench import files, tier_books, tier_copies, tier_engine, tier_step
from distkv.bench.rows import table
from distkv.bench.workloads import QUICK, Sizes
from distkv.engine.config import ModelConfig
from distkv.errors import DistKVError, InputFileError, ModelError

__all__ = ["main"]

PARTS = ("copies", "books", "step", "engine")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MIB = {"cpu": 192, "cuda": 1024}


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; 0, 1 if a count is wrong, 2 for arguments or a model that cannot be used."""
    given = _parser().parse_args(arguments)
    try:
        _check(given)
        files.refuse_unwritable(given.json)
        device = _device(given.device)
        print(f"one rank, {device}, {torch.get_num_threads()} thread(s) of torch, {given.threads} copy thread(s), load "
              f"{os.getloadavg()[0]:.1f}")  # fmt: skip
        run = {"copies": _copies, "books": _books, "step": _step, "engine": _engine}
        found: dict[str, Any] = {}
        for part in given.parts:
            found |= run[part](given, device)
    except DistKVError as error:
        print(f"distkv: {error}", file=sys.stderr)
        return 2
    files.write(given.json, {
        "machine": files.machine(torch=torch.__version__, threads=torch.get_num_threads(), device=str(device)),
        "quick": given.quick, **found,
    })  # fmt: skip
    return 1 if any(row["bound"] == "exactly" and not row["reached"] for row in found.get("books", [])) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="distkv bench tier", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    files.add_option(parser)
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (all)")
    add("--quick", action="store_true", help="little of everything")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="where the pool lies (auto: a GPU, if there is one)")
    add("--repeat", metavar="N", type=int, help="times that copies (15) and first tokens (5) are repeated")
    copies = parser.add_argument_group("copies; the defaults are a pool of SmolLM2")
    copies.add_argument("--shape", metavar="N", type=int, nargs=3, default=[30, 3, 64],
                        help="layers, KV heads, elements of a head (30 3 64)")
    copies.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the pool and the model (float32)")
    copies.add_argument("--page-sizes", metavar="N", type=int, nargs="+", default=[128, 16], help="tokens (128 16)")
    copies.add_argument("--mib", metavar="N", type=int, help="MiB of one measurement (192, on a GPU 1024)")
    copies.add_argument("--threads", metavar="N", type=int, default=2, help="host.copy_threads (2)")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", metavar="SOURCE", default="smollm2", help="model.source (smollm2)")
    engine.add_argument("--prompts", metavar="N", type=int, nargs="+", default=[1024, 2048], help="tokens (1024 2048)")
    return parser


def _check(given: argparse.Namespace) -> None:
    numbers = {"--repeat": [given.repeat], "--shape": given.shape, "--page-sizes": given.page_sizes,
               "--mib": [given.mib], "--threads": [given.threads], "--prompts": given.prompts}
    for name, values in numbers.items():
        least = min((value for value in values if value is not None), default=1)
        if least < 1:
            raise InputFileError(name, 0, f"must be at least 1, got {least}")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch finds no GPU here")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def _copies(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    layers, heads, dim = given.shape
    shape = tier_copies.Shape(layers=layers, kv_heads=heads, head_dim=dim, dtype=_DTYPES[given.dtype], device=device,
                              mib=given.mib or (8 if given.quick else _MIB[device.type]), threads=given.threads)
    repeat = given.repeat or (3 if given.quick else 15)
    found = [one for size in given.page_sizes for one in tier_copies.measure(shape, size, repeat)]
    print(f"\ncopies: {layers} layers, {heads} KV heads of {dim}, {given.dtype}; wall clock, {repeat} times by turns")
    print("engine and plain copy: medians; the share is the median of the ratios of interleaved pairs, and so not the "
          "quotient of the two\n")
    print(tier_copies.table(found))
    return {"copies": [one.as_dict() for one in found]}


def _books(given: argparse.Namespace, _: torch.device) -> dict[str, Any]:
    sizes = QUICK if given.quick else Sizes()
    found = list(tier_books.rows(sizes))
    print(f"\nbooks: prompt of {sizes.prompt:,} tokens, pages of {sizes.page_size}; thread CPU time\n")
    print(table(found))
    for row in found:
        if row.note:
            print(f"- {row.name}: {row.note}")
    return {"books": [row.as_dict() for row in found]}


def _step(given: argparse.Namespace, _: torch.device) -> dict[str, Any]:
    found = tier_step.measure(QUICK if given.quick else Sizes())
    print(f"\nstep: {found[0].steps} steps of each, one request in every second; thread CPU time, in bookkeeping\n")
    print(tier_step.table(found))
    return {"step": [cost.as_dict() for cost in found]}


def _engine(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    if given.dtype == "float16":
        raise ModelError("--dtype float16 is for the copies alone (--parts copies): the engine has it not")
    config = ModelConfig(source=given.model, dtype=given.dtype, device=device.type)  # type: ignore[arg-type]
    size, repeat = given.page_sizes[0], given.repeat or (1 if given.quick else 5)
    prompts = given.prompts[:1] if given.quick else given.prompts
    first = tier_engine.first_tokens(config, size, prompts, repeat)
    print(f"\nengine: {given.model}, {given.dtype}, pages of {size} tokens; wall clock, best of {repeat}\n")
    print(tier_engine.table(first))
    waits = tier_engine.waits(config, size, prompts[0], 1 if given.quick else 4)
    print("\nengine: what passes wait for spills, when every new page drives out another one\n")
    print(tier_engine.waits_table(waits))
    return {"first_tokens": [one.as_dict() for one in first], "waits": [one.as_dict() for one in waits]}
