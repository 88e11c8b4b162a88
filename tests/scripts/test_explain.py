"""--explain, as on a machine without a GPU: of the largest configuration, 512 ranks within 1 GiB and no trace; and what a
page shows of it."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.scripts.tiny_job import ROOT, finished
from tests.unit.test_documents import BLOCK

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


def test_the_page_of_the_first_run_shows_what_is_printed(tmp_path: Path):
    """The output matches word for word; memory peaks may differ a little between releases of torch."""
    page = (ROOT / "docs" / "gpu_first_run.md").read_text()
    command, shown, *_ = (body for _, body in BLOCK.findall(page))
    _, config, *options = shlex.split(command)
    text = finished([sys.executable, ROOT / "scripts" / "launch.py", ROOT / config, *options], cwd=tmp_path).stdout
    [printed] = re.findall(r"^DEVICE MEMORY.*?\n\n", text, re.MULTILINE | re.DOTALL)
    figure = r"\d+\.?\d*"
    assert re.sub(figure, "N", printed).split() == re.sub(figure, "N", shown).split()
    assert [float(n) for n in re.findall(figure, shown)] == pytest.approx(
        [float(n) for n in re.findall(figure, printed)], rel=0.05
    )
