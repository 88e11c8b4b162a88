"""The faults of the drill: each is done to a running job, lasts, and is taken back. And the pass rule: what must hold of a job that was
harmed, each with its figure, and how long a fault may hold the others up.

Flow: drill.py asks `plan` what comes in which order, and `inject` one after the other, each until all groups are together again; what the
harm itself shows to be wrong is told at once (Failed). When the job has ended, the diaries and the incidents are judged: pure, but for the
run's files.
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
from bench.job import Diary, DiaryLine, gaps, longest_gap, rows, signal_all
from ft.config import FaultTolerance
from scripts import samples
from training.drill import CORRUPT, HANG

STOP_S, SLOW_S, LIGHTHOUSE_AWAY_S, LIGHTHOUSE_STOPPED_S = 12.0, 6.0, 2.0, 8.0
PARTITION_S, LINK_S = 10.0, 6.0
BEAT_S = 1.0  # of a slow group: three quarters of it stopped
LINK_MEGABITS = 8.0
QUIET_S = 10.0  # a group that has committed nothing for so long sits out
SAVE_S = 60.0  # for what a dead writer was about to save
JOINERS = 3  # deaths of one group, each while it heals
WRONG_S, BAD_INPUT = 60.0, 2  # for a start that is refused; its exit code


@dataclass
class Incident:
    """One fault. `hit`: the groups that may lose their place by it; all others must lose nothing. Seconds, of the machine's clock. A harm
    fills in the first four fields; `at_s` may be nan: it counts as soon as it was asked for."""

    target: str  # in words
    hit: Collection[str] = frozenset()
    at_s: float = math.nan
    repaired_s: float = math.nan  # when it was taken back, where that was on purpose
    kind: str = ""
    survivors: frozenset[str] = frozenset()
    step: int = 0  # the newest at that time
    back_s: float = math.nan  # when the last steps were of all groups
    live: frozenset[str] = frozenset()  # those groups


Harm = Callable[[DrillJob, random.Random], Incident]  # does it and takes it back


@dataclass(frozen=True)
class Kind:
    """`variants`: each is one fault; the first is the one that tells most. `least`: groups that there must be. `network`, `disk`: what the
    job must have of its own. `once`: it takes minutes, and is in the first round alone."""

    variants: dict[str, Harm]
    least: int = 2
    network: bool = False
    disk: bool = False
    once: bool = False


def on_group(harm: Callable[[DrillJob, str], object], words: str = "group {}", *, lost: bool = True) -> Harm:
    """Makes a fault of what is done to one group. `words`: the target; `lost`: the group may lose its place in the quorum."""

    def on_one(job: DrillJob, dice: random.Random) -> Incident:
        name = job.pick(dice)
        harm(job, name)
        return Incident(words.format(name), {name} if lost else ())

    return on_one


# ------------------------------------------------------------------------------------------------ deaths


def kill_rank(job: DrillJob, dice: random.Random) -> Incident:
    """SIGKILL of one rank: the others of its group have to notice."""
    name, rank = job.pick(dice), dice.randrange(job.ranks)
    signal_all([job.ranks_of(name)[rank]], signal.SIGKILL)
    return Incident(f"rank {rank} of group {name}", {name})


def kill_all(job: DrillJob, dice: random.Random) -> Incident:
    """All state is lost but the newest checkpoint."""
    job.until("a checkpoint", lambda: any(job.checkpoints.glob("step-*/manifest.json")))
    return Incident("all groups", set(job.live), job.kill(*job.live))


def half(job: DrillJob, dice: random.Random) -> Incident:
    """A switch fails, with all machines behind it."""
    names = sorted(dice.sample(sorted(job.live, key=int), len(job.live) // 2), key=int)
    job.kill(*names)
    return Incident(f"groups {', '.join(names)}", set(names))


def hang(job: DrillJob, dice: random.Random) -> Incident:
    """The main thread of one rank sleeps for ever; until the others go on without it, and it is killed."""
    name, rank, count = job.pick(dice), dice.randrange(job.ranks), len(job.live)
    _order(job, name, HANG, rank)
    at_s = time.monotonic()
    others = [job.diaries[other] for other in job.live if other != name]

    def go_on() -> bool:
        return all(any(x.contributors < count for x in diary.since(at_s, "commit")) for diary in others)

    job.until(f"a step of the others while rank {rank} of group {name} hangs", go_on)
    return Incident(f"rank {rank} of group {name}", {name}, at_s, job.kill(name))


def _order(job: DrillJob, name: str, what: str, rank: int) -> None:
    """Gives an order to a trainer, which obeys at the next step's boundary (training/drill.py)."""
    order = job.diaries[name].folder / what
    order.with_suffix(".new").write_text(str(rank))
    order.with_suffix(".new").replace(order)
    job.until(f"a {what}", lambda: not order.exists())


def joiner(job: DrillJob, name: str) -> None:
    """The group dies, and again each time that its state begins to arrive."""
    since_s = job.kill(name)
    for _ in range(JOINERS):
        job.until(f"a heal of group {name}", lambda: any(x.heals for x in job.diaries[name].since(since_s, "quorum")))  # noqa: B023
        since_s = job.kill(name)


def writer(job: DrillJob, dice: random.Random) -> Incident:
    """The group that saves dies while it does. The next writer has to save the checkpoint that was due."""
    name, at_s, step = killed_in_a_save(job)
    while job.has(step):  # it was too late: the checkpoint stood
        job.together()
        name, at_s, step = killed_in_a_save(job)
    before_the_next = range(step, step + job.config.checkpoint.interval)
    words = f"a checkpoint in place of that of step {step}, which group {name} died in"
    job.until(words, lambda: any(map(job.has, before_the_next)), SAVE_S)
    return Incident(f"group {name}, step {step}", {name}, at_s)


def killed_in_a_save(job: DrillJob) -> tuple[str, float, int]:
    """Kills the group that saves, the first of those that held the newest state, as it writes a checkpoint. Its name, when, which step."""
    name = job.quorum.participants[0]
    pids, stands = job.processes(name), {path.name for path in job.checkpoints.glob("step-*")}
    while True:
        job.look()
        for _ in range(20):  # a look takes longer than a small checkpoint
            for path in job.checkpoints.glob("step-*.partial-*"):
                if path.name not in stands:
                    signal_all(pids, signal.SIGKILL)
                    return name, time.monotonic(), int(path.name.partition(".")[0].removeprefix("step-"))
            time.sleep(0.001)


# ------------------------------------------------------------------------------------------------ pauses


def _stopped(job: DrillJob, pids: Collection[int], seconds: float = STOP_S) -> None:
    """SIGSTOP; by default for longer than the heartbeat timeout."""
    signal_all(pids, signal.SIGSTOP)
    job.hold(seconds)
    signal_all(pids, signal.SIGCONT)


def slow(job: DrillJob, name: str) -> None:
    """A machine with a quarter of its speed: nobody is lost."""
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
    """All groups but one are gone, and fewer are left than min_replica_size."""
    stays = job.pick(dice)
    names = sorted(set(job.live) - {stays}, key=int)
    job.away |= set(names)
    at_s = job.kill(*names)
    job.hold(job.away_s)
    job.away.clear()
    return Incident(f"all but group {stays}, {job.away_s:g} s", names, at_s, time.monotonic())


def full(job: DrillJob, dice: random.Random, *, state: bool) -> Incident:
    """Fills the disk of figures, samples and checkpoints, or that of the lighthouse's state, the groups' logs and TMPDIR."""
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
    """Nothing gets through, either way (Network.cut), or from the group (Network.blind), and nobody is told."""
    assert job.network
    part(job.network, name, True)
    job.hold(PARTITION_S)
    part(job.network, name, False)


def link(job: DrillJob, name: str) -> None:
    """A bad cable: slower for all, and nobody is lost."""
    assert job.network
    job.network.narrow(name, LINK_MEGABITS)
    job.hold(LINK_S)
    job.network.narrow(name, None)


def pair(job: DrillJob, dice: random.Random, *, forming: bool, at_store: bool) -> Incident:
    """Two groups lose each other's packets, and hear nothing of it, for job.pair_s. `forming`: just before a third one comes back, so that
    they connect anew; else in the steps that they make. `at_store`: one of the two is where the others meet first; else the next
    rendezvous is at a third group, which both of them reach."""
    assert job.network
    names, hit, quorum = sorted(job.live, key=int), set[str](), job.quorum
    holders, number = list(quorum.participants), quorum.quorum_id + 1
    if forming:
        comes = job.pick(dice)
        holders, number, hit = [name for name in holders if name != comes], number + 1, {comes}
        killed_s = job.kill(comes)
        job.until(f"a start of group {comes}", lambda: job.diaries[comes].since(killed_s, "start"))
    store = holders[number % len(holders)]  # as ft/protocol/group.py has it for rank 0
    others = [name for name in names if name != store]
    one, other = (store, job.pick(dice, others)) if at_store else sorted(dice.sample(others, 2), key=int)
    at_s = time.monotonic()
    job.network.part(one, other, True)
    job.hold(job.pair_s)
    job.network.part(one, other, False)
    repaired_s = time.monotonic()
    hit |= {name for name in (one, other) if not job.diaries[name].since(repaired_s - QUIET_S, "commit")}
    return Incident(f"groups {one} and {other}, store at {store}", hit, at_s, repaired_s)


# ------------------------------------------------------------------------------------------------ members that come, go or are wrong


def corrupt(job: DrillJob, dice: random.Random) -> Incident:
    """A bit of a weight flips, which only a comparison with the others shows. The group must heal, or end and come back."""
    name, rank = job.pick(dice), dice.randrange(job.ranks)
    _order(job, name, CORRUPT, rank)
    flipped_s = time.monotonic()
    job.until("that it is noticed", lambda: job.diaries[name].since(flipped_s, "healed", "start", rank=rank))
    return Incident(f"a bit of rank {rank} of group {name}", {name})


def drain(job: DrillJob, name: str) -> None:
    job.drain(name)
    job.until(f"the end of group {name}", lambda: job.groups[name].code == 0)


def add(job: DrillJob, dice: random.Random) -> Incident:
    name = job.add()
    return Incident(f"group {name}", {name})


def wrong(job: DrillJob, dice: random.Random) -> Incident:
    """The lighthouse starts again, and then a group comes whose model has other layers. It must be refused, without an effect on others."""
    job.kill_lighthouse()
    other = vars(job.config.model)["hidden_dim"] * 2 or 96
    stray = job.group("wrong", f"--model.hidden_dim={other}", f"--job.dump_folder={Path(job.folder, 'wrong')}")
    at_s = time.monotonic()
    stray.start()
    try:
        job.until("the end of a group with another model", lambda: stray.ended() is not None, WRONG_S)
        if stray.ended() != BAD_INPUT:
            raise job.failure(f"a group with another model ended with exit code {stray.ended()}, not {BAD_INPUT}")
    finally:
        stray.end()
    return Incident(f"hidden_dim {other}", at_s=at_s)


SERVER = "the server of group {}"
PAIRS: dict[str, Harm] = {
    "pair, in a sum": partial(pair, forming=False, at_store=False),
    "pair, store at an end": partial(pair, forming=False, at_store=True),
    "pair, while forming": partial(pair, forming=True, at_store=False),
    "pair, forming, store at an end": partial(pair, forming=True, at_store=True),
}
KINDS = {
    "kill": Kind({"kill": on_group(DrillJob.kill)}),  # a machine is lost: launcher, ranks and server at once
    "kill_rank": Kind({"kill_rank": kill_rank}),
    "all": Kind({"all": kill_all}, least=1),
    "stop": Kind({  # in one case the group's server still sends heartbeats
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
    """Every variant of these kinds once, shuffled; a group comes before one goes. After the first round `add` alone, or `drain` alone, is
    left out: there would be ever more groups, or none. brief: of each kind its first variant alone."""
    if not first:
        kinds = [kind for kind in kinds if not KINDS[kind].once]
    if not first and ("add" in kinds) != ("drain" in kinds):
        kinds = [kind for kind in kinds if kind not in ("add", "drain")]
    variants = sorted(variant for kind in kinds for variant in list(KINDS[kind].variants)[: 1 if brief else None])
    dice.shuffle(variants)
    if "drain" in variants:
        came, went = variants.index("add") if "add" in variants else len(variants) - 1, variants.index("drain")
        if went < came:
            variants[came], variants[went] = variants[went], variants[came]
    return variants


def inject(job: DrillJob, variant: str, dice: random.Random) -> Incident:
    """One fault, until all groups are together again. Raises Failed."""
    if variant == "corrupt":
        job.compared()
    before, at_s = frozenset(job.live), time.monotonic()
    step = max(job.diaries[name].step for name in before)
    found = HARMS[variant](job, dice)
    job.together()
    return replace(
        found, kind=variant, survivors=before - set(found.hit), at_s=at_s if math.isnan(found.at_s) else found.at_s,
        step=step, back_s=time.monotonic(), live=frozenset(job.live),
    )  # fmt: skip


LOSS_NATS = 0.02  # from the twin, at most
EVENTS = ("start", "commit", "refused", "healed", "restored")


@dataclass(frozen=True)
class Verdict:
    name: str
    holds: bool
    words: str

    def __str__(self) -> str:
        return f"{'yes' if self.holds else 'NO '}  {self.name}: {self.words}"


Diaries = Mapping[str, Diary]
Trained = Mapping[int, set[str]]  # step -> the groups whose gradients are in it


def judge(run: Path, diaries: Diaries, incidents: Sequence[Incident], settings: FaultTolerance) -> list[Verdict]:
    """Verdicts that must hold for any job that was harmed."""
    rows = samples.read(run / samples.FILE_NAME)
    trained = {row.step: {owner.partition(":")[0] for owner in row.slots.values()} for row in rows}
    history = [survivors_went_on(diaries, incidents, trained), bitwise_equal(diaries, incidents)]
    return [*history, ledger_exact(run), in_time(diaries, incidents, settings)]


def survivors_went_on(diaries: Diaries, incidents: Sequence[Incident], trained: Trained) -> Verdict:
    """No survivor of a fault died, threw a step away, passed over one, or came to a halt. A collective may end in one survivor and break in
    another: this one then has the step from that one, with its own gradients in it, and nothing is lost."""
    problems, steps, taken = list[str](), list[int](), 0
    for incident in incidents:
        for name in sorted(incident.survivors):
            found = list(_lost(diaries[name], incident, trained))
            taken += found.count("")
            problems += [f"{incident.kind}: group {name} {what}" for what in found if what]
            steps.append(len(diaries[name].since(incident.at_s, "commit", to_s=incident.back_s)))
    words = f"{len(problems)} problems in {len(steps)} cases; {taken} steps from a survivor that had all sums; "
    words += f"at least {min(steps, default=0)} steps while a fault lasted and healed"
    return Verdict("survivors went on, 0 steps lost", not problems, "; ".join([words, *problems[:10]]))


def _lost(diary: Diary, incident: Incident, trained: Trained) -> Iterator[str]:
    """Lost steps in words; "" for a step that a survivor has from another group, with its own gradients."""
    lines = diary.since(incident.at_s, *EVENTS, to_s=incident.back_s)
    before = [line.step for line in diary.since(0.0, "commit") if line.at_s < incident.at_s]
    step = before[-1] if before else 0  # not the highest: when all had died, they went back to a checkpoint
    for line in lines:
        if line.event == "healed" and line.step == step + 1 and diary.name in trained.get(line.step, ()):
            yield ""
        elif line.event != "commit":
            yield f"{line.event} at step {line.step}, after {step}"
        elif line.step != step + 1:
            yield f"has no step between {step} and {line.step}"
        step = line.step
    if not any(line.event == "commit" for line in lines):
        yield "has committed nothing since"


def next_commit_s(diaries: Diaries, incident: Incident, from_s: float | None = None) -> float:
    """Seconds from the fault, or from `from_s`, to the job's next commit: of a survivor, or of a new life, if there is none. inf: none."""
    from_s = since_s = incident.at_s if from_s is None else from_s
    if not incident.survivors:
        since_s = min(diaries[name].since(from_s, "start")[0].at_s for name in incident.hit)
    commits = [diaries[name].since(since_s, "commit")[:1] for name in incident.survivors or incident.hit]
    return min((line.at_s for lines in commits for line in lines), default=math.inf) - from_s


def longest_gap_s(diaries: Diaries, incident: Incident) -> float:
    """Seconds of the longest gap between two commits of a survivor, from the fault until all were back."""
    return longest_gap([diaries[n] for n in incident.survivors or incident.hit], incident.at_s, incident.back_s)


def bitwise_equal(diaries: Diaries, incidents: Sequence[Incident]) -> Verdict:
    """Checks that each rank has the same commit, the same weights; and of each step one commit that anybody went on from, until all state
    was lost."""
    problems, weights, compared = list[str](), dict[tuple[int, int, str], str](), 0
    gone_on: dict[tuple[int, int, int], str] = {}  # era, rank, step
    for name, diary in diaries.items():
        for rank in range(len(diary.ranks)):
            lines, wiped = _trusted(diary, rank, incidents), [x.at_s for x in incidents if x.kind == "all"]
            # New histories begin with the first life after all had been killed; until it dies a group goes on in the old one.
            eras = [lives[0].at_s for at_s in wiped if (lives := diary.since(at_s, "start", rank=rank))]
            for line in lines:
                compared += (state := (rank, line.step, line.commit_id)) in weights
                if weights.setdefault(state, line.digest) != line.digest:
                    problems.append(f"group {name}, rank {rank}, step {line.step}: other weights")
            for line, after in pairwise(lines):
                era = bisect(eras, line.at_s)
                went_on = after.step == line.step + 1 and after.pid == line.pid
                if went_on and gone_on.setdefault((era, rank, line.step), line.commit_id) != line.commit_id:
                    problems.append(f"group {name}, rank {rank} went on from another commit of step {line.step}")
    least = min((_steps_of_all(diaries, incident) for incident in incidents), default=0)
    if incidents and least == 0:
        problems.append("after a fault no step was everybody's")
    words = f"{compared} digests beside another group's, {len(problems)} problems; {least} or more steps of all groups after each fault"
    return Verdict("replicas bitwise equal", compared > 0 and not problems, "; ".join([words, *problems[:10]]))


def _trusted(diary: Diary, rank: int, incidents: Sequence[Incident]) -> list[DiaryLine]:
    """Commits of this group, but for those between a bit that was flipped on purpose and the heal or new life that mends it."""
    commits = diary.since(0.0, "commit", rank=rank)
    for incident in incidents:
        if incident.kind == "corrupt" and diary.name in incident.hit:
            flipped_s = max((line.at_s for line in commits if line.at_s < incident.at_s), default=0.0)  # told after it
            mended_s = diary.since(incident.at_s, "healed", "start", rank=rank)[0].at_s
            commits = [line for line in commits if not flipped_s <= line.at_s < mended_s]
    return commits


def _steps_of_all(diaries: Diaries, incident: Incident) -> int:
    """Number of steps that all live groups have in common until `back_s`, with equal weights, on the rank that has fewest."""
    seen: dict[tuple[int, int, str, str], set[str]] = defaultdict(set)
    ranks = range(len(next(iter(diaries.values())).ranks))
    for name in incident.live:
        for rank in ranks:
            for line in diaries[name].since(incident.at_s, "commit", rank=rank, to_s=incident.back_s):
                seen[rank, line.step, line.commit_id, line.digest].add(name)
    whole = [rank for (rank, *_), names in seen.items() if names == incident.live]
    return min(whole.count(rank) for rank in ranks)


def ledger_exact(run: Path) -> Verdict:
    """Checks that every sample below the highest was trained on once, but for the holes of the last step."""
    found = samples.prove(samples.read(run / samples.FILE_NAME))
    words = f"{found.sequences:,} sequences in {found.steps} steps; missing {samples.listed(found.missing) or 'none'}, "
    words += f"doubled {samples.listed(found.doubled) or 'none'}, open {samples.listed(found.open) or 'none'}"
    return Verdict("ledger exact", found.exact, "; ".join([words, *found.wrong[:10]]))


def figures_complete(run: Path) -> Verdict:
    """No step between the first and the last that the journal tells of is missing in it, and none is there twice."""
    steps = [int(row["step"]) for row in rows(run) if "loss" in row]
    problems = [f"{after} follows {before}" for before, after in pairwise(steps) if after - before != 1]
    words = f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "no steps"
    return Verdict("figures complete", bool(steps) and not problems, "; ".join([words, *problems[:10]]))


def looks(run: Path) -> list[tuple[float, float]]:
    """Validations of a run: (tokens trained on, loss on held-out text in nats per token)."""
    tokens, found = 0.0, []
    for row in rows(run):
        tokens = row.get("tokens", tokens)
        if "validation_loss" in row:
            found.append((tokens, row["validation_loss"]))
    return found


def steps_for(run: Path, tokens: float, slots: int) -> int:
    """Steps after which a run with so many slots a step has seen as many tokens, by the tokens of the other run's sequences."""
    trained = samples.read(run / samples.FILE_NAME)
    seen = max(row.get("tokens", 0.0) for row in rows(run))
    a_sequence = seen / samples.prove(trained).sequences
    return math.ceil(tokens / (a_sequence * trained[-1].slot_size * slots))


AS_GOOD = f"validation loss within {LOSS_NATS} nats of the twin's"


def loss_of_twin(run: Path, twin: Path) -> Verdict:
    """The last look of the run beside the twin's after as many tokens: on the line between the looks before and after."""
    name, (tokens, loss) = AS_GOOD, looks(run)[-1]
    there = looks(twin)
    for (few, before), (many, after) in pairwise(there):
        if few <= tokens <= many:
            other = before + (after - before) * (tokens - few) / (many - few)
            words = f"{loss:.4f} after {tokens:,.0f} tokens, {other:.4f} without faults: {loss - other:+.4f}"
            return Verdict(name, abs(loss - other) <= LOSS_NATS, words)
    return Verdict(name, False, f"the twin has no looks around {tokens:,.0f} tokens, from {there[0]} to {there[-1]}")


SLACK_S = 5.0  # to come together, once it is known what to do
BACK_S = 60.0  # after a cable is whole again
STEADY_STEPS = 20
HUNG_LEAST_S, HUNG_ALONE_S = 10.0, 60.0  # that a majority, or any group, waits at least for one that hangs
HUNG_MEDIANS = 5
Figure = tuple[str, float, float]  # words, what it is, what it may be at most


def in_time(diaries: Diaries, incidents: Sequence[Incident], settings: FaultTolerance) -> Verdict:
    told, missed = list[str](), list[str]()
    for incident in incidents:
        bound = BOUNDS.get(incident.kind, lambda *_: ())
        for words, is_, at_most in bound(diaries, incident, settings):
            (told if is_ <= at_most else missed).append(f"{incident.kind}: {words} {is_:.2f}, at most {at_most:.2f}")
    words = "; ".join([*(f"NOT {miss}" for miss in missed), *told]) or "no fault that has a bound"
    return Verdict("in time", not missed, words)


def steady_s(diaries: Diaries, incident: Incident) -> float:
    """Seconds of a step of the survivors before the fault."""
    before = ([x for x in diaries[n].since(0.0, "commit") if x.at_s < incident.at_s] for n in incident.survivors)
    found = [gap for commits in before for gap in gaps(commits[-STEADY_STEPS:])]
    return median(found) if found else math.nan


def _hang(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    least_s = HUNG_LEAST_S if 2 * (len(incident.live) - 1) > len(incident.live) else HUNG_ALONE_S
    limit_s = max(least_s, HUNG_MEDIANS * steady_s(diaries, incident))
    yield "seconds without a step", longest_gap_s(diaries, incident), limit_s + SLACK_S


def _pair(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    mended_s, limit_s = incident.repaired_s, settings.heartbeat_timeout_s + settings.rendezvous_s + SLACK_S
    commits = sorted(line.at_s for diary in diaries.values() for line in diary.since(0.0, "commit"))
    while_s = [at_s for at_s in commits if incident.at_s <= at_s <= mended_s]
    before_s = [at_s for at_s in commits if at_s < incident.at_s][-1:]
    waits = [after - before for before, after in pairwise([*before_s, *while_s, mended_s])]
    yield "seconds without a step of anybody", max(waits), limit_s
    quiet = [name for name in incident.live if not diaries[name].since(mended_s - QUIET_S, "commit", to_s=mended_s)]
    yield "groups that sit out", len(quiet), 1
    yield "seconds from the repair until all are together", incident.back_s - mended_s, BACK_S


def _away(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    """Without a limit after which others may take the job over, nobody needs the lighthouse to commit: no step waits for it. A look at
    held-out text and a save are among the steps."""
    if settings.takeover_s == 0:
        yield "seconds without a step", longest_gap_s(diaries, incident), 2 * steady_s(diaries, incident) + SLACK_S
    else:
        next_s = next_commit_s(diaries, incident, incident.repaired_s)
        yield "seconds from its return to the next step", next_s, 2 * SLACK_S


def _capacity(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    starts = sorted(x.at_s for name in incident.hit for x in diaries[name].since(incident.repaired_s, "start")[:1])
    enough = starts[settings.min_replica_size - 2]  # the survivor, and as many of these
    yield "seconds from the start of who was missing", next_commit_s(diaries, incident, enough), SLACK_S


def _joiner(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    """Its first death is that of a member; the bound is for those that follow."""
    [name] = incident.hit
    first_s = diaries[name].since(incident.at_s, "start")[0].at_s
    longest_s = longest_gap([diaries[other] for other in incident.survivors], first_s, incident.back_s)
    yield "seconds of the longest step", longest_s, 2 * steady_s(diaries, incident) + 1


BOUNDS: dict[str, Callable[[Diaries, Incident, FaultTolerance], Iterator[Figure]]] = {
    "hang": _hang,
    **dict.fromkeys(PAIRS, _pair),
    "lighthouse away": _away,
    "capacity": _capacity,
    "joiner": _joiner,
}
