"""Groups in the threads of one process that train through torchft's names: real lighthouse, real group servers, real gloo.

The gradient of a group is a power of two of its own in every element, and the optimizer takes the mean as it is: each step of the weights
tells whose gradients were in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from ft.protocol import messages as m
from tests.ft.groups import LIMIT_S, GroupsOfJob, Trained, Wrapped, run_job


class Sum(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((3,), start)), nn.Parameter(torch.full((2, 2), start))

    def forward(self, value: float) -> dict[str, Tensor]:
        return {"loss": (self.a * value).sum() + (self.b * value).sum()}


def manager_of(name: str, lighthouse: str, model: nn.Module, **arguments: Any) -> Manager:
    """Returns the manager of a group, which outlives the group's server."""
    return Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        lighthouse_addr=lighthouse,
        **{"min_replica_size": 1, "replica_id": name, "dies_with_group": False, **arguments},
    )


@dataclass
class Group(Trained):
    """`body`: forward and backward, all between zero_grad and step. `at`: called before each step."""

    name: str
    value: float
    steps: int  # may be changed while it trains
    lighthouse: str
    body: Callable[[Group], None] = lambda group: group.backward()
    at: Callable[[Group], None] = lambda group: None
    initial: float = 0.0  # of the weights
    arguments: dict[str, Any] = field(default_factory=dict)
    wrap: bool = True  # in DistributedDataParallel

    manager: Manager = field(init=False)
    weights: dict[int, Tensor] = field(default_factory=dict)  # after that step
    batches: dict[int, int] = field(default_factory=dict)
    bodies: list[int] = field(default_factory=list)  # the step that each was for
    refused: list[int] = field(default_factory=list)  # steps that should_commit was False for
    events: list[m.Event] = field(default_factory=list)  # of the machine

    def stop(self) -> None:
        self.manager.shutdown()

    def backward(self) -> None:
        self.ddp(self.value)["loss"].backward()

    def train(self) -> None:
        self.model = Sum(self.initial)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.0)
        given = {"observer": lambda now_s, event, out: self.events.append(event), **self.arguments}
        self.manager = manager_of(self.name, self.lighthouse, self.model, **given)
        self.ddp = DistributedDataParallel(self.manager, self.model) if self.wrap else self.model
        self.optimizer = Optimizer(self.manager, self.inner)
        while (before := self.manager.current_step()) < self.steps:
            self.at(self)
            self.optimizer.zero_grad()
            self.bodies.append(self.manager.current_step() + 1)
            self.body(self)
            before = self.manager.current_step()
            self.optimizer.step()
            step = self.manager.current_step()
            if step == before:
                self.refused.append(step + 1)
                continue
            self.weights[step] = torch.cat([p.detach().flatten() for p in self.model.parameters()])
            self.batches[step] = self.manager.batches_committed()


class Late(Wrapped):
    """A transport that fetches once the event is set."""

    def __init__(self, transport: Any, event: threading.Event) -> None:
        super().__init__(transport)
        self.event = event

    def fetch(self, *what: Any, **more: Any) -> Any:
        assert self.event.wait(LIMIT_S)
        return self.inner.fetch(*what, **more)


def fetch_late(group: Group, event: threading.Event) -> None:
    healer = group.core.healer
    healer.transport = Late(healer.transport, event)  # type: ignore[assignment]


class Job(GroupsOfJob[Group]):
    def group(self, name: str, value: float, steps: int, **more: Any) -> Group:
        """Starts a group, and returns it."""
        return self.start(Group(name, value, steps, self.lighthouse, **more))

    def join(self) -> None:
        """Waits until all have ended. Groups with the same step have bitwise equal weights and equal counts of batches."""
        super().join()
        for one in self.groups:
            for other in self.groups:
                for step in one.weights.keys() & other.weights.keys():
                    assert torch.equal(one.weights[step], other.weights[step]), f"step {step}: {one} {other}"
                    assert one.batches[step] == other.batches[step], f"step {step}: {one} {other}"


def moves(group: Group) -> dict[int, float]:
    """Returns, for each step, the change of the weights, the same in every element: the mean of the gradients in it."""
    found = {}
    for step in group.weights.keys() & {step + 1 for step in group.weights}:
        move = group.weights[step - 1] - group.weights[step]
        assert torch.equal(move, move[:1].expand_as(move)), step
        found[step] = move[0].item()
    return found


def job(min_replicas: int = 1, **more: Any) -> AbstractContextManager[Job]:
    return run_job(Job, min_replicas, **more)
