"""A user's own tensors, reduced with the gradients: means and sums, in one order with the buckets, repeated and held like them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ft.buckets import BufferPool
from ft.gradients import Gradients
from ft.user_allreduce import UserAllreduce
from tests.unit.fakes import set_device_module
from tests.unit.gradient_groups import World, fail, finish, members, open_all


def test_a_mean_and_a_sum():
    team = members(2, nn.Identity)
    open_all(team)
    tensors = [torch.tensor([1.0, 5.0]) * (member.number + 1) for member in team]
    counts = [torch.tensor([3, 4]) for _ in team]
    works = [member.gradients.all_reduce(tensor) for member, tensor in zip(team, tensors, strict=True)]
    works += [member.gradients.all_reduce(count, mean=False) for member, count in zip(team, counts, strict=True)]
    for work in works:
        assert work.wait() and work.get_future().done()
    assert works[0].get_future().value()[0] is tensors[0]
    for tensor, count in zip(tensors, counts, strict=True):
        assert tensor.tolist() == [1.5, 7.5] and count.tolist() == [6, 8]
    with pytest.raises(ValueError, match=r"torch\.int64"):
        team[0].gradients.all_reduce(counts[0])
    finish(team)
    assert tensors[0].tolist() == [1.5, 7.5]
    with pytest.raises(RuntimeError, match="inside a step, before its reduction is launched"):
        team[0].gradients.all_reduce(tensors[0])


class FakeFuture:
    """A future that counts the waits for it: on a GPU the caller's stream waits."""

    def __init__(self, devices: list[torch.device]) -> None:
        self._callbacks: list[Callable[[FakeFuture], object]] = []
        self._done = False
        self.waits = 0

    def add_done_callback(self, callback: Callable[[FakeFuture], object]) -> None:
        if self._done:
            callback(self)
        self._callbacks.append(callback)

    def set_result(self, value: object) -> None:
        self._done = True
        for callback in self._callbacks:
            callback(self)

    def wait(self) -> None:
        self.waits += 1


def test_a_wait_for_a_result_and_a_retry_wait_for_what_is_queued(monkeypatch: pytest.MonkeyPatch):
    """The work ends once its result is queued on a stream; readers of the tensor, and a retry that restores its values, wait for that."""
    monkeypatch.setattr("ft.process_groups.base.Future", FakeFuture)
    value = torch.ones(2)
    one = UserAllreduce(value, BufferPool(shared=False), mean=True, keep=True, after_buckets=False)
    queued = one.work.get_future()
    one.launch(World(1).groups[0], 2, contributes=True)  # type: ignore[arg-type]
    assert isinstance(queued, FakeFuture) and value.tolist() == [0.5, 0.5] and queued.waits == 0
    assert one.work.wait() and queued.waits == 1
    one.launch(World(1).groups[0], 2, contributes=True)  # type: ignore[arg-type]
    assert queued.waits == 2


class Streams:
    """Device module whose streams are names; `waited`: (stream, stream of the event that it waits for)."""

    def __init__(self) -> None:
        self.current, self.waited = "call", list[tuple[str, str]]()

    def current_stream(self, device: torch.device) -> Any:
        name = self.current
        wait_event = lambda event: self.waited.append((name, event))  # noqa: E731
        return SimpleNamespace(name=name, record_event=lambda: name, wait_event=wait_event)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    fake = Streams()
    for module in ("buckets", "user_allreduce"):
        set_device_module(monkeypatch, lambda device: fake, name=f"ft.{module}.streams_of")
    return fake


@pytest.mark.parametrize("is_retried", [False, True])
def test_a_buffer_goes_to_another_stream_after_the_newest_write(streams: Streams, is_retried: bool):
    """The result of a retry is written on the stream of `finish`, that of the first attempt on the stream of the call."""
    value, pool = torch.ones(2), BufferPool(shared=False)
    one = UserAllreduce(value, pool, mean=True, keep=True, after_buckets=False)
    for _ in range(1 + is_retried):
        one.launch(World(1).groups[0], 2, contributes=True)  # type: ignore[arg-type]
        streams.current = "step"
    one.finish()
    one.forget()
    streams.current = "next"
    pool.take(value)
    assert streams.waited == [("next", "step" if is_retried else "call")]


def test_a_buffer_of_an_attempt_that_failed_goes_to_another_stream_after_its_last_use(streams: Streams):
    """The reduction of the tensor was complete, and its write is queued on the stream of the call."""
    team, world = members(2, nn.Identity), World(2, 1)
    for member, group in zip(team, world.groups, strict=True):
        member.gradients.begin_attempt(group, 2)  # type: ignore[arg-type]
        member.gradients.all_reduce(torch.ones(2))
    for give_back in fail(team, world):
        give_back()
    streams.current = "next"
    open_all(team)
    finish(team)
    assert streams.waited == [("next", "call")] * 2


def test_who_does_not_take_part_gives_zeros_and_gets_the_mean():
    team, world = members(2, nn.Identity), World(2)
    tensors = [torch.tensor([2.0, 4.0]) for _ in team]
    for member, group, tensor in zip(team, world.groups, tensors, strict=True):
        member.gradients.begin_attempt(group, 1, contributes=member.number == 0)  # type: ignore[arg-type]
        member.gradients.all_reduce(tensor)
    finish(team)
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 4.0]] * 2


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_retry_sums_the_values_that_were_handed_over(last: int):
    """The first of two tensors, or both, or none, have their results when the attempt fails."""
    team, world = members(2, nn.Identity), World(2, last)
    for member, group in zip(team, world.groups, strict=True):
        member.gradients.begin_attempt(group, 1)  # type: ignore[arg-type]
    tensors = [[torch.tensor([1.0 + member.number]), torch.tensor([[10.0]])] for member in team]
    works = [member.gradients.all_reduce(tensor) for member, pair in zip(team, tensors, strict=True) for tensor in pair]
    assert all(work.wait() for work in works if work.is_completed())
    done = [3.0 if last > 0 else 1.0, 20.0 if last > 1 else 10.0]
    assert [tensor.item() for tensor in tensors[0]] == done
    back = fail(team, world)
    assert all(work.wait() for work in works)  # a failure is told by the attempt alone
    replacement = World(2)
    for member, group, old, give_back in zip(team, replacement.groups, world.groups, back, strict=True):
        member.gradients.begin_attempt(group, 4)  # type: ignore[arg-type]
        old.scribble()
        give_back()
    for member in team:
        member.gradients.launch_remaining([1.0])
    for member in team:
        member.gradients.wait()
    assert [tensor.item() for tensor in tensors[0]] == done  # unchanged until the step is delivered
    for member in team:
        member.gradients.deliver()
    assert [[tensor.item() for tensor in pair] for pair in tensors] == [[0.75, 5.0]] * 2


def test_a_sum_of_an_old_attempt_that_comes_late_is_nobodys():
    """The retry's own sum has not arrived, so the content of its buffer is no result."""
    [member] = members(1, nn.Identity)
    old, new = World(2), World(2)
    member.gradients.begin_attempt(old.groups[0], 1)  # type: ignore[arg-type]
    work = member.gradients.all_reduce(value := torch.tensor([4.0]))
    member.gradients.abandon()
    assert work.wait()
    member.gradients.begin_attempt(new.groups[0], 2)  # type: ignore[arg-type]
    member.gradients.launch_remaining([1.0])
    old.groups[1].allreduce([torch.tensor([6.0])])
    assert value.item() == 4.0
    new.groups[1].allreduce([torch.tensor([6.0])])
    new.groups[1].allreduce([torch.tensor([1.0])])
    assert member.gradients.wait() == (2.0,)
    member.gradients.deliver()
    assert value.item() == 5.0


@pytest.mark.parametrize("changes", [False, True])
def test_the_mean_is_that_of_the_groups_that_gave(changes: bool):
    """A result that was divided before a group turned out to give nothing is corrected, unless the user has changed it."""
    [member] = members(1, nn.Identity)
    world = World(2)
    member.gradients.begin_attempt(world.groups[0], 2)  # type: ignore[arg-type]
    work = member.gradients.all_reduce(value := torch.tensor([4.0]))
    world.groups[1].allreduce([torch.tensor([0.0])])
    assert work.wait() and value.item() == 2.0
    if changes:
        value.clamp_(max=1.0)
    member.gradients.launch_remaining([1.0])
    world.groups[1].allreduce([torch.tensor([1.0])])
    member.gradients.wait()
    member.gradients.deliver(contributors=1)
    assert value.item() == (1.0 if changes else 4.0)


@pytest.mark.parametrize("last", [0, 2])
def test_what_a_user_made_of_a_result_is_not_repeated(last: int):
    """A retry is impossible, too, if the user changed its own value before a result arrived."""
    team = members(2, nn.Identity)
    open_all(team, last)
    tensors = [torch.ones(2, requires_grad=member.number == 1) for member in team]
    for member, tensor in zip(team, tensors, strict=True):
        member.gradients.all_reduce(tensor)
    assert all(member.gradients.can_repeat for member in team)
    tensors[0].mul_(0.5)
    assert [member.gradients.can_repeat for member in team] == [False, True]
    team[0].gradients.drop()
    assert team[0].gradients.can_repeat
    assert not Gradients(keep=False).can_repeat


def test_tensors_and_buckets_go_in_one_order():
    """Tensors before the backward, buckets, tensors after it, the tail: also with a missing gradient, and in a retry."""
    team = members(2, lambda: nn.Linear(256, 256), bucket_bytes=1)
    sizes = []
    world = open_all(team, last=0)
    for member in team:
        member.gradients.all_reduce(torch.ones(3))
        with member.gradients.last_backward():
            if member.number == 0:
                member.model(torch.ones(1, 256)).sum().backward()
        member.gradients.all_reduce(torch.ones(5))
    back = fail(team, world)
    sizes += [[tensor.numel() for tensor in group.summed] for group in world.groups]
    world = open_all(team)
    for give_back in back:
        give_back()
    finish(team, (1.0,))
    sizes += [[tensor.numel() for tensor in group.summed] for group in world.groups]
    assert sizes == [[3, 256 * 256, 5, 257]] * 4


def test_held_results_are_written_when_they_are_delivered():
    [member] = members(1, nn.Identity)
    open_all([member])
    member.gradients.all_reduce(value := torch.tensor([8.0]))
    member.gradients.launch_remaining([1.0])
    member.gradients.wait()
    member.gradients.hold(1)
    value.fill_(0.0)
    member.gradients.deliver(held=1)
    assert value.item() == 8.0


def test_a_tensor_that_overlaps_itself_is_refused_before_anything_is_sent():
    """Its result could not be written, and a wait for it would never end."""
    team = members(2, nn.Identity)
    open_all(team)
    for member in team:
        with pytest.raises(ValueError, match=r"shape \(4,\) with overlapping memory"):
            member.gradients.all_reduce(torch.ones(1).expand(4))
    assert finish(team) == [(2.0, 1.0)] * 2
