"""tests/README.md's table of torchft's tests: every test named there exists, and every row has one, or a reason."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.parity_table import OURS, rows
from tests.protocol.play import transcripts

TESTS = Path(__file__).resolve().parents[1]


@cache
def functions_of(path: str) -> set[str]:
    if path.endswith(".txt"):
        return {title.partition(",")[0].replace(" ", "_") for title in transcripts(TESTS / path)}
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.file}:{row.names[0]}")
def test_a_row_names_tests_that_exist_or_says_why_there_is_none(row):
    for path, name in row.ours:
        assert (TESTS / path).is_file(), path
        assert name in functions_of(path), f"{path} has no {name}"
    assert row.ours or len(row.text.split()) >= 4, "neither a test nor a reason"


def test_no_row_twice():
    named = [(row.file, name) for row in rows() for name in row.names]
    assert len(named) == len(set(named))


def test_the_suites_are_the_folders():
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.glob("test_*.py"))}
    told = re.findall(r"^\| `(\w+)/` \|", (TESTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(told) == folders and len(told) == len(folders)


def test_what_is_read_as_a_test_of_ours():
    assert OURS.findall("`rpc/test_x.py::test_y` and `unit/z.txt::a_b`") == [
        ("rpc/test_x.py", "test_y"),
        ("unit/z.txt", "a_b"),
    ]
