"""The report: printed as text, and written as JSON and a picture of the links. The lowest rank with a report calls `publish`."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from itertools import permutations
from typing import Any

from bench.pairs import table
from scripts.plot_loss import STYLE
from tools.cluster.measurements import bus_factor
from tools.cluster.settings import USUAL_SHARE, CheckSettings
from tools.cluster.verdicts import Finding

Reports = Mapping[int, Mapping[str, Any]]  # by rank
MAX_SHOWN = 16  # maximum number of ranks for which links are printed; the files have all
WIDTH, SIDE, LEFT, TOP = 880, 340, 76, 92  # pixels; SIDE: of the matrix of links
MORE_STYLE = """
  .good { fill: var(--c1); } .bad { fill: var(--mark); } .none { fill: var(--grid); opacity: .5; }
  text.small { font-size: 11px; } text.head { font-weight: 600; fill: var(--ink); }
  text.row { font: 12px ui-monospace, Menlo, Consolas, monospace; white-space: pre; }
"""


def publish(settings: CheckSettings, hosts: Sequence[str], reports: Reports, found: Sequence[Finding]) -> None:
    """Prints the report, then writes <folder>/check_cluster/report.json and report.svg. Raises OSError."""
    report = as_json(settings, hosts, reports, found)
    lines = text(report)
    print(lines, flush=True)  # first: that the folder cannot be written may be a finding
    folder = settings.folder / "check_cluster"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "report.svg").write_text(draw(report, lines), encoding="utf-8")
    print(f"\n{folder}/report.json, report.svg", flush=True)


def as_json(
    settings: CheckSettings, hosts: Sequence[str], reports: Reports, found: Sequence[Finding]
) -> dict[str, Any]:
    """Returns all values, in seconds, bytes and bytes a second. Keys that are ranks or sizes are strings, as in JSON."""
    some = next(iter(reports.values()))
    # By operation and size: the time of the slowest rank, and the rate of the busiest link
    operations: dict[str, dict[str, dict[str, float]]] = {}
    for op, sizes in ((op, sizes) for own in reports.values() for op, sizes in own["figures"]["seconds"].items()):
        for bytes_, taken in sizes.items():
            slowest = max(taken, operations.setdefault(op, {}).get(bytes_, {}).get("seconds", 0.0))
            rate = int(bytes_) * bus_factor(op, len(hosts)) / slowest
            operations[op][bytes_] = {"seconds": slowest, "bus_bytes_s": rate}
    return {
        "good": not found,
        "findings": [asdict(finding) for finding in found],
        "world_size": len(hosts),
        "hosts": list(hosts),
        "backend": some["figures"].get("backend", settings.backend),
        "init_method": settings.init_method,
        "torch": some["torch"],
        "slow": settings.slow,
        "ranks": {str(rank): dict(own) for rank, own in sorted(reports.items())},
        "operations": operations,
    }


def text(report: Mapping[str, Any]) -> str:
    hosts, operations = report["hosts"], report["operations"]
    figures = {rank: own["figures"] for rank, own in report["ranks"].items()}
    names = sorted({host or "?" for host in hosts})
    devices = sorted({own.get("device", "?") for own in figures.values()})
    head = (
        f"{report['world_size']} ranks on {len(names)} host{'s' * (len(names) > 1)} ({', '.join(names[:8])}), "
        f"{report['backend']} over {report['init_method']}, torch {report['torch']}, {', '.join(devices)}"
    )
    parts = [head]
    if operations:
        sizes = list(next(iter(operations.values())))
        rows = [[op] for op in operations]
        for cells, by in zip(rows, operations.values(), strict=True):
            for row in map(by.get, sizes):
                cells.append(f"{figure(row['seconds'] * 1e3)}, {figure(row['bus_bytes_s'] / 1e6)}" if row else "-")
        parts += ["", table(["operation", *(f"{_size(int(size))}: ms, MB/s" for size in sizes)], rows)]
    everyone = [str(rank) for rank in range(len(hosts))]
    if any(own["links"] for own in figures.values()) and len(hosts) <= MAX_SHOWN:
        rows = []
        for rank in everyone:
            links = figures[rank]["links"] if rank in figures else {}
            latest = max((row["latency_s"] for row in links.values()), default=0.0)
            rows.append([rank, *(_mega(links.get(peer, {}), "bytes_s") for peer in everyone), figure(latest * 1e6)])
        head = "links, MB/s (from the rank on the left to the rank above) and the largest latency, us"
        parts += ["", head, table(["from", *everyone, "latency"], rows)]
    rows = []
    for rank, host in zip(everyone, hosts, strict=True):
        own = figures.get(rank, {})
        clock = own.get("clock")
        ahead = f"{clock['ahead_s'] * 1e3:+.2f} +-{clock['error_s'] * 1e3:.2f}" if clock else "-"
        written, read = (_mega(own.get("disk", {}), f"{way}_bytes_s") for way in ("write", "read"))
        rows.append([rank, host or "?", _mega(own, "matmul_flops", 1e9), ahead, written, read])
    parts += ["", table(["rank", "host", "GFLOP/s", "clock, ms", "write, MB/s", "read, MB/s"], rows), ""]
    values = {(op, how) for own in figures.values() for op, how in own["values"].items()}
    parts += sorted(f"{op}: {how}" for op, how in values if how.startswith("not"))
    if report["slow"] < USUAL_SHARE:
        parts.append(f"--slow: rates below {report['slow']:g} of the usual one are reported")
    parts += [f"FINDINGS ({len(report['findings'])}):" if report["findings"] else "no findings"]
    return "\n".join([*parts, *(f"  {finding['text']}" for finding in report["findings"])])


def _mega(figures: Mapping[str, float], key: str, unit: float = 1e6) -> str:
    return figure(figures[key] / unit) if key in figures else "-"


def _size(size: int) -> str:
    power = max(power for power in range(4) if power == 0 or size >= 1024**power)
    return f"{size / 1024**power:g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def draw(report: Mapping[str, Any], lines: str) -> str:
    """Draws an SVG: a matrix of links and below it the report's text. `report`: from `as_json`; `lines`: from `text`."""
    rows = [row for line in lines.splitlines() for row in textwrap.wrap(line, 112) or [""]]
    height = TOP + SIDE + 34 + 17 * len(rows)
    title = f"{report['world_size']} ranks, {(hosts := len(set(report['hosts'])))} host{'s' * (hosts > 1)}, {report['backend']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}">',
        f"<style>{STYLE}{MORE_STYLE}</style>",
        f'<rect class="paper" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        _text(24, 34, title, "title"),
        *_draw_links(report),
        *(_text(24, TOP + SIDE + 34 + 17 * at, row, "row") for at, row in enumerate(rows)),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _draw_links(report: Mapping[str, Any]) -> list[str]:
    """Draws the matrix of links: opacity is the share of the best link's rate; red marks links of a finding."""
    size = report["world_size"]
    cell = SIDE / size
    links = {
        (int(rank), int(peer)): row
        for rank, own in report["ranks"].items()
        for peer, row in own["figures"]["links"].items()
    }
    best = max((row["bytes_s"] for row in links.values()), default=1.0)
    bad_links = {link for finding in report["findings"] for link in finding["links"]}
    parts = [_text(24, TOP - 30, "links, MB/s: from the rank on the left to the rank above", "head")]
    for a, b in permutations(range(size), 2):
        kind, fill, label = "none", "", "not measured"
        x, y = LEFT + b * cell, TOP + a * cell
        if (a, b) in links:
            rate = links[a, b]["bytes_s"]
            bad = (a, b) in bad_links
            kind, label = "bad" if bad else "good", f"{rate / 1e6:.4g} MB/s"
            fill = f' fill-opacity="{0.25 + 0.75 * (1.0 if bad else rate / best):.2f}"'
        parts.append(
            f'<rect class="{kind}" x="{x + 1:.1f}" y="{y + 1:.1f}" width="{cell - 2:.1f}" height="{cell - 2:.1f}" rx="2"{fill}>'
            f"<title>{a} to {b}: {label}</title></rect>"
        )
        if (a, b) in links and size <= 8:
            parts.append(_text(x + cell / 2, y + cell / 2 + 4, figure(rate / 1e6), "small head", "middle"))
    for rank in range(0, size, math.ceil(size / 16)):
        at = (rank + 0.5) * cell
        parts.append(_text(LEFT - 8, TOP + at + 4, str(rank), anchor="end"))
        parts.append(_text(LEFT + at, TOP - 8, str(rank), anchor="middle"))
    return parts


def figure(value: float) -> str:
    """Formats with three significant digits, or all digits before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    extra = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(words)}</text>'
