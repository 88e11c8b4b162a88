"""The faults of the drill, and the checks of a job after faults: what must hold, and how long a fault may delay the other groups.

Flow: drill.py gets the order of faults from `plan`, and calls `inject` for each, which returns when all groups train together again, and
raises Failed for errors that show at once. When the job has ended, the event logs (`EventLog`) and the incidents are checked; these
functions are pure except for reading the run's files.
"""

from __future__ import annotations

import math
import random
import signal
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.drill_job import Disk, DrillJob, Network
from bench.job import EventLine, EventLog, gaps, longest_gap, rows, signal_all
from ft.config import FaultTolerance
from scripts import samples
from training.fault_injection import CORRUPT, HANG

STOP_S, SLOW_S, LIGHTHOUSE_AWAY_S, LIGHTHOUSE_STOPPED_S = 12.0, 6.0, 2.0, 8.0
PARTITION_S, LINK_S = 10.0, 6.0
BEAT_S = 1.0  # period of a slow group, which is stopped for three quarters of it
LINK_MEGABITS = 8.0
QUIET_S = 10.0  # a group without a commit for this long does not take part
SAVE_S = 60.0  # for the checkpoint that a dead writer was to save
BEGINS_S = 600.0  # until a save begins
JOINERS = 3  # deaths of one joiner while it heals
WRONG_S, BAD_INPUT = 60.0, 2  # for a launch with a bad model to fail; its exit code


@dataclass
class Incident:
    """One injected fault. `hit`: the groups that may drop out of the quorum; all others must lose no step. Times are seconds of
    time.monotonic(). A fault function sets the first four fields; `at_s` nan: the time at which it was called."""

    target: str  # description
    hit: Collection[str] = frozenset()
    at_s: float = math.nan
    repaired_s: float = math.nan  # when the fault was removed, if the drill removes it
    kind: str = ""
    survivors: frozenset[str] = frozenset()
    step: int = 0  # highest committed step at that time
    back_s: float = math.nan  # when all groups had committed together again
    live: frozenset[str] = frozenset()  # the groups at that time


Harm = Callable[[DrillJob, random.Random], Incident]  # injects the fault and removes it


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `variants`: by name, the most important first. `least`: minimum number of groups. `network`, `disk`: requires
    network namespaces, or mounted disks. `once`: takes minutes, so only in the first round."""

    variants: dict[str, Harm]
    least: int = 2
    network: bool = False
    disk: bool = False
    once: bool = False


def on_group(harm: Callable[[DrillJob, str], object], words: str = "group {}", *, lost: bool = True) -> Harm:
    """Returns a fault function that harms one random group. `words`: describes the target; `lost`: the group may drop out of the quorum."""

    def on_one(job: DrillJob, dice: random.Random) -> Incident:
        name = job.pick(dice)
        harm(job, name)
        return Incident(words.format(name), {name} if lost else ())

    return on_one


# ------------------------------------------------------------------------------------------------ deaths


def kill_rank(job: DrillJob, dice: random.Random) -> Incident:
    """Kills one rank: the other ranks of its group have to notice."""
    name, rank = job.pick(dice), dice.randrange(job.ranks)
    signal_all([job.ranks_of(name)[rank]], signal.SIGKILL)
    return Incident(f"rank {rank} of group {name}", {name})


def kill_all(job: DrillJob, dice: random.Random) -> Incident:
    """Kills all groups: only the newest checkpoint survives."""
    job.until("a checkpoint", lambda: any(job.checkpoints.glob("step-*/manifest.json")))
    return Incident("all groups", set(job.live), job.kill(*job.live))


def half(job: DrillJob, dice: random.Random) -> Incident:
    """Kills half of the groups, as when a switch fails."""
    names = sorted(dice.sample(sorted(job.live, key=int), len(job.live) // 2), key=int)
    job.kill(*names)
    return Incident(f"groups {', '.join(names)}", set(names))


def hang(job: DrillJob, dice: random.Random) -> Incident:
    """Lets the main thread of one rank sleep forever; kills it when the other groups have continued without it."""
    name, rank, count = job.pick(dice), dice.randrange(job.ranks), len(job.live)
    _order(job, name, HANG, rank)
    at_s = time.monotonic()
    others = [job.event_logs[other] for other in job.live if other != name]

    def go_on() -> bool:
        return all(any(x.contributors < count for x in event_log.since(at_s, "commit")) for event_log in others)

    job.until(f"a step of the others while rank {rank} of group {name} hangs", go_on)
    return Incident(f"rank {rank} of group {name}", {name}, at_s, job.kill(name))


def _order(job: DrillJob, name: str, what: str, rank: int) -> None:
    """Makes a trainer inject a fault at the next step boundary (training/fault_injection.py)."""
    order = job.event_logs[name].folder / what
    order.with_suffix(".new").write_text(str(rank))
    order.with_suffix(".new").replace(order)
    job.until(f"a {what}", lambda: not order.exists())


def joiner(job: DrillJob, name: str) -> None:
    """Kills a group, and kills it again each time that it begins to heal."""
    since_s, own = job.kill(name), job.event_logs[name]
    for _ in range(JOINERS):
        job.until(f"a heal of group {name}", lambda: any(x.heals for x in own.since(since_s, "quorum")))  # noqa: B023
        since_s = job.kill(name)


def writer(job: DrillJob, dice: random.Random) -> Incident:
    """Kills the group that saves, during a save. The next writer has to save a checkpoint in its place."""
    name, at_s, step = killed_in_a_save(job)
    while job.has(step):  # too late: the checkpoint is complete
        job.together()
        name, at_s, step = killed_in_a_save(job)
    before_the_next = range(step, step + job.config.checkpoint.interval)
    words = f"a checkpoint in place of that of step {step}, which group {name} died in"
    job.until(words, lambda: any(map(job.has, before_the_next)), SAVE_S)
    return Incident(f"group {name}, step {step}", {name}, at_s)


def killed_in_a_save(job: DrillJob) -> tuple[str, float, int]:
    """Kills the group that saves, the first participant of the quorum, during a save. Returns its name, the time and the step."""
    name = job.quorum.participants[0]
    pids, existing = job.processes(name), {path.name for path in job.checkpoints.glob("step-*")}
    end_s = time.monotonic() + BEGINS_S
    while time.monotonic() < end_s:
        job.look()
        for _ in range(20):  # job.look() takes longer than writing a small checkpoint
            for path in job.checkpoints.glob("step-*.partial-*"):
                if path.name not in existing:
                    signal_all(pids, signal.SIGKILL)
                    return name, time.monotonic(), int(path.name.partition(".")[0].removeprefix("step-"))
            time.sleep(0.001)
    raise job.failure(f"not in {BEGINS_S:g} s: group {name} begins a save")


# ------------------------------------------------------------------------------------------------ pauses


def _stopped(job: DrillJob, pids: Collection[int], seconds: float = STOP_S) -> None:
    """Stops processes with SIGSTOP, by default for longer than the heartbeat timeout."""
    signal_all(pids, signal.SIGSTOP)
    job.hold(seconds)
    signal_all(pids, signal.SIGCONT)


def slow(job: DrillJob, name: str) -> None:
    """Slows a group down to a quarter of its speed: no group may drop out."""
    pids, end_s = job.processes(name), time.monotonic() + SLOW_S
    while time.monotonic() < end_s:
        _stopped(job, pids, 0.75 * BEAT_S)
        job.hold(0.25 * BEAT_S)


def lighthouse(job: DrillJob, dice: random.Random) -> Incident:
    job.kill_lighthouse(LIGHTHOUSE_AWAY_S)
    return Incident("the lighthouse")


def stop_lighthouse(job: DrillJob, dice: random.Random) -> Incident:
    _stopped(job, [job.lighthouse.pid], LIGHTHOUSE_STOPPED_S)
    return Incident("the lighthouse")


def lighthouse_away(job: DrillJob, dice: random.Random) -> Incident:
    at_s = time.monotonic()
    job.kill_lighthouse(job.away_s)
    return Incident(f"the lighthouse, {job.away_s:g} s", at_s=at_s, repaired_s=time.monotonic())


def capacity(job: DrillJob, dice: random.Random) -> Incident:
    """Kills all groups but one for job.away_s, so that fewer than min_replica_size are left."""
    stays = job.pick(dice)
    names = sorted(set(job.live) - {stays}, key=int)
    job.away |= set(names)
    at_s = job.kill(*names)
    job.hold(job.away_s)
    job.away.clear()
    return Incident(f"all but group {stays}, {job.away_s:g} s", names, at_s, time.monotonic())


def full(job: DrillJob, dice: random.Random, *, state: bool) -> Incident:
    """Fills the disk of metrics, samples and checkpoints, or that of the lighthouse's state, the groups' logs and TMPDIR."""
    assert job.disk
    place, what = (job.disk.groups, "state, logs, TMPDIR") if state else (job.disk.run, "the run's folder")
    at_s = time.monotonic()
    while time.monotonic() < at_s + job.full_s:
        Disk.fill(place)
        job.hold(0.2)
    Disk.free(place)
    return Incident(f"{what}, {job.full_s:g} s", at_s=at_s, repaired_s=time.monotonic())


# ------------------------------------------------------------------------------------------------ the network


def parted(job: DrillJob, name: str, *, part: Callable[[Network, str, bool], None]) -> None:
    """Drops all packets of a group, in both directions (Network.cut) or only those that it sends (Network.blind), without an error."""
    assert job.network
    part(job.network, name, True)
    job.hold(PARTITION_S)
    part(job.network, name, False)


def link(job: DrillJob, name: str) -> None:
    """Limits a group's link: all are slower, but no group may drop out."""
    assert job.network
    job.network.narrow(name, LINK_MEGABITS)
    job.hold(LINK_S)
    job.network.narrow(name, None)


def pair(job: DrillJob, dice: random.Random, *, forming: bool, at_store: bool) -> Incident:
    """Drops packets between two groups, without an error, for job.pair_s. `forming`: before a third group rejoins, so that connections are
    being made; else during steps. `at_store`: one of the two hosts the next rendezvous store; else a third group, which both reach."""
    assert job.network
    names, hit, quorum = sorted(job.live, key=int), set[str](), job.quorum
    holders, number = list(quorum.participants), quorum.quorum_id + 1
    if forming:
        comes = job.pick(dice)
        holders, number, hit = [name for name in holders if name != comes], number + 1, {comes}
        killed_s = job.kill(comes)
        job.until(f"a start of group {comes}", lambda: job.event_logs[comes].since(killed_s, "start"))
    store = holders[number % len(holders)]  # the rule of ft/protocol/group.py for rank 0
    others = [name for name in names if name != store]
    one, other = (store, job.pick(dice, others)) if at_store else sorted(dice.sample(others, 2), key=int)
    at_s = time.monotonic()
    job.network.part(one, other, True)
    job.hold(job.pair_s)
    job.network.part(one, other, False)
    repaired_s = time.monotonic()
    hit |= {name for name in (one, other) if not job.event_logs[name].since(repaired_s - QUIET_S, "commit")}
    return Incident(f"groups {one} and {other}, store at {store}", hit, at_s, repaired_s)


# ------------------------------------------------------------------------------------------------ members that come, go or are wrong


def corrupt(job: DrillJob, dice: random.Random) -> Incident:
    """Flips a bit of a weight, which only the comparison of digests detects. The group must heal, or end and rejoin."""
    name, rank = job.pick(dice), dice.randrange(job.ranks)
    _order(job, name, CORRUPT, rank)
    flipped_s = time.monotonic()
    job.until(
        "detection of the flipped bit", lambda: job.event_logs[name].since(flipped_s, "healed", "start", rank=rank)
    )
    return Incident(f"a bit of rank {rank} of group {name}", {name})


def drain(job: DrillJob, name: str) -> None:
    job.drain(name)
    job.until(f"the end of group {name}", lambda: job.groups[name].code == 0)


def add(job: DrillJob, dice: random.Random) -> Incident:
    name = job.add()
    return Incident(f"group {name}", {name})


def wrong(job: DrillJob, dice: random.Random) -> Incident:
    """Restarts the lighthouse, then starts a group with a different model, which must be refused without an effect on others."""
    job.kill_lighthouse()
    other = vars(job.config.model)["hidden_dim"] * 2 or 96
    stray = job.group("wrong", f"--model.hidden_dim={other}", f"--job.dump_folder={Path(job.folder, 'wrong')}")
    at_s = time.monotonic()
    stray.start()
    try:
        job.until("the end of a group with a different model", lambda: stray.ended() is not None, WRONG_S)
        if stray.ended() != BAD_INPUT:
            raise job.failure(f"a group with a different model ended with exit code {stray.ended()}, not {BAD_INPUT}")
    finally:
        stray.end()
    return Incident(f"hidden_dim {other}", at_s=at_s)


SERVER = "the server of group {}"
PAIRS: dict[str, Harm] = {
    "pair, in a sum": partial(pair, forming=False, at_store=False),
    "pair, store at one of them": partial(pair, forming=False, at_store=True),
    "pair, while forming": partial(pair, forming=True, at_store=False),
    "pair, forming, store at one of them": partial(pair, forming=True, at_store=True),
}
KINDS = {
    "kill": Kind({"kill": on_group(DrillJob.kill)}),  # loss of a machine: launcher, ranks and server at once
    "kill_rank": Kind({"kill_rank": kill_rank}),
    "all": Kind({"all": kill_all}, least=1),
    "stop": Kind({  # with "stop trainer" the group's server still sends heartbeats
        "stop": on_group(lambda job, name: _stopped(job, job.processes(name))),
        "stop trainer": on_group(lambda job, name: _stopped(job, job.ranks_of(name)), "the ranks of group {}"),
    }),
    "slow": Kind({"slow": on_group(slow, lost=False)}),
    "lighthouse": Kind({"lighthouse killed": lighthouse, "lighthouse stopped": stop_lighthouse}, least=1),
    "partition": Kind({
        "partition": on_group(partial(parted, part=Network.cut)),
        "partition, one way": on_group(partial(parted, part=Network.blind)),
    }, network=True),
    "link": Kind({"link": on_group(link, f"group {{}}, {LINK_MEGABITS:g} Mbit/s", lost=False)}, network=True),
    "corrupt": Kind({"corrupt": corrupt}, least=3),
    "drain": Kind({"drain": on_group(drain)}),
    "add": Kind({"add": add}, least=1),
    "hang": Kind({"hang": hang}),
    "half": Kind({"half": half}, least=3),
    "server": Kind({
        "server killed": on_group(lambda job, name: signal_all(job.server(name), signal.SIGKILL), SERVER),
        "server stopped": on_group(lambda job, name: _stopped(job, job.server(name)), SERVER),
    }),
    "joiner": Kind({"joiner": on_group(joiner, f"group {{}}, {JOINERS} times")}),
    "writer": Kind({"writer": writer}),
    "wrong": Kind({"wrong": wrong}, least=1),
    "pair": Kind(PAIRS, least=3, network=True, once=True),
    "away": Kind({"lighthouse away": lighthouse_away}, least=1, once=True),
    "capacity": Kind({"capacity": capacity}, once=True),
    "full": Kind({"full disk": partial(full, state=False), "full state": partial(full, state=True)}, 1, disk=True, once=True),
}  # fmt: skip
HARMS = {name: harm for kind in KINDS.values() for name, harm in kind.variants.items()}


def plan(kinds: Sequence[str], dice: random.Random, *, first: bool = True, brief: bool = False) -> list[str]:
    """Returns every variant of these kinds once, shuffled, with `add` before `drain`. If only one of `add` and `drain` is given, it is in
    the first round only, as the number of groups would grow or fall without end. `brief`: only the first variant of each kind."""
    if not first:
        kinds = [kind for kind in kinds if not KINDS[kind].once]
    if not first and ("add" in kinds) != ("drain" in kinds):
        kinds = [kind for kind in kinds if kind not in ("add", "drain")]
    variants = sorted(variant for kind in kinds for variant in list(KINDS[kind].variants)[: 1 if brief else None])
    dice.shuffle(variants)
    if "drain" in variants:
        add, drain = variants.index("add") if "add" in variants else len(variants) - 1, variants.index("drain")
        if drain < add:
            variants[add], variants[drain] = variants[drain], variants[add]
    return variants


def inject(job: DrillJob, variant: str, dice: random.Random) -> Incident:
    """Injects one fault, and returns when all groups train together again. Raises Failed."""
    if variant == "corrupt":
        job.compared()
    before, at_s = frozenset(job.live), time.monotonic()
    step = max(job.event_logs[name].step for name in before)
    found = HARMS[variant](job, dice)
    job.together()
    return replace(
        found, kind=variant, survivors=before - set(found.hit), at_s=at_s if math.isnan(found.at_s) else found.at_s,
        step=step, back_s=time.monotonic(), live=frozenset(job.live),
    )  # fmt: skip


LOSS_NATS = 0.02  # maximum difference from the twin
EVENTS = ("start", "commit", "refused", "healed", "restored")


@dataclass(frozen=True)
class Verdict:
    name: str
    holds: bool
    words: str

    def __str__(self) -> str:
        return f"{'yes' if self.holds else 'NO '}  {self.name}: {self.words}"


EventLogs = Mapping[str, EventLog]
Trained = Mapping[int, set[str]]  # step -> the groups that contributed


def judge(run: Path, event_logs: EventLogs, incidents: Sequence[Incident], settings: FaultTolerance) -> list[Verdict]:
    """Returns the verdicts that must hold for any job with faults."""
    rows = samples.read(run / samples.SAMPLES_FILE)
    trained = {row.step: {owner.partition(":")[0] for owner in row.slots.values()} for row in rows}
    history = [survivors_went_on(event_logs, incidents, trained), bitwise_equal(event_logs, incidents)]
    return [*history, ledger_exact(run), in_time(event_logs, incidents, settings)]


def survivors_went_on(event_logs: EventLogs, incidents: Sequence[Incident], trained: Trained) -> Verdict:
    """Checks that no survivor of a fault died, discarded or skipped a step, or stopped. An all-reduce may complete in one survivor and fail
    in a second one, which then gets the committed step from the first, with its own gradients in it: that is not a loss."""
    problems, steps, taken = list[str](), list[int](), 0
    for incident in incidents:
        for name in sorted(incident.survivors):
            found = list(_lost(event_logs[name], incident, trained))
            taken += found.count("")
            problems += [f"{incident.kind}: group {name} {what}" for what in found if what]
            steps.append(len(event_logs[name].since(incident.at_s, "commit", to_s=incident.back_s)))
    words = f"{len(problems)} problems in {len(steps)} cases; {taken} steps received from a survivor whose all-reduces were complete; "
    words += f"at least {min(steps, default=0)} steps from a fault until all groups are back"
    return Verdict("survivors continued, 0 steps lost", not problems, "; ".join([words, *problems[:10]]))


def _lost(event_log: EventLog, incident: Incident, trained: Trained) -> Iterator[str]:
    """Yields descriptions of lost steps; "" for a step that a survivor healed from a different group, with its own gradients in it."""
    lines = event_log.since(incident.at_s, *EVENTS, to_s=incident.back_s)
    before = [line.step for line in event_log.since(0.0, "commit") if line.at_s < incident.at_s]
    step = before[-1] if before else 0  # not the highest: after the death of all groups they resume from a checkpoint
    for line in lines:
        if line.event == "healed" and line.step == step + 1 and event_log.name in trained.get(line.step, ()):
            yield ""
        elif line.event != "commit":
            yield f"{line.event} at step {line.step}, after {step}"
        elif line.step != step + 1:
            yield f"has no step between {step} and {line.step}"
        step = line.step
    if not any(line.event == "commit" for line in lines):
        yield "has committed nothing since"


def next_commit_s(event_logs: EventLogs, incident: Incident, from_s: float | None = None) -> float:
    """Returns the seconds from the fault, or from `from_s`, to the next commit of a survivor, or of a restarted group if none survives."""
    from_s = since_s = incident.at_s if from_s is None else from_s
    if not incident.survivors:
        since_s = min(event_logs[name].since(from_s, "start")[0].at_s for name in incident.hit)
    commits = [event_logs[name].since(since_s, "commit")[:1] for name in incident.survivors or incident.hit]
    return min((line.at_s for lines in commits for line in lines), default=math.inf) - from_s


def longest_gap_s(event_logs: EventLogs, incident: Incident) -> float:
    """Returns the longest time between two commits of a survivor, from the fault until all were back."""
    return longest_gap([event_logs[n] for n in incident.survivors or incident.hit], incident.at_s, incident.back_s)


def bitwise_equal(event_logs: EventLogs, incidents: Sequence[Incident]) -> Verdict:
    """Checks that equal commits of a rank have equal weights, and that all groups continue each step from one commit."""
    problems, weights, compared = list[str](), dict[tuple[int, int, str], str](), 0
    continued: dict[tuple[int, int, int], str] = {}  # (era, rank, step) -> commit
    for name, event_log in event_logs.items():
        for rank in range(len(event_log.ranks)):
            lines, all_died = _trusted(event_log, rank, incidents), [x.at_s for x in incidents if x.kind == "all"]
            # An era begins with a group's first start after all were killed; until it dies, the group is in the old one.
            eras = [starts[0].at_s for at_s in all_died if (starts := event_log.since(at_s, "start", rank=rank))]
            for line in lines:
                compared += (state := (rank, line.step, line.commit_id)) in weights
                if weights.setdefault(state, line.digest) != line.digest:
                    problems.append(f"group {name}, rank {rank}, step {line.step}: different weights")
            for line, after in pairwise(lines):
                era = bisect(eras, line.at_s)
                went_on = after.step == line.step + 1 and after.pid == line.pid
                if went_on and continued.setdefault((era, rank, line.step), line.commit_id) != line.commit_id:
                    problems.append(f"group {name}, rank {rank} continued from a different commit of step {line.step}")
    least = min((_steps_of_all(event_logs, incident) for incident in incidents), default=0)
    if incidents and least == 0:
        problems.append("after a fault no step was committed by all groups")
    words = f"{compared} digests compared, {len(problems)} problems; {least} or more steps of all groups after a fault"
    return Verdict("replicas bitwise equal", compared > 0 and not problems, "; ".join([words, *problems[:10]]))


def _trusted(event_log: EventLog, rank: int, incidents: Sequence[Incident]) -> list[EventLine]:
    """Returns the commits of a group, except those between an injected bit flip and the heal or restart that repairs it."""
    commits = event_log.since(0.0, "commit", rank=rank)
    for incident in incidents:
        if incident.kind == "corrupt" and event_log.name in incident.hit:
            flipped_s = max((line.at_s for line in commits if line.at_s < incident.at_s), default=0.0)
            repaired_s = event_log.since(incident.at_s, "healed", "start", rank=rank)[0].at_s
            commits = [line for line in commits if not flipped_s <= line.at_s < repaired_s]
    return commits


def _steps_of_all(event_logs: EventLogs, incident: Incident) -> int:
    """Returns the number of steps that all groups committed with equal weights until `back_s`; of ranks, the minimum."""
    seen: dict[tuple[int, int, str, str], set[str]] = defaultdict(set)
    ranks = range(len(next(iter(event_logs.values())).ranks))
    for name in incident.live:
        for rank in ranks:
            for line in event_logs[name].since(incident.at_s, "commit", rank=rank, to_s=incident.back_s):
                seen[rank, line.step, line.commit_id, line.digest].add(name)
    whole = [rank for (rank, *_), names in seen.items() if names == incident.live]
    return min(whole.count(rank) for rank in ranks)


def ledger_exact(run: Path) -> Verdict:
    """Checks that every sample below the highest was trained on once, except the holes of the last step."""
    found = samples.prove(samples.read(run / samples.SAMPLES_FILE))
    words = f"{found.sequences:,} sequences in {found.steps} steps; missing {samples.listed(found.missing) or 'none'}, "
    words += f"doubled {samples.listed(found.doubled) or 'none'}, open {samples.listed(found.open) or 'none'}"
    return Verdict("ledger exact", found.exact, "; ".join([words, *found.wrong[:10]]))


def figures_complete(run: Path) -> Verdict:
    """Checks that metrics.jsonl has each step between its first and last exactly once."""
    steps = [int(row["step"]) for row in rows(run) if "loss" in row]
    problems = [f"{after} follows {before}" for before, after in pairwise(steps) if after - before != 1]
    words = f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "no steps"
    return Verdict("metrics complete", bool(steps) and not problems, "; ".join([words, *problems[:10]]))


def validations(run: Path) -> list[tuple[float, float]]:
    """Returns the validations of a run: (tokens trained on, loss in nats per token)."""
    tokens, found = 0.0, []
    for row in rows(run):
        tokens = row.get("tokens", tokens)
        if "validation_loss" in row:
            found.append((tokens, row["validation_loss"]))
    return found


def steps_for(run: Path, tokens: float, slots: int) -> int:
    """Returns the steps in which a run with `slots` slots per step trains on `tokens` tokens, by the mean sequence length of `run`."""
    trained = samples.read(run / samples.SAMPLES_FILE)
    seen = max(row.get("tokens", 0.0) for row in rows(run))
    a_sequence = seen / samples.prove(trained).sequences
    return math.ceil(tokens / (a_sequence * trained[-1].slot_size * slots))


AS_GOOD = f"validation loss within {LOSS_NATS} nats of the twin's"


def loss_of_twin(run: Path, twin: Path) -> Verdict:
    """Compares the last validation of the run with the twin's at the same tokens, by linear interpolation between two validations."""
    name, (tokens, loss) = AS_GOOD, validations(run)[-1]
    of_twin = validations(twin)
    for (few, before), (many, after) in pairwise(of_twin):
        if few <= tokens <= many:
            other = before + (after - before) * (tokens - few) / (many - few)
            words = f"{loss:.4f} after {tokens:,.0f} tokens, {other:.4f} without faults: {loss - other:+.4f}"
            return Verdict(name, abs(loss - other) <= LOSS_NATS, words)
    return Verdict(name, False, f"no validation of the twin near {tokens:,.0f} tokens: {of_twin[0]} to {of_twin[-1]}")


SLACK_S = 5.0  # to form a quorum and commit, once the fault is detected
BACK_S = 60.0  # after a link is repaired
STEADY_STEPS = 20
HUNG_LEAST_S, HUNG_ALONE_S = 10.0, 60.0  # minimum wait for a stalled group, by a majority and by fewer groups
HUNG_MEDIANS = 5
Figure = tuple[str, float, float]  # description, value, bound


def in_time(event_logs: EventLogs, incidents: Sequence[Incident], settings: FaultTolerance) -> Verdict:
    met, missed = list[str](), list[str]()
    for incident in incidents:
        bound = BOUNDS.get(incident.kind, lambda *_: ())
        for words, value, at_most in bound(event_logs, incident, settings):
            (met if value <= at_most else missed).append(f"{incident.kind}: {words} {value:.2f}, at most {at_most:.2f}")
    words = "; ".join([*(f"NOT {miss}" for miss in missed), *met]) or "no fault that has a bound"
    return Verdict("in time", not missed, words)


def steady_s(event_logs: EventLogs, incident: Incident) -> float:
    """Returns the median step time of the survivors before the fault, in seconds."""
    before = ([x for x in event_logs[n].since(0.0, "commit") if x.at_s < incident.at_s] for n in incident.survivors)
    found = [gap for commits in before for gap in gaps(commits[-STEADY_STEPS:])]
    return median(found) if found else math.nan


def _hang(event_logs: EventLogs, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    least_s = HUNG_LEAST_S if 2 * (len(incident.live) - 1) > len(incident.live) else HUNG_ALONE_S
    limit_s = max(least_s, HUNG_MEDIANS * steady_s(event_logs, incident))
    yield "seconds without a step", longest_gap_s(event_logs, incident), limit_s + SLACK_S


def _pair(event_logs: EventLogs, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    repaired_s, limit_s = incident.repaired_s, settings.heartbeat_timeout_s + settings.rendezvous_s + SLACK_S
    commits = sorted(line.at_s for event_log in event_logs.values() for line in event_log.since(0.0, "commit"))
    while_s = [at_s for at_s in commits if incident.at_s <= at_s <= repaired_s]
    before_s = [at_s for at_s in commits if at_s < incident.at_s][-1:]
    waits = [after - before for before, after in pairwise([*before_s, *while_s, repaired_s])]
    yield "seconds without a step of any group", max(waits), limit_s
    quiet = [
        name for name in incident.live if not event_logs[name].since(repaired_s - QUIET_S, "commit", to_s=repaired_s)
    ]
    yield "excluded groups", len(quiet), 1
    yield "seconds from the repair until all are together", incident.back_s - repaired_s, BACK_S


def _away(event_logs: EventLogs, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    """Without a takeover limit no commit needs the lighthouse, so no step waits for it. Validations and saves count as part of a step."""
    if settings.takeover_s == 0:
        yield (
            "seconds without a step",
            longest_gap_s(event_logs, incident),
            2 * steady_s(event_logs, incident) + SLACK_S,
        )
    else:
        next_s = next_commit_s(event_logs, incident, incident.repaired_s)
        yield "seconds from its return to the next step", next_s, 2 * SLACK_S


def _capacity(event_logs: EventLogs, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    starts = sorted(x.at_s for name in incident.hit for x in event_logs[name].since(incident.repaired_s, "start")[:1])
    enough = starts[settings.min_replica_size - 2]  # with the survivor, min_replica_size groups
    yield "seconds from the start of the missing groups", next_commit_s(event_logs, incident, enough), SLACK_S


def _joiner(event_logs: EventLogs, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    """Bounds the deaths after the first one, which is that of a member, not of a joiner."""
    [name] = incident.hit
    first_s = event_logs[name].since(incident.at_s, "start")[0].at_s
    longest_s = longest_gap([event_logs[other] for other in incident.survivors], first_s, incident.back_s)
    yield "seconds of the longest step", longest_s, 2 * steady_s(event_logs, incident) + 1


BOUNDS: dict[str, Callable[[EventLogs, Incident, FaultTolerance], Iterator[Figure]]] = {
    "hang": _hang,
    **dict.fromkeys(PAIRS, _pair),
    "lighthouse away": _away,
    "capacity": _capacity,
    "joiner": _joiner,
}
