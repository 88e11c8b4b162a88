"""examples/distributed_basics.py, run as its docstring describes: each printed line; the exit status if a rank fails."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from examples.distributed_basics import partition
from tests.scripts.tiny_job import ROOT, finished

PROGRAM = ROOT / "examples" / "distributed_basics.py"
ENV = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}  # without GPUs: the same backend on every machine
LINES = """\
env://: 3 ranks form a group with gloo
tcp://: 3 ranks form a group with gloo
file://: 3 ranks form a group with gloo
store: 3 ranks form a group with gloo
barrier: 3 ranks wait for each other
send, recv: a sum passes through 3 ranks
isend, irecv: 3 ranks, the first sends to all others at once
new_group: even and odd of 3 ranks have separate sums
broadcast: 3 ranks have the last one's tensor
scatter: 3 ranks have one each of the last one's tensors
gather: the last of 3 ranks has all
reduce: the last of 3 ranks has the sum
all_reduce: 3 ranks have the SUM
all_reduce: 3 ranks have the PRODUCT
all_reduce: 3 ranks have the MIN
all_reduce: 3 ranks have the MAX
all_gather: 3 ranks have one tensor of each
reduce_scatter: 3 ranks have one sum each
all_to_all: 3 ranks swap their tensors
ring all-reduce: 3 ranks, equals all_reduce
partition: 3 ranks, each sample in one part
training: 3 ranks, the weights of one process on the whole batch
"""


def wrong(rank: int, size: int) -> None:
    """Fails on one rank, while the other waits for it."""
    from examples.distributed_basics import check

    check(rank == 0, f"one of {size} ranks computes something else")


def killed(rank: int, size: int) -> None:
    """Kills one rank without a message, as if the machine had run out of memory."""
    import torch.distributed as dist

    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.timeout(120)
def test_every_line():
    assert finished([sys.executable, PROGRAM, "--ranks", "3"], **ENV).stdout == LINES


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("part", "cause"),
    [pytest.param("wrong", "AssertionError: one of 2 ranks", marks=pytest.mark.long), ("killed", "SIGKILL")],
)
def test_a_rank_that_fails_fails_the_program(part: str, cause: str):
    imports = f"from examples.distributed_basics import main; from tests.scripts.test_distributed_basics import {part}"
    done = finished([sys.executable, "-c", f"{imports}; main(2, ({part},))"], code=1, **ENV)
    assert cause in done.stderr
    assert done.stdout.splitlines()[-1].startswith("barrier: 2 ranks")


def test_parts_of_the_data():
    """Parts have equal length, without repetition, at most size - 1 samples are left out; the order depends only on the seed."""
    for samples, size in ((12, 3), (13, 3), (14, 3), (2, 3)):
        parts = [partition(samples, rank, size, seed=1) for rank in range(size)]
        assert {len(part) for part in parts} == {samples // size}
        assert len(set().union(*parts)) == samples // size * size
    assert partition(100, 1, 2, seed=1) == partition(100, 1, 2, seed=1) != partition(100, 1, 2, seed=2)


def test_it_is_short():
    assert len(PROGRAM.read_text(encoding="utf-8").splitlines()) <= 200
