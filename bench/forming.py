"""Measures the time to form a process group by size and kind, also with staggered starts, and the largest size on one machine.

    python bench/forming.py [--sizes 2,4,8,16,32,64] [--write docs/forming.svg]

All members run on this machine and use one store. In-process gloo: each member is a process, forked from one that has imported torch. Baby
gloo: each member is a thread of one process, and its process group is a child; one fork server forks all children. "form" is the first
generation, "anew" the median of the following ones, each after `abandon` of the previous one, which shuts down in the background. A value
is the time of the slowest member's `configure`; all members begin within about a millisecond.

Starts: 3 to 5 members in a random order (by seed), spread over a second; the time is from the last start until all have formed the process
group and an all-reduce has completed. A size that does not form has a row with the reason, and larger sizes are skipped.
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

FORMS, STARTS = 5, 20  # repetitions per size; staggered starts per kind
RENDEZVOUS_S = 120.0
WITHIN_S = 2.0  # bound, from the last start
Members = Sequence[Callable[..., Any]]  # each is called with an order


def main(argv: Sequence[str]) -> int:
    options = parser(__doc__, sizes="2,4,8,16,32,64", write=(Path, "draws the curves (SVG)")).parse_args(argv)
    sizes = sorted(map(int, options.sizes.split(",")))

    from ft.process_groups.store import serve

    server, rows, curves, good = serve(), list[list[str]](), dict[str, list[tuple[float, float]]](), True
    store = f"127.0.0.1:{server.port}"
    all_members = {kind: make_members(kind, max(*sizes, 5)) for kind in ("gloo", "baby_gloo")}
    for kind, members in all_members.items():
        for size in sizes:
            places = [f"{store}/{kind}/{size}/{index}" for index in range(FORMS + 1)]
            try:
                answers = [form(members[:size], place, [0.0] * size) for place in places]
            except RuntimeError as problem:
                rows.append([kind, str(size), str(problem), "-", "0", "-"])
                good = False
                break
            finally:
                drop(members[:size])
            first, *anew = (max(answer["s"] for answer in generation) for generation in answers)
            descriptors, mib = (max(answer[of] for answer in answers[-1]) for of in ("descriptors", "mib"))
            of_all = [f"{first:.3f}", spread(anew, ".3f"), str(descriptors), f"{mib:.0f}" if mib else "-"]
            rows.append([kind, str(size), *of_all])
            for name, s in (("first", first), ("anew", statistics.median(anew))):
                curves.setdefault(f"{kind.replace('_', ' ')}, {name}", []).append((size, s))
    print(table(["kind", "members", "form, s", "anew, s", "descriptors", "RSS of a child, MiB"], rows), flush=True)
    for kind, members in all_members.items():
        good &= stagger(members, kind, f"{store}/{kind}/starts")
    if options.write:
        from scripts.plot_loss import Panel, drawing

        panel = Panel("members, on one machine", curves, logarithmic=True)
        title = "Seconds to form a group, and to form it anew"
        options.write.write_text(drawing(title, [panel], width=760, height=420))
    return int(not good)


def make_members(kind: str, count: int) -> Members:
    if kind == "gloo":
        return [Forked(("ft.process_groups.gloo",), serve_member).ask for _ in range(count)]
    return [FormingMember("baby_gloo").do for _ in range(count)]


def stagger(members: Members, kind: str, store: str) -> bool:
    """Prints the seconds after the last start. Returns False if one exceeds WITHIN_S. Raises RuntimeError."""
    after_s = []
    for seed in range(STARTS):
        chance = random.Random(seed)
        here = members[: chance.randint(3, 5)]
        delays_s = [chance.random() for _ in here]
        answers = form(here, f"{store}/{seed}", delays_s)
        after_s.append(max(d + answer["s"] for d, answer in zip(delays_s, answers, strict=True)) - max(delays_s))
        drop(here)
    when = f"{spread(after_s, '.3f')} s after the last start; bound {WITHIN_S:g} s"
    print(f"\n{kind}: {STARTS} starts of 3 to 5 members in any order: all have formed the process group {when}")
    return max(after_s) <= WITHIN_S


def form(members: Members, store: str, delays_s: Sequence[float]) -> list[dict[str, float]]:
    """Returns the answers of members that start after these delays. Raises RuntimeError with the reason of a member that failed."""
    gate = threading.Barrier(len(members))

    def start(member: Callable[..., Any], rank: int, delay_s: float) -> Any:
        gate.wait()
        return member("form", store, rank, len(members), delay_s)

    with ThreadPoolExecutor(len(members)) as threads:
        answers = list(threads.map(start, members, range(len(members)), delays_s))
    if problems := [answer for answer in answers if isinstance(answer, str)]:
        raise RuntimeError(problems[0])
    return answers


def drop(members: Members) -> None:
    with ThreadPoolExecutor(len(members)) as threads:
        for member in members:
            threads.submit(member, "drop")  # does nothing if the process has ended


class FormingMember:
    """A member of a process group."""

    def __init__(self, kind: str) -> None:
        from ft.process_groups.baby import ProcessGroupBabyGloo
        from ft.process_groups.gloo import ProcessGroupGloo

        classes: dict[str, Any] = {"gloo": ProcessGroupGloo, "baby_gloo": ProcessGroupBabyGloo}
        self.group = classes[kind](timeout=RENDEZVOUS_S, rendezvous_s=RENDEZVOUS_S)
        self.group.prepare()

    def do(self, what: str, *about: Any) -> Any:
        """Returns the result, or the reason of a failure."""
        try:
            return self.form(*about) if what == "form" else self.group.shutdown(RENDEZVOUS_S)
        except Exception as error:  # noqa: BLE001 (a row has the reason)
            return str(error) or type(error).__name__

    def form(self, store: str, rank: int, size: int, delay_s: float) -> dict[str, float]:
        import torch

        time.sleep(delay_s)
        start_s = time.perf_counter()
        self.group.configure(store, rank, size)
        spent_s = time.perf_counter() - start_s
        value = torch.full((10,), rank + 1.0)
        self.group.allreduce([value]).wait()  # all members are connected
        assert value.eq(size * (size + 1) / 2).all()
        child = getattr(self.group, "child", None)
        process = child.pid if child else os.getpid()
        descriptors = len(list(Path(f"/proc/{process}/fd").iterdir())) if sys.platform == "linux" else 0
        mib = memory_bytes("VmRSS", child.pid) / 2**20 if child and sys.platform == "linux" else 0.0
        return {"s": spent_s, "descriptors": descriptors, "mib": mib}


def serve_member(talk: Any) -> None:
    member = FormingMember("gloo")
    obey(talk, {what: partial(member.do, what) for what in ("form", "drop")})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
