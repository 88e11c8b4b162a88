"""Measures the cost of one group's ranks to their server: CPU of its process for a steady step, and for what ranks report.

    python bench/group_votes.py             1, 64, 256 and 512 ranks: one of them asks for all, as ft/agreement.py has it
    python bench/group_votes.py --each      each rank casts its vote, and reports once a beat

The ranks are stubs, connections without a trainer, in this process; the server and a lighthouse are real. A step is what reaches the
server: one vote, or one of each rank, with its answer. Steps follow each other at once, and what the server takes at rest is not counted.
Then there are reports alone, as ft/telemetry.py sends them: rank 0 once a beat, the others every SELDOM_S; or all once a beat.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.job import cpu_s
from bench.pairs import parser, table
from ft.compat.lighthouse_server import LighthouseServer
from ft.protocol import messages as m
from ft.rpc import codec
from ft.rpc.access import Access
from ft.rpc.clients import GroupProcess
from ft.rpc.generated import pharos_pb2
from ft.rpc.group_server import Settings
from ft.rpc.lighthouse_link import channel

STEP_BOUND_MS, REPORTS_BOUND = 1.0, 0.01  # of a core
SELDOM_S = 30.0  # ft/telemetry.py


class VotingRanks:
    """Stubs of all ranks of a group."""

    def __init__(self, address: str, count: int) -> None:
        self._channels = [channel(address, Access(), aio=True) for _ in range(count)]
        self._streams: list[Any] = []
        self._reading: list[asyncio.Task[None]] = []
        self.quorum_id = 0

    async def __aenter__(self) -> VotingRanks:
        for rank, one in enumerate(self._channels):
            stream = one.stream_stream("/pharos.Group/Watch")()
            await stream.write(self._up(hello=pharos_pb2.RankHello(group_rank=rank)))
            self._streams.append(stream)
            self._reading.append(asyncio.ensure_future(_read(stream)))
        calls = [m.RankCall(rank, m.Member(""), number=1) for rank in range(len(self._channels))]
        asked = (self._call(rank, "Quorum", codec.to_message(call)) for rank, call in enumerate(calls))
        replies = await asyncio.gather(*asked)
        self.quorum_id = pharos_pb2.RankReply.FromString(replies[0]).part.quorum_id
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._call(0, "Leave", pharos_pb2.Leave(clean=True, reason="done"))
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*(one.close() for one in self._channels))

    async def step(self, step: int, *, each: bool) -> None:
        vote = m.Vote(0, "commit", self.quorum_id, 0, step, "yes", **({} if each else {"whole": True}))
        votes = [replace(vote, group_rank=rank) for rank in range(len(self._channels))] if each else [vote]
        await asyncio.gather(*(self._call(v.group_rank, "CastVote", codec.to_message(v)) for v in votes))

    async def report(self, rank: int, *, waiting: bool = False) -> None:
        report = pharos_pb2.Report(step=7, waiting=waiting, median_step_s=0.3, phase="forward", mean_loss=2.5)
        await self._streams[rank].write(self._up(report=report))

    async def report_for(self, seconds: float, *, each: bool) -> None:
        """Spread over each beat, as ranks are that began at different times."""
        count, until_s, beat = len(self._channels), time.monotonic() + seconds, 0
        while (began_s := time.monotonic()) < until_s:
            due = [rank for rank in range(count) if each or rank == 0 or rank % SELDOM_S == beat % SELDOM_S]
            for place, rank in enumerate(due):
                await self.report(rank)
                if place % 16 == 15:
                    await asyncio.sleep(0.9 / len(due) * 16)
            beat += 1
            await asyncio.sleep(max(0.0, began_s + 1.0 - time.monotonic()))

    def _call(self, rank: int, method: str, message: Any) -> Any:
        return self._channels[rank].unary_unary(f"/pharos.Group/{method}")(message.SerializeToString(), timeout=60)

    @staticmethod
    def _up(**what: Any) -> bytes:
        return bytes(pharos_pb2.RankUp(**what).SerializeToString())


async def _read(stream: Any) -> None:
    async for _ in stream:
        pass


async def measure(count: int, *, each: bool, steps: int, seconds: float) -> tuple[float, float, float, float]:
    """Seconds of CPU and of the clock a step; of CPU a second without reports, and with them."""
    lighthouse = LighthouseServer("127.0.0.1:0", 1)
    server = GroupProcess(Settings("a:1", count, lighthouse.address(), "a:1"))
    try:
        async with VotingRanks(server.address, count) as ranks:
            await ranks.step(0, each=each)
            before_s = cpu_s(server.pid)
            await asyncio.sleep(seconds)
            idle = (cpu_s(server.pid) - before_s) / seconds
            before_s, began_s = cpu_s(server.pid), time.monotonic()
            for step in range(1, steps + 1):
                await ranks.step(step, each=each)
            wall_s = time.monotonic() - began_s
            a_step = (cpu_s(server.pid) - before_s - idle * wall_s) / steps
            before_s = cpu_s(server.pid)
            await ranks.report_for(seconds, each=each)
            reports = (cpu_s(server.pid) - before_s) / seconds
            return a_step, wall_s / steps, idle, reports
    finally:
        server.close()
        lighthouse.shutdown()


def main(argv: Sequence[str]) -> int:
    options = parser(
        __doc__,
        ranks="1,64,256,512",
        each=(False, "each rank votes, and reports once a beat"),
        steps=(int, "default: 1,000; --each: 20,000 votes in all"),
        seconds=(30.0, "of reports, and of idleness before"),
    ).parse_args(argv)
    header = ["ranks", "CPU a step", "a step takes", "CPU at rest", "CPU with reports", "of reports"]
    rows, good, each = list[list[str]](), True, options.each
    for count in map(int, options.ranks.split(",")):
        steps = options.steps or (max(20, 20_000 // count) if each else 1000)
        a_step, wall, idle, reports = asyncio.run(measure(count, each=each, steps=steps, seconds=options.seconds))
        shares = (f"{x:.2%}" for x in (idle, reports, reports - idle))
        rows.append([f"{count}", f"{1e3 * a_step:.2f} ms", f"{1e3 * wall:.2f} ms", *shares])
        good = good and (each or (1e3 * a_step < STEP_BOUND_MS and reports - idle < REPORTS_BOUND))
    print(table(header, rows))
    if not each:
        met = "met" if good else "not met"
        print(f"bounds: {STEP_BOUND_MS:g} ms a step, {REPORTS_BOUND:.0%} of a core for reports: {met}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
