"""Arbitrary bytes to every RPC. Each call is answered with a meaningful status, within bounds, and the server continues.

The RPCs are read from the .proto files' descriptors, so one that is added there is fuzzed, or its test fails.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ft import LighthouseServer
from ft.compat import group as torchft_group
from ft.protocol import messages as m
from ft.rpc import group_server, lighthouse_service
from ft.rpc.access import Access
from ft.rpc.generated import pharos_pb2, torchft_pb2
from ft.rpc.group_server import Settings
from tests.rpc.wire import WAIT_S, Wire, pharos_call, torchft_call

RPCS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in (torchft_pb2.DESCRIPTOR, pharos_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}
SERVED_BY = {  # a lighthouse serves both kinds of members, but a job has one: so there are two
    "torchft.LighthouseService": "lighthouse of torchft",
    "pharos.Lighthouse": "lighthouse of ours",
    "torchft.ManagerService": "group",
    "pharos.Group": "group",
}
PROBES = {
    "lighthouse of torchft": "/torchft.LighthouseService/Quorum",
    "lighthouse of ours": "/pharos.Lighthouse/Quorum",
    "group": "/pharos.Group/Quorum",
}
MEANT = {  # UNKNOWN and INTERNAL would be a fault of ours, UNAVAILABLE that the server has gone
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
ENDS = ("Leave", "Kill", "Watch")  # a good one ends the group: so does the end of a rank's stream
WAITS = ("Quorum", "ShouldCommit", "CastVote")  # a good one waits for others
PATIENCE_S = 0.15

# ------------------------------------------------------------------------------------------------ what is sent

INTEGERS = st.sampled_from([0, 1, 2, 1 << 20, 1 << 40, (1 << 63) - 1]) | st.integers(0, (1 << 63) - 1)
SIGNED = INTEGERS | INTEGERS.map(lambda x: -x) | st.just(-(1 << 63))
TEXTS = st.sampled_from(["", "a", "a:1", "b:1.1", "\n", "x" * 600, "commit", "yes", "failed", "torchft"]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=12
)
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT64: SIGNED,
    FieldDescriptor.CPPTYPE_UINT64: INTEGERS,
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_STRING: TEXTS,
}


@st.composite
def messages(draw: st.DrawFn, descriptor: Any) -> Message:
    """Each field as it comes: missing, absurd, or what an honest sender could have said."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if not draw(st.integers(0, 3)):
            continue
        one = messages(field.message_type) if field.message_type else SCALARS[field.cpp_type]
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(one, max_size=3)))
        elif field.message_type:
            getattr(message, field.name).CopyFrom(draw(one))
        else:
            setattr(message, field.name, draw(one))
    return message


@st.composite
def packets(draw: st.DrawFn, descriptor: Any) -> bytes:
    """A message, one with a byte turned or an end cut off, or noise."""
    how = draw(st.sampled_from(["whole", "whole", "turned", "cut", "noise"]))
    if how == "noise":
        return draw(st.binary(max_size=80))
    data = bytearray(draw(messages(descriptor)).SerializeToString(deterministic=True))
    at = draw(st.integers(0, max(0, len(data) - 1)))
    if how == "turned" and data:
        data[at] ^= draw(st.integers(1, 255))
    return bytes(data[:at] if how == "cut" else data)


# ------------------------------------------------------------------------------------------------ to whom


class GroupServer:
    """The whole server of a group, but in a thread; a message that ends it is followed by a new start."""

    def __init__(self, lighthouse: str, **settings: Any) -> None:
        self._settings = Settings("f:1", 2, lighthouse, quorum_retries=0, **settings)
        self._starts()

    def _starts(self) -> None:
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="group")
        self._thread.start()
        assert self._up.wait(WAIT_S)
        self.wire = Wire(self.address)

    async def _run(self) -> None:
        self._loop, self._gone = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        await group_server.run(self._settings, self._gone, self._says)

    def _says(self, line: str) -> None:
        self.address = json.loads(line)["address"]
        self._up.set()

    def again(self) -> None:
        self.close()
        self._starts()

    def close(self) -> None:
        self.wire.close()
        with suppress(RuntimeError):  # its loop is closed: it has ended by itself
            self._loop.call_soon_threadsafe(lambda: self._gone.done() or self._gone.set_result(None))
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


class House:
    """A lighthouse with a job that has begun."""

    def __init__(self, path: str, call: bytes) -> None:
        self._server = LighthouseServer("127.0.0.1:0", 1, quorum_tick_ms=10)
        self.address = self._server.address()
        self.wire = Wire(self.address)
        self.wire.send(path, call)

    def close(self) -> None:
        self.wire.close()
        self._server.shutdown()


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Any]]:
    ours = House(PROBES["lighthouse of ours"], pharos_call(m.Call(m.Member("a:1"))))
    theirs = House(PROBES["lighthouse of torchft"], torchft_call("a:1"))
    group = GroupServer(ours.address)
    yield {"lighthouse of ours": ours, "lighthouse of torchft": theirs, "group": group}
    for one in (group, ours, theirs):
        one.close()


def test_every_rpc_is_served(servers: dict[str, Any]):
    """No other RPC is served: a route that no .proto file names would not be fuzzed."""
    assert {path.split("/")[1] for path in RPCS} == set(SERVED_BY)
    for path in RPCS:
        for name, server in servers.items():
            served = server.wire.code(path, b"\xff", WAIT_S)[0] != "UNIMPLEMENTED"
            assert served == (SERVED_BY[path.split("/")[1]].split()[0] == name.split()[0]), (path, name)
    sources = [Path(module.__file__).read_text() for module in (lighthouse_service, group_server, torchft_group)]
    assert set(re.findall(r'"(/\w+\.\w+/\w+)": ', "".join(sources))) == set(RPCS)


def test_no_rpc_without_the_token_and_none_of_any_size():
    """The lighthouse and a group's server refuse each RPC without the right token, and, with it, calls that are too large."""
    token = "0123456789abcdef"
    lighthouse = LighthouseServer("127.0.0.1:0", 1, token=token)
    group = GroupServer(lighthouse.address(), access=Access(token), host="127.0.0.1")
    for path in RPCS:
        address = group.address if SERVED_BY[path.split("/")[1]] == "group" else lighthouse.address()
        for wrong in ("", token[:-1], token + "0", token.upper()):
            wire = Wire(address, wrong)
            denied = ("UNAUTHENTICATED", "this job has a token, and the call does not contain it")
            assert wire.code(path, b"") == denied, (path, wrong)
            wire.close()
    for address in (group.address, lighthouse.address()):
        wire = Wire(address, token)
        for path in ("/torchft.ManagerService/Kill", "/torchft.LighthouseService/Quorum"):
            code, reason = wire.code(path, b"\xff" * ((16 << 20) + 1))
            assert code in ("RESOURCE_EXHAUSTED", "UNIMPLEMENTED") and reason, (path, code)
        wire.metadata = (*wire.metadata, ("x-large", "x" * 100_000))
        assert wire.code(PROBES["group"], b"\xff")[0] in ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL")
        wire.close()
    group.close()
    lighthouse.shutdown()


@pytest.mark.parametrize("path", RPCS)
def test_whatever_comes_is_answered_and_the_server_goes_on(path: str, servers: dict[str, Any]):
    method = RPCS[path]
    name = SERVED_BY[path.split("/")[1]]
    server = servers[name]

    @given(sent=st.lists(packets(method.input_type), min_size=1, max_size=4 if method.client_streaming else 1))
    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def fuzz(sent: list[bytes]) -> None:
        code, reason = _say(server.wire, method, path, sent)
        assert code in MEANT, f"{code}: {reason}"
        assert len(reason) <= 1000 and (reason or code is grpc.StatusCode.OK)
        if name == "group" and method.name in ENDS and (code is grpc.StatusCode.OK or method.client_streaming):
            server.again()  # a stream may have been a rank's before it was refused
        assert server.wire.code(PROBES[name], b"\xff", WAIT_S)[0] == "INVALID_ARGUMENT", "it is not there any more"

    fuzz()


def _say(wire: Wire, method: MethodDescriptor, path: str, sent: list[bytes]) -> tuple[grpc.StatusCode, str]:
    if method.client_streaming:
        call = wire.channel.stream_stream(path)(iter(sent), timeout=WAIT_S)
    else:
        patience_s = PATIENCE_S if method.name in WAITS else WAIT_S
        call = wire.channel.unary_stream(path)(sent[0], timeout=patience_s)  # on the wire, a call with one answer
    with suppress(grpc.RpcError):
        list(call)
    return call.code(), call.details()
