"""Answers a conversation with the cache off and on, and compares answers, times and bits.

``python -m distkv.engine.quickstart CONFIG [--messages FILE]``, one process for each rank (``launch/torchrun.sh``).
Exit code 0: all bits are the same. 1: they are not, a turn was refused, or it failed. 2: the configuration, the file or
the model cannot be used. 130: interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from typing import Any

from distkv._text import counted
from distkv.config import load
from distkv.engine import gate
from distkv.engine.compare import GateReport, compare
from distkv.engine.config import ServeConfig
from distkv.engine.conversation import Conversation, Message, built_in, chat_tokens, read_conversations
from distkv.engine.engine import Engine
from distkv.engine.launch import Ranks, StartFailed, on_all_ranks
from distkv.engine.model import Model, load_model, load_tokenizer
from distkv.engine.program import end_with, exit_code, joined
from distkv.engine.record import Recording
from distkv.engine.report import (
    Output,
    Refusal,
    Turn,
    errors_by_rank,
    print_report,
    request_id,
    short,
    tier_line,
    title,
    with_titles,
)
from distkv.engine.requests import Completion, Prompt
from distkv.errors import (
    DistKVError,
    GroupError,
    KeyNamingError,
    ModelError,
    RequestError,
)
from distkv.layout import Layout

__all__ = ["main"]

logger = logging.getLogger(__name__)

# What says that one prompt cannot be run, and nothing about the engine.
_REFUSED = (RequestError, KeyNamingError, ModelError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m distkv.engine.quickstart", description=__doc__.split("\n")[0])
    parser.add_argument("config", help="configuration file (YAML)")
    parser.add_argument("--messages", metavar="FILE", help='JSON Lines: {"messages": [...]} on each line')
    given = parser.parse_args(arguments)

    def work(layout: Layout) -> int:
        # every rank reads both before any of them starts anything
        config = load(given.config, ServeConfig)
        conversations = read_conversations(given.messages) if given.messages is not None else built_in()
        with joined(config, layout) as ranks:
            return _run(config, conversations, ranks, own_file=given.messages is not None)

    return exit_code(work, worded=with_titles)


def _run(config: ServeConfig, conversations: list[Conversation], ranks: Ranks, *, own_file: bool) -> int:
    out = Output(ranks.rank)
    where = f"{counted(ranks.size, 'rank')}, {ranks.device.type}"
    out.phase(f"loading {config.model.source} ({config.model.dtype}) on {where}")
    seconds = config.engine.idle_timeout_s
    try:
        model, tokenizer = on_all_ranks(ranks, seconds, lambda: _load(config, ranks))
        engine = on_all_ranks(ranks, seconds, lambda: _engine(config, ranks, model, tokenizer))
    except StartFailed as failed:
        for line in errors_by_rank(failed.errors):
            out.error(line)
        return 2
    heads = counted(model.kv_heads * model.size, "KV head")
    out.phase(f"ready: {counted(model.layers, 'layer')}, {heads} over {counted(model.size, 'rank')}, "
              f"{counted(config.pool.pages, 'page')} of {counted(config.cache.page_size, 'token')}")  # fmt: skip
    rows: list[Turn | Refusal] = []
    try:
        if ranks.rank == 0:
            answered = _answer_all(engine, tokenizer, conversations, out)
            if answered is None:
                return 1
            rows = answered
        else:
            engine.follow()
            if engine.failed:  # rank 0 has said why
                return 1
        return out.exit_code(_check_and_report(engine, ranks, rows, out, own_file=own_file))
    finally:
        engine.close()


def _load(config: ServeConfig, ranks: Ranks) -> tuple[Model, Any]:
    model = load_model(config.model, ranks.mesh, device=ranks.device, timeout_s=config.group.timeout_s)
    # The engine's may fail on one rank alone, and then the others would wait for it where caches are compared.
    model.pools(config)
    tokenizer = load_tokenizer(config.model) if ranks.rank == 0 else None
    if ranks.rank == 0 and not getattr(tokenizer, "chat_template", None):
        raise ModelError(f"the tokenizer of {config.model.source} has no chat template, so it cannot take part in a "
                         "conversation; use a model that was trained to chat")  # fmt: skip
    return model, tokenizer


def _engine(config: ServeConfig, ranks: Ranks, model: Model, tokenizer: Any) -> Engine:
    engine = Engine(config, model, tokenizer, cache_group=ranks.cache_group, handoff_group=ranks.handoff_group)
    engine.recording = Recording(engine.pool)
    return engine


def _answer_all(
    engine: Engine, tokenizer: Any, conversations: list[Conversation], out: Output
) -> list[Turn | Refusal] | None:
    """Rank 0: every turn of every conversation. The others are told when it is over, unless the group is broken.

    None: it failed, as was printed; the others know.
    """
    rows: list[Turn | Refusal] = []
    try:
        for conversation in conversations:
            _answer(engine, tokenizer, conversation, rows, out)
    except GroupError:
        raise
    except Exception as error:  # handed on: to the user, and to the other ranks
        # first of all the reason, because the launcher ends this rank when the others have ended
        if isinstance(error, DistKVError):
            out.error(with_titles(f"distkv, rank 0: {type(error).__name__}: {error}"))
        else:
            logger.exception("rank 0 failed")
        engine.shutdown(failed=True)
        return None
    engine.shutdown()
    return rows


def _answer(
    engine: Engine, tokenizer: Any, conversation: Conversation, rows: list[Turn | Refusal], out: Output
) -> None:
    """Rank 0: answers the user messages in order; the history has the file's answers, else the model's."""
    places, history = conversation.turns(), list[Message]()
    for number, at in enumerate(places, 1):
        history += conversation.added(number - 1)
        question = conversation.messages[at]["content"]
        out.phase(f"{conversation.name}, turn {number} of {len(places)}: {short(question, 80)}")
        try:
            tokens = chat_tokens(tokenizer, history)
            off = _ask(engine, conversation.name, number, "off", tokens)
            out.line(f"          without the cache: first token after {off.ttft_s or 0:.2f} s")
            on = _ask(engine, conversation.name, number, "on", tokens)
        except _REFUSED as error:
            rows.append(_refusal(conversation, number, len(places), error, out))
            return
        from_host = f", {on.host_tokens} of them read in from the host" * bool(on.host_tokens)
        out.line(f"          with the cache: first token after {on.ttft_s or 0:.2f} s, {on.cached_tokens} of "
                 f"{counted(on.prompt_tokens, 'token')} from it{from_host}")  # fmt: skip
        out.line(f"          answer: {short(on.text or '', 200)}")
        rows.append(Turn(conversation.name, number, off, on))
        given = conversation.given_answer(at)
        history.append({"role": "assistant", "content": given if given is not None else on.text or ""})


def _refusal(conversation: Conversation, number: int, turns: int, error: DistKVError, out: Output) -> Refusal:
    reason = str(error)
    if isinstance(error, RequestError):
        reason = reason.removeprefix(f"request {error.request_id!r}: ")
    left = turns - number
    rest = f"; the {counted(left, 'turn')} after it {'is' if left == 1 else 'are'} left out" if left else ""
    out.line(f"          {conversation.name}, turn {number}: refused: {reason}{rest}")
    return Refusal(conversation.name, number, reason)


def _ask(engine: Engine, conversation: str, number: int, mode: str, tokens: Any) -> Completion:
    prompt = Prompt(tokens=tokens, id=request_id(conversation, number, mode), read=mode == "on", write=mode == "on",
                    conversation=f"{conversation}/{mode}")  # fmt: skip
    done = engine.generate([prompt])[0]
    if done.error is not None:
        raise done.error
    return done


def _check_and_report(engine: Engine, ranks: Ranks, rows: list[Turn | Refusal], out: Output, *, own_file: bool) -> int:
    """All ranks: the gate over every turn that was answered with the cache; rank 0 prints what came of it."""
    recording = engine.recording
    assert recording is not None
    names = [name for name, r in recording.requests.items() if name.endswith("/on") and r.kv is not None]
    report = GateReport(0, 0, 0, 0, ())
    if names:
        these = f"{counted(len(names), 'turn is', 'turns are')} computed again"
        out.phase(f"checking the bits: {these}, without the cache, in the same batches")
        again = gate.recompute(engine.model, recording, names, continued=True, progress=_progress(out))
        report = compare(recording, again, rank=engine.model.rank)
    refused = sum(isinstance(row, Refusal) for row in rows)
    told = [json.dumps([report.differences, sorted(report.differing), refused]).encode()]
    if ranks.cache_group is not None:
        told = ranks.cache_group.exchange(told[0])
    everyone = [json.loads(data) for data in told]
    differences = [line for lines, _, _ in everyone for line in lines]
    refused = everyone[0][2]
    tier = tier_line(engine.cache.stats(), engine.cache.host_memory)
    print_report(rows, report, differences, {name for _, found, _ in everyone for name in found}, out, tier)
    if refused:
        out.line(f"{counted(refused, 'turn was', 'turns were')} refused: see the table.")
    if differences or refused:
        return 1
    if engine.config.engine.cache == "off":
        out.line("Nothing came from the cache, because engine.cache is off: this proves nothing about the cache.")
    elif not report.cached_tokens:
        page = counted(engine.config.cache.page_size, "token")
        out.line(f"Nothing came from the cache, so this proves nothing: no prompts share a full page of {page}.")
        return 0 if own_file else 1
    return 0


def _progress(out: Output) -> gate.Progress:
    reached: set[str] = set()

    def progress(name: str, done: int, total: int) -> None:
        if done == total and name not in reached:
            reached.add(name)
            out.phase(f"computed again: {title(name)} ({counted(total, 'batch', 'batches')})")

    return progress


if __name__ == "__main__":
    end_with(main)
