"""A GGUF file that several ranks convert at once, after a first converter that was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from distkv.engine import sources
from distkv.testing.processes import run_ranks


@dataclass(frozen=True)
class Converted:
    """The file, the cache with its folder, and what each rank was given: the folder, and when it was written."""

    gguf: Path
    cache: Path
    found: list[tuple[Path, int]]

    @property
    def folder(self) -> Path:
        return self.found[0][0]


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


def convert_together(gguf: Path, cache: Path) -> Converted:
    """Kills a first converter in the middle, and lets three ranks begin again."""
    code = "import sys; from pathlib import Path; from distkv.engine.sources import model_folder as convert\n"
    code += "convert(sys.argv[1], Path(sys.argv[2]))"
    process = subprocess.Popen([sys.executable, "-c", code, gguf, cache], stderr=subprocess.DEVNULL)
    while not list(cache.glob("models/*.part")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(cache.glob("models/*.part")), "it was killed in the middle"
    return Converted(gguf, cache, run_ranks(rank_0_last_case, 3, (gguf, cache), backend="gloo", timeout_s=240.0))
