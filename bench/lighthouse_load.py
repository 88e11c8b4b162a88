"""For bench/quorum.py and group_votes.py: groups and ranks that send messages and never train.

Requests and answers stay bytes on this side, so that the load costs the same whichever lighthouse it speaks to. What it costs is measured
as well: on few cores a load that is busy all the time sets the pace, and not the lighthouse.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from bench.job import Forked, LighthouseProcess, cpu_s, our_lighthouse
from ft.protocol import messages as m
from ft.rpc import codec
from ft.rpc.generated import pharos_pb2, torchft_pb2

# The least that grpc.aio costs: a server that joins the calls of a round and answers all of them with the same bytes, of a given length.
BARE = """
import asyncio, sys
import grpc, grpc.aio
groups, answer, service, waiting = int(sys.argv[1]), b"x" * int(sys.argv[2]), sys.argv[3], []

async def serve(data, context):
    answered = asyncio.get_running_loop().create_future()
    waiting.append(answered)
    if len(waiting) == groups:
        for one in waiting:
            one.set_result(answer)
        waiting.clear()
    return await answered

async def main():
    server, handler = grpc.aio.server(), grpc.unary_unary_rpc_method_handler(serve)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Quorum": handler})])
    print(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""
NEVER_MS = "3600000"
BEAT_S = 0.1  # how often groups of torchft beat
TORCHFT_QUORUM, TORCHFT_BEAT = "/torchft.LighthouseService/Quorum", "/torchft.LighthouseService/Heartbeat"
# Of a turn, per round: the median time, CPU time of both, and CPU seconds of the load per second of a round (1.0 is a core)
FIGURES = ("median ms", "server CPU ms", "load CPU ms", "load busy")


def ours(min_replicas: int, **flags: object) -> LighthouseProcess:
    """Our lighthouse, with a heartbeat timeout that never passes, unless `flags` say otherwise."""
    return LighthouseProcess(our_lighthouse(min_replicas, **{"heartbeat_timeout_ms": NEVER_MS, **flags}))


def connect(address: str, channels: int) -> list[Any]:
    options = {"max_receive_message_length": 1 << 30, "use_local_subchannel_pool": 1, "enable_http_proxy": 0}
    given = [(f"grpc.{name}", value) for name, value in options.items()]
    return [grpc.aio.insecure_channel(address, options=given) for _ in range(channels)]


class LoadSide:
    """A lighthouse and its groups, of which each asks for a quorum once a round. `requests(n)` makes those of round n beforehand."""

    def __init__(self, server: LighthouseProcess, path: str, requests: Callable[[int], list[bytes]]) -> None:
        self.server, self.path, self.requests = server, path, requests
        self.answer = b""  # the last one of the first group
        self._channels, self._rounds = connect(server.address, 8), 0

    async def round(self) -> float:
        """Seconds until everybody has the answer."""
        self._rounds += 1
        requests = self.requests(self._rounds)
        calls = [channel.unary_unary(self.path) for channel in self._channels]
        began = time.perf_counter()
        answers = await asyncio.gather(*(calls[i % 8](one, timeout=120) for i, one in enumerate(requests)))
        took_s = time.perf_counter() - began
        self.answer = answers[0]
        return took_s

    async def turn(self, rounds: int) -> tuple[float, ...]:
        """Some rounds: FIGURES."""
        server_s, load_s, took_s = cpu_s(self.server.pid), 0.0, []
        for _ in range(rounds):
            load_began_s = time.process_time()
            took_s.append(await self.round())
            load_s += time.process_time() - load_began_s
        used_s = cpu_s(self.server.pid) - server_s
        return statistics.median(took_s), used_s / rounds, load_s / rounds, load_s / sum(took_s)

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))
        self.server.close()


def torchft_side(server: LighthouseProcess, groups: int) -> LoadSide:
    def requests(step: int) -> list[bytes]:
        members = (codec.torchft_member(member) for member in members_at(groups, step))
        return [torchft_pb2.LighthouseQuorumRequest(requester=member).SerializeToString() for member in members]

    return LoadSide(server, TORCHFT_QUORUM, requests)


async def known_side(server: LighthouseProcess, groups: int) -> LoadSide:
    """Ours, where everybody holds the roster: two quorums (the first, and one that says so) have been answered."""
    roster, quorum_id = "", 0

    def requests(step: int) -> list[bytes]:
        members = members_at(groups, step if quorum_id else 0, quorum_id)
        return [pharos_call(m.Call(member, known=quorum_id, number=step), roster) for member in members]

    side = LoadSide(server, "/pharos.Lighthouse/Quorum", requests)
    await side.round()
    quorum = codec.quorum_from(pharos_pb2.QuorumReply.FromString(side.answer).quorum)
    roster, quorum_id = codec.StaticQuorum.of(quorum).id, quorum.quorum_id
    await side.round()
    assert pharos_pb2.QuorumReply.FromString(side.answer).HasField("same"), "not the short answer"
    return side


async def bare_side(groups: int, like: LoadSide) -> LoadSide:
    """The same calls, and answers as long, to a server that does nothing."""
    if not like.answer:
        await like.round()
    service = like.path.split("/")[1]
    server = LighthouseProcess([sys.executable, "-c", BARE, str(groups), str(len(like.answer)), service])
    return LoadSide(server, like.path, like.requests)


def pharos_call(call: m.Call, roster: str = "") -> bytes:
    return bytes(pharos_pb2.QuorumRequest(call=codec.to_message(call), roster=roster).SerializeToString())


def members_at(groups: int, step: int, commit_quorum_id: int = 0) -> list[m.Member]:
    """Groups of 8 ranks that have all committed `step`."""
    commit_id = f"{step:016x}" if step else ""
    return [
        m.Member(replica_id(i), *addresses(i), step, 8, commit_quorum_id=commit_quorum_id, commit_id=commit_id)
        for i in range(groups)
    ]


def replica_id(i: int) -> str:
    return f"replica_{i:05d}:0f0e0d0c-0000-4000-8000-{i:012d}"


def addresses(i: int) -> tuple[str, str]:
    host = f"10.0.{i >> 8}.{i & 255}"
    return f"http://{host}:29600", f"{host}:29601"


@contextmanager
def beside(target: Callable[..., None], *arguments: object) -> Iterator[Callable[[], Any]]:
    """`target(*arguments, pipe)` in a process of its own, which says when it is under way, and answers what this gives to call."""
    process = Forked((), target, *arguments)
    try:
        process.hear()
        yield process.ask
    finally:
        process.kill()


def read_events(page: str, watchers: int, pipe: Any) -> None:
    """So many readers of /events, as browsers would be. Tells the updates and bytes that they have had so far, all together."""
    had = [[0, 0] for _ in range(watchers)]

    def read(count: list[int]) -> None:
        with urllib.request.urlopen(f"{page}/events", timeout=3600) as answer:
            while line := answer.readline():
                count[0] += line.startswith(b"id: ")
                count[1] += len(line)

    for count in had:
        threading.Thread(target=read, args=(count,), daemon=True).start()
    while not all(count[0] for count in had):
        time.sleep(0.01)
    pipe.send("each has had its first update")
    while True:
        pipe.recv()
        pipe.send([sum(figures) for figures in zip(*had, (0, 0), strict=True)])


def beat(address: str, groups: int, pipe: Any) -> None:
    """Sends heartbeats of each group as torchft does: 100 ms after the last answer. Answers once, and stops: beats that were answered."""
    asyncio.run(_beat(address, groups, pipe))


async def _beat(address: str, groups: int, pipe: Any) -> None:
    calls, answered = [channel.unary_unary(TORCHFT_BEAT) for channel in connect(address, 8)], [0] * groups

    async def group(i: int) -> None:
        await asyncio.sleep(BEAT_S * i / groups)
        request = torchft_pb2.LighthouseHeartbeatRequest(replica_id=replica_id(i)).SerializeToString()
        while True:
            await calls[i % 8](request, timeout=60)
            answered[i] += 1
            await asyncio.sleep(BEAT_S)

    tasks = [asyncio.ensure_future(group(i)) for i in range(groups)]
    while not all(answered):
        await asyncio.sleep(BEAT_S)
    before = sum(answered)
    pipe.send("all have beaten once")
    await asyncio.to_thread(pipe.recv)
    pipe.send(sum(answered) - before)
    for task in tasks:
        task.cancel()


class LoadStream:
    """A connection of its own to a server, with calls and the stream of that service."""

    def __init__(self, address: str, service: str, up: Any, down: Any) -> None:
        self._channel, self._service, self._up, self._down = connect(address, 1)[0], service, up, down
        self.heard: Counter[str] = Counter()  # messages down the stream, by kind
        self.tasks: list[asyncio.Task[Any]] = []

    async def open(self, hello: Any, report: Any = None) -> None:
        """Afterwards the server has heard the hello, where it answers the report."""
        self._stream = self._channel.stream_stream(f"/{self._service}/Watch")()
        await self.write(hello=hello)
        if report is not None:
            await self.write(report=report)
            while not self.heard["beat_answered"]:
                await self._hear()
        self.tasks.append(asyncio.ensure_future(self._hear_all()))

    def call(self, method: str, request: bytes) -> Any:
        return self._channel.unary_unary(f"/{self._service}/{method}")(request, timeout=120)

    async def write(self, **up: Any) -> None:
        await self._stream.write(self._up(**up).SerializeToString())

    async def close(self) -> None:
        """Ends without a leave, like a process that was killed."""
        for task in self.tasks:
            task.cancel()
        await self._channel.close()

    async def _hear(self) -> bool:
        if (data := await self._stream.read()) is grpc.aio.EOF:
            return False
        self.heard[str(self._down.FromString(data).WhichOneof("down"))] += 1
        return True

    async def _hear_all(self) -> None:
        while await self._hear():
            pass


class LoadGroup(LoadStream):
    """One of ours, as far as its lighthouse can tell: calls, and a beat each second."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(address, "pharos.Lighthouse", pharos_pb2.Up, pharos_pb2.Down)
        self.replica_id, self.beats, self._number = name, 1, 0

    async def begin(self) -> None:
        await self.open(pharos_pb2.Hello(replica_id=self.replica_id), self._report())
        self.tasks.append(asyncio.ensure_future(self._beat()))

    async def ask(self, known: int = 0, *, failed: bool = False) -> int:
        """The id of the quorum that it is in."""
        self._number += 1
        call = m.Call(m.Member(self.replica_id, *addresses(7)), known=known, failed=failed, number=self._number)
        return int(pharos_pb2.QuorumReply.FromString(await self.call("Quorum", pharos_call(call))).quorum.quorum_id)

    @property
    def notices(self) -> int:
        """Messages that answer no beat."""
        return sum(self.heard.values()) - self.heard["beat_answered"]

    def _report(self) -> Any:
        return pharos_pb2.Report(step=0, sent_s=time.monotonic())

    async def _beat(self) -> None:
        due_s = time.perf_counter()
        while True:
            due_s += 1.0
            await asyncio.sleep(due_s - time.perf_counter())
            self.beats += 1
            await self.write(report=self._report())
