"""Measurements of bench/gpu.py in processes of their own: `gpu_worker.py versions|kill|healing|stall|member JSON`; answers with JSON.
And `gpu_worker.py train ARGUMENTS`: train.py, whose weights are drawn on the device.

`member` is one replica group of one rank, which `kill` starts twice on the same device: the model is so many megabytes, a step's gradients
are ones, so after n steps every weight is 1 - n / 1024, to the last bit, whoever was there. It prints an event a line and reads orders.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.pairs import Failed, Worker
from bench.step_worker import draw_on_device

RATE = 2.0**-10  # a power of two: the weights are exact
STEPS = 6  # of both, before the kill
LIMIT_S = 100.0
Event = dict[str, Any]


def versions(device: str) -> Event:
    """Versions of everything that a figure may depend on, and the operator that attention runs."""
    from importlib.metadata import distributions

    from torch.utils._python_dispatch import TorchDispatchMode

    from models import ops

    class Names(TorchDispatchMode):
        seen: set[str] = set()  # noqa: RUF012

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.add(str(op))
            return op(*args, **(kwargs or {}))

    found: Event = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    installed = {each.name.lower(): each.version for each in distributions() if each.name}
    packages = ("protobuf", "grpcio", "transformers", "torchtitan", "torchao")
    found |= {package: installed.get(package, "not installed") for package in packages}
    q, k, v = (torch.randn(1, 256, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    with Names() as names:
        ops.causal_attention(q, k, v)
    found["attention"] = " ".join(sorted(name for name in names.seen if "attention" in name))
    found |= dict.fromkeys(("device", "driver", "NCCL", "cuDNN", "memory_gib"), "no GPU")
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    found["ptrace scope"] = scope.read_text().strip() if scope.exists() else "no Yama"
    if device == "cuda":
        driver = os.popen("nvidia-smi --query-gpu=driver_version --format=csv,noheader").read().split()
        found |= {"device": torch.cuda.get_device_name(), "driver": driver[0] if driver else "unknown"}
        found |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version())), "cuDNN": torch.backends.cudnn.version()}
        found["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return found


# ------------------------------------------------------------------------------------------------ two members


def member(name: str, kind: str, device: str, megabytes: int, lighthouse: str) -> None:
    from ft.config import FaultTolerance
    from ft.manager import Manager, ManagerOptions
    from ft.membership import ReplicaGroupConfig
    from ft.protocol.messages import Times
    from ft.rpc.access import Access
    from ft.start import process_group

    torch.set_num_threads(1)
    width = max(1, int(megabytes * 1e6 / 4 / 1000 / 8))
    layers = [torch.nn.Linear(1000, width, bias=False, device=device) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.data.fill_(1.0 if name == "a" else 7.0)
    group: Any = process_group(FaultTolerance(enable=True, process_group=kind), device)  # type: ignore[arg-type]
    manager = Manager(
        group, ReplicaGroupConfig(name, 0, 1, lighthouse, "127.0.0.1", Access(), Times()), ManagerOptions()
    )
    manager.register("model", model.state_dict, model.load_state_dict)
    manager.attach([model])
    orders: dict[str, Any] = {}
    threading.Thread(target=lambda: [orders.update(json.loads(line)) for line in sys.stdin], daemon=True).start()

    def say(event: str, **more: Any) -> None:
        print(json.dumps({"event": event, "t": time.monotonic(), **more}), flush=True)

    def kill(target: int, after_s: float) -> None:
        time.sleep(after_s)
        say("kill")
        os.kill(target, signal.SIGKILL)

    sum_s, contributors = 0.0, 0
    while manager.step < orders.get("last", sys.maxsize):
        deal = manager.begin_step()
        for parameter in parameters if deal.slots else ():
            parameter.grad = torch.full_like(parameter, len(deal.slots))
        if "kill" in orders and contributors == 2:
            target = group.child.pid if orders.pop("kill") == "child" else os.getpid()
            threading.Thread(target=kill, args=(target, sum_s / 2), daemon=True).start()
        began_s = time.monotonic()
        sums = manager.reduce([1.0] * len(deal.slots), 0.0, True)
        sum_s = time.monotonic() - began_s
        commit = manager.commit(sums)
        if commit is None:
            say("abort", step=deal.step)
            continue
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter -= parameter.grad / commit.divisor * RATE
                    parameter.grad = None
        contributors = len(commit.contributors)
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
        say("commit", step=manager.step, contributors=contributors, sum_s=sum_s, free=free)
        time.sleep(0.02)
    want = 1.0 - manager.step * RATE
    say("end", step=manager.step, right=all(bool((parameter == want).all()) for parameter in parameters))
    os._exit(0)  # the other one may be gone


class Heard:
    """A member's events, as they come, in a thread."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.events, self.problem = worker, list[Event](), ""
        self._news = threading.Condition()
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        try:
            while True:
                event = self.worker.answer()
                with self._news:
                    self.events.append(event)
                    self._news.notify_all()
        except (Failed, ValueError) as ended:
            with self._news:
                self.problem = str(ended) or "it ended"
                self._news.notify_all()

    def tell(self, **order: Any) -> None:
        stdin = self.worker._process.stdin
        assert stdin is not None
        print(json.dumps(order), file=stdin, flush=True)

    def wait(
        self, name: str, *, contributors: int = 0, after_s: float = 0.0, count: int = 1, limit_s: float = LIMIT_S
    ) -> Event:
        """The count-th such event since `after_s`. Raises Failed."""

        def there() -> list[Event]:
            return [
                e for e in list(self.events)
                if e["event"] == name and e["t"] > after_s and contributors in (0, e.get("contributors"))
            ]  # fmt: skip

        with self._news:
            self._news.wait_for(lambda: len(there()) >= count or self.problem, limit_s)
        if len(there()) < count:
            raise Failed(f"{self.worker.name}: no {name} in {limit_s:.0f} s: {self.problem or 'it is alive'}")
        return there()[count - 1]


def kill(device: str, kind: str, victim: str, watch_s: float, megabytes: int) -> Event:
    """`victim`: "child" or "group", of the second member; it dies in the middle of a sum."""
    from ft.compat.lighthouse_server import LighthouseServer

    with ExitStack() as stack:
        lighthouse = LighthouseServer("127.0.0.1:0", 1)
        stack.callback(lighthouse.shutdown)

        def start(name: str) -> Heard:
            arguments = {
                "name": name,
                "kind": kind,
                "device": device,
                "megabytes": megabytes,
                "lighthouse": lighthouse.address(),
            }
            env = {
                "NCCL_HOSTID": name,
                "NCCL_SOCKET_IFNAME": "lo",
                "GLOO_SOCKET_IFNAME": "lo",
                "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "30",
            }
            worker = Worker(name, [sys.executable, __file__, "member", json.dumps(arguments)], env)
            stack.callback(worker._process.kill)
            return Heard(worker)

        a = start("a")
        alone = a.wait("commit", contributors=1, count=5)
        b = start("b")
        before = a.wait("commit", contributors=2, count=STEPS)
        b.tell(kill=victim)
        killed = b.wait("kill", after_s=before["t"])
        after = a.wait("commit", after_s=killed["t"])
        both = 2 if victim == "child" else 1
        last = a.wait("commit", contributors=both, after_s=killed["t"] + watch_s, limit_s=LIMIT_S + watch_s)
        survivors = [a, b] if victim == "child" else [a]
        for survivor in survivors:
            survivor.tell(last=last["step"] + 20)
        ends = [survivor.wait("end") for survivor in survivors]
        lost = [e for e in a.events if e["event"] == "abort" and e["t"] > killed["t"]]
        sums = [
            e["sum_s"] for e in a.events if e["event"] == "commit" and e["contributors"] == 2 and e["t"] < killed["t"]
        ]
        reference = before if victim == "child" else alone
        return {
            "next_step_s": round(after["t"] - killed["t"], 3),
            "steps_lost": len(lost),
            "bits": all(end["right"] for end in ends) and len({end["step"] for end in ends}) == 1,
            "memory_lost_mib": round((reference["free"] - last["free"]) / 2**20, 1),
            "watched_s": round(last["t"] - killed["t"], 1),
            "sum_ms": round(1e3 * statistics.median(sums), 1),
        }


# ------------------------------------------------------------------------------------------------ healing, checkpoint


def healing(device: str, gb: float) -> Event:
    """GB/s of a joiner that heals over HTTP, beside a bare socket into (pinned) memory and on to the device."""
    program = str(Path(__file__).with_name("healing_worker.py"))
    speeds: dict[str, list[float]] = {"raw": [], "http": []}
    with ExitStack() as stack:
        sides = [Worker(role, [sys.executable, program, role, str(gb), device], {}) for role in ("source", "joiner")]
        for side in sides:
            stack.callback(side.close)
            side.answer()
        source, joiner = sides
        for turn in range(4):  # the first warms up
            for way in speeds:
                address = source.ask(["offer", way, turn])["address"]
                got = joiner.ask(["fetch", way, turn, address])
                source.ask(["end", way, turn])
                if not got["right"]:
                    raise Failed(f"{way}: the joiner's state is not the source's")
                speeds[way] += [got["gb"] / got["seconds"]] if turn else []
    shares = [http / raw for http, raw in zip(speeds["http"], speeds["raw"], strict=True)]
    return {
        "http": [round(x, 2) for x in speeds["http"]],
        "raw": [round(x, 2) for x in speeds["raw"]],
        "share": statistics.median(shares),
    }


def stall(device: str, megabytes: int) -> Event:
    """Seconds that an async checkpoint holds the step up, by those of one copy of the state into (pinned) host memory."""
    from bench.checkpoint import Bench, in_turns

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), megabytes, device)
        seconds = in_turns({"stall": bench.stall, "copy": bench.copy}, 3)
        bench.background.wait()
    shares = [a / b for a, b in zip(seconds["stall"], seconds["copy"], strict=True)]
    return {name: [round(s, 4) for s in spent] for name, spent in seconds.items()} | {
        "share": statistics.median(shares)
    }


def train(*argv: str) -> None:
    """train.py draws weights on the CPU, with the same bits for every layout: a minute for 1B, before each of a part's many runs."""
    sys.argv = ["train.py", *argv]
    with patch("models.llama.normal_", draw_on_device):
        runpy.run_path(str(Path(__file__).resolve().parents[1] / "train.py"), run_name="__main__")


def main(what: str, *arguments: str) -> None:
    if what == "train":
        return train(*arguments)
    [argument] = arguments
    answer = {"versions": versions, "kill": kill, "healing": healing, "stall": stall, "member": member}[what](
        **json.loads(argument)
    )
    if answer is not None:
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Failed as failure:
        sys.exit(str(failure))
