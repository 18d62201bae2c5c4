"""The structure of the package: which module may import which, what is public, where assembly and types are."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import iris

PACKAGE = Path(iris.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "eager": set(),
    "aliases": set(),
    "heap": {"errors"},
    "console": {"errors", "identity"},
    "files": {"errors"},
    "progress": {"console"},
    "leases": {"errors", "heap"},
    "processes": set(),
    "startup": set(),
    "rendezvous": {"errors"},
    "mismatch": {"errors"},
    "mesh": {"errors", "processes", "rendezvous", "mismatch", "timeouts"},
    "worker": {"errors", "live"},
    "identity": {"errors"},
    "forkserver": {"errors", "worker"},
    "launch": {"errors", "forkserver", "identity", "processes", "timeouts", "worker", "device.handle"},
    "membership": {"errors", "identity"},
    "timeouts": {"errors"},
    "failure": {"errors", "heap", "membership", "mesh", "status", "timeouts", "watcher", "device.control"},
    "backends": {"errors", "heap", "mesh"},
    "tensors": {"errors", "eager"},
    "symmetric": {"errors", "eager", "heap", "leases", "live", "backends", "tensors"},
    "device": set(),
    "log": {"errors"},
    "wire": {"errors"},
    "live": {"errors", "processes"},
    "status": {"errors", "heap", "timeouts", "device.control", "device.handle"},
    "watcher": {"mesh", "backends", "device.control"},
    "context": {
        "aliases", "backends", "eager", "errors", "failure", "heap", "identity", "leases", "live", "log", "membership",
        "mesh", "symmetric", "timeouts", "watcher", "wire", "device.control", "device.handle", "device.sync",
    },
    "compiling": {"backends", "errors", "device.handle"},
    "trace": {"errors", "context", "device"},
    "timing": {"errors", "backends"},
    "capture": {"backends"},
    "engine": {"errors", "context", "capture"},
    "ops": {
        "backends", "capture", "context", "device", "eager", "engine", "errors", "files", "heap", "live", "symmetric",
        "tensors", "trace",
    },
    "results": {"errors", "files"},
    "bench": {
        "backends", "console", "context", "device", "errors", "files", "forkserver", "heap", "identity", "launch",
        "ops", "progress", "results", "trace", "iris",
    },
    "tune": {"bench", "console", "context", "errors", "identity", "launch", "ops", "progress"},
    "demo": {"backends", "bench", "console", "context", "errors", "launch", "ops", "progress", "trace"},
    "info": {"backends", "console", "errors", "heap", "identity", "log", "ops", "timeouts", "iris"},
    "report": {"errors", "results", "console", "progress", "files"},
    "cli": {"console", "bench", "demo", "info", "tune", "report", "iris"},
    "__main__": {"cli", "startup"},
    "iris": {"backends", "compiling", "context", "device", "errors", "launch", "ops", "startup", "timing", "trace"},
}  # fmt: skip
"""Each room (a package or top-level module), and the rooms that it may import; ``iris`` is the package's own
``__init__``."""

FOR_TYPES = {"context": {"ops"}}
"""Further rooms that a room may import under ``if TYPE_CHECKING``, for annotations only."""

OF_DEVICE = {"triton", "__future__", "os", "time", "typing"}
"""What device code may import in addition to its own room."""


def room(module: str) -> str:
    """The room that ``iris.x.y`` is in."""
    return module.split(".")[1] if "." in module else "iris"


def module_name(file: Path) -> str:
    parts = [PACKAGE.name, *file.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(dotted: str) -> bool:
    path = PACKAGE.parent.joinpath(*dotted.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names of the modules that ``tree``, of ``package``, imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if base.split(".")[0] == "iris" and is_module(inner) else base


def only_for_types(tree: ast.Module, package: str) -> set[str]:
    """The modules that ``tree`` imports for type checking only."""
    held = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for_types = {target for node in held for target in imports(node, package)}
    run = ast.Module([node for node in tree.body if node not in held], [])
    return for_types - set(imports(run, package))


def permissions(target: str) -> set[str]:
    """What in MAY_IMPORT allows the import of ``target``, a module of Iris: its room, or the module alone."""
    return {room(target), target.partition(".")[2]}


def wrong_arrows(source: str, module: str, package: str) -> list[str]:
    """Imports of ``module`` that its room does not allow."""
    here, tree = room(module), ast.parse(source)
    for_types = only_for_types(tree, package)
    wrong = []
    for target in imports(tree, package):
        if target in for_types and room(target) in FOR_TYPES.get(here, ()):
            continue
        top = target.split(".")[0]
        if top != "iris":
            if here == "device" and top not in OF_DEVICE:
                wrong.append(f"{module} -> {target}")
            continue
        if room(target) != here and not MAY_IMPORT[here] & permissions(target):
            wrong.append(f"{module} -> {target}")
    return wrong


def package_of(file: Path) -> str:
    module = module_name(file)
    return module if file.name == "__init__.py" else module.rpartition(".")[0]


@pytest.mark.parametrize("file", FILES, ids=[module_name(file) for file in FILES])
def test_imports_follow_the_drawing(file: Path) -> None:
    module = module_name(file)
    assert room(module) in MAY_IMPORT, f"{module} is a new room: add it, and what it may import, to MAY_IMPORT"
    assert wrong_arrows(file.read_text(), module, package_of(file)) == []


def test_every_permission_is_used() -> None:
    left = {name: allowed.copy() for name, allowed in MAY_IMPORT.items()}
    left["cli"] -= {"bench", "demo", "info", "report", "tune"}  # loaded by name
    for file in FILES:
        for target in imports(ast.parse(file.read_text()), package_of(file)):
            if target.split(".")[0] == "iris":
                left[room(module_name(file))] -= permissions(target)
    assert {name: unused for name, unused in left.items() if unused} == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("iris.errors", "import iris.heap"),
        ("iris.heap", "from iris import context"),
        ("iris.mesh", "from iris.context import Iris"),
        ("iris.context", "from iris.ops import matmul"),
        ("iris.context", "if TYPE_CHECKING:\n    from iris import bench"),
        ("iris.context", "from iris.device import rma"),
        ("iris.ops.matmul", "from iris import bench"),
        ("iris.backends.sim", "from .. import context"),
        ("iris.device.rma", "from iris.errors import IrisError"),
        ("iris.device.rma", "import torch"),
        ("iris.ops.matmul", "def late():\n    from iris.cli import main"),
    ],
)
def test_a_wrong_arrow_is_found(module: str, source: str) -> None:
    assert len(wrong_arrows(source, module, module.rpartition(".")[0])) == 1


def test_context_may_import_the_device_files_it_launches() -> None:
    source = "from iris.device import sync\nfrom iris.device.handle import Handle"
    assert wrong_arrows(source, "iris.context", "iris") == []


def test_context_may_import_ops_for_types_alone() -> None:
    for_types = "if TYPE_CHECKING:\n    from iris.ops import BoundOps\n"
    assert wrong_arrows(for_types, "iris.context", "iris") == []
    assert len(wrong_arrows(for_types + "import iris.ops", "iris.context", "iris")) == 2
    assert len(wrong_arrows(for_types, "iris.heap", "iris")) == 1


def test_no_module_is_reached_before_it_is_drawn() -> None:
    """The graph of rooms has no cycle: every room can be imported before those that import it."""
    left = {name: {target.split(".")[0] for target in targets} for name, targets in MAY_IMPORT.items()}
    while left:
        free = {name for name, targets in left.items() if not targets & left.keys()}
        assert free, f"rooms that import each other: {sorted(left)}"
        left = {name: targets for name, targets in left.items() if name not in free}


def test_all_is_what_is_public() -> None:
    public = {
        name
        for name, value in vars(iris).items()
        if not name.startswith("_") and (name in iris.__all__ or not isinstance(value, ModuleType))
    }
    assert set(iris.__all__) == public
    assert len(iris.__all__) == len(set(iris.__all__))


def test_every_error_is_public() -> None:
    errors = sys.modules["iris.errors"]
    tree = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, iris.IrisError)]
    assert {error.__name__ for error in tree} <= set(iris.__all__)


def test_assembly_is_in_one_file() -> None:
    users = {module_name(file) for file in FILES if "inline_asm" in file.read_text()}
    assert users == {"iris.device.arch"}


def test_device_code_asks_for_the_vendor_in_one_file() -> None:
    asked = re.compile(r"\b(is_hip\w*|is_cuda|on_amd|has_tma|cuda_capability_geq)\b")
    users = {module_name(file) for file in FILES if asked.search(file.read_text())}
    assert users == {"iris.device.arch"}


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("file", FILES, ids=[module_name(file) for file in FILES])
def test_host_functions_are_typed(file: Path) -> None:
    """mypy is told to accept untyped kernels in modules that have some; all other functions must be typed."""
    untyped = []
    for function in ast.walk(ast.parse(file.read_text())):
        if not isinstance(function, ast.FunctionDef) or is_kernel(function):
            continue
        taken = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        bare = [one.arg for one in taken if one.annotation is None and one.arg not in ("self", "cls")]
        if bare or function.returns is None:
            untyped.append(f"{file.name}:{function.lineno} {function.name}({', '.join(bare)})")
    assert untyped == []
