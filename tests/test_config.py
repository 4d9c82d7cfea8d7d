"""The strict configuration: what is accepted, and one clear error for everything else."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Literal

import pytest

from distkv.config import (
    CacheConfig,
    Config,
    GroupConfig,
    HostConfig,
    PoolConfig,
    Section,
    agreed_fields,
    from_mapping,
    load,
    setting,
)
from distkv.errors import ConfigError


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "some config.yaml"
    content = textwrap.dedent(text).encode() if isinstance(text, str) else text
    path.write_bytes(content)
    return path


def problem(folder: Path, text: str | bytes, cls: type = Config) -> ConfigError:
    """The error that loading ``text`` gives. Its message is one line."""
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text), cls)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return caught.value


def test_defaults_and_a_whole_file(tmp_path: Path) -> None:
    assert load(write(tmp_path, "{}")) == Config()
    text = """
    # a comment
    cache:
      page_size: 96
      index_on: fill
      queue_slots: 4
      heartbeat: 10
      key_function: "xxh3_64"
      asynchronous: true
    pool: {pages: 12, scratch_pages: 1, check: true}
    group:
      transport: gloo
      timeout_s: 5
    """
    assert load(write(tmp_path, text)) == Config(
        cache=CacheConfig(page_size=96, index_on="fill", queue_slots=4, heartbeat=10, asynchronous=True),
        pool=PoolConfig(pages=12, scratch_pages=1, check=True),
        group=GroupConfig(transport="gloo", timeout_s=5.0),
    )


def test_a_byte_order_mark_and_document_marks_are_accepted(tmp_path: Path) -> None:
    assert load(write(tmp_path, b"\xef\xbb\xbf---\ncache: {page_size: 3}\n...\n")).cache.page_size == 3


@pytest.mark.parametrize(
    ("text", "path", "parts"),
    [
        ("cache: {page_sise: 4}", "cache.page_sise", ["unknown field", "did you mean page_size?", "line 1"]),
        ("cach: {}", "cach", ["unknown field", "did you mean cache?"]),
        ("page_size: 4", "page_size", ["unknown field", "it belongs under cache"]),
        ("group: {zzz: 4}", "group.zzz", ["unknown field", "there is transport, timeout_s"]),
        ("cache:\n  page_size: 4\n  page_size: 8", "cache.page_size", ["given twice", "first on line 2", "line 3"]),
        ("pool: {}\ncache: {}\npool: {}", "pool", ["given twice", "first on line 1", "line 3"]),
        ("cache:\n  index_on: fil", "cache.index_on", ["one of finish, fill", "'fil'", "did you mean fill?", "line 2"]),
        ("cache: {index_on: FILL}", "cache.index_on", ["did you mean fill?"]),
        ("cache: {page_size: 0}", "cache.page_size", ["a whole number from 1 to 4096, got 0"]),
        ("cache: {page_size: -1}", "cache.page_size", ["got -1"]),
        ("cache: {page_size: 4097}", "cache.page_size", ["got 4097"]),
        ("cache: {page_size: '96'}", "cache.page_size", ["got the text '96'"]),
        ("cache: {page_size: 96.0}", "cache.page_size", ["a whole number", "got 96.0"]),
        ("cache: {page_size: true}", "cache.page_size", ["got true"]),
        ("cache: {page_size: }", "cache.page_size", ["got nothing"]),
        ("cache: {page_size: ~}", "cache.page_size", ["got nothing"]),
        ("cache: {page_size: [4]}", "cache.page_size", ["got a list"]),
        ("cache: {page_size: {a: 4}}", "cache.page_size", ["got a mapping"]),
        ("cache: {page_size: 0x10}", "cache.page_size", ["got the text '0x10'"]),
        ("cache: {page_size: 010}", "cache.page_size", ["got the text '010'"]),
        ("cache: {page_size: 1_000}", "cache.page_size", ["got the text '1_000'"]),
        ("cache: {page_size: 1:30}", "cache.page_size", ["got the text '1:30'"]),
        ("cache: {page_size: " + "9" * 5000 + "}", "cache.page_size", ["5000 digits"]),
        ("cache: {page_size: " + "9" * 400 + "}", "cache.page_size", ["got 999", "..."]),
        ("cache: {asynchronous: 1}", "cache.asynchronous", ["true or false, got 1"]),
        ("cache: {asynchronous: yes}", "cache.asynchronous", ["true or false, got the text 'yes'"]),
        ("cache: {queue_slots: 0}", "cache.queue_slots", ["from 1"]),
        ("cache: {heartbeat: 0}", "cache.heartbeat", ["from 1"]),
        ("group: {timeout_s: 4, heartbeat_s: 2}", "group.heartbeat_s", ["a quarter of timeout_s", "4", "2"]),
        ("cache: {key_function: sha256}", "cache.key_function", ["xxh3_64"]),
        ("pool: {pages: -4}", "pool.pages", ["got -4"]),
        ("pool: {pages: 0}", "pool.pages", ["got 0"]),
        ("pool: {pages: 2147483648}", "pool.pages", ["at most", "2147483648"][1:]),
        ("pool: {scratch_pages: -1}", "pool.scratch_pages", ["got -1"]),
        ("pool:\n  pages: 4\n  scratch_pages: 4", "pool.scratch_pages", ["less than pages, which is 4", "line 3"]),
        ("pool: {pages: 4, scratch_pages: 5}", "pool.scratch_pages", ["less than pages"]),
        ("group: {timeout_s: 0}", "group.timeout_s", ["from 0.001 to 86400"]),
        ("group: {timeout_s: -1}", "group.timeout_s", ["from 0.001 to 86400"]),
        ("group: {timeout_s: .nan}", "group.timeout_s", ["got nan"]),
        ("group: {timeout_s: .inf}", "group.timeout_s", ["got inf"]),
        ("group: {timeout_s: -.inf}", "group.timeout_s", ["got -inf"]),
        ("group: {timeout_s: 1e999}", "group.timeout_s", ["got inf"]),
        ("group: {timeout_s: 1e6}", "group.timeout_s", ["from 0.001 to 86400"]),
        ("group: {timeout_s: true}", "group.timeout_s", ["got true"]),
        ("group: {timeout_s: '5'}", "group.timeout_s", ["got the text '5'"]),
        ("group: {transport: gluo}", "group.transport", ["did you mean gloo?"]),
        ("group: {transport: off}", "group.transport", ["auto, gloo, mpi, nccl"]),
        ("host: {pages: 0}", "host.pages", ["a whole number from 1 to", "or null, got 0"]),
        ("host: {pages: -8}", "host.pages", ["got -8"]),
        ("host: {pages: 10GB}", "host.pages", ["a whole number", "got the text '10GB'"]),
        ("host: {page: 8}", "host.page", ["did you mean pages?"]),
        ("host: {gib_per_rank: 10GB}", "host.gib_per_rank", ["a number of more than 0", "got the text '10GB'"]),
        ("host: {gib_per_rank: 10GiB}", "host.gib_per_rank", ["got the text '10GiB'"]),
        ("host: {gib_per_rank: 0}", "host.gib_per_rank", ["a number of more than 0", "got 0"]),
        ("host: {gib_per_node: -4}", "host.gib_per_node", ["got -4"]),
        ("host: {gib_per_node: .inf}", "host.gib_per_node", ["got inf"]),
        ("host:\n  pages: 4\n  gib_per_node: 4", "host.gib_per_node", ["and pages too", "once", "line 3"]),
        ("host: {gib_per_node: 4, gib_per_rank: 4}", "host.gib_per_node", ["and gib_per_rank too"]),
        ("host: {pages: 4, preemption_pages: 4}", "host.preemption_pages", ["less than pages, which is 4, got 4"]),
        ("host: {preemption_pages: 4}", "host.preemption_pages", ["there is no host tier"]),
        ("host: {pages: 4, preemption_pages: -1}", "host.preemption_pages", ["got -1"]),
        ("host: {write_policy: evicted}", "host.write_policy", ["one of evict, finish", "did you mean evict?"]),
        ("host: {loading_slots: 0}", "host.loading_slots", ["from 1 to 1024, got 0"]),
        ("host: {loading_slots: 1025}", "host.loading_slots", ["got 1025"]),
        ("host: {load_timeout_s: 0}", "host.load_timeout_s", ["from 0.001"]),
        ("host: {copy_threads: 0}", "host.copy_threads", ["from 1"]),
        ("host: {chunk_gib: 0}", "host.chunk_gib", ["more than 0"]),
        ("host: {require_pinned: 1}", "host.require_pinned", ["true or false, got 1"]),
        ("cache: {agreement: lockstep}\nhost: {pages: 8}", "host", ["agreement lockstep", "minimum", "line 2"]),
        ("cache:", "cache", ["a mapping of fields, got nothing"]),
        ("cache: 128", "cache", ["a mapping of fields, got 128"]),
        ("cache: [1]", "cache", ["a mapping of fields, got a list"]),
    ],
)
def test_one_error_names_the_field_and_what_is_allowed(
    tmp_path: Path, text: str, path: str, parts: list[str]
) -> None:
    error = problem(tmp_path, text)
    assert error.path == path
    assert str(error).startswith(path + ": ")
    assert "some config.yaml" in str(error)
    for part in parts:
        assert part in str(error)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["is empty"]),
        ("# only a comment\n", ["is empty"]),
        ("---\n", ["is empty"]),
        ("- a\n- b\n", ["top level must be a mapping", "a list"]),
        ("hello", ["top level must be a mapping", "a single value"]),
        ("cache: {}\n---\npool: {}\n", ["more than one YAML document", "line 2"]),
        ("cache: {page_size: 4", ["not valid YAML", "line 1"]),
        ("cache:\n\tpage_size: 4", ["not valid YAML", "line 2"]),
        ("a: b: c", ["not valid YAML", "line 1"]),
        ("cache: \x07", ["not valid YAML"]),
        ("1: 2", ["name must be a text", "'1'", "line 1"]),
        ("true: 2", ["name must be a text"]),
        ("? [a]\n: 2", ["name must be a text", "a list or mapping"]),
        ("cache: !!python/object/apply:os.system ['true']", ["tags (!) are not allowed", "line 1"]),
        ("cache: {page_size: !!int '96'}", ["tags (!) are not allowed"]),
        ("cache: {page_size: ! 96}", ["tags (!) are not allowed"]),
        ("cache: &a {page_size: 4}", ["anchors and aliases", "line 1"]),
        ("cache: &a {}\npool: *a", ["anchors and aliases", "line 1"]),
        ("cache: *a", ["anchors and aliases", "line 1"]),
        ("cache: {<<: {page_size: 4}}", ["cache.<<", "unknown field"]),
        ("cache: " + "[" * 5000, ["nested deeper than"]),
        (b"\xff\xfe\x00bad", ["not UTF-8"]),
        (b"GGUF" + b"x" * (1 << 21), ["larger than", "configuration file?"]),
    ],
)
def test_a_file_that_is_not_one_yaml_mapping(tmp_path: Path, text: str | bytes, parts: list[str]) -> None:
    error = problem(tmp_path, text)
    for part in parts:
        assert part in str(error)
    assert "some config.yaml" in str(error)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    paths: list[Path | str] = [tmp_path / "none.yaml", tmp_path, "zero\0byte"]
    for path in paths:
        with pytest.raises(ConfigError, match="cannot read the configuration file"):
            load(path)


def test_a_section_made_by_hand_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"CacheConfig\.page_size: must be a whole number from 1 to 4096, got 0"):
        CacheConfig(page_size=0)
    with pytest.raises(ConfigError, match="less than pages"):
        PoolConfig(pages=2, scratch_pages=2)
    with pytest.raises(ConfigError, match=r"Config\.cache: must be a CacheConfig"):
        Config(cache=PoolConfig())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"page_size"):
        dataclasses.replace(CacheConfig(), page_size=True)
    with pytest.raises(TypeError):
        CacheConfig(128)  # type: ignore[call-arg]  # keyword only
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheConfig().page_size = 3  # type: ignore[misc]


@pytest.mark.parametrize("size", ["pages", "gib_per_rank", "gib_per_node"])
def test_a_host_tier_is_asked_for_by_one_of_three_sizes(size: str) -> None:
    assert not HostConfig().configured
    host = HostConfig(**{size: 2})  # type: ignore[arg-type]
    assert host.configured
    with pytest.raises(ConfigError, match=r"Config\.host: .*lockstep"):
        Config(host=host, cache=CacheConfig(agreement="lockstep"))
    assert ("host.pages" in Config(host=host).derived()) == (size != "pages")
    assert ("host.gib_per_rank" in Config(host=host).derived()) == (size == "gib_per_node")
    assert Config().derived() == {}


def test_agreed_fields_are_the_fields_that_every_rank_must_share() -> None:
    assert agreed_fields(Config()) == {
        "cache.page_size": "128",
        "cache.index_on": '"finish"',
        "cache.queue_slots": "8",
        "cache.heartbeat": "64",
        "cache.key_function": '"xxh3_64"',
        "cache.asynchronous": "false",
        "cache.agreement": '"minimum"',
        "cache.check_every": "64",
        "cache.lookahead_tokens": "0",
        "cache.next_token_depth": "0",
        "cache.window_boundaries": "64",
        "host.loading_slots": "8",
        "group.transport": '"auto"',
        "group.heartbeat_s": "null",
    }
    local = Config(pool=PoolConfig(pages=3), group=GroupConfig(timeout_s=1))
    assert agreed_fields(local) == agreed_fields(Config())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt(Section):
    text: str = setting(agreed=True, low=1)
    repeat: int = setting(1, agreed=True, low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Application(Config):
    model: Path = setting(agreed=False)
    share: float = setting(0.5, agreed=True, low=0, high=1)
    mode: Literal["fast", "exact"] | None = setting(None, agreed=True)
    sizes: tuple[int, ...] = setting((), agreed=True, low=1)
    prompts: tuple[Prompt, ...] = setting((), agreed=True)
    first: Prompt | None = None


@dataclasses.dataclass(frozen=True)
class Plain:
    size: int
    name: str = "x"


def test_an_application_adds_its_own_sections(tmp_path: Path) -> None:
    text = """
    model: some/where
    share: 1
    mode: fast
    sizes: [1, 2]
    prompts:
      - {text: a}
      - {text: b, repeat: 2}
    first: {text: c}
    pool: {pages: 3}
    """
    loaded = load(write(tmp_path, text), Application)
    assert loaded == Application(
        model=Path("some/where"),
        share=1.0,
        mode="fast",
        sizes=(1, 2),
        prompts=(Prompt(text="a"), Prompt(text="b", repeat=2)),
        first=Prompt(text="c"),
        pool=PoolConfig(pages=3),
    )
    agreed = agreed_fields(loaded)
    assert agreed["share"] == "1.0"
    assert agreed["prompts[1].repeat"] == "2"
    assert agreed["sizes"] == "[1, 2]"
    assert "model" not in agreed


@pytest.mark.parametrize(
    ("text", "path", "parts"),
    [
        ("share: 0.1", "model", ["missing; give a path"]),
        ("model: 3", "model", ["a path, got 3"]),
        ("model: ''", "model", ["a path"]),
        ("model: m\nmode: fats", "mode", ["one of fast, exact or null", "'fats'", "did you mean fast?", "line 2"]),
        ("model: m\nsizes: [1, 0]", "sizes", ["item 1 must be a whole number of at least 1, got 0"]),
        ("model: m\nsizes: 3", "sizes", ["a list, each item a whole number", "got 3"]),
        ("model: m\nprompts:\n- text: a\n- txt: b", "prompts[1].txt", ["did you mean text?", "line 4"]),
        ("model: m\nprompts:\n- {repeat: 2}", "prompts[0].text", ["missing"]),
        ("model: m\nprompts:\n- text: ''", "prompts[0].text", ["a text that is not empty", "got the text ''"]),
        ("model: m\nprompts: {text: a}", "prompts", ["a list, each item a mapping"]),
        ("model: m\nfirst: 3", "first", ["a mapping of fields, got 3"]),
    ],
)
def test_errors_in_an_applications_sections(tmp_path: Path, text: str, path: str, parts: list[str]) -> None:
    error = problem(tmp_path, text, Application)
    assert error.path == path
    for part in parts:
        assert part in str(error)


def test_a_plain_dataclass_and_a_plain_mapping() -> None:
    assert from_mapping({"size": 3}, Plain) == Plain(3)
    with pytest.raises(ConfigError, match="size: must be a whole number, got the text '3'"):
        from_mapping({"size": "3"}, Plain)
    with pytest.raises(ConfigError, match="name must be a text"):
        from_mapping({1: 3}, Plain)  # type: ignore[dict-item]


def test_without_pyyaml_importing_works_and_loading_names_the_extra(tmp_path: Path) -> None:
    path = write(tmp_path, "{}")
    code = f"""
    import sys
    sys.modules["yaml"] = None  # what a missing module looks like to import
    from distkv.config import Config, load
    from distkv.errors import ConfigError
    Config()
    try:
        load({str(path)!r})
    except ConfigError as error:
        print(error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=True
    )
    assert 'pip install ".[yaml]"' in run.stdout
