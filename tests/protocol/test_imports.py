"""The protocol imports only the standard library, so that a lighthouse needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = [f"ft.protocol.{name}" for name in ("messages", "lighthouse", "group", "step")]


def test_importing_the_protocol_brings_in_nothing_but_the_standard_library():
    program = (
        f"import sys; sys.path.insert(0, '.'); import {', '.join(MODULES)}; "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.split())
    assert {"ft"} <= loaded <= {*sys.stdlib_module_names, "__main__", "ft"}
    assert not loaded & {"asyncio", "threading", "random", "logging", "socket", "time"} - _always()


def _always() -> set[str]:
    """Returns the modules that dataclasses, typing and the like import by themselves."""
    program = "import sys, dataclasses, enum, hashlib, itertools, typing; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=50)
    return {name.partition(".")[0] for name in run.stdout.split()}
