"""Tokens per second, MFU and peak memory of Llama 1B and 8B on one GPU, here and in the peers that are installed.

    python benchmarks/gpu.py [--sizes 8b 1b] [--rounds 5] [--minutes 6] [--peer-python PYTHON] [--write docs/gpu.md]

Everything is bfloat16, weights and optimizer included: so 8B fits on one device of 141 GB, on every side. Two models of that size do not,
so each turn is a process of its own: it builds the model, takes two steps that do not count and then those that do, and leaves. The sides
take turns; a round is begun only if the one before says that it fits into --minutes. The last lines compare our settings with the fastest
peer at its best setting, round by round.

What is computed is benchmarks/step_worker.py's, with its words for settings. MFU counts 6 flops per weight and token and 12 * layers *
width * length for attention (PaLM, arXiv 2204.02311, appendix B), of the peak in the vendor's data sheet, for every side.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.pairs import Failed, Ratio, Worker, ratio, table
from benchmarks.step_worker import our_llama
from training.metrics import known_peak_tflops

ROOT = Path(__file__).resolve().parents[1]
OURS = "pharos"
SIZES = {
    "8b": {
        "dim": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "hidden": 14336,
        "vocab": 128256,
        "batch": 1,
        "seq": 8192,
    },
    "1b": {
        "dim": 2048,
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "hidden": 8192,
        "vocab": 128256,
        "batch": 2,
        "seq": 8192,
    },
    "tiny": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 192, "vocab": 256, "batch": 1, "seq": 64},
}
SETTINGS = {
    OURS: (
        "bf16 weights checkpoint chunked compile",
        "bf16 weights checkpoint chunked",
        "bf16 weights checkpoint chunked compile float8",
    ),
    "torchtitan": ("bf16 weights checkpoint compile", "bf16 weights checkpoint"),
    "transformers": ("bf16 weights checkpoint", "bf16 weights checkpoint compile"),
}


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu.py: needs a CUDA device (--device cpu --sizes tiny shows that it runs)", file=sys.stderr)
        return 2
    until_s = time.monotonic() + 60 * options.minutes
    pages = []
    for place, size in enumerate(options.sizes):
        share_s = (until_s - time.monotonic()) / (len(options.sizes) - place)
        pages.append(f"## Llama {size}\n\n" + _measure(size, options, time.monotonic() + share_s))
        print(pages[-1], flush=True)
    if options.write:
        name = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU"
        head = f"# One GPU\n\nMeasured on {datetime.date.today()}: {name}, torch {torch.__version__}, `python benchmarks/gpu.py`.\n\n"
        options.write.write_text(head + "\n\n".join(pages) + "\n")
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["8b", "1b"], choices=SIZES)
    parser.add_argument("--rounds", type=int, default=5, help="turns of every side, at most")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn that count")
    parser.add_argument("--minutes", type=float, default=6, help="for all sizes together")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter in which the peers are installed")
    parser.add_argument("--settings", nargs="+", default=[], help="only these")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", type=Path, metavar="FILE", help="where the tables go as well, with the date")
    return parser.parse_args(argv)


def _measure(size: str, options: argparse.Namespace, until_s: float) -> str:
    """One size: the table, and what it comes to."""
    sides = [(side, s) for side in SETTINGS for s in SETTINGS[side] if s in (options.settings or [s])]
    answers: dict[str, list[dict[str, float]]] = {f"{side}: {setting}": [] for side, setting in sides}
    left_out, longest_s = list[str](), 0.0
    for number in range(options.rounds):
        began_s = time.monotonic()
        if number and began_s + longest_s > until_s:
            break
        for side, setting in sides if number % 2 == 0 else sides[::-1]:
            name = f"{side}: {setting}"
            if name not in answers:
                continue
            try:
                answers[name].append(_turn(side, setting, SIZES[size], options))
            except Failed as failure:  # not installed, or it does not fit
                left_out.append(f"{name}: left out: {failure}")
                del answers[name]
        if number:  # the first one compiles
            longest_s = max(longest_s, time.monotonic() - began_s)
    return "\n".join([_report(size, answers, options), *left_out])


def _turn(side: str, setting: str, sizes: dict[str, int], options: argparse.Namespace) -> dict[str, float]:
    arguments = {"side": side, "setting": setting, "sizes": sizes, "device": options.device, "cpus": []}
    python = sys.executable if side == OURS else options.peer_python
    command = [python, str(ROOT / "benchmarks" / "step_worker.py"), json.dumps(arguments)]
    worker = Worker(f"{side}: {setting}", command, {"PYTHONPATH": str(ROOT)})
    try:
        worker.answer()
        worker.ask({"steps": 1})
        return worker.ask({"steps": options.steps})
    finally:
        worker.close()


def _report(size: str, answers: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> str:
    sizes = SIZES[size]
    tokens = options.steps * sizes["batch"] * sizes["seq"]
    speeds = {name: [tokens / answer["seconds"] for answer in given] for name, given in answers.items()}
    memory = {name: max(answer["memory_mib"] for answer in given) for name, given in answers.items()}
    median = {name: statistics.median(figures) for name, figures in speeds.items()}
    flops, peak = _flops_per_token(sizes), _peak_tflops(options.device)
    rows = [
        (
            name,
            f"{median[name]:,.0f}",
            f"{min(speeds[name]):,.0f}-{max(speeds[name]):,.0f}",
            f"{flops * median[name] / peak / 1e10:.1f} %" if peak else "unknown",
            f"{memory[name]:,.0f}",
        )
        for name in sorted(speeds, key=median.__getitem__, reverse=True)
    ]
    lines = ["```", table(("side: setting", "tokens/s", "range", "MFU", "peak MiB"), rows), "```", ""]
    peers = [name for name in speeds if not name.startswith(OURS)]
    if peers:
        best = max(peers, key=median.__getitem__)
        lines += [
            f"- {name} : {best} = {_pairs(speeds[name], speeds[best])} tokens/s, {memory[name] / memory[best]:.2f}x peak memory"
            for name in speeds
            if name.startswith(OURS)
        ]
    return "\n".join(lines)


def _pairs(figures: Sequence[float], other: Sequence[float]) -> Ratio:
    """Of the rounds that both have."""
    rounds = min(len(figures), len(other))
    return ratio(figures[:rounds], other[:rounds])


def _flops_per_token(sizes: dict[str, int]) -> int:
    return int(our_llama(sizes).flops_per_token(sizes["seq"]))


def _peak_tflops(device: str) -> float | None:
    return known_peak_tflops(torch.cuda.get_device_name()) if device == "cuda" else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
