"""What was found, told: on the console, as JSON, as a picture. The lowest rank that spoke calls `tell`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.pairs import table
from tools.cluster.picture import draw, figure
from tools.cluster.settings import Settings, usual_share
from tools.cluster.speeds import bus_factor
from tools.cluster.verdicts import Finding

Said = Mapping[int, Mapping[str, Any]]  # each rank's last words, by rank
MOST_SHOWN = 16  # ranks whose links are printed; the files have all


def tell(settings: Settings, hosts: Sequence[str], said: Said, found: Sequence[Finding]) -> None:
    """Prints it, and writes <folder>/check_cluster/report.json and report.svg. Raises OSError."""
    folder = settings.folder / "check_cluster"
    folder.mkdir(parents=True, exist_ok=True)
    report = as_json(settings, hosts, said, found)
    _write(folder / "report.json", json.dumps(report, indent=1) + "\n")
    _write(folder / "report.svg", draw(report))
    print(text(report), flush=True)
    print(f"\n{folder}/report.json, report.svg", flush=True)


def as_json(settings: Settings, hosts: Sequence[str], said: Said, found: Sequence[Finding]) -> dict[str, Any]:
    """Everything, in seconds, bytes and bytes a second; ranks and sizes are keys of text, as JSON has it."""
    some = next(iter(said.values()))
    return {
        "good": not found,
        "findings": [finding.as_dict() for finding in found],
        "world_size": len(hosts),
        "hosts": list(hosts),
        "backend": some["figures"].get("backend", settings.backend),
        "init_method": settings.init_method,
        "torch": some["torch"],
        "slow": settings.slow,
        "ranks": {str(rank): dict(words) for rank, words in sorted(said.items())},
        "operations": _operations(len(hosts), said),
    }


def _operations(size: int, said: Said) -> dict[str, dict[str, dict[str, float]]]:
    """By operation and size: the seconds of the slowest rank, and what the busiest link then carried."""
    slowest: dict[str, dict[str, float]] = {}
    for words in said.values():
        for op, sizes in words["figures"]["seconds"].items():
            for bytes_, taken in sizes.items():
                by_size = slowest.setdefault(op, {})
                by_size[bytes_] = max(by_size.get(bytes_, 0.0), taken)
    return {
        op: {
            bytes_: {"seconds": taken, "bus_bytes_s": int(bytes_) * bus_factor(op, size) / taken}
            for bytes_, taken in sizes.items()
        }
        for op, sizes in slowest.items()
    }


def text(report: Mapping[str, Any]) -> str:
    """For people."""
    hosts, ranks = report["hosts"], report["ranks"]
    names = sorted({host or "?" for host in hosts})
    devices = sorted({words["figures"].get("device", "?") for words in ranks.values()})
    head = (
        f"{report['world_size']} ranks on {len(names)} host{'s' * (len(names) > 1)} ({', '.join(names[:8])}), "
        f"{report['backend']} over {report['init_method']}, torch {report['torch']}, {', '.join(devices)}"
    )
    parts = [head]
    if report["operations"]:
        parts += ["", _operations_text(report["operations"])]
    if any(words["figures"]["links"] for words in ranks.values()) and len(hosts) <= MOST_SHOWN:
        parts += [
            "",
            "links, MB/s (from the rank at the left to that above) and latency to the slowest, us",
            _links_text(hosts, ranks),
        ]
    parts += ["", _ranks_text(hosts, ranks), ""]
    missing = sorted(
        {
            f"{op}: {how}"
            for words in ranks.values()
            for op, how in words["figures"]["values"].items()
            if how[:3] == "not"
        }
    )
    parts += missing
    if report["slow"] < usual_share(crowded=False):
        parts.append(f"below {report['slow']:g} of the usual figure is slow here (--slow)")
    parts += [f"FOUND {len(report['findings'])}:" if report["findings"] else "all is well"]
    return "\n".join([*parts, *(f"  {finding['text']}" for finding in report["findings"])])


def _operations_text(operations: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    sizes = list(next(iter(operations.values())))
    header = ["operation", *(f"{_size(int(size))}: ms, MB/s" for size in sizes)]
    rows = [
        [
            op,
            *(
                f"{figure(by[size]['seconds'] * 1e3)}, {figure(by[size]['bus_bytes_s'] / 1e6)}" if size in by else "-"
                for size in sizes
            ),
        ]
        for op, by in operations.items()
    ]
    return table(header, rows)


def _links_text(hosts: Sequence[str], ranks: Mapping[str, Any]) -> str:
    everyone = [str(rank) for rank in range(len(hosts))]
    rows = []
    for rank in everyone:
        links = ranks[rank]["figures"]["links"] if rank in ranks else {}
        cells = [figure(links[peer]["bytes_s"] / 1e6) if peer in links else "-" for peer in everyone]
        latest = max((row["latency_s"] for row in links.values()), default=0.0)
        rows.append([rank, *cells, figure(latest * 1e6)])
    return table(["from", *everyone, "latency"], rows)


def _ranks_text(hosts: Sequence[str], ranks: Mapping[str, Any]) -> str:
    header = ["rank", "host", "GFLOP/s", "clock, ms", "write, MB/s", "read, MB/s"]
    rows = []
    for rank, host in enumerate(hosts):
        figures = ranks.get(str(rank), {}).get("figures", {})
        disk, clock = figures.get("disk", {}), figures.get("clock")
        rows.append(
            [
                str(rank),
                host or "?",
                figure(figures["matmul_flops"] / 1e9) if "matmul_flops" in figures else "-",
                f"{clock['ahead_s'] * 1e3:+.2f} +-{clock['error_s'] * 1e3:.2f}" if clock else "-",
                *(figure(disk[key] / 1e6) if key in disk else "-" for key in ("write_bytes_s", "read_bytes_s")),
            ]
        )
    return table(header, rows)


def _size(size: int) -> str:
    power = max(power for power in range(4) if power == 0 or size >= 1024**power)
    return f"{size / 1024**power:g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _write(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8")
