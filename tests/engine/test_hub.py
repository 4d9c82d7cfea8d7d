"""Models of the hub, over a small hub on this host: what is downloaded, by whom, and what is said where none can be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from distkv.engine.config import ModelConfig
from distkv.engine.hub import hub_id
from distkv.engine.model import load_model
from distkv.engine.sources import may_download, model_folder
from distkv.errors import ModelError
from tests.engine import tiny

COMMIT, OLDER = "a" * 40, "b" * 40
INDEX = json.dumps({"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}).encode()
NEVER = {"README.md": b"-", "pytorch_model.bin": b"-", "onnx/model.safetensors": b"-", "consolidated.safetensors": b"-"}


class Hub(ThreadingHTTPServer):
    """As much of the hub's API as a download of files needs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.sent: Counter[str] = Counter()
        self.slowly = threading.Event()
        self.slowly.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, words = self.server, self.path.partition("?")[0].strip("/").split("/")
        api = words[:2] == ["api", "models"]
        words = words[2:] if api else words
        repository, kind, revision, file = "/".join(words[:2]), words[2], words[3], "/".join(words[4:])
        files = hub.files.get(repository)
        if files is None:
            self.reply(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif revision not in ("main", COMMIT, OLDER):
            self.reply(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        elif api and kind == "revision":
            sha = revision if revision != "main" else COMMIT
            self.reply(200, json.dumps({"id": repository, "sha": sha, "siblings": []}).encode())
        elif api:
            tree = [{"type": "file", "path": p, "size": len(b), "oid": f"{len(b):040x}"} for p, b in files.items()]
            self.reply(200, json.dumps(tree).encode())
        elif repository in hub.gated:
            self.reply(403, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted")
        else:
            hub.slowly.wait(20)
            hub.sent[f"{self.command} {repository}/{file}"] += 1
            self.reply(200, files[file], ETag=f'"{file.replace("/", "-")}-{len(files[file])}"', X_Repo_Commit=revision)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tiny.model_folder(tmp_path_factory.mktemp("hub"), "llama")
    with Hub() as server:
        server.files["org/tiny"] = {p.name: p.read_bytes() for p in folder.iterdir()} | NEVER
        server.files["org/parts"] = {
            "config.json": b"{}", "model.safetensors.index.json": INDEX, "model-1.safetensors": b"1",
            "model-2.safetensors": b"2", "tokenizer.json": b"{}", **NEVER,
        }  # fmt: skip
        server.files["org/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"-"}
        server.files["org/gated"] = server.files["org/parts"]
        server.gated.add("org/gated")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def online(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Points huggingface_hub, which reads its environment when it is imported, to the hub and an empty cache."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)

    def switch(on: bool) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", not on)

    switch(True)
    return switch


def error(source: str) -> str:
    with pytest.raises(ModelError) as caught:
        model_folder(source)
    return str(caught.value)


def test_a_model_is_downloaded_once_and_then_the_hub_is_not_asked(hub: Hub, online: Callable[[bool], None]) -> None:
    hub.sent.clear()
    model = load_model(ModelConfig(source="org/tiny"))
    folder = model_folder("org/tiny")
    assert folder.name == COMMIT
    assert not {p.name for p in folder.iterdir()} & {name.partition("/")[0] for name in NEVER}
    wanted = {f"GET org/tiny/{name}" for name in hub.files["org/tiny"].keys() - NEVER.keys()}
    assert {name for name in hub.sent if name.startswith("GET")} == wanted
    hub.sent.clear()
    online(False)
    assert load_model(ModelConfig(source=f"org/tiny@{COMMIT}")).identity == model.identity
    assert model_folder("org/tiny@main") == folder
    assert not hub.sent


def test_a_part_that_is_missing_is_fetched_or_named(hub: Hub, online: Callable[[bool], None]) -> None:
    older = model_folder(f"org/parts@{OLDER}")
    assert older.name == OLDER
    for list_of_files in (True, False):  # older versions of huggingface_hub keep none
        (older / "model-2.safetensors").unlink()
        if not list_of_files:
            for kept in older.parents[1].glob("trees/*"):
                kept.unlink()
            huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE.clear()
        online(False)
        message = error(f"org/parts@{OLDER}")
        assert "model-2.safetensors" in message or list_of_files
        assert f"set HF_HUB_OFFLINE=0 for one start, or run: hf download org/parts --revision {OLDER}" in message
        online(True)
        assert model_folder(f"org/parts@{OLDER}") == older
        assert (older / "model-2.safetensors").read_bytes() == b"2"


def test_what_cannot_be_had_is_named(
    hub: Hub, online: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "neither a local folder nor a model on the hub of this name" in error("org/nothing")
    assert "has no revision 'v9'" in error("org/tiny@v9")
    assert "names no revision behind the @" in error("org/tiny@")
    assert "accepted the terms on its page" in error("org/gated")
    assert "has no *.safetensors; other weight formats are not read" in error("org/pickled")
    assert "is no hub id" in error("org/a--b")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "nor in the hub's cache, and the hub cannot be reached" in error("org/tiny")
    online(False)
    assert "and HF_HUB_OFFLINE forbids to download it" in error("org/tiny")
    online(True)
    (tmp_path / "file").touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    assert "cannot make the hub's cache" in error("org/tiny")


def test_of_several_processes_one_downloads(hub: Hub, tmp_path: Path) -> None:
    hub.sent.clear()
    hub.slowly.clear()
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and not k.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    code = "import logging; logging.basicConfig(level=logging.INFO)\n"
    code += "from distkv.engine.sources import model_folder\nprint(model_folder('org/parts'))"
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=-1, stderr=-1, text=True)
        for _ in range(2)
    ]  # fmt: skip
    waits, downloads = "another rank or program does it; waiting", "downloading org/parts once"
    lines: list[str] = []
    first = threading.Thread(target=lambda: lines.extend(iter(started[0].stderr.readline, "")))  # type: ignore[union-attr]
    second = threading.Thread(target=lambda: lines.extend(iter(started[1].stderr.readline, "")))  # type: ignore[union-attr]
    first.start()
    second.start()
    while not any(waits in line for line in lines) and first.is_alive() and second.is_alive():
        first.join(0.05)
    hub.slowly.set()
    folders = [process.communicate(timeout=100)[0].strip() for process in started]
    first.join()
    second.join()
    assert folders == [str(tmp_path / "hub" / "models--org--parts" / "snapshots" / COMMIT)] * 2, lines
    assert sum(downloads in line and waits not in line for line in lines) == 1
    assert {count for name, count in hub.sent.items() if name.startswith("GET")} == {1}


def test_a_local_folder_wins_and_only_hub_ids_ask_the_network(
    hub: Hub, online: Callable[[bool], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert may_download("org/tiny")
    tiny.model_folder(tmp_path / "org" / "tiny", "llama", layers=1)
    assert not may_download("org/tiny")
    assert model_folder("org/tiny") == Path("org/tiny")
    for local in ("smollm2", "org/model.gguf", "/a/b", "./a/b", "~/a", "a/b/c"):
        assert not may_download(local)
    assert hub_id("a-1/b.c@refs/pr/3") == ("a-1/b.c", "refs/pr/3")
    assert [hub_id(s) for s in ("../b", "a/..", "a/b c", "smollm2", "a/", "/a")] == [None] * 6
