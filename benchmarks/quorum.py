"""A round of quorums: N groups ask at once, as in a training step, and all have their answer. Our lighthouse beside torchft's (Rust).

    python benchmarks/quorum.py [--groups 8,64,256,1000] [--pairs 10] [--rounds 20] [--peer PYTHON]

PEER is a Python that has torchft-nightly; without one only ours is measured. Both lighthouses stand in processes of their own for the
whole run, the load is the same bytes over the same wire (torchft's), and they take turns: ratios are taken inside a pair. "ours, known"
is our own wire with members that hold the roster already, which is what our groups send; its answers are short.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

import grpc.aio

from benchmarks.pairs import ratio, table
from ft.protocol import messages as m
from ft.rpc import codec
from ft.rpc.generated import pharos_pb2, torchft_pb2

ROOT = Path(__file__).resolve().parents[1]
OURS = "import sys; from ft.rpc.lighthouse_main import main; sys.exit(main(sys.argv[1:]))"
THEIRS = """
import sys, time
import importlib.machinery, importlib.util
from pathlib import Path
folder = Path(importlib.util.find_spec("torchft").origin).parent
path = str(next(folder.glob("_torchft*.so")))  # the server alone: the package would load torch
loader = importlib.machinery.ExtensionFileLoader("_torchft", path)
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_torchft", loader))
loader.exec_module(module)
server = module.LighthouseServer("127.0.0.1:0", int(sys.argv[1]), join_timeout_ms=60_000)
print("http://127.0.0.1:" + server.address().rpartition(":")[2], flush=True)
time.sleep(1e6)
"""
CHANNELS = 8


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="8,64,256,1000")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20, help="in each turn of a pair; its figure is their median")
    parser.add_argument("--peer", metavar="PYTHON")
    options = parser.parse_args(argv)
    rows = []
    for groups in map(int, options.groups.split(",")):
        figures, sizes = asyncio.run(measure(groups, options.pairs, options.rounds, options.peer))
        for side, times in figures.items():
            beside = str(ratio(times, figures["torchft"])) if side != "torchft" and "torchft" in figures else ""
            rows.append([f"{groups} groups, {side}", f"{1e3 * statistics.median(times):.2f}", str(sizes[side]), beside])
    print(table(["a round", "median ms", "bytes an answer", "beside torchft's"], rows))
    return 0


@dataclass
class Side:
    """One lighthouse and its load."""

    process: subprocess.Popen[str]
    channels: list[Any]
    path: str
    requests: list[bytes]
    size: int = 0

    async def round(self) -> float:
        calls = [channel.unary_unary(self.path) for channel in self.channels]
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(calls[i % CHANNELS](request, timeout=120) for i, request in enumerate(self.requests))
        )
        took_s = time.perf_counter() - began
        self.size = len(answers[0])
        return took_s

    async def turn(self, rounds: int) -> float:
        return statistics.median([await self.round() for _ in range(rounds)])

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()
        self.process.kill()
        self.process.communicate()


async def measure(
    groups: int, pairs: int, rounds: int, peer: str | None
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of a round, for each side and pair; bytes of an answer."""
    sides = {"ours": await ours(groups), "ours, known": await ours_known(groups)}
    if peer:
        sides["torchft"] = await theirs(groups, peer)
    figures: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for side in sides.values():
            await side.turn(2)
        for pair in range(pairs):
            for name in list(sides) if pair % 2 else reversed(sides):
                figures[name].append(await sides[name].turn(rounds))
        return figures, {name: side.size for name, side in sides.items()}
    finally:
        for side in sides.values():
            await side.close()


async def ours(groups: int) -> Side:
    return start(
        [sys.executable, "-c", OURS, *_flags(groups)], "/torchft.LighthouseService/Quorum", _torchft_calls(groups)
    )


async def theirs(groups: int, peer: str) -> Side:
    return start([peer, "-c", THEIRS, str(groups)], "/torchft.LighthouseService/Quorum", _torchft_calls(groups))


async def ours_known(groups: int) -> Side:
    """Two rounds for the roster; then each group says that it holds it."""
    first = [
        pharos_pb2.QuorumRequest(call=codec.to_message(m.Call(x))).SerializeToString() for x in _members(groups, 0)
    ]
    side = start([sys.executable, "-c", OURS, *_flags(groups)], "/pharos.Lighthouse/Quorum", first)
    calls = [channel.unary_unary(side.path) for channel in side.channels]
    answers = await asyncio.gather(*(calls[i % CHANNELS](request, timeout=120) for i, request in enumerate(first)))
    quorum = codec.quorum_from(pharos_pb2.QuorumReply.FromString(answers[0]).quorum)
    roster = codec.Roster.of(quorum).id
    later = [m.Call(x, known=quorum.quorum_id) for x in _members(groups, quorum.quorum_id)]
    side.requests = [
        pharos_pb2.QuorumRequest(call=codec.to_message(x), roster=roster).SerializeToString() for x in later
    ]
    return side


def start(command: list[str], path: str, requests: list[bytes]) -> Side:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    assert process.stdout
    address = process.stdout.readline().strip().removeprefix("http://")
    options = [("grpc.max_receive_message_length", 1 << 30), ("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CHANNELS)]
    return Side(process, channels, path, requests)


def _flags(groups: int) -> list[str]:
    times = ["--heartbeat_timeout_ms", "3600000"]  # whoever asks in rounds does not beat in between
    return ["--min_replicas", str(groups), "--bind", "127.0.0.1:0", "--http", "none", "--state_file", "none", *times]


def _members(groups: int, commit_quorum_id: int) -> list[m.Member]:
    names = [f"replica_{i:05d}:0f0e0d0c-0000-4000-8000-{i:012d}" for i in range(groups)]
    hosts = [f"10.0.{i >> 8}.{i & 255}" for i in range(groups)]
    step = 7 if commit_quorum_id else 0
    return [
        m.Member(
            name,
            f"http://{host}:29600",
            f"{host}:29601",
            step,
            8,
            commit_quorum_id=commit_quorum_id,
            commit_id="5" * 16 if step else "",
        )
        for name, host in zip(names, hosts, strict=True)
    ]


def _torchft_calls(groups: int) -> list[bytes]:
    members = map(codec.torchft_member, _members(groups, 0))
    return [torchft_pb2.LighthouseQuorumRequest(requester=member).SerializeToString() for member in members]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
