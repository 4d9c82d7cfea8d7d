"""A model from the Hugging Face hub: from its cache on this host, where one process puts it if it is missing.

What the cache has is used without a question to the hub. So ranks that start at different moments have the same files
though a branch may have moved, a start needs no network, and only the first start downloads. Hosts whose caches
were filled at different moments have different files: the cache's fingerprint says so when the ranks meet.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from distkv.engine._lock import locked
from distkv.errors import ModelError

__all__ = ["hub_folder", "hub_id"]

logger = logging.getLogger(__name__)

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(.*))?")
_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "*.model",
          "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.*")  # fmt: skip
_NOT = ("*/*", "consolidated*")  # other formats of the same weights
_LOCK_S = 4 * 3600.0


def hub_id(source: str) -> tuple[str, str | None] | None:
    """``org/name`` and revision of ``org/name`` or ``org/name@revision``; None for anything else, a local path."""
    found = _ID.fullmatch(source)
    return (found[1], found[2]) if found is not None else None


def hub_folder(repository: str, revision: str | None) -> Path:
    """The folder of a model in the hub's cache on this host, complete. ``revision``: branch, tag, commit; None: main.

    Of all processes of a host that ask for a missing model one downloads it (weights in safetensors, tokenizer), the
    others wait. The cache is huggingface_hub's, under HF_HOME. Raises ``ModelError``: not found, not allowed, offline
    and not in the cache, without safetensors.
    """
    from huggingface_hub import constants, is_offline_mode

    name = f"{repository}@{revision}" if revision is not None else repository
    if revision == "":
        raise ModelError(f"model.source {name!r} names no revision behind the @")
    folder, problem = _cached(repository, revision)
    if folder is not None:
        return folder
    if is_offline_mode():
        raise ModelError(
            f"model.source {name!r} is neither a local folder nor complete in the hub's cache {constants.HF_HUB_CACHE} "
            f"({problem}), and HF_HUB_OFFLINE forbids to download it; set HF_HUB_OFFLINE=0 for one start, or run: "
            f"hf download {repository}" + (f" --revision {revision}" if revision else "")
        )
    locks = Path(constants.HF_HUB_CACHE) / ".locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot make the hub's cache {locks.parent}: {error}; set HF_HOME") from error
    lock = locks / f"distkv--{repository.replace('/', '--')}.lock"
    with locked(lock, f"downloading {repository} once", _LOCK_S):
        folder, _ = _cached(repository, revision)
        return folder if folder is not None else _download(repository, revision, name)


def _cached(repository: str, revision: str | None) -> tuple[Path | None, str]:
    """The model's folder in the cache, or what is missing there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=list(_FILES), ignore_patterns=list(_NOT),
                local_files_only=True,
            )
        )  # fmt: skip
    except HFValidationError as error:
        raise ModelError(f"model.source {repository!r} is no hub id: {error}") from error
    except LocalEntryNotFoundError:
        return None, "it is not there, or a part of it is missing"
    missing = _missing(folder)
    return (folder, "") if missing is None else (None, f"it has no {missing}")


def _missing(folder: Path) -> str | None:
    """What a snapshot lacks that the hub's own check cannot know of, as older versions kept no list of its files."""
    if not (folder / "config.json").is_file():
        return "config.json"
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if not indexes:
        return None if any(folder.glob("*.safetensors")) else "*.safetensors"
    try:
        shards = sorted(set(json.loads(indexes[0].read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"readable {indexes[0].name}"
    return next((shard for shard in shards if not (folder / shard).is_file()), None)


def _download(repository: str, revision: str | None, name: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    logger.info("downloading %s once", name)
    start = f"model.source {name!r}: "
    try:
        folder = Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=list(_FILES), ignore_patterns=list(_NOT)
            )
        )  # fmt: skip
    except errors.GatedRepoError as error:  # before the next, of which it is one
        raise ModelError(
            f"{start}the hub gives it only to those who accepted the terms on its page; do so, and log in "
            "(hf auth login, or HF_TOKEN)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{start}there is neither a local folder nor a model on the hub of this name; if the model is private, "
            "log in (hf auth login, or HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{start}the model on the hub has no revision {revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"{start}it is neither a local folder nor in the hub's cache, and the hub cannot be reached: "
            f"{error.__cause__ or error}"
        ) from error
    except Exception as error:  # of the network, the disk, the hub: handed on
        first = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ModelError(f"{start}cannot be downloaded: {type(error).__name__}: {first}") from error
    missing = _missing(folder)
    if missing is not None:
        raise ModelError(f"{start}the model on the hub has no {missing}; other weight formats are not read")
    logger.info("downloaded %s, commit %s", name, folder.name)
    return folder
