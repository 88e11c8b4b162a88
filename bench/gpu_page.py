"""The page that bench/gpu.py writes: every turn's figures, dated, and each bound as reached, not reached or not run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.pairs import ratio, table

Row = Mapping[str, Any]
Verdict = tuple[str, str, str]  # bound, what was seen, reached or not or not run
NOT_RUN = "not run"
ON_A_CPU = (
    "compile=aot_eager: torch.compile traces and differentiates as on a GPU, and torch's own kernels run the graphs. gloo stands "
    "for NCCL. What a CPU cannot run is listed at the end."
)
BEST = {"pharos": "bf16 weights checkpoint chunked=8192 compile", "torchtitan": "bf16 weights checkpoint compile"}


def page(rows: Sequence[Row], sizes: Mapping[str, Mapping[str, int]], device: str) -> str:
    """Markdown. `rows`: as in results.jsonl, the last of a key counts."""
    newest = {row["key"]: row for row in rows}
    good = {key: row for key, row in newest.items() if "failed" not in row}
    versions = good.get("1 versions", {})
    days = sorted({row["day"] for row in newest.values()})
    where = versions.get("device", "a CPU: no figure here says anything of a GPU" if device == "cpu" else "a GPU")
    speeds = _speeds(good, sizes, str(versions.get("device", "")))
    blocks = [
        "# One GPU",
        f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))} on {where}, by `make gpu`. Ranges are over rounds or repetitions."
        + (f" {ON_A_CPU}" if device == "cpu" else ""),
        "## Bounds\n\n" + _table(("bound", "seen", "verdict"), verdicts(good, speeds, device)),
        "## Versions\n\n" + _table(("of", "is"), [(k, str(v)) for k, v in versions.items() if k not in ("key", "day", "took_s")]),
        "## Tests\n\n" + _table(("turn", "passed", "skipped", "failed"), [
            (key[2:], str(row["passed"]), str(row["skipped"]), " ".join(row["bad"]) or "none")
            for key, row in good.items() if key.startswith("1 tests")
        ]),
        "## train.py to its end\n\n" + _table(("run", "steps", "loss", "ms a step", "tokens/s", "GiB", "trace"), [
            (key[2:], *(str(row.get(n, "")) for n in ("steps", "loss", "step_ms", "tokens_per_s", "memory_gib", "trace")))
            for key, row in good.items() if key.startswith(("1 train", "3 steady"))
        ]),
        "## Throughput\n\n" + _table(("size, side: setting", "tokens/s", "range", "MFU", "peak MiB", "graphs"), [
            (
                name, f"{statistics.median(s['speeds']):,.0f}", f"{min(s['speeds']):,.0f}-{max(s['speeds']):,.0f}",
                f"{100 * s['mfu']:.1f} %" if s["mfu"] else "unknown", f"{s['memory']:,.0f}", str(s["graphs"]),
            ) for name, s in speeds.items()
        ]),
        "## Two members on one device\n\n" + _table(
            ("turn", "next step s", "steps lost", "bits equal", "MiB lost", "watched s", "a sum ms"), [
            (key[2:], *(str(row[n]) for n in ("next_step_s", "steps_lost", "bits", "memory_lost_mib", "watched_s", "sum_ms")))
            for key, row in good.items() if key.startswith("3 kill")
        ]),
        "## Healing and checkpoints\n\n" + _table(("what", "figures"), [
            (f"{key[2:]}: {name}", str(value)) for key, row in good.items() if key in ("3 healing", "3 stall")
            for name, value in row.items() if name not in ("key", "day", "took_s")
        ]),
        "## Left out\n\n" + _table(("turn", "why"), [
            (key, row["failed"].replace("|", "/")) for key, row in newest.items() if "failed" in row]),
    ]  # fmt: skip
    return "\n\n".join(blocks) + "\n"


def verdicts(good: Mapping[str, Row], speeds: Mapping[str, Mapping[str, Any]], device: str) -> list[Verdict]:
    """Verdicts, each bound once; a CPU reaches none, whatever the figure."""
    found: list[Verdict] = []

    def bound(name: str, seen: str | None, reached: bool = False) -> None:
        verdict = "no verdict" if device == "cpu" else "reached" if reached else "not"
        found.append((name, seen or "", NOT_RUN if seen is None else verdict))

    for size in ("1b", "8b"):
        ours, theirs = (speeds.get(f"{size} {side}: {setting}") for side, setting in BEST.items())
        rounds = sorted(set(ours["by_round"]) & set(theirs["by_round"])) if ours and theirs else []
        pair = ratio(*([side["by_round"][r] for r in rounds] for side in (ours, theirs) if side)) if rounds else None
        bound(f"{size}: 1.05x torchtitan's tokens/s", str(pair) if pair else None, bool(pair and pair.median >= 1.05))
        memory = ours["memory"] / theirs["memory"] if ours and theirs else 0
        seen = f"{memory:.3f}x" if memory else None
        bound(f"{size}: no more memory than torchtitan", seen, 0 < memory <= 1)
    mfu = speeds.get(f"8b pharos: {BEST['pharos']}", {}).get("mfu", 0)
    bound("8b: 45 % MFU", f"{100 * mfu:.1f} %" if mfu else None, mfu >= 0.45)
    for kind, limit in (("nccl", 1.02), ("baby_nccl", 1.05)):
        names = (kind, kind.replace("nccl", "gloo"))  # gloo stands for it on a CPU
        both = [(good.get(f"3 steady {name} {n}"), good.get(f"3 steady none {n}")) for name in names for n in range(9)]
        pairs = [(one["step_ms"], none["step_ms"]) for one, none in both if one and none]
        step = ratio(*zip(*pairs, strict=True)) if pairs else None
        bound(f"a step by {kind}: at most {limit}x", str(step) if step else None, bool(step and step.median <= limit))
    kills = [row for key, row in good.items() if key.startswith("3 kill")]
    for name, figure, most in (
        ("the next commit within 1 s of a kill", "next_step_s", 1),
        ("no step lost", "steps_lost", 0),
        ("equal bits", "bits", None),
        ("no memory lost (64 MiB of slack), MiB", "memory_lost_mib", 64),
    ):
        figures = [row[figure] for row in kills]
        holds = all(figures) if most is None else all(seen <= most for seen in figures)
        bound(name, ", ".join(map(str, figures)) if len(figures) == 3 else None, holds)
    inline = ("3 kill group, nccl", "3 kill group, gloo")
    lived_s = [row["watched_s"] for key, row in good.items() if key in inline]
    bound(
        "the survivor lives three minutes", f"{lived_s[0]} s" if lived_s else None, bool(lived_s and lived_s[0] >= 180)
    )
    healing, stall = (good[key]["share"] if key in good else None for key in ("3 healing", "3 stall"))
    words = "healing: 80 % of a pinned copy over the same wire"
    bound(words, f"{healing:.2f}x" if healing else None, bool(healing and healing >= 0.8))
    words = "an async checkpoint stalls 1.1x of a copy"
    bound(words, f"{stall:.2f}x" if stall else None, bool(stall and stall <= 1.1))
    return found


def _speeds(good: Mapping[str, Row], sizes: Mapping[str, Mapping[str, int]], name: str) -> dict[str, dict[str, Any]]:
    """By "size side: setting": tokens/s by round, the most memory in MiB, and MFU (0: the device's peak is unknown). MFU counts 6 flops
    per weight and token and 12 * layers * width * length for attention (PaLM, arXiv 2204.02311, appendix B), for every side."""
    from bench.step_worker import our_llama
    from training.metrics import known_peak_tflops

    found: dict[str, dict[str, Any]] = {}
    for key, row in good.items():
        if not key.startswith("2 "):
            continue
        _, size, round_, what = key.split(" ", 3)
        side = found.setdefault(f"{size} {what}", {"by_round": {}, "memory": 0.0, "graphs": 0, "size": size})
        side["by_round"][int(round_)] = row["tokens_per_s"]
        side["memory"] = max(side["memory"], row["memory_mib"])
        side["graphs"] = max(side["graphs"], row.get("graphs", 0))
    peak = known_peak_tflops(name) if name else None
    for side in found.values():
        side["speeds"], shape = list(side["by_round"].values()), sizes[side["size"]]
        flops = our_llama(dict(shape)).flops_per_token(shape["seq"]) if peak else 0
        side["mfu"] = flops * statistics.median(side["speeds"]) / peak / 1e12 if peak else 0.0
    return found


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"```\n{table(header, rows)}\n```" if rows else NOT_RUN + "."
