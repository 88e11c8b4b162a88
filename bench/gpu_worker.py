"""Measurements of bench/gpu.py in processes of their own: `gpu_worker.py versions|kill|healing|stall JSON`; answers with JSON.
And `gpu_worker.py train ARGUMENTS`: train.py, whose weights are drawn on the device.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.job import ROOT, DiaryLine, JobSide, RecoveryJob, ReplicaGroup
from bench.pairs import Failed, in_turns, ratio
from bench.step_worker import draw_on_device

STEPS = 6  # of both, before the kill
LIMIT_S = 100.0
Event = dict[str, Any]


def versions(device: str) -> Event:
    """Versions of everything that a figure may depend on, and the operator that attention runs."""
    from importlib.metadata import distributions

    from models import ops

    found: Event = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    installed = {each.name.lower(): each.version for each in distributions() if each.name}
    packages = ("protobuf", "grpcio", "transformers", "torchtitan", "torchao")
    found |= {package: installed.get(package, "not installed") for package in packages}
    q, k, v = (torch.randn(1, 256, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    with torch.profiler.profile() as profile:
        ops.causal_attention(q, k, v)
    names = {event.key for event in profile.key_averages()}
    found["attention"] = " ".join(sorted(name for name in names if "attention" in name))
    found |= dict.fromkeys(("device", "driver", "NCCL", "cuDNN", "memory_gib"), "no GPU")
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    found["ptrace scope"] = scope.read_text().strip() if scope.exists() else "no Yama"
    if device == "cuda":
        driver = os.popen("nvidia-smi --query-gpu=driver_version --format=csv,noheader").read().split()
        found |= {"device": torch.cuda.get_device_name(), "driver": driver[0] if driver else "unknown"}
        found |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version())), "cuDNN": torch.backends.cudnn.version()}
        found["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return found


def kill(device: str, kind: str, victim: str, watch_s: float, megabytes: int) -> Event:
    """Two groups on one device. `victim`: "child" or "group", of the second one; it dies in the middle of a sum."""
    with RecoveryJob(JobSide("ours"), 2, megabytes=megabytes, step_ms=20, kind=kind, device=device) as job:
        a, b = job.groups
        living = [a, b] if victim == "child" else [a]

        nccl = {"NCCL_SOCKET_IFNAME": "lo", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "30"}

        def seen(group: ReplicaGroup, event: str, count: int = 1, of: int = 0, after_s: float = 0.0) -> DiaryLine:
            """The count-th such line since then, of so many groups."""

            def there() -> list[DiaryLine]:
                found = [line for line in group.since(after_s, event) if of in (0, line.contributors)]
                return found[count - 1 : count]

            return job.until(f"{event} of group {group.name}", there, LIMIT_S + watch_s, lives=[a])[0]

        a.start(NCCL_HOSTID=a.name, **nccl)
        alone = seen(a, "commit", 5, of=1)
        b.start(NCCL_HOSTID=b.name, **nccl)
        before = seen(a, "commit", STEPS, of=2)
        b.tell(kill=victim)
        killed_s = seen(b, "kill", after_s=before.at_s).at_s
        after = seen(a, "commit", after_s=killed_s)
        last = seen(a, "commit", of=len(living), after_s=killed_s + watch_s)
        ends = job.finish(living)
        sums = [line.sum_s for line in a.since(0.0, "commit") if line.contributors == 2 and line.at_s < killed_s]
        reference = before if victim == "child" else alone
        right = all(end.weight == -end.step / 1024 for end in ends) and len({end.state for end in ends}) == 1
        return {
            "next step s": round(after.at_s - killed_s, 3),
            "steps lost": len(a.since(killed_s, "abort")),
            "bits equal": right,
            "MiB lost": round((reference.free - last.free) / 2**20, 1),
            "watched s": round(last.at_s - killed_s, 1),
            "a sum ms": round(1e3 * statistics.median(sums), 1),
        }


def healing(device: str, gb: float) -> Event:
    """GB/s of a joiner that heals over HTTP, beside a bare socket into (pinned) memory and on to the device."""
    from bench.healing import measure

    figures = measure(("raw", "http"), 3, gb, device)
    speeds = {kind: [turn["speed"] for turn in figures[kind]] for kind in ("http", "raw")}
    share = ratio(speeds["http"], speeds["raw"]).median
    return {**{kind: [round(x, 2) for x in all_of] for kind, all_of in speeds.items()}, "share": share}


def stall(device: str, megabytes: int) -> Event:
    """Seconds that an async checkpoint holds the step up, by those of one copy of the state into (pinned) host memory."""
    from bench.checkpoint import Bench

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), megabytes, device)
        seconds = in_turns({"stall": bench.stall, "copy": bench.copy}, 3, warm=1)
        bench.background.wait()
    share = ratio(seconds["stall"], seconds["copy"]).median
    return {**{name: [round(s, 4) for s in spent] for name, spent in seconds.items()}, "share": share}


def train(*argv: str) -> None:
    """train.py draws weights on the CPU, with the same bits for every layout: a minute for 1B, before each of a part's many runs."""
    sys.argv = ["train.py", *argv]
    with patch("models.llama.normal_", draw_on_device):
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    try:
        if what == "train":
            train(*arguments)
        else:
            answer = {"versions": versions, "kill": kill, "healing": healing, "stall": stall}[what]
            print(json.dumps(answer(**json.loads(arguments[0]))), flush=True)
    except Failed as failure:
        sys.exit(str(failure))
