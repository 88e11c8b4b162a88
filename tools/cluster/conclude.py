"""All that the ranks said, brought before verdicts.py. Pure: the same words give the same findings."""

from __future__ import annotations

from typing import Any

from tools.cluster import verdicts
from tools.cluster.settings import Settings
from tools.cluster.verdicts import Finding, Names


def conclusions(settings: Settings, names: Names, said: dict[int, dict[str, Any]], waited_s: float) -> list[Finding]:
    """All findings in what the ranks said, by rank; who is not in it said nothing."""
    seen: dict[int, str] = {}
    for words in said.values():
        seen |= {int(rank): step for rank, step in words["silent"].items() if int(rank) not in said}
    last_step = next(iter(said.values()))["step"]
    for rank in range(len(names.hosts)):
        if rank not in said:
            seen.setdefault(rank, last_step)
    found = verdicts.silent(names, seen, waited_s)
    troubles = {rank: words["trouble"] for rank, words in said.items() if words["trouble"]}
    found += verdicts.failed(names, troubles, seen)
    figures = {rank: words["figures"] for rank, words in said.items()}
    found += _wrong_values(names, figures)
    links = {(rank, int(peer)): row for rank, own in figures.items() for peer, row in own["links"].items()}
    if not found or not troubles:
        bytes_s = {link: row["bytes_s"] for link, row in links.items()}
        found += verdicts.slow_links(names, bytes_s, share=settings.slow, least=settings.least_mb_s * 1e6)
        found += verdicts.late_links(names, {link: row["latency_s"] for link, row in links.items()})
    clocks = {
        rank: (own["clock"]["ahead_s"], own["clock"]["error_s"]) for rank, own in figures.items() if "clock" in own
    }
    found += verdicts.clocks(names, clocks, limit_s=settings.skew_s) if clocks else []
    flops = {rank: own["matmul_flops"] / 1e9 for rank, own in figures.items() if "matmul_flops" in own}
    notes = {
        rank: f"; it had a core {own['core_share']:.0%} of that time"
        for rank, own in figures.items()
        if "core_share" in own
    }
    found += verdicts.slow_ranks(names, flops, what="compute", unit="GFLOP/s", share=settings.slow, notes=notes)
    return found + _disk(settings, names, {rank: own["disk"] for rank, own in figures.items() if "disk" in own})


def _wrong_values(names: Names, figures: dict[int, dict[str, Any]]) -> list[Finding]:
    by_op: dict[str, list[tuple[int, int, str]]] = {}
    for own in figures.values():
        for op, source, at, how in own["wrong"]:
            by_op.setdefault(op, []).append((source, at, how))
    size, tried = len(names.hosts), any("pairs" in own for own in figures.values())
    ring = {tuple(sorted((first, (first + 1) % size))) for first in range(size)}
    found = []
    for op, rows in by_op.items():
        bad = {tuple(pair) for own in figures.values() for pair in own.get("pairs", {}).get(op, ())}
        pairs = {(a, b): (a, b) not in bad for a, b in ring} if tried else None
        found.append(verdicts.wrong(names, op, rows, pairs))
    return found


def _disk(settings: Settings, names: Names, rows: dict[int, dict[str, Any]]) -> list[Finding]:
    found: list[Finding] = []
    for rank, text in next((row["failures"].items() for row in rows.values() if "failures" in row), ()):
        hint = f" ({settings.folder} must be one folder, seen by all)" if "FileNotFound" in text else ""
        found.append(
            Finding("failed", (int(rank),), f"{names.rank(int(rank))}: checkpoint in {settings.folder}: {text}{hint}")
        )
    for rank, row in rows.items():
        if row.get("wrong"):
            found.append(
                Finding("wrong", (rank,), f"{names.rank(rank)}: checkpoint in {settings.folder}: {row['wrong']}")
            )
    for way in ("write", "read"):
        rates = {rank: row[f"{way}_bytes_s"] / 1e6 for rank, row in rows.items() if f"{way}_bytes_s" in row}
        found += verdicts.slow_hosts(names, rates, what=f"disk ({way})", unit="MB/s", share=settings.slow)
    return found
