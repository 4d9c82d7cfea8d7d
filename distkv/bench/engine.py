"""``distkv bench engine CONFIG``: what ``engine.batch_invariant`` costs, beside the fast path in the same run.

One rank, the configuration's model twice: as it is, and batch-invariant. Both do the same in turn, so that what else
the machine does falls on both: a prompt without a cached prefix, one decode step behind it, and the time to the first
token of a request whose prefix is cached, by the engine. On one CPU thread times are that thread's, because machines
are shared; else the wall clock's. The ratio is that of the best times.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
import torch

from distkv.bench import files
from distkv.config import load
from distkv.engine.attention import Batch
from distkv.engine.config import ServeConfig
from distkv.engine.engine import Engine
from distkv.engine.model import Model, load_model
from distkv.engine.pool import KVPool
from distkv.engine.requests import Prompt
from distkv.errors import ConfigError, DistKVError, InputFileError, NotInvariant

__all__ = ["Cost", "main", "measure", "table"]

MODES = ("fast", "invariant")

_NEW = 64
"""Tokens of a request behind its cached prefix."""

_STEPS = 4
"""Decode steps in a row."""


@dataclass(slots=True)
class Cost:
    """One thing that both modes did: seconds of every repetition by mode. ``tokens`` are what each one computed."""

    name: str
    tokens: int
    rate: bool
    """Whether tokens per second are shown, and not milliseconds."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})

    @property
    def ratio(self) -> float:
        """How many times longer the invariant mode took, best against best."""
        fast, invariant = (min(self.seconds[mode]) for mode in MODES)
        return invariant / fast

    def shown(self, seconds: float) -> float:
        """As the table has it: tokens per second, or milliseconds a token."""
        return self.tokens / seconds if self.rate else 1e3 * seconds / self.tokens

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        unit = "tokens/s" if self.rate else "ms"
        modes = {m: {"best": self.shown(min(s)), "median": self.shown(median(s)), "seconds": s}
                 for m, s in self.seconds.items()}  # fmt: skip
        return {"name": self.name, "unit": unit, **modes, "ratio": self.ratio}


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; 0, 1 if this machine has no invariant mode, 2 for a file or model that cannot be used."""
    parser = argparse.ArgumentParser(prog="distkv bench engine", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("config", help="configuration file (YAML), with parallel.tp 1")
    files.add_option(parser)
    parser.add_argument("--prompts", metavar="N", type=int, nargs="+", default=[512, 2048], help="tokens (512 2048)")
    parser.add_argument("--repeat", metavar="N", type=int, default=5, help="times that both modes do everything (5)")
    given = parser.parse_args(arguments)
    try:
        if given.repeat < 1 or min(given.prompts) < 1:
            raise InputFileError("--repeat and --prompts", 0, "must be at least 1")
        config = load(given.config, ServeConfig)
        if config.parallel.ranks != 1:
            raise ConfigError("parallel.tp", f"is {config.parallel.tp} and parallel.sp {config.parallel.sp}, but this "
                                             "is measured on one rank; set both to 1")  # fmt: skip
        files.refuse_unwritable(given.json)
        costs = measure(config, given.prompts, given.repeat)
    except DistKVError as error:
        print(f"distkv: {error}", file=sys.stderr)
        return 1 if isinstance(error, NotInvariant) else 2
    print(f"{config.model.source}, {config.model.dtype}, {torch.get_num_threads()} thread(s), chunks of "
          f"{config.chunk_tokens} tokens, {given.repeat} time(s), load {os.getloadavg()[0]:.1f}\n")  # fmt: skip
    print(table(costs))
    files.write(given.json, {
        "machine": files.machine(torch=torch.__version__, threads=torch.get_num_threads()),
        "model": config.model.source, "dtype": config.model.dtype, "chunk_tokens": config.chunk_tokens,
        "rows": [cost.as_dict() for cost in costs],
    })  # fmt: skip
    return 0


def measure(config: ServeConfig, prompts: Sequence[int], repeat: int) -> list[Cost]:
    """Both modes by turns, ``repeat`` times. Raises ``NotInvariant`` where the mode cannot be had."""
    pages = sum(-(-(n + _NEW + _STEPS) // config.cache.page_size) + 1 for n in prompts)
    with _engines(replace(config, pool=replace(config.pool, pages=max(config.pool.pages or 0, 2 * pages)))) as engines:
        return _measured(engines, config, prompts, repeat)


@contextmanager
def _engines(config: ServeConfig) -> Iterator[dict[str, Engine]]:
    """One of each mode, closed in the end."""
    with ExitStack() as stack:
        engines = {}
        for mode in MODES:
            settings = replace(config, engine=replace(config.engine, batch_invariant=mode == "invariant"))
            engines[mode] = Engine(settings, load_model(config.model))
            stack.callback(engines[mode].close)
        yield engines


def _measured(engines: dict[str, Engine], config: ServeConfig, prompts: Sequence[int], repeat: int) -> list[Cost]:
    costs = []
    for n in prompts:
        prefill = Cost(f"prefill of {n} tokens", n, rate=True)
        decode = Cost(f"decode step behind {n} tokens", _STEPS, rate=False)
        hit = Cost(f"first token, {n} cached + {_NEW} new", 1, rate=False)
        for turn in range(repeat):
            for mode, engine in engines.items():
                times = _forward(engine.model, n, config.chunk_tokens, config.cache.page_size)
                prefill.seconds[mode].append(times[0])
                decode.seconds[mode].append(times[1])
                hit.seconds[mode].append(_first_token(engine, n, turn))
        costs += [prefill, decode, hit]
    return costs


def _own_time(model: Model) -> bool:
    return model.device.type == "cpu" and torch.get_num_threads() == 1


def _clock(model: Model, call: Callable[[], object]) -> float:
    now = time.thread_time if _own_time(model) else time.perf_counter
    began = now()
    call()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return now() - began


def _forward(model: Model, n: int, chunk: int, page: int) -> tuple[float, float]:
    """Seconds of a prompt in chunks, and of a few decode steps behind it."""
    table = np.arange(-(-(n + _STEPS) // page))
    pool, ids = model.pool(len(table), page), _tokens(model, n + _STEPS, 0)
    starts = [(at, min(chunk, n - at)) for at in range(0, n, chunk)]
    prefill = _clock(model, lambda: [_step(model, pool, ids, table, *piece) for piece in starts])
    decode = _clock(model, lambda: [_step(model, pool, ids, table, n + i, 1) for i in range(_STEPS)])
    return prefill, decode


def _step(model: Model, pool: KVPool, ids: np.ndarray, table: np.ndarray, start: int, n: int) -> torch.Tensor:
    batch = Batch.build(pool, [(ids[start : start + n], start, np.arange(start, start + n), table)], model.dtype)
    return model.forward(batch, [n - 1])


def _first_token(engine: Engine, n: int, turn: int) -> float:
    """Seconds to the first token of a request that finds ``n`` tokens, less a partial page, in the cache."""
    prefix = _tokens(engine.model, n, n)
    if not turn:
        engine.generate([Prompt(tokens=np.append(prefix, 0), output_limit=1)])
    asked = np.concatenate([prefix, _tokens(engine.model, _NEW, 1000 + turn)])
    done = []
    seconds = _clock(engine.model, lambda: done.extend(engine.generate([Prompt(tokens=asked, output_limit=1)])))
    if done[0].cached_tokens < n - n % engine.config.cache.page_size:
        raise DistKVError(f"only {done[0].cached_tokens} of {n} tokens were cached: nothing to measure")
    return seconds


def _tokens(model: Model, n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, model.vocab_size, n).astype(np.int32)


def table(costs: Sequence[Cost]) -> str:
    """Both modes in tokens per second or milliseconds, best and median, and the ratio of their times."""
    lines = [f"{'':34} {'unit':>9} {'fast':>9} {'(median)':>9} {'invariant':>9} {'(median)':>9} {'time':>7}"]
    for cost in costs:
        shown = [cost.shown(of(cost.seconds[mode])) for mode in MODES for of in (min, median)]
        unit = "tokens/s" if cost.rate else "ms"
        lines.append(f"{cost.name:34} {unit:>9} " + " ".join(f"{v:9.1f}" for v in shown) + f" {cost.ratio:6.2f}x")
    return "\n".join(lines)
