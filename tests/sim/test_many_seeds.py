"""Runs of the real machines in the simulated world; every invariant after every event.

In the first tier 20, with --all 50; PHAROS_SEEDS=40 plays so many; `make sim` plays ten thousand, and docs/sim.md keeps its last output.
"""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, many_seeds_command


@pytest.mark.timeout(1800)
def test_many_seeds(request: pytest.FixtureRequest):
    """Waits for their end in a whole tier, which plays them beside its tests; by its path, plays them."""
    command = many_seeds_command(request.config)
    if output := getattr(request.config, "workerinput", {}).get("many_seeds"):
        with Path(output).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            told = file.read()
    else:
        told = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout
    last = (told.splitlines() or [""])[-1]
    assert last.startswith(f"good: {command[-1]} seeds, 0 failed, "), told[-5000:]
