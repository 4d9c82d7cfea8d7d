"""The adapter for vLLM's harness, driven as that harness does, and what ``distkv bench peers`` refuses."""

from __future__ import annotations

import random
import stat
from pathlib import Path

import pytest

from distkv.bench import peers
from distkv.bench.peers import HarnessFailed
from distkv.bench.vllm_peer import DistKV
from distkv.errors import InputFileError


def request(cache: DistKV, prompt: list[int], output: list[int], *, at_once: bool) -> int:
    """One request of the harness: its cached tokens."""
    running = cache.new_request(prompt)
    cached = cache.match(running)
    assert cache.alloc_prompt(running)
    for part in [output] if at_once else [[token] for token in output]:
        assert cache.append(running, part)
    cache.free(running)
    cache.cache.check()
    return cached


@pytest.mark.parametrize("at_once", [True, False])
def test_the_adapter_serves_turns_of_a_conversation(at_once: bool) -> None:
    cache, rng = DistKV(16, 1_024, "sha256"), random.Random(1)
    history: list[int] = []
    for turn in range(5):
        prompt = history + [rng.randrange(150_000) for _ in range(50)]
        output = [rng.randrange(150_000) for _ in range(30)]
        computed = max(0, len(history) - 1)  # the last token of an answer is sampled and not computed
        assert request(cache, prompt, output, at_once=at_once) == computed // 16 * 16, turn
        history = prompt + output


def test_the_adapter_fills_the_pool_and_says_when_there_is_no_room() -> None:
    cache = DistKV(16, 64, "sha256")
    for seed in (1, 2):  # a pool of exactly one prompt: the second evicts every page of the first
        prompt = [seed] * 64
        assert request(cache, prompt, [], at_once=True) == 0
    assert cache.cache.stats().evicted == 4
    running = cache.new_request([3] * 64)
    cache.match(running)
    cache.alloc_prompt(running)
    assert cache.append(running, [1]), "sampled, not computed: needs no slot"
    assert not cache.append(running, [2])


def test_unusable_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISTKV_PEERS_HARNESS", "DISTKV_VLLM_PYTHON", "DISTKV_SGLANG_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module; exit 3\n", encoding="utf-8")
    for arguments, wanted in (
        ([], "--harness"), (["--harness", str(tmp_path)], "--vllm-python"),
        (["--harness", str(tmp_path), "--vllm-python", str(python)], "bench_vllm.py: no such file"),
    ):
        with pytest.raises(InputFileError, match=wanted):
            peers.main(arguments)
    (tmp_path / "bench_vllm.py").touch()
    given = ["--harness", str(tmp_path), "--vllm-python", str(python), "--rounds", "1"]
    with pytest.raises(InputFileError, match="no interpreter"):
        peers.main(given)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(HarnessFailed, match=r"ended with 3:\nno such module"):
        peers.main(given)
