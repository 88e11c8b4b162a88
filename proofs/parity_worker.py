"""What one rank does for proofs/parity.py: the truth by one process in plain PyTorch, and a layout's steps held against it.

Flow: parity.py sends `alone` to one worker per vocabulary and optimizer, then `beside` to as many workers as a case has ranks.
The truth uses nothing of parallelisms/ or training/loss.py: the mean loss is torch's own, and so is its gradient.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from models.contract import Model, ModelConfig
from parallelisms.clip import gradient_norm, scale_gradients
from parallelisms.means import sum_over_ranks
from parallelisms.mesh import Degrees, Seat, build_mesh, degrees
from parallelisms.parallelize import Layout, Parallelized, parallelize
from training import checkpoint_dcp
from training.checkpoint_states import ModelState, plain_name
from training.loss import IGNORED, cross_entropy_sum
from training.optimizer import OptimizerConfig, build_optimizer

OptimizerName = Literal["SGD", "AdamW"]
STEPS: dict[OptimizerName, int] = {"SGD": 3, "AdamW": 5}
SGD_RATE = 0.1


@dataclass(frozen=True)
class Task:
    """What every case computes."""

    model: ModelConfig
    optimizer: OptimizerConfig  # of the AdamW cases
    seq_len: int
    global_batch_size: int  # sequences
    seed: int
    folder: Path  # where the seed checkpoints and the truths lie

    def seed_checkpoint(self, vocab_size: int) -> Path:
        return self.folder / f"seed-{vocab_size}"

    def truth(self, vocab_size: int, optimizer: OptimizerName) -> Path:
        return self.folder / f"truth-{vocab_size}-{optimizer}.pt"


@dataclass(frozen=True)
class Case:
    """One layout, and how it computes the task."""

    layout: Layout
    world_size: int
    optimizer: OptimizerName
    microsteps: int  # forward-backwards of a step: gradient accumulation
    vocab_size: int

    @property
    def degrees(self) -> Degrees:
        return degrees(self.layout.parallelism, self.world_size)

    def local_batch_size(self, global_batch_size: int) -> int:
        """Sequences of one forward-backward of one rank."""
        return global_batch_size // (self.degrees.data_parallel * self.microsteps)


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient, gathered."""

    name: str
    shape: tuple[int, ...]
    deviation: float = 0.0  # ||g - g1|| / ||g1||; inf: there is no such g1


@dataclass(frozen=True)
class Step:
    """What one rank saw of one step."""

    loss: float  # mean over all valid tokens
    tokens: float  # valid, of all ranks
    norm: float  # of the mean gradient
    gradients: tuple[Gradient, ...]  # of the mean loss, in the order of the parameters that this rank has


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a case."""

    seat: Seat
    steps: tuple[Step, ...]
    drawn_differently: tuple[str, ...]  # weights whose initial values are not those of the seed checkpoint, bit for bit


def batch(task: Task, vocab_size: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels [B, T] of a step. Sequences have unequal numbers of targets: one has none, one has all."""
    draws = torch.Generator().manual_seed(task.seed * 1000 + step)
    shape = (task.global_batch_size, task.seq_len)
    inputs = torch.randint(0, vocab_size, shape, generator=draws)
    labels = torch.randint(0, vocab_size, shape, generator=draws)
    ignored = torch.randint(0, task.seq_len, (task.global_batch_size,), generator=draws)  # of each sequence, at its head
    ignored[0], ignored[-1] = task.seq_len, 0
    labels[torch.arange(task.seq_len) < ignored.unsqueeze(1)] = IGNORED
    return inputs, labels


def alone(task: Task, vocab_size: int, optimizer: OptimizerName) -> tuple[Step, ...]:
    """The truth: one process, plain modules, the whole batch at once. Writes it and the seed checkpoint into task.folder."""
    torch.use_deterministic_algorithms(True)
    model = _architecture(task).build(task.model, vocab_size=vocab_size, max_seq_len=task.seq_len)
    model.init_weights(task.seed)
    if not task.seed_checkpoint(vocab_size).exists():
        checkpoint_dcp.write({"model": ModelState([model]).state_dict()}, task.seed_checkpoint(vocab_size), group=None)
    rule = _optimizer(task, optimizer, [model])
    steps, gradients = list[Step](), list[dict[str, Tensor]]()
    for step in range(STEPS[optimizer]):
        inputs, labels = batch(task, vocab_size, step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        here = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.cat([g.flatten() for g in here.values()]).norm()
        tokens = (labels != IGNORED).sum()
        sizes = tuple(Gradient(name, tuple(g.shape)) for name, g in here.items())
        steps.append(Step(loss.item(), tokens.item(), norm.item(), sizes))
        gradients.append(here)
        rule.step()
        rule.zero_grad()
    torch.save(gradients, task.truth(vocab_size, optimizer))
    return tuple(steps)


def beside(task: Task, case: Case) -> Seen:
    """Runs the case's steps on this rank, from the seed checkpoint, and compares every step's gradients with the truth."""
    _clear_sharding_prop_cache()  # it remembers meshes of the case before, whose process groups are gone
    torch.use_deterministic_algorithms(True)
    seat = case.degrees.seat(dist.get_rank())
    truth = torch.load(task.truth(case.vocab_size, case.optimizer))
    parallel = build(task, case, build_mesh(case.degrees, "cpu"))
    drawn_differently = _load_seed(task, case, parallel)
    optimizer = _optimizer(task, case.optimizer, parallel.parts)
    steps = []
    for step, expected in enumerate(truth):
        steps.append(_step(task, case, parallel, seat, step, expected))
        optimizer.step()
        optimizer.zero_grad()
    return Seen(seat, tuple(steps), tuple(drawn_differently))


def build(task: Task, case: Case, mesh: DeviceMesh) -> Parallelized:
    """The case's model, as train.py builds it."""
    with torch.device("meta"):
        model = _architecture(task).build(task.model, vocab_size=case.vocab_size, max_seq_len=task.seq_len)
    return parallelize(
        model,
        mesh,
        cross_entropy_sum,
        case.layout,
        local_batch_size=case.local_batch_size(task.global_batch_size),
        seq_len=task.seq_len,
        device=torch.device("cpu"),
        seed=task.seed,
    )


def _step(task: Task, case: Case, parallel: Parallelized, seat: Seat, step: int, truth: dict[str, Tensor]) -> Step:
    """Forward, backward, sums and the one division, as in train.py's train_step; no clipping, which would hide a wrong scale."""
    inputs, labels = batch(task, case.vocab_size, step)
    rows = task.global_batch_size // case.degrees.data_parallel
    mine = slice(seat.dp_rank * rows, (seat.dp_rank + 1) * rows)
    size = case.local_batch_size(task.global_batch_size)
    loss_sum, tokens = torch.zeros((), dtype=torch.float64), 0
    for x, y in zip(inputs[mine].split(size), labels[mine].split(size), strict=True):
        loss_sum += parallel.forward_backward(x, y).double()
        tokens += int((y != IGNORED).sum()) if seat.counts else 0
    loss, divisor = sum_over_ranks(torch.stack((loss_sum, torch.tensor(tokens).double()))).tolist()
    parameters = [p for part in parallel.parts for p in part.parameters()]
    norm = gradient_norm(parameters).item() / divisor
    scale_gradients(parameters, 1 / divisor)
    return Step(loss / divisor, divisor, norm, tuple(_compared(parallel.parts, truth)))


def _compared(parts: list[Model], truth: dict[str, Tensor]) -> Iterator[Gradient]:
    """Every gradient of this rank's parts, gathered over all ranks that hold a piece of it, against the truth."""
    for name, parameter in _named_parameters(parts):
        if (gradient := parameter.grad) is None:
            continue
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        expected = truth.get(name)
        comparable = expected is not None and expected.shape == whole.shape
        deviation = ((whole - expected).norm() / expected.norm()).item() if comparable else inf
        yield Gradient(name, tuple(whole.shape), deviation)


def _named_parameters(parts: list[Model]) -> list[tuple[str, nn.Parameter]]:
    """By their names in the whole model; a list, so that a parameter that is held twice shows twice."""
    return [(plain_name(name), p) for part in parts for name, p in part.named_parameters(remove_duplicate=False)]


def _load_seed(task: Task, case: Case, parallel: Parallelized) -> list[str]:
    """Fills the parts from the seed checkpoint, by name; returns the names of those whose drawn values were others."""
    folder, group = task.seed_checkpoint(case.vocab_size), dist.group.WORLD if case.world_size > 1 else None
    state = ModelState(parallel.parts)
    live = state.state_dict()
    drawn = {name: _local(value).clone() for name, value in live.items()}
    for value in live.values():
        _local(value).fill_(nan)  # what the checkpoint does not fill will be seen
    metadata = checkpoint_dcp.read_metadata(folder)
    fit = checkpoint_dcp.fit({"model": live}, metadata, wanted={"model"}, exclude=(), exact=True)
    problem = "; ".join(fit.misfits) or checkpoint_dcp.read(fit.states, folder, group=group)
    if problem:
        raise RuntimeError(f"the seed checkpoint does not fit: {problem}")
    state.load_state_dict(fit.states["model"])
    return [name for name, value in state.state_dict().items() if not torch.equal(_local(value), drawn[name])]


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _optimizer(task: Task, name: OptimizerName, parts: Sequence[nn.Module]) -> torch.optim.Optimizer:
    if name == "AdamW":
        return build_optimizer(task.optimizer, parts)
    return torch.optim.SGD([p for part in parts for p in part.parameters()], lr=SGD_RATE)


def _architecture(task: Task) -> Any:
    return importlib.import_module(f"models.{task.model.name}")
