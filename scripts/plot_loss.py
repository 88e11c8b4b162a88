#!/usr/bin/env python3
"""Draws a run's loss curve as an SVG: `scripts/plot_loss.py outputs/llama [--out loss.svg]`.

Standard library only. Reads <run>/metrics.jsonl. The SVG has its own background and follows the light or dark theme, for use in a README.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import TextIOWrapper
from pathlib import Path

Points = list[tuple[float, float]]  # (step, loss)
Marks = Sequence[tuple[float, str]]  # (step, label of the event)

TOP, BOTTOM, GAP = 76, 56, 64  # margins around a panel
FEW = 60  # maximum number of points of a curve that are drawn as dots, too
MARK_WIDTH, MARK_LETTER = 12, 6.2  # pixels: height of a mark's rotated label, width of a letter

STYLE = """
  svg { --paper: #ffffff; --ink: #1f2328; --soft: #656d76; --grid: #d8dee4; --mark: #cf222e;
    --c0: #656d76; --c1: #0969da; --c2: #bc4c00; --c3: #8250df; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #0d1117; --ink: #e6edf3; --soft: #8d96a0; --grid: #30363d; --mark: #f85149;
      --c0: #8d96a0; --c1: #58a6ff; --c2: #f0883e; --c3: #a371f7; }
  }
  text { font: 13px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--soft); }
  .title { font-size: 17px; font-weight: 600; fill: var(--ink); }
  .paper { fill: var(--paper); stroke: var(--grid); }
  .grid { stroke: var(--grid); stroke-width: 1; }
  polyline { fill: none; stroke-width: 2.25; stroke-linejoin: round; stroke-linecap: round; }
  circle { fill: var(--paper); stroke-width: 2; }
  .c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); }
  .raw { stroke: var(--c1); stroke-width: 1; opacity: .3; }
  line.mark { stroke: var(--mark); stroke-width: 1; opacity: .6; }
  text.mark { font-size: 11px; fill: var(--mark); }
"""


@dataclass(frozen=True)
class Panel:
    """Curves by name; a curve named "" is drawn thin. `logarithmic`: both axes; ticks of the x axis are at the points."""

    across: str
    curves: Mapping[str, Points]
    up: str = ""
    logarithmic: bool = False


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Draws a run's loss curve as an SVG.")
    parser.add_argument("run", type=Path, help="folder of the run, such as outputs/llama")
    parser.add_argument("--out", type=Path, help="file to write; default: loss.svg in the run's folder")
    arguments = parser.parse_args(argv)
    metrics = arguments.run / "metrics.jsonl"
    out = arguments.out or arguments.run / "loss.svg"
    try:
        training, validation = read(metrics)
        out.write_text(draw(arguments.run.resolve().name, training, validation), encoding="utf-8")
    except (OSError, ValueError) as error:
        message = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else f"{metrics}: {error}"
        print(f"plot_loss: {message}", file=sys.stderr)
        return 2
    print(f"{out}: {len(training)} steps, {len(validation)} validations")
    return 0


def read(metrics: Path) -> tuple[Points, Points]:
    """Returns training and validation losses by step; ignores damaged lines. Raises OSError, and ValueError for fewer than 2 steps."""
    training, validation = Points(), Points()
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict) or "step" not in row:
            continue
        for key, points in (("loss", training), ("validation_loss", validation)):
            if row.get(key) is not None:
                points.append((float(row["step"]), float(row[key])))
    if len(training) < 2:
        raise ValueError(f"{len(training)} steps; a curve needs 2")
    return training, validation


def draw(name: str, training: Points, validation: Points, marks: Marks = ()) -> str:
    """Draws a run's losses as an SVG; each curve is named with its last value."""
    smoothed = smooth(training)
    curves = {"": thin(training), f"training {smoothed[-1][1]:.3f}": thin(smoothed)}
    if validation:
        curves[f"validation {validation[-1][1]:.3f}"] = validation
    return drawing(name, [Panel("optimizer step", curves, "loss, nats per token")], marks)


def drawing(title: str, panels: Sequence[Panel], marks: Marks = (), *, width: int = 900, height: int = 420) -> str:
    """Draws panels side by side as an SVG. All panels have curves of the same names (one legend). `marks`: vertical lines with labels."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="{GAP}" y="30">{escape(title)}</text>',
    ]
    each = (width - GAP * (len(panels) + 1)) / len(panels) + GAP / 4
    for place, panel in enumerate(panels):
        parts += _panel(panel, marks, GAP + place * (each + GAP), each, height - BOTTOM)
    names = list(panels[0].curves)
    for place, name in enumerate(names):
        if name:
            x = GAP + place * (width - GAP) // len(names)
            parts.append(_line(name, place, [(x, 49), (x + 22, 49)]))
            parts.append(f'<text x="{x + 30}" y="53">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, marks: Marks, left: float, width: float, bottom: float) -> list[str]:
    points = [point for curve in panel.curves.values() for point in curve]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    if panel.logarithmic:
        low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
        y_ticks = [10.0**power for power in range(low, max(high, low + 1) + 1)]
        y_labels = [f"{value:g}" for value in y_ticks]
        x_ticks, over, up = xs, math.log2, math.log10
    else:  # the y axis ends at ticks, the x axis at the last step
        y_ticks, x_ticks = ticks(min(ys), max(ys)), [x for x in ticks(xs[0], xs[-1], finest=1.0) if x <= xs[-1]]
        digits = max(0, -math.floor(math.log10(y_ticks[1] - y_ticks[0]) + 1e-9))
        y_labels = [f"{value:.{digits}f}" for value in y_ticks]
        over = up = float  # linear
    x_low, x_high = over(x_ticks[0]), over(xs[-1])

    def at(point: tuple[float, float]) -> tuple[float, float]:
        down = (up(y_ticks[-1]) - up(point[1])) / (up(y_ticks[-1]) - up(y_ticks[0]))
        return left + (over(point[0]) - x_low) / ((x_high - x_low) or 1.0) * width, TOP + down * (bottom - TOP)

    parts, middle = [], (TOP + bottom) / 2
    for value, label in zip(y_ticks, y_labels, strict=True):
        y = at((xs[-1], value))[1]
        parts.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value in x_ticks:
        x = at((value, y_ticks[0]))[0]
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{value:,.0f}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{bottom + 42}" text-anchor="middle">{panel.across}</text>')
    turned = f'transform="rotate(-90 18 {middle})"'
    parts += [f'<text x="18" y="{middle}" text-anchor="middle" {turned}>{panel.up}</text>'] if panel.up else []
    before, end = -math.inf, 0.0
    for step, label in sorted(marks):
        x = at((step, y_ticks[0]))[0]
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        # a label that would overlap the previous one is moved below it
        start = end + 8 if x - before < MARK_WIDTH else TOP + 4
        before, end = x, start + MARK_LETTER * len(label)
        turned = f'transform="rotate(-90 {x - 4:.1f} {start:.0f})"'
        parts.append(
            f'<text class="mark" x="{x - 4:.1f}" y="{start:.0f}" text-anchor="end" {turned}>{escape(label)}</text>'
        )
    for place, (name, curve) in enumerate(panel.curves.items()):
        parts.append(_line(name, place, [at(point) for point in curve]))
        if name and len(curve) <= FEW:
            parts += [f'<circle class="c{place % 4}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in map(at, curve)]
    return parts


def _line(name: str, place: int, points: Points) -> str:
    kind = f"c{place % 4}" if name else "raw"
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def ticks(low: float, high: float, *, about: int = 6, finest: float = 1e-3) -> list[float]:
    """Returns about `about` round values around `low` to `high`, at a distance of 1, 2 or 5 times a power of ten, at least `finest`."""
    rough = max((high - low) / about, finest)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def smooth(points: Points) -> Points:
    """Returns centred means over a fiftieth of the run, which unlike a running mean do not lag behind a steep beginning."""
    sums = [0.0, *itertools.accumulate(loss for _, loss in points)]
    means = []
    for at, (step, _) in enumerate(points):
        reach = min(len(points) // 100, at)  # equally far in both directions, except at the end
        first, last = at - reach, min(at + reach + 1, len(points))
        means.append((step, (sums[last] - sums[first]) / (last - first)))
    return means


def thin(points: Points, most: int = 800) -> Points:
    """Returns at most about `most` points: the minimum and maximum of each interval, in order, so that spikes stay visible."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 2))
    intervals = [points[at : at + size] for at in range(0, len(points), size)]
    return [
        point for part in intervals for point in sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    ]


if __name__ == "__main__":
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path, with an ASCII locale
    sys.exit(main(sys.argv[1:]))
