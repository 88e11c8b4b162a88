"""Runs one seed or many, and reports: tables of events, and a minimal reproduction of a failed run."""

from __future__ import annotations

import gc
import multiprocessing
import re
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import PurePath

from ft.protocol import messages as m
from tests.simulator import faults
from tests.simulator.cluster import Cluster, Machines, Setting, setting
from tests.simulator.harm import HANGS
from tests.simulator.outages import PHASES
from tests.simulator.world import World

ENOUGH = 1000  # in so many seeds everything that can happen has to happen
# Told by an operator, by torchft's clients, or base classes; BeatAnswered is the driver's affair; no bit flips here.
NOT_SIMULATED = ("TakeOver", "Evict", "Beat", "Notice", "ReportWeightsDiffer")
# Why a lighthouse or a group lets its callers wait, in their own words.
WAITS = (
    "would take part, min_replicas is",
    "more than half is needed",
    "for the others",
    "may come back",
    "was settled: load a checkpoint",
    "the job begins: load the newest checkpoint",
    "sitting out",
    "members of a running job are given time",
    "its answer got lost",
)
# Ways from one phase of a step to another.
STEPS = {
    # not AWAITING_STATE: a group that heals continues from its vote, and begins no step
    "BOUNDARY": ("ASKING", "COMPUTING"),
    "ASKING": ("CONFIGURING",),
    "CONFIGURING": ("CONFIRMING",),
    "CONFIRMING": ("COMPUTING", "ASKING", "CLOSING_HEAL"),
    "COMPUTING": ("VOTING",),
    "VOTING": ("BOUNDARY", "COMPUTING", "ASKING", "CLOSING_HEAL", "AWAITING_STATE"),
    "AWAITING_STATE": ("ASKING", "COMPUTING"),
    "CLOSING_HEAL": ("ASKING",),
}
LAST_LINES = 60  # of a failed run's trace
YOUNG = 50_000  # objects between two looks for garbage in cycles: a run makes many, and hardly any of them is


@dataclass(frozen=True)
class Run:
    """Result of a seed. `failure` is empty if every invariant held."""

    setting: Setting
    failure: str = ""
    events: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0  # without a commit
    detection_s: float = 0.0  # of the slowest of its faults


def groups_of(seed: int) -> int:
    """70 % of the seeds have 2 to 5 groups, 29 % 6 to 15, 1 % 50: each of those costs as much as ten others."""
    dice = World(seed).dice("groups")
    place = dice.random()
    return 2 + dice.index(4) if place < 0.7 else 6 + dice.index(10) if place < 0.99 else 50


def run(
    seed: int,
    groups: int | None = None,
    steps: int = 200,
    fault_class: str | None = None,
    *,
    machines: Machines | None = None,
    trace: Callable[[str], None] | None = None,
) -> Run:
    return play(setting(seed, groups or groups_of(seed), steps, fault_class), machines or Machines(), trace)


def play(drawn: Setting, machines: Machines, trace: Callable[[str], None] | None = None) -> Run:
    cluster = Cluster(drawn, machines, trace)
    failure = ""
    try:
        cluster.run()
    except Exception as error:  # noqa: BLE001 - a machine that raises has failed the run, as one that breaks an invariant
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "require"]
        where = f"{PurePath(frames[-1].filename).name}:{frames[-1].name}"
        failure = f"{cluster.world.now_s:.3f} s: {type(error).__name__} ({where}): {error}"
    live = cluster.liveness
    return Run(
        drawn, failure, cluster.world.events, _seen(cluster), longest_s=live.longest_s, detection_s=live.detection_s
    )


def _seen(cluster: Cluster) -> Counter[str]:
    seen = Counter(cluster.world.seen)
    for (event, effects), times in cluster.transitions.items():
        seen.update({f"event: {event.__name__}": times})
        for effect in effects:
            seen.update({f"effect: {effect.__name__}": times})
    for reason, times in cluster.reasons.items():
        seen[f"reason: {generally(reason)}"] += times
    return seen


@lru_cache(1 << 14)  # other runs say the same
def generally(reason: str) -> str:
    """Returns a reason without its names and figures."""
    return re.sub(r"\bg\d+:\d+\b", "G", re.sub(r"-?\d+(\.\d+)?", "N", re.sub(r"\bg\d+:\d+\S*", "G", reason)))


# ------------------------------------------------------------------------------------------------ many


def run_many(
    seeds: Iterable[int],
    groups: int | None,
    steps: int,
    fault_class: str | None = None,
    *,
    workers: int | None = None,
    bar: bool = False,
) -> list[Run]:
    """Returns the runs in the order of the seeds. The large runs are played first, so that no core is left alone with one at the end."""
    jobs = sorted(((seed, groups or groups_of(seed), steps, fault_class) for seed in seeds), key=lambda job: -job[1])
    found: list[Run] = []
    with multiprocessing.get_context("spawn").Pool(workers, gc.set_threshold, (YOUNG,)) as pool:
        for one in pool.imap_unordered(_job, jobs, chunksize=1):
            found.append(one)
            if bar:
                done = 40 * len(found) // len(jobs)
                failed = sum(bool(r.failure) for r in found)
                sys.stderr.write(f"\r[{'#' * done}{'.' * (40 - done)}] {len(found)}/{len(jobs)}, {failed} failed ")
                sys.stderr.flush()
    if bar:
        sys.stderr.write("\n")
    return sorted(found, key=lambda one: one.setting.seed)


def _job(job: tuple[int, int, int, str | None]) -> Run:
    return run(*job)


# ------------------------------------------------------------------------------------------------ telling


def table(found: list[Run]) -> str:
    total: Counter[str] = Counter()
    for one in found:
        total.update(one.seen)
    width = max((len(what) for what in total), default=0)
    return "\n".join(f"{what:<{width}}  {times:>12,}" for what, times in sorted(total.items()))


def classes(found: list[Run]) -> str:
    """Table by class of faults: runs, seconds until it may be known, and the longest time without a commit, seconds."""
    lines = [f"{'class of faults':<40}  {'runs':>6}  {'known within':>12}  {'longest wait':>12}"]
    for name in ("", *faults.CLASSES):
        of = [one for one in found if one.setting.fault_class == name]
        if of:
            known_s, longest_s = max(one.detection_s for one in of), max(one.longest_s for one in of)
            lines.append(f"{name or 'none of these':<40}  {len(of):>6,}  {known_s:>10.0f} s  {longest_s:>10.1f} s")
    return "\n".join(lines)


def never_seen(found: list[Run]) -> list[str]:
    total: Counter[str] = Counter()
    for one in found:
        total.update(one.seen)
    waits = [why for why in WAITS if not any(why in what for what in total if what.startswith("reason: "))]
    played = {one.setting.fault_class for one in found}
    absent = [f"class: {name}" for name, one in faults.CLASSES.items() if one.weight and name not in played]
    return [what for what in must_occur() if not total[what]] + [f"reason: ... {why}" for why in waits] + absent


def must_occur() -> list[str]:
    """Every fault, event and effect, the reasons to wait, and the ways in which a collective and a message end."""
    words = [f"fault: {kind}" for kind in faults.DETECTION_S]
    for what, base in (("event", m.Event), ("effect", m.Effect)):
        ours = [kind.__name__ for kind in base.__subclasses__() if kind.__module__.startswith("ft.protocol.")]
        words += [f"{what}: {name}" for name in ours if name not in NOT_SIMULATED]
    words += [f"step: {before} to {after}" for before, ways in STEPS.items() for after in ways]
    words += [f"slots per step: {what}" for what in ("a whole step", "some were added")]
    words += [f"inside: {what}" for what in ("forward", "update", "checkpoint", "agree", "tell")]
    words += ["votes: each rank asks after all had said yes"]
    words += [f"hang: {place}" for place in HANGS] + [f"joiner died: {phase}" for phase in PHASES]
    words += ["heal: what arrived was damaged", "lighthouse: a quorum waited for the disk"]
    words += ["pair parted: one way", "pair parted: both ways", "a link was found cut"]
    words += [
        f"wait: {what}" for what in ("for a core", "aside for the word on healed", "aside for the word on commit")
    ]
    words += [f"heal: {held} steps were held" for held in (0, 1, 2)]
    words += ["heal: its source says that all is sent"]
    words += ["heal: a commit waited for a slow reader", "heal: it did not come in time"]
    words += ["fault: group leaves while it heals", "leave: told at a step's boundary"]
    words += [f"collective {end}" for end in ("completed", "failed", "hung")]
    return words + [f"message {fate}" for fate in ("lost", "doubled", "late", "stream broken")]


def tell(one: Run) -> str:
    """Returns the seed, the fewest faults and steps with which it fails in the same way, and the end of that run's trace."""
    short = shorten(one)
    lines: deque[str] = deque(maxlen=LAST_LINES)
    again = play(short, Machines(), lines.append)
    listed = "\n".join(f"  {fault}" for fault in short.faults) or "  none"
    return (
        f"\nseed {one.setting.seed} failed: {one.failure}\n"
        f"python -m tests.simulator --seed {one.setting.seed} --groups {one.setting.groups} --steps {one.setting.steps} "
        f"--fault '{one.setting.fault_class}' --trace\n"
        f"with these faults alone it is {again.failure}\n{listed}\n" + "\n".join(lines)
    )


def shorten(one: Run, machines: Machines | None = None) -> Setting:
    """Leaves out the faults that are not needed for the same kind of failure, one after the other."""
    kind = _kind(one.failure)
    best = one.setting
    for fault in reversed(one.setting.faults):
        fewer = replace(best, faults=tuple(f for f in best.faults if f is not fault))
        if _kind(play(fewer, machines or Machines()).failure) == kind:
            best = fewer
    return best


def _kind(failure: str) -> str:
    """Returns the place that found the failure."""
    return failure.partition("(")[2].partition(")")[0]
