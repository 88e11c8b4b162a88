"""Tokens per second and memory of one training step of the same Llama, here and in the peers that are installed.

    python bench/step.py [--peer-python PYTHON] [--rounds 7] [--device cpu|cuda]

Peers are torchtitan 0.2 and transformers 5: fp32, fp32 weights under bf16 autocast, and bf16 weights without fp32 master
weights (faster, but small updates are lost); ours always has fp32 master weights. Every side is one process that lives
through all rounds, on the same CPUs and number of threads; the sides take turns. The last lines compare our settings with
the fastest peer at its best setting, round by round.

A CPU rank of ours has the C library keep freed memory (parallelisms/device.py). To give the peers the same:
--env MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824

On a machine that others use too, wall-clock figures with several threads say little, since threads wait for each other:
look at "CPU s/step" with --threads 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.pairs import Failed, Worker, in_turns, ratio, table

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"dim": 256, "layers": 6, "heads": 8, "kv_heads": 4, "hidden": 768, "vocab": 2048, "batch": 8, "seq": 512}
OURS = "pharos"
SETTINGS = {
    OURS: ("bf16", "bf16 compile", "fp32"),
    "torchtitan": ("bf16 autocast", "bf16 autocast compile", "fp32", "bf16 weights", "bf16 weights compile"),
    "transformers": ("bf16 autocast", "bf16 autocast compile", "fp32", "bf16 weights", "bf16 weights compile"),
}


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    workers, first_steps = _start(options)
    try:
        in_turns(workers, {"steps": 2}, rounds=1)  # warm-up
        answers = in_turns(workers, {"steps": options.steps}, rounds=options.rounds)
    finally:
        for worker in workers:
            worker.close()
    tokens = options.steps * options.batch * options.seq
    speeds = {name: [tokens / answer["seconds"] for answer in given] for name, given in answers.items()}
    cpu = {
        name: statistics.median(answer["cpu_seconds"] for answer in given) / options.steps
        for name, given in answers.items()
    }
    memory = {name: given[-1]["memory_mib"] for name, given in answers.items()}
    print(_report(speeds, cpu, memory, first_steps))
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter in which the peers are installed")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every side")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPUs and threads of every side"
    )
    parser.add_argument("--sides", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--settings", nargs="+", default=[], help="only these, by their names in the table")
    parser.add_argument("--env", nargs="*", default=[], metavar="NAME=VALUE", help="environment of every side")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    return parser.parse_args(argv)


def _start(options: argparse.Namespace) -> tuple[list[Worker], dict[str, float]]:
    """The sides that could start, and the seconds of their first step. One after the other, so that none compiles beside another."""
    workers, first_steps = list[Worker](), dict[str, float]()
    cpus = sorted(os.sched_getaffinity(0))[: options.threads]
    env = {
        "OMP_NUM_THREADS": str(options.threads),
        "PYTHONPATH": str(ROOT),
        **dict(pair.split("=", 1) for pair in options.env),
    }
    sizes = {name: getattr(options, name) for name in SIZES}
    chosen = [(side, name) for side in options.sides for name in SETTINGS[side] if name in (options.settings or [name])]
    for side, setting in chosen:
        arguments = {"side": side, "setting": setting, "sizes": sizes, "device": options.device, "cpus": cpus}
        python = sys.executable if side == OURS else options.peer_python
        worker = Worker(
            f"{side} {setting}", [python, str(ROOT / "bench" / "step_worker.py"), json.dumps(arguments)], env
        )
        try:
            first_steps[worker.name] = worker.answer()["seconds"]
        except Failed as failure:
            print(f"{worker.name}: left out: {failure}", file=sys.stderr)
        else:
            workers.append(worker)
    return workers, first_steps


def _report(
    speeds: dict[str, list[float]], cpu: dict[str, float], memory: dict[str, float], first_steps: dict[str, float]
) -> str:
    """The table, fastest first, and one line for each of our settings."""
    median = {name: statistics.median(figures) for name, figures in speeds.items()}
    header = ("side and setting", "tokens/s", "range", "CPU s/step", "peak MiB", "first step s")
    rows = [
        (
            name,
            f"{median[name]:,.0f}",
            f"{min(speeds[name]):,.0f}-{max(speeds[name]):,.0f}",
            f"{cpu[name]:.2f}",
            f"{memory[name]:,.0f}",
            f"{first_steps[name]:.1f}",
        )
        for name in sorted(speeds, key=median.__getitem__, reverse=True)
    ]
    lines = [table(header, rows)]
    peers = [name for name in speeds if not name.startswith(OURS)]
    if peers:
        best = max(peers, key=median.__getitem__)
        lines += [
            f"{name} : {best} = {ratio(speeds[name], speeds[best])} tokens/s, {memory[name] / memory[best]:.2f}x peak memory"
            for name in speeds
            if name.startswith(OURS)
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
