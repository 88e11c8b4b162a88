"""Users' tensors and futures on streams of their own: a wait makes visible what was queued on another stream."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.futures import Future

from ft import LighthouseServer, Manager, ProcessGroupNCCL
from ft.buckets import BufferPool
from ft.process_groups.store import serve
from ft.user_allreduce import UserAllreduce
from tests.gpu.devices import one_device, spin

pytestmark = [one_device, pytest.mark.timeout(300)]


def test_a_wait_on_another_stream_than_that_of_the_call():
    """The result is queued behind a kernel that was launched after the call."""
    server = serve()
    group = ProcessGroupNCCL()
    group.configure(f"127.0.0.1:{server.port}/users", 0, 1)
    value, other = torch.ones(1 << 20, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        one = UserAllreduce(value, BufferPool(shared=False), mean=True, keep=True, after_buckets=False)
        reduction = one.launch(group, 2, contributes=True)
        spun = spin(1.0)
    assert reduction.wait() and one.work.wait()
    assert not spun.query(), "the host waits for no kernel"
    assert bool((value.clone() == 0.5).all())
    with torch.cuda.stream(torch.cuda.Stream()):
        one.launch(group, 2, contributes=True).wait()  # the values at the first call again
        one.finish()
        assert bool((value == 0.5).all())
    group.shutdown()


def test_a_wrapped_future_with_a_timeout_is_ordered_after_its_value():
    lighthouse = LighthouseServer("127.0.0.1:0", 1)
    manager = Manager(
        ProcessGroupNCCL(), None, None, 1, lighthouse_addr=lighthouse.address(), replica_id="a", dies_with_group=False
    )
    value, pending = torch.zeros(1 << 20, device="cuda"), Future[torch.Tensor](devices=["cuda:0"])
    wrapped = manager.wrap_future(pending, value)
    torch.cuda.synchronize()

    def ends() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            spin(1.0)
            pending.set_result(value.fill_(3.0))

    thread = threading.Thread(target=ends)
    thread.start()
    assert bool((wrapped.wait().clone() == 3.0).all()) and manager.errored() is None
    thread.join()
    manager.shutdown()
    lighthouse.shutdown()
