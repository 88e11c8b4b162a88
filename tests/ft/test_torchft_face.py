"""torchft's names over the Manager: what a training loop of torchft's sees when groups come, go, fail and wait."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.futures import Future

from ft import (
    DistributedDataParallel,
    LighthouseServer,
    Manager,
    Optimizer,
    ProcessGroupGloo,
    WorldSizeMode,
    torchft_manager,
)
from ft.ddp import _tensors
from ft.healing.http_transport import HttpTransport
from ft.manager import GroupEnded, Stopped
from ft.process_groups.operations import AllReduce
from ft.process_groups.work import GroupWork
from ft.protocol import messages as m
from ft.torchft_manager import _Told
from tests.ft.torchft_groups import LIMIT_S, Group, job, moves

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
    reached = threading.Event()

    def follows(group: Group) -> None:
        if group.name == "a" and group.manager.current_step() == 4:
            reached.set()
        if group.name == "b" and group.manager.is_participating():
            a.steps = b.steps = min(b.steps, group.manager.current_step() + 3)
        group.backward()

    with job() as made:
        a = made.group("a", A, FOR_EVER, body=follows)
        assert reached.wait(LIMIT_S)
        b = made.group("b", B, FOR_EVER, body=follows, start=-7.0)
        made.join()
        assert a.refused == b.refused == []
        assert min(b.weights) > 4 and b.bodies[0] == min(b.weights), "no body on a state that is half there"
        assert moves(a)[a.steps] == moves(b)[a.steps] == mean(A, B)


def test_a_group_waits_for_its_state_and_the_others_for_the_group(monkeypatch: pytest.MonkeyPatch):
    """The state begins to arrive when the others are in their bodies."""
    computing, fetch = threading.Event(), HttpTransport.fetch

    def late(transport: HttpTransport, *sources: Any, **more: Any) -> Any:
        assert computing.wait(LIMIT_S)
        return fetch(transport, *sources, **more)

    def body(group: Group) -> None:
        computing.set()
        assert group.model.a.tolist() == [100.0 - group.manager.current_step()] * 3, "the state of a, never b's own"
        group.backward()

    monkeypatch.setattr(HttpTransport, "fetch", late)
    with job(min_replicas=2) as made:
        groups = [made.group(name, 1.0, 3, body=body, start=100.0 + place) for place, name in enumerate("ab")]
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
            group.kill()

    with job() as made:
        spare = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES}
        reached = threading.Event()
        a = made.group(
            "a", A, FOR_EVER, body=body, at=lambda group: group.manager.step and reached.set(), arguments=spare
        )
        assert reached.wait(LIMIT_S)
        b = made.group("b", B, FOR_EVER, body=body, arguments=spare)
        made.join()
        assert isinstance(a.error, GroupEnded) and b.error is None
        assert moves(b)[followed[2]] == A and moves(b)[b.steps] == B
        assert sums[:4] == [A] * 4, "its own value is not in the mean"


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
        ranks = [
            made.group(
                name,
                value,
                5,
                body=body,
                arguments={
                    "init_sync": False,
                    "rank": rank,
                    "world_size": 2,
                    "store_addr": "127.0.0.1",
                    "store_port": store.port,
                },
            )
            for name, value, store in (("a", A, stores[0]), ("b", B, stores[1]))
            for rank in range(2)
        ]
        made.join()
        for rank in ranks:
            assert rank.refused == [3] and set(moves(rank).values()) == {mean(A, B)}, rank
            assert rank.bodies == [1, 2, 3, 3, 4, 5]


# ------------------------------------------------------------------------------------------------ one group


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", 1)
    yield server
    server.shutdown()


@pytest.fixture
def alone(lighthouse: LighthouseServer, request: pytest.FixtureRequest) -> Iterator[Group]:
    """A group of its own job, whose loop is the test's."""
    name = re.sub(r"\W", "-", request.node.name)[-64:]
    group = Group(name, A, 0, lighthouse.address(), arguments=getattr(request, "param", {}))
    group._train()  # of no step
    yield group
    group.manager.shutdown()


def step(group: Group) -> None:
    group.optimizer.zero_grad()
    group.backward()
    group.optimizer.step()


def test_gradients_add_up_in_no_sync(alone: Group):
    alone.optimizer.zero_grad()
    with alone.ddp.no_sync():
        alone.backward()
        alone.backward()
    alone.backward()
    assert alone.model.a.grad.tolist() == [3 * A] * 3
    alone.optimizer.step()
    assert alone.manager.current_step() == 1 and alone.model.a.tolist() == [-3 * A] * 3


def test_gradients_go_out_during_the_backward(alone: Group):
    sent: list[bool] = []
    alone.model.a.register_hook(lambda _: sent.append(alone.manager.gradients._in_last_pass))
    with alone.ddp.no_sync():
        alone.optimizer.zero_grad()
        alone.backward()
    alone.backward()
    assert sent == [False, True] and not alone.manager.gradients._in_last_pass


def test_a_second_backward_says_what_to_do(alone: Group):
    alone.optimizer.zero_grad()
    alone.backward()
    with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        alone.backward()


def test_a_backward_that_raised_is_none(alone: Group):
    alone.optimizer.zero_grad()
    loss = alone.ddp(A)["loss"]
    alone.model.b.register_hook(fails)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    alone.model.b._backward_hooks.clear()
    alone.optimizer.zero_grad()  # the body is left; its gradients are dropped
    assert alone.manager.current_step() == 0
    alone.backward()
    alone.optimizer.step()
    assert alone.manager.current_step() == 1 and alone.model.b.tolist() == [[-A] * 2] * 2


def fails(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError


def test_where_a_step_stands(alone: Group):
    """It moves in should_commit and nowhere else; outside of a body nothing can be asked."""
    manager = alone.manager
    assert (manager.current_step(), manager.batches_committed(), manager.num_participants()) == (0, 0, 0)
    assert manager.participating_rank() is None and not manager.is_participating()
    for ask in (manager.should_commit, lambda: manager.allreduce(torch.ones(1))):
        with pytest.raises(RuntimeError, match="without start_quorum"):
            ask()
    manager.start_quorum()
    manager.start_quorum()  # nothing has happened in between
    manager.wait_quorum()
    assert (manager.num_participants(), manager.participating_rank(), manager.is_participating()) == (1, 0, True)
    alone.backward()
    assert (manager.current_step(), manager.step) == (0, 1)
    assert manager.should_commit() and manager.current_step() == manager.batches_committed() == 1


def test_means_and_sums_before_and_after_the_backward(alone: Group):
    manager = alone.manager
    alone.optimizer.zero_grad()
    before, count = torch.tensor([3.0]), torch.tensor([5])
    assert manager.allreduce(before).wait() and manager.allreduce(count, reduce_op=dist.ReduceOp.SUM).wait()
    alone.backward()
    after = torch.tensor([7.0])
    assert manager.allreduce(after, reduce_op=dist.ReduceOp.SUM).wait()
    assert (before.item(), count.item(), after.item()) == (3.0, 5, 7.0)
    alone.optimizer.step()
    assert manager.current_step() == 1
    manager.start_quorum()
    assert manager.allreduce(torch.ones(1)).get_future().wait()[0].item() == 1.0
    with pytest.raises(ValueError, match=r"torch\.int64"):
        manager.allreduce(count)
    with pytest.raises(ValueError, match="MAX is not to be had"):
        manager.allreduce(before, reduce_op=dist.ReduceOp.MAX)


@pytest.mark.parametrize("alone", [{"max_retries": 1}], indirect=True)
def test_errors_of_a_group_that_is_alone_drop_its_steps_until_max_retries(
    alone: Group, monkeypatch: pytest.MonkeyPatch
):
    """A sum after the step was dropped goes nowhere: the others may have gone on."""
    manager = alone.manager
    monkeypatch.setattr(manager, "_sum_late", fails)
    for failures in (1, 0, 1):  # in a row
        for _ in range(failures):
            manager.start_quorum()
            manager.report_error(RuntimeError("not a number"))
            alone.backward()
            assert manager.allreduce(late := torch.tensor([3.0])).wait() and late.item() == 3.0
            assert not manager.should_commit()
        step(alone)
    assert manager.current_step() == 3
    with pytest.raises(Stopped, match="max_failures allows 1"):
        for _ in range(2):
            manager.start_quorum()
            manager.report_error(RuntimeError("not a number"))
            manager.should_commit()


def test_a_step_that_holds_and_was_not_taken_is_counted(alone: Group, caplog: pytest.LogCaptureFixture):
    alone.optimizer.zero_grad()
    alone.backward()
    alone.optimizer.zero_grad()
    assert "step 1 holds, but should_commit was not asked" in caplog.text
    assert alone.manager.current_step() == 1


def test_the_state_of_a_checkpoint_is_json(alone: Group):
    step(alone)
    state = alone.manager.state_dict()
    assert (state["step"], state["batches_committed"]) == (1, 1) and json.loads(json.dumps(state)) == state


def test_torchfts_checkpoints_are_taken(alone: Group):
    alone.manager.load_state_dict({"step": 7, "batches_committed": 20})
    assert (alone.manager.current_step(), alone.manager.batches_committed()) == (7, 20)
    step(alone)
    assert (alone.manager.current_step(), alone.manager.batches_committed()) == (8, 21)


def test_state_has_names_that_are_used_once(alone: Group):
    manager = alone.manager
    manager.register_state_dict_fn("schedule", lambda state: None, dict)
    with pytest.raises(ValueError, match="schedule is registered already"):
        manager.register_state_dict_fn("schedule", lambda state: None, dict)
    manager.set_state_dict_fns(lambda state: None, dict)  # takes the place of the constructor's
    assert manager._state.snapshot().manifest.values.keys() == {"ft", "batches_committed", "default", "schedule"}


def test_a_work_that_is_late_is_told():
    told: list[Exception] = []
    late = GroupWork(AllReduce([torch.ones(1)]))
    work = _Told(late, told.append)
    assert not work.wait(timedelta(seconds=0.001)) and not work.is_completed()
    assert isinstance(told[0], TimeoutError)
    late.end(None)
    assert work.wait() and work.wait(timedelta(seconds=1)) and work.is_success() and len(told) == 1


def test_a_future_that_never_fails(alone: Group):
    wrap = alone.manager.wrap_future
    good: Future[int] = Future()
    wrapped = wrap(good, default=-1)
    assert not wrapped.done()
    good.set_result(5)
    assert wrapped.wait() == 5 and alone.manager.errored() is None
    bad: Future[int] = Future()
    wrapped = wrap(bad, default=-1, timeout=timedelta(seconds=LIMIT_S))
    bad.set_exception(RuntimeError("broken"))
    assert wrapped.wait() == -1 and "broken" in str(alone.manager.errored())
    assert wrap(Future(), default=-1, timeout=timedelta(seconds=0)).wait() == -1


def test_a_quorum_that_does_not_come_in_time():
    with job(min_replicas=2) as made:
        group = Group("a", A, 0, made.lighthouse.address())
        group._train()
        with pytest.raises(Stopped, match=r"no quorum: none within 0\.[12]"):
            group.manager.start_quorum(timeout=timedelta(seconds=0.2))
        group.manager.shutdown()


# ------------------------------------------------------------------------------------------------ what is refused, and what is said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lighthouse_addr": None}, "TORCHFT_LIGHTHOUSE is not set"),
        ({"min_replica_size": 0}, "min_replica_size = 0: must be at least 1"),
        ({"replica_id": "a:b"}, "must be 1 to 64 .*; nearest: a_b"),
        ({"world_size": 2}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"hostname": "no.such.host.invalid"}, r"hostname = no\.such\.host\.invalid: there is no such host"),
        ({"interface": "eth99"}, 'fault_tolerance.interface = "eth99"'),
        ({"heartbeat_interval": timedelta(seconds=5)}, "heartbeat_interval = 5 s"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch):
    for variable in ("TORCHFT_LIGHTHOUSE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match=message):
        Manager(
            ProcessGroupGloo(),
            **{
                "load_state_dict": None,
                "state_dict": None,
                "min_replica_size": 1,
                "lighthouse_addr": "http://127.0.0.1:1",
                **arguments,
            },
        )


def test_what_changes_nothing_is_said_once(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(torchft_manager, "_SAID", set())
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "90")
    group = ProcessGroupGloo(timeout=5)
    more = {"use_async_quorum": True, "enable_error_bus": True, "dies_with_group": False, "replica_id": "said"}
    manager = Manager(group, None, None, 1, lighthouse_addr=lighthouse.address(), **more)
    assert group.timeout_s == 90, "the variable stands above the arguments"
    for _ in range(2):
        manager.start_quorum(allow_heal=False)
        manager.allreduce(torch.ones(1), should_quantize=True).wait()
        assert manager.should_commit(timeout=timedelta(seconds=1))
    manager.shutdown()
    manager.shutdown()
    said = [record.getMessage() for record in caplog.records if record.name == "pharos.torchft"]
    assert [text.partition(" changes nothing")[0] for text in said] == [
        "Manager(use_async_quorum=True)",
        "Manager(enable_error_bus=True)",
        "start_quorum(allow_heal=False)",
        "allreduce(should_quantize=True)",
        "should_commit(timeout=...)",
    ]


# ------------------------------------------------------------------------------------------------ Optimizer and DistributedDataParallel


class FakeManager:
    """Answers as it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.holds = True

    def start_quorum(self) -> None:
        self.calls.append("start_quorum")

    def should_commit(self) -> bool:
        self.calls.append("should_commit")
        return self.holds

    def attach(self, parts: list[nn.Module]) -> None:
        self.calls.append("attach")

    def backward_begins(self) -> None:
        self.calls.append("begins")

    def backward_ended(self) -> None:
        self.calls.append("ended")


def test_the_optimizer_steps_only_if_the_step_holds():
    manager, model = FakeManager(), nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters(), lr=0.5)
    optimizer = Optimizer(manager, inner)  # type: ignore[arg-type]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    before = [p.clone() for p in model.parameters()]
    optimizer.zero_grad()
    assert inner.state and all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    model(torch.ones(2)).sum().backward()
    manager.holds = False
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    manager.holds = True
    optimizer.step()
    assert not torch.equal(model.weight, before[0]) and manager.calls == ["start_quorum", *["should_commit"] * 2]
    schedule.step()
    assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)


@dataclass
class Output:
    loss: Tensor
    count: int = 3


class Shapes(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.ones(2)), make

    def forward(self, x: float) -> Any:
        return self.make((self.weight * x).sum())


@pytest.mark.parametrize(
    "make",
    [lambda loss: loss, lambda loss: [{"a": loss}, "text"], lambda loss: Output(loss), lambda loss: (loss, loss)],
)
def test_a_backward_is_seen_whatever_the_module_returns(make: Callable[[Tensor], Any]):
    manager = FakeManager()
    ddp = DistributedDataParallel(manager, Shapes(make))  # type: ignore[arg-type]
    assert set(ddp.state_dict()) == {"module.weight"}  # as torch's has it
    for _ in range(2):
        returned = ddp(2.0)
        losses = list(_tensors(returned))
        sum(losses).backward()
    with torch.no_grad():
        ddp(2.0)
    with ddp.no_sync():
        next(_tensors(ddp(2.0))).backward()
    assert manager.calls == ["attach", *["begins", "ended"] * 2]


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ValueError, match="no parameter to train"):
        DistributedDataParallel(FakeManager(), nn.Identity())  # type: ignore[arg-type]
