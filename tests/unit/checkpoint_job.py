"""A tiny training job around a Checkpointer, for the tests of checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.unit.fakes import Lines
from training import checkpoint_files
from training.checkpoint import Checkpointer
from training.checkpoint_config import CheckpointConfig
from training.states import ModelState, OptimizerState
from training.writer_lease import WriterLease


class Ledger:
    """Step and cursor, as the seam keeps them."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"step": 0, "position": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class Trains:
    """Trains `model` with `optimizer`, and counts steps in `ledger`; the batch depends only on the step."""

    ledger: Ledger
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.ledger.state["step"] += 1
            self.ledger.state["position"] += 4
            torch.manual_seed(self.ledger.state["step"])
            loss = self.model(torch.randint(7, (4,))).square().sum()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


class Job(Trains):
    """A tiny model, its optimizer and a cursor, with the checkpointer over them."""

    def __init__(
        self,
        folder: Path,
        *,
        url: str = "checkpoint",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        lease: WriterLease | None = None,
        clock: Callable[[], float] = time.monotonic,
        in_thread: Callable[[Callable[[], None]], None] | None = None,
        computed: Collection[str] = (),
        on_bytes: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> None:
        """`at`: functions by name of a save's stage, each called once before that stage (see Checkpointer)."""
        torch.set_num_threads(1)  # the same bits need the same number of threads, here and in a child
        torch.manual_seed(seed)
        self.layers = [nn.Embedding(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)]
        self.model = nn.Sequential(*self.layers).to(dtype)
        decayed = [parameter for parameter in self.model.parameters() if parameter.ndim == 2]
        plain = [parameter for parameter in self.model.parameters() if parameter.ndim == 1]
        groups = [{"params": decayed, "lr_factor": 1.0}, {"params": plain, "weight_decay": 0.0, "lr_factor": 0.5}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95))
        self.ledger = Ledger()
        self.log = Lines()
        self.states: dict[str, Any] = {
            "model": ModelState([self.model]),
            "optimizer": OptimizerState([self.model], self.optimizer),
            "ledger": self.ledger,
        }
        config = CheckpointConfig(folder=url, **settings)
        self.at: dict[str, Callable[[], object]] = {}
        self.checkpointer = Checkpointer(
            config,
            folder,
            self.states,
            log=self.log,
            computed=computed,
            lease=lease,
            clock=clock,
            in_thread=in_thread,
            on_stage=self.reach,
            on_bytes=on_bytes,
        )

    def reach(self, stage: str) -> None:
        self.at.pop(stage, int)()

    def step_and_save(self, *steps: int) -> None:
        for step in steps:
            self.train(step - self.ledger.state["step"])
            self.checkpointer.save(step)

    def everything(self) -> dict[str, Any]:
        states = {**ModelState([self.model]).state_dict()}
        states.update(OptimizerState([self.model], self.optimizer).state_dict(), **self.ledger.state)
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in states.items()}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    assert first.keys() == second.keys()
    return all(
        torch.equal(value, second[name]) if isinstance(value, Tensor) else value == second[name]
        for name, value in first.items()
    )


def steps_in(folder: Path) -> list[int]:
    return checkpoint_files.list_steps(folder / "checkpoint")


def data_file(folder: Path, step: int | str) -> Path:
    return next((folder / "checkpoint" / f"step-{step}").glob("*.distcp"))


def flip_a_bit(path: Path, where: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 1 << 3
    path.write_bytes(content)
