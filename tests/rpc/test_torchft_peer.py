"""torchft's own clients and servers (the Rust ones of its wheel) with ours. Needs `pip install --no-deps torchft-nightly`; where it
cannot be had, the same messages are tested from our side in test_lighthouse_server.py and test_group_server.py."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ft import LighthouseServer
from ft.rpc.group_process import GroupProcess
from ft.rpc.group_server import Settings

SOON = timedelta(seconds=20)


def _torchft() -> Any:
    """The extension alone: the package around it would load torch and telemetry."""
    found = importlib.util.find_spec("torchft")
    files = list(Path(str(found.origin)).parent.glob("_torchft*.so")) if found else []
    if not files:
        pytest.skip("needs torchft's wheel: pip install --no-deps torchft-nightly", allow_module_level=True)
    loader = importlib.machinery.ExtensionFileLoader("_torchft", str(files[0]))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_torchft", loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


torchft = _torchft()


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _lighthouse(cleanup: ExitStack, min_replicas: int, **options: int) -> str:
    server = LighthouseServer("[::]:0", min_replicas, **options)
    cleanup.callback(server.shutdown)
    return server.address()


def _ask(client: Any, rank: int, step: int = 0) -> Callable[[], Any]:
    return lambda: client._quorum(
        group_rank=rank,
        step=step,
        checkpoint_metadata=f"meta {rank}",
        shrink_only=False,
        timeout=SOON,
        commit_failures=0,
        reconfigure_handle="",
        init_sync=True,
    )


def _together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(60) for future in [threads.submit(call) for call in calls]]


def test_their_client_and_our_lighthouse(cleanup: ExitStack):
    address = _lighthouse(cleanup, 1)
    client = torchft.LighthouseClient(address, SOON)
    result = client.quorum(
        "a", SOON, address="localhost", store_address="localhost:1", step=1, world_size=1, data={"my": 1234}
    )
    [member] = result.participants
    assert (member.replica_id, member.data["my"], member.step) == ("a", 1234, 1)
    client.heartbeat("a")
    assert client.quorum("a", SOON).quorum_id == result.quorum_id


def test_their_client_sees_a_timeout_as_one(cleanup: ExitStack):
    client = torchft.LighthouseClient(_lighthouse(cleanup, 2), SOON)
    with pytest.raises(TimeoutError):
        client.quorum("a", timedelta(milliseconds=300))


def test_their_groups_and_our_lighthouse(cleanup: ExitStack):
    """Two of their ManagerServers, two ranks each: first step, heal, commit."""
    address = _lighthouse(cleanup, 2)
    servers = [_their_group(name, address, cleanup) for name in ("a", "b")]
    clients = [[torchft.ManagerClient(server.address(), SOON) for _ in range(2)] for server in servers]
    calls = [_ask(client, rank) for group in clients for rank, client in enumerate(group)]
    first = _together(*calls)
    assert len({answer.quorum_id for answer in first}) == 1
    assert {answer.replica_world_size for answer in first} == {2}
    second = _together(
        *(_ask(c, rank, step) for step, group in zip((3, 0), clients, strict=True) for rank, c in enumerate(group))
    )
    assert [answer.heal for answer in second] == [False, False, True, True]
    assert second[2].recover_src_manager_address == servers[0].address()
    assert clients[1][0]._checkpoint_metadata(1, SOON) == "meta 1"


def _their_group(name: str, address: str, cleanup: ExitStack) -> Any:
    server = torchft.ManagerServer(
        replica_id=name,
        lighthouse_addr=address,
        hostname="localhost",
        bind="[::]:0",
        store_addr=f"{name}:1",
        world_size=2,
        heartbeat_interval=timedelta(milliseconds=100),
        connect_timeout=SOON,
        quorum_retries=0,
    )
    cleanup.callback(server.shutdown)
    return server


def test_their_ranks_and_our_group_server(cleanup: ExitStack):
    """One of our groups beside one of theirs, under our lighthouse: quorum, votes, metadata."""
    address = _lighthouse(cleanup, 2)
    ours = GroupProcess(Settings("a", 2, address, "a:1", wire="torchft"))
    cleanup.callback(ours.close)
    theirs = _their_group("b", address, cleanup)
    clients = [[torchft.ManagerClient(where, SOON) for _ in range(2)] for where in (ours.address, theirs.address())]
    answers = _together(*(_ask(client, rank) for group in clients for rank, client in enumerate(group)))
    assert len({answer.quorum_id for answer in answers}) == 1
    assert [answer.replica_rank for answer in answers] == [0, 0, 1, 1]
    assert clients[0][0]._checkpoint_metadata(1, SOON) == "meta 1"
    votes = _together(
        *(lambda rank=rank: clients[0][rank].should_commit(rank, 0, rank == 0, SOON) for rank in range(2))
    )
    assert votes == [False, False]
    votes = _together(*(lambda rank=rank: clients[0][rank].should_commit(rank, 1, True, SOON) for rank in range(2)))
    assert votes == [True, True]


def test_our_group_server_and_their_lighthouse(cleanup: ExitStack):
    lighthouse = torchft.LighthouseServer("[::]:0", 1, join_timeout_ms=100)
    cleanup.callback(lighthouse.shutdown)
    port = lighthouse.address().rpartition(":")[2]
    ours = GroupProcess(Settings("a", 1, f"http://localhost:{port}", "a:1", wire="torchft"))
    cleanup.callback(ours.close)
    answer = _ask(torchft.ManagerClient(ours.address, SOON), 0, 5)()
    assert (answer.replica_world_size, answer.max_step, answer.heal) == (1, 5, False)
