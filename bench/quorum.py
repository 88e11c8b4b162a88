"""Measures the cost of ft's lighthouse, compared with torchft's (Rust) if that is installed.

    make quorum PEER=PYTHON                          all but --watchers, about 20 minutes; or one by one:
    python bench/quorum.py --peer PYTHON        rounds of 2 to 1,000 groups
    python bench/quorum.py --heartbeats         rounds during torchft's heartbeats, ten a second from each group
    python bench/quorum.py --idle               1,000 groups of ours between quorums
    python bench/quorum.py --churn              memory after 10,000 membership changes
    python bench/quorum.py --watchers 5         rounds of 1,000 groups with and without five open dashboards

PEER is a Python that has torchft-nightly (pip install --no-deps); without it only ours is measured. A round: N groups send a quorum request
at once, as in a training step, until all have their answer. Each lighthouse is a separate process for the whole run, gets the same requests
over the same protocol, and they alternate: ratios are computed per pair. "known" is ft's own protocol with members that know the static
part of the quorum, as ft's groups do; its answers are short. The load runs on the same machine: its CPU time is printed, and if it uses
100 % of a core, the load determines the result. "bare" is the minimum for a server in Python: grpc.aio, which collects the calls and
answers with as many bytes. Run it on an idle machine (Linux).
"""

from __future__ import annotations

import asyncio
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench import lighthouse_load as load
from bench.job import LighthouseProcess, cpu_s, memory_bytes, their_lighthouse
from bench.pairs import Ratio, in_turns, parser, ratio, table
from ft.rpc.generated import torchft_pb2
from ft.rpc.serving import room_for_connections

# Maximum ratio of a round to torchft's, by groups: over torchft's protocol (ours), and over ft's own (known)
BOUNDS = {"ours": {2: 2.0, 8: 2.0, 64: 1.25, 256: 0.65, 1000: 0.42}, "known": {1000: 0.25}}
BEATING = (256, 384, 512, 768, 1000)  # numbers of groups, until one exceeds the bound
BEATS_BOUND, IDLE_BOUND, CHURN_BOUND_MB, WATCHED_BOUND = 1.5, 0.20, 5.0, 1.1
SECONDS = 60.0  # of heartbeats, or of idleness
ROUND_EVERY_S = 0.5  # during heartbeats: a short step
GROUPS = 1000  # idle, or watched
CHANGES = (1_000, 10_000)


def main() -> None:
    flags = parser(__doc__, peer=(str, "a Python that has torchft"), pairs=(9, "measurements of each side"))
    kind = flags.add_mutually_exclusive_group()
    for what in (heartbeats, idle, churn):
        kind.add_argument(f"--{what.__name__}", dest="what", action="store_const", const=what)
    text = "number of open dashboards; 0: the noise between two equal sides"
    kind.add_argument("--watchers", type=int, metavar="N", help=text)
    options = flags.parse_args()
    if options.what:
        asyncio.run(options.what())
    elif options.watchers is not None:
        asyncio.run(watched(options.watchers, options.pairs))
    else:
        asyncio.run(rounds(options.pairs, options.peer))


async def rounds(pairs: int, peer: str | None) -> None:
    rows = []
    for groups in BOUNDS["ours"]:
        sides = {"ours": load.torchft_side(load.ours(groups), groups)}
        sides["known"] = await load.known_side(load.ours(groups), groups)
        for name in ("ours", "known"):
            sides[f"bare, as {name}"] = await load.bare_side(groups, sides[name])
        if peer:
            sides["torchft"] = load.torchft_side(LighthouseProcess(their_lighthouse(groups, peer)), groups)
        turns = await taken(sides, pairs, max(5, min(100, 4000 // groups)))
        for name, side in turns.items():
            theirs = turns["torchft"]["median ms"] if peer and name != "torchft" else ()
            beside, bound = ratio(side["median ms"], theirs) if theirs else None, BOUNDS.get(name, {}).get(groups)
            verdict = f"{bound:g}x {_reached(beside, bound)}" if beside and bound else ""
            answer = str(len(sides[name].answer))
            rows.append([f"{groups} groups, {name}", *_figures(side), answer, str(beside or ""), verdict])
        print(f"{groups} groups done", file=sys.stderr)
    print(table(["a round", *load.FIGURES, "bytes an answer", "beside torchft's", "bound"], rows))


async def taken(sides: dict[str, load.LoadSide], pairs: int, rounds: int) -> dict[str, dict[str, tuple[float, ...]]]:
    """Measures the sides, alternating, and closes them. Returns the values of FIGURES of each side, by turn."""
    loop = asyncio.get_running_loop()

    def turn(side: load.LoadSide) -> tuple[float, ...]:
        return asyncio.run_coroutine_threadsafe(side.turn(rounds), loop).result()

    asked = {name: partial(turn, side) for name, side in sides.items()}
    try:
        turns = await asyncio.to_thread(in_turns, asked, pairs, warm=1)
    finally:
        for side in sides.values():
            await side.close()
    return {name: dict(zip(load.FIGURES, zip(*of, strict=True), strict=True)) for name, of in turns.items()}


async def watched(watchers: int, pairs: int) -> None:
    """Compares two lighthouses with a dashboard, one of which has `watchers`. Each round is a step of all groups, which dashboards show."""
    servers = {name: load.ours(GROUPS, http="127.0.0.1:0") for name in ("watched", "unwatched")}
    page = (await asyncio.to_thread(servers["watched"].line)).strip()
    sides = {name: await load.known_side(server, GROUPS) for name, server in servers.items()}
    with load.beside(load.read_events, page, watchers) as had:
        turns = await taken(sides, pairs, 24)  # some seconds, with an update of the dashboards in each
        updates, size = had()
    beside, cpu = (ratio(*(turns[name][of] for name in servers)) for of in load.FIGURES[:2])
    rows = [[f"{GROUPS} groups, {name}", *_figures(side)] for name, side in turns.items()]
    print(table(["a round", *load.FIGURES], rows))
    verdict = _reached(beside, WATCHED_BOUND)
    print(f"with {watchers} watchers: {beside} of a round (bound {WATCHED_BOUND}x: {verdict}), {cpu} of its CPU")
    print(f"each had {updates / max(1, watchers):.0f} updates of {size / max(1, updates) / 1000:.1f} KB on average")


def _figures(side: dict[str, tuple[float, ...]]) -> list[str]:
    medians = {name: statistics.median(figures) for name, figures in side.items()}
    return [f"{median:.0%}" if name == "load busy" else f"{1e3 * median:.2f}" for name, median in medians.items()]


def _reached(beside: Ratio, bound: float) -> str:
    return "reached" if beside.high <= bound else "in range" if beside.low <= bound else "missed"


async def heartbeats() -> None:
    """Measures rounds every ROUND_EVERY_S, with and without heartbeats. Ends at the first number of groups that exceeds the bound."""
    rows, largest = [], 0
    for groups in BEATING:
        row, holds = await _beaten(groups)
        rows.append([str(groups), *row])
        print(f"{groups} groups: {'hold' if holds else 'do not hold'}", file=sys.stderr)
        if not holds:
            break
        largest = groups
    print(table(["groups", "heartbeats/s", "intended", "ms without", "ms with", "ratio", "server CPU", "lost"], rows))
    print(f"the largest that holds ({BEATS_BOUND}x, nobody lost, {SECONDS:g} s of beats): {largest} groups")


async def _beaten(groups: int) -> tuple[list[str], bool]:
    """Measures rounds without heartbeats, with them, and without them again."""
    side = load.torchft_side(load.ours(groups // 2 + 1, heartbeat_timeout_ms=5000), groups)
    beating = partial(load.beside, load.beat, side.server.address, groups)
    try:
        with beating():  # else the first half of the groups would form a quorum
            await side.round()
        quiet, lost = await _paced(side, groups, SECONDS / 3)
        with beating() as stop:
            began_s, used_s = time.perf_counter(), cpu_s(side.server.pid)
            beaten, lost_too = await _paced(side, groups, SECONDS)
            answered, took_s, used_s = stop(), time.perf_counter() - began_s, cpu_s(side.server.pid) - used_s
        again, lost_again = await _paced(side, groups, SECONDS / 3)
    finally:
        await side.close()
    quiet_s, beaten_s = statistics.median(quiet + again), statistics.median(beaten)
    slower, lost = beaten_s / quiet_s, lost + lost_too + lost_again
    beats = [f"{answered / took_s:.0f}", f"{groups / load.BEAT_S:.0f}"]
    times = [f"{1e3 * quiet_s:.1f}", f"{1e3 * beaten_s:.1f}", f"{slower:.2f}x"]
    return [*beats, *times, f"{used_s / took_s:.0%}", str(lost)], slower <= BEATS_BOUND and not lost


async def _paced(side: load.LoadSide, groups: int, seconds: float) -> tuple[list[float], int]:
    """Returns the seconds of each round, and the number of members that were missing in quorums, although alive."""
    times, lost, end_s = [], 0, time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        times.append(await side.round())
        quorum = torchft_pb2.LighthouseQuorumResponse.FromString(side.answer).quorum
        lost += groups - len(quorum.participants)
        await asyncio.sleep(max(0.0, ROUND_EVERY_S - times[-1]))
    return times, lost


async def idle() -> None:
    """Measures groups in a quorum that train: a heartbeat a second on a stream each, without quorum requests."""
    room_for_connections()
    server = load.ours(GROUPS, heartbeat_timeout_ms=5000, http="127.0.0.1:0")
    page = (await asyncio.to_thread(server.line)).strip()
    groups = [load.LoadGroup(load.connect(server.address), load.replica_id(i)) for i in range(GROUPS)]

    def seen() -> list[float]:
        """Returns totals: quorums, heartbeats, other messages; wall seconds, CPU seconds of the server and of the load."""
        with urllib.request.urlopen(f"{page}/metrics", timeout=60) as answer:
            [quorums] = re.findall(r"(?m)^pharos_quorums_total\S* (\S+)", answer.read().decode())
        beats, notices = (sum(getattr(group, of) for group in groups) for of in ("beats", "notices"))
        return [float(quorums), beats, notices, time.perf_counter(), cpu_s(server.pid), time.process_time()]

    try:
        for begin in range(0, GROUPS, 20):
            await asyncio.gather(*(group.begin() for group in groups[begin : begin + 20]))
        await asyncio.gather(*(group.ask() for group in groups))
        before = await asyncio.to_thread(seen)
        await asyncio.sleep(SECONDS)
        since = (b - a for a, b in zip(before, await asyncio.to_thread(seen), strict=True))
        quorums, beats, notices, took_s, used_s, load_s = since
    finally:
        await asyncio.gather(*(group.close() for group in groups))
        memory_mb = memory_bytes("VmRSS", server.pid) / 2**20
        server.close()
    per_s = f"{GROUPS} groups, {beats / took_s:.0f} beats/s for {took_s:.0f} s"
    print(f"{per_s}: {quorums:.0f} quorums, {notices} notices")
    share = used_s / beats * GROUPS  # scaled to one heartbeat a second per group, if the load was slower
    bound = f"(bound {IDLE_BOUND:.0%}: {'reached' if share < IDLE_BOUND else 'missed'})"
    print(f"lighthouse: {1e6 * used_s / beats:.0f} us a beat, {share:.1%} of a core {bound}, {memory_mb:.0f} MB")
    print(f"the load: {load_s / took_s:.0%} of a core")


async def churn() -> None:
    """Measures memory while one group stays and its peer is killed and replaced under a new name: two lost members, one quorum each."""
    with tempfile.TemporaryDirectory() as folder:
        server = load.ours(2, state_file=Path(folder, "state.json"))
        memory: list[float] = []
        try:
            stays, known = load.LoadGroup(load.connect(server.address), "stays:1"), 0
            await stays.begin(beats=False)
            for change in range(1, CHANGES[-1] + 1):
                name = f"peer_{change:06d}:0f0e0d0c-0000-4000-8000-000000000000"
                comes = load.LoadGroup(load.connect(server.address), name)
                await comes.begin(beats=False)
                known, _ = await asyncio.gather(stays.ask(known, failed=known > 0), comes.ask())
                await comes.close()
                if change in CHANGES:
                    memory.append(memory_bytes("VmRSS", server.pid) / 2**20)
                    print(f"{memory[-1]:.1f} MB after {change:,} changes, quorum {known}")
            grown = memory[-1] - memory[0]
            verdict = "reached" if grown <= CHURN_BOUND_MB else "missed"
            print(f"grown by {grown:.1f} MB (bound {CHURN_BOUND_MB:g}: {verdict})")
            await stays.close()
        finally:
            server.close()


if __name__ == "__main__":
    main()
