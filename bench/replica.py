"""Runs one replica group, of one rank, of a tiny data-parallel job; recovery.py, goodput.py and gpu.py start, kill and restart it.

    python replica.py ours|torchft|restart MB STEP_MS gloo|baby|nccl|... DEVICE GROUP FOLDER       env: TORCHFT_LIGHTHOUSE

The model is MB megabytes of float32; a step sleeps STEP_MS, and all gradients are 1: after n steps every weight is exactly the number of
the job's first group minus n / 1024. FOLDER/event_log.0.jsonl has a line per event, as from ft/recording.py:

    start        everything is loaded; no quorum has been requested yet
    commit       a step is committed; contributors: groups whose gradients are in it; sum_s: seconds of its reduction; free: device bytes
    abort        a step failed, and its gradients are lost; `step`: the last committed one
    kill         this process is about to be killed in a reduction, as ordered
    end          weight: the value of all weights, nan if they differ; digest: of all weights

Orders come on stdin, a JSON object per line: {"end": last step} (ours takes one more, which announces its leave), {"kill": "child" or
"group"}: SIGKILL of the process group's child, or of this process, during the next reduction of two groups.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

LEARNING_RATE = 2.0**-10  # a power of two: sums of it are exact
TIMEOUT = timedelta(seconds=30)  # torchft's; ours keeps its defaults


class Replica:
    """A group's model, event log and orders."""

    def __init__(self, megabytes: str, step_ms: str, kind: str, device: str, group: str, folder: str) -> None:
        torch.set_num_threads(1)
        self.kind, self.device, self.group, self.step_s, self.step = kind, device, int(group), float(step_ms) / 1e3, 0
        width = max(1, int(float(megabytes) * 1e6 / 4 / 1000 / 8))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(1000, width, bias=False, device=device) for _ in range(8)))
        self.parameters = list(self.model.parameters())
        for parameter in self.parameters:
            parameter.data.fill_(float(group))
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer: Any = torch.optim.SGD(self.parameters, lr=LEARNING_RATE, fused=True)
        self.optimizer.step()  # the first takes 11 ms more, and in a trainer precedes a heal (get_optimizer_state_dict)
        self.optimizer.zero_grad()
        self.states: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.orders: dict[str, Any] = {}
        self._file = (Path(folder) / "event_log.0.jsonl").open("a", buffering=1, encoding="utf-8")
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        for line in sys.stdin:
            self.orders.update(json.loads(line))
        if "end" not in self.orders:
            os._exit(3)  # the process that started this one is gone

    def compute(self, slots: int = 1) -> None:
        time.sleep(self.step_s)
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, slots)

    def say(self, event: str, **words: object) -> None:
        line = {"event": event, "at_s": time.monotonic(), "pid": os.getpid(), "step": self.step, **words}
        print(json.dumps(line), file=self._file)

    def committed(self, step: int, contributors: int, sum_s: float = 0.0) -> None:
        self.step = step
        free = torch.cuda.mem_get_info()[0] if self.device == "cuda" else 0
        self.say("commit", contributors=contributors, sum_s=sum_s, free=free)

    @property
    def goes_on(self) -> bool:
        return self.step < self.orders.get("end", math.inf)

    def end(self) -> None:
        digest, weight = hashlib.sha256(), float(self.parameters[0].detach().flatten()[0])
        for parameter in self.parameters:
            digest.update(parameter.detach().cpu().numpy().data)
            weight = weight if bool((parameter == weight).all()) else math.nan
        self.say("end", weight=weight, digest=digest.hexdigest())


def ours(replica: Replica) -> None:
    from ft.config import FaultTolerance
    from ft.manager import Manager, ManagerOptions
    from ft.membership import ReplicaGroupConfig
    from ft.protocol.messages import Timeouts
    from ft.rpc.access import Access
    from ft.start import make_process_group

    lighthouse, kind = os.environ["TORCHFT_LIGHTHOUSE"], {"baby": "baby_gloo"}.get(replica.kind, replica.kind)
    config = ReplicaGroupConfig(str(replica.group), 0, 1, lighthouse, "127.0.0.1", Access(), Timeouts())
    settings = FaultTolerance(enable=True, process_group=kind, collective_s=60.0)  # type: ignore[arg-type]
    group: Any = make_process_group(settings, replica.device)
    manager, sum_s, contributors = Manager(group, config, ManagerOptions(init_sync=True)), 0.0, 0
    for name, state in replica.states.items():
        manager.register_state(name, state.state_dict, state.load_state_dict)
    manager.attach([replica.model])
    replica.say("start")

    def kill(target: int) -> None:
        replica.say("kill")
        os.kill(target, signal.SIGKILL)

    while not manager.may_exit:
        if not replica.goes_on:
            manager.leave()  # announced in one more step, so that the others lose none
        assignment = manager.begin_step()
        if assignment.slots:
            replica.compute(len(assignment.slots))
        if "kill" in replica.orders and contributors == 2:
            target = group.child.pid if replica.orders.pop("kill") == "child" else os.getpid()
            threading.Timer(sum_s / 2, kill, [target]).start()
        began_s = time.monotonic()
        sums = manager.reduce([1.0] * len(assignment.slots), 0.0, True)
        sum_s = time.monotonic() - began_s
        commit = manager.commit(sums)
        if commit is None:
            replica.say("abort", step=assignment.steps_before)
            continue
        replica.optimizer.grad_scale = torch.tensor(float(commit.divisor), device=replica.device)
        replica.optimizer.found_inf = torch.zeros((), device=replica.device)
        replica.optimizer.step()
        replica.optimizer.zero_grad()
        contributors = len(commit.contributors)
        replica.committed(manager.step, contributors, sum_s)
    manager.close()


def torchft(replica: Replica) -> None:
    """Runs the same job with torchft, as in its examples."""
    socket.gethostname = lambda: "localhost"  # before torchft calls it: the machine's own name may not resolve
    from torchft import Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]
    from torchft.process_group import ProcessGroupBabyGloo  # type: ignore[import-not-found]

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    alone = {"rank": 0, "world_size": 1, "store_addr": "localhost", "store_port": store.port}
    manager = Manager(
        pg=(ProcessGroupBabyGloo if replica.kind == "baby" else ProcessGroupGloo)(timeout=TIMEOUT),
        min_replica_size=1,
        timeout=TIMEOUT,
        state_dict=lambda: {name: of.state_dict() for name, of in replica.states.items()},
        load_state_dict=lambda state: [of.load_state_dict(state[name]) for name, of in replica.states.items()],
        replica_id=f"group{replica.group}_",
        **alone,
    )
    optimizer = Optimizer(manager, replica.optimizer)
    replica.say("start")
    while replica.goes_on:
        optimizer.zero_grad()  # requests a quorum
        replica.compute()
        for work in [manager.allreduce(parameter.grad) for parameter in replica.parameters]:
            work.wait()
        before = manager.current_step()
        optimizer.step()  # if the group's vote allows
        if manager.current_step() != before:
            replica.committed(manager.current_step(), manager.num_participants())
        else:
            replica.say("abort", step=before, contributors=manager.num_participants())
    manager.shutdown(wait=False)


class _FillGradients(torch.autograd.Function):
    """Gives every parameter a gradient of ones without reading it, as the other ways do."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [parameter.shape for parameter in parameters]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(gradient.expand(shape) for shape in ctx.shapes)


class _Ones(torch.nn.Sequential):
    """A model whose every weight has the gradient 1."""

    def forward(self) -> torch.Tensor:  # type: ignore[override]
        return _FillGradients.apply(*self.parameters())


def restart(replica: Replica) -> None:
    """Runs the same job without fault tolerance: DistributedDataParallel, resumed from a checkpoint of every CHECKPOINT_S.

    Environment: RENDEZVOUS, a new file, the same for all ranks of a start; CHECKPOINT, a file."""
    world, saved = int(os.environ["NUM_REPLICA_GROUPS"]), Path(os.environ["CHECKPOINT"])
    meet = f"file://{os.environ['RENDEZVOUS']}"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=replica.group, world_size=world)
    if saved.exists():
        found = torch.load(saved)
        replica.step = found["step"]
        for name, state in replica.states.items():
            state.load_state_dict(found[name])
    net, saved_s = torch.nn.parallel.DistributedDataParallel(_Ones(replica.model)), time.monotonic()
    replica.say("start")
    while replica.goes_on:
        time.sleep(replica.step_s)
        net().backward()
        replica.optimizer.step()
        replica.optimizer.zero_grad()
        replica.committed(replica.step + 1, world)
        if replica.group == 0 and time.monotonic() - saved_s >= float(os.environ["CHECKPOINT_S"]):
            found = {name: state.state_dict() for name, state in replica.states.items()} | {"step": replica.step}
            torch.save(found, saved.with_suffix(".part"))
            saved.with_suffix(".part").replace(saved)
            saved_s = time.monotonic()


if __name__ == "__main__":
    if len(sys.argv) != 8:  # --help, too
        sys.exit(__doc__)
    made = Replica(*sys.argv[2:])
    {"ours": ours, "torchft": torchft, "restart": restart}[sys.argv[1]](made)
    made.end()
    os._exit(0)  # gloo's threads may hold on to a group that is gone
