"""Groups in the threads of one process that train through torchft's names: real lighthouse, real group servers, real gloo.

The gradient of a group is a power of two of its own in every element, and the optimizer takes the mean as it is: each step of the weights
tells whose gradients were in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from ft import DistributedDataParallel, LighthouseServer, Manager, Optimizer, ProcessGroupGloo
from ft.manager import GroupEnded
from ft.protocol import messages as m
from tests.ft.groups import Wrapped, kill_server

LIMIT_S = 60.0  # of any wait in a test; nothing is to take so long


class Sum(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((3,), start)), nn.Parameter(torch.full((2, 2), start))

    def forward(self, value: float) -> dict[str, Tensor]:
        return {"loss": (self.a * value).sum() + (self.b * value).sum()}


@dataclass
class Group:
    """`body`: forward and backward, all between zero_grad and step. `at`: called before each step."""

    name: str
    value: float
    steps: int  # may be changed while it trains
    lighthouse: str
    body: Callable[[Group], None] = lambda group: group.backward()
    at: Callable[[Group], None] = lambda group: None
    start: float = 0.0  # of the weights
    arguments: dict[str, Any] = field(default_factory=dict)
    wrap: bool = True  # in DistributedDataParallel

    manager: Manager = field(init=False)
    weights: dict[int, Tensor] = field(default_factory=dict)  # after that step
    batches: dict[int, int] = field(default_factory=dict)
    bodies: list[int] = field(default_factory=list)  # the step that each was for
    refused: list[int] = field(default_factory=list)  # steps that should_commit was False for
    events: list[m.Event] = field(default_factory=list)  # of the machine
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.train()
        except GroupEnded as error:
            self.error = error
        except BaseException as error:
            self.error = error
            raise
        finally:
            if hasattr(self, "manager"):
                self.manager.shutdown()

    def backward(self) -> None:
        self.ddp(self.value)["loss"].backward()

    def kill(self) -> None:
        """The group's server dies, and the group with it: whatever it does next raises GroupEnded."""
        kill_server(self.manager.core)

    def train(self) -> None:
        self.model = Sum(self.start)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.0)
        self.manager = Manager(
            pg=ProcessGroupGloo(),
            load_state_dict=self.model.load_state_dict,
            state_dict=self.model.state_dict,
            **{
                "min_replica_size": 1,
                "replica_id": self.name,
                "lighthouse_addr": self.lighthouse,
                "timeout": timedelta(seconds=60),
                "dies_with_group": False,
                "seen": lambda now_s, event, out: self.events.append(event),
                **self.arguments,
            },
        )
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
    healer = group.manager.core.healer
    healer.transport = Late(healer.transport, event)  # type: ignore[assignment]


class Job:
    def __init__(self, lighthouse: LighthouseServer) -> None:
        self.lighthouse = lighthouse
        self.groups: list[Group] = []
        self.threads: list[threading.Thread] = []

    def group(self, name: str, value: float, steps: int, **more: Any) -> Group:
        """Started."""
        group = Group(name, value, steps, self.lighthouse.address(), **more)
        thread = threading.Thread(target=group.run, name=name, daemon=True)
        self.groups.append(group)
        self.threads.append(thread)
        thread.start()
        return group

    def join(self) -> None:
        """Until all have ended. Whoever made the same step has the same weights, to the bit, and counts the same batches."""
        for group, thread in zip(self.groups, self.threads, strict=True):
            thread.join(LIMIT_S)
            assert not thread.is_alive(), f"{group.name} hangs in step {group.manager.current_step() + 1}"
            assert group.error is None or isinstance(group.error, GroupEnded), group.error
        for one in self.groups:
            for other in self.groups:
                for step in one.weights.keys() & other.weights.keys():
                    assert torch.equal(one.weights[step], other.weights[step]), f"step {step}: {one} {other}"
                    assert one.batches[step] == other.batches[step], f"step {step}: {one} {other}"


def moves(group: Group) -> dict[int, float]:
    """How far each step moved the weights, all of them alike: the mean of the gradients in it."""
    found = {}
    for step in group.weights.keys() & {step + 1 for step in group.weights}:
        move = group.weights[step - 1] - group.weights[step]
        assert torch.equal(move, move[:1].expand_as(move)), step
        found[step] = move[0].item()
    return found


@contextmanager
def job(min_replicas: int = 1, **more: Any) -> Iterator[Job]:
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas, **more)
    made = Job(lighthouse)
    try:
        yield made
        made.join()
    finally:
        for group in made.groups:
            if hasattr(group, "manager"):
                group.manager.shutdown()
        lighthouse.shutdown()
