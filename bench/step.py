"""Tokens per second and memory of one training step of the same Llama, here and in the peers that are installed.

    python bench/step.py [--peer-python PYTHON] [--rounds 7] [--device cpu|cuda] [--threads 2]

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

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.job import ROOT
from bench.pairs import Failed, Worker, asking, in_turns, parser, ratio, spread, table

SIZES = {"dim": 256, "layers": 6, "heads": 8, "kv_heads": 4, "hidden": 768, "vocab": 2048, "batch": 8, "seq": 512}
OURS, STEPS = "pharos", 3  # of a turn
PEER_SETTINGS = ("bf16 autocast", "bf16 autocast compile", "fp32", "bf16 weights", "bf16 weights compile")
SETTINGS = {OURS: ("bf16", "bf16 compile", "fp32"), "torchtitan": PEER_SETTINGS, "transformers": PEER_SETTINGS}


def start(
    side: str, setting: str, sizes: Mapping[str, int], device: str, *, peer_python: str, env: Mapping[str, str] | None = None,
    cpus: Sequence[int] = (), limit_s: float | None = None,
) -> Worker:  # fmt: skip
    """The process of a side, not ready yet."""
    arguments = {"side": side, "setting": setting, "sizes": sizes, "device": device, "cpus": cpus}
    python, program = sys.executable if side == OURS else peer_python, str(ROOT / "bench" / "step_worker.py")
    return Worker(f"{side} {setting}", [python, program, json.dumps(arguments)], env or {}, limit_s=limit_s)


def main() -> None:
    flags = parser(
        __doc__,
        peer_python=(sys.executable, "interpreter in which the peers are installed"),
        rounds=(7, "turns of every side"),
        device="cpu",
        threads=(len(os.sched_getaffinity(0)), "CPUs and threads of every side"),
    )
    flags.add_argument("--env", nargs="*", default=[], metavar="NAME=VALUE", help="environment of every side")
    options = flags.parse_args()
    env = {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(ROOT)}
    env |= dict(pair.split("=", 1) for pair in options.env)
    where = {"peer_python": options.peer_python, "env": env, "cpus": sorted(os.sched_getaffinity(0))[: options.threads]}
    workers, first_steps = list[Worker](), dict[str, float]()
    with ExitStack() as stack:
        # one after the other, so that none compiles beside another
        for side, setting in ((side, setting) for side, settings in SETTINGS.items() for setting in settings):
            worker = stack.enter_context(closing(start(side, setting, SIZES, options.device, **where)))
            try:
                first_steps[worker.name] = worker.answer()["seconds"]
                workers.append(worker)
            except Failed as failure:
                print(f"{worker.name}: left out: {failure}", file=sys.stderr)
        in_turns(asking(workers, do="run", steps=2), 1)  # warm-up
        answers = in_turns(asking(workers, do="run", steps=STEPS), options.rounds)
    print(_report(answers, first_steps))


def _report(answers: dict[str, list[Any]], first_steps: dict[str, float]) -> str:
    """The table, fastest first, and one line for each of our settings."""
    tokens = STEPS * SIZES["batch"] * SIZES["seq"]
    speeds = {name: [tokens / answer["seconds"] for answer in given] for name, given in answers.items()}
    memory = {name: given[-1]["memory_mib"] for name, given in answers.items()}
    fastest, rows = sorted(speeds, key=lambda name: statistics.median(speeds[name]), reverse=True), []
    for name in fastest:
        cpu_s = statistics.median(answer["cpu_seconds"] for answer in answers[name]) / STEPS
        middle, _, between = spread(speeds[name], ",.0f").rstrip(")").partition(" (")
        rows.append((name, middle, between, f"{cpu_s:.2f}", f"{memory[name]:,.0f}", f"{first_steps[name]:.1f}"))
    lines = [table(("side and setting", "tokens/s", "range", "CPU s/step", "peak MiB", "first step s"), rows)]
    if peers := [name for name in fastest if not name.startswith(OURS)]:
        for name in [name for name in speeds if name.startswith(OURS)]:
            less = f"{memory[name] / memory[peers[0]]:.2f}x peak memory"
            lines.append(f"{name} : {peers[0]} = {ratio(speeds[name], speeds[peers[0]])} tokens/s, {less}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
