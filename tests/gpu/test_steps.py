"""A step of train.py on a device: what makes the host wait, as a trace shows it, and in which order streams use memory."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallelisms.device import DEVICE_TRAITS
from parallelisms.fsdp import NoOpReduceScatter
from parallelisms.loss import fp32_addmm
from tests.gpu.devices import one_device, spin
from tests.scripts.tiny_job import ROOT, finished

pytestmark = pytest.mark.timeout(600)

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")  # of CUDA's runtime
TRACED = 8
SETTINGS = (
    f"--training.steps={TRACED + 2}",
    "--validation.enable=false",
    "--metrics.enable_tensorboard=false",
    "--lr_scheduler.warmup_steps=2",
    "--profiling.enable_profiling=true",
    f"--profiling.profile_freq={TRACED}",
)
GROUPS = ("--fault_tolerance.enable=true", "--fault_tolerance.min_replica_size=1")


def waits(folder: Path, *settings: str, **env: str) -> Counter[str]:
    """Counts the waits of the traced step, on the thread that trains."""
    command = [sys.executable, "train.py", "configs/llama.toml", f"--job.dump_folder={folder}", *SETTINGS, *settings]
    finished(command, cwd=ROOT, **env)
    [trace] = folder.glob("**/rank-0.json.gz")
    with gzip.open(trace, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return waits_of_step(events)


def waits_of_step(events: list[dict[str, Any]]) -> Counter[str]:
    """Counts the waits in a trace of one step. On a GPU the profiler writes the step twice: its span on the host (user_annotation), and
    its span on the device (gpu_user_annotation), which has no thread."""
    [step] = [
        e
        for e in events
        if e.get("ph") == "X" and e["name"].startswith("ProfilerStep") and e.get("cat") != "gpu_user_annotation"
    ]
    end = step["ts"] + step["dur"]
    return Counter(
        e["name"]
        for e in events
        if e.get("ph") == "X" and e["name"] in WAITS and e["tid"] == step["tid"] and step["ts"] <= e["ts"] < end
    )


def test_the_step_of_the_host_is_found_beside_the_one_of_the_device() -> None:
    """The format is torch.profiler's, as Chrome reads it; no device is needed."""
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#8", "tid": 1, "ts": 10.0, "dur": 10.0}
    on_device = {**step, "cat": "gpu_user_annotation", "tid": 7, "ts": 11.0, "dur": 30.0}
    wait = {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "tid": 1, "ts": 12.0, "dur": 1.0}
    elsewhere, later = {**wait, "tid": 7}, {**wait, "ts": 25.0}
    assert waits_of_step([on_device, step, wait, elsewhere, later]) == {"cudaStreamSynchronize": 1}


@one_device
def test_the_host_waits_for_what_decides_and_for_nothing_else(tmp_path: Path) -> None:
    """Twice alone: for the loss sum that rides with the vote, and for the norm of the gradients, which may end the run. Four times in a
    replica group: its tail goes to the device (Gradients._send_last) and comes back summed (Gradients.wait), and both decide."""
    server = pytest.importorskip(
        "ft.compat.lighthouse", reason="replica groups need grpcio and protobuf 6.31", exc_type=ImportError
    )
    alone = waits(tmp_path / "alone")
    lighthouse = server.LighthouseServer("127.0.0.1:0", 1)
    try:
        env = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "1"}
        in_group = waits(tmp_path / "group", *GROUPS, "--fault_tolerance.process_group=baby_nccl", **env)
    finally:
        lighthouse.shutdown()
    assert sum(alone.values()) <= 2, alone
    assert sum(in_group.values()) <= 4, in_group


@one_device
def test_a_product_is_added_to_what_it_is_written_to() -> None:
    """The gradient of the loss's weight is both: torch.addmm with `out` that is also its first argument, and of a wider dtype."""
    draws = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(s, generator=draws, device="cuda", dtype=torch.bfloat16) for s in ((256, 512), (512, 128)))
    total = torch.randn(256, 128, generator=draws, device="cuda")
    exact = total.double() + a.double() @ b.double()
    fp32_addmm(total, a, b, fused=DEVICE_TRAITS["cuda"].has_fp32_addmm)
    assert (total.double() - exact).norm() < 1e-5 * exact.norm()


@one_device
def test_gradients_of_one_rank_are_not_overwritten_before_they_are_added() -> None:
    """The memory is used as in torch's foreach_reduce and post_backward: the gradients of the next unit are written once the host
    has freed those of this one, before the reduction's stream has read them."""
    form: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    reduction = torch.cuda.Stream()
    comm = NoOpReduceScatter(SimpleNamespace(comm_ctx=SimpleNamespace(reduce_scatter_stream=reduction)))
    values, sums = [1.0, 2.0, 3.0], list[torch.Tensor]()
    for value in values:
        gradients = comm.allocate((1 << 22,), **form)
        gradients.fill_(value)
        reduction.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(reduction):
            output = comm.allocate((1 << 22,), **form)
            assert output is gradients
            spin(0.1)
            sums.append(output.float())
        del gradients, output
    torch.cuda.synchronize()
    assert [(float(each.min()), float(each.max())) for each in sums] == [(value, value) for value in values]
