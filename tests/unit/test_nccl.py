"""Forming NCCL groups, with a fake of torch's part: environment, the first all-reduce, peers that never connect."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ft.config import FaultTolerance
from ft.process_groups.baby import ChildGroup
from ft.process_groups.errors import ProcessGroupError, RendezvousFailed
from ft.process_groups.forming import Engine, Rendezvous
from ft.process_groups.nccl import CONSTRUCTOR_SETTINGS, ProcessGroupNCCL, form_nccl, process_settings
from ft.process_groups.store import serve
from tests.unit.fakes import set_device_module

HEADER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
SEEN = (*CONSTRUCTOR_SETTINGS, "TORCH_NCCL_NONBLOCKING_TIMEOUT")


@dataclass
class FakeNccl:
    """A stand-in for torch's part of a group of one member. Its first all-reduce ends when `peers` is set."""

    peers: threading.Event = field(default_factory=threading.Event)
    summing: threading.Event = field(default_factory=threading.Event)  # the first sum has begun
    aborted: threading.Event = field(default_factory=threading.Event)
    environments: list[dict[str, str | None]] = field(default_factory=list)  # at the constructor, at each sum
    poll_error: str = ""  # of a check whether a sum has ended
    summed_in: str = ""  # the thread
    devices: dict[str, int] = field(default_factory=dict)  # by thread, as it was set last
    options: Any = None  # of the constructor

    def environment(self) -> None:
        self.environments.append({name: os.environ.get(name) for name in SEEN})

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.environment()
        self.summed_in = threading.current_thread().name
        self.summing.set()
        return SimpleNamespace(is_completed=self.is_completed, wait=self.wait)

    def is_completed(self) -> bool:
        if self.poll_error:
            raise RuntimeError(self.poll_error)
        return self.peers.is_set() or self.aborted.is_set()

    def wait(self) -> None:
        if self.aborted.is_set():
            raise RuntimeError("aborted")

    def form(self, rendezvous: Rendezvous, number: int | None) -> Engine:
        fake = self

        class Backend:
            Options = lambda: SimpleNamespace(config=SimpleNamespace())  # noqa: E731

            def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
                fake.options = options
                fake.environment()

            def eager_connect_single_device(self, device: torch.device) -> None: ...

            def abort(self) -> None:
                fake.aborted.set()

        return form_nccl(rendezvous, number, backend_class=Backend, group_of=lambda *_: fake)  # type: ignore[arg-type]

    def group(self, rendezvous_s: float, device: int = 0) -> ProcessGroupNCCL:
        form = self.form

        class OfFake(ProcessGroupNCCL):
            def _build(self, rendezvous: Rendezvous) -> Engine:
                return form(rendezvous, self.device)

        return OfFake(rendezvous_s=rendezvous_s, device=device)


class OnHost(TorchFunctionMode):
    """A stand-in for torch.cuda.stream that creates all tensors in host memory, whatever their `device`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "device"})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    fake = FakeNccl()

    def set_device(device: torch.device | int) -> None:
        fake.devices[threading.current_thread().name] = device if isinstance(device, int) else device.index

    for name in SEEN:
        monkeypatch.setenv(name, "before")
    cuda = SimpleNamespace(set_device=set_device, Stream=lambda device: None, stream=lambda stream: OnHost())
    set_device_module(monkeypatch, cuda)
    yield fake
    fake.peers.set()


@pytest.fixture(scope="module")
def store() -> Iterator[Callable[[str], str]]:
    server = serve()
    yield lambda name: f"127.0.0.1:{server.port}/{name}"


def in_process(fake: FakeNccl, address: str) -> None:
    group = fake.group(60.0, 3)
    group.configure(address, 0, 1)
    group.shutdown(60.0)


def in_child(fake: FakeNccl, address: str) -> None:
    replies, replied = list[bytes](), threading.Event()
    send = SimpleNamespace(send=lambda reply: (replies.append(reply), replied.set()))
    child = ChildGroup(send, fake.form)  # type: ignore[arg-type]
    child.form("nccl", 3, address, 0, 1, 60.0)
    assert replied.wait(60) and b"ready" in replies[0] and child.engine is not None, replies
    child.engine.end()


@pytest.mark.parametrize("form", [in_process, in_child])
def test_what_torch_reads_at_the_constructor(fake: FakeNccl, store: Callable[[str], str], form: Callable[..., None]):
    fake.peers.set()
    form(fake, store(form.__name__))
    constructor, first_sum = fake.environments
    assert constructor == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "2000000",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",
    }
    assert first_sum == {**dict.fromkeys(CONSTRUCTOR_SETTINGS, "before"), "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60"}
    assert fake.devices["ft-nccl-poll"] == fake.devices["ft-nccl-abort"] == 3


def test_the_default_group_of_a_survivor_does_not_dump():
    assert process_settings(FaultTolerance().process_group_kind("cuda"), 10.5) == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "11",
    }
    for kind in ("gloo", "baby_gloo", "baby_nccl"):  # no group of ours is in this process
        assert process_settings(kind, 10.0) == {}


@pytest.mark.skipif(not HEADER.exists(), reason="this torch comes without its headers")
def test_the_names_are_torchs():
    header = HEADER.read_text()
    assert [name for name in CONSTRUCTOR_SETTINGS if f'"{name}"' not in header] == []
    assert "nccl_nonblocking_timeout()" in HEADER.with_name("NCCLUtils.hpp").read_text()


def test_a_group_stands_when_its_first_sum_has_ended(fake: FakeNccl, store: Callable[[str], str]):
    """A second group can be formed meanwhile."""
    groups = [fake.group(600.0) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        forming = []
        for number, group in enumerate(groups):
            fake.summing.clear()
            forming.append(threads.submit(group.configure, store(f"stands{number}"), 0, 1))
            assert fake.summing.wait(60)
        assert not any(one.done() for one in forming) and fake.summed_in.startswith("ft-form-")
        fake.peers.set()
        for one in forming:
            one.result(60)
    for group in groups:
        assert group.errored() is None
        group.shutdown(60.0)


def test_a_notice_ends_the_first_sum(fake: FakeNccl, store: Callable[[str], str]):
    group = fake.group(600.0)
    with ThreadPoolExecutor(1) as threads:
        forming = threads.submit(group.configure, store("notice"), 0, 1, quorum_id=7)
        assert fake.summing.wait(60)
        group.interrupt("a member is lost", 7)
        with pytest.raises(RendezvousFailed, match="a member is lost"):
            forming.result(60)
    assert fake.aborted.wait(60)
    group.shutdown(60.0)


def test_who_never_comes_to_the_first_sum_is_told_within_the_rendezvous(fake: FakeNccl, store: Callable[[str], str]):
    group = fake.group(0.25)
    while not fake.summing.is_set():  # on a busy machine, the store is not reached in the first of these
        group.rendezvous_s *= 2
        with pytest.raises(RendezvousFailed, match=r"within|first all-reduce|cancelled"):
            group.configure(store(f"never{group.rendezvous_s}"), 0, 1)
    assert fake.aborted.wait(60)
    group.shutdown(60.0)


def test_the_stream_of_a_group_is_not_of_the_pool_that_healing_uses(fake: FakeNccl, store: Callable[[str], str]):
    """An all-reduce that waits for a peer would hold up the state that is sent to this peer, if both had one stream."""
    fake.peers.set()
    in_process(fake, store("stream"))
    assert fake.options.is_high_priority_stream is True


def test_a_check_that_fails_ends_its_operation_and_not_the_thread(fake: FakeNccl, store: Callable[[str], str]):
    group = fake.group(60.0)
    fake.peers.set()
    group.configure(store("check"), 0, 1)
    fake.poll_error = "CUDA error: unspecified launch failure"
    work = group.allreduce([torch.ones(1)])
    with pytest.raises(ProcessGroupError, match=fake.poll_error):
        work.wait(timedelta(seconds=60))
    assert group.errored() is not None
    group.shutdown(60.0)
