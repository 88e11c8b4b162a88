"""All-reduce in int8: the format, rounding residuals, failures and retries, and the exchanged messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ft.gradients import Gradients
from ft.process_groups.errors import Abandoned, ProcessGroupError
from ft.quantized import BLOCK, LEVELS, CollectiveQueue, ErrorFeedback, dequantize, message_bytes, quantize
from tests.unit.fakes import set_device_module
from tests.unit.gradient_groups import Member, World, finish, linear, members, open_all
from tests.waiting import in_time

LIMIT_S = 30


def there_and_back(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes and dequantizes. Returns the result and the rounding residual."""
    message = torch.full((message_bytes(len(values)),), 99, dtype=torch.uint8)
    left_out, read = values.clone(), torch.full_like(values, 5.0)
    quantize(left_out, message)
    dequantize(message, read)
    return read, left_out


# ------------------------------------------------------------------------------------------------ the format


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.integers(1, 5), st.floats(-30, 30), st.floats(0, 12))
def test_no_value_is_off_by_more_than_half_a_level(seed: int, blocks: int, power: float, spread: float):
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(blocks, BLOCK, generator=source) * 2.0**power
    values *= torch.exp2(torch.rand(blocks, 1, generator=source) * spread)  # each block has its own scale
    read, left_out = there_and_back(values)
    half = values.abs().amax(dim=1, keepdim=True) / LEVELS / 2
    assert ((values - read).abs() <= half * (1 + 1e-5)).all()
    torch.testing.assert_close(read + left_out, values, rtol=1e-6, atol=0)
    assert torch.equal(left_out, values - read), "what is left out is what is missing from what is read"


@pytest.mark.parametrize("values", [0.0, -0.0, 1e-45, 1e-38, -3e38, 1.0, -127.0], ids=lambda value: f"{value:g}")
def test_extreme_values(values: float):
    whole = torch.full((1, BLOCK), values)
    read, left_out = there_and_back(whole)
    assert torch.allclose(read, whole, rtol=1e-6, atol=1.5e-43) and torch.equal(left_out, whole - read)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_not_hidden(bad: float):
    """NaN or infinity makes its block not finite, and no other block."""
    values = torch.ones(3, BLOCK)
    values[1, 7] = bad
    read, _ = there_and_back(values)
    assert not read[1].isfinite().any() and torch.equal(read[::2], torch.ones(2, BLOCK))


def test_many_blocks_are_turned_in_pieces():
    values = torch.randn(2 * (1 << 20) // BLOCK + 3, BLOCK, generator=torch.Generator().manual_seed(1))
    read, left_out = there_and_back(values)
    assert torch.equal(read + left_out, values) or torch.allclose(read + left_out, values, rtol=1e-6)
    assert torch.equal(there_and_back(values[-1:])[0], read[-1:]), "a block does not depend on its place"


# ------------------------------------------------------------------------------------------------ sums


def summed(
    tensors: Sequence[Tensor], feedback: Sequence[ErrorFeedback | None], contributes: Sequence[bool] = ()
) -> World:
    world = World(len(tensors))
    lanes = [CollectiveQueue(group) for group in world.groups]  # type: ignore[arg-type]
    works = [
        lane.allreduce_quantized(tensor, own, contributes=contributes[rank] if contributes else True)
        for rank, (lane, tensor, own) in enumerate(zip(lanes, tensors, feedback, strict=True))
    ]
    for work in works:
        assert work.get_future().wait() and work.wait()
    for lane in lanes:
        lane.close()
        lane.join()
    return world


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(1,), (255,), (256,), (16, 17), (5000,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_have_the_same_sum_and_it_is_near(ranks: int, shape: tuple[int, ...], dtype: torch.dtype):
    torch.manual_seed(3)
    tensors = [torch.randn(shape, dtype=dtype) for _ in range(ranks)]
    exact = torch.stack([tensor.float() for tensor in tensors]).sum(0)
    most = sum(float(tensor.abs().max()) for tensor in tensors)
    summed(tensors, [None] * ranks)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors) and tensors[0].dtype == dtype
    off = (tensors[0].float() - exact).abs().max()
    assert off <= (most / LEVELS if ranks > 1 else 0) + (most / 256 if dtype == torch.bfloat16 else 0)
    assert ranks == 1 or dtype == torch.bfloat16 or shape == (1,) or off > 0, "nothing was rounded"


def test_a_quarter_of_the_bytes():
    tensors = [torch.randn(100_000) for _ in range(4)]
    world = summed(tensors, [None] * 4)
    for group in world.groups:
        sent, everybodys = group.started
        assert (sent.kind, everybodys.kind) == ("all-to-all", "all-gather")
        outgoing = (sent.given.nbytes + everybodys.given.nbytes * 4) * 3 / 4  # but for its own part
        ring = 2 * 4 * 100_000 * 3 / 4
        assert 0.24 * ring < outgoing < 0.27 * ring


def test_everything_arrives():
    """The sum of the results and the residuals equals the inputs, for any members, contributors and owners."""
    torch.manual_seed(4)
    count, feedback = 3000, [ErrorFeedback() for _ in range(4)]
    delivered, given_ = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for there, contributes in (
        ([0, 1, 2], (True, True, True)),
        ([0, 1, 2, 3], (True, False, True, False)),
        ([1, 3], (True, True)),
        ([1], (True,)),
        ([0, 1, 2, 3], (True, True, True, True)),
        ([3, 0], (False, True)),
    ):
        tensors = [torch.randn(count) * 10.0 ** (rank - 2) for rank in there]
        given_ += sum(tensor.double() for tensor, counts in zip(tensors, contributes, strict=True) if counts)
        summed(tensors, [feedback[rank] for rank in there], contributes=contributes)
        for rank in there:
            feedback[rank].commit()
        delivered += tensors[0].double()
    residual = sum(own.residual.double() for own in feedback if own.residual is not None)
    assert (delivered - given_).abs().max() > 1e-3, "nothing was rounded"
    assert (delivered + residual - given_).abs().max() < 1e-5
    assert residual.abs().max() < 0.5, "it does not grow"


# ------------------------------------------------------------------------------------------------ a lane


def test_what_is_asked_for_in_one_order_goes_in_it():
    world = World(3)
    lanes = [CollectiveQueue(group) for group in world.groups]  # type: ignore[arg-type]
    plain, eight = [torch.ones(5) for _ in lanes], [torch.full((400,), 2.0) for _ in lanes]
    works = []
    for lane, one, other in zip(lanes, plain, eight, strict=True):
        works += [lane.allreduce_quantized(other, None), lane.allreduce([one])]
    for work in works:
        assert work.wait()
    for group in world.groups:
        assert [one.kind for one in group.started] == ["all-to-all", "all-gather", "all-reduce"]
    assert plain[0].tolist() == [3.0] * 5 and torch.allclose(eight[0], torch.tensor(6.0))


@pytest.mark.parametrize("last", [0, 1])
def test_a_failure_ends_all_that_comes_after_it(last: int):
    world = World(2, last)
    lanes = [CollectiveQueue(group) for group in world.groups]  # type: ignore[arg-type]
    own = ErrorFeedback()
    works = [lane.allreduce_quantized(torch.ones(9), own) for lane in lanes] + [
        lane.allreduce([torch.ones(2)]) for lane in lanes
    ]
    for work in works:
        with pytest.raises(ProcessGroupError, match="a member is lost"):
            work.wait()
    own.commit()
    assert own.residual is None
    assert all(len(group.started) == last + 1 for group in world.groups), "something went out after it"


def test_after_it_is_closed_nothing_goes_out():
    """The first exchange ends after the close; no second one starts, as the group may be in a later generation with other members."""
    world = World(2)
    lane = CollectiveQueue(world.groups[0])  # type: ignore[arg-type]
    work = lane.allreduce_quantized(torch.ones(9), None)
    assert in_time(lambda: world.groups[0].started)
    lane.close()
    CollectiveQueue(world.groups[1]).allreduce_quantized(torch.ones(9), None)  # type: ignore[arg-type]
    with pytest.raises(Abandoned, match="abandoned"):
        work.wait()
    lane.join()
    assert len(world.groups[0].started) == 1


def test_a_stream_that_cannot_be_made_fails_the_works(monkeypatch: pytest.MonkeyPatch):
    def stream(device: torch.device) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    now = SimpleNamespace(record_event=lambda: None)
    set_device_module(
        monkeypatch, SimpleNamespace(is_available=lambda: False, current_stream=lambda device: now, Stream=stream)
    )
    lane = CollectiveQueue(World(1).groups[0])  # type: ignore[arg-type]
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 0), is_cuda=False)
    works = [lane.allreduce([tensor]) for _ in range(2)]
    for work in works:
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            work.wait(timedelta(seconds=LIMIT_S))
    lane.close()
    lane.join()


# ------------------------------------------------------------------------------------------------ gradients


def steps(*, dies_at: int | None) -> list[Tensor]:
    """Runs three steps of two groups. `dies_at`: operation with which the first attempt of each fails, after all was launched."""
    team, grads = members(2, linear, quantized=True, bucket_bytes=150_000), []
    for step in range(3):
        worlds = [World(2, dies_at)] if dies_at is not None else []
        worlds.append(World(2))
        for attempt, world in enumerate(worlds):
            for member, group in zip(team, world.groups, strict=True):
                member.gradients.begin_attempt(group, 2)  # type: ignore[arg-type]
                if attempt == 0:
                    member.model.zero_grad()
                    member.backward(step)
            for member in team:
                member.gradients.launch_remaining([1.0, float(member.number)])
            if world is not worlds[-1]:
                lost(team, world)
        assert [member.gradients.wait() for member in team] == [(2.0, 1.0)] * 2, "the tail is exact"
        for member in team:
            member.gradients.deliver()
        assert all(torch.equal(a, b) for a, b in zip(team[0].grads, team[1].grads, strict=True))
        grads += team[0].grads
    return grads


def summed_once(team: list[Member], seed: int) -> None:
    """Runs one step with the gradients of that seed."""
    open_all(team)
    for member in team:
        member.model.zero_grad()
        member.backward(seed)
    finish(team)


def lost(team: Sequence[Member], world: World) -> None:
    for member in team:
        with pytest.raises(ProcessGroupError, match="a member is lost"):
            member.gradients.wait()
    for member, group in zip(team, world.groups, strict=True):
        back = member.gradients.abandon()
        group.scribble()
        back()


@pytest.mark.parametrize("dies_at", [0, 1, 3, 6])
def test_a_retry_has_the_bits_of_the_first_attempt(dies_at: int):
    """Residuals are updated once per step."""
    assert all(torch.equal(a, b) for a, b in zip(steps(dies_at=None), steps(dies_at=dies_at), strict=True))


def test_gradients_are_near_and_the_small_ones_exact():
    exact = members(2, linear, bucket_bytes=150_000)
    eight = members(2, linear, quantized=True, bucket_bytes=150_000)
    for team in (exact, eight):
        summed_once(team, 1)
    for want, got in zip(exact[0].grads, eight[0].grads, strict=True):
        if want.nbytes <= 4096:
            assert torch.equal(want, got), "it rides with the tail"
        else:
            assert 0 < (want - got).abs().max() < 0.02 * want.abs().max()


def test_groups_that_do_not_both_round_are_told_apart():
    [one], [other] = members(1, linear, quantized=True), members(1, linear)
    assert dict(one.gradients.fingerprint)["gradient buckets"] != dict(other.gradients.fingerprint)["gradient buckets"]


@pytest.mark.parametrize("drop", [Gradients.drop, Gradients.drop_feedback])
def test_gradients_that_go_and_a_heal_take_along_what_was_held_back(drop: Callable[[Gradients], None]):
    fresh, stale = members(2, linear, quantized=True), members(2, linear, quantized=True)
    for turn, team in ((0, stale), (1, stale), (1, fresh)):
        summed_once(team, turn)
        if turn == 0:
            for member in team:
                drop(member.gradients)
    assert all(torch.equal(a, b) for a, b in zip(fresh[0].grads, stale[0].grads, strict=True))


def test_over_many_steps_the_gradients_arrive():
    """Over ten steps with equal gradients the total error is about that of the first step, not ten times as large."""
    exact, eight = members(2, linear), members(2, linear, quantized=True)
    off: list[list[Tensor]] = []  # by step
    for _ in range(10):
        for team in (exact, eight):
            summed_once(team, 1)
        off.append([got - want for want, got in zip(exact[0].grads, eight[0].grads, strict=True)])
    first, *_ = off
    for once, together in zip(first, (torch.stack(steps).sum(0) for steps in zip(*off, strict=True)), strict=True):
        assert together.abs().max() <= 1.5 * once.abs().max()


def test_memory_is_given_back_when_the_lane_has_ended():
    world = World(2)
    [member] = members(1, linear, quantized=True, bucket_bytes=150_000)
    member.gradients.begin_attempt(world.groups[0], 2)  # type: ignore[arg-type]
    member.backward(0)
    member.gradients.launch_remaining([1.0])
    assert in_time(lambda: world.groups[0].started)
    given_back = threading.Thread(target=member.gradients.abandon(), daemon=True)
    given_back.start()
    given_back.join(0.2)
    assert given_back.is_alive(), "its lane still waits for an exchange, whose result it writes"
    for one in world.groups[0].started:
        one.work.end(ProcessGroupError("a member is lost"))
    given_back.join(LIMIT_S)
    assert not given_back.is_alive()


def test_of_nothing_nothing_is_sent():
    """A parameter without elements, the only one of its dtype, has its own bucket."""
    tensors = [torch.empty(0, 4) for _ in range(2)]
    world = summed(tensors, [None] * 2)
    assert not any(group.started for group in world.groups)
