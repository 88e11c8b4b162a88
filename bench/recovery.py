"""Measures the cost of faults to a job of replica groups, compared with torchft if PEER has it.

    make recovery PEER=PYTHON              all; or one by one:
    python bench/recovery.py kill          three groups, one of which is killed and restarted: --mb 4,100,400 --kinds gloo,baby --faults 5
    python bench/recovery.py stop          one is stopped and continued: the trainer with its child processes, or only the trainer
    python bench/recovery.py storm         steps in two minutes with a kill every 20 seconds, compared with two without
    python bench/recovery.py lighthouse    the lighthouse is killed, and restarted after two seconds
    python bench/recovery.py staggered     20 starts of three to five groups, in any order and at any time
    python bench/recovery.py killstorm     four groups, a random one killed every six seconds for three minutes

PEER is a Python that has torchft-nightly. Both sides run the same job in turns (--rounds), with their defaults; torchft's collectives time
out after 30 s. Figures are the worst of all faults and rounds unless stated otherwise. A group writes its `start` line before its first
quorum request; "longest": the longest step of the others after it, in median steps; "before": that before the fault. Linux only.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import inf, nan
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.goodput import SEED, STEADY, GoodputRun, KilledJob, Victims
from bench.job import EventLine, EventLog, JobSide, RecoveryJob, ReplicaGroup, gaps, longest_gap
from bench.pairs import Failed, in_turns, machine, parser, table

HEARTBEAT_TIMEOUT_S = 5.0  # the default of both sides
STARTS = 20  # of `staggered`


def refused(groups: Sequence[EventLog], from_s: float) -> int:
    """Returns the number of failed steps of the group that has most of them."""
    return max(len(group.since(from_s, "abort")) for group in groups)


def weights(ends: Sequence[EventLine]) -> str:
    """Compares the weights of all groups, bit for bit, after the same step."""
    return "equal" if len({line.state for line in ends}) == 1 else "differ"


Fault = Callable[[RecoveryJob, ReplicaGroup], dict[str, float]]


def followed(job: RecoveryJob, victim: ReplicaGroup, at_s: float, mend: Callable[[], float | None]) -> dict[str, float]:
    """Measures a fault, which `mend` ends. Seconds: "steady", median step before; "gap", the longest step of a survivor after the fault;
    "back", from the restarted group's `start` line, or the time that `mend` returns, to its first commit with all groups. In median steps:
    "longest", the longest step of the others after that line; "noise", that of as many steps before. "lost": failed attempts of others."""
    count, others = len(job.groups), [group for group in job.groups if group is not victim]
    commits = [line for line in others[0].since(0.0, "commit") if line.at_s < at_s][-STEADY:]
    steps_s = gaps([line for line in commits if line.contributors == count])
    job.steps(STEADY, count - 1, others)
    gap_s, lost, steady_s = longest_gap(others, at_s), refused(others, at_s), statistics.median(steps_s)
    again_s, since_s = mend(), time.monotonic()

    def together() -> bool:
        if victim.ended:
            victim.start()  # as a launcher would
        commits = [[line.contributors for line in group.since(since_s, "commit")] for group in job.groups]
        return all(seen[-STEADY:] == [count] * STEADY for seen in commits)

    job.until("the return of the group that was harmed", together, lives=others)
    if again_s is None:
        again_s = victim.since(victim.started_s, "start")[0].at_s
    back_s = next(line.at_s for line in victim.since(again_s, "commit") if line.contributors == count) - again_s
    told = {"steady": steady_s, "gap": gap_s, "back": back_s, "lost": lost}
    return {**told, "longest": longest_gap(others, again_s) / steady_s, "noise": max(steps_s) / steady_s}


def kill(job: RecoveryJob, victim: ReplicaGroup) -> dict[str, float]:
    return followed(job, victim, victim.kill(), victim.start)


def stop(job: RecoveryJob, victim: ReplicaGroup, whole: bool) -> dict[str, float]:
    """Stops and continues the trainer; with `whole` also its descendants."""
    again = partial(victim.signal, signal.SIGCONT, whole)
    return followed(job, victim, victim.signal(signal.SIGSTOP, whole), again)


HEADER = ["", "faults", "step ms", "gap s", "median", "lost", "back s", "longest", "before", "weights", "bounds"]


def faults(
    sides: Sequence[JobSide], options: argparse.Namespace, what: str, kind: str, megabytes: float, fault: Fault,
    gap_bound: Callable[[float], float], *, back: bool,
) -> list[list[str]]:  # fmt: skip
    """Runs jobs of three groups with faults. Returns a row of the worst values per side. `gap_bound`: bound of the gap, by the seconds of a
    steady step; `back`: whether the return is bounded, too. Bounds apply to ours."""
    draws = {side.name: random.Random(SEED) for side in sides}  # the same victims on each side

    def job_of(side: JobSide) -> tuple[list[dict[str, float]], str]:
        seen = list[dict[str, float]]()
        try:
            with RecoveryJob(side, 3, megabytes=megabytes, step_ms=options.step_ms, kind=kind) as job:
                job.start()
                job.steps(STEADY, 3)
                for _ in range(options.faults):
                    seen.append(fault(job, draws[side.name].choice(job.groups)))
                return seen, weights(job.finish())
        except Failed as error:
            print(f"{side.name}, {what}: {error}", file=sys.stderr)
            return seen, "failed"

    rows, turns = [], in_turns({side.name: partial(job_of, side) for side in sides}, options.rounds)
    for side in sides:
        seen, ends = [one for faults, _ in turns[side.name] for one in faults], [end for _, end in turns[side.name]]
        failed, lost = ends.count("failed"), round(sum(one["lost"] for one in seen))
        steady_s, median_s = (statistics.median([one[of] for one in seen] or [nan]) for of in ("steady", "gap"))
        worst = (max([one[of] for one in seen], default=nan) for of in ("gap", "back", "longest", "noise"))
        gap_s, back_s, longest, noise = worst
        end = "differ" if "differ" in ends else "equal"
        bounds = {"gap": (gap_s, gap_bound(steady_s)), "lost": (lost, 0), "failed": (failed, 0), **same(end)}
        if back:
            bounds |= {"back": (back_s, 1.5 + 2 * steady_s), "longest": (longest, 1.3)}
        figures = [f"{1e3 * steady_s:.0f}", f"{gap_s:.2f}", f"{median_s:.2f}", str(lost), f"{back_s:.2f}"]
        figures += [f"{longest:.2f}x", f"{noise:.2f}x", f"{failed} failed" if failed else end, verdict(side, bounds)]
        rows.append([f"{side.name}, {what}", str(len(seen)), *figures])
    print(table(HEADER, rows), file=sys.stderr)
    return rows


def verdict(side: JobSide, bounds: dict[str, tuple[float, float]]) -> str:
    """Returns the verdict on values and their bounds; "" for torchft, which has no bounds."""
    if side.name != "ours":
        return ""
    missed = [f"{name} {bound:.3g}" for name, (figure, bound) in bounds.items() if not figure <= bound]
    return f"missed: {', '.join(missed)}" if missed else "reached"


def same(weights: str) -> dict[str, tuple[float, float]]:
    return {"weights differ": (weights == "differ", 0)}


def kills(sides: Sequence[JobSide], options: argparse.Namespace) -> None:
    """Bounds of the gap: a second up to 100 MB; beyond, two steps and half a second."""
    rows = []
    for megabytes in map(float, options.mb.split(",")):
        bound = (lambda _: 1.0) if megabytes <= 100 else (lambda steady_s: 2 * steady_s + 0.5)
        for kind in options.kinds.split(","):
            rows += faults(sides, options, f"{kind}, {megabytes:g} MB", kind, megabytes, kill, bound, back=True)
    print(table(HEADER, rows))


def stops(sides: Sequence[JobSide], options: argparse.Namespace) -> None:
    rows, bound = [], lambda _: HEARTBEAT_TIMEOUT_S + 1.0
    for who in ("group", "trainer"):
        for kind in options.kinds.split(","):
            what, fault = f"{kind}, {who} stopped", partial(stop, whole=who == "group")
            rows += faults(sides, options, what, kind, 4.0, fault, bound, back=False)
    print(table(HEADER, rows))


def storm(sides: Sequence[JobSide], options: argparse.Namespace) -> None:
    """Measures goodput: steps with kills divided by steps without, in equal times after the first common steps."""

    def row(side: JobSide) -> list[str]:
        calm, *_ = stormy(side, options, 3, 120, 20, lambda groups: [])
        seen, ends, _ = stormy(side, options, 3, 120, 20, list)
        good, end = seen.steps / calm.steps, weights(ends)
        bounds = {"1 - goodput": (1 - good, 0.07), "lost": (seen.redone, 0), **same(end)}
        figures = [str(calm.steps), str(seen.steps), str(seen.kills), f"{good:.2f}", str(seen.redone), end]
        return [*figures, verdict(side, bounds)]

    header = ["", "steps, calm", "with kills", "kills", "goodput", "lost", "weights", "bounds"]
    print_rows(header, row, sides * options.rounds)


def print_rows(header: Sequence[str], row: Callable[[JobSide], list[str]], sides: Sequence[JobSide]) -> None:
    """Prints a table with a row per side; a failed side has the row "failed"."""
    rows = []
    for side in sides:
        try:
            rows.append([side.name, *row(side)])
        except Failed as error:  # noqa: PERF203
            print(f"{side.name}: {error}", file=sys.stderr)
            rows.append([side.name, *[""] * (len(header) - 3), "failed", ""])
    print(table(header, rows))


def stormy(
    side: JobSide, options: argparse.Namespace, groups: int, seconds: float, every_s: float, victims: Victims
) -> tuple[GoodputRun, list[EventLine], list[ReplicaGroup]]:
    """Runs a job with kills. Returns the result, the last line of each group, and the groups, which have all ended at one step."""
    with RecoveryJob(side, groups, step_ms=options.step_ms) as job:
        seen = KilledJob(job).run(seconds, every_s, every_s, victims)
        if seen.ended:
            raise job.failure("a group ended by itself")
        job.steps(STEADY, groups)
        return seen, job.finish(), job.groups


def killstorm(sides: Sequence[JobSide], options: argparse.Namespace) -> None:
    """Kills one of four groups every six seconds. Afterwards each step must be committed once, and all weights be equal and correct."""

    def row(side: JobSide) -> list[str]:
        seen, ends, groups = stormy(side, options, 4, 180, 6, expendable)
        last, end, wrong = ends[0].step, weights(ends), unaccounted(groups, ends)
        for words in wrong[:20]:
            print(f"{side.name}: {words}", file=sys.stderr)
        commits = sorted(line.at_s for group in groups for line in group.since(seen.began_s, "commit"))
        longest_s, speed = max(b - a for a, b in pairwise(commits)), last / (ends[0].at_s - seen.began_s)
        figures = [str(seen.kills), str(last), f"{speed:.1f}", f"{longest_s:.2f}", str(seen.redone)]
        return [*figures, str(len(wrong)), end, verdict(side, {"unaccounted": (len(wrong), 0), **same(end)})]

    header = ["", "kills", "steps", "a second", "longest gap s", "lost", "unaccounted", "weights", "bounds"]
    print_rows(header, row, sides)


def expendable(groups: list[ReplicaGroup]) -> list[ReplicaGroup]:
    """Returns the groups that may be killed: never the only one with the newest step or the step before, which may still wait for sums."""
    newest = max(group.step for group in groups)
    have = [group for group in groups if group.step >= newest - 1]
    return [group for group in groups if len(have) > 1 or group not in have]


def unaccounted(groups: Sequence[EventLog], ends: Sequence[EventLine]) -> list[str]:
    """Returns descriptions of contradictions: each step must be committed, once per incarnation, with the same contributors in all groups.

    An incarnation that skips a step has healed to a later one: after a kill some survivors may have all sums and commit, others not. The
    last step of a killed incarnation is not counted: it may be lost with it, and repeated by the other groups.
    """
    seen: dict[int, set[int]] = {}
    wrong = []
    for group in groups:
        lines = group.since(0.0, "start", "commit")
        for a, b in pairwise(lines):
            if a.event == b.event == "commit":  # of one life
                wrong += [f"group {group.name}: {a.step}, then {b.step}"] if b.step <= a.step else []
                seen.setdefault(a.step, set()).add(a.contributors)
    last = ends[0].step
    wrong += [f"step {step}: committed by no group" for step in range(1, last) if step not in seen]
    wrong += [f"step {step}: of {sorted(counts)} groups" for step, counts in seen.items() if len(counts) > 1]
    legal = {int(group.name) - last / 1024 for group in groups}
    return wrong + [f"weight {end.weight} after {last} steps" for end in ends if end.weight not in legal]


def lighthouse(sides: Sequence[JobSide], options: argparse.Namespace) -> None:
    """Kills and restarts the lighthouse. A group has stopped if it has no commit in the last ten of the twenty seconds after it."""

    def row(side: JobSide) -> list[str]:
        with RecoveryJob(side, 3, step_ms=options.step_ms) as job:
            job.start()
            job.steps(STEADY, 3)
            at_s = time.monotonic()
            job.kill_lighthouse()
            time.sleep(2)
            job.start_lighthouse()
            job.wait(20)
            stopped = sum(not group.since(time.monotonic() - 10, "commit") for group in job.groups)
            gap_s = inf if stopped else longest_gap(job.groups, at_s)
            lost = refused(job.groups, at_s)
            ends = "" if stopped else weights(job.finish())
        bounds = {"gap": (gap_s, 1.0), "lost": (lost, 0), "stopped": (stopped, 0), **same(ends)}
        return [f"{gap_s:.2f}", str(lost), str(stopped), ends, verdict(side, bounds)]

    print_rows(["", "longest gap s", "lost", "groups that stopped", "weights", "bounds"], row, sides * options.rounds)


def staggered(sides: Sequence[JobSide], options: argparse.Namespace) -> None:
    """Starts groups at random times within four seconds, in random order; all sides get the same times."""
    draw, formed = random.Random(SEED), {side.name: list[float]() for side in sides}
    kinds = options.kinds.split(",")
    for index in range(STARTS):
        kind, delays = kinds[index % len(kinds)], [draw.uniform(0, 4) for _ in range(draw.randint(3, 5))]
        for side in sides:
            formed[side.name].append(staggered_start(side, options, kind, delays))
            print(f"{index}: {side.name}, {kind}, {len(delays)} groups: {formed[side.name][-1]:.2f} s", file=sys.stderr)
    rows = []
    for side in sides:
        came = [seconds for seconds in formed[side.name] if seconds < inf]
        worst_s, median_s, never = max(came, default=nan), statistics.median(came or [nan]), STARTS - len(came)
        bounds = verdict(side, {"worst": (worst_s, 2.0), "never": (never, 0)})
        rows.append([side.name, str(STARTS), str(never), f"{median_s:.2f}", f"{worst_s:.2f}", bounds])
    print(table(["", "starts", "not in 60 s", "median s", "worst s", "bounds"], rows))


def staggered_start(side: JobSide, options: argparse.Namespace, kind: str, delays: Sequence[float]) -> float:
    """Returns the seconds from the last `start` line until all groups have committed a common step; inf if they do not within 60 s."""
    count = len(delays)
    try:
        with RecoveryJob(side, count, step_ms=options.step_ms, kind=kind) as job:
            began_s = time.monotonic()
            for delay_s, group in sorted(zip(delays, job.groups, strict=True), key=lambda pair: pair[0]):
                job.wait(began_s + delay_s - time.monotonic())
                group.start()
            job.until("the start of all", lambda: all(group.since(0.0, "start") for group in job.groups))
            started_s = max(group.since(0.0, "start")[0].at_s for group in job.groups)
            job.steps(1, count, limit_s=60)
            commits = (group.since(started_s, "commit") for group in job.groups)
            return max(next(line.at_s for line in of if line.contributors == count) for of in commits) - started_s
    except Failed as error:
        print(f"{side.name}: {error}", file=sys.stderr)
        return inf


WHAT = {
    "kill": kills, "stop": stops, "storm": storm, "lighthouse": lighthouse, "staggered": staggered, "killstorm": killstorm,
}  # fmt: skip


def main() -> None:
    flags = parser(
        __doc__,
        peer=(str, "a Python that has torchft"),
        rounds=(2, "turns of each side"),
        faults=(5, "in each turn"),
        step_ms=50.0,
        mb=("4,100,400", "kill: sizes of the model"),
        kinds=("gloo,baby", "process groups, of kill, stop and staggered"),
    )
    flags.add_argument("what", choices=WHAT)
    options = flags.parse_args()
    sides = [JobSide("ours"), *([JobSide("torchft", options.peer)] if options.peer else [])]
    print(f"{options.what}: {machine()}", file=sys.stderr)
    WHAT[options.what](sides, options)


if __name__ == "__main__":
    main()
