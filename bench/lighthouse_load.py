"""For bench/quorum.py: groups that only speak and never train.

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
from dataclasses import dataclass, field
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
groups, answer = int(sys.argv[1]), b"x" * int(sys.argv[2])

class Router(grpc.GenericRpcHandler):
    waiting = []

    async def serve(self, data, context):
        answered = asyncio.get_running_loop().create_future()
        self.waiting.append(answered)
        if len(self.waiting) == groups:
            for one in self.waiting:
                one.set_result(answer)
            self.waiting = []
        return await answered

    def service(self, details):
        return self.handler

async def main():
    router, server = Router(), grpc.aio.server()
    router.handler = grpc.unary_unary_rpc_method_handler(router.serve)
    server.add_generic_rpc_handlers((router,))
    print(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""
NEVER_MS = "3600000"
BEAT_S = 0.1  # how often groups of torchft beat
TORCHFT_QUORUM, TORCHFT_BEAT = "/torchft.LighthouseService/Quorum", "/torchft.LighthouseService/Heartbeat"
QUORUM, WATCH = "/pharos.Lighthouse/Quorum", "/pharos.Lighthouse/Watch"


def ours(min_replicas: int, **flags: object) -> LighthouseProcess:
    """Our lighthouse, with a heartbeat timeout that never passes, unless `flags` say otherwise."""
    return LighthouseProcess(our_lighthouse(min_replicas, **{"heartbeat_timeout_ms": NEVER_MS, **flags}))


def connect(address: str, channels: int) -> list[Any]:
    options = [("grpc.max_receive_message_length", 1 << 30), ("grpc.use_local_subchannel_pool", 1)]
    return [grpc.aio.insecure_channel(address, options=options) for _ in range(channels)]


@dataclass
class LoadTurn:
    """Some rounds of one side: medians and means per round."""

    round_s: float
    server_s: float  # CPU seconds
    load_s: float
    load_busy: float  # CPU seconds of the load per second of a round: 1.0 is a core


@dataclass
class LoadSide:
    """A lighthouse and its groups, of which each asks for a quorum once a round. `requests(n)` makes those of round n beforehand."""

    server: LighthouseProcess
    path: str
    requests: Callable[[int], list[bytes]]
    channels: list[Any] = field(default_factory=list)
    answer: bytes = b""
    rounds: int = 0

    def __post_init__(self) -> None:
        self.channels = connect(self.server.address, 8)

    async def round(self) -> float:
        """Seconds until everybody has the answer."""
        self.rounds += 1
        requests = self.requests(self.rounds)
        calls = [channel.unary_unary(self.path) for channel in self.channels]
        began = time.perf_counter()
        answers = await asyncio.gather(*(calls[i % 8](one, timeout=120) for i, one in enumerate(requests)))
        took_s = time.perf_counter() - began
        self.answer = answers[0]
        return took_s

    async def turn(self, rounds: int) -> LoadTurn:
        server_s, load_s, took_s = cpu_s(self.server.pid), 0.0, []
        for _ in range(rounds):
            load_began_s = time.process_time()
            took_s.append(await self.round())
            load_s += time.process_time() - load_began_s
        busy = load_s / sum(took_s)
        used_s = cpu_s(self.server.pid) - server_s
        return LoadTurn(statistics.median(took_s), used_s / rounds, load_s / rounds, busy)

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self.channels))
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
        calls = (
            m.Call(member, known=quorum_id, number=step)
            for member in members_at(groups, step if quorum_id else 0, quorum_id)
        )
        return [pharos_call(call, roster) for call in calls]

    side = LoadSide(server, QUORUM, requests)
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
    server = LighthouseProcess([sys.executable, "-c", BARE, str(groups), str(len(like.answer))])
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
        pipe.send((sum(count[0] for count in had), sum(count[1] for count in had)))


@dataclass(frozen=True)
class Beaten:
    """The fate of the beats that were sent."""

    seconds: float
    answered: int
    longest_gap_s: float  # between two answered beats of one group
    cpu_s: float  # of the process that sent them


def beat(address: str, groups: int, pipe: Any) -> None:
    """Sends heartbeats of each group as torchft does: 100 ms after the last answer. Answers once, with the fate of them, and stops."""
    asyncio.run(_beat(address, groups, pipe))


async def _beat(address: str, groups: int, pipe: Any) -> None:
    calls = [channel.unary_unary(TORCHFT_BEAT) for channel in connect(address, 8)]
    last_s: dict[int, float] = {}
    gaps: list[float] = []

    async def group(i: int) -> None:
        await asyncio.sleep(BEAT_S * i / groups)
        request = torchft_pb2.LighthouseHeartbeatRequest(replica_id=replica_id(i)).SerializeToString()
        while True:
            await calls[i % 8](request, timeout=60)
            now_s = time.perf_counter()
            gaps.append(now_s - last_s.get(i, now_s))
            last_s[i] = now_s
            await asyncio.sleep(BEAT_S)

    tasks = [asyncio.ensure_future(group(i)) for i in range(groups)]
    while len(last_s) < groups:
        await asyncio.sleep(BEAT_S)
    gaps.clear()
    began_s, used_s = time.perf_counter(), time.process_time()
    pipe.send("all have beaten once")
    await asyncio.to_thread(pipe.recv)
    pipe.send(Beaten(time.perf_counter() - began_s, len(gaps), max(gaps), time.process_time() - used_s))
    for task in tasks:
        task.cancel()


class LoadGroup:
    """One of ours, as far as its lighthouse can tell: a stream over a connection of its own, calls, beats."""

    def __init__(self, address: str, name: str) -> None:
        self.replica_id = name
        self.down: Counter[str] = Counter()  # how many messages of each kind have come
        self.beats = 0
        self._channel, self._number = connect(address, 1)[0], 0
        self._stream: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._more = asyncio.Event()

    async def open(self) -> None:
        """Afterwards the lighthouse has heard the hello."""
        self._stream = self._channel.stream_stream(WATCH)()
        await self._write(hello=pharos_pb2.Hello(replica_id=self.replica_id))
        self._reader = asyncio.ensure_future(self._read())
        await self.beat()
        while not self.down["beat_answered"]:
            self._more.clear()
            await self._more.wait()

    async def ask(self, known: int = 0, *, failed: bool = False) -> int:
        """The id of the quorum that it is in."""
        self._number += 1
        call = m.Call(m.Member(self.replica_id, *addresses(7)), known=known, failed=failed, number=self._number)
        answer = await self._channel.unary_unary(QUORUM)(pharos_call(call), timeout=120)
        return int(pharos_pb2.QuorumReply.FromString(answer).quorum.quorum_id)

    async def beat(self) -> None:
        self.beats += 1
        await self._write(report=pharos_pb2.Report(step=0, sent_s=time.monotonic()))

    async def beat_for_ever(self, every_s: float) -> None:
        due_s = time.perf_counter() + every_s
        while True:
            await asyncio.sleep(due_s - time.perf_counter())
            await self.beat()
            due_s += every_s

    async def close(self) -> None:
        """Ends without a leave, like a process that was killed."""
        if self._reader:
            self._reader.cancel()
        await self._channel.close()

    async def _write(self, **up: Any) -> None:
        await self._stream.write(pharos_pb2.Up(**up).SerializeToString())

    async def _read(self) -> None:
        while (data := await self._stream.read()) is not grpc.aio.EOF:
            self.down[str(pharos_pb2.Down.FromString(data).WhichOneof("down"))] += 1
            self._more.set()
