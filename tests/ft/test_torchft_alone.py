"""torchft's names over the Manager, in one group that is alone: how a step goes, what is summed, saved and told."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from ft import DistributedDataParallel, LighthouseServer, Manager, ProcessGroupGloo
from ft.compat import manager as torchft_manager
from ft.compat.process_groups import ProcessGroupDummy
from ft.process_groups.base import GroupWork, Operation
from ft.process_groups.errors import ProcessGroupError
from ft.protocol import messages as m
from ft.seam import Stopped
from tests.ft.groups import LIMIT_S
from tests.ft.torchft_groups import Group
from tests.waiting import in_time

ROOT = Path(__file__).resolve().parents[2]
A = 4.0  # the gradient


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", 1)
    yield server
    server.shutdown()


@pytest.fixture
def alone(lighthouse: LighthouseServer, request: pytest.FixtureRequest) -> Iterator[Group]:
    """A group in a job of its own, whose loop is the test's."""
    name = request.node.name.replace("[", ".").strip("]")
    group = Group(name[-64:], A, 0, lighthouse.address())
    group.train()  # of no step
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


@pytest.mark.parametrize(("kept", "one"), [(None, False), (False, False), (True, True)])
def test_buffers_that_a_forward_changes_come_from_one_group(lighthouse: LighthouseServer, kept: bool | None, one: bool):
    """Groups have different ones, so that two sources would never agree. `kept`: the buffer is part of the state; None: there is none."""
    module = nn.Linear(2, 2)
    if kept is not None:
        module.register_buffer("mean", torch.zeros(2), persistent=kept)
    given = {"lighthouse_addr": lighthouse.address(), "replica_id": f"buffers-{kept}", "dies_with_group": False}
    manager = Manager(ProcessGroupGloo(), None, None, 1, **given)
    DistributedDataParallel(manager, module)
    assert manager.core.healer.one_source == one
    manager.shutdown()


def test_a_second_backward_says_what_to_do(alone: Group):
    alone.optimizer.zero_grad()
    alone.backward()
    with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        alone.backward()


@pytest.mark.parametrize("reports", [True, False])
def test_a_backward_that_raised_is_none(alone: Group, reports: bool):
    """The error is reported and the body ends, or the body is left. In both cases its gradients are dropped."""
    alone.optimizer.zero_grad()
    loss = alone.ddp(A)["loss"]
    hook = alone.model.b.register_hook(fails)
    with pytest.raises(ZeroDivisionError) as raised:
        loss.backward()
    hook.remove()
    if reports:
        alone.manager.report_error(raised.value)
        alone.optimizer.step()
    alone.optimizer.zero_grad()
    assert alone.manager.current_step() == 0
    value = torch.tensor([3.0])
    assert alone.manager.allreduce(value).wait() and value.item() == 3.0
    with alone.ddp.no_sync():
        alone.backward()
    alone.backward()
    alone.optimizer.step()
    assert alone.manager.current_step() == 1 and alone.model.b.tolist() == [[-2 * A] * 2] * 2


def fails(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError


def test_where_a_step_stands(alone: Group):
    """The step moves in should_commit and nowhere else; calls outside of a step's body are refused."""
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
    assert (manager.current_step(), manager.core.step) == (0, 1)
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
    for refused, message in ((count, r"torch\.int64"), (torch.ones(1).expand(4), "overlapping memory")):
        with pytest.raises(ValueError, match=message):
            manager.allreduce(refused)
    alone.optimizer.step()
    for op in (dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        assert manager.allreduce(after, reduce_op=op).wait() and after.item() == 7.0
    assert manager.current_step() == 1
    manager.start_quorum()
    assert manager.allreduce(torch.ones(1)).get_future().wait()[0].item() == 1.0
    manager.report_error(RuntimeError("injected failure"))
    assert not manager.should_commit() and manager.current_step() == 1
    assert manager.allreduce(after).wait() and after.item() == 7.0, "of a dropped step nothing is sent"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(3, dtype=torch.int16), r"torch\.int16: ProcessGroupGloo cannot reduce it"),
        (torch.ones(3).to(torch.float8_e4m3fn), r"torch\.float8_e4m3fn"),
        (torch.ones(3, device="meta"), r"\(3,\) on meta: ProcessGroupGloo reduces tensors on cpu"),
    ],
    ids=["int16", "float8", "meta"],
)
def test_a_tensor_that_can_never_be_reduced_is_refused(alone: Group, tensor: torch.Tensor, message: str):
    """Its reduction would fail in each generation, in all groups, and should_commit would never return."""
    manager = alone.manager
    manager.start_quorum()
    with pytest.raises(ValueError, match=message):
        manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM)
    with pytest.raises(ValueError, match="on meta"):
        manager.attach([nn.Linear(2, 2, device="meta")])
    assert manager.should_commit()
    manager.start_quorum()
    for dtype in (torch.bool, torch.int8, torch.uint8, torch.int32, torch.complex64, torch.bfloat16):
        value = torch.ones(3, dtype=dtype)
        assert manager.allreduce(value, reduce_op=dist.ReduceOp.SUM).wait() and value.all()
    assert manager.should_commit()


def test_a_process_group_of_another_kind_may_reduce_any_tensor(lighthouse: LighthouseServer):
    given = {"lighthouse_addr": lighthouse.address(), "replica_id": "any", "dies_with_group": False}
    manager, value = Manager(ProcessGroupDummy(), None, None, 1, **given), torch.ones(3, dtype=torch.int16)
    manager.start_quorum()
    assert manager.allreduce(value, reduce_op=dist.ReduceOp.SUM).wait() and value.tolist() == [1, 1, 1]
    assert manager.should_commit()
    manager.shutdown()


def test_a_sum_that_fails_after_the_step_leaves_its_memory_alone(lighthouse: LighthouseServer):
    """Its engine may write to that memory for a while yet: the next sum of its size takes another."""
    sums: list[torch.Tensor] = []

    class Fails(ProcessGroupGloo):
        def launch(self, operation: Operation) -> dist.Work:
            if operation.outputs()[0].numel() != 7:
                return super().launch(operation)
            sums.extend(operation.outputs())
            work = GroupWork("AllReduce", operation.outputs())
            work.end(ProcessGroupError("interrupted") if len(sums) == 1 else None)
            return work

    given = {"lighthouse_addr": lighthouse.address(), "replica_id": "late", "dies_with_group": False}
    manager = Manager(Fails(), None, None, 1, **given)
    manager.start_quorum()
    manager.backward_begins()
    manager.backward_ended()
    values = [torch.full((7,), float(number)) for number in range(3)]
    for value in values:
        assert manager.allreduce(value).wait()
    assert [value[0].item() for value in values] == [0.0, 1.0, 2.0]
    first, second, third = (memory.data_ptr() for memory in sums)
    assert first != second == third
    assert manager.should_commit()
    manager.shutdown()


def test_a_step_that_holds_and_was_not_taken_is_counted(alone: Group, caplog: pytest.LogCaptureFixture):
    alone.optimizer.zero_grad()
    alone.backward()
    alone.optimizer.zero_grad()
    assert "step 1 is committed, but should_commit was not called" in caplog.text
    assert alone.manager.current_step() == 1


def test_a_work_that_is_late_is_told():
    told: list[Exception] = []
    work = GroupWork("AllReduce", [torch.ones(1)])
    work.on_timeout = told.append
    assert not work.wait(timedelta(seconds=0.001)) and not work.is_completed()
    assert isinstance(told[0], TimeoutError)
    work.end(None)
    assert work.wait() and work.wait(timedelta(seconds=1)) and work.is_success() and len(told) == 1


PROGRAM = """
import sys
from ft import Manager, ProcessGroupGloo
manager = Manager(ProcessGroupGloo(), None, None, 1, lighthouse_addr=sys.argv[1], replica_id="program")
manager.start_quorum()
assert manager.should_commit()
"""


@pytest.mark.parametrize(
    ("end", "clean"), [("", True), ("raise KeyError", False), ("manager.start_quorum(); sys.exit(1)", False)]
)
def test_a_program_that_ends_without_shutdown_has_left(end: str, clean: bool):
    """The group's server would announce a loss otherwise, and kill the group's other ranks, which may still save something. After an
    error, and inside a step, it does: they may wait for this rank."""
    seen: list[m.Event] = []
    server = LighthouseServer("127.0.0.1:0", 1, observer=lambda now_s, event, out: seen.append(event))
    try:
        ended = subprocess.run([sys.executable, "-c", PROGRAM + end, server.address()], cwd=ROOT, timeout=LIMIT_S)
        closed = in_time(lambda: any(isinstance(event, m.StreamClosed) for event in seen))
        assert ended.returncode == (not clean) and closed
        assert any(isinstance(event, m.Leave) and event.clean for event in seen) == clean
    finally:
        server.shutdown()


@pytest.mark.parametrize(("options", "warns"), [({}, True), ({"insecure": True}, False)])
def test_a_lighthouse_that_others_cannot_reach_warns(
    options: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
):
    server = LighthouseServer("0.0.0.0:0", 1, **options)
    server.shutdown()
    assert server.address().startswith("http://localhost:") == ("listens on localhost only" in caplog.text) == warns


def test_a_store_that_is_given_is_used_although_torch_has_one():
    """A given store is preferred, as torch's may span all replica groups."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store.set("ft/0/group", json.dumps({"replica_id": "own:1", "address": "http://127.0.0.1:1"}))
    more = {"lighthouse_addr": "http://127.0.0.1:1", "rank": 1, "world_size": 2, "dies_with_group": False}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        given = {"store_addr": "127.0.0.1", "store_port": store.port}
        manager = Manager(ProcessGroupGloo(), None, None, 1, **given, **more)
    finally:
        dist.destroy_process_group()
    assert manager.replica_id == "own:1"
    manager.shutdown()


def test_the_variable_with_the_number_of_retries_stands_above_the_argument(monkeypatch: pytest.MonkeyPatch):
    """The argument, no limit, would make the Manager repeat its request forever."""
    monkeypatch.setenv("TORCHFT_QUORUM_RETRIES", "0")
    server = LighthouseServer("127.0.0.1:0", 1)
    given = {"lighthouse_addr": server.address(), "replica_id": "retries", "dies_with_group": False}
    manager = Manager(ProcessGroupGloo(), None, None, 1, quorum_retries=-1, **given)
    server.shutdown()
    with pytest.raises(Stopped, match="the lighthouse did not answer in 1 tries"):
        manager.start_quorum(timeout=timedelta(seconds=LIMIT_S))
    manager.shutdown()


def test_a_port_that_is_given_stands_above_its_variable(lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch):
    """Groups on one host may have a port each, as in torchft."""
    given = {"lighthouse_addr": lighthouse.address(), "replica_id": "ports", "dies_with_group": False}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("TORCHFT_MANAGER_PORT", str(taken.getsockname()[1]))
        manager = Manager(ProcessGroupGloo(), None, None, 1, port=0, **given)
        manager.shutdown()
        with pytest.raises(OSError, match="the group server ended"):
            Manager(ProcessGroupGloo(), None, None, 1, **given)


def test_the_others_wait_in_a_reduction_as_long_as_a_heal_may_take(lighthouse: LighthouseServer):
    group, times = ProcessGroupGloo(timeout=5), m.Timeouts(heal_grace_s=300.0, takeover_s=300.0)
    Manager(group, None, None, 1, lighthouse_addr=lighthouse.address(), replica_id="long", times=times).shutdown()
    assert group.timeout_s == 305


def test_what_changes_nothing_is_said_once(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    torchft_manager.say_once.cache_clear()
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "90")
    group = ProcessGroupGloo(timeout=5)
    more = {"use_async_quorum": True, "enable_error_bus": True, "dies_with_group": False, "replica_id": "said"}
    manager = Manager(group, None, None, 1, lighthouse_addr=lighthouse.address(), **more)
    assert group.timeout_s == 90, "the variable stands above the arguments"
    for _ in range(2):
        manager.start_quorum(allow_heal=False)
        assert manager.should_commit(timeout=timedelta(seconds=1))
    manager.shutdown()
    manager.shutdown()
    said = [record.getMessage() for record in caplog.records if record.name == "pharos.torchft"]
    assert [text.partition(" has no effect")[0] for text in said] == [
        "Manager(use_async_quorum=True)",
        "Manager(enable_error_bus=True)",
        "start_quorum(allow_heal=False)",
        "should_commit(timeout=...)",
    ]
