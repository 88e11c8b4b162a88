"""Image classification in replica groups that may fail and return, with torchft's names: an example for your own training loop.

    ./scripts/run_lighthouse.sh --min_replicas 1 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510 NUM_REPLICA_GROUPS=2
    REPLICA_GROUP_ID=0 python examples/train_ddp.py &
    REPLICA_GROUP_ID=1 python examples/train_ddp.py

Kill one of the two: the other continues with the same step. Restart it: it receives the other's weights. At the same step both print the
same sum of weights. The images are synthetic: each class is one small picture, repeated, under much noise.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where ft is not installed

from ft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupBabyNCCL, ProcessGroupGloo

CLASSES = 10


class Images(Dataset[tuple[Tensor, int]]):
    """50,000 images of shape (3, 32, 32), each of which is a function of its index."""

    def __init__(self) -> None:
        self.pictures = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(0)).repeat(1, 1, 4, 4)

    def __len__(self) -> int:
        return 50_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % CLASSES
        noise = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))
        return noise + 0.2 * self.pictures[label], label


def net() -> nn.Sequential:
    convolutions = [nn.Conv2d(3, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * 5 * 5, 64), nn.ReLU(), nn.Linear(64, CLASSES))


@record
def main(steps: int) -> None:
    group, groups = int(os.environ.get("REPLICA_GROUP_ID", "0")), int(os.environ.get("NUM_REPLICA_GROUPS", "2"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # for equal runs; groups are equal in any case, as all receive the weights of one

    # each group has its share of the images, which is not trained on while the group is missing
    images = Images()
    sampler = DistributedSampler(images, replica_group=group, num_replica_groups=groups, rank=0, num_replicas=1)
    loader = StatefulDataLoader(images, batch_size=64, num_workers=2, sampler=sampler)

    model = net().to(device)
    adam = optim.AdamW(model.parameters())

    # the state that a joining group receives
    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": adam.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optim"])

    manager = Manager(
        # NCCL runs in a child process, which can be killed and replaced if it hangs
        pg=ProcessGroupBabyNCCL() if device == "cuda" else ProcessGroupGloo(),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        replica_id=f"train_ddp_{group}",
        timeout=timedelta(seconds=60),
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, adam)

    while manager.current_step() < steps:
        for inputs, labels in loader:
            optimizer.zero_grad()  # begins the step: the quorum is known, and a group that was behind has healed
            loss = F.cross_entropy(ddp(inputs.to(device)), labels.to(device))
            loss.backward()  # averages gradients; if a group fails, again over the remaining groups
            optimizer.step()  # only if the step is committed

            step = manager.current_step()
            if step % 50 == 0:
                weights = sum(p.sum().item() for p in model.parameters())
                print(
                    f"[{step}] {manager.num_participants()} groups, loss {loss.item():.4f}, weights {weights:.6f}",
                    flush=True,
                )
            # to survive the loss of all groups at once, a program saves a checkpoint here from time to time: state_dict(),
            # manager.state_dict(), and the state of the loader, which is this group's own
            if step >= steps:
                break
    manager.shutdown()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=10_000)
    main(parser.parse_args().steps)
