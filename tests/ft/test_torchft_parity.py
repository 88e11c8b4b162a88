"""The cases of torchft's own Manager tests, run on ours: the rows of tests/README.md that the other files here do not cover."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.futures import Future

from ft import Manager
from ft.seam import Stopped
from tests.ft.torchft_groups import LIMIT_S, Group, fetch_late, job, manager_of, moves

A, B = 4.0, 16.0
FOR_EVER = 1 << 30


# ------------------------------------------------------------------------------------------------ one group


@contextmanager
def alone(min_replicas: int = 1, **arguments: Any) -> Iterator[Manager]:
    """Yields a manager in a job of its own, which begins with `min_replicas` groups."""
    with job(min_replicas=min_replicas) as made:
        manager = manager_of("alone", made.lighthouse, torch.nn.Module(), **arguments)
        try:
            yield manager
        finally:
            manager.shutdown()


@pytest.fixture(scope="module")
def manager() -> Iterator[Manager]:
    """A manager between two steps."""
    with alone() as made:
        yield made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_what_is_averaged_and_what_is_summed(manager: Manager, dtype: torch.dtype):
    manager.start_quorum()
    tensor = torch.tensor([10], dtype=dtype)
    assert manager.allreduce(tensor, reduce_op=torch.distributed.ReduceOp.SUM).wait() and tensor.item() == 10
    if dtype.is_floating_point:
        assert manager.allreduce(tensor).wait() and tensor.item() == 10
    else:
        with pytest.raises(ValueError, match=r"torch\.int64"):
            manager.allreduce(tensor)
    for operation in ("MAX", "MIN", "PRODUCT"):
        with pytest.raises(ValueError, match="AVG or SUM"):
            manager.allreduce(tensor, reduce_op=getattr(torch.distributed.ReduceOp, operation))
    assert manager.should_commit()


def test_a_group_that_fails_inside_a_step_is_made_anew(manager: Manager):
    """The same values are summed again; torchft drops the step."""
    manager.start_quorum()
    before = manager.core.quorum
    manager.core.process_group.abandon("injected failure")
    tensor = torch.tensor([5.0])
    assert manager.allreduce(tensor).wait(), "no exception in the user's code"
    assert manager.should_commit() and tensor.item() == 5.0
    assert before and manager.core.quorum and manager.core.quorum.quorum_id > before.quorum_id
    manager.start_quorum()
    assert manager.allreduce(tensor).wait() and manager.should_commit()


def test_callbacks_run_in_order_when_the_sum_is_there(manager: Manager):
    """Each callback gets the result of the one before."""
    manager.start_quorum()
    order: list[str] = []

    def first(future: Future[Any]) -> float:
        order.append("first")
        return float(future.value()[0].item())

    def second(future: Future[float]) -> str:
        order.append("second")
        return f"mean {future.value()}"

    work = manager.allreduce(torch.tensor([7.0]))
    last = work.get_future().then(first).then(second)
    assert work.wait() and last.wait() == "mean 7.0"
    assert order == ["first", "second"]
    assert work.wait(timedelta(seconds=LIMIT_S)), "it has ended: no limit counts"
    assert manager.should_commit()


def test_a_callback_may_come_from_another_thread(manager: Manager):
    """The chain is built before the work ends."""
    gate, pending = threading.Event(), Future[int]()
    ran: list[int] = []

    def callback(future: Future[int]) -> int:
        ran.append(future.value())
        return 2

    manager.start_quorum()
    last = manager.wrap_future(pending, -1).then(callback)
    thread = threading.Thread(target=lambda: gate.wait(LIMIT_S) and pending.set_result(1))
    thread.start()
    assert not ran
    gate.set()
    assert last.wait() == 2 and ran == [1] and manager.errored() is None
    thread.join(LIMIT_S)
    assert manager.should_commit()


def test_a_future_that_fails_has_its_default_and_is_reported(manager: Manager):
    manager.start_quorum()
    failing: Future[int] = Future()
    wrapped = manager.wrap_future(failing, 2)
    error = RuntimeError("injected failure")
    failing.set_exception(error)
    assert wrapped.wait() == 2 and manager.errored() is not None and "injected failure" in str(manager.errored())
    assert not manager.should_commit(), "there is nobody else to take the step"
    manager.start_quorum()
    assert manager.errored() is None and manager.should_commit()


def test_a_future_that_is_late_is_reported(manager: Manager):
    manager.start_quorum()
    late = Future[int]()
    wrapped = manager.wrap_future(late, 3, timedelta(milliseconds=10))
    assert wrapped.wait() == 3
    assert isinstance(manager.errored(), TimeoutError)
    late.set_result(4)
    assert wrapped.wait() == 3, "it comes too late"
    assert not manager.should_commit()


def test_a_future_that_never_ends_takes_no_longer_than_the_manager_allows():
    with alone(timeout=timedelta(milliseconds=10)) as manager:
        manager.start_quorum()
        assert manager.wrap_future(Future[int](), 3).wait() == 3
        assert isinstance(manager.errored(), TimeoutError) and not manager.should_commit()


def test_without_a_timeout_of_the_manager_a_future_has_that_of_its_process_group():
    with alone(timeout=timedelta(0)) as manager:
        manager.start_quorum()
        future, before = Future[int](), {*threading.enumerate()}
        wrapped = manager.wrap_future(future, 3)
        [timer] = {thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)} - before
        future.set_result(4)
        assert wrapped.wait() == 4 and timer.interval == manager.core.process_group.timeout_s > 0
        assert manager.errored() is None and manager.should_commit()


@pytest.mark.parametrize("pending", [True, False])
def test_a_future_that_ends_within_its_timeout_is_not_reported(manager: Manager, pending: bool):
    manager.start_quorum()
    future = Future[int]()
    if not pending:
        future.set_result(4)
    wrapped = manager.wrap_future(future, 3, timedelta(seconds=LIMIT_S))
    if pending:
        future.set_result(4)
    assert wrapped.wait() == 4 and manager.errored() is None
    assert manager.should_commit()


def test_a_quorum_that_does_not_come_in_time():
    with alone(min_replicas=2) as manager, pytest.raises(Stopped, match=r"no quorum: none within [\d.]+ s"):
        manager.start_quorum(timeout=timedelta(milliseconds=10))


def test_too_many_failures_in_a_row_end_it():
    def fails(manager: Manager) -> bool:
        manager.start_quorum()
        manager.report_error(RuntimeError("injected failure"))
        return not manager.should_commit()

    with alone(max_retries=2) as manager:
        assert fails(manager) and fails(manager)
        manager.start_quorum()
        assert manager.should_commit(), "one that holds: they are counted anew"
        assert fails(manager) and fails(manager)
        with pytest.raises(Stopped, match="max_retries allows 2"):
            fails(manager)


def test_a_checkpoint_of_torchft_is_taken_up():
    with alone() as manager:
        assert {"step": 0, "batches_committed": 0}.items() <= manager.state_dict().items()
        manager.load_state_dict({"step": 1234, "batches_committed": 2345})
        assert (manager.current_step(), manager.batches_committed()) == (1234, 2345)
        manager.start_quorum()
        assert manager.should_commit()
        state = manager.state_dict()
        assert {"step": 1235, "batches_committed": 2346}.items() <= state.items()
        assert json.loads(json.dumps(state)) == state


# ------------------------------------------------------------------------------------------------ several groups


def test_without_init_sync_all_give_from_the_first_step():
    first: dict[str, float] = {}

    def body(group: Group) -> None:
        group.backward()
        first.setdefault(group.name, group.model.a.grad[0].item())

    with job(min_replicas=2) as made:
        for name, value in (("a", A), ("b", B)):
            made.group(name, value, 3, body=body, arguments={"init_sync": False})
        made.join()
    assert first == {"a": (A + B) / 2, "b": (A + B) / 2}


@contextmanager
def newcomer(at: Callable[[Group], None], body: Callable[[Group], None]) -> Iterator[tuple[Group, Group]]:
    """b comes when a has made two steps, and heals. They train until three steps are both's. `at`: before the first quorum of each."""
    begun = threading.Event()

    def before(group: Group) -> None:
        if group.manager.num_participants() == 0:
            at(group)
        if group.manager.current_step() == 2:
            begun.set()

    def both(group: Group) -> None:
        body(group)
        if group.name == "b" and group.manager.num_participants() == 2 and b.steps == FOR_EVER:
            a.steps = b.steps = group.bodies[-1] + 2  # a is in the same step, and waits for b
        group.backward()

    with job() as made:
        a = made.group("a", A, FOR_EVER, at=before, body=both)
        assert begun.wait(LIMIT_S)
        b = made.group("b", B, FOR_EVER, at=before, body=both, initial=9.0)
        made.join()
        assert a.refused == b.refused == [] and moves(a)[a.steps] == moves(b)[b.steps] == (A + B) / 2
        assert b.bodies[0] == min(b.weights) > 2, "no body on a state that is half there"
        yield a, b


def test_a_newcomer_gets_all_that_was_registered():
    """A newcomer gets each state under its name, beside the constructor's; a second use of a name is an error."""
    got: list[dict[str, int]] = []

    def at(group: Group) -> None:
        group.manager.set_state_dict_fns(group.model.load_state_dict, group.model.state_dict)  # it may be set again
        mine = {"turn": 7 if group.name == "a" else 0}
        group.manager.register_state_dict_fn("extra", got.append, lambda: mine)
        with pytest.raises(ValueError, match="extra"):
            group.manager.register_state_dict_fn("extra", got.append, lambda: mine)

    with newcomer(at, lambda group: None):
        assert got == [{"turn": 7}]


def test_the_state_may_change_once_reading_is_disallowed():
    """b reads when a has changed it, and gets what was there at the step's beginning."""
    extra, got, changed = torch.zeros(1 << 18), list[float](), threading.Event()

    def at(group: Group) -> None:
        fetch_late(group, changed)
        mine = {"t": extra if group.name == "a" else torch.zeros_like(extra)}
        group.manager.register_state_dict_fn("extra", lambda state: got.append(state["t"].mean().item()), lambda: mine)

    def body(group: Group) -> None:
        if group.name == "a":
            group.manager.disallow_state_dict_read()
            extra.fill_(group.bodies[-1])
            group.manager.allow_state_dict_read()
            if group.manager.core.quorum and len(group.manager.core.quorum.members) == 2:
                changed.set()

    with newcomer(at, body) as (_, b):
        assert got == [b.bodies[0] - 1], "the step that it healed to, not the one in whose body it came"
