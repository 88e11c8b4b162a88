"""scripts/generate.py: text of a run, whatever trained it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.test_train import Job, folder  # noqa: F401 (a fixture)

pytestmark = pytest.mark.timeout(300)  # several starts in one test, each with an import of torch
ROOT = Path(__file__).resolve().parents[2]


def generate(run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), str(run), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_generate_reads_the_newest_whole_checkpoint(folder: Path):  # noqa: F811
    job = Job(folder, "--training.steps=4", "--checkpoint.interval=2", "--validation.enable=false", nproc=2)
    assert job.end() == 0, job.text
    run = folder / "outputs" / "tiny"

    drawn = generate(run, "--prompt", "ab", "--tokens", "40", "--temperature", "0")
    assert drawn.returncode == 0, drawn.stderr
    assert drawn.stdout.startswith("ab") and "step-4: " in drawn.stderr
    own_prompt = generate(run, "--tokens", "40", "--temperature", "0")
    assert own_prompt.stdout == drawn.stdout, "the run's own prompt is the same"

    damaged = next((run / "checkpoint" / "step-4").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    earlier = generate(run, "--tokens", "4")
    assert earlier.returncode == 0 and "step-4 is damaged" in earlier.stderr and "step-2: " in earlier.stderr

    for options, message in [
        (("--step", "3"), f"generate: --step 3: {run}/checkpoint has 2, 4"),
        (("--tokens", "-1"), "generate: --sample.tokens = -1: must be an integer >= 0"),
    ]:
        refused = generate(run, *options)
        assert (refused.returncode, refused.stderr.strip()) == (2, message)
