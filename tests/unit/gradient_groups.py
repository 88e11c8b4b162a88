"""Groups that live in this process and sum their gradients: the fake of a process group, and models to take the gradients of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ft.gradients import Gradients
from ft.process_groups.errors import GroupError
from ft.process_groups.operations import AllReduce
from ft.process_groups.work import GroupWork


class World:
    """Members that sum in one process: an operation ends when all have started theirs. `last`: after so many operations it fails."""

    def __init__(self, size: int, last: int | None = None) -> None:
        self.groups = [Group(self) for _ in range(size)]
        self._last = last

    def progress(self) -> None:
        for index, started in enumerate(zip(*(group.started for group in self.groups), strict=False)):
            works = [work for _, work in started]
            if all(work.is_completed() for work in works):
                continue
            if self._last is not None and index >= self._last:
                for work in works:
                    work.end(GroupError("a member is lost"))
                continue
            tensors = [tensor for tensor, _ in started]
            assert len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1, "the members sum different things"
            total = torch.stack(tensors).sum(0) if len(tensors) > 1 else tensors[0].clone()  # -0.0 alone stays so
            for tensor, work in started:
                tensor.copy_(total)
                work.end(None)


class Group:
    def __init__(self, world: World) -> None:
        self.started: list[tuple[Tensor, GroupWork]] = []
        self._world = world

    def allreduce(self, tensors: list[Tensor]) -> GroupWork:
        [tensor] = tensors
        assert tensor.is_contiguous()
        work = GroupWork(AllReduce([tensor]))
        self.started.append((tensor, work))
        self._world.progress()
        return work

    def scribble(self) -> None:
        """A thread of the abandoned group writes into what it was given."""
        for tensor, _ in self.started:
            tensor.fill_(7e6)


class Member:
    """A model and its gradients; all members' models are the same, their data is not."""

    def __init__(self, number: int, make: Callable[[], nn.Module], **options: object) -> None:
        torch.manual_seed(0)
        self.number, self.model = number, make()
        self.gradients = Gradients(**options)  # type: ignore[arg-type]
        self.gradients.attach(self.model.parameters())

    def backward(self, seed: int, *, microbatches: int = 1) -> None:
        for index in range(microbatches):
            torch.manual_seed(100 * seed + 10 * self.number + index)
            [dtype] = {parameter.dtype for parameter in self.model.parameters()}
            loss = self.model(torch.randn(4, 32, dtype=dtype)).float().square().sum()
            if index < microbatches - 1:
                loss.backward()
            else:
                with self.gradients.last_pass():
                    loss.backward()

    @property
    def grads(self) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Matrices of 132 KiB: no rider of the tail; biases are."""
    return nn.Sequential(nn.Linear(32, 1056), nn.Linear(1056, 32), nn.Linear(32, 1056)).to(dtype)


def members(count: int, make: Callable[[], nn.Module] = linear, **options: object) -> list[Member]:
    return [Member(number, make, **options) for number in range(count)]


def open_all(team: list[Member], last: int | None = None, **options: bool) -> World:
    world = World(len(team), last)
    for member, group in zip(team, world.groups, strict=True):
        member.gradients.open(group, len(team), **options)  # type: ignore[arg-type]
    return world


def finish(team: list[Member], tail: tuple[float, ...] = (1.0, 0.5)) -> list[tuple[float, ...]]:
    for member in team:
        member.gradients.launch(tail)
    tails = [member.gradients.wait() for member in team]
    for member in team:
        member.gradients.deliver()
    return tails


def used(team: list[Member]) -> list[Member]:
    """Both sets hold sums of the past."""
    for seed in range(2):
        open_all(team)
        for member in team:
            member.model.zero_grad()
            member.backward(seed)
        finish(team)
    for member in team:
        member.model.zero_grad()
    return team


def assert_sums(team: list[Member], local: list[list[Tensor]]) -> None:
    expected = [torch.stack(parts).sum(0) for parts in zip(*local, strict=True)]
    for member in team:
        assert all(torch.equal(got, want) for got, want in zip(member.grads, expected, strict=True))


def fail(team: list[Member], world: World) -> list[Callable[[], None]]:
    """All launch, none gets its sums, all give up. What to call when the old group is at rest."""
    for member in team:
        member.gradients.launch([1.0])
    for member in team:
        with pytest.raises(GroupError, match="a member is lost"):
            member.gradients.wait()
    return [member.gradients.give_up() for member in team]
