"""How long groups take to form, by members and kind; how starts in any order go; where one machine's limits are.

    python bench/forming.py [--sizes 2,4,8,16,32,64] [--forms 5] [--starts 20] [--write docs/forming.svg]

All members live on this machine and meet at one store. In-process gloo: each member is a process of its own, forked from one that has
imported torch. Baby gloo: each member is a thread of one process, its group a child; one fork server forks all of them. "form" is the
first generation, "anew" the median of the next ones, each after `abandon` of the last, whose end goes on meanwhile. A figure is the
slowest member's `configure`; all begin within a millisecond or so of each other.

Starts: 3 to 5 members in an order and at times by seed, spread over a second; the figure is from the last one's start until all stand, and
its sum is right. A size that does not form is told with its reason, and what is larger is left out.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.pairs import table

KINDS = ("gloo", "baby_gloo")
RENDEZVOUS_S = 120.0
WITHIN_S = 2.0  # of the last start


@dataclass
class FormingRow:
    kind: str
    size: int
    first_s: float = math.nan
    anew_s: list[float] = field(default_factory=list)
    descriptors: int = 0  # of one member
    mib: float = 0.0  # of one child
    problem: str = ""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2,4,8,16,32,64")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--forms", type=int, default=5, help="times that each is formed anew")
    parser.add_argument("--starts", type=int, default=20, help="by seed, of each kind")
    parser.add_argument("--write", type=Path, help="draws the curves (SVG)")
    options = parser.parse_args(argv)
    sizes = sorted(int(size) for size in options.sizes.split(","))
    kinds = options.kinds.split(",")

    from ft.process_groups.store import serve  # imports torch, before the members are forked

    forked: list[Forked] = []
    for _ in range(max(*sizes, 5)):
        forked.append(Forked(forked))  # which closes what it has from those before
    members: dict[str, list[Any]] = {"gloo": forked}
    if "baby_gloo" in kinds:
        members["baby_gloo"] = [FormingMember("baby_gloo") for _ in forked]
    server = serve()
    store = f"127.0.0.1:{server.port}"
    rows: list[FormingRow] = []
    late = False
    try:
        for kind in kinds:
            for size in sizes:
                rows.append(form(members[kind][:size], kind, options.forms, f"{store}/{kind}/{size}"))
                if rows[-1].problem:
                    break
        print(told(rows), flush=True)
        for kind in kinds if options.starts else []:
            late |= stagger(members[kind], kind, options.starts, f"{store}/{kind}/starts")
    finally:
        for one in forked:
            one.close()
    if options.write:
        options.write.write_text(drawing(rows))
    return int(late or any(row.problem for row in rows))


def form(members: list[Any], kind: str, times: int, store: str) -> FormingRow:
    row = FormingRow(kind, len(members))
    for index in range(times + 1):
        answers = at_once(
            [partial(member.form, f"{store}/{index}", rank, row.size) for rank, member in enumerate(members)]
        )
        problems = [str(answer) for answer in answers if isinstance(answer, Exception)]
        if problems:
            row.problem = problems[0]
            break
        slowest_s = max(answer["s"] for answer in answers)
        row.first_s, row.anew_s = (slowest_s, []) if index == 0 else (row.first_s, [*row.anew_s, slowest_s])
        row.descriptors = max(answer["descriptors"] for answer in answers)
        row.mib = max(answer["mib"] for answer in answers)
    at_once([member.drop for member in members])
    return row


def stagger(members: list[Any], kind: str, starts: int, store: str) -> bool:
    """True when any start took longer than it may."""
    after_s = []
    for seed in range(starts):
        chance = random.Random(seed)
        crew = members[: chance.randint(3, 5)]
        delays_s = [chance.random() for _ in crew]

        ends_s = at_once(
            [
                partial(begin, member, delays_s[rank], f"{store}/{seed}", rank, len(crew))
                for rank, member in enumerate(crew)
            ]
        )
        for end_s in ends_s:
            if isinstance(end_s, Exception):
                raise end_s
        after_s.append(max(ends_s) - max(delays_s))
        at_once([member.drop for member in crew])
    print(
        f"\n{kind}: {starts} starts of 3 to 5 members in any order: all stand {statistics.median(after_s):.3f} s after the last start "
        f"({min(after_s):.3f}-{max(after_s):.3f}); at most {WITHIN_S:g} is asked for"
    )
    return max(after_s) > WITHIN_S


def begin(member: Any, delay_s: float, store: str, rank: int, size: int) -> float:
    """When it stands, in seconds from the first possible start."""
    time.sleep(delay_s)
    answer = member.form(store, rank, size)
    if isinstance(answer, Exception):
        raise answer
    return delay_s + float(answer["s"])


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Their results, in order; an exception is one."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        gate.wait()
        try:
            return call()
        except Exception as error:  # noqa: BLE001 (the row tells it)
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, calls))


class FormingMember:
    """One member, in whatever thread or process."""

    def __init__(self, kind: str) -> None:
        from ft.process_groups.baby import ProcessGroupBabyGloo
        from ft.process_groups.base import ProcessGroup
        from ft.process_groups.gloo import ProcessGroupGloo

        classes: dict[str, Any] = {"gloo": ProcessGroupGloo, "baby_gloo": ProcessGroupBabyGloo}
        self.group: ProcessGroup = classes[kind](timeout=RENDEZVOUS_S, rendezvous_s=RENDEZVOUS_S)
        self.group.prepare()

    def form(self, store: str, rank: int, size: int) -> dict[str, float]:
        import torch

        start_s = time.perf_counter()
        self.group.configure(store, rank, size)
        spent_s = time.perf_counter() - start_s
        self.group.allreduce(
            [value := torch.full((10,), rank + 1.0)]
        ).wait()  # and nobody gives up while others connect
        assert value.eq(size * (size + 1) / 2).all()
        child = getattr(self.group, "child", None)
        process = child.pid if child else os.getpid()
        descriptors = len(list(Path(f"/proc/{process}/fd").iterdir())) if sys.platform == "linux" else 0
        return {"s": spent_s, "descriptors": descriptors, "mib": child.memory_bytes() / 2**20 if child else 0.0}

    def drop(self) -> dict[str, float]:
        self.group.shutdown(RENDEZVOUS_S)
        return {}


class Forked:
    """A member of in-process gloo in a process of its own. To be made before this process has any thread."""

    def __init__(self, before: list[Forked]) -> None:
        self._pipe, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for inherited in [self, *before]:
                inherited._pipe.close()
            self._serve(theirs)
        theirs.close()

    def form(self, store: str, rank: int, size: int) -> Any:
        self._pipe.send((store, rank, size))
        return self._pipe.recv()

    def drop(self) -> None:
        self._pipe.send(None)
        self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        os.waitpid(self.pid, 0)

    @staticmethod
    def _serve(pipe: Connection) -> None:
        try:
            member = FormingMember("gloo")
            while True:
                request = pipe.recv()
                do = member.drop if request is None else partial(member.form, *request)
                try:
                    pipe.send(do())
                except RuntimeError as error:
                    pipe.send(RuntimeError(str(error)))
        except EOFError:
            os._exit(0)
        finally:
            os._exit(1)


def told(rows: list[FormingRow]) -> str:
    lines = []
    for row in rows:
        anew = (
            f"{statistics.median(row.anew_s):.3f} ({min(row.anew_s):.3f}-{max(row.anew_s):.3f})" if row.anew_s else "-"
        )
        memory = f"{row.mib:.0f}" if row.mib else "-"
        lines.append([row.kind, str(row.size), row.problem or f"{row.first_s:.3f}", anew, str(row.descriptors), memory])
    return table(["kind", "members", "form, s", "anew, s", "descriptors", "RSS of a child, MiB"], lines)


# ---------------------------------------------------------------------------------------------- the picture

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 70, 30, 60, 60
STYLE = """
  svg { --paper: #ffffff; --ink: #1f2328; --soft: #656d76; --grid: #d8dee4; --gloo: #0969da; --baby: #bc4c00; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #0d1117; --ink: #e6edf3; --soft: #8d96a0; --grid: #30363d; --gloo: #58a6ff; --baby: #f0883e; }
  }
  text { font: 13px system-ui, sans-serif; fill: var(--soft); } .title { font-size: 16px; fill: var(--ink); }
  .paper { fill: var(--paper); } .grid { stroke: var(--grid); } polyline { fill: none; stroke-width: 2; }
  .gloo { stroke: var(--gloo); } .baby_gloo { stroke: var(--baby); } .first { stroke-dasharray: 5 4; }
"""


def drawing(rows: list[FormingRow]) -> str:
    """Seconds by members, both on logarithmic scales: a full mesh is a slope of one per member, two in all."""
    rows = [row for row in rows if not row.problem and row.anew_s]
    seconds = [s for row in rows for s in (row.first_s, statistics.median(row.anew_s))]
    low, high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
    sizes = sorted({row.size for row in rows})
    across = math.log2(sizes[-1] / sizes[0]) or 1.0

    def place(size: int, s: float) -> tuple[float, float]:
        x = LEFT + math.log2(size / sizes[0]) / across * (WIDTH - LEFT - RIGHT)
        return x, TOP + (high - math.log10(s)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="seconds to form, by members">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        f'<text class="title" x="{LEFT}" y="30">Seconds to form a group (dashed), and to form it anew</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 15}" text-anchor="middle">members, on one machine</text>',
    ]
    for power in range(low, high + 1):
        y = place(sizes[0], 10.0**power)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    parts += [
        f'<text x="{place(size, 1)[0]:.1f}" y="{HEIGHT - BOTTOM + 22}" text-anchor="middle">{size}</text>'
        for size in sizes
    ]
    for kind in dict.fromkeys(row.kind for row in rows):
        mine = [row for row in rows if row.kind == kind]
        for name, points in (
            ("first", [place(row.size, row.first_s) for row in mine]),
            ("anew", [place(row.size, statistics.median(row.anew_s)) for row in mine]),
        ):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="{kind} {name}" points="{path}"/>')
        x, y = place(mine[-1].size, statistics.median(mine[-1].anew_s))
        parts.append(f'<text x="{x - 4:.1f}" y="{y - 10:.1f}" text-anchor="end">{kind.replace("_", " ")}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
