"""What runs in the process of one rank: set up the group, call the target, write down how it ended.

Started by ``distkv.testing._children``, in a fresh interpreter or by a fork. The process leaves one file,
``<rank>.report``, written whole or not at all. A rank that returned stays until the harness tells it to go, so that
no rank sees a broken connection only because another one was quicker; a rank that raised goes at once, as a real one
would.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from distkv._parent import die_with

__all__ = ["Job", "Raised", "Report", "call", "describe", "main"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a rank needs to know. ``call`` is the pickled (target, args)."""

    rank: int
    world_size: int
    backend: str | None
    store_port: int
    timeout_s: float
    parent: int = 0
    module: str
    module_file: str | None
    call: bytes


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An exception of a rank. The object itself stays there, because not every exception survives pickling.

    ``kinds``: the dotted names of its type and all base types; ``attributes``: those that can be pickled.
    """

    kind: str
    kinds: tuple[str, ...]
    message: str
    traceback: str
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The end of a target: ``result`` (pickled) or ``raised``."""

    result: bytes | None = None
    raised: Raised | None = None


def main(job_path: str) -> None:
    """Run the job; does not return."""
    path = Path(job_path)
    job: Job = pickle.loads(path.read_bytes())
    die_with(job.parent)
    try:
        _join_group(job)
        report = Report(result=call(job))
    except Exception as error:  # noqa: BLE001  # handed to the parent
        report = Report(raised=describe(error))
    _flush()
    unfinished = path.with_suffix(".writing")
    unfinished.write_bytes(pickle.dumps(report))
    unfinished.rename(path.with_suffix(".report"))
    if report.raised is not None:
        _flush()
        os._exit(1)
    _leave()


def call(job: Job) -> bytes:
    """Calls the target in this process; returns its result, pickled."""
    _import_target(job)
    target, args = pickle.loads(job.call)
    return _pickled(target(job.rank, job.world_size, *args))


def _leave() -> None:
    """Wait for the parent's word. "e": every rank returned, end in order. Anything else: end now."""
    word = os.read(0, 1)
    if word != b"e":
        os._exit(0)
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(0)


def _join_group(job: Job) -> None:
    if job.backend is None:
        return
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", job.rank) if job.backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=job.timeout_s)
    store = dist.TCPStore("127.0.0.1", job.store_port, job.world_size, is_master=False, timeout=timeout)
    dist.init_process_group(
        job.backend,
        store=dist.PrefixStore("distkv-testing", store),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timeout,
        device_id=device,
    )


def _import_target(job: Job) -> None:
    """Make the target's module importable under the name that its functions and classes were pickled with."""
    if job.module == "__main__":
        # As multiprocessing does it: the script is run under another name, so that its main part stays asleep.
        if job.module_file is not None:
            sys.modules["__main__"] = _load("__mp_main__", job.module_file)
        return
    try:
        module = importlib.import_module(job.module)
    except ModuleNotFoundError:
        module = None
    file = getattr(module, "__file__", None)
    if job.module_file is not None and (file is None or Path(file).resolve() != Path(job.module_file).resolve()):
        _load(job.module, job.module_file)


def _load(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def describe(error: Exception) -> Raised:
    kinds = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    attributes = {}
    for name, value in vars(error).items():
        try:
            pickle.loads(pickle.dumps(value))
        except Exception:  # noqa: BLE001  # whatever pickling raises means: not picklable
            continue
        attributes[name] = value
    text = "".join(traceback.format_exception(error))
    return Raised(kind=kinds[0], kinds=kinds, message=str(error), traceback=text, attributes=attributes)


def _pickled(result: object) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(f"the target returned a {type(result).__name__}, which cannot be pickled: {error}") from error


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
