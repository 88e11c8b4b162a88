"""Counts lines of code: of each package, of the tests, and of the core (`make size`).

The core is every Python module of this repository that train.py (without --explain), the Manager or a lighthouse can import, without
ft/compat, ft/dashboard and generated code. A module that is named in a string, as for `python -m`, counts as imported; so do all modules
of a package if the name is built at run time ("models.{name}").
"""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOTS = ("train.py", "ft/manager.py", "ft/rpc/lighthouse_main.py")
NOT_CORE = ("ft/compat/", "ft/dashboard/", "ft/rpc/generated/", "tools/", "tests/")


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines, files, longest = Counter[str](), Counter[str](), list[tuple[int, str]]()
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        transcript = name.startswith("tests/") and path.suffix == ".txt"
        if not (path.suffix in (".py", ".sh") or transcript) or not path.exists():
            continue
        count = length(name)
        part = name.split("/")[0] if "/" in name else "(top)"
        lines[part] += count
        files[part] += 1
        longest.append((count, name))
    for part, count in lines.most_common():
        print(f"{count:6d}  {files[part]:3d} files  {part}")
    print(f"{sum(lines.values()):6d}  {sum(files.values()):3d} files  in all; {lines['tests']} of the lines are tests")
    print("longest: " + ", ".join(f"{name} {count}" for count, name in sorted(longest, reverse=True)[:5]))
    core = sorted(modules(ROOTS))
    print(f"{sum(map(length, core)):6d}  {len(core):3d} files  core; {functions(core)}")
    print(coupling([name for _, name in longest if name.endswith(".py")]))


def length(name: str) -> int:
    return (ROOT / name).read_text(encoding="utf-8").count("\n")


def modules(roots: tuple[str, ...]) -> set[str]:
    """Returns the files that `roots` import, directly or indirectly, as paths from the repository root."""
    found, left = set[str](), list(roots)
    while left:
        name = left.pop()
        if name in found or name.startswith(NOT_CORE):
            continue
        found.add(name)
        left += (file for module in _imports(name) for file in _files(module))
    return found


def _imports(name: str) -> Iterator[str]:
    """Yields dotted names that this file may import; the last part may be an attribute of a module."""
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    for_types = {
        id(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inside in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value
            if word.endswith(".") and word[:-1].isidentifier() and (ROOT / word[:-1]).is_dir():
                yield f"{word}*"
            elif word.count(".") and all(part.isidentifier() for part in word.split(".")):
                yield word


def _files(module: str) -> Iterator[str]:
    """Yields the files of a module and of its parent packages."""
    parts = module.split(".")
    if parts[-1] == "*" and (ROOT / Path(*parts[:-1])).is_dir():
        yield from (path.relative_to(ROOT).as_posix() for path in (ROOT / Path(*parts[:-1])).glob("*.py"))
    for depth in range(1, len(parts) + 1):
        at = "/".join(parts[:depth])
        yield from (name for name in (f"{at}.py", f"{at}/__init__.py") if (ROOT / name).is_file())


def functions(core: list[str]) -> str:
    """Describes the core's functions: mean length, number of private functions with one call, number of short files."""
    lengths, private, used = list[int](), Counter[str](), Counter[str]()
    for name in core:
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
                if node.name.startswith("_") and not node.name.startswith("__"):
                    private[node.name] += 1
            elif isinstance(node, ast.Attribute):
                used[node.attr] += 1
            elif isinstance(node, ast.Name):
                used[node.id] += 1
    once = sum(count for name, count in private.items() if used[name] <= 1)
    mean = sum(lengths) / len(lengths)
    return (
        f"{len(lengths)} functions, {mean:.1f} lines on average; {once} of {sum(private.values())} private ones used once; "
        f"{sum(length(name) < 60 for name in core)} files under 60 lines"
    )


def coupling(files: list[str]) -> str:
    """Counts uses of private names in tests, and attributes that tests replace (not environment variables and working directory)."""
    private, uses, patches = set[str](), Counter[str](), Counter[str]()
    trees = {name: ast.parse((ROOT / name).read_text(encoding="utf-8")) for name in files}
    for name, tree in trees.items():
        for node in ast.walk(tree if not name.startswith("tests/") else ast.Module([], [])):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                private.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                private.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    private = {name for name in private if name.startswith("_") and not name.startswith("__")}
    for name, tree in trees.items():
        for node in ast.walk(tree if name.startswith("tests/") else ast.Module([], [])):
            if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                uses[name] += node.attr in private
                patches[name] += node.attr in ("setattr", "setitem", "delattr") and "monkeypatch" in ast.unparse(node)
                patches[name] += ast.unparse(node).endswith("mock.patch")
            elif isinstance(node, ast.ImportFrom):
                uses[name] += sum(alias.name in private for alias in node.names)
    most = ", ".join(f"{name} {count}" for name, count in (uses + patches).most_common(5))
    return f"{sum(uses.values())} private names and {sum(patches.values())} replaced attributes in tests; most: {most}"


if __name__ == "__main__":
    main()
