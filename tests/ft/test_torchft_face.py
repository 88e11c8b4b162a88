"""torchft's names over the Manager: what a training loop of torchft's sees when groups come, go, fail and wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ft import WorldSizeMode
from ft.manager import GroupEnded
from tests.ft.torchft_groups import LIMIT_S, Group, Job, job, moves

A, B, C = 4.0, 16.0, 64.0  # gradients; all means of them differ
FOR_EVER = 1 << 30


def mean(*values: float) -> float:
    return sum(values) / len(values)


# ------------------------------------------------------------------------------------------------ several groups


def test_the_gradient_is_the_mean_and_the_states_are_one():
    """Initial states that differ become one; .grad is the mean when backward returns, so clipping is everybody's."""
    seen: dict[str, list[float]] = {"a": [], "b": []}

    def body(group: Group) -> None:
        group.backward()
        seen[group.name].append(group.model.b.grad[0, 0].item())
        torch.nn.utils.clip_grad_value_(group.ddp.parameters(), 8.0)

    with job(min_replicas=2) as made:
        a = made.group("a", A, 6, body=body, start=100.0)
        b = made.group("b", B, 6, body=body, start=-1.0)
        made.join()
        assert seen["a"] == seen["b"] and seen["a"][0] == A, "the first holds the state, so the other gave nothing"
        assert seen["a"][2:] == [mean(A, B)] * 4  # it says that it has healed in the first tail that it can
        assert a.weights[1][0] == 100.0 - A and moves(a) == moves(b) and moves(a)[6] == 8.0
        assert a.bodies == b.bodies == list(range(1, 7))


def test_a_death_costs_the_others_no_step_and_no_body():
    """Once three take part, one dies in its forward, while the others reduce."""
    died_at: list[int] = []

    def body(group: Group) -> None:
        if group.name == "c" and group.manager.num_participants() == 3:
            died_at.append(group.manager.current_step() + 1)
            a.steps = b.steps = died_at[0] + 3
            group.kill()
        group.backward()

    with job(min_replicas=2) as made:
        a, b = made.group("a", A, FOR_EVER, body=body), made.group("b", B, FOR_EVER, body=body)
        c = made.group("c", C, FOR_EVER, body=body)
        made.join()
        assert isinstance(c.error, GroupEnded)
        for group in (a, b):
            assert group.refused == [] and group.bodies == sorted(set(group.bodies)), "no step was computed twice"
            assert moves(group)[died_at[0]] == mean(A, B) and died_at[0] not in c.weights


def test_a_newcomer_takes_the_state_and_gives_from_then_on():
    there, reached = threading.Event(), threading.Event()

    def waits(group: Group) -> None:
        if group.manager.current_step() == 4:
            reached.set()
            assert there.wait(LIMIT_S)

    with job() as made:
        a = made.group("a", A, 60, at=waits)
        assert reached.wait(LIMIT_S)
        b = made.group("b", B, 60, start=-7.0, at=lambda group: there.set())
        made.join()
        assert a.refused == b.refused == []
        assert min(b.weights) > 4 and b.bodies[0] == min(b.weights), "no body on a state that is half there"
        assert moves(a)[60] == moves(b)[60] == mean(A, B)


def test_a_spare_follows_and_steps_in():
    took_part: dict[str, list[tuple[bool, int | None, int]]] = {"a": [], "b": []}

    def body(group: Group) -> None:
        manager = group.manager
        took_part[group.name].append(
            (manager.is_participating(), manager.participating_rank(), manager.num_participants())
        )
        group.backward()

    def dies(group: Group) -> None:
        if group.manager.current_step() == 3:
            group.kill()

    spare = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "init_sync": False}
    with job(min_replicas=1) as made:
        both = threading.Barrier(2)

        def together(group: Group) -> None:
            if group.manager.current_step() == 0:
                both.wait(LIMIT_S)

        def first(group: Group) -> None:
            together(group)
            dies(group)

        a = made.group("a", A, 6, body=body, at=first, arguments=spare)
        b = made.group("b", B, 6, body=body, at=together, arguments=spare)
        made.join()
        assert isinstance(a.error, GroupEnded) and b.error is None
        assert took_part["a"][1:] == [(True, 0, 1)] * (len(took_part["a"]) - 1)
        assert (False, None, 1) in took_part["b"] and took_part["b"][-1] == (True, 0, 1)
        assert moves(b)[3] == A and moves(b)[6] == B


@pytest.mark.parametrize("clips", [False, True])
def test_sums_of_ones_own(clips: bool):
    """Without DistributedDataParallel. A death in a step costs it where the user has made something of the sums, else nothing."""
    died_at: list[int] = []

    def body(group: Group) -> None:
        group.backward()
        works = [group.manager.allreduce(p.grad) for p in group.model.parameters()]
        assert all(work.wait() for work in works)
        if clips:
            torch.nn.utils.clip_grad_value_(group.model.parameters(), 1.0)
        if group.name == "c" and group.manager.num_participants() == 3:
            died_at.append(group.manager.current_step() + 1)
            a.steps = b.steps = died_at[0] + 3
            group.kill()

    with job(min_replicas=2) as made:
        more: dict[str, Any] = {"wrap": False, "body": body, "arguments": {"init_sync": False}}
        a, b = made.group("a", A, FOR_EVER, **more), made.group("b", B, FOR_EVER, **more)
        made.group("c", C, FOR_EVER, **more)
        made.join()
        for group in (a, b):
            assert group.refused == (died_at if clips else [])
            assert moves(group)[died_at[0]] == (1.0 if clips else mean(A, B))


def test_a_reported_error_leaves_this_group_out():
    def body(group: Group) -> None:
        if group.name == "b" and group.manager.current_step() == 2:
            group.manager.report_error(RuntimeError("out of memory"))
            assert str(group.manager.errored()) == "out of memory"
        group.backward()

    with job(min_replicas=2) as made:
        a, b = (
            made.group(name, value, 5, body=body, arguments={"init_sync": False})
            for name, value in (("a", A), ("b", B))
        )
        made.join()
        assert moves(a) == moves(b) == {2: mean(A, B), 3: A, 4: mean(A, B), 5: mean(A, B)}
        assert a.refused == b.refused == [] and a.batches[5] == 9


def test_fewer_groups_than_asked_for_commit_nothing():
    waited = threading.Event()

    def counts(group: Group) -> None:
        if len(group.refused) == 2:
            waited.set()

    with job(min_replicas=1) as made:
        a = made.group("a", A, 4, at=counts, arguments={"min_replica_size": 2})
        assert waited.wait(LIMIT_S) and a.weights == {}
        b = made.group("b", B, 4, arguments={"min_replica_size": 2})
        made.join()
        assert a.weights.keys() == b.weights.keys() == {1, 2, 3, 4}


# ------------------------------------------------------------------------------------------------ one group


class Alone(Group):
    """Its loop is the test's."""

    def _train(self) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Job]:
    with job() as made:
        yield made


@pytest.fixture
def alone(lighthouse: Job, request: pytest.FixtureRequest) -> Iterator[Group]:
    """A group that is ready for its first step."""
    arguments = getattr(request, "param", {})
    group = Group(
        f"alone-{request.node.name}"[:40].replace("[", "-").replace("]", ""),
        A,
        0,
        lighthouse.lighthouse.address(),
        arguments=arguments,
    )
    group._train()  # of no step
    yield group
    group.manager.shutdown()


def test_gradients_add_up_in_no_sync(alone: Group):
    alone.optimizer.zero_grad()
    with alone.ddp.no_sync():
        alone.backward()
        alone.backward()
    alone.backward()
    assert alone.model.a.grad.tolist() == [3 * A] * 3
    alone.optimizer.step()
    assert alone.manager.current_step() == 1 and alone.model.a.tolist() == [-3 * A] * 3


def test_a_second_backward_says_what_to_do(alone: Group):
    alone.optimizer.zero_grad()
    alone.backward()
    with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        alone.backward()
