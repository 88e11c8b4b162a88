"""The cost of a thin link between groups: the same training with gradients summed in every step, and with groups that step by themselves.

    python bench/semi_sync.py [--megabits 20] [--steps 128] [--sync-steps 16] [--groups 2] [--write docs/semi_sync.svg] [--out FOLDER]

Each group is a machine of its own (a network namespace), whose cable carries --megabits a second each way (tbf). All ways train the same
model from the same weights on as many tokens, one way after the other. Tokens per second are of the whole job, from its first line of
figures to its last; the loss is that on held-out text at the end, of the weights that the groups agree on. Needs Linux and root; the
machine is to be idle otherwise. Exit code: 0 where summing now and then is the faster one; 2 bad input; 1 the rest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.drill_job import DrillJob
from bench.drill_net import Network
from bench.pairs import Failed, table
from scripts.plot_loss import Points, read, smooth, thin, ticks

MODEL = (
    "--model.dim=128",
    "--model.n_layers=4",
    "--model.hidden_dim=320",
    "--validation.enable=true",
    "--checkpoint.enable=false",
    "--metrics.log_freq=1",
    "--fault_tolerance.digest_interval=0",
    "--sample.tokens=0",
)
CONFIG = Path(__file__).resolve().parents[1] / "bench" / "drill.toml"
LIMIT_S = 1800.0


@dataclass(frozen=True)
class Result:
    name: str
    tokens: int
    tokens_per_s: float
    over_tokens: Points  # thousands of tokens, loss
    over_time: Points  # seconds since the first figures, loss
    held_out: float


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=float, default=20.0)
    parser.add_argument(
        "--steps", type=int, default=128, help="optimizer steps of each group; a multiple of --sync-steps"
    )
    parser.add_argument("--sync-steps", type=int, default=16, help="a multiple of 4")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--write", type=Path, help="the picture")
    parser.add_argument("--out", type=Path, help="folder to keep the runs in")
    arguments = parser.parse_args(argv)
    if arguments.sync_steps % 4 or arguments.steps % arguments.sync_steps:
        parser.error(f"--sync-steps {arguments.sync_steps}: must be a multiple of 4, and --steps a multiple of it")
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="semi-sync-"))
    try:
        results = [run(way, extra, folder, arguments) for way, extra in ways(arguments.sync_steps).items()]
    except (Failed, RuntimeError, ValueError) as error:
        print(f"semi_sync: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    finally:
        if not arguments.out:
            shutil.rmtree(folder, ignore_errors=True)
    each = results[0]
    rows = []
    for result in results:
        faster = f"{result.tokens_per_s / each.tokens_per_s:.1f}x"
        rows.append(
            (result.name, f"{result.tokens:,}", f"{result.tokens_per_s:,.0f}", faster, f"{result.held_out:.3f}")
        )
    print(table(("way", "tokens", "tokens/s", "beside every step", "held-out loss"), rows))
    if arguments.write:
        title = f"{arguments.groups} groups, {arguments.megabits:g} Mbit/s between them"
        arguments.write.write_text(drawing(title, results), encoding="utf-8")
        print(f"picture: {arguments.write}")
    return 0 if all(result.tokens_per_s > each.tokens_per_s for result in results[1:]) else 1


def ways(sync_steps: int) -> dict[str, tuple[str, ...]]:
    diloco = ("--fault_tolerance.semi_sync_method=diloco", f"--fault_tolerance.sync_steps={sync_steps}")
    streaming = ("--fault_tolerance.num_fragments=4", "--fault_tolerance.fragment_sync_delay=2")
    eight_bits = "--fault_tolerance.should_quantize=true"
    return {
        "every step": (),
        f"DiLoCo, every {sync_steps}": diloco,
        f"in eight bits, every {sync_steps}": (*diloco, eight_bits),
        f"4 fragments, every {sync_steps}": (*diloco, *streaming, "--fault_tolerance.fragment_update_alpha=0.5"),
    }


def run(way: str, extra: Sequence[str], folder: Path, arguments: argparse.Namespace) -> Result:
    """Raises Failed where it does not come to its end."""
    name = "".join(letter if letter.isalnum() else "-" for letter in way)
    argv = [
        str(CONFIG),
        *MODEL,
        *extra,
        f"--job.dump_folder={folder}",
        f"--job.name={name}",
        f"--training.steps={arguments.steps}",
        f"--validation.freq={arguments.steps}",
        f"--fault_tolerance.min_replica_size={arguments.groups}",
    ]
    print(f"semi_sync: {way}", file=sys.stderr)
    with closing(Network()) as network, DrillJob(argv, arguments.groups, network=network, drilled=False) as job:
        for group in job.groups:
            network.narrow(group, arguments.megabits)
        job.gone |= set(job.groups)  # they end by themselves
        end_s = time.monotonic() + LIMIT_S
        while any(group.code is None for group in job.groups.values()):
            job.until("the end of all groups", lambda: True)
            if time.monotonic() > end_s:
                raise job.failure(f"{way}: not at its end after {LIMIT_S:g} s")
            time.sleep(0.2)
        return result_of(way, job.run)


def result_of(way: str, run_folder: Path) -> Result:
    journal = run_folder / "metrics.jsonl"
    rows = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "loss" in row]
    first, last = steps[0], steps[-1]
    _, validation = read(journal)
    return Result(
        way,
        last["tokens"],
        (last["tokens"] - first["tokens"]) / (last["time"] - first["time"]),
        [(row["tokens"] / 1000, row["loss"]) for row in steps],
        [(row["time"] - first["time"], row["loss"]) for row in steps],
        validation[-1][1],
    )


# ---------------------------------------------------------------------------------------------- the picture

WIDTH, HEIGHT, TOP, BOTTOM, GAP = 900, 400, 76, 56, 64
COLOURS = ("first", "second", "third", "fourth")  # one for each of the ways
STYLE = """
  svg { --paper: #ffffff; --ink: #1f2328; --soft: #656d76; --grid: #d8dee4; --first: #656d76; --second: #0969da; --third: #bc4c00;
    --fourth: #8250df; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #0d1117; --ink: #e6edf3; --soft: #8d96a0; --grid: #30363d; --first: #8d96a0; --second: #58a6ff; --third: #f0883e;
      --fourth: #a371f7; }
  }
  text { font: 13px system-ui, sans-serif; fill: var(--soft); } .title { font-size: 16px; fill: var(--ink); }
  .paper { fill: var(--paper); stroke: var(--grid); } .grid { stroke: var(--grid); } polyline { fill: none; stroke-width: 2.25; }
  polyline.first { stroke: var(--first); } polyline.second { stroke: var(--second); } polyline.third { stroke: var(--third); }
  polyline.fourth { stroke: var(--fourth); }
"""


def drawing(title: str, results: Sequence[Result]) -> str:
    """The loss twice: over the tokens that all groups have trained on, and over time."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        f'<text class="title" x="{GAP}" y="30">{escape(title)}</text>',
    ]
    for place, (colour, result) in enumerate(zip(COLOURS, results, strict=True)):
        x = GAP + place * (WIDTH - GAP) // len(COLOURS)
        parts.append(f'<polyline class="{colour}" points="{x},49 {x + 22},49"/>')
        parts.append(f'<text x="{x + 30}" y="53">{escape(result.name)}</text>')
    width = (WIDTH - 3 * GAP) / 2 + GAP / 4
    parts += _panel(GAP, width, "thousands of tokens", [result.over_tokens for result in results])
    parts += _panel(2 * GAP + width, width, "seconds", [result.over_time for result in results])
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: float, width: float, across: str, curves: Sequence[Points]) -> list[str]:
    shown = [thin(smooth(curve)) for curve in curves]
    losses, most = [loss for curve in shown for _, loss in curve], max(curve[-1][0] for curve in shown)
    y_ticks, bottom = ticks(min(losses), max(losses)), HEIGHT - BOTTOM

    def at(x: float, loss: float) -> str:
        down = (y_ticks[-1] - loss) / (y_ticks[-1] - y_ticks[0])
        return f"{left + x / most * width:.1f},{TOP + down * (bottom - TOP):.1f}"

    parts = []
    for value in y_ticks:
        y = at(0.0, value).partition(",")[2]
        parts.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y) + 4}" text-anchor="end">{value:g}</text>')
    for value in (value for value in ticks(0.0, most) if value <= most):
        x = at(value, y_ticks[0]).partition(",")[0]
        parts.append(f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{value:,.0f}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{bottom + 42}" text-anchor="middle">{across}</text>')
    for colour, curve in zip(COLOURS, shown, strict=True):
        parts.append(f'<polyline class="{colour}" points="{" ".join(at(*point) for point in curve)}"/>')
    return parts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
