"""NCCL groups, in this process and in a child: works end when the device is done, and a child can be killed wherever it is.

One device has one rank: NCCL refuses two. What needs a peer inside a collective is in test_two_devices.py.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ft.process_groups.baby import ProcessGroupBabyNCCL
from ft.process_groups.base import ProcessGroup
from ft.process_groups.errors import Abandoned, RendezvousFailed
from ft.process_groups.forming import Rendezvous
from ft.process_groups.nccl import ProcessGroupNCCL
from ft.process_groups.store import serve
from tests.gpu.devices import free_bytes, one_device, spin
from tests.waiting import in_time

pytestmark = [one_device, pytest.mark.timeout(300)]

KINDS = [ProcessGroupNCCL, ProcessGroupBabyNCCL]
ELEMENTS = 1 << 20
LENT_BYTES = 1 << 30
SLACK_BYTES = 64 << 20  # less than a CUDA context, which a child that is left behind would hold
_generations = itertools.count()


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    server = serve()
    yield f"127.0.0.1:{server.port}"


def alone(kind: type[ProcessGroup], store: str) -> ProcessGroup:
    """A group of one member, formed."""
    group = kind(timeout=120.0, rendezvous_s=120.0)
    again(group, store)
    return group


def again(group: ProcessGroup, store: str) -> None:
    group.prepare()
    group.configure(f"{store}/{next(_generations)}", 0, 1)


def copies(group: ProcessGroup) -> bool:
    """Runs an all-gather of one member: its output is a copy of its input."""
    given, got = filled(0.0).copy_(torch.arange(float(ELEMENTS))), filled(0.0)
    group.all_gather_single(got, given).wait()
    return bool(got.equal(given))


def filled(value: float, elements: int = ELEMENTS) -> torch.Tensor:
    """Returns memory that a child can map, whatever PYTORCH_ALLOC_CONF is."""
    return ProcessGroupBabyNCCL.empty(elements, device="cuda").fill_(value)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_a_future_completes_after_the_physical_end(kind: type[ProcessGroup], store: str) -> None:
    group = alone(kind, store)
    assert copies(group)  # what is loaded at the first use is loaded
    given, got = filled(0.0), filled(0.0)
    torch.cuda.synchronize()
    written = spin(2.0)
    given.fill_(3.0)
    work = group.all_gather_single(got, given)
    future = work.get_future()
    assert not written.query(), "the kernel was to be under way still"
    assert not future.done() and not work.is_completed()
    future.wait()
    with torch.cuda.stream(torch.cuda.Stream()):  # ordered after nothing: it reads what is there now
        seen = got.clone()
        torch.cuda.current_stream().synchronize()
    assert written.query() and work.is_completed()
    assert bool(seen.eq(3.0).all())
    group.shutdown()


def test_a_child_behind_a_spinning_kernel_is_killed_and_the_next_one_works(store: str) -> None:
    before = free_bytes()
    group = alone(ProcessGroupBabyNCCL, store)
    assert isinstance(group, ProcessGroupBabyNCCL) and group.child is not None
    assert copies(group)
    first, held = group.child.pid, before - free_bytes()
    assert held > SLACK_BYTES, f"the child has a context of its own, yet {held} bytes went"
    torch.cuda.synchronize()
    spun = spin(20.0)
    lent = filled(1.0, LENT_BYTES // 4)
    work = group.allreduce([lent])  # the child waits for the kernel, on the device
    group.abandon("the test wants it")
    with pytest.raises(Abandoned):
        work.wait()
    assert group.reaper.wait(60) and in_time(lambda: is_gone(first))
    assert not spun.query(), "nobody waits for the kernel"
    with torch.cuda.stream(torch.cuda.Stream()):  # the kernel is the other stream's
        again(group, store)
        assert copies(group)
        assert not spun.query(), "nor does the next generation"
    group.shutdown()
    torch.cuda.synchronize()
    del lent, work
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()  # the end of the group has given back what the killed child had counted
    assert in_time(lambda: before - free_bytes() < SLACK_BYTES), f"{before - free_bytes()} bytes are missing"


def test_a_child_is_killed_while_its_communicator_waits_for_a_rank_that_never_comes(store: str) -> None:
    before = free_bytes()
    group = ProcessGroupBabyNCCL(timeout=120.0, rendezvous_s=120.0)
    group.prepare()
    place = f"{store}/{next(_generations)}"
    other = Rendezvous(lambda it: pytest.fail("it builds nothing"), place, 1, 2, 120.0)
    with ThreadPoolExecutor(1) as threads:
        forming = threads.submit(group.configure, place, 0, 2)
        other.all_gather(0)  # it says that it is there, and then nothing
        # A context: it is in the constructor, connects, or waits in its first sum, within the time of the rendezvous.
        assert in_time(lambda: group.child is not None and before - free_bytes() > SLACK_BYTES)
        assert group.child is not None
        pid = group.child.pid
        group.abandon("the test wants it")
        with pytest.raises(RendezvousFailed):
            forming.result(60)
    assert group.reaper.wait(60) and in_time(lambda: is_gone(pid))
    assert in_time(lambda: before - free_bytes() < SLACK_BYTES), f"{before - free_bytes()} bytes are missing"
    again(group, store)
    assert copies(group)
    group.shutdown()


def test_a_group_in_this_process_is_abandoned_behind_a_spinning_kernel(store: str) -> None:
    group = alone(ProcessGroupNCCL, store)
    assert copies(group)
    torch.cuda.synchronize()
    spun, freed = spin(5.0), threading.Event()
    work = group.allreduce([torch.ones(ELEMENTS, device="cuda")])
    group.abandon("the test wants it", then=freed.set)
    with pytest.raises(Abandoned):
        work.wait()
    assert not spun.query(), "who waits is woken at once"
    assert freed.wait(60) and group.reaper.wait(60)
    again(group, store)
    assert copies(group)
    group.shutdown()
