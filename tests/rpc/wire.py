"""A group as the lighthouse sees it: calls and streams, made by hand."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from ft.protocol import messages as m
from ft.rpc import codec
from ft.rpc.access import Access, Tls
from ft.rpc.generated import pharos_pb2, torchft_pb2
from ft.rpc.lighthouse_link import channel

ROOT = Path(__file__).resolve().parents[2]
QUORUM, HEARTBEAT = "/torchft.LighthouseService/Quorum", "/torchft.LighthouseService/Heartbeat"
OURS = "/pharos.Lighthouse/Quorum"
TOKEN = "0123456789abcdef"
WAIT_S = 20.0  # for what must come


class Wire:
    """Raw calls over one connection."""

    def __init__(self, address: str, token: str = "", tls: Tls | None = None) -> None:
        access = Access(token, tls=tls)
        self.channel, self.metadata = channel(address, access, aio=False), access.metadata()

    def send(self, path: str, data: bytes, timeout_s: float = WAIT_S) -> bytes:
        return bytes(self.channel.unary_unary(path)(data, timeout=timeout_s, metadata=self.metadata))

    def begin(self, path: str, data: bytes, timeout_s: float = WAIT_S) -> Future[bytes]:
        return self.channel.unary_unary(path).future(data, timeout=timeout_s, metadata=self.metadata)  # type: ignore[no-any-return]

    def code(self, path: str, data: bytes, timeout_s: float = WAIT_S) -> tuple[str, str]:
        return refused(lambda: self.send(path, data, timeout_s))

    def torchft(self, replica_id: str, timeout_s: float = WAIT_S, **member: Any) -> torchft_pb2.Quorum:
        data = self.send("/torchft.LighthouseService/Quorum", torchft_call(replica_id, **member), timeout_s)
        return torchft_pb2.LighthouseQuorumResponse.FromString(data).quorum

    def pharos(self, call: m.Call, static_quorum_id: str = "") -> Future[bytes]:
        return self.begin("/pharos.Lighthouse/Quorum", pharos_call(call, static_quorum_id))

    def close(self) -> None:
        self.channel.close()


class Stream:
    """A group's stream to the lighthouse, whose hello is on its way."""

    def __init__(self, wire: Wire, replica_id: str, quorum: m.Quorum | None = None, settled: int = 0) -> None:
        self._up: queue.Queue[Any] = queue.Queue()
        self._sent_s = 0.0
        quorum_id, epoch = (quorum.quorum_id, quorum.epoch) if quorum else (0, "")
        hello = pharos_pb2.Hello(replica_id=replica_id, settled=settled, quorum_id=quorum_id, epoch=epoch)
        self._up.put(pharos_pb2.Up(hello=hello))
        self.call = wire.channel.stream_stream("/pharos.Lighthouse/Watch")(self._sent(), metadata=wire.metadata)

    def _sent(self) -> Iterator[bytes]:
        while (up := self._up.get()) is not None:
            yield up.SerializeToString()

    def send(self, **up: Any) -> None:
        self._up.put(pharos_pb2.Up(**up))

    def next(self, which: str) -> Any:
        """Returns the next message of this kind; others before it are skipped."""
        for data in self.call:
            down = pharos_pb2.Down.FromString(data)
            if down.WhichOneof("down") == which:
                return getattr(down, which)
        raise AssertionError(f"the stream ended without {which}")

    def beat(self, **report: Any) -> None:
        """Sends a beat and waits for its answer: then the lighthouse has handled all that was sent before it."""
        self._sent_s += 60.0  # not every beat is answered, but after so long each is
        self.send(report=pharos_pb2.Report(sent_s=self._sent_s, **report))
        assert self.next("beat_answered") == self._sent_s

    def notice(self) -> m.Notice:
        return codec.notice_from(self.next("notice"))

    def close(self) -> None:
        self._up.put(None)


def refused(do: Callable[[], object]) -> tuple[str, str]:
    """Returns the status and reason of a call."""
    try:
        do()
    except grpc.RpcError as error:
        return error.code().name, error.details()  # type: ignore[attr-defined]
    return "OK", ""


def torchft_call(replica_id: str, **member: Any) -> bytes:
    requester = torchft_pb2.QuorumMember(replica_id=replica_id, **member)
    return bytes(torchft_pb2.LighthouseQuorumRequest(requester=requester).SerializeToString())


def pharos_call(call: m.Call, static_quorum_id: str = "") -> bytes:
    return bytes(
        pharos_pb2.QuorumRequest(call=codec.to_message(call), static_quorum_id=static_quorum_id).SerializeToString()
    )


def quorum_of(answer: Future[bytes]) -> m.Quorum:
    return codec.quorum_from(pharos_pb2.QuorumReply.FromString(answer.result(WAIT_S)).quorum)


@contextmanager
def before_each(do: Callable[[str], None]) -> Iterator[None]:
    """Calls `do` with the name of each function of C that this thread is about to call. What `do` raises, the call raises."""

    def seen(frame: Any, what: str, function: Any) -> None:
        if what == "c_call":
            do(function.__name__)

    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(None)
