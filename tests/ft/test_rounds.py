"""Groups that step by themselves: the papers' numbers, and what remains of a round when groups die, stop, join and fail in it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from ft.config import Schedule
from ft.healing.capture import StateRegistry
from ft.protocol.messages import name_of
from ft.seam import DataAssignment, GroupEnded
from ft.semi_sync import split
from ft.semi_sync_manager import FragmentGradients, SemiSyncManager
from tests.ft.groups import LIMIT_S, finish
from tests.ft.round_groups import Blocks, Group, Papers, average, inner_muon, inner_optimizer, job, nesterov
from training.states import ModelState

FOR_EVER = 1 << 20
SYNCS = 5  # of each fragment
ROUNDING: dict[str, float] = {"rtol": 1e-5, "atol": 2e-6}  # fp32, through Adam


@pytest.mark.parametrize(
    ("schedule", "bucket_bytes"),  # in one bucket, or each weight in its own
    [
        (Schedule(4), 1 << 20),
        (Schedule(4, delay=1), 64),
        (Schedule(4, delay=2, alpha=0.5), 1 << 20),
        (Schedule(4, fragments=2), 64),
        (Schedule(6, fragments=2, delay=2, alpha=0.5), 64),
        (Schedule(6, fragments=3, delay=1), 1 << 20),
        (Schedule(12, fragments=4, delay=2), 64),
        (Schedule(8, fragments=4, delay=1, alpha=0.5), 1 << 20),
    ],
    ids=str,
)
def test_the_numbers_of_the_papers(schedule: Schedule, bucket_bytes: int):
    _hold_against_the_papers("ab", schedule, bucket_bytes=bucket_bytes)


def test_the_mean_of_the_weights_of_three():
    _hold_against_the_papers("abc", Schedule(3), outer=average)


@pytest.mark.parametrize("outer", [nesterov, average])
def test_muon_steps_each_group(outer: Callable[..., object]):
    """DiLoCo and Local SGD: the momentum is each group's own."""
    _hold_against_the_papers("ab", Schedule(4), outer=outer, inner_of=inner_muon)


@pytest.mark.parametrize("schedule", [Schedule(4, delay=1), Schedule(6, fragments=2, delay=2, alpha=0.5)], ids=str)
def test_the_numbers_of_sums_in_eight_bits(schedule: Schedule, monkeypatch: pytest.MonkeyPatch):
    """Each weight in its own bucket, and none so small that it is not quantized."""
    monkeypatch.setattr("ft.buckets.QUANTIZED_GRADIENT_BYTES", 0)
    _hold_against_the_papers("ab", schedule, bucket_bytes=64, quantized=True)


def _hold_against_the_papers(
    names: str, schedule: Schedule, *, inner_of: Callable[..., Any] = inner_optimizer, **more: object
) -> None:
    """Outer and local weights of every group after every round."""
    with job(min_replicas=len(names)) as made:
        rounds = SYNCS * schedule.fragments
        groups = [made.group(name, schedule, rounds, inner_of=inner_of, **more) for name in names]
        finish(*groups)
        settings = {"averages": more.get("outer") is average, "quantized": bool(more.get("quantized"))}
        papers = Papers(schedule, names, **settings, inner_of=inner_of)
        for step in range(1, rounds + 1):
            papers.round([(slot, name_of(owner)) for slot, owner in groups[0].history[step].slots])
            for group in groups:
                here, worker = group.history[step], papers.workers[group.name]
                torch.testing.assert_close(here.outer, list(papers.theta.values()), **ROUNDING)
                torch.testing.assert_close(here.local, [p.detach() for p in worker.weights().values()], **ROUNDING)


# ------------------------------------------------------------------------------------------------ deaths


PLACES = {
    "inner steps": dict(inside=0),
    "prepare": dict(inside=2),  # its sums have gone, the rest of the round has not
    "outer step": dict(before_commit=True),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_death_costs_the_others_no_inner_step(place: str):
    """One group of three dies in a round. The others commit that round with what they have computed of it, none of it twice; its
    slots are a hole, unless its sums were complete, and are trained on later."""
    died_in: list[int] = []

    def dies(group: Group, inside: int | None = None) -> None:
        together = group.history and len(list(group.history.values())[-1].slots) == 3
        if group.name == "c" and together and inside == PLACES[place].get("inside"):
            died_in.append(group.manager.step)
            for one in made.groups:
                one.rounds_to_do = group.manager.step + 4
            group.kill(*made.groups)
            raise GroupEnded("killed")

    hooks = {"before_commit": dies} if place == "outer step" else {"inside": dies}
    with job(min_replicas=2) as made:
        schedule = Schedule(8, fragments=2, delay=1, alpha=0.5)
        a, b, c = (made.group(name, schedule, FOR_EVER, **hooks) for name in "abc")
        for group in (a, b, c):
            group.join()
        [round_] = died_in
        assert isinstance(c.error, GroupEnded) and a.error is b.error is None
        # A survivor that had not all sums when the other had takes that round with the other's state: it is in one history alone.
        history = {**a.history, **b.history}
        assert set(range(round_ + 1, round_ + 5)) <= history.keys(), "every round is there"
        for group in (a, b):
            assert set(range(round_ + 2, round_ + 5)) <= group.history.keys(), "more than the death's round healed over"
            assert len(group.computed) == len({number for number, _ in group.computed}), "no round was computed twice"
            for number, first in group.computed:
                assert (first, group.manager.replica_id) in history[number + 1].slots, "its inner steps count"
        holes = history[round_ + 4].holes
        trained = {slot for group in (a, b) for made_here in group.history.values() for slot, _ in made_here.slots}
        lost = {first for _, first in c.computed if first not in trained and first >= min(trained)}
        assert not lost - set(holes), "what c was assigned is trained on"


def test_who_joins_heals_while_the_others_step_by_themselves():
    """The outer weights stand still meanwhile, so nothing is copied aside and nobody waits. It begins from them."""
    reached, healed_at = threading.Event(), list[int]()

    def inside(group: Group, place: int) -> None:
        if group.name == "a" and group.manager.step == 3:
            reached.set()
        part = group.manager.quorum
        if group.name != "c" and part and part.recover_dst_replica_ranks and place == 1 and not healed_at:
            c = made.groups[2]
            assert not torch.equal(group.rounds.fragments[0].local[0], group.rounds.fragments[0].outer[0])
            while not c.manager.healer.received_bytes:
                assert c.thread.is_alive(), c.error
                c.thread.join(0.01)
            healed_at.append(group.manager.step)

    def ends(group: Group, place: int) -> None:
        """Ends all groups after c has contributed twice."""
        if len(group.computed) == 2:
            for one in made.groups:
                one.rounds_to_do = group.manager.step + 2  # known to all before they begin the last one

    def begins(group: Group, place: int) -> bool:
        if len(group.computed) == 1 and place == 0:
            for fragment in group.rounds.fragments:
                assert all(map(torch.equal, fragment.local, fragment.outer)), "it begins from what is agreed on"
        return True

    with job(min_replicas=2) as made:
        schedule = Schedule(8, fragments=4)  # more than it takes part in before its own first steps
        a, b = (made.group(name, schedule, FOR_EVER, inside=inside) for name in "ab")
        assert reached.wait(LIMIT_S)
        c = made.group("c", schedule, FOR_EVER, inside=ends, finite=begins)
        finish(a, b, c)
        assert healed_at, "it healed inside a round of the others"
        assert c.computed and min(c.history) >= healed_at[0]
        first = min(number for number, _ in c.computed)
        assert any(name_of(owner) == "c" for _, owner in a.history[first + 1].slots)


# ------------------------------------------------------------------------------------------------ windows that do not count


def test_a_window_with_a_loss_that_is_no_number_leaves_no_trace():
    """The group's local weights go back to the agreed ones, in all fragments, and its window is trained on again."""
    broken: list[int] = []

    def finite(group: Group, place: int) -> bool:
        if group.name == "b" and group.manager.step == 3 and place == 1 and not broken:
            broken.append(group.computed[-1][1])
            return False
        return True

    with job(min_replicas=2) as made:
        a, b = (made.group(name, Schedule(6, fragments=2), 8, finite=finite) for name in "ab")
        finish(a, b)
        after = b.history[4]
        assert broken[0] not in {slot for slot, _ in after.slots} and len(after.slots) == 1
        for local, outer in zip(after.local, after.outer, strict=True):
            assert torch.equal(local, outer), "nothing of its own is left"
        assert any(
            broken[0] in {slot for slot, _ in made_here.slots} for step, made_here in a.history.items() if step > 4
        )


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("schedule", [Schedule(3), Schedule(6, fragments=2, delay=1, alpha=0.5)], ids=str)
def test_a_checkpoint_goes_on_with_the_same_bits(schedule: Schedule):
    """The checkpoint of a group has outer weights as the model's, outer momentum, local weights where they differ, and the inner
    optimizer's state, which the trainer saves."""
    saved: dict[str, Any] = {}

    def saves(group: Group) -> None:
        if group.manager.step == 3:
            states = group.rounds.checkpoint_state(ModelState([group.model]))
            saved.update(copy.deepcopy({name: state.state_dict() for name, state in states.items()}))
            saved.update(ledger=group.rounds.state_dict(), inner=copy.deepcopy(group.inner.state_dict()))
            outer = dict(zip(_names(group), group.history[3].outer, strict=True))
            assert all(torch.equal(saved["model"][name], outer[name]) for name in outer)

    def loads(group: Group) -> None:
        if not group.history:
            states = group.rounds.checkpoint_state(ModelState([group.model]))
            assert ("local_model" in states) == (schedule.fragments > 1)
            for name, state in states.items():
                state.load_state_dict(saved[name])
            group.rounds.load_state_dict(saved["ledger"])
            group.inner.load_state_dict(saved["inner"])

    with job(min_replicas=1) as made:
        a = made.group("a", schedule, 6, at=saves).join()
    with job(min_replicas=1) as made:
        b = made.group("b", schedule, 6, at=loads).join()
        made.groups.clear()  # its ledger tells of rounds that were made elsewhere
    assert a.error is b.error is None and set(b.history) == {4, 5, 6}
    for step in b.history:
        here, there = a.history[step], b.history[step]
        assert all(map(torch.equal, [*here.outer, *here.local], [*there.outer, *there.local])), step


def _names(group: Group) -> list[str]:
    return [name for fragment in group.rounds.fragments for name in fragment.names]


def test_a_checkpoint_between_two_rounds_is_refused():
    with job(min_replicas=1) as made:
        group = made.group("a", Schedule(3), 1).join()
        with pytest.raises(ValueError, match=r"fault_tolerance.sync_steps = 3: the checkpoint is of step 4"):
            group.rounds.load_state_dict({"step": 4})


def test_weights_alone_are_a_beginning():
    """Outer and local weights begin from the weights of a run that never stepped by itself."""
    model = Blocks()
    manager = Mock(gradients=FragmentGradients(), slot_size=4)
    manager.begin_step.return_value = DataAssignment(0, ())
    rounds = SemiSyncManager(manager, Schedule(4, fragments=2), nesterov)
    rounds.attach([model])
    given = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    rounds.checkpoint_state(ModelState([model]))["model"].load_state_dict(given)
    rounds.begin_step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, given[name])


def test_a_joining_group_receives_frozen_weights():
    """They are in no fragment, and those of a base model are in no initial values."""
    model, registry = Blocks(), StateRegistry()
    first = next(model.parameters()).requires_grad_(False)
    manager = Mock(gradients=FragmentGradients(), slot_size=4, register_state=registry.register_state)
    SemiSyncManager(manager, Schedule(4), nesterov).attach([model])
    sent = [tensor.data_ptr() for tensor in registry.view().local.values()]
    assert sent.count(first.data_ptr()) == 1


def test_an_offer_is_fenced_before_the_outer_weights_change_places():
    """The last text is sampled with them while another group may still heal from this one."""
    model, at_the_fence = Blocks(), list[list[Tensor]]()
    manager = Mock(gradients=FragmentGradients(), slot_size=4)
    rounds = SemiSyncManager(manager, Schedule(4, fragments=2), nesterov)
    rounds.attach([model])
    offered = [outer.detach() for fragment in rounds.fragments for outer in fragment.outer]
    agreed = [outer.clone() for outer in offered]
    with torch.no_grad():
        for weights in model.parameters():
            weights += 1
    manager.healer.transport.fence.side_effect = lambda: at_the_fence.append([outer.clone() for outer in offered])
    with rounds.use_outer_weights():
        local = [local for fragment in rounds.fragments for local in fragment.local]
        assert all(map(torch.equal, local, agreed)) and not any(map(torch.equal, offered, agreed))
    assert len(at_the_fence) == 1 and all(map(torch.equal, at_the_fence[0], agreed))


# ------------------------------------------------------------------------------------------------ fragments


def test_a_model_is_cut_between_blocks_as_even_as_that_allows():
    model = nn.ModuleDict(
        {"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(5)), "output": nn.Linear(4, 1, bias=False)}
    )
    named = list(model.named_parameters())
    for count in range(1, 7):
        fragments = split(named, count)
        assert [pair for members in fragments for pair in members] == named and len(fragments) == count
        blocks = [{name.rsplit(".", 1)[0] for name, _ in members} for members in fragments]
        assert not any(one & other for place, one in enumerate(blocks) for other in blocks[place + 1 :])
    assert [sum(p.numel() for _, p in members) for members in split(named, 2)] == [60, 44]
    with pytest.raises(ValueError, match=r"num_fragments = 7: must be at most 6, the blocks of the model; nearest: 6"):
        split(named, 7)
