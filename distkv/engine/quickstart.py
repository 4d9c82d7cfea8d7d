"""Answers a conversation with the cache off and on, and compares answers, times and bits.

``python -m distkv.engine.quickstart CONFIG [--messages FILE]``, one process for each rank (``launch/torchrun.sh``).
Exit code 0: all bits are the same. 1: they are not, or it failed. 2: the configuration or the file cannot be used.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from distkv.config import load
from distkv.engine import gate
from distkv.engine.config import ServeConfig
from distkv.engine.conversation import Conversation, Message, built_in, chat_tokens, read_conversations
from distkv.engine.engine import Engine
from distkv.engine.launch import Ranks, launched
from distkv.engine.model import load_model, load_tokenizer
from distkv.engine.record import Recording
from distkv.engine.requests import Completion, Prompt
from distkv.errors import ConfigError, DistKVError, GroupError, InputFileError
from distkv.layout import Layout

__all__ = ["main"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message, answered twice."""

    conversation: str
    number: int
    off: Completion
    on: Completion

    @property
    def same_answer(self) -> bool:
        """Whether both runs gave the same tokens."""
        return self.off.token_ids == self.on.token_ids


class Output:
    """Lines for whoever waits, from rank 0 alone, at once, with the time since the start."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._began = time.monotonic()

    def line(self, text: str = "") -> None:
        """Prints one line."""
        if self._rank == 0:
            print(text, flush=True)

    def phase(self, text: str) -> None:
        """Prints what begins now."""
        self.line(f"[{time.monotonic() - self._began:5.1f} s] {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m distkv.engine.quickstart", description=__doc__.split("\n")[0])
    parser.add_argument("config", help="configuration file (YAML)")
    parser.add_argument("--messages", metavar="FILE", help="JSON Lines: {\"messages\": [...]} on each line")
    given = parser.parse_args(arguments)
    rank = 0
    try:
        layout = Layout.from_environment()
        rank = layout.rank
        _quiet(rank)
        # every rank reads both before any of them starts anything
        config = load(given.config, ServeConfig)
        conversations = read_conversations(given.messages) if given.messages else built_in()
        with launched(
            layout, config.parallel.tp, config.group.timeout_s,
            device=config.model.device, transport=config.group.transport,
        ) as ranks:  # fmt: skip
            return _run(config, conversations, ranks, own_file=given.messages is not None)
    except (ConfigError, InputFileError) as error:
        if rank == 0:
            print(f"distkv: {error}", file=sys.stderr, flush=True)
        return 2
    except DistKVError as error:
        print(f"distkv, rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


def _quiet(rank: int) -> None:
    """Plain log lines of our own, only from rank 0; no look at the network for a model that lies on the disk."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.basicConfig(format="         %(message)s", level=logging.WARNING, stream=sys.stdout)
    logging.getLogger("distkv").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    import transformers

    theirs: Any = transformers.utils.logging  # has no types
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()


def _run(config: ServeConfig, conversations: list[Conversation], ranks: Ranks, *, own_file: bool) -> int:
    out = Output(ranks.rank)
    out.phase(f"loading {config.model.source} ({config.model.dtype}) on {ranks.size} rank(s), {ranks.device.type}")
    model = load_model(config.model, ranks.tp_group, device=ranks.device, timeout_s=config.group.timeout_s)
    tokenizer = load_tokenizer(config.model) if ranks.rank == 0 else None
    engine = Engine(
        config, model, tokenizer, cache_group=ranks.cache_group, handoff_group=ranks.handoff_group
    )
    engine.recording = Recording(engine.pool)
    out.phase(f"ready: {model.layers} layers, {model.kv_heads * model.tp_size} KV heads over {model.tp_size} rank(s), "
              f"{config.pool.pages} pages of {config.cache.page_size} tokens")  # fmt: skip
    turns: list[Turn] = []
    try:
        if ranks.rank == 0:
            turns = _answer_all(engine, tokenizer, conversations, out)
        else:
            engine.follow()
        return _check_and_report(engine, ranks.handoff_group, turns, out, own_file=own_file)
    finally:
        engine.close()


def _answer_all(engine: Engine, tokenizer: Any, conversations: list[Conversation], out: Output) -> list[Turn]:
    """Rank 0: every turn of every conversation. The others are told when it is over, unless the group is broken."""
    try:
        turns = [turn for c in conversations for turn in _answer(engine, tokenizer, c, out)]
    except GroupError:
        raise
    except BaseException:
        engine.shutdown()
        raise
    engine.shutdown()
    return turns


def _answer(engine: Engine, tokenizer: Any, conversation: Conversation, out: Output) -> list[Turn]:
    """Rank 0: answers the user messages in order; the history has the file's answers, else the model's."""
    turns, places = [], conversation.turns()
    history: list[Message] = []
    for number, at in enumerate(places, 1):
        start = places[number - 2] + 1 if number > 1 else 0
        # what lies between two questions and is no answer: the system message
        history += [m for m in conversation.messages[start : at + 1] if m["role"] != "assistant"]
        question = conversation.messages[at]["content"]
        out.phase(f"{conversation.name}, turn {number} of {len(places)}: {_short(question, 80)}")
        tokens = chat_tokens(tokenizer, history)
        off, on = (
            _ask(engine, Prompt(tokens=tokens, id=f"{conversation.name}/{number}/{mode}", read=mode == "on",
                                write=mode == "on", conversation=f"{conversation.name}/{mode}"))
            for mode in ("off", "on")
        )  # fmt: skip
        turns.append(Turn(conversation.name, number, off, on))
        out.line(f"          {on.prompt_tokens} tokens, {on.cached_tokens} from the cache; first token after "
                 f"{off.ttft_s or 0:.2f} s without the cache, {on.ttft_s or 0:.2f} s with it")  # fmt: skip
        out.line(f"          answer: {_short(on.text or '', 200)}")
        given = conversation.given_answer(at)
        history.append({"role": "assistant", "content": given if given is not None else on.text or ""})
    return turns


def _ask(engine: Engine, prompt: Prompt) -> Completion:
    done = engine.generate([prompt])[0]
    if done.error is not None:
        raise done.error
    return done


def _check_and_report(
    engine: Engine, group: dist.ProcessGroup | None, turns: list[Turn], out: Output, *, own_file: bool
) -> int:
    """All ranks: the gate over every turn that was answered with the cache; rank 0 prints what came of it."""
    recording = engine.recording
    assert recording is not None
    names = [name for name in recording.requests if name.endswith("/on")]
    out.phase(f"checking the bits: {len(names)} turn(s) are computed again, without the cache, in the same batches")
    reached: set[str] = set()

    def progress(name: str, done: int, total: int) -> None:
        if done == total and name not in reached:
            reached.add(name)
            out.phase(f"computed again: {name} ({total} batches)")

    report = gate.compare(
        recording, gate.recompute(engine.model, recording, names, continued=True, progress=progress),
        rank=engine.model.tp_rank,
    )  # fmt: skip
    differences, differing = _gathered(group, report)
    _print_report(turns, report, differences, differing, out)
    if differences:
        return 1
    if not report.cached_tokens:
        page = engine.config.cache.page_size
        out.line(f"Nothing came from the cache, so this proves nothing: no prompts share a full page of {page} tokens.")
        return 0 if own_file else 1
    return 0


def _gathered(group: dist.ProcessGroup | None, report: gate.GateReport) -> tuple[list[str], set[str]]:
    """Differences and differing requests of all ranks."""
    reports = [(report.differences, report.differing)]
    if group is not None:
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, reports[0], group=group)
        reports = everyone
    return [d for found, _ in reports for d in found], {name for _, found in reports for name in found}


def _print_report(
    turns: list[Turn], report: gate.GateReport, differences: list[str], differing: set[str], out: Output
) -> None:
    if not turns:
        return
    out.line()
    out.line("                     prompt   cached   first token, s    same     same")
    out.line("conversation  turn   tokens   tokens      off       on   answer   bits")
    for turn in turns:
        off, on = turn.off, turn.on
        same = f"{_yes(turn.same_answer):<6}   {_yes(on.id not in differing)}"
        out.line(
            f"{_short(turn.conversation, 12):<12}  {turn.number:>4}  {on.prompt_tokens:>7}  {on.cached_tokens:>7}  "
            f"{off.ttft_s or 0:>7.2f}  {on.ttft_s or 0:>7.2f}   {same}"
        )
    prompt, cached = (sum(getattr(t.on, f) for t in turns) for f in ("prompt_tokens", "cached_tokens"))
    out.line()
    out.line(f"prefill tokens saved: {cached} of {prompt} ({cached / prompt:.0%})")
    off_s, on_s = (statistics.median(getattr(t, mode).ttft_s or 0.0 for t in turns) for mode in ("off", "on"))
    out.line(f"median time to first token: {off_s:.2f} s without the cache, {on_s:.2f} s with it")
    what = f"{report.rows} rows of logits and {report.pages} pages on each rank"
    if differences:
        out.line(f"bits: {len(differences)} DIFFERENCE(S) in {what}")
        for line in differences[:5]:
            out.line(f"  {line}")
    else:
        out.line(f"bits: {what} are the same as without the cache")


def _short(text: str, n: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= n else text[: n - 3] + "..."


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


if __name__ == "__main__":
    sys.exit(main())
