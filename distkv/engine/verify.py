"""Runs your model on your conversations cold and warm, under random schedules, and says whether all bits are the same.

``distkv verify CONFIG [--messages FILE | --random] [--schedules N] [--seed S]``. With parallel.tp above 1 it starts its
own ranks on this host; under torchrun it is one of them. First every turn is answered without the cache. Then all of
them run with it: once in order, and under N random schedules (pieces, batches, strangers, order, pool size, what is
suspended and goes on later). The logits of every token and the KV memory of every request must have the same bits, and
at the end every cached page, on the device and on the host, is computed again and compared.

Exit code 0: the same bits. 1: a difference, or nothing came from the cache (with a host tier: from the host), or it
failed. 2: the configuration, the file or the model cannot be used. 130: interrupted. 141: nobody reads the output.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from distkv import launching
from distkv._streams import BROKEN_PIPE
from distkv._text import counted
from distkv.config import load
from distkv.engine.config import ServeConfig
from distkv.engine.conversation import Conversation, built_in, read_conversations
from distkv.engine.launch import Ranks, StartFailed, on_all_ranks
from distkv.engine.model import Model, load_model, load_tokenizer
from distkv.engine.program import end_with, exit_code, joined
from distkv.engine.report import Output, OutputLost, errors_by_rank
from distkv.engine.turns import Talk, chats, random_talks
from distkv.engine.verification import Failed, Verification
from distkv.errors import ConfigError, ModelError, PromptError
from distkv.layout import Layout

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    given = _parser().parse_args(arguments)

    def work(layout: Layout) -> int:
        # every rank reads both before any of them starts anything
        config = load(given.config, ServeConfig)
        conversations = None if given.random else built_in()
        if given.messages is not None:
            conversations = read_conversations(given.messages)
        if layout.source == "alone" and config.parallel.ranks > 1:
            return _start(config, sys.argv[1:] if arguments is None else arguments)
        with joined(config, layout) as ranks:
            return _run(config, conversations, ranks, schedules=given.schedules, seed=given.seed)

    return exit_code(work)


def _parser() -> argparse.ArgumentParser:
    first, *rest = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(prog="distkv verify", description=first, epilog="\n\n".join(rest),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("config", help="configuration file (YAML)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--messages", metavar="FILE", help='JSON Lines, {"messages": [...]} on each line; default: the '
                      "built-in conversation")  # fmt: skip
    what.add_argument("--random", action="store_true", help="prompts of random token ids; needs no tokenizer")
    parser.add_argument("--schedules", metavar="N", type=_count, default=4, help="random schedules (4)")
    parser.add_argument("--seed", metavar="S", type=_count, default=0, help="of the random schedules and prompts (0)")
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 on, got {text!r}")
    return int(text)


def _start(config: ServeConfig, arguments: Sequence[str]) -> int:
    """The ranks, on this host: they run this module with the same arguments."""
    launching.take_interrupts("distkv")
    hosts = launching.Hosts.from_environment(config.parallel.ranks)
    hosts.check_number(config.parallel.ranks)
    return launching.start("distkv.engine.verify", arguments, hosts, name="distkv", explained=(1, 2, BROKEN_PIPE))


def _run(
    config: ServeConfig, conversations: list[Conversation] | None, ranks: Ranks, *, schedules: int, seed: int
) -> int:
    out = Output(ranks.rank)
    out.phase(f"loading {config.model.source} ({config.model.dtype}) on {counted(ranks.size, 'rank')}, "
              f"{ranks.device.type}")  # fmt: skip
    try:
        model, tokenizer = on_all_ranks(
            ranks, config.engine.idle_timeout_s, lambda: _load(config, ranks, with_tokenizer=conversations is not None)
        )
        verification = Verification(config, model, tokenizer, ranks, out)
        on_all_ranks(ranks, config.engine.idle_timeout_s, verification.prepare)
    except StartFailed as failed:
        for line in errors_by_rank(failed.errors):
            out.error(line)
        return 2
    log = logging.getLogger("distkv.host")
    level = log.level
    log.setLevel(logging.WARNING)  # the first engine has said what every other one would
    try:
        verification.cold(lambda: _talks(config, conversations, model, tokenizer, seed))
        for number in range(schedules + 1):
            verification.warm(number, seed, last=number == schedules)
        verification.conclude()
    except OutputLost:
        pass
    except (PromptError, ModelError) as error:
        out.error(f"distkv: {error}")
        return 2
    except Failed as failed:
        for line in failed.lines:
            out.error(line)
        return failed.code
    finally:
        log.setLevel(level)
    return out.exit_code(0)


def _load(config: ServeConfig, ranks: Ranks, *, with_tokenizer: bool) -> tuple[Model, Any]:
    model = load_model(config.model, ranks.mesh, device=ranks.device, timeout_s=config.group.timeout_s)
    if model.windows is not None and model.windows.apart and not config.engine.batch_invariant:
        raise ConfigError("engine.batch_invariant", "is false, and this model has layers with a sliding window beside "
                          "others: their cached pages may come from other batches than the pages of the same tokens in "
                          "the first pool, so a run cannot be computed again batch by batch; set it to true")
    # The engine's may fail on one rank alone, and then the others would wait for it where caches are compared.
    model.pools(config)
    if ranks.rank or not with_tokenizer:
        return model, None
    try:
        tokenizer = load_tokenizer(config.model)
    except ModelError as error:
        raise ModelError(f"{error}; --random needs none") from error
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(f"the tokenizer of {config.model.source} has no chat template, so it cannot take part in a "
                         "conversation; use --random")  # fmt: skip
    return model, tokenizer


def _talks(
    config: ServeConfig, conversations: list[Conversation] | None, model: Model, tokenizer: Any, seed: int
) -> list[Talk]:
    if conversations is not None:
        return list(chats(tokenizer, conversations))
    size, answer = config.cache.page_size, config.engine.output_limit
    room = (config.pool.pages - config.pool.scratch_pages) * size
    least = 5 * size + answer  # of the longest first turn, and a page more
    if room < least:
        pages = -(-least // size)
        raise ConfigError("pool.pages", f"is too small for random prompts of some pages: they need {pages} usable ones")
    if model.context < least:
        raise ModelError(f"the model's context of {model.context} tokens is too short for random prompts of some pages "
                         f"of {size}; lower cache.page_size")  # fmt: skip
    return list(random_talks(seed, vocab=model.vocab_size, page_size=size,
                             longest=min(model.context, room), answer=answer))  # fmt: skip


if __name__ == "__main__":
    end_with(main)
