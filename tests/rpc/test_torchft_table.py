"""tests/README.md's table has every test that torchft's wheel brings."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.parity_table import rows


def test_every_test_of_torchft_has_a_row(torchft: Path):
    told = {(row.file, name) for row in rows() for name in row.names}
    left_out = {name for file, name in told if file == "Left out as a whole"}
    brought = {
        (path.name, node.name.removeprefix("test_"))
        for path in (torchft / "torchft").rglob("*_test.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and path.name not in left_out
    }
    assert brought, "a wheel without tests shows nothing"
    assert not brought - told, "no row"
    of_tests = {(file, name) for file, name in told if file.endswith("_test.py")}
    assert not of_tests - brought, "a row of a test that is not"
