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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.job import ROOT
from bench.pairs import Failed, Worker, asking, in_turns, parser, ratio, spread, table

SIZES = {"dim": 256, "layers": 6, "heads": 8, "kv_heads": 4, "hidden": 768, "vocab": 2048, "batch": 8, "seq": 512}
OURS = "pharos"
SETTINGS = {
    OURS: ("bf16", "bf16 compile", "fp32"),
    "torchtitan": ("bf16 autocast", "bf16 autocast compile", "fp32", "bf16 weights", "bf16 weights compile"),
    "transformers": ("bf16 autocast", "bf16 autocast compile", "fp32", "bf16 weights", "bf16 weights compile"),
}


def main() -> None:
    flags = parser(
        __doc__,
        peer_python=(sys.executable, "interpreter in which the peers are installed"),
        rounds=(7, "turns of every side"),
        steps=(3, "steps of a turn"),
        device="cpu",
        threads=(len(os.sched_getaffinity(0)), "CPUs and threads of every side"),
    )
    flags.add_argument("--env", nargs="*", default=[], metavar="NAME=VALUE", help="environment of every side")
    options = flags.parse_args()
    workers, first_steps = _start(options)
    try:
        in_turns(asking(workers, do="run", steps=2), 1)  # warm-up
        answers = in_turns(asking(workers, do="run", steps=options.steps), options.rounds)
    finally:
        for worker in workers:
            worker.close()
    print(_report(answers, options, first_steps))


def _start(options: argparse.Namespace) -> tuple[list[Worker], dict[str, float]]:
    """The sides that could start, and the seconds of their first step. One after the other, so that none compiles beside another."""
    workers, first_steps = list[Worker](), dict[str, float]()
    cpus = sorted(os.sched_getaffinity(0))[: options.threads]
    env = {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(ROOT)}
    env |= dict(pair.split("=", 1) for pair in options.env)
    for side, setting in ((side, setting) for side, settings in SETTINGS.items() for setting in settings):
        arguments = {"side": side, "setting": setting, "sizes": SIZES, "device": options.device, "cpus": cpus}
        python = sys.executable if side == OURS else options.peer_python
        command = [python, str(ROOT / "bench" / "step_worker.py"), json.dumps(arguments)]
        worker = Worker(f"{side} {setting}", command, env)
        try:
            first_steps[worker.name] = worker.answer()["seconds"]
        except Failed as failure:
            print(f"{worker.name}: left out: {failure}", file=sys.stderr)
        else:
            workers.append(worker)
    return workers, first_steps


def _report(answers: dict[str, list[Any]], options: argparse.Namespace, first_steps: dict[str, float]) -> str:
    """The table, fastest first, and one line for each of our settings."""
    tokens = options.steps * SIZES["batch"] * SIZES["seq"]
    speeds = {name: [tokens / answer["seconds"] for answer in given] for name, given in answers.items()}
    memory = {name: given[-1]["memory_mib"] for name, given in answers.items()}
    median = {name: statistics.median(figures) for name, figures in speeds.items()}
    header, rows = ("side and setting", "tokens/s", "range", "CPU s/step", "peak MiB", "first step s"), []
    for name in sorted(speeds, key=median.__getitem__, reverse=True):
        cpu_s = statistics.median(answer["cpu_seconds"] for answer in answers[name]) / options.steps
        middle, _, between = spread(speeds[name], ",.0f").rstrip(")").partition(" (")
        rows.append((name, middle, between, f"{cpu_s:.2f}", f"{memory[name]:,.0f}", f"{first_steps[name]:.1f}"))
    lines = [table(header, rows)]
    if peers := [name for name in speeds if not name.startswith(OURS)]:
        best = max(peers, key=median.__getitem__)
        for name in [name for name in speeds if name.startswith(OURS)]:
            less = f"{memory[name] / memory[best]:.2f}x peak memory"
            lines.append(f"{name} : {best} = {ratio(speeds[name], speeds[best])} tokens/s, {less}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
