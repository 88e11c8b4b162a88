"""Single runs of the real machines in the simulated world: seeds that failed once, and what makes a seed one run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator import runs

ROOT = Path(__file__).resolve().parents[2]
REGRESSIONS = [
    (*map(int, line.split()[:3]), "" if len(parts := line.split('"')) < 2 else parts[1])
    for line in (Path(__file__).parent / "regressions.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "groups", "steps", "fault_class"), REGRESSIONS)
def test_seeds_that_failed_once(seed: int, groups: int, steps: int, fault_class: str):
    run = runs.run(seed, groups, steps, fault_class)
    assert not run.failure, runs.tell(run)


def told(seed: int, hash_seed: str) -> str:
    """The trace of a run in a process of its own."""
    command = [sys.executable, "-m", "tests.simulator", *f"--seed {seed} --groups 4 --steps 40 --trace".split()]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.rpartition("\ngood: 1 seeds")[0]


def test_one_seed_is_one_run():
    """A seed gives the same run even if sets of names have another order in memory."""
    first = told(7, "1")
    assert len(first.splitlines()) > 200 and first == told(7, "2") != told(8, "1")


def test_torch_is_never_imported():
    code = (
        "import sys; from tests.simulator import runs; assert not runs.run(0, 2, 5).failure;"
        "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('torch', 'numpy', 'grpc', 'asyncio')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
