"""--explain of the largest configuration, as a user asks for it on a machine without a GPU: 512 ranks within 1 GiB and no trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_512_ranks_are_explained_here(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "NPROC", "NGPU")}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "launch.py"), str(ROOT / "configs" / "llama3_405b.toml"), "--explain"],
        cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, process.stderr.read()
    process.returncode = 0
    resident_kib = usage.ru_maxrss if sys.platform == "linux" else usage.ru_maxrss // 1024
    assert resident_kib < 1 << 20
    for line in (
        "llama3_405b.toml: 512 ranks on one CUDA GPU each, pp 8 x dp_shard 8 x tp 8.",
        "405,853,388,800 parameters, 126 blocks",
        "Interleaved1F1B: 32 microbatches through 16 stages on 8 ranks",
        "fits on 80 GB",
    ):
        assert line in text, text
    assert not list(tmp_path.iterdir())
