"""A group of one rank that trains with torchft's Manager over gloo: what test_torchft_training.py starts, kills and starts again.

    python torchft_trainer.py GROUP SEED      env: TORCHFT_LIGHTHOUSE; in the path: torchft

Prints one line of JSON per committed step: step, groups in it, digest of weights and optimizer state. A number on stdin is the last step.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

socket.gethostname = lambda: "127.0.0.1"  # before torchft asks: the machine's own name need not resolve
from torchft import Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]  # noqa: E402

TIMEOUT = timedelta(seconds=20)
STEP_S = 0.02  # what a step takes beside the computing, so that a group which starts has a core to start on


def main(group: int, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=1,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            inner.load_state_dict(state["optimizer"]),
        ),
        replica_id=f"group{group}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
    )
    optimizer = Optimizer(manager, inner)
    last = LastStep()
    while manager.current_step() < last.step:
        before = manager.current_step()
        time.sleep(STEP_S)
        optimizer.zero_grad()  # asks for a quorum
        data = torch.randn(8, 16)  # its own: groups agree through the reduction alone
        (model(data) - data).square().mean().backward()
        for work in [manager.allreduce(p.grad) for p in model.parameters()]:
            work.wait()
        optimizer.step()  # if the group's vote allows
        if manager.current_step() != before:
            say(manager.current_step(), manager.num_participants(), model, inner)
    manager.shutdown(wait=False)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may hold on to a group that is gone


class LastStep:
    """None as long as nobody has said."""

    def __init__(self) -> None:
        self.step = float("inf")
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self.step = int(line)
        if self.step == float("inf"):
            os._exit(3)  # whoever started this is gone


def say(step: int, groups: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tensors = [*model.parameters(), *(t for s in optimizer.state.values() for _, t in sorted(s.items()))]
    digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
    print(json.dumps({"step": step, "groups": groups, "digest": digest}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
