"""The cost of a fault to a job of replica groups, beside torchft where there is one to compare with.

    make recovery PEER=PYTHON                   all of it, two hours; or one by one, with other figures:
    python bench/recovery.py kill          three groups, one is killed and started again: --mb 4,100,400 --kinds gloo,baby --faults 5
    python bench/recovery.py stop          one is stopped and goes on later: --who group,trainer
    python bench/recovery.py storm         steps in two minutes of kills, beside two minutes without: --every 20 --minutes 2
    python bench/recovery.py lighthouse    the lighthouse is killed and started again two seconds later
    python bench/recovery.py staggered     20 starts of three to five groups, in any order and at any time
    python bench/recovery.py killstorm     four groups, a random one killed every six seconds for three minutes

PEER is a Python that has torchft-nightly; both sides take turns (--rounds), torchft with the same job, its own lighthouse, and a timeout
of 30 s for its collectives; all else is at its defaults on both sides. A step "computes" for --step-ms. Figures are the worst of all faults
and rounds unless they say otherwise, and a bound that is printed holds for the worst. A group's `start` line stands where all is loaded and
made and the first quorum has not been asked for. "longest" is the others' longest step from then on, in median steps, and "before" the
same of as many steps before the fault: what the machine does by itself. Everything runs on this machine, to be idle otherwise (Linux).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.job import JobSide, LogLine, RecoveryJob, ReplicaGroup
from bench.pairs import Failed, table

STEADY = 20  # steps before a fault, and after it has healed
HEARTBEAT_TIMEOUT_S = 5.0  # the default of both sides
Row = list[str]


@dataclass
class RecoveryFault:
    """One fault and what followed. Seconds."""

    steady_s: float  # median step before it
    noise_s: float  # longest step before it, of as many as are looked at afterwards
    gap_s: float  # the survivors' longest, between two commits
    refused: int  # their attempts that came to nothing
    rejoined_s: float = 0.0  # from the restarted group's `start` line, or from SIGCONT, to the first commit with all
    longest_s: float = 0.0  # the others' longest step in that time and after it


@dataclass
class RecoveryCase:
    """Everything seen of one side in one setting."""

    incidents: list[RecoveryFault] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    equal: bool = True

    def worst(self, figure: str) -> float:
        return max((getattr(incident, figure) for incident in self.incidents), default=float("nan"))


# ------------------------------------------------------------------------------------------------ figures from logs


def gaps(commits: Sequence[LogLine], from_s: float, to_s: float = float("inf")) -> list[float]:
    """Seconds between two commits that follow each other, of those that end or begin in between."""
    return [b.at_s - a.at_s for a, b in pairwise(commits) if b.at_s >= from_s and a.at_s <= to_s]


def longest_gap(groups: Sequence[ReplicaGroup], from_s: float, to_s: float = float("inf")) -> float:
    """Not a number where nobody commits any more."""
    found = [gap for group in groups for gap in gaps(group.since(0.0, "commit"), from_s, to_s)]
    return max(found, default=float("nan"))


def steady_steps(group: ReplicaGroup, participants: int, before_s: float) -> list[float]:
    """The last before that."""
    commits = [line for line in group.since(0.0, "commit") if line.at_s < before_s][-STEADY:]
    return gaps([line for line in commits if line.participants == participants], 0.0)


def refused(groups: Sequence[ReplicaGroup], from_s: float) -> int:
    """Steps that came to nothing, for whom it was most."""
    return max(len(group.since(from_s, "abort")) for group in groups)


def first_of_all(group: ReplicaGroup, participants: int, from_s: float) -> float:
    """When it first committed with all, of those after that."""
    return next(line.at_s for line in group.since(from_s, "commit") if line.participants == participants)


def equal(ends: Sequence[LogLine]) -> bool:
    """All groups' weights, bit for bit, after the same step."""
    return len({line.words for line in ends}) == 1


# ------------------------------------------------------------------------------------------------ faults

Fault = Callable[[RecoveryJob, ReplicaGroup], RecoveryFault]


def kill(job: RecoveryJob, victim: ReplicaGroup) -> RecoveryFault:
    """SIGKILL; the others go on; it starts again and they are all together."""
    count, others = len(job.groups), [group for group in job.groups if group is not victim]
    at_s = victim.kill()
    steady_s = steady_steps(others[0], count, at_s)
    job.steps(STEADY, count - 1, others)
    gap_s, lost = longest_gap(others, at_s), refused(others, at_s)
    victim.start()
    again_s = time.monotonic()
    job.steps(STEADY, count)
    [start] = victim.since(again_s, "start")
    rejoined_s = first_of_all(victim, count, start.at_s) - start.at_s
    return RecoveryFault(
        statistics.median(steady_s), max(steady_s), gap_s, lost, rejoined_s, longest_gap(others, start.at_s)
    )


def stop(job: RecoveryJob, victim: ReplicaGroup, whole: bool) -> RecoveryFault:
    """SIGSTOP of the trainer, or of all that it has started, too; the others go on; SIGCONT and all together."""
    count, others = len(job.groups), [group for group in job.groups if group is not victim]
    at_s = victim.signal(signal.SIGSTOP, whole)
    steady_s = steady_steps(others[0], count, at_s)
    job.steps(STEADY, count - 1, others)
    gap_s, lost = longest_gap(others, at_s), refused(others, at_s)
    again_s = victim.signal(signal.SIGCONT, whole)
    rejoin(job, victim)
    back_s, longest_s = first_of_all(victim, count, again_s) - again_s, longest_gap(others, again_s)
    return RecoveryFault(statistics.median(steady_s), max(steady_s), gap_s, lost, back_s, longest_s)


def rejoin(job: RecoveryJob, victim: ReplicaGroup) -> None:
    """Until the last steps are everybody's; what a launcher would start again is started again."""
    since_s, count = time.monotonic(), len(job.groups)

    def done() -> bool:
        assert victim.process
        if victim.process.poll() is not None:
            victim.start()
        commits = [[line.participants for line in group.since(since_s, "commit")] for group in job.groups]
        return all(seen[-STEADY:] == [count] * STEADY for seen in commits)

    others = [group for group in job.groups if group is not victim]
    job.until(done, "the return of the group that was stopped", lives=others)


def faults(
    options: argparse.Namespace, kind: str, megabytes: float, fault: Fault, side: JobSide, index: int = 0
) -> RecoveryCase:
    """One job of three groups and some faults in it, one after the other; of `index`, other victims."""
    case, draw = RecoveryCase(), random.Random(options.seed + index)
    try:
        with RecoveryJob(side, 3, megabytes=megabytes, step_ms=options.step_ms, kind=kind) as job:
            job.start()
            job.steps(STEADY, 3)
            for _ in range(options.faults):
                case.incidents.append(fault(job, draw.choice(job.groups)))
            case.equal = equal(job.finish())
    except Failed as error:
        case.failed.append(str(error))
    return case


HEADER = ["", "faults", "step ms", "gap s", "median", "lost", "back s", "longest", "before", "weights", "bounds"]


def told(
    side: JobSide, what: str, cases: Sequence[RecoveryCase], gap_bound: Callable[[float], float], back: bool
) -> Row:
    """The worst of all. gap_bound: from seconds of a steady step; back: whether a restart is bounded, too. Bounds are for ours."""
    case = RecoveryCase(
        [i for c in cases for i in c.incidents], [f for c in cases for f in c.failed], all(c.equal for c in cases)
    )
    for words in case.failed:
        print(f"{side.name}, {what}: {words}", file=sys.stderr)
    steady_s = statistics.median([incident.steady_s for incident in case.incidents] or [float("nan")])
    median_s = statistics.median([incident.gap_s for incident in case.incidents] or [float("nan")])
    slower = max([incident.longest_s / incident.steady_s for incident in case.incidents], default=float("nan"))
    noise = max([incident.noise_s / incident.steady_s for incident in case.incidents], default=float("nan"))
    lost = sum(incident.refused for incident in case.incidents)
    gap_s, back_s = case.worst("gap_s"), case.worst("rejoined_s")
    figures = [f"{1e3 * steady_s:.0f}", f"{gap_s:.2f}", f"{median_s:.2f}", str(lost), f"{back_s:.2f}"]
    figures += [f"{slower:.2f}x", f"{noise:.2f}x"]
    ends = f"{len(case.failed)} failed" if case.failed else "equal" if case.equal else "differ"
    bounds = {"gap": (gap_s, gap_bound(steady_s)), "lost": (lost, 0), "failed": (len(case.failed), 0)}
    bounds["weights differ"] = (not case.equal, 0)
    if back:
        bounds |= {"back": (back_s, 1.5 + 2 * steady_s), "longest": (slower, 1.3)}
    return [f"{side.name}, {what}", str(len(case.incidents)), *figures, ends, verdict(side, bounds)]


def verdict(side: JobSide, bounds: dict[str, tuple[float, float]]) -> str:
    """The verdict on figures and their bounds. torchft's have none."""
    if side.name != "ours":
        return ""
    missed = [f"{name} {bound:.3g}" for name, (figure, bound) in bounds.items() if not figure <= bound]
    return f"missed: {', '.join(missed)}" if missed else "reached"


def kills(sides: Sequence[JobSide], options: argparse.Namespace) -> None:
    """Up to 100 MB a second; beyond, two steps and half a second."""
    rows = []
    for megabytes in [float(size) for size in options.mb.split(",")]:
        for kind in options.kinds.split(","):
            cases = in_turns(sides, options.rounds, partial(faults, options, kind, megabytes, kill))
            for side in sides:
                bound = (lambda _: 1.0) if megabytes <= 100 else (lambda steady_s: 2 * steady_s + 0.5)
                rows.append(told(side, f"{kind}, {megabytes:g} MB", cases[side.name], bound, True))
                print(table(HEADER, rows), file=sys.stderr)
    print(table(HEADER, rows))


def stops(sides: Sequence[JobSide], options: argparse.Namespace) -> None:
    rows = []
    for who in options.who.split(","):
        for kind in options.kinds.split(","):
            fault = partial(stop, whole=who == "group")
            cases = in_turns(sides, options.rounds, partial(faults, options, kind, options.stop_mb, fault))
            what, bound_s = f"{kind}, {who} stopped", HEARTBEAT_TIMEOUT_S + 1.0
            rows += [told(side, what, cases[side.name], lambda _: bound_s, False) for side in sides]  # noqa: B023
    print(table(HEADER, rows))


def in_turns(
    sides: Sequence[JobSide], rounds: int, measure: Callable[[JobSide, int], RecoveryCase]
) -> dict[str, list[RecoveryCase]]:
    """`measure` gets the round's number. Every other round runs backwards: nobody is always first."""
    cases: dict[str, list[RecoveryCase]] = {side.name: [] for side in sides}
    for index in range(rounds):
        for side in sides if index % 2 == 0 else list(reversed(sides)):
            cases[side.name].append(measure(side, index))
    return cases


# ------------------------------------------------------------------------------------------------ storms


def storm(sides: Sequence[JobSide], options: argparse.Namespace) -> None:
    """Goodput: steps with kills beside steps without, in equal times after the job has formed."""
    rows = []
    for side in [side for _ in range(options.rounds) for side in sides]:
        try:
            calm, _, _, _ = stormy(side, options, kills=False)
            steps, count, lost, ends = stormy(side, options, kills=True)
        except Failed as error:
            print(f"{side.name}: {error}", file=sys.stderr)
            rows.append([side.name, *[""] * 5, "failed", ""])
            continue
        good, differ = steps / calm, not equal(ends)
        figures = [str(calm), str(steps), str(count), f"{good:.2f}", str(lost), "differ" if differ else "equal"]
        bounds = verdict(side, {"1 - goodput": (1 - good, 0.07), "lost": (lost, 0), "weights differ": (differ, 0)})
        rows.append([side.name, *figures, bounds])
    print(table(["", "steps, calm", "with kills", "kills", "goodput", "lost", "weights", "bounds"], rows))


def stormy(side: JobSide, options: argparse.Namespace, *, kills: bool) -> tuple[int, int, int, list[LogLine]]:
    """Steps in the time, kills, refused steps, and how the groups ended."""
    draw, count = random.Random(options.seed), 0
    with RecoveryJob(side, 3, step_ms=options.step_ms) as job:
        job.start()
        job.steps(STEADY, 3)
        began_s, first = time.monotonic(), max(group.step for group in job.groups)
        end_s = began_s + 60 * options.minutes
        while time.monotonic() < end_s:
            job.wait(min(options.every, end_s - time.monotonic()))
            if kills and end_s - time.monotonic() > options.every / 2:
                victim = draw.choice(job.groups)
                victim.kill()
                victim.start()
                count += 1
        steps, lost = max(group.step for group in job.groups) - first, refused(job.groups, began_s)
        job.steps(STEADY, 3)
        return steps, count, lost, job.finish()


def killstorm(sides: Sequence[JobSide], options: argparse.Namespace) -> None:
    """Four groups and no rest; then every step must be somebody's, once, and all weights equal and what they must be."""
    rows = []
    for side in sides:
        draw, count = random.Random(options.seed), 0
        try:
            with RecoveryJob(side, 4, step_ms=options.step_ms) as job:
                job.start()
                job.steps(STEADY, 4)
                began_s = time.monotonic()
                while time.monotonic() < began_s + 60 * options.minutes:
                    job.wait(options.every)
                    victim = draw.choice(expendable(job.groups))
                    victim.kill()
                    victim.start()
                    count += 1
                job.steps(STEADY, 4)
                ends, lost = job.finish(), refused(job.groups, began_s)
                wrong = unaccounted(job.groups, ends)
                rate = job.groups[0].step / (time.monotonic() - began_s)
                longest_s = longest_alive(job.groups, began_s)
        except Failed as error:
            print(f"{side.name}: {error}", file=sys.stderr)
            rows.append([side.name, str(count), *[""] * 5, "failed", ""])
            continue
        for words in wrong[:20]:
            print(f"{side.name}: {words}", file=sys.stderr)
        figures = [str(ends[0].step), f"{rate:.1f}", f"{longest_s:.2f}", str(lost)]
        differ = not equal(ends)
        bounds = verdict(side, {"unaccounted": (len(wrong), 0), "weights differ": (differ, 0)})
        figures += [str(len(wrong)), "differ" if differ else "equal", bounds]
        rows.append([side.name, str(count), *figures])
    print(table(["", "kills", "steps", "a second", "longest gap s", "lost", "unaccounted", "weights", "bounds"], rows))


def expendable(groups: Sequence[ReplicaGroup]) -> list[ReplicaGroup]:
    """Whom a kill may take: never the last that has the newest step, or the one before it, whose sums it may still wait for."""
    newest = max(group.step for group in groups)
    have = [group for group in groups if group.step >= newest - 1]
    return [group for group in groups if len(have) > 1 or group not in have]


def longest_alive(groups: Sequence[ReplicaGroup], from_s: float) -> float:
    """The longest time in which nobody committed."""
    commits = sorted(line for group in groups for line in group.since(from_s, "commit"))
    return max(gaps(commits, from_s))


def unaccounted(groups: Sequence[ReplicaGroup], ends: Sequence[LogLine]) -> list[str]:
    """Finds contradictions, in words: each step is committed, at most once in a life, by the same groups for all; so say the weights.

    A step that a life passes over is one that it healed to: after a kill some survivors may have all sums and commit, and others not. The
    last step of a life that ended in a kill does not count: it may have died with it, and been done again by those who are left.
    """
    seen: dict[int, set[int]] = {}
    wrong = []
    for group in groups:
        for life in lives(group):
            steps = [line.step for line in life]
            wrong += [f"group {group.number}: {a}, then {b}" for a, b in pairwise(steps) if b <= a]
            for line in life[:-1]:
                seen.setdefault(line.step, set()).add(line.participants)
    last = ends[0].step
    wrong += [f"step {step}: nobody's" for step in range(1, last) if step not in seen]
    wrong += [f"step {step}: of {sorted(counts)} groups" for step, counts in seen.items() if len(counts) > 1]
    legal = {group.number - last / 1024 for group in groups}
    wrong += [f"weight {end.words[1]} after {last} steps" for end in ends if float(end.words[1]) not in legal]
    return wrong


def lives(group: ReplicaGroup) -> Iterator[list[LogLine]]:
    """The commits of each life."""
    life: list[LogLine] = []
    for line in group.lines:
        if line.event == "start":
            yield life
            life = []
        elif line.event == "commit":
            life.append(line)
    yield life


# ------------------------------------------------------------------------------------------------ lighthouse, starts


def lighthouse(sides: Sequence[JobSide], options: argparse.Namespace) -> None:
    """Groups that have stopped: without a commit in the last ten seconds of twenty, whether they wait in vain or have ended."""
    rows = []
    for side in [side for _ in range(options.rounds) for side in sides]:
        try:
            with RecoveryJob(side, 3, step_ms=options.step_ms) as job:
                job.start()
                job.steps(STEADY, 3)
                at_s = job.kill_lighthouse()
                time.sleep(2)
                job.restart_lighthouse()
                job.wait(20)
                stopped = sum(not group.since(time.monotonic() - 10, "commit") for group in job.groups)
                gap_s = float("inf") if stopped else longest_gap(job.groups, at_s)
                lost = refused(job.groups, at_s)
                ends = "" if stopped else "equal" if equal(job.finish()) else "differ"
        except Failed as error:
            print(f"{side.name}: {error}", file=sys.stderr)
            rows.append([side.name, "", "", "", "failed", ""])
            continue
        bounds = verdict(
            side,
            {"gap": (gap_s, 1.0), "lost": (lost, 0), "stopped": (stopped, 0), "weights differ": (ends == "differ", 0)},
        )
        rows.append([side.name, f"{gap_s:.2f}", str(lost), str(stopped), ends, bounds])
    print(table(["", "longest gap s", "lost", "groups that stopped", "weights", "bounds"], rows))


def staggered(sides: Sequence[JobSide], options: argparse.Namespace) -> None:
    """Groups that start at random times within four seconds, in random order; each start is made by all sides."""
    draw, formed = random.Random(options.seed), {side.name: list[float]() for side in sides}
    for index in range(options.starts):
        kind = options.kinds.split(",")[index % len(options.kinds.split(","))]
        delays = [draw.uniform(0, 4) for _ in range(draw.randint(3, 5))]
        for side in sides:
            formed[side.name].append(staggered_start(side, options, kind, delays))
            print(f"{index}: {side.name}, {kind}, {len(delays)} groups: {formed[side.name][-1]:.2f} s", file=sys.stderr)
    rows = []
    for side in sides:
        came = [seconds for seconds in formed[side.name] if seconds < float("inf")]
        worst_s, median_s = max(came, default=float("nan")), statistics.median(came or [float("nan")])
        never = options.starts - len(came)
        figures = [str(options.starts), str(never), f"{median_s:.2f}", f"{worst_s:.2f}"]
        rows.append([side.name, *figures, verdict(side, {"worst": (worst_s, 2.0), "never": (never, 0)})])
    print(table(["", "starts", "not in 60 s", "median s", "worst s", "bounds"], rows))


def staggered_start(side: JobSide, options: argparse.Namespace, kind: str, delays: Sequence[float]) -> float:
    """Seconds from the last `start` line to the first step of all groups in the slowest of them; infinite if it does not come."""
    count = len(delays)
    try:
        with RecoveryJob(side, count, step_ms=options.step_ms, kind=kind) as job:
            began_s = time.monotonic()
            for delay_s, group in sorted(zip(delays, job.groups, strict=True), key=lambda pair: pair[0]):
                job.wait(began_s + delay_s - time.monotonic())
                group.start()
            job.until(lambda: all(group.since(0.0, "start") for group in job.groups), "the start of all", 120)
            started_s = max(line.at_s for group in job.groups for line in group.since(0.0, "start"))
            job.until(
                lambda: all(
                    any(x.participants == count for x in group.since(started_s, "commit")) for group in job.groups
                ),
                f"a step of {count} groups",
                60,
            )
            return max(first_of_all(group, count, started_s) for group in job.groups) - started_s
    except Failed as error:
        print(f"{side.name}: {error}", file=sys.stderr)
        return float("inf")


# ------------------------------------------------------------------------------------------------ the command line

WHAT = {f.__name__.removesuffix("s"): f for f in (kills, stops)} | {
    f.__name__: f for f in (storm, lighthouse, staggered, killstorm)
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--alone", action="store_true", help="the peer without us")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--faults", type=int, default=5, help="in each turn")
    parser.add_argument("--seed", type=int, default=1, help="of victims and delays")
    parser.add_argument("--step-ms", type=float, default=50)
    parser.add_argument("--mb", default="4,100,400", help="kill: sizes of the model")
    parser.add_argument("--stop-mb", type=float, default=4, help="stop: size of the model")
    parser.add_argument("--kinds", default="gloo,baby", help="process groups, of kill, stop and staggered")
    parser.add_argument("--who", default="group,trainer", help="stop: whom")
    parser.add_argument("--every", type=float, help="seconds between kills; storm: 20, killstorm: 6")
    parser.add_argument("--minutes", type=float, help="storm: 2, killstorm: 3")
    parser.add_argument("--starts", type=int, default=20, help="staggered: how many")
    options = parser.parse_args(argv)
    options.every = options.every or (20 if options.what == "storm" else 6)
    options.minutes = options.minutes or (2 if options.what == "storm" else 3)
    sides = [] if options.alone else [JobSide("ours", sys.executable)]
    if options.peer:
        sides.append(JobSide("torchft", options.peer))
    print(f"{options.what}: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    WHAT[options.what](sides, options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
