"""A step of train.py on a device, as a trace shows it: what makes the host wait."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ft.rpc.lighthouse_server import LighthouseServer
from parallelisms.device import DIFFERENCES
from parallelisms.loss import add_product
from tests.gpu.devices import one_device

pytestmark = [one_device, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")  # of CUDA's runtime
TRACED = 8
SETTINGS = (
    f"--training.steps={TRACED + 2}",
    "--validation.enable=false",
    "--lr_scheduler.warmup_steps=2",
    "--profiling.enable_profiling=true",
    f"--profiling.profile_freq={TRACED}",
)
GROUPS = ("--fault_tolerance.enable=true", "--fault_tolerance.min_replica_size=1")


def waits(folder: Path, *settings: str, env: dict[str, str] | None = None) -> Counter[str]:
    """Of the traced step, on the thread that trains."""
    command = [sys.executable, "train.py", "configs/llama.toml", f"--job.dump_folder={folder}", *SETTINGS, *settings]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **(env or {})}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    [trace] = folder.glob("**/rank-0.json.gz")
    with gzip.open(trace, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    [step] = [e for e in events if e.get("ph") == "X" and e["name"].startswith("ProfilerStep")]
    end = step["ts"] + step["dur"]
    return Counter(
        e["name"]
        for e in events
        if e.get("ph") == "X" and e["name"] in WAITS and e["tid"] == step["tid"] and step["ts"] <= e["ts"] < end
    )


def test_the_host_waits_for_what_decides_and_for_nothing_else(tmp_path: Path) -> None:
    """Twice: for the loss sum that rides with the vote, and for the norm of the gradients, which may end the run. Fault tolerance
    adds nothing: its own collective is waited for by events of this process, not of the device."""
    alone = waits(tmp_path / "alone")
    lighthouse = LighthouseServer("127.0.0.1:0", 1)
    try:
        env = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "1"}
        in_group = waits(tmp_path / "group", *GROUPS, "--fault_tolerance.process_group=baby_nccl", env=env)
    finally:
        lighthouse.shutdown()
    assert sum(alone.values()) <= 2, alone
    assert sum(in_group.values()) <= 2, in_group


def test_a_product_is_added_to_what_it_is_written_to() -> None:
    """The gradient of the loss's weight is both: torch.addmm with `out` that is also its first argument, and of a wider dtype."""
    draws = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(s, generator=draws, device="cuda", dtype=torch.bfloat16) for s in ((256, 512), (512, 128)))
    total = torch.randn(256, 128, generator=draws, device="cuda")
    exact = total.double() + a.double() @ b.double()
    add_product(total, a, b, in_fp32=DIFFERENCES["cuda"].adds_products_in_fp32)
    assert (total.double() - exact).norm() < 1e-5 * exact.norm()
