"""A GGUF file is converted once, by one process; what is partial or damaged is made again."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from distkv.engine import sources
from distkv.engine._lock import locked
from distkv.engine.config import ModelConfig
from distkv.engine.model import load_model, load_tokenizer
from distkv.errors import ModelError
from distkv.testing.processes import run_ranks
from tests.engine import tiny


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.gguf_file(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def convert_case(rank: int, world_size: int, gguf: Path, cache: Path) -> tuple[Path, int]:
    folder = sources.model_folder(str(gguf), cache)
    return folder, (folder / "model.safetensors").stat().st_mtime_ns


def rank_0_last_case(rank: int, world_size: int, gguf: Path, cache: Path) -> tuple[Path, int]:
    """Ranks 1 and 2 meet at the lock; any rank of a group may be the one that converts."""
    if rank == 0:
        dist.barrier()
        return convert_case(rank, world_size, gguf, cache)
    found = convert_case(rank, world_size, gguf, cache)
    dist.barrier()
    return found


def test_of_several_processes_one_converts_and_damage_is_repaired(
    gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    results = run_ranks(rank_0_last_case, 3, (gguf, tmp_path), backend="gloo", timeout_s=240.0)
    assert len(set(results)) == 1
    folder, written = results[0]
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name, folder.name + ".lock"]
    with caplog.at_level(logging.INFO):
        assert convert_case(0, 1, gguf, tmp_path) == (folder, written)
    assert "converting" not in caplog.text

    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        convert_case(0, 1, gguf, tmp_path)
    assert "model.safetensors is not what was written" in caplog.text
    assert weights.read_bytes() == good, "the same file gives the same weights"
    assert sources._problem(folder) is None
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (folder / name).rename(tmp_path / name)
        assert sources._problem(folder) == f"it has no {'*.safetensors' if name.startswith('model') else name}"
        (tmp_path / name).rename(folder / name)

    settings = ModelConfig(source=str(gguf), cache_dir=tmp_path)
    model, tokenizer = load_model(settings), load_tokenizer(settings)
    assert tokenizer.decode(tokenizer("the thing")["input_ids"]) == "the thing"
    assert model.stop_ids == {2}


@pytest.fixture(scope="module")
def converted(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``models`` folder of a cache whose first converter was killed in the middle."""
    tmp_path = tmp_path_factory.mktemp("converted")
    code = "import sys; from pathlib import Path; from distkv.engine.sources import model_folder as convert\n"
    code += "convert(sys.argv[1], Path(sys.argv[2]))"
    process = subprocess.Popen([sys.executable, "-c", code, gguf, tmp_path], stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("models/*.part")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(tmp_path.glob("models/*.part")), "it was killed in the middle"
    sources.model_folder(str(gguf), tmp_path)
    return tmp_path / "models"


def test_a_converter_that_was_killed_leaves_nothing_that_counts(converted: Path) -> None:
    assert not list(converted.glob("*.part"))
    (folder,) = (path for path in converted.iterdir() if path.is_dir())
    assert sources._problem(folder) is None


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
    gguf: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(converted, tmp_path / "models")
    (folder,) = (path for path in (tmp_path / "models").iterdir() if path.is_dir())
    monkeypatch.setattr(sources, "_LOCK_S", 0.5)
    with spawned(HOLD + "import time; time.sleep(60)", f"{folder}.lock") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with caplog.at_level(logging.INFO):
            caplog.clear()
            assert sources.model_folder(str(gguf), tmp_path) == folder
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
