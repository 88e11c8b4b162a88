"""Layers of imports: the modules that each package may import, and no cycle. Read from the source, nothing is imported.

A name imported only for its type, or inside a function, counts too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "ft",
    "models",
    "parallelisms",
    "training",
    "configs",
    "scripts",
    "bench",
    "tools",
    "contrib",
    "examples",
    "tests/simulator",
)

# For the longest matching prefix of a module: what else of ours it may import, and which third-party packages.
ALLOWED: dict[str, tuple[set[str], set[str] | None]] = {
    "ft.protocol": (set(), {"typing_extensions"}),  # for its types alone: tests/protocol/test_imports.py
    "tests.simulator": ({"ft.protocol"}, set()),
    "ft.rpc": ({"ft"}, {"torch", "grpc", "google"}),
    "ft.healing": ({"ft"}, {"torch", "numpy"}),  # numpy reduces a chunk to its digest
    "ft.dashboard": ({"ft"}, {"aiohttp", "prometheus_client"}),
    "ft.compat": ({"ft"}, {"torch", "grpc", "google"}),
    "ft.optim_state": (set(), {"torch"}),  # training/ takes this, ft.children and ft.seam without the rest
    "ft.device": (set(), {"torch"}),
    "ft.children": (set(), set()),
    "ft.seam": ({"ft.protocol.messages"}, set()),
    "ft": (set(), {"torch", "grpc", "google"}),
    "models": (set(), {"torch"}),
    # the contract, and the kernels that all models share
    "parallelisms": ({"models.contract", "models.ops"}, {"torch"}),
    "parallelisms.float8": ({"models.contract", "parallelisms"}, {"torch", "torchao"}),
    "training": ({"parallelisms", "models", "ft.optim_state", "ft.children", "ft.seam"}, None),
    "training.components": ({*PACKAGES}, None),  # a part of train.py: see test_components_are_of_the_top_layer
    "configs": ({"training", "parallelisms", "models", "ft"}, {"tomli", "tomllib", "torch"}),
    "": ({*PACKAGES, "train", "tests.multiproc.pool"}, None),  # ranks that live on, which bench/parity.py needs, too
}

# ft.compat, and the modules that give its names out under torchft's modules.
MODULES = ("checkpointing", "coordination", "data", "ddp", "local_sgd", "optim", "parameter_server", "process_group")
INTERFACE = ("ft.compat.", *(f"ft.{name}." for name in MODULES))

# ft/ without this interface is whole, but for the server of a group, which answers torchft's clients, too, and so imports these when it
# runs.
COMPAT_IMPORTS = {
    ("ft.rpc.group_server", "ft.compat.group.TorchftGroup"),
    ("ft.rpc.group_server", "ft.compat.group.TorchftConnection"),
}


def test_each_package_imports_only_lower_layers():
    bad = [
        f"{path}:{line}: {module} imports {name}" for path, module, line, name in _imports() if not _may(module, name)
    ]
    assert not bad, "\n".join(bad)


def test_components_are_of_the_top_layer():
    """The components are imported only by train.py, so they may import all that it may."""
    users = {module for _, module, _, name in _imports() if name.startswith("training.components")}
    assert users == {"train"}


def test_the_core_does_without_the_interface_for_torchft():
    """The one exception is imported inside a function; the names that ft/__init__.py gives out are strings."""
    found = {(module, name) for _, module, _, name in _imports() if _is_upward(module, name)}
    assert found == COMPAT_IMPORTS
    for module in {module for module, _ in COMPAT_IMPORTS}:
        tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8"))
        assert not [name for _, name in _imported(tree, module, head_only=True) if _is_upward(module, name)]


def test_no_cycles():
    """Packages themselves are in no cycle, as their __init__ imports nothing (see below)."""
    ours = {module for _, module in _files() if not module.startswith("tests.")}
    graph: dict[str, set[str]] = {module: set() for module in ours}
    for path, module in _files():
        for _, name in _imported(ast.parse(path.read_text(encoding="utf-8")), module, head_only=False):
            target = name if name in ours else name.rpartition(".")[0]
            if {target, module} <= ours and target != module:
                graph[module].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("package", [name for name in PACKAGES if (ROOT / name).is_dir()])
def test_packages_import_nothing_by_themselves(package: str):
    """Each has an __init__.py, so that no package in site-packages takes its name; importing it costs nothing."""
    for folder in [ROOT / package, *(path for path in (ROOT / package).rglob("*") if path.is_dir())]:
        if not any(folder.glob("*.py")) or folder == ROOT / "scripts" / "lib":
            continue
        text = (folder / "__init__.py").read_text(encoding="utf-8")
        head = [name for _, name in _imported(ast.parse(text), package, head_only=True)]
        assert ast.get_docstring(ast.parse(text)), f"{folder}/__init__.py has no docstring"
        # The protocol's modules import the standard library alone: importing them costs nothing either.
        free = "ft.protocol." if ROOT / "ft" / "protocol" in folder.parents else "."
        costly = [n for n in head if n.partition(".")[0] not in sys.stdlib_module_names and not n.startswith(free)]
        assert not costly, f"{folder}: {costly}"


def test_the_test_sees_a_violation():
    tree = ast.parse(
        "import torch\nfrom configs.load import load\nif 1:\n    import grpc\ndef f():\n    from ft import a"
    )
    assert [name for _, name in _imported(tree, "models.x", head_only=False)] == [
        "torch",
        "configs.load.load",
        "grpc",
        "ft.a",
    ]
    assert _may("models.x", "torch.nn") and _may("parallelisms.x", "models.contract.Config")
    for module, name in (("models.x", "configs.load"), ("models.x", "grpc"), ("ft.protocol.rules", "torch")):
        assert not _may(module, name)
    assert not _may("parallelisms.x", "models.llama") and not _may("training.x", "configs.load")
    assert _is_upward("ft.manager", "ft.compat.wrappers.x") and not _is_upward(
        "ft.compat.wrappers", "ft.compat.manager.Manager"
    )
    assert not _may("ft.protocol.rules", "ft.manager") and _may("ft.protocol.rules", "ft.protocol.group")


def _is_upward(module: str, name: str) -> bool:
    """True where the core of ft/ imports its interface for torchft."""
    here, there = f"{module}.", f"{name}."
    return there.startswith(INTERFACE) and here.startswith("ft.") and not here.startswith(INTERFACE)


def _may(module: str, name: str) -> bool:
    prefix = max((p for p in ALLOWED if p == "" or module == p or module.startswith(p + ".")), key=len)
    ours, others = ALLOWED[prefix]
    first = name.partition(".")[0]
    if first in {*PACKAGES, "train", "tests"}:
        own = prefix or module.partition(".")[0]
        return any(name == p or name.startswith(p + ".") for p in {own, *ours})
    return first in sys.stdlib_module_names or others is None or first in others


def _imports() -> Iterator[tuple[Path, str, int, str]]:
    for path, module in _files():
        for line, name in _imported(ast.parse(path.read_text(encoding="utf-8")), module, head_only=False):
            yield path.relative_to(ROOT), module, line, name


def _files() -> Iterator[tuple[Path, str]]:
    yield ROOT / "train.py", "train"
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.AST, module: str, *, head_only: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import; `from a import b` is a.b."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import; write the package's name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif not (head_only and _is_later(node)):
            yield from _imported(node, module, head_only=head_only)


def _is_later(node: ast.AST) -> bool:
    """Returns True if the node's body is not executed on import."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
