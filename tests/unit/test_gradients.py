"""Gradients over groups in this process: sums, kept values, repeats, and the ownership of memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ft.buckets import TAIL_ELEMENTS
from ft.config import MAX_SLOTS
from ft.gradients import Gradients
from ft.protocol.compare import DIGEST_WORDS
from tests.unit.gradient_groups import Member, World, assert_sums, fail, finish, linear, members, open_all, used

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
    assert [tensor.numel() for tensor in world.groups[0].summed] == [33792] * 3
    member.gradients.launch_remaining([1.0, 2.0, 3.0])
    assert [tensor.dtype for tensor in world.groups[0].summed[3:]] == [torch.float32]
    assert member.gradients.wait() == (1.0, 2.0, 3.0)


def test_a_bucket_waits_for_those_before_it():
    """The last layer has no gradient: no bucket overtakes it, and its zeros are launched with the rest."""
    team = used(members(2, bucket_bytes=1))
    world = open_all(team)
    for member in team:
        with member.gradients.last_backward():
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
        with member.gradients.last_backward():
            member.model[number](torch.ones(1, 32 if number == 0 else 1056)).sum().backward()  # type: ignore[index]
    first, second = ([p.grad for p in member.model.parameters()] for member in team)
    finish(team)
    for member in team:
        for got, a, b in zip(member.model.parameters(), first, second, strict=True):
            want = a if a is not None else b if b is not None else torch.zeros_like(got)
            assert got.grad is not None and torch.equal(got.grad, want)


def test_a_group_that_gives_zeros_gets_the_sums():
    """A group sends zeros by launch(zeros), after some buckets were launched or before, and by open(contributes=False)."""
    for launches_zeros in (True, False):
        team = used(members(3, bucket_bytes=1))
        world = World(3)
        for member, group in zip(team, world.groups, strict=True):
            contributes = member.number < 2 or launches_zeros
            member.gradients.begin_attempt(group, 2, contributes=contributes)  # type: ignore[arg-type]
            if member.number < 2 or not launches_zeros:
                member.backward(0)
        local = [member.grads for member in team[:2]]
        for member in team:
            member.gradients.launch_remaining([1.0], zeros=launches_zeros and member.number == 2)
        for member in team:
            assert member.gradients.wait() == (3.0,)
            member.gradients.deliver()
        assert_sums(team, local)


def test_without_parameters_only_the_tail_goes():
    team = members(2, nn.Identity)
    world = open_all(team)
    assert finish(team, (2.0, 1.0)) == [(4.0, 2.0)] * 2
    assert [tensor.numel() for tensor in world.groups[0].summed] == [2]
    assert len(team[0].gradients.fingerprint) == 3


def test_a_tail_that_is_too_long():
    [member] = members(1)
    open_all([member])
    assert MAX_SLOTS + 3 + DIGEST_WORDS * MAX_SLOTS <= TAIL_ELEMENTS, "the settings' limits are lower"
    with pytest.raises(RuntimeError, match="the tail has 40000 numbers"):
        member.gradients.launch_remaining([0.0] * 40_000)


# ---------------------------------------------------------------------------------------------- failing, and again


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("last", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_retry_has_the_bits_of_a_first_attempt(dtype: torch.dtype, last: int, shared: bool):
    """Covers accumulated gradients, failures before and within the sums, an old group that still writes, in-place zeroing."""
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
    """A retry sends zeros for missing gradients, not the kept values of an earlier step."""
    team = used(members(2))
    world = open_all(team, last=0)
    for member in team:
        with member.gradients.last_backward():
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
    """All sums arrived, but the step is not committed: the next attempt sends the kept gradients, or zeros, again."""
    team = members(2)
    world = open_all(team)
    for member in team:
        member.backward(0)
        member.gradients.launch_remaining([1.0])
    local = [member.grads for member in team]
    for member in team:
        assert member.gradients.wait() == (2.0,)
    for member, group in zip(team, world.groups, strict=True):
        member.gradients.begin_attempt(group, 2)  # type: ignore[arg-type]
        member.gradients.launch_remaining([1.0], zeros=member.number == 1)
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
    with pytest.raises(RuntimeError, match="keep_gradients is false"):
        team[0].gradients.launch_remaining([1.0])
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
        assert sum(tensor.nbytes for tensor in group.summed if tensor.data_ptr() != gradient.data_ptr()) < 4096


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
    """Runs one step of a lone group. Returns the address of its sum."""
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
    """The sets also alternate if the last sum is zeroed in place, so that the next gradient is computed in it."""
    [member] = members(1)
    places = [step(member, seed, in_place=in_place, zeroes_first=zeroes_first) for seed in range(6)]
    assert places[0::2] == [places[0]] * 3 and places[1::2] == [places[1]] * 3 and places[0] != places[1]


def test_memory_that_an_old_group_still_writes_to_is_not_used():
    """A third set is allocated, and freed once the other two are returned."""
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
    with pytest.raises(AssertionError, match="abandoned first"):
        open_all([member])
    member.gradients.abandon()()
    member.gradients.abandon()()
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
            member.gradients.launch_remaining([1.0], zeros=member is joiner)
        for member in team:
            member.gradients.wait()
        team[0].gradients.deliver()
        joiner.gradients.hold(seed + 1)
        assert not joiner.grads
    for seed in range(2):
        joiner.gradients.deliver(held=seed + 1)
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
    member.gradients.launch_remaining([1.0], zeros=True)
    member.gradients.wait()
    member.gradients.hold(1)
    member.gradients.drop_held()
    with pytest.raises(KeyError):
        member.gradients.deliver(held=1)
    assert len({step(member, seed) for seed in range(6)}) == 2


def test_shared_sums_lie_in_memory_that_a_child_maps():
    [member] = members(1, shared=True)
    world = open_all([member])
    member.backward(0)
    finish([member])
    assert all(tensor.is_shared() for tensor in world.groups[0].summed)


# ---------------------------------------------------------------------------------------------- what cannot be reduced


def test_a_second_gradient_in_the_last_backward():
    [member] = members(1)
    open_all([member])
    member.backward(0)
    member.backward(1)  # the hook does not raise
    with pytest.raises(RuntimeError, match=r"parameter \d of shape \(\d+,.* twice"):
        member.gradients.launch_remaining([1.0])


def test_a_backward_after_the_last_backward():
    """Its gradients would be in the values kept for a retry, but not in the sums."""
    [member] = members(1)
    open_all([member])
    member.backward(0)
    member.model(torch.ones(4, 32)).sum().backward()  # the hook does not raise
    with pytest.raises(RuntimeError, match=r"parameter \d of shape \(\d+,.* after last_backward"):
        member.gradients.launch_remaining([1.0])


def test_a_sparse_gradient():
    [member] = members(1, lambda: nn.Embedding(1000, 50, sparse=True))
    open_all([member])
    with member.gradients.last_backward():
        member.model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 0 of shape \(1000, 50\): a gradient of layout torch.sparse_coo"):
        member.gradients.launch_remaining([1.0])


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
    assert gradients.fingerprint == alone.fingerprint
    gradients.close()
    assert not part.weight._post_accumulate_grad_hooks


def test_a_parameter_that_is_trained_later_is_an_error_and_no_drift():
    """Its gradients would not be all-reduced, so the groups would diverge."""
    team = members(2, nn.Identity)
    frozen = [nn.Parameter(torch.ones(3), requires_grad=False) for _ in team]
    for member, parameter in zip(team, frozen, strict=True):
        member.gradients.attach([parameter])
    open_all(team)
    finish(team)
    open_all(team)
    frozen[0].requires_grad_()
    with pytest.raises(RuntimeError, match=r"shape \(3,\) requires a gradient now"):
        team[0].gradients.launch_remaining([1.0])


def test_complex_parameters_are_not_quantized():
    with pytest.raises(ValueError, match=r"complex64: reductions in int8 support only real numbers"):
        Gradients(quantized=True).attach([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
