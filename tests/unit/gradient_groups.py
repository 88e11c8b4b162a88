"""Groups in this process that all-reduce their gradients: a fake process group, and models that have gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from ft.gradients import Gradients
from ft.process_groups.base import GroupWork
from ft.process_groups.errors import ProcessGroupError


class World:
    """Members that all-reduce in one process, from any thread: an operation ends once all have started theirs.
    `last`: number of operations that succeed; later ones fail."""

    def __init__(self, size: int, last: int | None = None) -> None:
        self.groups = [Group(self, rank) for rank in range(size)]
        self._last = last
        self.lock = threading.RLock()

    def progress(self) -> None:
        for index, started in enumerate(zip(*(group.started for group in self.groups), strict=False)):
            works = [one.work for one in started]
            if all(work.is_completed() for work in works):
                continue
            if self._last is not None and index >= self._last:
                for work in works:
                    work.end(ProcessGroupError("a member is lost"))
                continue
            assert len({one.kind for one in started}) == 1, "the members do different things"
            given = [one.given for one in started]
            assert len({(tensor.shape, tensor.dtype) for tensor in given}) == 1, "the members sum different things"
            for rank, one in enumerate(started):
                if one.kind == "all-to-all":
                    one.result.copy_(torch.cat([tensor.chunk(len(given))[rank] for tensor in given]))
                elif one.kind == "all-gather":
                    one.result.copy_(torch.cat(given))
            if started[0].kind == "all-reduce":
                total = torch.stack(given).sum(0) if len(given) > 1 else given[0].clone()  # -0.0 alone stays so
                for one in started:
                    one.result.copy_(total)
            for work in works:
                work.end(None)


@dataclass(frozen=True)
class Started:
    kind: str
    result: Tensor
    given: Tensor
    work: GroupWork


class Group:
    def __init__(self, world: World, rank: int) -> None:
        self.started: list[Started] = []
        self._world, self._rank = world, rank

    @property
    def summed(self) -> list[Tensor]:
        return [one.result for one in self.started]

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._world.groups)

    def allreduce(self, tensors: list[Tensor]) -> GroupWork:
        [tensor] = tensors
        return self._start("all-reduce", tensor, tensor)

    def alltoall_base(self, output: Tensor, given: Tensor, output_splits: list[int], splits: list[int]) -> GroupWork:
        assert not output_splits and not splits
        return self._start("all-to-all", output, given)

    def _allgather_base(self, output: Tensor, given: Tensor) -> GroupWork:
        return self._start("all-gather", output, given)

    def _start(self, kind: str, result: Tensor, given: Tensor) -> GroupWork:
        assert result.is_contiguous() and given.is_contiguous()
        with self._world.lock:
            work = GroupWork("AllReduce", [result])
            self.started.append(Started(kind, result, given, work))
            self._world.progress()
        return work

    def scribble(self) -> None:
        """Overwrites the results of all started operations, like a thread of the abandoned group."""
        for one in self.started:
            one.result.fill_(7e6 if one.result.is_floating_point() else 77)


class Member:
    """A model and its gradients; the models of all members are equal, their data differs."""

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
                with self.gradients.last_backward():
                    loss.backward()

    @property
    def grads(self) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns a model whose matrices (132 KiB) are too large for the tail; its biases are not."""
    return nn.Sequential(nn.Linear(32, 1056), nn.Linear(1056, 32), nn.Linear(32, 1056)).to(dtype)


def members(count: int, make: Callable[[], nn.Module] = linear, **options: object) -> list[Member]:
    return [Member(number, make, **options) for number in range(count)]


def open_all(team: list[Member], last: int | None = None, **options: bool) -> World:
    world = World(len(team), last)
    for member, group in zip(team, world.groups, strict=True):
        member.gradients.begin_attempt(group, len(team), **options)  # type: ignore[arg-type]
    return world


def finish(team: list[Member], tail: tuple[float, ...] = (1.0, 0.5)) -> list[tuple[float, ...]]:
    for member in team:
        member.gradients.launch_remaining(tail)
    tails = [member.gradients.wait() for member in team]
    for member in team:
        member.gradients.deliver()
    return tails


def used(team: list[Member]) -> list[Member]:
    """Runs two steps, so that both sets of gradient memory hold old sums."""
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
    """Launches on all members, fails all reductions, and abandons them. Returns functions to call once the old group is idle."""
    for member in team:
        member.gradients.launch_remaining([1.0])
    for member in team:
        with pytest.raises(ProcessGroupError, match="a member is lost"):
            member.gradients.wait()
    return [member.gradients.abandon() for member in team]
