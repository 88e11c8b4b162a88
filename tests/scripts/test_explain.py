"""--explain of the largest configuration, as a user asks for it on a machine without a GPU: 512 ranks within 1 GiB and no trace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.scripts.tiny_job import ROOT, finished

# Its own process: a child's peak counts what it was before it became the program, which is a copy of whoever started it.
MEASURE = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(done.returncode)
"""


def test_512_ranks_are_explained_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("WORLD_SIZE", "NPROC", "NGPU"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, ROOT / "scripts" / "launch.py", ROOT / "configs" / "llama3_405b.toml", "--explain"]
    text = finished([sys.executable, "-c", MEASURE, *command], cwd=tmp_path).stdout
    peak = int(text.rpartition("peak ")[2])
    assert (peak if sys.platform == "linux" else peak // 1024) < 1 << 20, f"{peak} KiB"
    for line in (
        "llama3_405b.toml: 512 ranks on one CUDA GPU each, pp 8 x dp_shard 8 x tp 8.",
        "405,853,388,800 parameters, 126 blocks",
        "Interleaved1F1B: 32 microbatches through 16 stages on 8 ranks",
        "fits on 80 GB",
    ):
        assert line in text, text
    assert not list(tmp_path.iterdir())
