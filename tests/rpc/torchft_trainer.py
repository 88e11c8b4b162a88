"""bench/replica.py on torchft with data of its own for each group: what test_torchft_training.py starts, kills and starts again.

    python torchft_trainer.py torchft ARGUMENTS      as replica.py; env, too: SEED; in the path: torchft

Each `commit` line has the digest of weights and optimizer state.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch

from bench import replica


class Trainer(replica.Replica):
    def __init__(self, *arguments: str) -> None:
        super().__init__(*arguments)
        torch.manual_seed(int(os.environ.get("SEED", self.group)))
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.01)
        self.states = {"model": self.model, "optimizer": self.optimizer}

    def compute(self, slots: int = 1) -> None:
        time.sleep(self.step_s)  # beside the computing, so that a group which starts has a core to start on
        data = torch.randn(8, 16)  # its own: groups agree through the reduction alone
        (self.model(data) - data).square().mean().backward()

    def committed(self, step: int, contributors: int, sum_s: float = 0.0) -> None:
        self.step = step
        state = self.optimizer.state.values()
        tensors = [*self.parameters, *(tensor for of in state for _, tensor in sorted(of.items()))]
        digest = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()
        self.say("commit", contributors=contributors, digest=digest)


if __name__ == "__main__":
    trainer = Trainer(*sys.argv[2:])
    replica.torchft(trainer)
    trainer.end()
    os._exit(0)  # gloo's threads may hold on to a group that is gone
