"""Simulates replica groups and ranks that send messages without training, for bench/quorum.py, group_votes.py, page.py, tests/dashboard.

A LoadSide does not decode answers, so that the load costs the same CPU time with any lighthouse. That CPU time is measured, too: on few
cores a fully busy load, not the lighthouse, determines the result. Imported by these, no command.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from bench.job import Forked, LighthouseProcess, cpu_s, our_lighthouse
from bench.pairs import Failed
from ft.protocol import messages as m
from ft.rpc import codec
from ft.rpc.access import Access
from ft.rpc.generated import pharos_pb2, torchft_pb2

R = TypeVar("R")

# Minimum cost of grpc.aio: a server that collects the calls of a round and answers all of them with the same bytes of a given length.
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
BEAT_S = 0.1  # heartbeat interval of torchft's groups
# Per round of a turn: median time, CPU time of server and load, and CPU seconds of the load per second of a round (1.0: one core)
FIGURES = ("median ms", "server CPU ms", "load CPU ms", "load busy")
NUMBERS = itertools.count(1)  # of quorum requests of all LoadGroups
BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)  # errors of a stream that was lost
# Reported by a Herd
PHASES = ("computes and reduces gradients", "waits for the outcome of the commit vote")
STEP_S = 0.5
CONNECTIONS = 16
STATE_BYTES = 3 << 30  # state of a healing group


def ours(min_replicas: int, **flags: object) -> LighthouseProcess:
    """Starts ft's lighthouse, with a heartbeat timeout of an hour unless `flags` set it."""
    timeouts = {"heartbeat_timeout_ms": 3_600_000, "heal_grace_s": 7200, "takeover_s": "never"}
    return LighthouseProcess(our_lighthouse(min_replicas, **{**timeouts, **flags}))


def connect(address: str) -> Any:
    """Returns a channel with its own connection to "host:port" or "http://host:port"."""
    options = {"max_receive_message_length": 1 << 30, "use_local_subchannel_pool": 1, "enable_http_proxy": 0}
    given = [(f"grpc.{name}", value) for name, value in options.items()]
    return grpc.aio.insecure_channel(address.removeprefix("http://"), options=given)


class LoadSide:
    """A lighthouse, and groups that each send a quorum request per round. `requests(n)` returns those of round n."""

    def __init__(self, server: LighthouseProcess, path: str, requests: Callable[[int], list[bytes]]) -> None:
        self.server, self.path, self.requests = server, path, requests
        self.answer = b""  # the last answer to the first group
        self._channels, self._rounds = [connect(server.address) for _ in range(8)], 0

    async def round(self) -> float:
        """Runs a round. Returns the seconds until all groups have the answer."""
        self._rounds += 1
        requests = self.requests(self._rounds)
        calls = [channel.unary_unary(self.path) for channel in self._channels]
        began = time.perf_counter()
        answers = await asyncio.gather(*(calls[i % 8](one, timeout=120) for i, one in enumerate(requests)))
        took_s = time.perf_counter() - began
        self.answer = answers[0]
        return took_s

    async def turn(self, rounds: int) -> tuple[float, ...]:
        """Runs `rounds` rounds. Returns the values of FIGURES, in seconds."""
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

    return LoadSide(server, "/torchft.LighthouseService/Quorum", requests)


async def known_side(server: LighthouseProcess, groups: int) -> LoadSide:
    """Returns a side of ft's protocol after two quorums: the full one, and a short answer to groups that know the static part."""
    static_quorum_id, quorum_id = "", 0

    def requests(step: int) -> list[bytes]:
        members = members_at(groups, step if quorum_id else 0, quorum_id)
        return [pharos_call(m.Call(member, known=quorum_id, number=step), static_quorum_id) for member in members]

    side = LoadSide(server, "/pharos.Lighthouse/Quorum", requests)
    await side.round()
    quorum = codec.quorum_from(pharos_pb2.QuorumReply.FromString(side.answer).quorum)
    static_quorum_id, quorum_id = codec.StaticQuorum.of(quorum).id, quorum.quorum_id
    await side.round()
    assert pharos_pb2.QuorumReply.FromString(side.answer).HasField("dynamic"), "not the short answer"
    return side


async def bare_side(groups: int, like: LoadSide) -> LoadSide:
    """Returns a side with the same requests and answers of the same length, from the BARE server."""
    if not like.answer:
        await like.round()
    service = like.path.split("/")[1]
    server = LighthouseProcess([sys.executable, "-c", BARE, str(groups), str(len(like.answer)), service])
    return LoadSide(server, like.path, like.requests)


def pharos_call(call: m.Call, static_quorum_id: str = "") -> bytes:
    return bytes(
        pharos_pb2.QuorumRequest(call=codec.to_message(call), static_quorum_id=static_quorum_id).SerializeToString()
    )


def members_at(groups: int, step: int, commit_quorum_id: int = 0) -> list[m.Member]:
    """Returns members (groups of 8 ranks) that have all committed `step`."""
    state: Any = {"commit_quorum_id": commit_quorum_id, "commit_id": f"{step:016x}" if step else ""}
    return [m.Member(replica_id(i), *addresses(i), step, 8, **state) for i in range(groups)]


def replica_id(i: int) -> str:
    return f"replica_{i:05d}:0f0e0d0c-0000-4000-8000-{i:012d}"


def addresses(i: int) -> tuple[str, str]:
    host = f"10.0.{i >> 8}.{i & 255}"
    return f"http://{host}:29600", f"{host}:29601"


@contextmanager
def beside(target: Callable[..., None], *arguments: object) -> Iterator[Callable[[], Any]]:
    """Runs `target(*arguments, pipe)` in a separate process. Enters when it is ready; yields a function that sends it an order."""
    process = Forked((), target, *arguments)
    try:
        process.hear()
        yield process.ask
    finally:
        process.kill()


def read_events(page: str, watchers: int, pipe: Any) -> None:
    """Reads /events with `watchers` clients, as browsers do. On each order sends the total of updates and bytes so far."""
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
    pipe.send("ready")
    while True:
        pipe.recv()
        pipe.send([sum(figures) for figures in zip(*had, (0, 0), strict=True)])


def beat(address: str, groups: int, pipe: Any) -> None:
    """Sends heartbeats of each group as torchft does, 100 ms after the last answer. On an order sends the number of answers, and ends."""
    asyncio.run(_beat(address, groups, pipe))


async def _beat(address: str, groups: int, pipe: Any) -> None:
    method, answered = "/torchft.LighthouseService/Heartbeat", [0] * groups
    calls = [connect(address).unary_unary(method) for _ in range(8)]

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
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    pipe.send(sum(answered) - before)
    for task in tasks:
        task.cancel()


class LoadStream:
    """Unary calls and the stream of a service, over a channel that may be shared."""

    obeys: Callable[[str], Awaitable[None]] | None = None  # called with the kind of an order from the server

    def __init__(self, channel: Any, service: str, up: Any, down: Any, metadata: Any = None) -> None:
        self.channel, self._service, self._up, self._down, self._metadata = channel, service, up, down, metadata
        self.heard: Counter[str] = Counter()  # messages down the stream, by kind
        self.tasks: list[asyncio.Task[Any]] = []

    async def open(self, hello: Any, report: Any = None) -> None:
        """Opens the stream. With `report`, returns when the server has answered it."""
        self.stream = self.channel.stream_stream(f"/{self._service}/Watch")(metadata=self._metadata)
        await self.write(hello=hello)
        if report is not None:
            await self.write(report=report)
            while not self.heard["beat_answered"]:
                if not await self._hear():
                    raise Failed("the lighthouse ended the stream")
        self.tasks.append(asyncio.ensure_future(self._hear_all()))

    def call(self, method: str, request: bytes) -> Any:
        return self.channel.unary_unary(f"/{self._service}/{method}")(request, timeout=120, metadata=self._metadata)

    async def write(self, **up: Any) -> None:
        await self.stream.write(self._up(**up).SerializeToString())

    async def close(self) -> None:
        """Closes the connection without a leave, like a killed process."""
        for task in self.tasks:
            task.cancel()
        await self.channel.close()

    async def _hear(self) -> bool:
        if (data := await self.stream.read()) is grpc.aio.EOF:
            return False
        down = self._down.FromString(data)
        self.heard[kind := str(down.WhichOneof("down"))] += 1
        if kind == "order" and self.obeys:
            await self.obeys(down.order.kind)
        return True

    async def _hear_all(self) -> None:
        with suppress(*BROKEN, asyncio.CancelledError):
            while await self._hear():
                pass


class LoadGroup(LoadStream):
    """A simulated replica group. `place`: its number, for its addresses."""

    member = False  # set by Herd: it has been in a quorum
    healed_bytes = -1  # set by Herd: healed bytes of its state; -1: it does not heal

    def __init__(self, channel: Any, name: str, place: int = 7, metadata: Any = None) -> None:
        super().__init__(channel, "pharos.Lighthouse", pharos_pb2.Up, pharos_pb2.Down, metadata)
        self.replica_id, self.beats, self._addresses = name, 1, addresses(place)

    async def begin(self, *, beats: bool = True) -> None:
        """Opens the stream. `beats`: sends a heartbeat each second."""
        await self.open(pharos_pb2.Hello(replica_id=self.replica_id), self._report())
        if beats:
            self.tasks.append(asyncio.ensure_future(self._beat()))

    async def ask(self, known: int = 0, *, failed: bool = False, **state: Any) -> int:
        """Sends a quorum request. Returns the quorum's id. `state`: fields of its Member."""
        member = m.Member(self.replica_id, *self._addresses, **state)
        call = m.Call(member, known=known, failed=failed, number=next(NUMBERS))
        return int(pharos_pb2.QuorumReply.FromString(await self.call("Quorum", pharos_call(call))).quorum.quorum_id)

    @property
    def notices(self) -> int:
        """Number of received messages that are no answers to heartbeats."""
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


class Herd:
    """Simulated groups that share a few connections, so that a thousand of them fit on a laptop. They obey orders: on kill the stream
    breaks, on drain the group leaves. Methods return when they are done. Heartbeats are sent only by `beat`."""

    def __init__(self, address: str, token: str = "", *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop`: an event loop that runs in a different thread; None: a new one. (grpc.aio fails if one of two loops ends.)"""
        self._loop, self._thread = loop or asyncio.new_event_loop(), None
        if loop is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="herd", daemon=True)
            self._thread.start()
        self._address, self._metadata, self._channels = address, Access(token).metadata(), list[Any]()
        self.streams: dict[str, LoadGroup] = {}
        self._places = itertools.count()
        self.step, self.quorum_id = 0, 0
        self.obeyed: list[tuple[str, str]] = []  # (order, replica id)

    def do(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def open(self, ids: Iterable[str]) -> None:
        """Connects groups to the lighthouse, without a quorum request."""
        self.do(self._open(list(ids)))

    def form(self, *, failed: bool = False) -> int:
        """Sends quorum requests of all groups; those that were in no quorum heal. Returns the quorum's id."""
        self.quorum_id = self.do(self._form(failed))
        return self.quorum_id

    def beat(self, steps: int = 1, **figures: Any) -> None:
        """Sends a heartbeat of each group, `steps` committed steps after the last one. `figures`: fields of pharos.Report."""
        self.step += steps
        self.do(self._beat(figures))

    def heal(self, replica_id: str, share: float) -> None:
        """Sets the healed share of a group's state, which the next heartbeat reports; 1.0: healed."""
        self.streams[replica_id].healed_bytes = int(share * STATE_BYTES) if share < 1 else -1

    def tell(self, replica_id: str, lane: str, text: str) -> None:
        self.do(self.streams[replica_id].write(timeline_event=codec.timeline_event_message(lane, self.step, text)))

    def leave(self, replica_id: str) -> None:
        self.do(self._leave(replica_id))

    def lose(self, *ids: str) -> None:
        """Breaks the streams of groups, like killed processes."""
        self.do(self._lose(ids))

    def close(self) -> None:
        self.do(self._close())
        if self._thread:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    async def _open(self, ids: list[str]) -> None:
        self._channels = self._channels or [connect(self._address) for _ in range(CONNECTIONS)]
        for replica_id, place in zip(ids, self._places):  # noqa: B905 (places have no end)
            shared = self._channels[place % CONNECTIONS]
            group = self.streams[replica_id] = LoadGroup(shared, replica_id, place, self._metadata)
            group.obeys = partial(self._obey, replica_id)
            await group.open(pharos_pb2.Hello(replica_id=replica_id))
            if place % 50 == 49:
                await asyncio.sleep(0.01)  # limits the rate of new streams, which the lighthouse must answer in time

    async def _obey(self, replica_id: str, order: str) -> None:
        self.obeyed.append((order, replica_id))
        if order == "drain":
            await self._leave(replica_id)
        await self._lose([replica_id])

    async def _leave(self, replica_id: str) -> None:
        leave = codec.to_message(m.Leave(replica_id, True, "drained"))
        await self.streams[replica_id].call("Leave", leave.SerializeToString())

    async def _form(self, failed: bool) -> int:
        groups = list(self.streams.values())
        heals = any(group.member for group in groups)
        state = {"commit_id": f"c{self.step}", "commit_quorum_id": self.quorum_id, "step": self.step}
        calls = []
        for group in groups:
            if group.member:
                calls.append(group.ask(self.quorum_id, failed=failed, world_size=8, **state))
            else:
                group.member, group.healed_bytes = True, 0 if heals else -1
                calls.append(group.ask(world_size=8))
        return max(await asyncio.gather(*calls))

    async def _beat(self, figures: dict[str, Any]) -> None:
        wall_s = 60.0 + self.step * STEP_S
        loss = 2.1 + 6.5 * math.exp(-self.step / 40) + 0.06 * math.sin(self.step * 1.7)
        for place, group in enumerate(list(self.streams.values())):
            heals = group.healed_bytes >= 0
            report = pharos_pb2.Report(
                step=m.VOID if heals else self.step, settled=max(0, self.step - 1), commit_quorum_id=self.quorum_id, mean_loss=loss,
                phase="waits for the state that it heals with" if heals else PHASES[place % 7 == 6], median_step_s=STEP_S,
                heal_done_bytes=max(0, group.healed_bytes), heal_total_bytes=STATE_BYTES if heals else 0,
                sent_s=wall_s, wall_s=wall_s, goodput_s=wall_s * (0.9 + place % 9 / 100),
            )  # fmt: skip
            report.MergeFrom(pharos_pb2.Report(**figures))
            with suppress(*BROKEN):
                await group.write(report=report)

    async def _lose(self, ids: Iterable[str]) -> None:
        for replica_id in ids:
            if group := self.streams.pop(replica_id, None):
                group.stream.cancel()

    async def _close(self) -> None:
        await self._lose(list(self.streams))
        await asyncio.gather(*(one.close() for one in self._channels))
        if self._thread and (rest := asyncio.all_tasks() - {asyncio.current_task()}):
            await asyncio.wait(rest, timeout=2)  # lets the cancelled tasks end
