"""Measures training over a slow link between replica groups: with an all-reduce in every step, and with semi-synchronous methods.

    python bench/semi_sync.py [--steps 128] [--sync-steps 16] [--write docs/semi_sync.svg]

Two groups in network namespaces, whose links carry 20 megabits a second in each direction (tbf). All methods train the same model from the
same weights on as many tokens, one after the other. Tokens per second are those of the job, from its first to its last row of metrics; the
loss is the validation loss of the synchronized weights at the end. Requires Linux, root and an idle machine. Exit code: 0 if the
semi-synchronous methods are faster; 2 bad input; 1 other errors.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.drill_job import DrillJob, Network
from bench.job import ROOT, rows
from bench.pairs import Failed, parser, table
from scripts.plot_loss import Panel, Points, drawing, read, smooth, thin

MODEL = """
--model.dim=128 --model.n_layers=4 --model.hidden_dim=320 --validation.enable=true --checkpoint.enable=false --metrics.log_freq=1
--fault_tolerance.digest_interval=0 --sample.tokens=0
"""
GROUPS, MEGABITS = 2, 20.0


class Result(NamedTuple):
    way: str
    tokens: int
    tokens_per_s: float
    over_tokens: Points  # thousands of tokens, loss
    over_time: Points  # seconds since the first row of metrics, loss
    held_out: float


def main(argv: Sequence[str]) -> int:
    flags = parser(
        __doc__,
        steps=(128, "optimizer steps of each group; a multiple of --sync-steps"),
        sync_steps=(16, "a multiple of 4"),
        write=(Path, "SVG to write"),
    )
    options = flags.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # cleanup ends all processes
    if options.sync_steps % 4 or options.steps % options.sync_steps:
        flags.error(f"--sync-steps {options.sync_steps}: must be a multiple of 4, and --steps a multiple of it")
    try:
        with tempfile.TemporaryDirectory(prefix="semi-sync-") as folder:
            results = [run(way, extra, folder, options.steps) for way, extra in ways(options.sync_steps).items()]
    except (Failed, RuntimeError, ValueError) as error:
        print(f"semi_sync: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    each, lines = results[0], []
    for one in results:
        faster = f"{one.tokens_per_s / each.tokens_per_s:.1f}x"
        lines.append((one.way, f"{one.tokens:,}", f"{one.tokens_per_s:,.0f}", faster, f"{one.held_out:.3f}"))
    print(table(("method", "tokens", "tokens/s", "relative to every step", "held-out loss"), lines))
    if options.write:
        axes = {"thousands of tokens": "over_tokens", "seconds": "over_time"}
        panels = [Panel(axis, {one.way: getattr(one, of) for one in results}) for axis, of in axes.items()]
        title = f"{GROUPS} groups, {MEGABITS:g} Mbit/s between them"
        options.write.write_text(drawing(title, panels), encoding="utf-8")
        print(f"picture: {options.write}")
    return 0 if all(result.tokens_per_s > each.tokens_per_s for result in results[1:]) else 1


def ways(sync_steps: int) -> dict[str, tuple[str, ...]]:
    diloco = ("--fault_tolerance.semi_sync_method=diloco", f"--fault_tolerance.sync_steps={sync_steps}")
    streaming = ("--fault_tolerance.num_fragments=4", "--fault_tolerance.fragment_sync_delay=2")
    eight_bits = "--fault_tolerance.should_quantize=true"
    return {
        "every step": (),
        f"DiLoCo, every {sync_steps}": diloco,
        f"DiLoCo in int8, every {sync_steps}": (*diloco, eight_bits),
        f"4 fragments, every {sync_steps}": (*diloco, *streaming, "--fault_tolerance.fragment_update_alpha=0.5"),
    }


def run(way: str, extra: Sequence[str], folder: str, steps: int) -> Result:
    """Trains with one method. Raises Failed if it does not finish."""
    name = "".join(letter if letter.isalnum() else "-" for letter in way)
    argv = [
        str(ROOT / "bench" / "drill.toml"), *MODEL.split(), *extra, f"--job.dump_folder={folder}", f"--job.name={name}",
        f"--training.steps={steps}", f"--validation.freq={steps}", f"--fault_tolerance.min_replica_size={GROUPS}",
    ]  # fmt: skip
    print(f"semi_sync: {way}", file=sys.stderr)
    with closing(Network()) as network, DrillJob(argv, GROUPS, network=network, drilled=False) as job:
        for group in job.groups:
            network.narrow(group, MEGABITS)
        job.ended()
        lines = [row for row in rows(job.run) if "loss" in row]
        _, validation = read(job.run / "metrics.jsonl")
    first, last = lines[0], lines[-1]
    return Result(
        way,
        last["tokens"],
        (last["tokens"] - first["tokens"]) / (last["time"] - first["time"]),
        thin(smooth([(row["tokens"] / 1000, row["loss"]) for row in lines])),
        thin(smooth([(row["time"] - first["time"], row["loss"]) for row in lines])),
        validation[-1][1],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
