"""Seconds that groups take to form, by members and kind, also when they start in any order; and the limits of one machine.

    python bench/forming.py [--sizes 2,4,8,16,32,64] [--forms 5] [--starts 20] [--write docs/forming.svg]

All members live on this machine and meet at one store. In-process gloo: each member is a process of its own, forked from one that has
imported torch. Baby gloo: each member is a thread of one process, its group a child; one fork server forks all of them. "form" is the
first generation, "anew" the median of the next ones, each after `abandon` of the last, whose end goes on meanwhile. A figure is the
slowest member's `configure`; all begin within a millisecond or so of each other.

Starts: 3 to 5 members in an order and at times by seed, spread over a second; the figure is from the last one's start until all stand, and
its sum is right. A size that does not form is told with its reason, and what is larger is left out.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.job import Forked, memory_bytes, obey
from bench.pairs import parser, spread, table

RENDEZVOUS_S = 120.0
WITHIN_S = 2.0  # of the last start
Team = Sequence[Callable[..., Any]]  # members, each called with an order
HEADER = ["kind", "members", "form, s", "anew, s", "descriptors", "RSS of a child, MiB"]


def main(argv: Sequence[str]) -> int:
    options = parser(
        __doc__,
        sizes="2,4,8,16,32,64",
        forms=(5, "times that each is formed anew"),
        starts=(20, "by seed, of each kind"),
        write=(Path, "draws the curves (SVG)"),
    ).parse_args(argv)
    sizes = sorted(int(size) for size in options.sizes.split(","))

    from ft.process_groups.store import serve

    server, rows, curves, bad = serve(), list[list[str]](), dict[str, list[tuple[float, float]]](), False
    store = f"127.0.0.1:{server.port}"
    members = {kind: crew(kind, max(*sizes, 5)) for kind in ("gloo", "baby_gloo")}
    for kind, team in members.items():
        for size in sizes:
            row, seconds = form(team[:size], kind, options.forms, f"{store}/{kind}/{size}")
            at_once([partial(member, "drop") for member in team[:size]])
            rows.append(row)
            if not seconds:
                bad = True
                break
            for name, s in ((f"{kind}, first", seconds[0]), (f"{kind}, anew", statistics.median(seconds[1:]))):
                curves.setdefault(name.replace("_", " "), []).append((size, s))
    print(table(HEADER, rows), flush=True)
    for kind, team in members.items() if options.starts else ():
        bad |= stagger(team, kind, options.starts, f"{store}/{kind}/starts")
    if options.write:
        from bench.chart import Panel, drawing

        panel = Panel("members, on one machine", curves, logarithmic=True)
        title = "Seconds to form a group, and to form it anew"
        options.write.write_text(drawing(title, [panel], width=760, height=420))
    return int(bad)


def crew(kind: str, count: int) -> Team:
    """Members, each called with what it is to do."""
    if kind == "gloo":
        return [Forked(("ft.process_groups.gloo",), serve_member).ask for _ in range(count)]
    return [FormingMember("baby_gloo").do for _ in range(count)]


def form(members: Team, kind: str, times: int, store: str) -> tuple[list[str], list[float]]:
    """A row, and the seconds of each generation: none where one did not form."""
    size, answers, seconds = str(len(members)), list[Any](), list[float]()
    for index in range(times + 1):
        answers, problem = formed(members, f"{store}/{index}", [0.0 for _ in members])
        if problem:
            return [kind, size, problem, "-", "0", "-"], []
        seconds.append(max(answer["s"] for answer in answers))
    mib = max(answer["mib"] for answer in answers)
    anew, descriptors = spread(seconds[1:], ".3f"), max(answer["descriptors"] for answer in answers)
    return [kind, size, f"{seconds[0]:.3f}", anew, str(descriptors), f"{mib:.0f}" if mib else "-"], seconds


def stagger(members: Team, kind: str, starts: int, store: str) -> bool:
    """True when any start took longer than it may."""
    after_s = []
    for seed in range(starts):
        chance = random.Random(seed)
        here = members[: chance.randint(3, 5)]
        delays_s = [chance.random() for _ in here]
        answers, problem = formed(here, f"{store}/{seed}", delays_s)
        if problem:
            raise RuntimeError(problem)
        ends_s = [delay_s + answer["s"] for delay_s, answer in zip(delays_s, answers, strict=True)]
        after_s.append(max(ends_s) - max(delays_s))
        at_once([partial(member, "drop") for member in here])
    when = f"{spread(after_s, '.3f').replace(' (', ' s after the last start (')}; at most {WITHIN_S:g} is asked for"
    print(f"\n{kind}: {starts} starts of 3 to 5 members in any order: all stand {when}")
    return max(after_s) > WITHIN_S


def formed(members: Team, store: str, delays_s: Sequence[float]) -> tuple[list[Any], str]:
    """Answers of members that start after these delays, and why one of them did not form: "" where all did."""
    starts = enumerate(zip(members, delays_s, strict=True))
    answers = at_once([partial(one, "form", store, rank, len(members), delay_s) for rank, (one, delay_s) in starts])
    return answers, next((str(answer) for answer in answers if isinstance(answer, str | Exception)), "")


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of calls that begin together, in order; an exception is one."""
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
        from ft.process_groups.gloo import ProcessGroupGloo

        classes: dict[str, Any] = {"gloo": ProcessGroupGloo, "baby_gloo": ProcessGroupBabyGloo}
        self.group = classes[kind](timeout=RENDEZVOUS_S, rendezvous_s=RENDEZVOUS_S)
        self.group.prepare()

    def do(self, what: str, *about: Any) -> Any:
        """A result, or in words why no group forms."""
        try:
            return {"form": self.form, "drop": self.drop}[what](*about)
        except RuntimeError as error:
            return str(error)

    def form(self, store: str, rank: int, size: int, delay_s: float) -> dict[str, float]:
        import torch

        time.sleep(delay_s)
        start_s = time.perf_counter()
        self.group.configure(store, rank, size)
        spent_s = time.perf_counter() - start_s
        value = torch.full((10,), rank + 1.0)
        self.group.allreduce([value]).wait()  # and nobody gives up while others connect
        assert value.eq(size * (size + 1) / 2).all()
        child = getattr(self.group, "child", None)
        process = child.pid if child else os.getpid()
        descriptors = len(list(Path(f"/proc/{process}/fd").iterdir())) if sys.platform == "linux" else 0
        mib = memory_bytes("VmRSS", child.pid) / 2**20 if child and sys.platform == "linux" else 0.0
        return {"s": spent_s, "descriptors": descriptors, "mib": mib}

    def drop(self) -> None:
        self.group.shutdown(RENDEZVOUS_S)


def serve_member(talk: Any) -> None:
    member = FormingMember("gloo")
    obey(talk, {what: partial(member.do, what) for what in ("form", "drop")})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
