"""Replica groups in the threads of one process that train semi-synchronously: real lighthouse, real group servers, real gloo; and the same
algorithm in one loop without any of it, written from the papers, to hold them against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ft.config import Schedule
from ft.manager import Manager, ManagerOptions
from ft.process_groups.gloo import ProcessGroupGloo
from ft.protocol import messages as m
from ft.seam import from_checkpoint
from ft.semi_sync import split
from ft.semi_sync_manager import FragmentGradients, SemiSyncManager
from tests.ft.groups import GroupsOfJob, Trained, group_config, run_job
from training.optimizer import OptimizerConfig, build_optimizer

BATCH = 2  # sequences of a batch
OUTER_LR, MOMENTUM = 0.7, 0.9


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(1)  # of its own: groups are threads
        self.embedding = nn.Parameter(torch.randn(6, 5, generator=source))
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        for parameter in self.layers.parameters():
            nn.init.normal_(parameter, std=0.3, generator=source)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embedding[rows]
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def inner_loss(model: nn.Module, slot: int) -> Tensor:
    """Returns the loss of a batch, which is named by its first position."""
    source = torch.Generator().manual_seed(slot)
    rows, target = torch.randint(0, 6, (4,), generator=source), torch.randn(4, 5, generator=source)
    return ((model(rows) - target) ** 2).mean()


def inner_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, foreach=True)


def inner_muon(model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(OptimizerConfig("Muon", lr=0.02), [model])


def nesterov(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=OUTER_LR, momentum=MOMENTUM, nesterov=True)


def average(parameters: Sequence[nn.Parameter]) -> None:
    return None


@dataclass
class Round:
    """A round that holds, as one group saw it."""

    slots: tuple[tuple[int, str], ...]
    holes: tuple[int, ...]
    outer: list[Tensor]  # after it
    local: list[Tensor]


@dataclass
class Group(Trained):
    """`at`: called before each round; `inside`: after each optimizer step, with the place in the round. Either may kill."""

    name: str
    lighthouse: str
    schedule: Schedule
    rounds_to_do: int
    outer: Callable[..., Any] = nesterov
    inner_of: Callable[[nn.Module], torch.optim.Optimizer] = inner_optimizer
    bucket_bytes: int = 1 << 20
    quantized: bool = False
    at: Callable[[Group], None] = lambda group: None
    inside: Callable[[Group, int], None] = lambda group, place: None
    before_commit: Callable[[Group], None] = lambda group: None
    finite: Callable[[Group, int], bool] = lambda group, place: True

    manager: Manager = field(init=False)
    rounds: SemiSyncManager = field(init=False)
    model: Blocks = field(init=False)
    history: dict[int, Round] = field(default_factory=dict)  # by the number of rounds committed
    computed: list[tuple[int, int]] = field(default_factory=list)  # round, first slot: windows that were computed
    events: list[m.Event] = field(default_factory=list)

    def train(self) -> None:
        self.model = Blocks()
        self.inner = self.inner_of(self.model)
        window = BATCH * self.schedule.inner_steps
        self.manager = Manager(
            ProcessGroupGloo(),
            group_config(self.name, self.lighthouse),
            ManagerOptions(slot_size=window, dies_with_group=False, init_sync=False, digest_interval=2),
            gradients=FragmentGradients(quantized=self.quantized, bucket_bytes=self.bucket_bytes),
            observer=lambda now_s, event, out: self.events.append(event),
        )
        self.rounds = SemiSyncManager(self.manager, self.schedule, self.outer)
        self.rounds.attach([self.model])
        while not self.rounds.may_exit and self.manager.step < self.rounds_to_do:
            self.at(self)
            self.round()

    def round(self) -> None:
        assignment = self.rounds.begin_step(until=self.rounds_to_do * self.schedule.inner_steps)
        if assignment.steps_before >= self.rounds_to_do * self.schedule.inner_steps:
            return
        if assignment.slots:
            self.computed.append((assignment.steps_before // self.schedule.inner_steps, assignment.slots[0]))
        finite = True
        for place, slot in enumerate(assignment.slots):
            finite = self.finite(self, place)
            if not finite:
                break
            self.inner.zero_grad()
            inner_loss(self.model, slot).backward()
            self.inner.step()
            self.rounds.on_inner_step()
            self.inside(self, place)
        sums = self.rounds.reduce([1.0] * len(assignment.slots), 1.0, finite)
        self.before_commit(self)
        commit = self.rounds.commit(sums)
        if commit is not None:
            self.history[self.manager.step] = Round(
                commit.slots, commit.holes, self._copies(outer=True), self._copies(outer=False)
            )

    def _copies(self, *, outer: bool) -> list[Tensor]:
        if outer:
            return [p.detach().clone() for fragment in self.rounds.fragments for p in fragment.outer]
        return [p.detach().clone() for p in self.model.parameters()]


class Job(GroupsOfJob[Group]):
    def group(self, name: str, schedule: Schedule, rounds: int, **more: Any) -> Group:
        return self.start(Group(name, self.lighthouse, schedule, rounds, **more))

    def end(self) -> None:
        """Checks that groups with the same round have bitwise equal outer weights, and that each window is in exactly one round."""
        self.join()
        for one in self.groups:
            for other in self.groups:
                for step in one.history.keys() & other.history.keys():
                    pairs = zip(one.history[step].outer, other.history[step].outer, strict=True)
                    assert all(torch.equal(a, b) for a, b in pairs), (one.name, other.name, step)
                    assert one.history[step].slots == other.history[step].slots
        rounds: dict[int, tuple[tuple[int, str], ...]] = {}
        for group in self.groups:
            rounds |= {step: made.slots for step, made in group.history.items()}
        trained = sorted(slot for slots in rounds.values() for slot, _ in slots)
        assert len(trained) == len(set(trained)), "a window is in two rounds"
        for group in self.groups:
            if group.error is None:
                ledger = from_checkpoint(group.manager.state_dict())["ledger"]
                window = ledger["slot_size"]
                assert trained == sorted(set(range(0, ledger["position"], window)) - set(ledger["holes"]))


def job(min_replicas: int = 2) -> AbstractContextManager[Job]:
    return run_job(Job, min_replicas, join_timeout_ms=30_000)


# ------------------------------------------------------------------------------------------------ the papers


class Worker:
    """One of the papers' workers."""

    def __init__(self, inner_of: Callable[[nn.Module], torch.optim.Optimizer] = inner_optimizer) -> None:
        self.model = Blocks()
        self.inner = inner_of(self.model)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())


class Papers:
    """The algorithms in one process, as the papers have them: θ are the outer weights, v the outer momentum."""

    def __init__(
        self,
        schedule: Schedule,
        workers: Sequence[str],
        *,
        averages: bool = False,
        quantized: bool = False,
        inner_of: Callable[[nn.Module], torch.optim.Optimizer] = inner_optimizer,
    ) -> None:
        self.schedule, self.averages, self.quantized = schedule, averages, quantized
        self.left_out: dict[tuple[int, str], Tensor] = {}  # by place of the worker, and weight
        self.workers = {name: Worker(inner_of) for name in workers}
        start = Worker().weights()
        self.theta = {name: value.detach().clone() for name, value in start.items()}
        self.v = {name: torch.zeros_like(value) for name, value in start.items()}
        self.fragments = [[name for name, _ in members] for members in split(list(start.items()), schedule.fragments)]
        self.done = 0

    @torch.no_grad()
    def _differences(self, worker: Worker, names: Sequence[str]) -> dict[str, Tensor]:
        local = worker.weights()
        return {name: local[name].clone() if self.averages else self.theta[name] - local[name] for name in names}

    def _sum(self, name: str, given: list[Tensor]) -> Tensor:
        """Sums; quantized: weights of fewer than 256 values, summed by the first worker (Tang et al., arXiv 1905.05957, algorithm 1)."""
        if not self.quantized:
            return torch.stack(given).sum(0)
        total = torch.zeros_like(given[0])
        for place, values in enumerate(given):
            values = values + self.left_out.get((place, name), 0.0)
            told = _eight_bits(values)
            self.left_out[place, name] = values - told
            total += told
        self.left_out[0, name] += total - _eight_bits(total)
        return _eight_bits(total)

    def round(self, windows: Sequence[tuple[int, str]]) -> None:
        """Plays a round. `windows`: first slot and worker."""
        names = self.fragments[self.done % len(self.fragments)]
        given: list[dict[str, Tensor]] = []
        for slot, worker in ((slot, self.workers[name]) for slot, name in windows):
            for place in range(self.schedule.inner_steps):
                worker.inner.zero_grad()
                inner_loss(worker.model, slot + place * BATCH).backward()
                worker.inner.step()
                if place + 1 == self.schedule.inner_steps - self.schedule.delay:
                    given.append(self._differences(worker, names))
        with torch.no_grad():
            for name in names:
                mean = self._sum(name, [one[name] for one in given]) / len(given)
                if self.averages:
                    self.theta[name] = mean
                else:
                    self.v[name] = MOMENTUM * self.v[name] + mean
                    self.theta[name] = self.theta[name] - OUTER_LR * (mean + MOMENTUM * self.v[name])
                for worker in self.workers.values():
                    local = worker.weights()[name]
                    local.copy_((1 - self.schedule.alpha) * self.theta[name] + self.schedule.alpha * local)
        self.done += 1


def _eight_bits(values: Tensor) -> Tensor:
    scale = values.abs().max() / 127
    return torch.round(values / scale) * scale if scale > 0 else values
