"""A GGUF file is converted once, by one process; what is partial or damaged is made again."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distkv.engine import sources
from distkv.engine._lock import locked
from distkv.engine.config import ModelConfig
from distkv.engine.model import load_model, load_tokenizer
from distkv.errors import ModelError
from tests.engine.conversion import Converted, convert_case


@pytest.fixture(scope="module")
def gguf(converted: Converted) -> Path:
    return converted.gguf


def copied(converted: Converted, cache: Path) -> Path:
    """The converted folder, in a cache of a test's own."""
    shutil.copytree(converted.cache / "models", cache / "models")
    return cache / "models" / converted.folder.name


def test_of_several_processes_one_converts_and_one_that_was_killed_leaves_nothing_that_counts(
    converted: Converted, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(set(converted.found)) == 1
    folder = converted.folder
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name, folder.name + ".lock"]
    assert sources._problem(folder) is None
    with caplog.at_level(logging.INFO):
        assert convert_case(0, 1, converted.gguf, converted.cache) == converted.found[0]
    assert "converting" not in caplog.text


def test_damage_is_repaired(converted: Converted, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copied(converted, tmp_path)
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        convert_case(0, 1, converted.gguf, tmp_path)
    assert "model.safetensors is not what was written" in caplog.text
    assert weights.read_bytes() == good, "the same file gives the same weights"
    assert sources._problem(folder) is None
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (folder / name).rename(tmp_path / name)
        assert sources._problem(folder) == f"it has no {'*.safetensors' if name.startswith('model') else name}"
        (tmp_path / name).rename(folder / name)


def test_what_was_converted_is_a_model_and_a_tokenizer(converted: Converted) -> None:
    settings = ModelConfig(source=str(converted.gguf), cache_dir=converted.cache)
    model, tokenizer = load_model(settings), load_tokenizer(settings)
    assert tokenizer.decode(tokenizer("the thing")["input_ids"]) == "the thing"
    assert model.stop_ids == {2}


def test_what_is_no_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + os.urandom(60))
    with pytest.raises(ModelError, match=r"cannot convert .*broken.gguf"):
        sources.model_folder(str(path), tmp_path)
    assert not list((tmp_path / "models").glob("*.part"))


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert sources.cache_folder() == tmp_path / "home" / ".cache" / "distkv"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert sources.cache_folder() == tmp_path / "xdg" / "distkv"
    assert sources.cache_folder(Path("~/own")) == tmp_path / "home" / "own"


def spawned(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"import sys; from pathlib import Path\n{code}", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


HOLD = "import fcntl\nf = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True)\n"


def test_a_lock_that_is_never_given_back_is_a_named_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = tmp_path / "x.lock"
    with spawned(HOLD + "import time; time.sleep(60)", lock) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        waiting = locked(lock, "converting x once", 0.5)
        with caplog.at_level(logging.INFO), pytest.raises(ModelError, match=rf"held the lock {lock} for 0\.5 s"):
            waiting.__enter__()
        holder.kill()
    assert "converting x once: another rank or program does it" in caplog.text
    with locked(lock, "converting x once", 0.5):
        pass
    with pytest.raises(ModelError, match=r"converting x once: cannot make the lock .*: No such file"):
        locked(tmp_path / "missing" / "x.lock", "converting x once", 0.5).__enter__()


def test_a_finished_folder_needs_no_lock(
    converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(converted, tmp_path)
    monkeypatch.setattr(sources, "_LOCK_S", 0.5)
    with spawned(HOLD + "import time; time.sleep(60)", f"{folder}.lock") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with caplog.at_level(logging.INFO):
            caplog.clear()
            assert sources.model_folder(str(converted.gguf), tmp_path) == folder
        holder.kill()
    assert "convert" not in caplog.text


def test_a_conversion_that_does_not_end_is_ended(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_CONVERT_S", 0.3)
    with pytest.raises(ModelError, match=r"cannot convert .*tiny\.gguf: it was not done after 0\.3 s, and was ended"):
        sources.model_folder(str(gguf), tmp_path)
    assert not list(tmp_path.glob("models/*.part"))


def converters(of: Path) -> list[int]:
    """Processes that convert ``of``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"distkv.engine.convert" in words and str(of).encode() in words:
            found.append(int(entry.parent.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does it")
def test_no_converter_outlives_its_parent(gguf: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.gguf"
    own.write_bytes(gguf.read_bytes())
    code = "from distkv.engine.sources import model_folder\nmodel_folder(sys.argv[1], Path(sys.argv[2]))"
    with spawned(code, own, tmp_path) as parent:
        while not converters(own) and parent.poll() is None:
            time.sleep(0.05)
        assert parent.poll() is None
        parent.kill()
    end = time.monotonic() + 30
    while converters(own) and time.monotonic() < end:
        time.sleep(0.05)
    assert not converters(own)
    time.sleep(0.5)
    assert not list(tmp_path.glob("models/*/model.safetensors"))
