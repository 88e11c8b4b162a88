"""For bench/page.py and tests/dashboard: groups that speak to a real lighthouse as ours do, and only say that they train.

They share a few connections, so that a thousand of them fit a laptop; each has its stream, and obeys orders: killed, it goes without a
word, drained, it leaves.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import grpc
import grpc.aio

from ft.protocol import messages as m
from ft.rpc import codec
from ft.rpc.access import Access
from ft.rpc.generated import pharos_pb2
from ft.rpc.lighthouse_link import channel

R = TypeVar("R")
PHASES = ("forward, backward and reduction", "waits whether the step holds")
STEP_S = 0.5
CONNECTIONS = 16
STATE_BYTES = 3 << 30  # that a healing group fetches


class Herd:
    """Every method waits until it is done. Groups beat only in `beat`."""

    def __init__(self, address: str, token: str = "", *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """loop: one that runs in another thread; else there is one of its own. (grpc.aio does not bear one that ends beside another.)"""
        self._loop, self._thread = loop or asyncio.new_event_loop(), None
        if loop is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="herd", daemon=True)
            self._thread.start()
        self._metadata = Access(token).metadata()
        self._channels = self.do(self._connect(address, Access(token)))
        self.streams: dict[str, Any] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._heals: dict[str, int] = {}  # id -> bytes that it has
        self._numbers: dict[str, int] = {}
        self._members: set[str] = set()
        self.step, self.quorum_id = 0, 0
        self.obeyed: list[tuple[str, str]] = []  # order, id

    def do(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    async def _connect(self, address: str, access: Access) -> list[Any]:
        return [channel(address, access, aio=True) for _ in range(CONNECTIONS)]

    # ---- what a test or a picture wants

    def open(self, ids: Iterable[str]) -> None:
        """Makes groups known to the lighthouse, in no quorum yet."""
        self.do(self._open(list(ids)))

    def form(self, *, failed: bool = False) -> int:
        """Lets all groups ask for a quorum; those that were in none heal. Returns its id."""
        self.quorum_id = self.do(self._form(failed))
        return self.quorum_id

    def beat(self, steps: int = 1, **figures: Any) -> None:
        """A beat of each, so many committed steps after the last one. figures: fields of pharos.Report, of all."""
        self.step += steps
        self.do(self._beat(figures))

    def heal(self, replica_id: str, share: float) -> None:
        """Reports so much of the state as healed; 1.0: all of it, with the next beat."""
        self._heals[replica_id] = int(share * STATE_BYTES)
        if share >= 1:
            del self._heals[replica_id]

    def tell(self, replica_id: str, lane: str, text: str) -> None:
        happened = codec.happened_message(lane, self.step, text)
        self.do(self.streams[replica_id].write(pharos_pb2.Up(happened=happened).SerializeToString()))

    def leave(self, replica_id: str) -> None:
        """Leaves with a clean goodbye."""
        self.do(self._leave(replica_id))

    def lose(self, *ids: str) -> None:
        """Ends groups as killed processes end."""
        self.do(self._lose(ids))

    def close(self) -> None:
        self.do(self._close())
        if self._thread:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    # ---- on the loop

    async def _open(self, ids: list[str]) -> None:
        for place, replica_id in enumerate(ids):
            one = self._channels[place % CONNECTIONS].stream_stream("/pharos.Lighthouse/Watch")(metadata=self._metadata)
            self.streams[replica_id] = one
            hello = pharos_pb2.Hello(replica_id=replica_id)
            await one.write(pharos_pb2.Up(hello=hello).SerializeToString())
            self._readers[replica_id] = asyncio.ensure_future(self._read(replica_id, one))
            if place % 50 == 49:
                await asyncio.sleep(0.01)  # or the lighthouse is asked for more than it answers in time

    async def _read(self, replica_id: str, stream: Any) -> None:
        with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.CancelledError):
            while (data := await stream.read()) is not grpc.aio.EOF:
                down = pharos_pb2.Down.FromString(data)
                if down.WhichOneof("down") == "order":
                    self.obeyed.append((down.order.kind, replica_id))
                    if down.order.kind == "drain":
                        await self._leave(replica_id)
                    self._ends = asyncio.ensure_future(self._lose([replica_id]))  # not here: it cancels this task

    async def _leave(self, replica_id: str) -> None:
        leave = codec.to_message(m.Leave(replica_id, True, "drained")).SerializeToString()
        await self._channels[0].unary_unary("/pharos.Lighthouse/Leave")(leave, metadata=self._metadata)

    async def _form(self, failed: bool) -> int:
        answers = await asyncio.gather(*(self._ask(place, name, failed) for place, name in enumerate(self.streams)))
        self._members = set(self.streams)
        return max(answers)

    async def _ask(self, place: int, replica_id: str, failed: bool) -> int:
        inside = replica_id in self._members
        at = f"10.{place >> 16}.{place >> 8 & 255}.{place & 255}"
        step, quorum, commit = (self.step, self.quorum_id, f"c{self.step}") if inside else (0, 0, "")
        if not inside and self._members:
            self._heals[replica_id] = 0
        member = m.Member(replica_id, f"http://{at}:1", f"{at}:2", step, 8, commit_quorum_id=quorum, commit_id=commit)
        number = self._numbers[replica_id] = self._numbers.get(replica_id, 0) + 1
        known = self.quorum_id if inside else 0
        call = m.Call(member, known=known, failed=failed and inside, number=number)
        request = pharos_pb2.QuorumRequest(call=codec.to_message(call)).SerializeToString()
        ask = self._channels[place % CONNECTIONS].unary_unary("/pharos.Lighthouse/Quorum")
        reply = pharos_pb2.QuorumReply.FromString(await ask(request, timeout=60, metadata=self._metadata))
        return int(reply.quorum.quorum_id)

    async def _beat(self, figures: dict[str, Any]) -> None:
        wall_s = 60.0 + self.step * STEP_S
        loss = 2.1 + 6.5 * math.exp(-self.step / 40) + 0.06 * math.sin(self.step * 1.7)
        for place, (replica_id, stream) in enumerate(list(self.streams.items())):
            heals = replica_id in self._heals
            report = pharos_pb2.Report(
                step=m.VOID if heals else self.step,
                commit_quorum_id=self.quorum_id,
                median_step_s=STEP_S,
                settled=max(0, self.step - 1),
                sent_s=wall_s,
                phase="waits for the state it heals" if heals else PHASES[place % 7 == 6],
                goodput_s=wall_s * (0.9 + place % 9 / 100),
                wall_s=wall_s,
                mean_loss=loss,
                heal_done_bytes=self._heals.get(replica_id, 0),
                heal_total_bytes=STATE_BYTES if heals else 0,
            )
            report.MergeFrom(pharos_pb2.Report(**figures))
            with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):  # one that is just lost
                await stream.write(pharos_pb2.Up(report=report).SerializeToString())

    async def _lose(self, ids: Iterable[str]) -> None:
        for replica_id in ids:
            self._members.discard(replica_id)
            self._heals.pop(replica_id, None)
            if stream := self.streams.pop(replica_id, None):
                stream.cancel()
                self._readers.pop(replica_id).cancel()

    async def _close(self) -> None:
        await self._lose(list(self.streams))
        await asyncio.gather(*(one.close() for one in self._channels))
        if self._thread and (rest := asyncio.all_tasks() - {asyncio.current_task()}):
            await asyncio.wait(rest, timeout=2)  # until the cancelled tasks have ended
