"""``distkv verify``: clean models pass with counts, planted faults are named, and nothing passes without a proof."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from distkv.config import from_mapping
from distkv.engine import batch, pool, verification, verify
from distkv.engine.config import ServeConfig
from distkv.engine.fuzz import Fuzzed, random_trial
from distkv.engine.record import RecordedRequest, Recording
from distkv.engine.schedule import Runnable
from distkv.errors import ModelError
from distkv.testing.processes import run_ranks
from tests.engine import tiny

Folders = Callable[[str, int], Path]
GENEROUS = 240.0


def write(path: Path, model: Path, *, tp: int = 1, page_size: int = 16, output_limit: int = 3, pages: int = 64,
          batch_invariant: bool = True) -> Path:  # fmt: skip
    path.write_text(f"""
        cache: {{page_size: {page_size}}}
        pool: {{pages: {pages}, check: true}}
        model: {{source: {model}}}
        parallel: {{tp: {tp}}}
        engine: {{output_limit: {output_limit}, batch_tokens: 64, batch_invariant: {str(batch_invariant).lower()}}}
    """)
    return path


def command(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = verify.main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def without_reader(*arguments: object) -> tuple[int, str, str]:
    """The command, with a stdout that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    err = io.StringIO()
    with os.fdopen(writer, "w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = verify.main([str(argument) for argument in arguments])
    return code, "", err.getvalue()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer of single bytes and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tiny.model_folder(tmp_path_factory.mktemp("chatty"), "llama", kv_heads=4)
    letters = {letter: 3 + i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, **letters}, merges=[], unk_token="<unk>"))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


# ---- faults


def flip_a_bit(pool: torch.Tensor, layer: int, plane: int, page: int, offset: int) -> None:
    pool[layer, plane, page, offset, 0].view(torch.int32)[0] ^= 1


class Faulty(Recording):
    """Damages the pool once: a page that a request was just given, or one that nobody will read again."""

    fault = ""
    done = False

    def admitted(self, request_id: str, tokens: np.ndarray, cached_tokens: int, pages: np.ndarray) -> None:
        super().admitted(request_id, tokens, cached_tokens, pages)
        if cached_tokens >= 3 * self.pool.page_size and not self.done and self.damage(tokens, pages.tolist()):
            type(self).done = True

    def damage(self, tokens: np.ndarray, pages: list[int]) -> bool:
        data = self.pool.data
        if self.fault == "nudged":
            flip_a_bit(data, 1, 0, pages[1], 5)
        elif self.fault == "swapped":
            data[:, :, pages[1:3]] = data[:, :, [pages[2], pages[1]]]
        elif self.fault == "foreign":
            others = [r for r in self.requests.values() if r.committed >= 48]
            other = next((r for r in others if not np.array_equal(r.tokens[32:48], tokens[32:48])), None)
            if other is None:
                return False
            data[:, :, pages[2]] = data[:, :, int(other.page_ids[2])]
        return self.fault in ("nudged", "swapped", "foreign")

    def ended(self, request_id: str, tokens: np.ndarray, committed: int, pages: np.ndarray) -> None:
        super().ended(request_id, tokens, committed, pages)
        warm = self.requests[request_id].cached_tokens
        if self.fault == "unread" and warm and request_id.endswith("turn 3") and not self.done:
            flip_a_bit(self.pool.data, 0, 1, int(pages[committed // self.pool.page_size - 1]), 2)
            type(self).done = True


def with_fault(fault: str, *arguments: object) -> tuple[int, str, str]:
    kind = type("Planted", (Faulty,), {"fault": fault, "done": False})
    original = verification.Recording
    verification.Recording = kind  # type: ignore[misc]
    try:
        code, out, err = command(*arguments)
    finally:
        verification.Recording = original  # type: ignore[misc]
    assert kind.done == bool(fault), "the fault was planted"
    return code, out, err


def expected(fault: str, rank: int) -> str:
    """The first line about a fault on a rank."""
    page, layer, plane, token, offset, more = {
        "nudged": (r"page 1 \(cached\)", 1, "keys", "21", 5, ""),
        "swapped": (r"page 1 \(cached\)", 0, "keys", "16", 0, ", 16 tokens in all"),
        "foreign": (r"page 2 \(cached\)", 0, "keys", "32", 0, ", 16 tokens in all"),
        "unread": (r"in the cache, page \d+", 0, "values", r"\d+", 2, ""),
    }[fault]
    return (rf"^  request 'random \d, turn \d', rank {rank}: {page}, layer {layer}, {plane} differ: pool page \d+, "
            rf"token {token} \({offset} of the page\){more}$")  # fmt: skip


@pytest.mark.parametrize("fault", ["nudged", "swapped", "foreign", "unread"])
def test_a_planted_fault_is_found_and_named(folders: Folders, tmp_path: Path, fault: str) -> None:
    code, out, err = with_fault(fault, write(tmp_path / "c.yaml", folders("llama", 4)), "--random", "--schedules", "0")
    assert code == 1, out + err
    assert re.search(r"DIFFERENCES? in run 0, seed 0", err)
    assert re.search(expected(fault, 0), err.splitlines()[1])


def test_a_fault_under_a_random_schedule_is_found_where_only_the_same_schedule_gives_the_same_bits(
    folders: Folders, tmp_path: Path
) -> None:
    file = write(tmp_path / "c.yaml", folders("qwen3", 4), batch_invariant=False)
    code, out, err = command(file, "--random", "--schedules", "1")
    assert code == 0, out + err
    assert "engine.batch_invariant is off" in out
    assert "same bits: 2 runs (1 in order, 1 under random schedules)" in out
    code, out, err = with_fault("nudged", file, "--random", "--schedules", "0")
    assert code == 1, out + err
    assert re.search(expected("nudged", 0), err.splitlines()[1])


def test_a_conversation_is_verified_under_random_schedules(chatty: Path, tmp_path: Path) -> None:
    system = {"role": "system", "content": "The thing about the other thing is that the others have it. " * 2}
    file = tmp_path / "messages.jsonl"
    file.write_text(json.dumps({"messages": [system, *({"role": "user", "content": c} for c in ("One?", "Two?"))]}))
    config = write(tmp_path / "c.yaml", chatty)
    code, out, err = command(config, "--messages", file, "--schedules", "3", "--seed", "5")
    assert code == 0, out + err
    counts = re.search(
        r"same bits: 4 runs \(1 in order, 3 under random schedules\), (\d+) requests, (\d+) tokens from the cache; "
        r"(\d+) rows of logits and (\d+) pages compared and (\d+) cached pages", out,
    )  # fmt: skip
    assert counts, out
    requests, cached, rows, pages, checked = map(int, counts.groups())
    assert requests >= 8
    assert cached >= 128
    assert rows >= 3 * 8
    assert pages >= 8 * 8
    assert checked >= 8
    assert re.search(
        r"run 3, seed 5 \(pieces of at most \d+, \d+ pages, \d+ requests and \d+ strangers\): same bits", out
    )


def test_what_shares_no_page_is_no_proof(chatty: Path, tmp_path: Path) -> None:
    file = tmp_path / "messages.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "A?"}]}')
    config = write(tmp_path / "c.yaml", chatty, page_size=64)
    code, out, err = command(config, "--messages", file, "--schedules", "0")
    assert code == 1, out + err
    assert "nothing came from the cache, so nothing was verified: no prompts share a full page of 64 tokens" in err


def test_input_that_cannot_be_used_is_exit_code_2(folders: Folders, chatty: Path, tmp_path: Path) -> None:
    config = write(tmp_path / "c.yaml", folders("llama", 4), pages=2)
    code, _, err = command(config)
    assert code == 2
    assert "--random needs none" in err
    code, _, err = command(config, "--random")
    assert code == 2
    assert "pool.pages: is too small for random prompts of some pages: they need 6 usable ones" in err
    file = tmp_path / "messages.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "Why? " * 10}]}))
    code, _, err = command(write(tmp_path / "c.yaml", chatty, pages=2), "--messages", file)
    assert code == 2
    assert re.search(r"request 'line 1, turn 1': cannot run: .*pages", err), err
    code, _, err = command(config, "--messages", "")
    assert (code, err) == (2, "distkv: '': is no name of a file of messages\n")
    code, _, err = command(tmp_path / "missing.yaml")
    assert code == 2
    assert "missing.yaml" in err
    with pytest.raises(SystemExit) as caught:
        command(config, "--schedules", "-1")
    assert caught.value.code == 2


def test_random_plans_are_within_their_limits() -> None:
    for grid in (None, 16):
        scheduler = Fuzzed(np.random.default_rng(1), 40, 30, grid)
        committed = dict.fromkeys("abcd", 0)
        sizes = []
        while any(done < 100 for done in committed.values()):
            chunks = scheduler.plan(
                [Runnable(name, done, 100, False) for name, done in committed.items() if done < 100]
            )
            assert sum(chunk.n for chunk in chunks) <= 40
            assert len({chunk.request_id for chunk in chunks}) == len(chunks)
            for name, start, n in chunks:
                assert start == committed[name]
                assert 1 <= n <= 30
                assert grid is None or start // grid == (start + n - 1) // grid
                committed[name] += n
                sizes.append(n)
        assert len(set(sizes)) > 10


def test_a_request_much_longer_than_a_batch_has_random_schedules_too() -> None:
    config = from_mapping({"engine": {"batch_tokens": 16}, "cache": {"page_size": 16}}, ServeConfig)
    tokens = np.arange(600, dtype=np.int32)
    request = RecordedRequest("long", 500, 0, (), tokens)
    for seed in range(20):
        trial = random_trial(config, [request], np.random.default_rng(seed), 1000, within_pages=False)
        assert trial.scheduler is not None
        assert 1 <= trial.scheduler.longest <= 16


# ---- real ranks


def ranks_case(rank: int, world_size: int, config: Path) -> list[tuple[int, str, str]]:
    torch.set_num_threads(1)
    faults = [("", ""), ("", "nudged"), ("unread", "")]  # by rank
    results = [with_fault(fault[rank], config, "--random", "--schedules", "0") for fault in faults]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(pool, "available_memory", lambda: 0)
        results.append(command(config, "--random"))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(batch, "choose", damaged)
        results.append(command(config, "--random"))
    results.append(command(config, "--random") if rank else without_reader(config, "--random"))
    return results


def damaged(*_: object) -> list[int]:
    raise ModelError("planted")


def test_a_fault_on_one_rank_ends_all_with_its_name(folders: Folders, tmp_path: Path) -> None:
    config = write(tmp_path / "c.yaml", folders("llama", 4), tp=2, batch_invariant=False)
    clean, nudged, unread, no_room, damage, piped = zip(
        *run_ranks(ranks_case, 2, (config,), timeout_s=GENEROUS), strict=True
    )
    for results, code in ((clean, 0), (nudged, 1), (unread, 1)):
        assert [result[0] for result in results] == [code, code], results
        assert results[1][1:] == ("", ""), "rank 0 speaks for all"
    assert "on each of 2 ranks" in clean[0][1]
    assert re.search(expected("nudged", 1), nudged[0][2].splitlines()[1])
    assert re.search(expected("unread", 0), unread[0][2].splitlines()[1])
    assert [result[0] for result in no_room] == [2, 2], no_room
    assert "distkv, rank 1: pool.pages: needs" in no_room[0][2], "one that cannot begin keeps nobody waiting"
    assert (damage[0][0], damage[0][2]) == (2, "distkv: planted\n"), "the reason, and not what came of it"
    assert damage[1][0] == 1
    assert "rank 0 failed in the forward of step" in damage[1][2]
    assert piped == ((141, "", ""), (141, "", "")), "all leave when nobody reads, without a word"


def one_command(folder: Path) -> subprocess.CompletedProcess[str]:
    config = write(folder / "c.yaml", tiny.plain_folder(folder / "model"), tp=2, batch_invariant=False)
    return subprocess.run(
        [sys.executable, "-m", "distkv", "verify", str(config), "--random", "--schedules", "0"],
        env=dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE"),
        capture_output=True, text=True, timeout=GENEROUS, check=False,
    )  # fmt: skip


@pytest.mark.ahead(work=one_command)
def test_one_command_starts_the_ranks(ahead: subprocess.CompletedProcess[str]) -> None:
    assert ahead.returncode == 0, ahead.stdout + ahead.stderr
    assert "same bits: 1 run" in ahead.stdout
    assert ahead.stdout.count("on each of 2 ranks") == 1
