"""Batch invariance: random schedules give the bits of single passes, each rule is needed, and no machine is trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distkv.engine import invariant, invariant_fuzz, tensor_parallel, tiles
from distkv.engine.config import ModelConfig
from distkv.engine.engine import Engine
from distkv.engine.invariant import enable
from distkv.engine.invariant_case import Case, differences, random_case
from distkv.engine.model import Model, load_model
from distkv.engine.pool import KVPool
from distkv.engine.tiles import ROWS, SIZES
from distkv.errors import ModelError, NotInvariant
from distkv.testing.processes import run_ranks
from distkv.torch_group import deadline
from tests.engine import tiny
from tests.engine.test_model import single_pass

Folders = Callable[[str, int], Path]
KV_HEADS = {"llama": 4, "qwen3": 12}
STUCK_S = 25.0  # no rank waits so long for another one, but in a barrier


def case(seed: int, longest: int = 600) -> Case:
    random = np.random.default_rng(seed)
    return random_case(random, vocab=tiny.VOCAB, page_size=tiny.PAGE, longest=longest, sequences=3)


def load(folder: Path, dtype: str = "float32", group: dist.ProcessGroup | None = None) -> Model:
    return load_model(ModelConfig(source=str(folder), dtype=dtype), group, timeout_s=STUCK_S)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_random_schedules_give_the_bits_of_single_passes(folders: Folders, kind: str, dtype: str) -> None:
    model = load(folders(kind, KV_HEADS[kind]), dtype)
    enable(model)
    cases = [case(seed) for seed in range(6)]
    assert [found for c in cases for found in differences(model, c)] == []
    assert any(pages for c in cases for _, pages in c.donors), "some sequences begin on pages of another one"
    assert max(len(ids) for c in cases for ids in c.tokens) > tiles.KEYS
    assert any(len(batch) > 1 for c in cases for batch in c.batches)


@pytest.mark.parametrize(("name", "sizes"), [("GPT2", {"n_inner": 200}), ("OPT", {"ffn_dim": 200})])
def test_widths_are_those_of_the_layers(tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    """Configurations without an intermediate_size, and GPT-2's products with the weights the other way round."""
    import transformers

    torch.manual_seed(1)
    settings = getattr(transformers, f"{name}Config")(
        vocab_size=tiny.VOCAB, hidden_size=96, num_hidden_layers=1, num_attention_heads=12, word_embed_proj_dim=96,
        max_position_embeddings=1024, **sizes,
    )  # fmt: skip
    getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(settings).save_pretrained(
        tmp_path
    )
    model = load(tmp_path)
    with patch.object(invariant, "_DRAWS", 1), patch.object(invariant, "_TRIALS", 1):
        enable(model)
    assert [found for seed in range(3) for found in differences(model, case(seed))] == []
    model = load(tmp_path)
    model.module.odd = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(ModelError, match=r"does not cover odd of this .*, a Bilinear; set it to false"):
        enable(model)


def test_without_the_mode_schedules_differ(folders: Folders) -> None:
    model = load(folders("llama", 4))
    assert any(differences(model, case(seed)) for seed in range(8))


def test_a_case_reads_only_what_an_earlier_batch_has_written() -> None:
    for seed in range(300):
        made, written = case(seed, longest=90), set[tuple[int, int]]()
        roots = [made.donors[i] for i in range(len(made.tokens))]
        for batch in made.batches:
            for piece in batch:
                donor, shared = roots[piece.who]
                for at in range(piece.start):
                    assert ((donor if at < shared * tiny.PAGE else piece.who), at) in written
            written |= {(p.who, at) for p in batch for at in range(p.start, p.start + p.n)}
        ends = {(i, len(ids) - 1) for i, ids in enumerate(made.tokens)}
        assert ends <= written


# ---- each rule, switched off


def rows() -> Any:
    """Products and activations see as many rows as there are."""
    return patch.object(tiles, "padded_rows", lambda n: n)


def queries() -> Any:
    """Attention sees as many queries as there are."""
    return patch.object(tiles, "padded_queries", lambda n: n)


def keys() -> Any:
    """Attention sees a multiple of 16 keys, as queries come."""
    return patch.object(tiles, "padded_keys", lambda n: -(-n // ROWS) * ROWS)


def activations() -> Any:
    """Only products are cut into tiles."""
    return patch.object(invariant, "_is_activation", lambda module: False)


def stale() -> Any:
    """What lies behind a request's tokens in its last page is left there."""

    def padded(self: KVPool, plane: torch.Tensor, pages: torch.Tensor, tokens: int, padded: int) -> torch.Tensor:
        found = plane.index_select(0, pages).flatten(0, 1)
        return torch.cat([found, found.new_zeros(max(0, padded - len(found)), *found.shape[1:])])[:padded]

    return patch.object(KVPool, "_padded", padded)


def untested() -> AbstractContextManager[Any]:
    """The self-test at start, which would see that a rule is off."""
    stack = ExitStack()
    stack.enter_context(patch.object(invariant, "_test_rows", lambda model, wrapped: None))
    stack.enter_context(patch.object(invariant, "_query_tiles", lambda model: SIZES))
    stack.enter_context(patch.object(invariant, "_test_model", lambda model: None))
    return stack


@pytest.fixture(scope="module")
def odd_width(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows do not fill whole vectors: 100 numbers in its MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("odd")
    LlamaForCausalLM(LlamaConfig(
        vocab_size=tiny.VOCAB, hidden_size=96, intermediate_size=100, num_hidden_layers=2, num_attention_heads=12,
        num_key_value_heads=4, head_dim=8, max_position_embeddings=2048, initializer_range=0.15,
    )).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.mark.parametrize("rule", [nullcontext, rows, queries, keys, activations, stale], ids=lambda rule: rule.__name__)
def test_each_rule_is_needed(odd_width: Path, rule: Callable[[], AbstractContextManager[Any]]) -> None:
    model = load(odd_width)
    with rule(), untested():
        enable(model)
        differ = any(differences(model, case(seed)) for seed in range(12))
    assert differ == (rule is not nullcontext)


@pytest.mark.parametrize(("rule", "named"), [
    (queries, "attention, 12 heads over 4 of 8, in float32 on cpu"), (rows, "the whole model in float32 on cpu"),
    (stale, "the whole model"),
], ids=["queries", "rows", "stale"])  # fmt: skip
def test_the_self_test_refuses_and_leaves_the_model_as_it_was(odd_width: Path, rule: Any, named: str) -> None:
    model, pages = load(odd_width), np.arange(5)
    before = single_pass(model, pages)
    with rule(), pytest.raises(NotInvariant, match=named) as caught:
        enable(model)
    assert caught.value.failed_rank == 0
    assert "OMP_NUM_THREADS" in str(caught.value)
    assert model.query_tiles is None
    assert not any("forward" in vars(module) for module in model.module.modules())
    assert torch.equal(single_pass(model, pages), before)


def product(x: torch.Tensor) -> torch.Tensor:
    """A product whose kernel adds in two parts where there are 64 rows: what MKL does on two threads."""
    weight = torch.linspace(-1, 1, 80 * 48).view(80, 48).to(x.dtype)
    return x @ weight if len(x) != 64 else x[:, :40] @ weight[:40] + x[:, 40:] @ weight[40:]


def by_place(x: torch.Tensor) -> torch.Tensor:
    """A kernel that treats its last row apart."""
    return torch.cat([product(x[:-1]), product(x[-1:] * 3) / 3])


def test_a_larger_tile_is_used_only_where_it_gives_the_bits_of_the_small_one(folders: Folders) -> None:
    model = load(folders("llama", 4))
    assert invariant.tiles_of("a product", product, 80, model) == (256, ROWS)
    with patch.object(invariant, "same_rows", lambda tile, reference: True):
        assert invariant.tiles_of("a product", product, 80, model) == SIZES
    with pytest.raises(NotInvariant, match="a kernel: 16 rows give other bits at another place among them"):
        invariant.tiles_of("a kernel", by_place, 80, model)


def test_tiles_are_the_rows_in_order() -> None:
    assert tiles.cut(256 + 64 + 32, SIZES) == [(0, 256), (256, 320), (320, 336), (336, 352)]
    assert tiles.cut(17, SIZES) == [(0, 16), (16, 17)]
    assert tiles.cut(0, SIZES) == []


# ---- the engine, and the command


def test_the_engine_enables_the_mode_and_never_mixes_it(folders: Folders) -> None:
    settings = tiny.config(folders("llama", 4), batch_invariant=True)
    model = load_model(settings.model)
    one, other = Engine(settings, model), Engine(settings, model)
    assert model.query_tiles is not None
    fast = tiny.config(folders("llama", 4))
    with pytest.raises(ModelError, match="load it again"):
        Engine(fast, model)
    page = tiny.tokens(tiny.PAGE, 1)
    names = [made.cache.chain(page).keys for made in (one, other, Engine(fast, load_model(fast.model)))]
    assert names[0] == names[1] != names[2], "pages of the two modes have different bytes, and names"


def test_the_fuzz_is_a_command(folders: Folders, odd_width: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--schedules", "2", "--longest", "60"]
    assert invariant_fuzz.main(["--model", str(folders("qwen3", 12)), "--dtype", "bfloat16", *asked]) == 0
    assert "same bits: 2 schedules of" in capsys.readouterr().out
    with queries():
        assert invariant_fuzz.main(["--model", str(odd_width), *asked]) == 1
    with activations(), untested():
        assert invariant_fuzz.main(["--model", str(odd_width), "--schedules", "40", "--longest", "60"]) == 1
    assert "difference(s)" in capsys.readouterr().out
    assert invariant_fuzz.main(["--model", "/nowhere", *asked]) == 2


# ---- several ranks


@contextmanager
def ring() -> Iterator[None]:
    """The ranks' parts are added by gloo's all-reduce, in an order that depends on an element's place."""

    def added_in_a_ring(part: torch.Tensor, group: dist.ProcessGroup, *_: Any, **__: Any) -> torch.Tensor:
        dist.all_reduce(part, group=group)
        return part

    with patch.object(tensor_parallel, "_sum", added_in_a_ring):
        yield


def by_gathering(parts: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the sum that NCCL is used for in this mode has the bits of the one over gloo."""
    usual = tensor_parallel._sum(parts, group, 30.0)
    with patch.object(dist, "get_backend", lambda group: "nccl"):
        gathered = tensor_parallel._sum(parts, group, 30.0, in_rank_order=True)
    return torch.equal(usual, gathered)


@contextmanager
def quick() -> Iterator[None]:
    """One draw for each product: for self-tests that end with something else."""
    with patch.object(invariant, "_DRAWS", 1):
        yield


@contextmanager
def failing_kernel() -> Iterator[None]:
    """The test of the kernels ends with an error that nobody expects."""
    with patch.object(invariant, "_query_tiles", side_effect=ValueError("no such kernel")):
        yield


@contextmanager
def before_second_attention(do: Callable[[], object]) -> Iterator[None]:
    """In the whole model's passes, when the other ranks go on to wait for this one's part of a sum."""
    attend, calls = tiles.Attention.__call__, iter(range(10_000))

    def doing(self: tiles.Attention, *args: Any) -> torch.Tensor:
        if next(calls) == 1:
            do()
        return attend(self, *args)

    kernels = patch.object(invariant, "_query_tiles", lambda model: SIZES)
    with kernels, patch.object(tiles.Attention, "__call__", doing):
        yield


def out_of_memory() -> None:
    raise MemoryError("no more")


def failing_pass() -> AbstractContextManager[None]:
    return before_second_attention(out_of_memory)


def one_by_one(rank: int, group: dist.ProcessGroup) -> AbstractContextManager[None]:
    """Rank 2 waits for the sum; then rank 1 fails; then rank 0 comes, and cannot send rank 2 its part any more."""
    store = dist.group.WORLD.get_group_store()

    def wait_and_fail() -> None:
        store.wait(["rank 2 waits"], timedelta(seconds=STUCK_S))
        out_of_memory()

    def come_after_the_failure() -> None:
        with pytest.raises(RuntimeError, match="gloo/"):
            dist.recv(torch.zeros(1), group=group, group_src=1, tag=7)  # which rank 1 never sends

    def tell_when_waiting() -> None:
        def told(seconds: float) -> timedelta:  # called when all sends and receives of the sum are begun
            store.set("rank 2 waits", b"")
            return deadline(seconds)

        stack.enter_context(patch.object(tensor_parallel, "deadline", told))

    @contextmanager
    def in_order() -> Iterator[None]:
        with stack, before_second_attention([come_after_the_failure, wait_and_fail, tell_when_waiting][rank]):
            yield

    stack = ExitStack()
    return in_order()


def own_pages() -> Any:
    """Only this rank's pages differ."""
    return patch.object(invariant, "differences", lambda model, case: [*differences(model, case), "a page"])


def failed(folder: Path, tp_group: dist.ProcessGroup, beside: dist.ProcessGroup | None, fault: Any) -> list[str]:
    """What a rank raises under a fault, and what was before it; the model is as it was."""
    model = load(folder, "float32", tp_group)
    with quick(), fault, pytest.raises(Exception) as caught:
        enable(model, beside)
    assert model.query_tiles is None and not any("forward" in vars(module) for module in model.module.modules())
    error = caught.value
    text = f"of rank {error.failed_rank}, {error.what}" if isinstance(error, NotInvariant) else str(error)
    return [type(error).__name__, text, type(error.__cause__).__name__]


def degree_case(tp: int, folder: Path, group: dist.ProcessGroup, beside: dist.ProcessGroup) -> dict[str, Any]:
    """All cases of one degree. Where something fails, it is on rank 1."""
    rank, seen = dist.get_rank(group), dict[str, Any]()
    for dtype in ("float32", "bfloat16"):
        model = load(folder, dtype, group)
        enable(model)
        seen[dtype] = [found for seed in range(2) for found in differences(model, case(seed, 200))]
    model = load(folder, "float32", group)
    with ring(), untested():
        enable(model)
        seen["ring"] = sum(bool(differences(model, case(seed, 300))) for seed in range(3)) > 0
    part = torch.randn(7, 96, generator=torch.Generator().manual_seed(rank))
    seen["gathered"] = by_gathering(part, group)

    def on_1(fault: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
        return fault() if rank == 1 else nullcontext()

    seen["queries"] = failed(folder, group, None, on_1(queries))
    seen["kernel"] = failed(folder, group, None, on_1(failing_kernel))
    # the last calls over these groups
    if tp == 2:
        seen["pass"] = failed(folder, group, beside, on_1(failing_pass))
    if tp == 3:
        seen["pages"] = failed(folder, group, None, on_1(own_pages))
        seen["pass"] = failed(folder, group, None, one_by_one(rank, group))
    return seen


def ranks_case(rank: int, world_size: int, folder: Path) -> dict[int, dict[str, Any]]:
    """All degrees in one start: groups of 2, 3 and 4 ranks, made by all in one order."""
    members = {2: [[0, 1], [2, 3]], 3: [[0, 1, 2]], 4: [[0, 1, 2, 3]]}
    stuck = timedelta(seconds=STUCK_S)
    groups = {tp: [dist.new_group(ranks, stuck) for ranks in of_degree] for tp, of_degree in members.items()}
    besides = [dist.new_group(ranks, stuck) for ranks in members[2]]
    seen = {}
    for tp, of_degree in groups.items():
        for group in of_degree:
            if dist.get_rank(group) >= 0:
                seen[tp] = degree_case(tp, folder, group, besides[rank // 2])
        dist.barrier()  # of all, with the deadline of the whole test: one rank has no part in a group of three
    return seen


def test_two_three_and_four_ranks(folders: Folders) -> None:
    results = run_ranks(ranks_case, 4, (folders("llama", 12),), timeout_s=150.0)
    assert [list(by_degree) for by_degree in results] == [[2, 3, 4], [2, 3, 4], [2, 3, 4], [2, 4]]
    for number, by_degree in enumerate(results):
        for tp, seen in by_degree.items():
            assert seen.pop("float32") == []
            assert seen.pop("bfloat16") == []
            assert seen.pop("ring") == (tp > 2), "two parts have one order only"
            assert seen.pop("gathered")
            fails = number == (3 if tp == 2 and number > 1 else 1)
            text = "of rank 1, the self-test ended with {}".format
            kind, said, _ = seen.pop("queries")
            assert kind == "NotInvariant" and said.startswith("of rank 1, attention, ")
            assert seen.pop("kernel") == (["ValueError", "no such kernel", "NoneType"] if fails else
                                          ["NotInvariant", text("ValueError: no such kernel"), "NoneType"])
            if tp == 3:
                assert seen.pop("pages")[1].startswith("of rank 1, the whole model in float32 on cpu")
            if tp < 4:
                kind, said, before = seen.pop("pass")
                if fails:
                    assert [kind, said] == ["MemoryError", "no more"]
                elif tp == 2:  # what it noticed first was the broken connection, and not the deadline
                    assert [kind, said, before] == ["NotInvariant", text("MemoryError: no more"), "PeerLost"]
                else:
                    assert kind == "PeerLost"
            assert not seen
