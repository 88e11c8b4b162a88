"""What --explain says that a GPU holds at most, beside what CUDA's allocator handed out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.devices import one_device

pytestmark = [one_device, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_the_peak_is_within_15_percent(checkpoint: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.explained_step", checkpoint]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert abs(found["said"] / found["took"] - 1) <= 0.15, found
