"""``distkv plan CONFIG``: pages and bytes, per token, per page, per rank and per node; what fits and what does not.

From the configuration and the model's config.json; no weights are loaded. Bytes are those that are allocated: of the KV
heads that a rank has. Exit code 0: it fits into the memory that is known. 1: it does not. 2: unusable input.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distkv import CacheConfig, Config, Fingerprint, Message, PoolConfig, PrefixCache, Request
from distkv._text import counted
from distkv.config import load
from distkv.engine.config import ServeConfig
from distkv.engine.report import quiet_transformers
from distkv.engine.windowed import SLIDING
from distkv.errors import ConfigError
from distkv.inspection.host_plan import HostPlan, make_host_plan
from distkv.inspection.output import columns, gib, size
from distkv.inspection.shape import FULL, ModelShape, read_shape
from distkv.inspection.window_plan import WindowPlan, groups_of_main, make_window_plan
from distkv.memory import host_memory as read_host_memory

__all__ = ["GroupPlan", "Plan", "main", "make_plan", "metadata_bytes_per_page"]

_HERE = "this machine, available now"
_ITEM = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """Layers whose pages are alike, on one rank."""

    kind: str
    layers: int
    kv_heads: int
    kv_heads_per_rank: int
    head_dim: int
    bytes_per_token: int
    """Keys and values of all layers of the group, on one rank."""
    bytes_per_page: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a configuration takes. Bytes; "per rank" is what one process allocates, "per node" what its host does."""

    model: str
    source: str
    layers: int
    heads: int
    context: int
    tp: int
    sp: int
    nodes: int
    ranks_per_node: int
    page_size: int
    pages: int
    scratch_pages: int
    groups: tuple[GroupPlan, ...]
    bytes_per_token: int
    """Of a page of ``pages``, as the next one; of a hybrid model that has the layers with full attention alone."""
    bytes_per_page: int
    pool_per_rank: int
    pool_per_node: int
    pool_of_all_ranks: int
    weights_per_rank: int
    """Of the rank that has most."""
    metadata_per_rank: int
    """Bookkeeping of a pool whose every page is cached; measured on a small one, in the host's memory."""
    tokens: int
    """Tokens that the pool holds, of running requests and cached prefixes together."""
    longest_request: int
    """Tokens of prompt and answer."""
    memory: int | None
    """Of a GPU, or of the host for all its ranks; None: unknown."""
    memory_of: str
    most_pages: int | None
    """Pages per rank that fit into ``memory`` beside the weights; activations are not counted."""
    host: HostPlan | None
    """The host tier; None: there is none."""
    window: WindowPlan | None
    """The pool of the layers with a sliding window; None: there is none."""

    @property
    def pool_fits(self) -> bool:
        """False only if the memory is known and too small for the pool."""
        return self.most_pages is None or self.pages <= self.most_pages

    @property
    def fits(self) -> bool:
        """False only if some memory is known and too small, for the pool or for the host tier."""
        return self.pool_fits and (self.host is None or self.host.fits)


def make_plan(config: ServeConfig, shape: ModelShape, *, nodes: int = 1, memory: int | None = None,
              host_memory: int | None = None) -> Plan:
    """The plan for ``config``. ``memory``: bytes of a GPU (or, on CPUs, of a node); None: what this machine has
    free. ``host_memory``: bytes of a node beside its GPUs; None: what this machine has free, if its GPUs are meant.

    Raises ModelError for a model that cannot be split, ConfigError for ranks that do not fill the nodes and for a host
    tier of less than one page.
    """
    tp, sp, ranks = config.parallel.tp, config.parallel.sp, config.parallel.ranks
    page, item = config.cache.page_size, _ITEM[config.model.dtype]
    shape.check_split(tp, sp)
    if ranks % nodes:
        raise ConfigError(
            "parallel.tp", f"is {tp}{f' x sp {sp}' * (sp > 1)}, which is not a multiple of {nodes} nodes"
        )
    per_node = ranks // nodes
    groups = tuple(
        GroupPlan(kind=g.kind, layers=g.layers, kv_heads=g.kv_heads, kv_heads_per_rank=g.kv_heads // ranks,
                  head_dim=g.head_dim, bytes_per_token=g.token_bytes(ranks, item),
                  bytes_per_page=g.token_bytes(ranks, item) * page)
        for g in shape.groups
    )  # fmt: skip
    in_main = groups_of_main(shape)
    token = sum(group.token_bytes(ranks, item) for group in in_main)
    window = make_window_plan(config, shape, in_main, ranks, item)
    beside_pool = window.per_rank if window is not None else 0
    pool, weights = token * page * config.pool.pages, max(shape.weight_bytes(tp, item))
    each = metadata_bytes_per_page(page)
    metadata = each * (config.pool.pages + (window.pages if window is not None else 0))
    held, memory_of, sharing = _memory(config.model.device, per_node, memory, host_memory)
    on_gpu = "GPU" in memory_of
    beside = beside_pool + (weights if on_gpu else weights + metadata)
    node, node_of = held, memory_of
    if on_gpu:
        here = memory is None and held is not None
        node, node_of = _node_memory(host_memory) if here or host_memory is not None else (None, "each node")
    host = make_host_plan(
        config.host, bytes_per_page=token * page, page_size=page, ranks_on_node=per_node, metadata_per_page=each,
        beside_per_rank=(metadata if on_gpu else beside + pool) + (window.host_per_rank if window is not None else 0),
        memory=node, memory_of=node_of,
        beside="the pool's books" if on_gpu else "pool, weights and books",
    )  # fmt: skip
    most = None if held is None else max(0, held // sharing - beside) // (token * page)
    tokens = (config.pool.pages - config.pool.scratch_pages) * page
    return Plan(
        model=shape.kind, source=config.model.source, layers=shape.layers, heads=shape.heads, context=shape.context,
        tp=tp, sp=sp, nodes=nodes, ranks_per_node=per_node, page_size=page, pages=config.pool.pages,
        scratch_pages=config.pool.scratch_pages, groups=groups, bytes_per_token=token, bytes_per_page=token * page,
        pool_per_rank=pool, pool_per_node=pool * per_node, pool_of_all_ranks=pool * ranks, weights_per_rank=weights,
        metadata_per_rank=metadata, tokens=tokens, longest_request=min(tokens, shape.context), memory=held,
        memory_of=memory_of, most_pages=most, host=host, window=window,
    )  # fmt: skip


def _memory(device: str, ranks: int, given: int | None, given_host: int | None) -> tuple[int | None, str, int]:
    """Bytes, whose they are, and how many ranks share them. On CPUs the host's memory is all there is."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" or (device == "auto" and gpus >= ranks):
        if given is not None:
            return given, "each GPU, as given", 1
        if gpus < ranks:
            return None, f"GPU (this machine has {gpus})", 1
        return min(torch.cuda.mem_get_info(i)[0] for i in range(ranks)), "the fullest GPU of this machine, free now", 1
    return *_node_memory(given if given is not None else given_host), ranks


def _node_memory(given: int | None) -> tuple[int | None, str]:
    """Bytes of a node, and whose they are."""
    return (given, "each node, as given") if given is not None else (read_host_memory().room, _HERE)


@functools.cache
def metadata_bytes_per_page(page_size: int, pages: int = 1024) -> int:
    """Bytes of bookkeeping for each page of a pool whose every page is cached, by tracemalloc on a small pool.

    For prompts of 8 pages; longer ones take less.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1 << 30, 8 * page_size, dtype=np.int32) for _ in range(pages // 8)]
    config = Config(cache=CacheConfig(page_size=page_size), pool=PoolConfig(pages=pages))
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        cache = PrefixCache(config, Fingerprint(model="plan", weights_version="0"))
        for i, prompt in enumerate(prompts):
            request = Request(id=str(i), chain=cache.chain(prompt), output_limit=0)
            running = cache.step(Message(requests=(request,))).ready[0]
            running.open(len(prompt))
            running.commit(len(prompt))
            running.finish()
        del request, running
        gc.collect()
        return -(-(tracemalloc.get_traced_memory()[0] - before) // pages)
    finally:
        tracemalloc.stop()


def show(plan: Plan) -> str:
    """The plan for people."""
    nodes = "one node" if plan.nodes == 1 else f"each of {plan.nodes} nodes"
    ranks = f"{counted(plan.ranks_per_node, 'rank')} on {nodes}"
    heads = ", ".join(sorted({f"{g.kv_heads_per_rank} of {g.kv_heads} KV heads on each rank" for g in plan.groups}))
    bound = "the pool" if plan.tokens < plan.context else "the model's context"
    table = [("layers", "count", "KV heads", "per rank", "head dim", "bytes per token", "bytes per page")]
    table += [(g.kind, str(g.layers), str(g.kv_heads), str(g.kv_heads_per_rank), str(g.head_dim),
               f"{g.bytes_per_token:,}", f"{g.bytes_per_page:,}") for g in plan.groups]  # fmt: skip
    lines = [
        ("model", (f"{plan.model} ({plan.source}): {plan.layers} layers, {plan.heads} heads, "
                  f"context {plan.context:,} tokens")),
        ("ranks", f"tp {plan.tp}{f' x sp {plan.sp}' * (plan.sp > 1)}, {ranks}; {heads}"),
        ("pages", f"{plan.pages:,} of {plan.page_size} tokens on each rank, {plan.scratch_pages} of them scratch"),
        ("tokens", f"{plan.tokens:,} fit, of running requests and cached prefixes together"),
        ("longest", f"{plan.longest_request:,} tokens of prompt and answer in one request (limited by {bound})"),
        ("pool", (f"{size(plan.pool_per_rank)} per rank, {size(plan.pool_per_node)} per node, "
                 f"{size(plan.pool_of_all_ranks)} in all; {plan.bytes_per_token:,} bytes per token and rank")),
        ("weights", f"{size(plan.weights_per_rank)} per rank"),
        ("books", f"about {size(plan.metadata_per_rank)} of host memory per rank when every page is cached"),
        ("memory", _verdict(plan)),
    ]  # fmt: skip
    if plan.host is not None:
        lines += plan.host.lines()
    if plan.window is not None:
        lines += plan.window.lines()
    odd = [group.kind for group in plan.groups if group.kind not in (FULL, SLIDING)]
    if odd:
        lines.append(("note", (f"{', '.join(odd)}: not served by the reference engine; bytes are those of pages that "
                              "are never given up")))  # fmt: skip
    return f"{columns(lines[:2])}\n\n{columns(table)}\n\n{columns(lines[2:])}"


def _verdict(plan: Plan) -> str:
    if plan.memory is None or plan.most_pages is None:
        return f"of {plan.memory_of}: unknown; give --memory GIB"
    most = f"at most {plan.most_pages:,} pages per rank fit beside the weights (activations not counted)"
    head = f"{gib(plan.memory)} of {plan.memory_of}: "
    return head + (f"it fits; {most}" if plan.pool_fits else f"IT DOES NOT FIT; {most}: lower pool.pages")


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="distkv plan", description=__doc__.split("\n")[0])
    parser.add_argument("config", metavar="CONFIG", help="configuration file (YAML)")
    parser.add_argument("--nodes", type=int, default=1, help="hosts that the ranks are spread over (default 1)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of each GPU, or on CPUs of each node "
                        "(default: what this machine has free)")  # fmt: skip
    parser.add_argument("--host-memory", type=float, metavar="GIB", help="memory of each node's host, where --memory "
                        "is that of GPUs (default: what this machine has free, if its GPUs are meant)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    given = parser.parse_args(arguments)
    sizes = [given.memory, given.host_memory]
    if given.nodes < 1 or any(gib is not None and not 0 < gib < 1 << 30 for gib in sizes):
        print("distkv: --nodes must be at least 1, --memory and --host-memory a number of GiB above 0", file=sys.stderr)
        return 2
    memory, host_memory = (None if gib is None else int(gib * (1 << 30)) for gib in sizes)
    config = load(given.config, ServeConfig)
    quiet_transformers()
    shape = read_shape(config.model.source, config.model.cache_dir)
    plan = make_plan(config, shape, nodes=given.nodes, memory=memory, host_memory=host_memory)
    print(json.dumps(dataclasses.asdict(plan) | {"fits": plan.fits}, indent=1) if given.json else show(plan))
    return 0 if plan.fits else 1
