"""Separate slots: gradients are added slot by slot, in the order of the slots, whichever group computed them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.unit.gradient_groups import Member, World, assert_sums, fail, finish, members, open_all


def slot_backward(member: Member, place: int, *, completes: bool = True) -> None:
    """Computes the gradients of one slot: two batches, which depend only on the slot."""
    for last in (False, True):
        torch.manual_seed(2 * place + last)
        with member.gradients.last_backward(place) if last and completes else nullcontext():
            member.model(torch.randn(4, 32)).square().sum().backward()


def in_order(slots: int) -> list[Tensor]:
    """Returns the sum computed by one process, slot after slot."""
    parts = []
    for place in range(slots):
        [alone] = members(1)
        alone.gradients.begin_attempt(World(1).groups[0], 1)
        slot_backward(alone, place)
        parts.append(alone.grads)
    total = [torch.zeros_like(part) for part in parts[0]]
    for part in parts:
        torch._foreach_add_(total, part)
    return total


def compute(team: list[Member], owners: Sequence[Sequence[int]]) -> None:
    """`owners`: for each member, the places of its slots."""
    for member, places in zip(team, owners, strict=True):
        member.gradients.begin_backward(places)
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
    """A control: a different order of addition gives different bits, so the tests above are conclusive."""
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
    """Nothing was launched before the failure, and the trainer has zeroed its gradients."""
    team = members(2)
    local = []
    for member in team:
        if not hooks:
            member.gradients.close()
        member.gradients.begin_attempt(World(2).groups[0], 2)
        member.backward(seed=1)
        member.gradients.abandon()()
        member.model.zero_grad()
    open_all(team)
    for member in team:
        member.gradients.begin_backward()
        member.backward(seed=2)
        local.append(member.grads)
    finish(team)
    assert_sums(team, local)
    fresh = members(2)
    for member in fresh:
        member.gradients.begin_attempt(World(2).groups[0], 2)
        for seed in (1, 2):
            with nullcontext() if seed == 1 else member.gradients.last_backward():
                torch.manual_seed(100 * seed + 10 * member.number)
                member.model(torch.randn(4, 32)).square().sum().backward()
    assert_sums(team, [member.grads for member in fresh])


def test_minus_zero_is_zero_also_where_nobody_adds_to_it():
    [alone] = members(1, slots=2)
    open_all([alone])
    alone.gradients.begin_backward((0, 1))
    for place in (0, 1):
        with alone.gradients.last_backward(place):
            sum((parameter * -0.0).sum() for parameter in alone.model.parameters()).backward()
    finish([alone])
    assert not any(torch.signbit(gradient).any() for gradient in alone.grads)


def test_a_bucket_of_others_slots_does_not_wait_for_the_backward():
    team = members(2, slots=2, bucket_bytes=200_000)
    world = open_all(team)
    team[1].gradients.begin_backward((1,))
    slot_backward(team[1], 1)
    sent = len(world.groups[1].started)
    assert not world.groups[0].started
    finish(team)
    # All but what rides with the tail, and its own first matrix at most.
    assert sent >= len(world.groups[1].started) - 2


def test_slots_apart_have_no_room_for_other_tensors():
    [alone] = members(1, slots=2)
    open_all([alone])
    with pytest.raises(RuntimeError, match="deterministic_reduce = true: supports only gradients"):
        alone.gradients.all_reduce(torch.ones(2))
