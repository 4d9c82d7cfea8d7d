"""Names: golden values, equal for every kind of input and in every process, and never shared by accident."""

from __future__ import annotations

import array
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from distkv import Adapter, Fingerprint, KeyChain, KeyNamingError, Span, content_digest
from distkv.chain import Namer
from distkv.encoding import encode
from distkv.keys import token_bytes

FINGERPRINT = Fingerprint(model="golden", weights_version="1", tokenizer="t", tp=2, sp=1, dtype="float32",
                          kv_layout="l", attention="a", positions="p")
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9]
DIGEST = hashlib.blake2b(b"image", digest_size=16).digest()


def namer(page_size: int = 4, key_function: str = "xxh3_64", next_token_depth: int = 0, **changes: Any) -> Namer:
    return Namer(Fingerprint(**{**{f: getattr(FINGERPRINT, f) for f in FINGERPRINT.__dataclass_fields__}, **changes}),
                 page_size, key_function, next_token_depth=next_token_depth)


def hexes(chain: KeyChain) -> list[str]:
    return [f"{key:016x}" for key in chain.keys[: chain.pages]]


def golden_chains() -> dict[str, list[str]]:
    plain = namer()
    return {
        "plain": hexes(plain.chain(TOKENS)),
        "salt": hexes(plain.chain(TOKENS, salt="tenant")),
        "adapter": hexes(plain.chain(TOKENS, adapter=Adapter("lora"))),
        "adapter generation": hexes(plain.chain(TOKENS, adapter=Adapter("lora", 1))),
        "media": hexes(plain.chain(TOKENS, spans=[Span(2, 3, DIGEST)])),
        "embedding": hexes(plain.chain(TOKENS, spans=[Span(2, 3, DIGEST, "embedding")])),
        "xxh64": hexes(namer(key_function="xxh64").chain(TOKENS)),
        "other weights": hexes(plain.with_weights("2").chain(TOKENS)),
        "next token": hexes(namer(next_token_depth=1).chain(TOKENS, spans=[Span(5, 2, DIGEST)])),
        "next five": hexes(namer(next_token_depth=5).chain(TOKENS)),
        "digest": [content_digest(np.arange(6, dtype=np.float32).reshape(2, 3), processing="rgb").hex()[:16]],
    }


GOLDEN = {
    "plain": ["5ea33fedf4345841", "b9da711b6a3be94b"],
    "salt": ["34b4ec9885257402", "04583597b83fecec"],
    "adapter": ["ae3cf2301cee0658", "e31a7721549ba49a"],
    "adapter generation": ["f5f83e95b244699a", "ea5e0398711faaa7"],
    "media": ["04bb986528280704", "7ec836d48f03606c"],
    "embedding": ["e903dbb4dde25af3", "ad105e082f661c5d"],
    "xxh64": ["e4e2f12b9e04eae0", "5b399e803915b02a"],
    "other weights": ["a7580098bd0f2917", "66f7dfa65c1d3a0e"],
    "next token": ["f8adc45caa2ad8e9", "a06170170e86eadf"],
    "next five": ["cc7f73cf643cebba"],
    "digest": ["b13fe96e6c1066c9"],
}


def test_golden_values() -> None:
    """A change here makes every stored or exchanged key void: it needs another version in ``Namer.identity``."""
    assert golden_chains() == GOLDEN


def test_equal_in_every_process() -> None:
    code = "import json; from tests.core.test_keys import golden_chains; print(json.dumps(golden_chains()))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [subprocess.Popen([sys.executable, "-c", code], env={**env, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE)
            for seed in ("0", "4242")]
    for run in runs:
        out, _ = run.communicate(timeout=120)
        assert run.returncode == 0
        assert json.loads(out) == GOLDEN


def test_the_definition() -> None:
    """``key_i = H(tokens as int32 + extras; seed = key_{i-1})``, written out once more."""
    plain = namer()
    chain = plain.chain(TOKENS, salt="s", spans=[Span(5, 2, DIGEST)])
    identity = encode("distkv-1", "model", "golden", "weights_version", "1", "tokenizer", "t", "tp", 2, "sp", 1,
                      "dtype", "float32", "kv_layout", "l", "attention", "a", "positions", "p", 4)
    seed = xxhash.xxh3_64_intdigest(encode(identity, None, None, "s"), 0)
    first = xxhash.xxh3_64_intdigest(np.array([1, 2, 3, 4], "<i4").tobytes(), seed)
    page = np.array([5, 6, 7, 8], "<i4").tobytes() + encode("media", 1, 0, 2, DIGEST)
    assert chain.keys == [first, xxhash.xxh3_64_intdigest(page, first)]


def test_the_definition_with_next_tokens() -> None:
    """``extras_i`` begin with the next tokens, which spans of the page's own and of theirs follow."""
    chain = namer(next_token_depth=2).chain(TOKENS, spans=[Span(5, 2, DIGEST), Span(8, 1, DIGEST, "embedding")])
    identity = encode("distkv-1", "model", "golden", "weights_version", "1", "tokenizer", "t", "tp", 2, "sp", 1,
                      "dtype", "float32", "kv_layout", "l", "attention", "a", "positions", "p", 4,
                      "next_token_depth", 2)
    seed = xxhash.xxh3_64_intdigest(encode(identity, None, None, None), 0)
    page = np.array([1, 2, 3, 4, 5, 6], "<i4").tobytes() + encode("media", 5, 0, 2, DIGEST)
    assert chain.keys == [xxhash.xxh3_64_intdigest(page, seed)]
    assert chain.extras == {0: page[16:]}
    chain.extend([10])
    page = np.array([5, 6, 7, 8, 9, 10], "<i4").tobytes()
    page += encode("media", 1, 0, 2, DIGEST) + encode("embedding", 4, 0, 1, DIGEST)
    assert chain.keys[1:] == [xxhash.xxh3_64_intdigest(page, chain.keys[0])]


def big_endian(ids: list[int]) -> np.ndarray:
    return np.array(ids, ">i8")


def every_other(ids: list[int]) -> np.ndarray:
    return np.repeat(np.array(ids, np.int32), 2)[::2]


def read_only(ids: list[int]) -> np.ndarray:
    found = np.array(ids, np.int32)
    found.flags.writeable = False
    return found


INPUTS: dict[str, Callable[[list[int]], object]] = {
    "tuple": tuple,
    "array i": lambda ids: array.array("i", ids),
    "array q": lambda ids: array.array("q", ids),
    "array H": lambda ids: array.array("H", ids),
    "memoryview": lambda ids: memoryview(array.array("i", ids)),
    "memoryview with a stride": lambda ids: memoryview(np.repeat(np.array(ids, np.int64), 3))[::3],
    "bytearray": bytearray,
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "uint16": lambda ids: np.array(ids, np.uint16),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "int8": lambda ids: np.array(ids, np.int8),
    "big-endian": big_endian,
    "big-endian int32": lambda ids: np.array(ids, ">i4"),
    "not contiguous": every_other,
    "reversed twice": lambda ids: np.array(ids[::-1], np.int32)[::-1],
    "read-only": read_only,
    "torch int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "torch int64": lambda ids: torch.tensor(ids),
    "torch with a stride": lambda ids: torch.tensor(ids).repeat_interleave(2)[::2],
    "list of numpy ints": lambda ids: [np.int64(i) for i in ids],
}


@pytest.mark.parametrize("kind", INPUTS)
def test_every_kind_of_input_is_named_alike(kind: str) -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    chain = namer().chain(INPUTS[kind](ids))
    expected = namer().chain(ids)
    assert chain.keys == expected.keys
    assert chain.tokens.tolist() == ids
    assert chain.tokens.dtype == np.int32
    other = namer().chain()
    other.extend(INPUTS[kind](ids[:3]))
    other.extend(INPUTS[kind](ids[3:]))
    assert other.keys == expected.keys


def test_int32_is_not_copied() -> None:
    ids = np.arange(10, dtype=np.int32)
    assert np.shares_memory(np.frombuffer(token_bytes(ids), np.int32), ids)


def test_the_largest_and_the_smallest_id() -> None:
    assert namer(1).chain([0, 2**31 - 1]).tokens.tolist() == [0, 2**31 - 1]


def ragged() -> object:
    return [[1, 2], [3]]


BAD_TOKENS: dict[str, object] = {
    "floats": [1.0, 2.0], "float array": np.ones(4), "NaN": [float("nan")], "bools": [True, False],
    "bool array": np.ones(4, np.bool_), "negative": [1, -1], "negative int32": np.array([-5], np.int32),
    "too large": [2**31], "too large uint64": np.array([2**63], np.uint64), "far too large": [2**70],
    "two-dimensional": [[1, 2], [3, 4]], "2-D array": np.ones((2, 2), np.int32), "scalar": 5, "0-d": np.array(5),
    "string": "12", "bytes": b"12", "strings": ["1", "2"], "None": None, "Nones": [None],
    "objects": np.array([1, None]),
    "ragged": ragged(), "complex": [1j], "set": {1, 2}, "generator": (i for i in (1, 2)), "dict": {1: 2},
    "dates": np.array(["2020-01-01"], "datetime64[D]"), "torch floats": torch.ones(3), "torch bools": torch.ones(3) > 0,
    "torch bfloat16": torch.ones(3, dtype=torch.bfloat16), "torch 2-D": torch.ones(2, 2, dtype=torch.int64),
    "torch meta": torch.ones(3, dtype=torch.int64, device="meta"), "torch sparse": torch.ones(3).long().to_sparse(),
}


@pytest.mark.parametrize("kind", BAD_TOKENS)
def test_bad_tokens_are_refused_and_change_nothing(kind: str) -> None:
    chain = namer().chain(TOKENS)
    keys = list(chain.keys)
    for call in (chain.extend, chain.follow, namer().chain):
        with pytest.raises(KeyNamingError):
            call(BAD_TOKENS[kind])
    assert (len(chain), chain.keys, chain.tokens.tolist()) == (len(TOKENS), keys, TOKENS)


def test_empty_input_is_an_empty_chain() -> None:
    empties = ([], (), np.array([], np.int64), torch.tensor([], dtype=torch.int64), array.array("i"))
    for empty in empties:
        chain = namer().chain(empty)
        assert (len(chain), chain.pages, chain.tokens.tolist()) == (0, 0, [])


@pytest.mark.parametrize(("arguments", "why"), [
    ((-1, 2, DIGEST), "start"), ((0, 0, DIGEST), "length"), ((0, 1, b"short"), "digest"),
    ((0, 1, DIGEST, "video"), "kind"), ((0, 1, "x" * 32), "digest"), ((0.5, 1, DIGEST), "start"),
    ((0, True, DIGEST), "length"), ((0, "1", DIGEST), "length"),
])
def test_bad_spans(arguments: tuple[Any, ...], why: str) -> None:
    with pytest.raises(KeyNamingError, match=why):
        Span(*arguments)


@pytest.mark.parametrize("spans", [
    [Span(0, 3, DIGEST), Span(2, 2, DIGEST)],  # overlap
    [Span(2, 2, DIGEST), Span(2, 2, DIGEST)],  # twice
    [Span(8, 2, DIGEST)],  # beyond the end
    [Span(20, 2, DIGEST)],
])
def test_spans_that_do_not_fit(spans: list[Span]) -> None:
    plain = namer()
    with pytest.raises(KeyNamingError):
        plain.chain(TOKENS, spans=spans)
    chain = plain.chain(TOKENS)
    for call in (chain.follow, lambda tokens, spans: chain.extend(tokens, [Span(s.start + 9, s.length, s.digest)
                                                                           for s in spans])):
        with pytest.raises(KeyNamingError):
            call(TOKENS, spans)
    assert (len(chain), chain.spans, hexes(chain)) == (9, (), GOLDEN["plain"])


def test_spans_among_old_tokens_are_refused() -> None:
    chain = namer().chain(TOKENS)
    with pytest.raises(KeyNamingError):
        chain.extend([1, 2, 3], spans=[Span(8, 2, DIGEST)])
    assert (len(chain), chain.spans) == (9, ())


def test_a_branch_through_a_span() -> None:
    chain = namer().chain(TOKENS, spans=[Span(2, 3, DIGEST)])
    for n in (3, 4):
        with pytest.raises(KeyNamingError):
            chain.branch(n)
    for n in (0, 1, 2, 5, 9):
        assert chain.branch(n).tokens.tolist() == TOKENS[:n]
    for n in (-1, 10):
        with pytest.raises(KeyNamingError):
            chain.branch(n)


ROOTS: dict[str, dict[str, Any]] = {
    "plain": {}, "salt x": {"salt": "x"}, "adapter x": {"adapter": Adapter("x")}, "empty salt": {"salt": ""},
    "empty adapter": {"adapter": Adapter("")}, "both": {"salt": "x", "adapter": Adapter("x")},
    "generation 1": {"adapter": Adapter("x", 1)}, "generation 2": {"adapter": Adapter("x", 2)},
    "salt y": {"salt": "y"}, "adapter y": {"adapter": Adapter("y")},
    "org_1": {"adapter": Adapter("org_1"), "salt": "2345"}, "org_12345": {"adapter": Adapter("org_12345"), "salt": ""},
    "unicode": {"salt": "\u00e9"}, "the same to the eye": {"salt": "e\u0301"}, "a lone surrogate": {"salt": "\ud800"},
    "NUL": {"salt": "\0"}, "None as a word": {"salt": "None"},
}


def test_no_two_roots_share() -> None:
    plain = namer()
    chains = {name: plain.chain(TOKENS, **root) for name, root in ROOTS.items()}
    assert len({chain.root for chain in chains.values()}) == len(chains)
    assert len({tuple(chain.keys) for chain in chains.values()}) == len(chains)
    for name, root in ROOTS.items():
        again = namer().chain(TOKENS, **root)
        assert (again.root, again.keys) == (chains[name].root, chains[name].keys)


@pytest.mark.parametrize("field", list(FINGERPRINT.__dataclass_fields__))
def test_every_field_of_the_fingerprint_counts(field: str) -> None:
    value = getattr(FINGERPRINT, field)
    other = namer(**{field: value + 1 if isinstance(value, int) else value + "'"})
    assert other.chain(TOKENS).keys != namer().chain(TOKENS).keys
    assert other.probe() != namer().probe()


def test_page_size_depth_and_key_function_count() -> None:
    depths = [namer(next_token_depth=depth) for depth in (0, 1, 2, 16)]
    assert len({each.chain([1]).seed for each in depths}) == len({each.probe() for each in depths}) == 4
    assert depths[2].with_weights("1").probe() == depths[2].probe()
    assert namer(8).chain(range(1)).seed != namer(4).chain(range(1)).seed
    assert namer(key_function="xxh64").probe() != namer().probe()


def test_fields_do_not_run_into_each_other() -> None:
    one, two = namer(model="ab", weights_version="c"), namer(model="a", weights_version="bc")
    assert one.chain(TOKENS).keys != two.chain(TOKENS).keys


SPANS: dict[str, list[Span]] = {
    "none": [], "media": [Span(2, 3, DIGEST)], "another digest": [Span(2, 3, DIGEST[::-1])],
    "another offset": [Span(1, 3, DIGEST)], "longer": [Span(2, 4, DIGEST)],
    "embedding": [Span(2, 3, DIGEST, "embedding")],
    "cut in two": [Span(2, 2, DIGEST), Span(4, 1, DIGEST)], "twice": [Span(2, 3, DIGEST), Span(5, 3, DIGEST)],
    "longer digest": [Span(2, 3, DIGEST + b"0")], "last": [Span(5, 3, DIGEST)],
}


def test_no_two_media_share() -> None:
    keys = {name: tuple(namer().chain(TOKENS, spans=spans).keys) for name, spans in SPANS.items()}
    assert len(set(keys.values())) == len(keys)
    assert keys["last"][0] == keys["none"][0], "an item touches the pages from its first on"
    for name, spans in SPANS.items():
        assert tuple(namer().chain(TOKENS, spans=spans[::-1]).keys) == keys[name], "the order of the list says nothing"


def test_the_whole_digest_is_in_every_page_of_an_item() -> None:
    """An item attends inside itself without causality: its first page depends on its last pixel."""
    tokens = [7] * 16
    one = namer().chain(tokens, spans=[Span(4, 8, DIGEST)])
    two = namer().chain(tokens, spans=[Span(4, 8, DIGEST[:-1] + b"!")])
    longer = namer().chain(tokens, spans=[Span(4, 9, DIGEST)])
    assert one.keys[0] == two.keys[0] == longer.keys[0]
    assert one.keys[1] != two.keys[1]
    assert one.keys[1] != longer.keys[1]
    assert one.keys[3] != two.keys[3], "and what follows depends on it through the chain"
    assert set(one.extras) == {1, 2}


def test_an_embedding_is_not_the_placeholder_token() -> None:
    """A5: X has an embedding at position 5 (placeholder 0), Y has the real token 0 there."""
    tokens = [1, 2, 3, 4, 5, 0, 7, 8, 9, 9, 9, 9]
    x = namer().chain(tokens, spans=[Span(5, 1, content_digest(np.zeros(8, np.float32)), "embedding")])
    y = namer().chain(tokens)
    assert x.keys[0] == y.keys[0]
    assert x.keys[1] != y.keys[1]
    assert x.keys[2] != y.keys[2]


# ---- digests of content


def test_framing_of_digests() -> None:
    """A3: nothing that differs in shape, dtype or borders has the same digest."""
    data = np.arange(24, dtype=np.float32)
    contents: list[tuple[object, ...]] = [
        (data.reshape(6, 4),), (data.reshape(4, 6),), (data,), (data.view(np.int32),), (data.astype(np.float64),),
        (data.tobytes(),), (data.reshape(24, 1),), ([[1, 2], [3]],), ([[1], [2, 3]],), ([1, 2, 3],), ([],), ([[]],), (),
        ([1.0, 2.0, 3.0],), (1, 2, 3), ([1, 2], 3), ("",), (b"",), (None,), (0,), (False,), (0.0,), (-0.0,), ("0",),
        (b"0",), ("a", "bc"), ("ab", "c"), (np.zeros((0, 3), np.float32),), (np.zeros((3, 0), np.float32),),
        (np.zeros(0, np.float32),), (2**70,), (-(2**70),), (255,), (-1,), (np.zeros(1, np.int16),),
        (np.zeros(1, np.uint16),), (torch.zeros(1, dtype=torch.bfloat16),), (torch.zeros(1, dtype=torch.float16),),
        (torch.zeros(2, dtype=torch.float8_e4m3fn),), (torch.zeros(2, dtype=torch.float8_e5m2),),
        (np.zeros(2, np.uint8),), (np.zeros(1, [("a", "<i4"), ("b", "<i4")]),),
    ]
    digests = {}
    for content in contents[:-1]:
        digest = content_digest(*content)
        assert len(digest) == 32
        assert digest not in digests, f"{content} has the digest of {digests[digest]}"
        digests[digest] = content
    for structured in ([("a", "<i4"), ("b", "<i4")], [("a", "<f4"), ("b", "<f4")]):
        with pytest.raises(KeyNamingError):
            content_digest(np.zeros(1, structured))


def test_equal_content_has_an_equal_digest() -> None:
    data = np.arange(24, dtype=np.float32).reshape(4, 6)
    same: list[object] = [
        data.copy(), np.asfortranarray(data), data.astype(">f4"), np.repeat(data, 2, axis=1)[:, ::2],
        torch.from_numpy(data), torch.from_numpy(data).t().contiguous().t(),
        torch.from_numpy(data).clone().requires_grad_(),
    ]
    for other in same:
        assert content_digest(other) == content_digest(data)
    half = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    assert content_digest(half.t().contiguous().t()) == content_digest(half)
    assert content_digest([1, 2]) == content_digest((1, 2)) == content_digest([np.int8(1), np.uint64(2)])


def test_processing_is_part_of_a_digest() -> None:
    """A4: the same bytes under other decode options are other content; none is the default."""
    image = b"\x89PNG"
    digests = {content_digest(image, processing=name) for name in (None, "", "rgb", "rgba")}
    assert len(digests | {content_digest(image), content_digest("rgb", image)}) == 5
    assert content_digest(image, processing="rgb") == content_digest(image, processing="rgb")


@pytest.mark.parametrize("value", [object(), {1: 2}, {1}, np.array([None]), 1j, [object()],
                                   torch.zeros(2, device="meta"), print])
def test_what_has_no_canonical_encoding(value: object) -> None:
    with pytest.raises(KeyNamingError):
        content_digest(value)


@pytest.mark.parametrize("root", [{"salt": object()}, {"salt": 1.5}, {"adapter": "lora"}, {"salt": b"x"}, {"salt": 5},
                                  {"adapter": Adapter("x", "1")}, {"adapter": Adapter(None)}])  # type: ignore[arg-type]
def test_bad_roots(root: dict[str, Any]) -> None:
    with pytest.raises(KeyNamingError):
        namer().chain(TOKENS, **root)
