"""torchft's clients and servers with ours, over the wire that they share. How they come here: peer.py.

A conversation is a function of an API: `ft` here, or torchft's extension in the peer's process. The rules are in test_torchft_rules.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import ft
from ft.rpc.clients import GroupServerProcess
from ft.rpc.group_server import Settings
from tests.rpc.peer import SOON, Peer, install
from tests.rpc.test_group_server import together
from tests.system_packages import Unavailable

LEASE = timedelta(milliseconds=300)


def our_lighthouse(cleanup: ExitStack, min_replicas: int, **options: int) -> str:
    server = ft.LighthouseServer("127.0.0.1:0", min_replicas, **options)
    cleanup.callback(server.shutdown)
    return server.address()


def test_a_wheel_that_cannot_be_had_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PHAROS_NO_INSTALL", raising=False)
    with pytest.raises(Unavailable, match=r"no wheel for CPython .*torchft-nightly==") as caught:
        install(tmp_path)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("PHAROS_NO_INSTALL", "1")
    with pytest.raises(Unavailable, match="PHAROS_NO_INSTALL=1"):
        install(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


# ------------------------------------------------------------------------------------------------ lighthouses and their clients


@pytest.mark.parametrize("whose_client", ["ours", "theirs"])
@pytest.mark.parametrize("whose_lighthouse", ["ours", "theirs"])
def test_any_client_and_any_lighthouse(whose_client: str, whose_lighthouse: str, peer: Peer, cleanup: ExitStack):
    """Data and defaults, ids and order: each client hears the same from each lighthouse."""

    def talk(conversation: Callable[..., Any], address: str) -> Any:
        return conversation(ft, address) if whose_client == "ours" else peer.run(conversation, address)

    def lighthouse(min_replicas: int, **options: int) -> str:
        if whose_lighthouse == "ours":
            return our_lighthouse(cleanup, min_replicas, **options)
        return cleanup.enter_context(peer.lighthouse(min_replicas, **options))

    alone, again, bare, seconds, created = talk(one_alone, lighthouse(1))
    assert alone == [("a", "here", "here:1", 7, 3, False, {"my": 1234, "list": [1, None, "x"]})]
    assert bare == [("a", "", "", 0, 1 if whose_client == "ours" else 0, False, None)]
    assert again == 0 and abs(created - seconds) < 60
    assert talk(two_at_once, lighthouse(2)) == [["a", "b"], ["a", "b"]]
    said = talk(too_late, lighthouse(2))
    assert "Timeout expired" in said or whose_client == "ours"  # grpc has a clock of its own, which may come first


def one_alone(api: Any, address: str) -> tuple[list[Any], int, list[Any], float, float]:
    client = api.LighthouseClient(address, SOON)
    first = client.quorum("a", SOON, "here", "here:1", 7, 3, False, {"my": 1234, "list": [1, None, "x"]})
    client.heartbeat("a")
    bare = client.quorum(replica_id="a", timeout=SOON)
    return _members(first), bare.quorum_id - first.quorum_id, _members(bare), time.time(), first.created.seconds


def two_at_once(api: Any, address: str) -> list[list[str]]:
    clients = {name: api.LighthouseClient(address, SOON) for name in ("b", "a")}
    answers = together(*(lambda name=name: clients[name].quorum(name, SOON) for name in clients))
    return [[member.replica_id for member in answer.participants] for answer in answers]


def too_late(api: Any, address: str) -> str:
    client = api.LighthouseClient(addr=address, connect_timeout=SOON)
    with pytest.raises(TimeoutError) as caught:
        client.quorum("a", LEASE)
    return str(caught.value)


def _members(quorum: Any) -> list[Any]:
    names = ("replica_id", "address", "store_address", "step", "world_size", "shrink_only", "data")
    return [tuple(getattr(member, name) for name in names) for member in quorum.participants]


# ------------------------------------------------------------------------------------------------ groups' servers and their ranks


def test_their_ranks_and_our_group_server(peer: Peer, cleanup: ExitStack):
    """One of our groups beside one of theirs, under our lighthouse: quorum, metadata, votes."""
    address = our_lighthouse(cleanup, 2)
    ours = GroupServerProcess(Settings("a", 2, address, "a:1", wire="torchft"))
    cleanup.callback(ours.close)
    servers = [ours.address, cleanup.enter_context(peer.group("b", address))]
    answers = peer.run(quorum, servers, (4, 0))
    assert len({answer["quorum_id"] for answer in answers}) == 1
    assert [answer["replica_rank"] for answer in answers] == [0, 0, 1, 1]
    assert [answer["heal"] for answer in answers] == [False, False, True, True]
    assert {answer["store_address"] for answer in answers} == {"a:1"}, "of the only group at the highest step"
    assert [answer["reconfigure_handles"] for answer in answers] == [["handle 0"] * 2, ["handle 1"] * 2] * 2
    assert peer.run(metadata, servers[0], 1) == "state of rank 1"
    assert peer.run(votes, servers[0], 4, [True, False]) == [False, False]
    assert peer.run(votes, servers[0], 4, [True, True]) == [True, True]


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_rank_that_waits_in_vain(whose: str, peer: Peer, cleanup: ExitStack):
    """The other rank of the group is missing in a quorum or a vote: the peer's client raises TimeoutError with the expected text."""
    address = our_lighthouse(cleanup, 1)
    if whose == "ours":
        ours = GroupServerProcess(Settings("a", 2, address, "a:1", wire="torchft"))
        cleanup.callback(ours.close)
        server = ours.address
    else:
        server = cleanup.enter_context(peer.group("a", address))
    for said in peer.run(in_vain, server):
        assert 'status: Cancelled, message: "Timeout expired"' in said


def test_our_group_server_and_their_lighthouse(peer: Peer, cleanup: ExitStack):
    address = cleanup.enter_context(peer.lighthouse(2))
    servers = [GroupServerProcess(Settings(name, 1, address, f"{name}:1", wire="torchft")) for name in ("a", "b")]
    for server in servers:
        cleanup.callback(server.close)
    answers = peer.run(quorum, [server.address for server in servers], (5, 2), 1)
    assert [(x["replica_rank"], x["max_step"], x["heal"]) for x in answers] == [(0, 5, False), (1, 5, True)]
    assert answers[1]["recover_src_manager_address"] == servers[0].address


def quorum(torchft: Any, servers: list[str], steps: tuple[int, ...], ranks: int = 2) -> list[dict[str, Any]]:
    """Returns the answer to each rank of each group, at the step of its group."""
    asked = [(server, rank, step) for server, step in zip(servers, steps, strict=True) for rank in range(ranks)]
    answers = together(*(lambda one=one: ask(torchft, *one) for one in asked))
    names = [name for name in dir(answers[0]) if not name.startswith("_")]
    return [{name: getattr(answer, name) for name in names} for answer in answers]


def ask(torchft: Any, server: str, rank: int, step: int, timeout: timedelta = SOON) -> Any:
    return torchft.ManagerClient(server, SOON)._quorum(
        group_rank=rank,
        step=step,
        checkpoint_metadata=f"state of rank {rank}",
        shrink_only=False,
        timeout=timeout,
        commit_failures=0,
        reconfigure_handle=f"handle {rank}",
        init_sync=True,
    )


def in_vain(torchft: Any, server: str) -> list[str]:
    client, said = torchft.ManagerClient(server, SOON), []
    for call in (lambda: ask(torchft, server, 0, 0, LEASE), lambda: client.should_commit(0, 0, True, LEASE)):
        with pytest.raises(TimeoutError) as caught:
            call()
        said.append(str(caught.value))
    return said


def metadata(torchft: Any, server: str, rank: int) -> Any:
    return torchft.ManagerClient(server, SOON)._checkpoint_metadata(rank, SOON)


def votes(torchft: Any, server: str, step: int, wanted: list[bool]) -> list[bool]:
    clients = [torchft.ManagerClient(server, SOON) for _ in wanted]
    return together(
        *(lambda r=rank, yes=yes: clients[r].should_commit(r, step, yes, SOON) for rank, yes in enumerate(wanted))
    )
