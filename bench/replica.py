"""One replica group, of one rank, of a tiny data-parallel job: what recovery.py starts, kills and starts again.

    python replica.py GROUP LOGFILE MB STEP_MS ours|torchft|restart [baby]        env: TORCHFT_LIGHTHOUSE, RUN_S

The model is MB megabytes of float32; a step "computes" for STEP_MS and has ones for gradients: after n steps every weight is the number of
the group that the job began with, less n / 1024, to the last bit. Ends after RUN_S seconds, or after the step whose number comes on stdin
(ours takes one more to say so to the others).
The log has one line an event: seconds of the monotonic clock, the event, and

    start 0 0                     all is loaded and made; the first quorum has not been asked for
    commit STEP PARTICIPANTS      a step holds; participants: the groups whose gradients are in it
    abort STEP PARTICIPANTS       it does not, and its gradients are lost: STEP is the last one that holds
    sum SUM 0                     of the first weights, at the end
    end STEP WEIGHT DIGEST        the first weight, and what all weights are
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch

LEARNING_RATE = 2.0**-10  # a power of two: sums of it are exact
TIMEOUT = timedelta(seconds=30)  # torchft's; ours keeps its defaults


def main(arguments: list[str]) -> None:
    group, log, step_s = int(arguments[0]), ReplicaLog(Path(arguments[1])), float(arguments[3]) / 1e3
    torch.set_num_threads(1)
    model = build(float(arguments[2]), float(group))
    train = {"ours": ours, "torchft": torchft, "restart": restart}[arguments[4]]
    train(group, model, log, step_s, "baby" in arguments)
    log.end(model)
    os._exit(0)  # gloo's threads may hold on to a group that is gone


def build(megabytes: float, value: float) -> torch.nn.Module:
    width = max(1, int(megabytes * 1e6 / 4 / 1000 / 8))
    model = torch.nn.Sequential(*[torch.nn.Linear(1000, width, bias=False) for _ in range(8)])
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return model


def compute(model: torch.nn.Module, step_s: float, slots: int = 1) -> None:
    time.sleep(step_s)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, slots)


class ReplicaLog:
    """The lines, and when to end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._end_s = time.monotonic() + float(os.environ.get("RUN_S", "inf"))
        self._last = float("inf")
        self._step = 0
        threading.Thread(target=self._read, name="last-step", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._last = int(line)

    def say(self, event: str, *words: object) -> None:
        print(f"{time.monotonic():.4f}", event, *words, file=self._file)

    def committed(self, step: int, participants: int) -> None:
        self._step = step
        self.say("commit", step, participants)

    def goes_on(self) -> bool:
        return self._step < self._last and time.monotonic() < self._end_s

    def end(self, model: torch.nn.Module) -> None:
        weights = [parameter.detach().flatten() for parameter in model.parameters()]
        digest = hashlib.sha256()
        for flat in weights:
            digest.update(flat.numpy().data)
        self.say("sum", f"{float(weights[0].double().sum()):.3f}", 0)
        self.say("end", self._step, float(weights[0][0]), digest.hexdigest())


# ------------------------------------------------------------------------------------------------ two managers


def ours(group: int, model: torch.nn.Module, log: ReplicaLog, step_s: float, baby: bool) -> None:
    from ft.manager import Manager, ManagerOptions
    from ft.membership import ReplicaGroupConfig
    from ft.process_groups.baby import ProcessGroupBabyGloo
    from ft.process_groups.gloo import ProcessGroupGloo
    from ft.protocol.messages import Times
    from ft.rpc.access import Access

    lighthouse = os.environ["TORCHFT_LIGHTHOUSE"]
    config = ReplicaGroupConfig(str(group), 0, 1, lighthouse, "127.0.0.1", Access(), Times())
    manager = Manager((ProcessGroupBabyGloo if baby else ProcessGroupGloo)(), config, ManagerOptions())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    manager.register("model", model.state_dict, model.load_state_dict)
    manager.register("optimizer", optimizer.state_dict, optimizer.load_state_dict)
    manager.attach([model])
    log.say("start", 0, 0)
    while not manager.left:
        if not log.goes_on():
            manager.leave()  # said in one more step, so that it costs the others none
        deal = manager.begin_step()
        if deal.slots:
            compute(model, step_s, len(deal.slots))
        commit = manager.commit(manager.reduce([1.0] * len(deal.slots), 0.0, True))
        if commit is None:
            log.say("abort", deal.step, 0)
            continue
        torch._foreach_div_(
            [parameter.grad for parameter in model.parameters() if parameter.grad is not None], commit.divisor
        )
        optimizer.step()
        optimizer.zero_grad()
        log.committed(manager.step, len(commit.contributors))
    manager.close()


def torchft(group: int, model: torch.nn.Module, log: ReplicaLog, step_s: float, baby: bool) -> None:
    """The same job on torchft, as its own examples use it."""
    socket.gethostname = lambda: "localhost"  # before torchft asks: the machine's own name need not resolve
    from torchft import Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]
    from torchft.process_group import ProcessGroupBabyGloo  # type: ignore[import-not-found]

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    manager = Manager(
        pg=(ProcessGroupBabyGloo if baby else ProcessGroupGloo)(timeout=TIMEOUT),
        min_replica_size=1,
        timeout=TIMEOUT,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            inner.load_state_dict(state["optimizer"]),
        ),
        replica_id=f"group{group}_",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
    )
    optimizer = Optimizer(manager, inner)
    log.say("start", 0, 0)
    while log.goes_on():
        optimizer.zero_grad()  # asks for a quorum
        compute(model, step_s)
        for work in [manager.allreduce(parameter.grad) for parameter in model.parameters()]:
            work.wait()
        before = manager.current_step()
        optimizer.step()  # if the group's vote allows
        if manager.current_step() != before:
            log.committed(manager.current_step(), manager.num_participants())
        else:
            log.say("abort", before, manager.num_participants())
    manager.shutdown(wait=False)


class _Ones(torch.nn.Module):
    """A model whose every weight has the gradient 1."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> torch.Tensor:
        return torch.stack([parameter.sum() for parameter in self.model.parameters()]).sum()


def restart(group: int, model: torch.nn.Module, log: ReplicaLog, step_s: float, baby: bool) -> None:
    """The same job without fault tolerance: DistributedDataParallel, and a checkpoint every CHECKPOINT_S seconds to go on from.

    env, too: RENDEZVOUS, a file that does not exist yet, the same for all ranks of a start; CHECKPOINT, a file."""
    world, saved = int(os.environ["NUM_REPLICA_GROUPS"]), Path(os.environ["CHECKPOINT"])
    meet = f"file://{os.environ['RENDEZVOUS']}"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=group, world_size=world)
    optimizer, step = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    net, saved_s = torch.nn.parallel.DistributedDataParallel(_Ones(model)), time.monotonic()
    log.say("start", step, 0)
    while log.goes_on():
        time.sleep(step_s)
        net().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log.committed(step, world)
        if group == 0 and time.monotonic() - saved_s >= float(os.environ["CHECKPOINT_S"]):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".part"))
            saved.with_suffix(".part").replace(saved)
            saved_s = time.monotonic()


if __name__ == "__main__":
    main(sys.argv[1:])
