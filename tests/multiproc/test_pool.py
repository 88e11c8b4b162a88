"""The pool itself: results by rank, failures with their traceback, and a pool that works after them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.multiproc.pool import Pool, WorkerError


def total(offset: float) -> tuple[int, float]:
    value = torch.tensor(float(dist.get_rank()) + offset)
    dist.all_reduce(value)
    return os.getpid(), value.item()


def one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 cannot go on")
    dist.barrier()


def one_dies() -> None:
    if dist.get_rank() == 1:
        print("about to go", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_cannot_form_the_next() -> None:
    """Lets the next gloo group fail on rank 0, as with a peer that has already gone: after torch has counted the group."""
    if dist.get_rank() == 0:
        distributed_c10d.ProcessGroupGloo = _gone  # type: ignore[assignment,misc]


def _gone(*_: object, **__: object) -> None:
    raise RuntimeError("the peer has gone")


class Interrupted(BaseException):
    """Raised in the middle of a run, as pytest-timeout raises."""


def interrupts(pid: int, one_is_dead: bool) -> None:
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        with contextlib.suppress(ProcessLookupError):
            while one_is_dead:
                os.kill(pids[1], 0)
                os.sched_yield()
        os.kill(pid, signal.SIGUSR1)
    elif one_is_dead:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def one_never_comes() -> None:
    if dist.get_rank() == 0:
        signal.pause()


def test_results_come_by_rank_and_workers_are_kept(pool: Pool) -> None:
    first = pool.run(2, total, 0.5)
    again = pool.run(2, total, 1.0)
    assert [value for _, value in first] == [2.0, 2.0]
    assert [value for _, value in again] == [3.0, 3.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in again]


def test_the_traceback_of_the_rank_that_raised_is_shown(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r'rank 1 of 2: Traceback(.|\n)*raise ValueError\("rank 1 cannot go on"\)'):
        pool.run(2, one_raises)
    assert [value for _, value in pool.run(2, total, 0.0)] == [1.0, 1.0]


def test_a_dead_worker_is_told_with_its_last_output_and_replaced(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 of 2: died \(exit code -9\)(.|\n)*about to go"):
        pool.run(2, one_dies)
    assert [value for _, value in pool.run(2, total, 0.0)] == [1.0, 1.0]


@pytest.mark.parametrize("one_is_dead", [False, True])
def test_the_answers_of_a_run_that_was_interrupted_are_not_those_of_the_next(
    pool: Pool, capsys: pytest.CaptureFixture[str], one_is_dead: bool
) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            pool.run(2, interrupts, os.getpid(), one_is_dead)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert re.search(r"rank 0 of 2: its last output:(.|\n)* in interrupts", capsys.readouterr().out)
    assert [value for _, value in pool.run(2, total, 0.0)] == [1.0, 1.0]


def test_a_rank_whose_group_could_not_be_made_is_replaced(pool: Pool) -> None:
    """The rank is replaced, as it would stay out of step with the others: torch names a group by the number of groups begun."""
    pool.run(2, one_cannot_form_the_next)
    with pytest.raises(WorkerError, match=r"rank 0 of 2: Traceback(.|\n)*the peer has gone"):
        pool.run(2, total, 0.0, timeout_s=2.0)
    assert [value for _, value in pool.run(2, total, 0.0)] == [1.0, 1.0]


def test_a_rank_that_does_not_come_back_is_killed_and_replaced(pool: Pool) -> None:
    stacks = ["still running when the time was over", " in one_never_comes", "ProcessGroupGloo::runLoop"]
    with pytest.raises(WorkerError, match=r"rank 0 of 2: " + r"(.|\n)*".join(stacks[: 2 + (sys.platform == "linux")])):
        pool.run(2, one_never_comes, timeout_s=1.0)
    assert [value for _, value in pool.run(2, total, 0.0)] == [1.0, 1.0]
