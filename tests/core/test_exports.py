"""What `import distkv` gives and costs, and who may import whom."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import distkv
from distkv import errors

PACKAGE = Path(distkv.__file__).parent
SANS_IO = ["encoding", "keys", "keylog", "chain", "runs", "entries", "lookup", "index", "policy", "reasons", "pages",
           "books", "sequence", "request", "ballot", "grid", "pagelist", "ledger", "window_index", "windows", "recount",
           "sequence_state", "rolling", "forks",
           "pending", "rows", "agreement", "lockstep", "stats", "errors", "table_buffers", "tables",
           "tiered", "keeping", "readin", "admission", "waiting", "preemption", "prefetch", "agreed", "host.copies",
           "host.pages", "host.tier", "host.layout", "slurm"]
FORBIDDEN = {"asyncio", "concurrent", "multiprocessing", "queue", "random", "select", "socket", "subprocess", "time",
             "threading", "datetime", "secrets", "uuid", "os", "logging"}
CORE = [*SANS_IO, "cache", "local_calls", "config", "group", "start", "labels", "label_config", "guarding",
        "torch_group", "mpi_group", "faults", "watchdog",
        "layout", "_settings", "_values", "_loading", "_yaml", "memory", "_text", "host.budget", "host.opening"]
LAYERS = [["keys", "encoding", "config", "label_config", "grid", "errors", "layout", "_settings", "_values", "_loading",
           "_yaml", "memory", "_text", "slurm", "host.copies", "host.layout"], ["keylog", "host.budget"], ["chain"],
          ["pages", "faults"], ["runs", "host.pages"], ["host.tier"],
          ["entries", "policy", "reasons", "table_buffers"], ["lookup"], ["index"], ["tiered"], ["keeping"],
          ["pagelist", "recount"], ["ledger", "window_index"], ["windows"], ["books"], ["readin"],
          ["sequence_state"], ["rolling"], ["request", "sequence"],
          ["forks", "pending", "tables", "stats"], ["preemption"], ["rows"], ["ballot", "waiting"],
          ["admission", "prefetch"], ["agreed"], ["group", "agreement", "watchdog"],
          ["torch_group", "mpi_group", "start", "lockstep", "labels", "host.opening", "local_calls", "guarding"],
          ["cache"]]
COPYING = ["host.kv", "host.memory", "host._engine", "host.threads", "host.cuda", "host.scripted", "host.open"]
PROGRAMS = ["cli", "__main__", "api_reference", "config_reference", "launching", "_interfaces", "_parent", "_streams"]


def path_of(module: str) -> Path:
    return PACKAGE / f"{module.replace('.', '/')}.py"


def module_of(name: str) -> str:
    """The module of distkv that an import names: ``host.tier`` for ``distkv.host.tier.HostTier``."""
    parts = name.split(".")[1:]
    return ".".join(parts[:2]) if parts[0] == "host" and len(parts) > 1 else parts[0]


def imports(module: str, *, at_run_time: bool = True) -> set[str]:
    """Every module that a file of the core imports; without those under ``if TYPE_CHECKING``."""
    tree = ast.parse(path_of(module).read_text(encoding="utf-8"))
    if at_run_time:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = [ast.Pass()]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_all_is_sorted_and_complete() -> None:
    assert distkv.__all__ == sorted(distkv.__all__)
    assert len(distkv.__all__) == len(set(distkv.__all__))
    public = {name for name, value in vars(distkv).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(distkv.__all__)


def test_every_error_of_the_core_is_public_or_the_engines() -> None:
    engine = {"GateFailed", "InputFileError", "ModelError", "NotInvariant", "PromptError"}
    assert set(errors.__all__) - engine <= set(distkv.__all__)
    assert not engine & set(distkv.__all__)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), distkv.DistKVError)
        assert f"{name} " in (errors.__doc__ or "") or f"{name}\n" in (errors.__doc__ or ""), "not in the tree"


@pytest.mark.parametrize("name", distkv.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(distkv, name)
    assert value.__doc__, name
    if not inspect.isclass(value):
        return
    assert not value.__doc__.startswith(f"{name}("), "the docstring that dataclass makes says nothing"
    for attribute, member in vars(value).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if attribute.startswith("_") or not (inspect.isfunction(function) or isinstance(function, property)):
            continue
        assert inspect.getdoc(getattr(value, attribute)), f"{name}.{attribute}"


def test_import_needs_torch_numpy_and_xxhash_only() -> None:
    code = ("import sys; before = set(sys.modules); import distkv; "
            "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))")
    out = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True,
                         timeout=120)
    loaded = set(out.stdout.split())
    assert {"distkv", "torch", "numpy", "xxhash"} <= loaded
    for unwanted in ("yaml", "transformers", "cupy", "mpi4py", "gguf", "accelerate", "hypothesis", "pytest", "psutil"):
        assert unwanted not in loaded
    assert not out.stderr


@pytest.mark.parametrize("module", SANS_IO)
def test_sans_io(module: str) -> None:
    """No clock, no thread, no file, no torch.distributed: a whole group of ranks runs in one process."""
    found = imports(module, at_run_time=False)
    tops = {name.split(".")[0] for name in found}
    assert not tops & FORBIDDEN
    assert not any(name.startswith(("torch.distributed", "torch.cuda")) for name in found)
    assert "torch" not in tops or module == "encoding"
    source = path_of(module).read_text(encoding="utf-8")
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}
    assert not calls & {"print", "open", "input", "hash", "id", "repr", "eval", "exec"}, "nor what differs by process"


def test_layers() -> None:
    rank = {module: i for i, row in enumerate(LAYERS) for module in row}
    assert set(rank) == set(CORE)
    files = [*PACKAGE.glob("*.py"), *PACKAGE.glob("host/*.py")]
    there = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in files}
    assert there == {"__init__", "host.__init__", *CORE, *PROGRAMS, *COPYING}, "each module has its place"
    for module in CORE:
        found = {module_of(name) for name in imports(module) if name.startswith("distkv.")}
        above = {other for other in found & set(rank) if rank[other] > rank[module]}
        assert not above, f"{module} imports {above}, which lie above it"
        assert not (found - set(rank)) & {"engine", "testing", "inspection", "bench", *PROGRAMS}


@pytest.mark.parametrize("module", CORE)
def test_files_stay_readable(module: str) -> None:
    tree = ast.parse(path_of(module).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is too long"
