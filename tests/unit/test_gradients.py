"""Gradients over groups that live in this process: what is summed, kept, repeated, and whose memory is whose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ft.buckets import ALONE_BYTES, RIDER_BYTES, lay_out
from ft.gradients import Gradients
from ft.process_groups.errors import GroupError
from ft.process_groups.operations import AllReduce
from ft.process_groups.work import GroupWork

CPU = torch.device("cpu")


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


# ---------------------------------------------------------------------------------------------- sums


@pytest.mark.parametrize("options", [{}, {"keep": False}, {"shared": True}, {"shared": True, "keep": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_over_groups_and_the_tail(options: dict[str, bool], dtype: torch.dtype):
    team = members(3, lambda: linear(dtype), bucket_bytes=200_000, **options)
    alone = members(3, lambda: linear(dtype))
    for seed in range(3):  # the third step takes the first one's memory again
        open_all(team)
        for member, reference in zip(team, alone, strict=True):
            member.model.zero_grad()
            reference.model.zero_grad()
            member.backward(seed, microbatches=2)
            reference.backward(seed, microbatches=2)
        assert finish(team, (3.0, 0.25)) == [(9.0, 0.75)] * 3
        assert_sums(team, [reference.grads for reference in alone])


def test_buckets_go_in_order_during_the_backward_and_the_last_with_the_tail():
    [member] = members(1, bucket_bytes=1)
    world = open_all([member])
    seen: list[int] = []
    for parameter in reversed(list(member.model.parameters())):
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(len(world.groups[0].started)))
    member.backward(0, microbatches=3)
    assert seen == [0] * 12 + [0, 1, 1, 2, 2, 3]  # per parameter, last first; the biases ride with the tail
    assert [tensor.numel() for tensor, _ in world.groups[0].started] == [33792] * 3
    member.gradients.launch([1.0, 2.0, 3.0])
    assert [tensor.dtype for tensor, _ in world.groups[0].started[3:]] == [torch.float32]
    assert member.gradients.wait() == (1.0, 2.0, 3.0)


def test_a_bucket_waits_for_those_before_it():
    """The last layer has no gradient: nothing overtakes it, and zeros go at launch."""
    team = used(members(2, bucket_bytes=1))
    world = open_all(team)
    for member in team:
        with member.gradients.last_pass():
            member.model[1](member.model[0](torch.ones(1, 32))).sum().backward()  # type: ignore[index]
    assert not world.groups[0].started
    local = [member.grads for member in team]
    assert len(local[0]) == 4
    zeros = [torch.zeros_like(parameter) for parameter in list(team[0].model.parameters())[4:]]
    finish(team)
    assert_sums(team, [[*grads, *zeros] for grads in local])


def test_groups_that_lack_different_gradients_still_match():
    team = used(members(2, bucket_bytes=1))
    open_all(team)
    for number, member in enumerate(team):
        with member.gradients.last_pass():
            member.model[number](torch.ones(1, 32 if number == 0 else 1056)).sum().backward()  # type: ignore[index]
    first, second = ([p.grad for p in member.model.parameters()] for member in team)
    finish(team)
    for member in team:
        for got, a, b in zip(member.model.parameters(), first, second, strict=True):
            want = a if a is not None else b if b is not None else torch.zeros_like(got)
            assert got.grad is not None and torch.equal(got.grad, want)


def test_a_group_that_gives_zeros_gets_the_sums():
    """By launch(zeros), after some buckets have gone or before, and by open(contributes=False)."""
    for launches_zeros in (True, False):
        team = used(members(3, bucket_bytes=1))
        world = World(3)
        for member, group in zip(team, world.groups, strict=True):
            contributes = member.number < 2 or launches_zeros
            member.gradients.open(group, 2, contributes=contributes)  # type: ignore[arg-type]
            if member.number < 2 or not launches_zeros:
                member.backward(0)
        local = [member.grads for member in team[:2]]
        for member in team:
            member.gradients.launch([1.0], zeros=launches_zeros and member.number == 2)
        for member in team:
            assert member.gradients.wait() == (3.0,)
            member.gradients.deliver()
        assert_sums(team, local)


def test_without_parameters_only_the_tail_goes():
    team = members(2, nn.Identity)
    world = open_all(team)
    assert finish(team, (2.0, 1.0)) == [(4.0, 2.0)] * 2
    assert [tensor.numel() for tensor, _ in world.groups[0].started] == [2]
    assert len(team[0].gradients.shape) == 3


def test_a_tail_that_is_too_long():
    [member] = members(1)
    open_all([member])
    with pytest.raises(RuntimeError, match="a tail of 20000 numbers"):
        member.gradients.launch([0.0] * 20_000)


# ---------------------------------------------------------------------------------------------- failing, and again


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("last", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_retry_has_the_bits_of_a_first_attempt(dtype: torch.dtype, last: int, shared: bool):
    """Accumulated gradients, a failure before or within the sums, an old group that goes on writing, a user who zeroes in place."""
    quiet = members(3, lambda: linear(dtype), bucket_bytes=70_000)
    stormy = members(3, lambda: linear(dtype), bucket_bytes=70_000, shared=shared)
    for seed in range(3):
        for team in (quiet, stormy):
            world = open_all(team, last if team is stormy else None)
            for member in team:
                member.model.zero_grad(set_to_none=seed != 2)
                member.backward(seed, microbatches=3)
            if team is stormy:
                for times in range(2):
                    back = fail(team, world)
                    again = open_all(team, None if times else last)
                    for member, group, give_back in zip(team, world.groups, back, strict=True):
                        member.model.zero_grad()  # the retry needs no .grad
                        group.scribble()
                        give_back()
                    world = again
            finish(team)
        assert_sums(stormy, [quiet[0].grads])
        assert_sums(quiet, [quiet[0].grads])


def test_a_retry_where_a_gradient_is_missing():
    """Zeros go again, not what was kept of a step before."""
    team = used(members(2))
    world = open_all(team, last=0)
    for member in team:
        with member.gradients.last_pass():
            member.model[0](torch.ones(1, 32)).sum().backward()  # type: ignore[index]
    local = [member.grads for member in team]
    back = fail(team, world)
    open_all(team)
    for give_back in back:
        give_back()
    finish(team)
    zeros = [torch.zeros_like(parameter) for parameter in list(team[0].model.parameters())[2:]]
    assert_sums(team, [[*grads, *zeros] for grads in local])


def test_the_same_generation_again():
    """All sums came, and the step does not hold: an attempt later the kept gradients, or zeros, go again."""
    team = members(2)
    world = open_all(team)
    for member in team:
        member.backward(0)
        member.gradients.launch([1.0])
    local = [member.grads for member in team]
    for member in team:
        assert member.gradients.wait() == (2.0,)
    for member, group in zip(team, world.groups, strict=True):
        member.gradients.open(group, 2)  # type: ignore[arg-type]
        member.gradients.launch([1.0], zeros=member.number == 1)
    for member in team:
        member.gradients.wait()
        member.gradients.deliver()
    assert_sums(team, local[:1])


def test_what_is_not_kept_is_lost():
    team = members(2, lambda: nn.Linear(600, 600), keep=False)
    world = open_all(team, last=0)
    for member in team:
        member.model.weight.grad = torch.ones(600, 600)  # type: ignore[union-attr]
    fail(team, world)
    assert not team[0].grads
    open_all(team)
    with pytest.raises(RuntimeError, match="not kept"):
        team[0].gradients.launch([1.0])
    for member in team:
        member.gradients.drop()
        member.model.weight.grad = torch.ones(600, 600)  # type: ignore[union-attr]
    finish(team)
    assert_sums(team, [[torch.full((600, 600), 2.0), torch.zeros(600)]])


def test_in_place_nothing_is_copied_and_little_is_made():
    team = members(2, lambda: nn.Linear(1024, 512), keep=False)
    world = open_all(team)
    given = [torch.full((512, 1024), float(member.number)) for member in team]
    for member, gradient in zip(team, given, strict=True):
        member.model.weight.grad = gradient  # type: ignore[union-attr]
    finish(team)
    for member, gradient, group in zip(team, given, world.groups, strict=True):
        assert member.model.weight.grad.data_ptr() == gradient.data_ptr()  # type: ignore[union-attr, operator]
        assert gradient.eq(1).all()
        assert sum(tensor.nbytes for tensor, _ in group.started if tensor.data_ptr() != gradient.data_ptr()) < 4096


def test_drop_forgets_the_kept_gradients():
    team = members(2)
    world = open_all(team, last=0)
    for member in team:
        member.backward(0)
    fail(team, world)
    for member in team:
        member.gradients.drop()
        assert not member.grads
    open_all(team)
    for member in team:
        member.backward(1)
    local = [member.grads for member in team]
    finish(team)
    assert_sums(team, local)


# ---------------------------------------------------------------------------------------------- whose memory is whose


def step(member: Member, seed: int, *, in_place: bool = False, zeroes_first: bool = False) -> int:
    """One step of a lone group; returns where its sum lies."""
    if zeroes_first:
        member.model.zero_grad(set_to_none=not in_place)
    open_all([member])
    member.model.zero_grad(set_to_none=not in_place)
    member.backward(seed)
    local = member.grads
    finish([member])
    assert_sums([member], [local])
    return next(member.model.parameters()).grad.untyped_storage().data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize("zeroes_first", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_two_sets_take_turns(in_place: bool, zeroes_first: bool):
    """Also where the last sum is zeroed in place, so that the next gradient is computed in it."""
    [member] = members(1)
    places = [step(member, seed, in_place=in_place, zeroes_first=zeroes_first) for seed in range(6)]
    assert places[0::2] == [places[0]] * 3 and places[1::2] == [places[1]] * 3 and places[0] != places[1]


def test_memory_that_an_old_group_still_writes_to_is_not_used():
    """A third set is made, and goes when the others are back."""
    [member] = members(1)
    step(member, 0)
    world = open_all([member], last=0)
    member.model.zero_grad(set_to_none=False)  # the gradients of this step lie in the first set
    member.backward(1)
    local = member.grads
    [give_back] = fail([member], world)
    open_all([member])
    world.groups[0].scribble()
    finish([member])
    world.groups[0].scribble()
    assert_sums([member], [local])
    give_back()
    assert len({step(member, seed) for seed in range(2, 8)}) == 2


def test_an_attempt_that_has_not_ended_is_given_up_first():
    [member] = members(1)
    open_all([member])
    with pytest.raises(AssertionError, match="given up first"):
        open_all([member])
    member.gradients.give_up()()
    member.gradients.give_up()()
    open_all([member])


def test_sums_are_held_until_their_state_has_come():
    team = members(2)
    joiner, expected = team[1], []
    for seed in range(2):
        open_all(team)
        team[0].model.zero_grad()
        team[0].backward(seed)
        expected.append(team[0].grads)
        for member in team:
            member.gradients.launch([1.0], zeros=member is joiner)
        for member in team:
            member.gradients.wait()
        team[0].gradients.deliver()
        joiner.gradients.hold(seed + 1)
        assert not joiner.grads
    for seed in range(2):
        joiner.gradients.deliver_held(seed + 1)
        assert_sums([joiner], [expected[seed]])
    for seed in range(2, 5):
        for member in team:
            member.model.zero_grad()
        open_all(team)
        for member in team:
            member.backward(seed)
        local = [member.grads for member in team]
        finish(team)
        assert_sums(team, local)


def test_held_sums_are_dropped():
    [member] = members(1)
    open_all([member])
    member.gradients.launch([1.0], zeros=True)
    member.gradients.wait()
    member.gradients.hold(1)
    member.gradients.drop_held()
    with pytest.raises(KeyError):
        member.gradients.deliver_held(1)
    assert len({step(member, seed) for seed in range(6)}) == 2


def test_shared_sums_lie_in_memory_that_a_child_maps():
    [member] = members(1, shared=True)
    world = open_all([member])
    member.backward(0)
    finish([member])
    assert all(tensor.is_shared() for tensor, _ in world.groups[0].started)


# ---------------------------------------------------------------------------------------------- what cannot be summed


def test_a_second_gradient_in_the_last_pass():
    [member] = members(1)
    open_all([member])
    member.backward(0)
    member.backward(1)  # the hook does not raise
    with pytest.raises(RuntimeError, match=r"parameter \d of shape \(\d+,.* twice"):
        member.gradients.launch([1.0])


def test_a_sparse_gradient():
    [member] = members(1, lambda: nn.Embedding(1000, 50, sparse=True))
    open_all([member])
    with member.gradients.last_pass():
        member.model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 0 of shape \(1000, 50\): a gradient of layout torch.sparse_coo"):
        member.gradients.launch([1.0])


def test_a_gradient_that_is_not_contiguous():
    for options in ({}, {"keep": False}):
        team = members(2, lambda: nn.Linear(1024, 512, bias=False), **options)
        open_all(team)
        given = [torch.arange(1024 * 512.0).view(1024, 512).t() * (member.number + 1) for member in team]
        for member, gradient in zip(team, given, strict=True):
            member.model.weight.grad = gradient.clone(memory_format=torch.preserve_format)  # type: ignore[union-attr]
        finish(team)
        assert_sums(team, [[gradient] for gradient in given])


def test_frozen_and_tied_parameters_and_several_parts():
    part, other = nn.Linear(4, 4), nn.Linear(4, 4)
    part.bias.requires_grad_(False)
    other.weight = part.weight
    gradients = Gradients()
    gradients.attach(part.parameters())
    gradients.attach(other.parameters())
    alone = Gradients()
    alone.attach([nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))])
    assert gradients.shape == alone.shape
    gradients.close()
    assert not part.weight._post_accumulate_grad_hooks


# ---------------------------------------------------------------------------------------------- a user's tensors


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
    finish(team)
    assert tensors[0].tolist() == [1.5, 7.5]
    with pytest.raises(RuntimeError, match="between open and launch"):
        team[0].gradients.all_reduce(tensors[0])
    with pytest.raises(ValueError, match=r"torch\.int64"):
        team[0].gradients.all_reduce(counts[0])


def test_who_does_not_take_part_gives_zeros_and_gets_the_mean():
    team, world = members(2, nn.Identity), World(2)
    tensors = [torch.tensor([2.0, 4.0]) for _ in team]
    for member, group, tensor in zip(team, world.groups, tensors, strict=True):
        member.gradients.open(group, 1, contributes=member.number == 0)  # type: ignore[arg-type]
        member.gradients.all_reduce(tensor)
    finish(team)
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 4.0]] * 2


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_retry_sums_the_values_that_were_handed_over(last: int):
    """The first of two tensors, or both, or none, had their results when the attempt failed."""
    team, world = members(2, nn.Identity), World(2, last)
    for member, group in zip(team, world.groups, strict=True):
        member.gradients.open(group, 1)  # type: ignore[arg-type]
    tensors = [[torch.tensor([1.0 + member.number]), torch.tensor([[10.0]])] for member in team]
    works = [member.gradients.all_reduce(tensor) for member, pair in zip(team, tensors, strict=True) for tensor in pair]
    assert all(work.wait() for work in works if work.is_completed())
    done = [3.0 if last > 0 else 1.0, 20.0 if last > 1 else 10.0]
    assert [tensor.item() for tensor in tensors[0]] == done
    back = fail(team, world)
    assert all(work.wait() for work in works)  # a failure is told by the attempt alone
    replacement = World(2)
    for member, group, old, give_back in zip(team, replacement.groups, world.groups, back, strict=True):
        member.gradients.open(group, 4)  # type: ignore[arg-type]
        old.scribble()
        give_back()
    for member in team:
        member.gradients.launch([1.0])
    for member in team:
        member.gradients.wait()
    assert [tensor.item() for tensor in tensors[0]] == done  # unchanged until the step is delivered
    for member in team:
        member.gradients.deliver()
    assert [[tensor.item() for tensor in pair] for pair in tensors] == [[0.75, 5.0]] * 2


def test_a_sum_of_an_old_attempt_that_comes_late_is_nobodys():
    """The retry's own sum is not there: whatever lies in its buffer is no result."""
    [member] = members(1, nn.Identity)
    old, new = World(2), World(2)
    member.gradients.open(old.groups[0], 1)  # type: ignore[arg-type]
    work = member.gradients.all_reduce(value := torch.tensor([4.0]))
    member.gradients.give_up()
    assert work.wait()
    member.gradients.open(new.groups[0], 2)  # type: ignore[arg-type]
    member.gradients.launch([1.0])
    old.groups[1].allreduce([torch.tensor([6.0])])
    assert value.item() == 4.0
    new.groups[1].allreduce([torch.tensor([6.0])])
    new.groups[1].allreduce([torch.tensor([1.0])])
    assert member.gradients.wait() == (2.0,)
    member.gradients.deliver()
    assert value.item() == 5.0


@pytest.mark.parametrize("last", [0, 2])
def test_what_a_user_made_of_a_result_is_not_repeated(last: int):
    """Neither what it made of its own value, where the result did not come."""
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
    """Before the backward, buckets, after it, the tail: also where a gradient is missing, and in a retry."""
    team = members(2, lambda: nn.Linear(256, 256), bucket_bytes=1)
    sizes = []
    world = open_all(team, last=0)
    for member in team:
        member.gradients.all_reduce(torch.ones(3))
        with member.gradients.last_pass():
            if member.number == 0:
                member.model(torch.ones(1, 256)).sum().backward()
        member.gradients.all_reduce(torch.ones(5))
    back = fail(team, world)
    sizes += [[tensor.numel() for tensor, _ in group.started] for group in world.groups]
    world = open_all(team)
    for give_back in back:
        give_back()
    finish(team, (1.0,))
    sizes += [[tensor.numel() for tensor, _ in group.started] for group in world.groups]
    assert sizes == [[3, 256 * 256, 5, 257]] * 4


def test_held_results_are_written_when_they_are_delivered():
    [member] = members(1, nn.Identity)
    open_all([member])
    member.gradients.all_reduce(value := torch.tensor([8.0]))
    member.gradients.launch([1.0])
    member.gradients.wait()
    member.gradients.hold(1)
    value.fill_(0.0)
    member.gradients.deliver_held(1)
    assert value.item() == 8.0


# ---------------------------------------------------------------------------------------------- the layout


def layout_of(tensors: list[Tensor], bucket_bytes: int = 1 << 20, in_place: bool = False):
    return lay_out(tensors, bucket_bytes=bucket_bytes, in_place=in_place, device=CPU)


@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 400_000), st.sampled_from([torch.float32, torch.bfloat16, torch.float64])), max_size=30
    ),
    bucket_bytes=st.integers(1, 4 << 20),
    in_place=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_gradient_has_a_place_of_its_own(sizes: list[tuple[int, torch.dtype]], bucket_bytes: int, in_place: bool):
    tensors = [torch.empty(size, dtype=dtype, device="meta") for size, dtype in sizes]
    layout = layout_of(tensors, bucket_bytes, in_place)
    members = [index for bucket in layout.buckets for index in bucket.members]
    assert sorted(members) == list(range(len(tensors)))
    ends = dict.fromkeys(layout.sizes, 0)
    for number, bucket in enumerate(layout.buckets):
        assert bucket.start >= ends[bucket.kind]
        place = bucket.start
        for index in bucket.members:
            assert layout.bucket_of[index] == number and tensors[index].dtype == bucket.kind[0]
            if bucket.in_place:
                assert in_place and len(bucket.members) == 1 and tensors[index].nbytes >= ALONE_BYTES
                continue
            assert layout.starts[index] >= place and layout.starts[index] * bucket.kind[0].itemsize % 64 == 0
            place = layout.starts[index] + tensors[index].numel()
        assert place <= bucket.stop <= layout.sizes[bucket.kind]
        ends[bucket.kind] = bucket.stop
        assert list(bucket.members) == sorted(bucket.members, reverse=True)
        held = sum(tensors[index].nbytes for index in bucket.members)
        assert bucket is layout.last or len(bucket.members) == 1 or held <= bucket_bytes
    assert layout.last.kind[0] == torch.float32
    assert all(tensors[index].nbytes <= RIDER_BYTES for index in layout.last.members)
    assert sum(tensors[index].nbytes for index in layout.last.members) <= 1 << 20


def test_a_difference_has_a_name():
    def differs(tensors: list[Tensor], **options: object) -> list[str]:
        ours = layout_of([torch.zeros(300, 300), torch.zeros(400_000)])
        theirs = layout_of(tensors, **options)  # type: ignore[arg-type]
        return [name for (name, a), (_, b) in zip(ours.shape, theirs.shape, strict=True) if a != b]

    same = [torch.zeros(300, 300), torch.zeros(400_000)]
    assert differs(same) == []
    assert differs([torch.zeros(600, 150), torch.zeros(400_000)]) == ["gradient shapes"]
    assert differs([same[0], same[1].double()]) == ["gradient dtypes", "gradient buckets"]
    assert differs(same, bucket_bytes=8 << 20) == ["gradient buckets"]
    assert differs(same, in_place=True) == ["gradient buckets"]


# ---------------------------------------------------------------------------------------------- slots apart


def slot_backward(member: Member, place: int, *, completes: bool = True) -> None:
    """A slot's data has two batches, and is the same whoever computes it."""
    for last in (False, True):
        torch.manual_seed(2 * place + last)
        with member.gradients.last_pass(place) if last and completes else nullcontext():
            member.model(torch.randn(4, 32)).square().sum().backward()


def in_order(slots: int) -> list[Tensor]:
    """The sum that one process makes, slot after slot."""
    parts = []
    for place in range(slots):
        [alone] = members(1)
        alone.gradients.open(World(1).groups[0], 1)
        slot_backward(alone, place)
        parts.append(alone.grads)
    total = [torch.zeros_like(part) for part in parts[0]]
    for part in parts:
        torch._foreach_add_(total, part)
    return total


def compute(team: list[Member], owners: Sequence[Sequence[int]]) -> None:
    """`owners`: for each member, the places of its slots."""
    for member, places in zip(team, owners, strict=True):
        member.gradients.begin(places)
        for place in places:
            slot_backward(member, place)


@pytest.mark.parametrize("options", [{}, {"keep": False}, {"shared": True}])
@pytest.mark.parametrize("owners", [[(0, 1, 2, 3)], [(0, 3), (1,), (2,)], [(3,), (), (0, 1, 2)]])
def test_slots_apart_add_up_in_their_order_whoever_computed_them(
    owners: list[tuple[int, ...]], options: dict[str, bool]
):
    team = members(len(owners), slots=4, bucket_bytes=200_000, **options)
    for _ in range(3):  # in used memory, too
        open_all(team)
        compute(team, owners)
        finish(team)
        for member in team:
            assert all(torch.equal(got, want) for got, want in zip(member.grads, in_order(4), strict=True))
            member.model.zero_grad()


def test_one_sum_for_all_slots_of_a_group_has_other_bits():
    """Else the tests above would say nothing."""
    team = members(2)
    open_all(team)
    for member in team:
        for place in (0, 1):
            slot_backward(member, 2 * member.number + place, completes=place == 1)
    finish(team)
    assert not all(torch.equal(got, want) for got, want in zip(team[0].grads, in_order(4), strict=True))


def test_a_slot_that_is_added_after_a_failure_does_not_change_the_bits():
    team = members(3, slots=4, bucket_bytes=200_000)
    world = open_all(team, last=1)
    compute(team, [(0, 3), (1,), (2,)])
    for free in fail(team, world):
        free()
    left = team[:2]
    for member in left:
        member.model.zero_grad()  # the trainer's way to begin again
    open_all(left)
    compute(left, [(), (2,)])
    finish(left)
    for member in left:
        assert all(torch.equal(got, want) for got, want in zip(member.grads, in_order(4), strict=True))


@pytest.mark.parametrize("hooks", [True, False])  # without them nothing is copied before the launch, as on a GPU
def test_what_is_added_after_a_failure_is_added_to_what_was_kept(hooks: bool):
    """Also where nothing was launched before the failure, and the trainer has zeroed its gradients."""
    team = members(2)
    local = []
    for member in team:
        if not hooks:
            member.gradients.close()
        member.gradients.open(World(2).groups[0], 2)
        member.backward(seed=1)
        member.gradients.give_up()()
        member.model.zero_grad()
    open_all(team)
    for member in team:
        member.gradients.begin()
        member.backward(seed=2)
        local.append(member.grads)
    finish(team)
    assert_sums(team, local)
    fresh = members(2)
    for member in fresh:
        member.gradients.open(World(2).groups[0], 2)
        for seed in (1, 2):
            with nullcontext() if seed == 1 else member.gradients.last_pass():
                torch.manual_seed(100 * seed + 10 * member.number)
                member.model(torch.randn(4, 32)).square().sum().backward()
    assert_sums(team, [member.grads for member in fresh])


def test_minus_zero_is_zero_also_where_nobody_adds_to_it():
    [alone] = members(1, slots=2)
    open_all([alone])
    alone.gradients.begin((0, 1))
    for place in (0, 1):
        with alone.gradients.last_pass(place):
            sum((parameter * -0.0).sum() for parameter in alone.model.parameters()).backward()
    finish([alone])
    assert not any(torch.signbit(gradient).any() for gradient in alone.grads)


def test_a_bucket_of_others_slots_does_not_wait_for_the_backward():
    team = members(2, slots=2, bucket_bytes=200_000)
    world = open_all(team)
    team[1].gradients.begin((1,))
    slot_backward(team[1], 1)
    buckets = len(team[1].gradients._layout.buckets)
    assert (
        len(world.groups[1].started) >= buckets - 2
    )  # all but what rides with the tail, and its own first matrix at most
    assert not world.groups[0].started


def test_slots_apart_have_no_room_for_other_tensors():
    [alone] = members(1, slots=2)
    open_all([alone])
    with pytest.raises(RuntimeError, match="deterministic_reduce sums gradients alone"):
        alone.gradients.all_reduce(torch.ones(2))
