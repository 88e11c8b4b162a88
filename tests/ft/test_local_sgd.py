"""torchft's LocalSGD and DiLoCo: a loop of torchft's that steps by itself, held against the papers; deaths, newcomers, bad input."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ft import DiLoCo, LocalSGD, Manager
from ft.compat.local_sgd import in_buckets
from ft.config import Schedule
from ft.seam import GroupEnded
from ft.semi_sync import split
from tests.ft.groups import LIMIT_S, GroupsOfJob, Trained, run_job
from tests.ft.round_groups import BATCH, Blocks, Papers, inner_loss, inner_optimizer, nesterov
from tests.ft.torchft_groups import manager_of

ROUNDING: dict[str, float] = {"rtol": 1e-5, "atol": 2e-6}  # fp32, through Adam
FOR_EVER = 1 << 20
Make = Callable[["Group"], Any]


def diloco(schedule: Schedule, bucket_cap_mb: float = 32.0, *, quantized: bool = False) -> Make:
    def make(group: Group) -> DiLoCo:
        named = split(list(group.model.named_parameters()), schedule.fragments)
        fragments = [_module(members) for members in named]
        return DiLoCo(
            group.manager,
            fragments,
            group.inner,
            [nesterov(list(fragment.parameters())) for fragment in fragments],
            schedule.sync_steps,
            bucket_cap_mb=bucket_cap_mb,
            should_quantize=quantized,
            fragment_sync_delay=schedule.delay,
            fragment_update_alpha=schedule.alpha,
        )

    return make


def _module(members: Sequence[tuple[str, nn.Parameter]]) -> nn.Module:
    module = nn.Module()
    for name, parameter in members:
        module.register_parameter(name.replace(".", "_"), parameter)
    return module


@dataclass
class Group(Trained):
    """`place`: of the batches that it reads. `inside`: called after each inner step."""

    name: str
    place: int
    lighthouse: str
    make: Make
    until: int  # syncs; may be changed while it trains
    inside: Callable[[Group], None] = lambda group: None
    manager: Manager = field(init=False)
    syncs: DiLoCo | LocalSGD = field(init=False)
    weights: dict[int, list[Tensor]] = field(default_factory=dict)  # after so many syncs
    outer: dict[int, list[Tensor]] = field(default_factory=dict)
    slots: dict[int, list[int]] = field(default_factory=dict)  # of the inner steps before

    def kill(self, *others: Trained) -> None:
        super().kill(*others)
        raise GroupEnded("killed")

    def stop(self) -> None:
        self.manager.shutdown()

    def train(self) -> None:
        self.model = Blocks()
        self.inner = inner_optimizer(self.model)
        self.manager = manager_of(self.name, self.lighthouse, self.model, init_sync=False)
        made: list[int] = []
        with self.make(self) as self.syncs:
            while self.manager.current_step() < self.until:
                before = self.manager.current_step()
                slot = 1000 * self.place + BATCH * sum(map(len, self.slots.values())) + BATCH * len(made)
                self.inner.zero_grad()
                inner_loss(self.model, slot).backward()
                made.append(slot)
                self.inner.step()
                self.inside(self)
                if self.manager.current_step() > before:
                    step = self.manager.current_step()
                    self.weights[step] = [p.detach().clone() for p in self.model.parameters()]
                    self.slots[step], made = made, []
                    self.outer[step] = [p.detach().clone() for fragment in self.syncs.fragments for p in fragment.outer]


class Job(GroupsOfJob[Group]):
    def group(self, name: str, make: Make, until: int, **more: Any) -> Group:
        return self.start(Group(name, len(self.groups), self.lighthouse, make, until, **more))


def job(min_replicas: int) -> AbstractContextManager[Job]:
    return run_job(Job, min_replicas, join_timeout_ms=30_000)


# ------------------------------------------------------------------------------------------------ the papers


@pytest.mark.parametrize("bucket_cap_mb", [32.0, 1e-4])
@pytest.mark.parametrize("schedule", [Schedule(4), Schedule(6, fragments=2, delay=1, alpha=0.5)], ids=str)
def test_the_numbers_of_the_papers(schedule: Schedule, bucket_cap_mb: float):
    """All weights are summed, in one bucket and with each weight in a bucket of its own."""
    with job(min_replicas=2) as made:
        syncs = 5 * schedule.fragments
        a, b = (made.group(name, diloco(schedule, bucket_cap_mb), syncs) for name in "ab")
        made.join()
        _hold(Papers(schedule, "ab"), a, b, syncs)


def test_the_numbers_of_sums_in_eight_bits():
    schedule = Schedule(6, fragments=2, delay=1, alpha=0.5)
    with job(min_replicas=2) as made:
        a, b = (made.group(name, diloco(schedule, 1e-4, quantized=True), 10) for name in "ab")
        made.join()
        _hold(Papers(schedule, "ab", quantized=True), a, b, 10)


def test_buckets_hold_every_weight_once():
    """A bucket has one dtype and at most the given size, unless one weight is larger; each weight is a view of one bucket."""
    sizes = [(3, 2), (10,), (1,), (4, 4), (2,)]
    tensors = [
        torch.randn(size).to(torch.bfloat16 if place == 3 else torch.float32) for place, size in enumerate(sizes)
    ]
    pieces, flats = in_buckets(tensors, 40)
    assert sorted(flat.nbytes for flat in flats) == [12, 24, 32, 40]
    assert all(map(torch.equal, pieces, tensors))
    for flat in flats:
        flat.zero_()
    assert not any(piece.any() for piece in pieces)


def test_the_mean_of_the_weights():
    with job(min_replicas=2) as made:
        a, b = (
            made.group(name, lambda group: LocalSGD(group.manager, group.model, group.inner, 3), 5) for name in "ab"
        )
        made.join()
        _hold(Papers(Schedule(3), "ab", averages=True), a, b, 5)


def test_a_mean_that_is_asked_for_early():
    """A mean after two inner steps of three is followed by the next one three steps later."""

    def inside(group: Group) -> None:
        if group.manager.current_step() == 0 and group.syncs.inner_steps_done == 2:
            assert isinstance(group.syncs, LocalSGD)
            group.syncs.sync()

    with job(min_replicas=2) as made:
        a, b = (
            made.group(name, lambda group: LocalSGD(group.manager, group.model, group.inner, 3), 2, inside=inside)
            for name in "ab"
        )
        made.join()
        assert [len(group.slots[step]) for group in (a, b) for step in (1, 2)] == [2, 3, 2, 3]
        for step in (1, 2):
            assert all(map(torch.equal, a.weights[step], b.weights[step]))
        assert not all(map(torch.equal, a.weights[1], a.weights[2]))


def _hold(papers: Papers, a: Group, b: Group, syncs: int) -> None:
    for step in range(1, syncs + 1):
        papers.round([(group.slots[step][0], group.name) for group in (a, b)])
        for group in (a, b):
            worker = papers.workers[group.name]
            torch.testing.assert_close(group.weights[step], [p.detach() for p in worker.weights().values()], **ROUNDING)


# ------------------------------------------------------------------------------------------------ groups come and go


@pytest.mark.parametrize("when", ["inner steps", "on their way"])
def test_a_death_costs_no_inner_step(when: str):
    """One of three dies, by itself or while sums are on their way: the others' sums are done again among the two, and nothing is lost."""
    died: list[int] = []

    def inside(group: Group) -> None:
        done = group.syncs.inner_steps_done
        place = {"inner steps": 1, "on their way": 3}[when]
        if group.name == "c" and group.manager.num_participants() == 3 and group.weights and done == place and not died:
            died.append(group.manager.current_step())
            a.until = b.until = died[0] + 3
            group.kill(a, b)

    with job(min_replicas=2) as made:
        a, b, _ = (made.group(name, diloco(Schedule(4, delay=1)), FOR_EVER, inside=inside) for name in "abc")
        made.join()
        [step] = died
        for after in range(step + 1, step + 4):
            assert all(map(torch.equal, a.weights[after], b.weights[after]))
            assert len(a.slots[after]) == len(b.slots[after]) == 4, "no sync was dropped"


def test_a_newcomer_begins_from_the_outer_weights():
    """A newcomer does not begin from its source's local weights, in the fragment that was not summed at that time either."""
    reached = threading.Event()

    def inside(group: Group) -> None:
        if group.name == "a" and len(group.weights) == 3:
            reached.set()
        if group.name == "b" and group.syncs.inner_steps_done == 0 and not group.weights:
            other = group.syncs.fragments[group.manager.current_step() % 2]
            assert all(map(torch.equal, other.local, other.outer))
        if group.name == "b" and len(group.weights) == 2 and a.until == FOR_EVER:  # once: this sum moves the step
            a.until = b.until = group.manager.current_step() + 1

    with job(min_replicas=1) as made:
        a = made.group("a", diloco(Schedule(4, fragments=2)), FOR_EVER, inside=inside)
        assert reached.wait(LIMIT_S)
        b = made.group("b", diloco(Schedule(4, fragments=2)), FOR_EVER, inside=inside)
        made.join()
        assert min(b.outer) > 3
        for step in b.outer:
            assert all(map(torch.equal, a.outer[step], b.outer[step])), step


def test_a_sum_that_is_dropped_is_carried_by_the_next():
    """A reported error changes nobody's weights and loses no inner step: the next sum contains what both would have contained."""
    reported: list[list[Tensor]] = []

    def inside(group: Group) -> None:
        if group.manager.current_step() == 2 and group.syncs.inner_steps_done == 3 and not reported:
            group.manager.report_error(RuntimeError("out of memory"))
            reported.append([p.detach().clone() for p in group.syncs.fragments[0].outer])
        elif reported and group.manager.current_step() == 2:
            kept = [p.detach() for p in group.syncs.fragments[0].outer]
            assert all(map(torch.equal, kept, reported[0]))

    with job(min_replicas=1) as made:
        a = made.group("a", diloco(Schedule(4, delay=1)), 4, inside=inside)
        made.join()
        assert reported and [len(a.slots[step]) for step in (1, 2, 3, 4)] == [4, 4, 8, 4]


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(sync_every=0), "sync_every = 0: must be at least 1; nearest: 2"),
        (dict(sync_every=5), r"sync_every = 5: must be a multiple of len\(model_fragments\) = 2, .* nearest: 4 or 6"),
        (dict(sync_every=4, fragment_sync_delay=2), "fragment_sync_delay = 2: must be from 0 to 1, .* nearest: 1"),
        (dict(sync_every=4, fragment_update_alpha=1.5), "fragment_update_alpha = 1.5: must be from 0 to 1; nearest: 1"),
        (dict(sync_every=4, outer=3), "outer_optimizer: 3 optimizers for 2 fragments; nearest: 1 or 2"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str):
    fragments = [nn.Linear(2, 2), nn.Linear(2, 2)]
    weights = [p for fragment in fragments for p in fragment.parameters()]
    outer: Any = nesterov(weights)
    if number := arguments.pop("outer", 0):
        outer = [outer] * number
    with pytest.raises(ValueError, match=message):
        DiLoCo(None, fragments, torch.optim.SGD(weights, lr=1.0), outer, **arguments)  # type: ignore[arg-type]


def test_an_outer_optimizer_without_the_weights_is_refused():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="the outer optimizer does not have weight"):
        DiLoCo(None, [one], torch.optim.SGD(one.parameters(), lr=1.0), nesterov(list(other.parameters())), 4)  # type: ignore[arg-type]
