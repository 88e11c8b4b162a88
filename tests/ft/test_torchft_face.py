"""torchft's names over the Manager: what a training loop of torchft's sees when groups come, go, fail and wait."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from ft import Manager, ProcessGroupGloo, WorldSizeMode
from ft.manager import GroupEnded
from ft.protocol import messages as m
from ft.seam import GroupReleased
from tests.ft.torchft_groups import LIMIT_S, Group, fetch_late, job, moves

A, B, C = 4.0, 16.0, 64.0  # gradients; all means of them differ
FOR_EVER = 1 << 30


def mean(*values: float) -> float:
    return sum(values) / len(values)


# ------------------------------------------------------------------------------------------------ several groups


def test_the_gradient_is_the_mean_and_the_states_are_one():
    """Initial states that differ become one; .grad is the mean when backward returns, so clipping is everybody's. Modules that share
    weights are attached, and each weight counts once."""
    seen: dict[str, list[float]] = {"a": [], "b": []}

    def body(group: Group) -> None:
        group.backward()
        seen[group.name].append(group.model.b.grad[0, 0].item())
        torch.nn.utils.clip_grad_value_(group.ddp.parameters(), 8.0)

    with job(min_replicas=2) as made:
        shares: dict[str, Any] = {"at": lambda group: group.bodies or group.manager.attach([group.model])}
        a = made.group("a", A, 6, body=body, initial=100.0, **shares)
        b = made.group("b", B, 6, body=body, initial=-1.0, **shares)
        made.join()
        assert seen["a"] == seen["b"] and seen["a"][0] == A, "the first holds the state, so the other gave nothing"
        assert seen["a"][2:] == [mean(A, B)] * 4  # it says that it has healed in the first tail that it can
        assert a.weights[1][0] == 100.0 - A and moves(a) == moves(b) and moves(a)[6] == 8.0
        assert a.bodies == b.bodies == list(range(1, 7))


def test_a_death_costs_the_others_no_step_and_no_body():
    """One of three groups dies in its forward, while the others reduce."""
    died_at: list[int] = []

    def body(group: Group) -> None:
        if group.name == "c" and group.manager.num_participants() == 3:
            died_at.append(group.manager.current_step() + 1)
            a.steps = b.steps = died_at[0] + 3
            group.kill(a, b)
        group.backward()

    with job(min_replicas=2) as made:
        a, b = made.group("a", A, FOR_EVER, body=body), made.group("b", B, FOR_EVER, body=body)
        c = made.group("c", C, FOR_EVER, body=body)
        made.join()
        assert isinstance(c.error, GroupEnded)
        for group in (a, b):
            assert group.refused == [] and group.bodies == sorted(set(group.bodies)), "no step was computed twice"
            assert moves(group)[died_at[0]] == mean(A, B) and died_at[0] not in c.weights


def test_a_group_waits_for_its_state_and_the_others_for_the_group():
    """The state begins to arrive when the others are in their bodies."""
    computing = threading.Event()

    def at(group: Group) -> None:
        if group.manager.num_participants() == 0:
            fetch_late(group, computing)

    def body(group: Group) -> None:
        computing.set()
        assert group.model.a.tolist() == [100.0 - group.manager.current_step()] * 3, "the state of a, never b's own"
        group.backward()

    with job(min_replicas=2) as made:
        groups = [made.group(name, 1.0, 3, body=body, at=at, initial=100.0 + place) for place, name in enumerate("ab")]
        made.join()
        for group in groups:
            assert group.bodies == [1, 2, 3] and group.refused == []
            assert not any(isinstance(event, m.ReduceFailed) for event in group.events)


def test_a_spare_follows_and_steps_in():
    followed: list[int] = []  # steps that b made without giving anything
    sums: list[float] = []

    def body(group: Group) -> None:
        manager = group.manager
        place = (manager.is_participating(), manager.participating_rank(), manager.num_participants())
        assert place in ((True, 0, 1), (False, None, 1))
        value = torch.tensor([group.value])
        manager.allreduce(value).wait()
        group.backward()
        if group.name == "b" and not manager.is_participating():
            followed.append(manager.current_step() + 1)
            sums.append(value.item())
        elif group.name == "b":
            b.steps = min(b.steps, manager.current_step() + 2)
        elif len(followed) >= 4:
            group.kill(*made.groups)

    with job() as made:
        spare = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES}
        reached = threading.Event()
        a = made.group(
            "a", A, FOR_EVER, body=body, at=lambda group: group.manager.core.step and reached.set(), arguments=spare
        )
        assert reached.wait(LIMIT_S)
        b = made.group("b", B, FOR_EVER, body=body, arguments=spare)
        made.join()
        assert isinstance(a.error, GroupEnded) and b.error is None
        assert moves(b)[followed[2]] == A and moves(b)[b.steps] == B
        assert sums[:4] == [A] * 4, "its own value is not in the mean"


@pytest.mark.parametrize("clips", [False, True])
def test_sums_of_ones_own(clips: bool):
    """A death costs a step without DistributedDataParallel only if the user has changed the sums."""
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
            group.kill(a, b)

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


def test_a_step_in_which_all_groups_report_an_error_is_dropped():
    def body(group: Group) -> None:
        if group.manager.current_step() == 2 and not group.refused:
            group.manager.report_error(RuntimeError("out of memory"))
        group.backward()

    with job(min_replicas=2) as made:
        ab = [made.group(name, A, 5, body=body, arguments={"init_sync": False}) for name in "ab"]
        made.join()
        for group in ab:
            assert group.refused == [3] and set(moves(group).values()) == {A} and group.batches[5] == 10


def test_a_lighthouse_with_other_timeouts_than_the_defaults():
    times = m.Timeouts(heartbeat_timeout_s=4.0)
    with job(2, heartbeat_timeout_ms=4000) as made:
        ab = [made.group(name, A, 2, arguments={"init_sync": False, "times": times}) for name in "ab"]
        made.join()
        assert all(group.error is None and group.weights.keys() == {1, 2} for group in ab)


@pytest.mark.parametrize("clips", [False, True])
def test_a_reported_error_leaves_this_group_out_of_sums_of_ones_own(clips: bool):
    """The retry sends zeros for the group with the error, and the mean is that of the others. Where the user has made something of the
    first sums, they are not sent again: the body runs anew. So it is in a spare, which sends zeros."""
    reported: list[int] = []

    def body(group: Group) -> None:
        manager = group.manager
        group.backward()
        assert all(work.wait() for work in [manager.allreduce(p.grad) for p in group.model.parameters()])
        if clips:
            torch.nn.utils.clip_grad_value_(group.model.parameters(), 1.0)
        if group.name == "b" and manager.current_step() == 2 and not (clips and reported):
            reported.append(3)
            manager.report_error(RuntimeError("out of memory"))

    with job(min_replicas=3) as made:
        spare = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 2, "init_sync": False}
        more: dict[str, Any] = {"wrap": False, "body": body, "arguments": spare}
        a, b, c = (made.group(name, value, 5, **more) for name, value in (("a", A), ("b", B), ("c", C)))
        made.join()
        assert moves(a) == moves(b) == moves(c)
        assert moves(a)[3] == (1.0 if clips else A) and moves(a)[4] == (1.0 if clips else mean(A, B))
        assert a.refused == b.refused == c.refused == (reported if clips else [])


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


def test_a_group_that_waits_for_others_in_its_backward_can_be_released():
    def body(group: Group) -> None:
        if group.name == "b" and group.manager.current_step() == 2:
            group.kill(a)
        group.backward()

    with job(min_replicas=2) as made:
        more: dict[str, Any] = {"body": body, "arguments": {"times": m.Timeouts(beat_s=0.2)}}
        a, _ = (made.group(name, value, FOR_EVER, **more) for name, value in (("a", A), ("b", B)))
        while not any(isinstance(event, m.MemberLost) for event in a.events):
            a.thread.join(0.05)
        a.manager.want_to_leave()
        assert isinstance(a.join().error, GroupReleased) and a.weights
        a.error = None  # as it is to be


def test_a_body_that_is_left_lets_nobody_wait():
    """b leaves a body after the first of two sums: the others' second would meet none, or one of another size."""
    left: list[int] = []

    def body(group: Group) -> None:
        manager = group.manager
        manager.allreduce(torch.ones(3)).wait()
        if group.name == "b" and manager.current_step() == 2 and not left:
            left.append(3)
            group.optimizer.zero_grad()
            manager.allreduce(torch.ones(3)).wait()
        manager.allreduce(torch.ones(500)).wait()
        group.backward()
        assert manager.allreduce(torch.ones(7)).wait(), "late, and harmless whatever became of the step"

    with job(min_replicas=2) as made:
        more: dict[str, Any] = {"body": body, "arguments": {"init_sync": False}}
        a, b = made.group("a", A, 5, **more), made.group("b", B, 5, **more)
        made.join()
        assert left and moves(a) == moves(b) and set(moves(a).values()) == {mean(A, B)}


def test_what_one_rank_reports_drops_the_step_in_all_of_its_group():
    """Two groups of two ranks. Nobody steps where one rank of a group could not."""

    def body(group: Group) -> None:
        if group.name == "b" and group.arguments["rank"] == 1 and group.manager.current_step() == 2:
            group.manager.report_error(RuntimeError("out of memory")) if not group.refused else None
        group.backward()

    with job(min_replicas=2) as made:
        stores = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in "ab"]
        alike = {"init_sync": False, "world_size": 2, "store_addr": "127.0.0.1"}
        ranks = [
            made.group(name, value, 5, body=body, arguments={**alike, "rank": rank, "store_port": store.port})
            for name, value, store in (("a", A, stores[0]), ("b", B, stores[1]))
            for rank in range(2)
        ]
        made.join()
        for rank in ranks:
            assert rank.refused == [3] and set(moves(rank).values()) == {mean(A, B)}, rank
            assert rank.bodies == [1, 2, 3, 3, 4, 5]


# ------------------------------------------------------------------------------------------------ what is refused, and what is said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lighthouse_addr": None}, "TORCHFT_LIGHTHOUSE is not set"),
        ({"min_replica_size": 0}, "min_replica_size = 0: must be at least 1"),
        ({"replica_id": "a:b"}, "a group's name must be 1 to 64 .*; nearest: a_b"),
        ({"world_size": 2}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"hostname": f"{'a' * 64}.cluster"}, r"hostname: there is no host a{64}\.cluster"),  # no name can be so long
        ({"interface": "eth99"}, 'fault_tolerance.interface = "eth99"'),
        (
            {"heartbeat_interval": timedelta(seconds=5)},
            "heartbeat_interval or times: beat_s = 5 must be below heartbeat_timeout_s = 5",
        ),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch):
    for variable in ("TORCHFT_LIGHTHOUSE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    given = {"min_replica_size": 1, "lighthouse_addr": "http://127.0.0.1:1", **arguments}
    with pytest.raises(ValueError, match=message):
        Manager(ProcessGroupGloo(), None, None, **given)


def test_a_hostname_without_an_address_is_waited_for():
    """The name server may be down for a moment: that is no error of the program."""
    given = {"min_replica_size": 1, "lighthouse_addr": "http://127.0.0.1:1", "hostname": "no.such.host.invalid"}
    soon = timedelta(microseconds=1)
    with pytest.raises(ConnectionError, match=r"^hostname: no\.such\.host\.invalid has no address within 1e-06 s: \w"):
        Manager(ProcessGroupGloo(), None, None, connect_timeout=soon, **given)
