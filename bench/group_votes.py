"""Measures the CPU time of a replica group's server by number of ranks: for a steady step, and for the ranks' reports.

    python bench/group_votes.py             1, 64, 256 and 512 ranks: rank 0 votes for all, as in ft/agreement.py
    python bench/group_votes.py --each      each rank votes, and reports once per heartbeat interval

The ranks are stubs (connections without a trainer) in this process; the server and a lighthouse are real. A step is one vote, or one of
each rank, with its answer. Steps follow each other without a pause; the server's CPU time at rest is subtracted. Then only reports are
sent, as by ft/telemetry.py: by rank 0 every second, by the others every SELDOM_S; with --each by all every second.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.job import cpu_s
from bench.lighthouse_load import LoadStream, connect
from bench.pairs import parser, table
from ft.compat.lighthouse import LighthouseServer
from ft.protocol import messages as m
from ft.rpc import codec
from ft.rpc.clients import GroupServerProcess
from ft.rpc.generated import pharos_pb2
from ft.rpc.group_server import Settings
from ft.telemetry import SELDOM_S

STEP_BOUND_MS, REPORTS_BOUND = 1.0, 0.01  # of a core
STEPS, VOTES = 1000, 20_000  # steps with one vote each; with --each the total number of votes
SECONDS = 30.0  # duration of reports, and of rest


async def call(ranks: Sequence[LoadStream], method: str, request: Callable[[int], Any]) -> list[bytes]:
    """Sends a request from each rank at the same time. Returns the answers. `request`: of a rank's number."""
    requests = (codec.to_message(request(rank)).SerializeToString() for rank in range(len(ranks)))
    return await asyncio.gather(*(one.call(method, data) for one, data in zip(ranks, requests, strict=True)))


async def report(ranks: Sequence[LoadStream], *, each: bool) -> None:
    """Sends reports for SECONDS, spread over each second, as from ranks that started at different times."""
    until_s, beat = time.monotonic() + SECONDS, 0
    figures = pharos_pb2.Report(step=7, median_step_s=0.3, phase="forward", mean_loss=2.5)
    while (began_s := time.monotonic()) < until_s:
        due = [one for rank, one in enumerate(ranks) if each or rank == 0 or rank % SELDOM_S == beat % SELDOM_S]
        for place, one in enumerate(due):
            await one.write(report=figures)
            if place % 16 == 15:
                await asyncio.sleep(0.9 / len(due) * 16)
        beat += 1
        await asyncio.sleep(max(0.0, began_s + 1.0 - time.monotonic()))


async def measure(count: int, *, each: bool) -> tuple[float, float, float, float]:
    """Returns CPU and wall seconds per step, and CPU seconds per second at rest and with reports."""
    lighthouse = LighthouseServer("127.0.0.1:0", 1)
    server = GroupServerProcess(Settings("a:1", count, lighthouse.address(), "a:1"))
    service = ("pharos.Group", pharos_pb2.RankUp, pharos_pb2.RankDown)
    steps = max(20, VOTES // count) if each else STEPS
    ranks = [LoadStream(connect(server.address), *service) for _ in range(count)]
    try:
        for rank, one in enumerate(ranks):
            await one.open(pharos_pb2.RankHello(group_rank=rank))
        replies = await call(ranks, "Quorum", lambda rank: m.RankCall(rank, m.Member(""), number=1))
        quorum = pharos_pb2.RankReply.FromString(replies[0]).quorum.quorum_id
        voting = ranks if each else ranks[:1]

        async def vote(step: int) -> None:
            await call(voting, "CastVote", lambda rank: m.Vote(rank, "commit", quorum, 0, step, "yes", joint=not each))

        await vote(0)
        before_s = cpu_s(server.pid)
        await asyncio.sleep(SECONDS)
        idle = (cpu_s(server.pid) - before_s) / SECONDS
        before_s, began_s = cpu_s(server.pid), time.monotonic()
        for step in range(1, steps + 1):
            await vote(step)
        wall_s = time.monotonic() - began_s
        a_step = (cpu_s(server.pid) - before_s - idle * wall_s) / steps
        before_s = cpu_s(server.pid)
        await report(ranks, each=each)
        reports = (cpu_s(server.pid) - before_s) / SECONDS
        await ranks[0].call("Leave", pharos_pb2.Leave(clean=True, reason="done").SerializeToString())
        return a_step, wall_s / steps, idle, reports
    finally:
        await asyncio.gather(*(one.close() for one in ranks))
        server.close()
        lighthouse.shutdown()


def main(argv: Sequence[str]) -> int:
    flags = parser(__doc__, ranks="1,64,256,512", each=(False, "each rank votes, and reports every second"))
    options, rows, good = flags.parse_args(argv), list[list[str]](), True
    for count in map(int, options.ranks.split(",")):
        a_step, wall, idle, reports = asyncio.run(measure(count, each=options.each))
        shares = (f"{x:.2%}" for x in (idle, reports, reports - idle))
        rows.append([f"{count}", f"{1e3 * a_step:.2f} ms", f"{1e3 * wall:.2f} ms", *shares])
        good = good and (options.each or (1e3 * a_step < STEP_BOUND_MS and reports - idle < REPORTS_BOUND))
    print(table(["ranks", "CPU a step", "step time", "CPU at rest", "CPU with reports", "CPU of reports"], rows))
    if not options.each:
        met = "met" if good else "not met"
        print(f"bounds: {STEP_BOUND_MS:g} ms a step, {REPORTS_BOUND:.0%} of a core for reports: {met}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
