#!/usr/bin/env python3
"""Draws a run's loss curve as an SVG: `scripts/plot_loss.py outputs/llama [--out loss.svg]`.

Floor 5, standard library only. Reads <run>/metrics.jsonl. The picture has its own background and follows the reader's light
or dark theme, so that it can stand in a README as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

Points = list[tuple[float, float]]  # (step, loss)
Marks = Sequence[tuple[float, str]]  # (step, what happened then)

WIDTH, HEIGHT = 880, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 36, 64, 52  # margins around the plot's area
MARK_WIDTH, MARK_LETTER = 12, 6.2  # of the words of a mark: what they need beside each other, and a letter of theirs

STYLE = """
  svg { --paper: #ffffff; --ink: #1f2328; --soft: #656d76; --grid: #d8dee4; --train: #0969da; --held: #bc4c00; --mark: #cf222e; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #0d1117; --ink: #e6edf3; --soft: #8d96a0; --grid: #30363d; --train: #58a6ff; --held: #f0883e; --mark: #f85149; }
  }
  text { font: 13px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--soft); }
  .title { font-size: 17px; font-weight: 600; fill: var(--ink); }
  .paper { fill: var(--paper); stroke: var(--grid); }
  .grid { stroke: var(--grid); stroke-width: 1; }
  .raw { stroke: var(--train); stroke-width: 1; opacity: .3; }
  .train { stroke: var(--train); stroke-width: 2.25; }
  .held { stroke: var(--held); stroke-width: 2.25; }
  .dot { fill: var(--held); stroke: var(--paper); stroke-width: 1.5; }
  line.mark { stroke: var(--mark); stroke-width: 1; opacity: .6; }
  text.mark { font-size: 11px; fill: var(--mark); }
  polyline { fill: none; stroke-linejoin: round; stroke-linecap: round; }
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Draws a run's loss curve as an SVG.")
    parser.add_argument("run", type=Path, help="folder of the run, such as outputs/llama")
    parser.add_argument("--out", type=Path, help="file to write; default: loss.svg in the run's folder")
    arguments = parser.parse_args(argv)
    journal = arguments.run / "metrics.jsonl"
    out = arguments.out or arguments.run / "loss.svg"
    try:
        training, validation = read(journal)
        out.write_text(draw(arguments.run.resolve().name, training, validation), encoding="utf-8")
    except (OSError, ValueError) as error:
        words = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else f"{journal}: {error}"
        print(f"plot_loss: {words}", file=sys.stderr)
        return 2
    print(f"{out}: {len(training)} steps, {len(validation)} looks at held-out text")
    return 0


def read(journal: Path) -> tuple[Points, Points]:
    """Training and validation losses by step. A last line that is being written right now is left out."""
    training: Points = []
    validation: Points = []
    for line in journal.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        for key, points in (("loss", training), ("validation_loss", validation)):
            if row.get(key) is not None:
                points.append((float(row["step"]), float(row[key])))
    if len(training) < 2:
        raise ValueError(f"{len(training)} steps; a curve needs 2")
    return training, validation


def draw(name: str, training: Points, validation: Points, marks: Marks = ()) -> str:
    """The whole SVG. `marks`: each an upright line with its words."""
    losses = [loss for _, loss in training + validation]
    x_ticks = ticks(training[0][0], training[-1][0], finest=1.0)
    y_ticks = ticks(min(losses), max(losses))
    # Steps end where the run ends; losses end on a tick, so that no line touches the frame.
    x_low, x_high = min(training[0][0], x_ticks[0]), training[-1][0]
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + (point[0] - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        y = TOP + (y_high - point[1]) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return x, y

    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    label = escape(f"Loss curve of {name}", quote=True)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        f'<text class="title" x="{LEFT}" y="34">{escape(name)}</text>',
    ]
    digits = max(0, -math.floor(math.log10(y_ticks[1] - y_ticks[0]) + 1e-9))
    for value in y_ticks:
        y = place((x_low, value))[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4.5:.1f}" text-anchor="end">{value:.{digits}f}</text>')
    for value in x_ticks:
        if x_low <= value <= x_high:
            x = place((value, y_low))[0]
            parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{value:,.0f}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">optimizer step</text>')
    turned = f'transform="rotate(-90 18 {(TOP + bottom) / 2})"'
    parts.append(f'<text x="18" y="{(TOP + bottom) / 2}" text-anchor="middle" {turned}>loss, nats per token</text>')
    before, end = -math.inf, 0.0
    for step, words in sorted(marks):
        x = place((step, y_low))[0]
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        start = end + 8 if x - before < MARK_WIDTH else TOP + 4  # words that would lie on others begin below them
        before, end = x, start + MARK_LETTER * len(words)
        turned = f'transform="rotate(-90 {x - 4:.1f} {start:.0f})"'
        parts.append(
            f'<text class="mark" x="{x - 4:.1f}" y="{start:.0f}" text-anchor="end" {turned}>{escape(words)}</text>'
        )
    parts.append(_line("raw", [place(point) for point in thin(training)]))
    parts.append(_line("train", [place(point) for point in thin(smooth(training))]))
    if validation:
        parts.append(_line("held", [place(point) for point in validation]))
        parts += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in map(place, validation)]
    parts += _legend(training, validation)
    return "\n".join([*parts, "</svg>", ""])


def ticks(low: float, high: float, *, about: int = 6, finest: float = 1e-3) -> list[float]:
    """Round values from at or below `low` to at or above `high`; `finest` or more, 1, 2 or 5 times a power of ten apart."""
    rough = max((high - low) / about, finest)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def smooth(points: Points) -> Points:
    """Means over a fiftieth of the run around each step: unlike a running mean, they do not lag behind a steep start."""
    sums = [0.0, *itertools.accumulate(loss for _, loss in points)]
    means = []
    for at, (step, _) in enumerate(points):
        reach = min(len(points) // 100, at)  # as far back as ahead, except at the end
        first, last = at - reach, min(at + reach + 1, len(points))
        means.append((step, (sums[last] - sums[first]) / (last - first)))
    return means


def thin(points: Points, most: int = 800) -> Points:
    """At most two points per pixel or so: of each stretch its lowest and highest, in order, so that spikes stay."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 2))
    stretches = [points[at : at + size] for at in range(0, len(points), size)]
    return [
        point
        for stretch in stretches
        for point in sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    ]


def _line(kind: str, points: Points) -> str:
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _legend(training: Points, validation: Points) -> list[str]:
    """Top right: each curve with the value it ends on."""
    entries = [("train", f"training {smooth(training)[-1][1]:.3f}")]
    if validation:
        entries.append(("held", f"validation {validation[-1][1]:.3f}"))
    parts, x = [], WIDTH - RIGHT
    for kind, text in reversed(entries):
        parts.append(f'<text x="{x}" y="34" text-anchor="end">{text}</text>')
        x -= 7 * len(text) + 8  # text is about 7 wide per character in these fonts
        parts.append(_line(kind, [(x - 20, 29.5), (x, 29.5)]))
        x -= 44
    return parts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
