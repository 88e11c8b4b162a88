"""README.md's tree names every file there is, and none that is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("configs", "models", "parallelisms", "training", "ft", "bench", "scripts")


def tree() -> dict[str, str]:
    """The text behind each folder's name in the tree."""
    [block] = re.findall(r"^## The tree\n+```\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    parts: dict[str, str] = {}
    for line in block.splitlines():
        if not line.startswith(" "):
            folder = line.split()[0].rstrip("/")
        parts[folder] = parts.get(folder, "") + line + "\n"
    return parts


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tree_names_the_files_of(package: str):
    named = set(re.findall(r"\b[a-z_]\w*\.(?:py|sh|toml)\b", tree()[package]))
    below = ROOT / package
    there = {path.name for path in below.rglob("*.py") if path.name != "__init__.py" and "lib" not in path.parts}
    there |= {path.name for path in (*below.glob("*.sh"), *below.glob("*.toml"))}
    assert named == there
