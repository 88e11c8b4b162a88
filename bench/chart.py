"""Curves as an SVG that follows the reader's light or dark mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from scripts.plot_loss import Points, ticks

TOP, BOTTOM, GAP = 76, 56, 64
COLOURS = (
    ("#656d76", "#8d96a0"),
    ("#0969da", "#58a6ff"),
    ("#bc4c00", "#f0883e"),
    ("#8250df", "#a371f7"),
)  # light, dark
STYLE = """
  svg { --paper: #ffffff; --ink: #1f2328; --soft: #656d76; --grid: #d8dee4;%s }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #0d1117; --ink: #e6edf3; --soft: #8d96a0; --grid: #30363d;%s }
  }
  text { font: 13px system-ui, sans-serif; fill: var(--soft); } .title { font-size: 16px; fill: var(--ink); }
  .paper { fill: var(--paper); stroke: var(--grid); } .grid { stroke: var(--grid); } polyline { fill: none; stroke-width: 2.25; }
"""


@dataclass(frozen=True)
class Panel:
    """Curves by name over one axis. `logarithmic`: both axes, across to the base of 2, with a mark at each point of the first curve."""

    across: str
    curves: Mapping[str, Points]
    logarithmic: bool = False


def drawing(title: str, panels: Sequence[Panel], *, width: int = 900, height: int = 400) -> str:
    """All panels have curves of the same names, which are named once."""
    styles = ["".join(f" --c{i}: {colours[dark]};" for i, colours in enumerate(COLOURS)) for dark in (0, 1)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE % tuple(styles)}</style>",
        f'<rect class="paper" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="{GAP}" y="30">{escape(title)}</text>',
    ]
    names = list(panels[0].curves)
    for place, name in enumerate(names):
        x = GAP + place * (width - GAP) // len(names)
        parts.append(_line(place, f"{x},49 {x + 22},49"))
        parts.append(f'<text x="{x + 30}" y="53">{escape(name)}</text>')
    each = (width - GAP * (len(panels) + 1)) / len(panels) + GAP / 4
    for place, panel in enumerate(panels):
        parts += _panel(panel, GAP + place * (each + GAP), each, height - BOTTOM)
    return "\n".join([*parts, "</svg>", ""])


def _line(place: int, points: str) -> str:
    return f'<polyline style="stroke: var(--c{place % len(COLOURS)})" points="{points}"/>'


def _panel(panel: Panel, left: float, width: float, bottom: float) -> list[str]:
    points = [point for curve in panel.curves.values() for point in curve]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    if panel.logarithmic:
        low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
        y_ticks = [10.0**power for power in range(low, max(high, low + 1) + 1)]
        x_ticks, over, up = xs, math.log2, math.log10
    else:
        y_ticks, x_ticks = ticks(min(ys), max(ys)), [x for x in ticks(0.0, xs[-1]) if x <= xs[-1]]
        over = up = float
    x_low, x_high = over(x_ticks[0]), over(xs[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        down = (up(y_ticks[-1]) - up(y)) / (up(y_ticks[-1]) - up(y_ticks[0]))
        return left + (over(x) - x_low) / ((x_high - x_low) or 1.0) * width, TOP + down * (bottom - TOP)

    parts = []
    for value in y_ticks:
        y = at(xs[-1], value)[1]
        parts.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in x_ticks:
        x = at(value, y_ticks[0])[0]
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{value:,.0f}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{bottom + 42}" text-anchor="middle">{panel.across}</text>')
    for place, curve in enumerate(panel.curves.values()):
        parts.append(_line(place, " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in curve)))
    return parts
