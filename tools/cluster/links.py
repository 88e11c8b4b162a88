"""Pair by pair: how long a message takes, and how many bytes a second go each way.

`rounds` says who is measured when (pure); `measure` is one rank's side of one pair.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from parallelisms.device import DIFFERENCES
from tools.cluster.speeds import settle
from tools.cluster.values import Team

Pair = tuple[int, int]
ALL_PAIRS = 64  # ranks up to which every pair is measured
PINGS, TRIES = 10, 3
SMALLEST, GROWTH = 1 << 16, 4  # bytes of a try; they grow until one takes LONG_S
LONG_S = 0.02


def pairs(hosts: Sequence[str]) -> list[Pair]:
    """By rank's host. Of many ranks: those on one host, and between hosts those of equal place (one "rail" of network cards)."""
    everybody = itertools.combinations(range(len(hosts)), 2)
    if len(hosts) <= ALL_PAIRS:
        return list(everybody)
    seen: dict[str, int] = {}
    place = [seen[host] for host in hosts if seen.update({host: seen.get(host, -1) + 1}) is None]
    return [(a, b) for a, b in everybody if hosts[a] == hosts[b] or place[a] == place[b]]


def rounds(chosen: Iterable[Pair], hosts: Sequence[str]) -> list[list[Pair]]:
    """In a round no host is in two pairs, so that none measures the other's traffic."""
    made: list[tuple[list[Pair], set[str]]] = []
    for a, b in chosen:
        here = {hosts[a], hosts[b]}
        for members, busy in made:
            if not busy & here:
                members.append((a, b))
                busy |= here
                break
        else:
            made.append(([(a, b)], set(here)))
    return [members for members, _ in made]


def measure(team: Team, pair: Pair) -> dict[str, float]:
    """This rank's sending to the other one: `latency_s` (half a round trip, the best of some), `bytes_s`."""
    first, second = pair
    if team.rank == first:
        figures = _send(team, second)
        _answer(team, second)
        return figures
    _answer(team, first)
    return _send(team, first)


def _send(team: Team, peer: int) -> dict[str, float]:
    """A header with the size, the bytes, and an answer when they are there; a size of 0 ends it."""
    header, answer = torch.zeros(1, dtype=torch.int64, device=team.device), torch.zeros(1, device=team.device)

    def trip(size: int) -> float:
        payload = torch.zeros(size, dtype=torch.uint8, device=team.device)
        header.fill_(size)
        settle(team.device)
        start = time.perf_counter()
        dist.send(header, peer, team.group)
        dist.send(payload, peer, team.group)
        dist.recv(answer, peer, team.group)
        settle(team.device)
        return time.perf_counter() - start

    quickest = min(trip(1) for _ in range(PINGS + 1))
    size, taken = SMALLEST, trip(SMALLEST)
    while taken < LONG_S and size < DIFFERENCES[team.device.type].largest_message:
        size *= GROWTH
        taken = min(trip(size) for _ in range(TRIES))
    dist.send(header.zero_(), peer, team.group)
    return {"latency_s": quickest / 2, "bytes_s": size / taken}  # header and answer counted in: little beside LONG_S


def _answer(team: Team, peer: int) -> None:
    header, answer = torch.zeros(1, dtype=torch.int64, device=team.device), torch.zeros(1, device=team.device)
    while True:
        dist.recv(header, peer, team.group)
        if (size := int(header.item())) == 0:
            return
        dist.recv(torch.empty(size, dtype=torch.uint8, device=team.device), peer, team.group)
        dist.send(answer, peer, team.group)
