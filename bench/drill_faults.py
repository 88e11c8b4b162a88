"""The faults of the drill: each is done to a running job, lasts, and is taken back; then all groups have to come together again.

Flow: drill.py and tests/e2e ask `plan` what comes in which order, and `inject` one after the other. What the job did meanwhile is judged
by drill_rules.py; only what the harm itself shows to be wrong is told here (Failed).
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.drill_job import DrillJob, Hurt
from bench.drill_machines import Disk, Network
from bench.job import signal_all
from training.drill import HANG, ORDER

STOP_S, SLOW_S, LIGHTHOUSE_AWAY_S, LIGHTHOUSE_STOPPED_S = 12.0, 6.0, 2.0, 8.0
PARTITION_S, LINK_S = 10.0, 6.0
BEAT_S = 1.0  # of a slow group: three quarters of it stopped
LINK_MEGABITS = 8.0
QUIET_S = 10.0  # a group that has committed nothing for so long sits out
SAVE_S = 60.0  # for what a dead writer was about to save
JOINERS = 3  # deaths of one group, each while it heals
WRONG_S, BAD_INPUT = 60.0, 2  # for a start that is refused; its exit code
REFILL_S = 0.2


@dataclass
class Incident:
    """One fault. `hit`: the groups that may lose their place by it; all others must lose nothing. Seconds, of the machine's clock."""

    kind: str
    target: str
    hit: frozenset[str]
    survivors: frozenset[str]
    at_s: float
    step: int  # the newest at that time
    back_s: float  # when the last steps were of all groups
    live: frozenset[str]  # those groups
    repaired_s: float = math.nan  # when it was taken back, where that was on purpose


Harm = Callable[[DrillJob, random.Random], Hurt]  # does it and takes it back


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

    def on_one(job: DrillJob, dice: random.Random) -> Hurt:
        name = job.pick(dice)
        harm(job, name)
        return Hurt(words.format(name), {name} if lost else ())

    return on_one


# ------------------------------------------------------------------------------------------------ deaths


def kill_rank(job: DrillJob, dice: random.Random) -> Hurt:
    """SIGKILL of one rank: the others of its group have to notice."""
    name, rank = job.pick(dice), dice.randrange(job.ranks)
    signal_all([job.ranks_of(name)[rank]], signal.SIGKILL)
    return Hurt(f"rank {rank} of group {name}", {name})


def kill_all(job: DrillJob, dice: random.Random) -> Hurt:
    """All state is lost but the newest checkpoint."""
    job.until("a checkpoint", lambda: any(job.checkpoints.glob("step-*/manifest.json")))
    return Hurt("all groups", set(job.live), job.kill(*job.live))


def half(job: DrillJob, dice: random.Random) -> Hurt:
    """A switch fails, with all machines behind it."""
    names = sorted(dice.sample(sorted(job.live, key=int), len(job.live) // 2), key=int)
    job.kill(*names)
    return Hurt(f"groups {', '.join(names)}", set(names))


def hang(job: DrillJob, dice: random.Random) -> Hurt:
    """The main thread of one rank sleeps for ever; until the others go on without it, and it is killed."""
    name, rank, count = job.pick(dice), dice.randrange(job.ranks), len(job.live)
    _order(job, name, HANG, rank)
    at_s = time.monotonic()
    others = [job.diaries[other] for other in job.live if other != name]

    def go_on() -> bool:
        return all(any(x.contributors < count for x in diary.since(at_s, "commit")) for diary in others)

    job.until(f"a step of the others while rank {rank} of group {name} hangs", go_on)
    return Hurt(f"rank {rank} of group {name}", {name}, at_s, job.kill(name))


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


def writer(job: DrillJob, dice: random.Random) -> Hurt:
    """The group that saves dies while it does. The next writer has to save the checkpoint that was due."""
    name, at_s, step = killed_in_a_save(job)
    while job.has(step):  # it was too late: the checkpoint stood
        job.together()
        name, at_s, step = killed_in_a_save(job)
    before_the_next = range(step, step + job.config.checkpoint.interval)
    words = f"a checkpoint in place of that of step {step}, which group {name} died in"
    job.until(words, lambda: any(map(job.has, before_the_next)), SAVE_S)
    return Hurt(f"group {name}, step {step}", {name}, at_s)


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


def lighthouse(job: DrillJob, dice: random.Random) -> Hurt:
    job.kill_lighthouse(LIGHTHOUSE_AWAY_S)
    return Hurt("the lighthouse")


def stop_lighthouse(job: DrillJob, dice: random.Random) -> Hurt:
    _stopped(job, [job.lighthouse.pid], LIGHTHOUSE_STOPPED_S)
    return Hurt("the lighthouse")


def lighthouse_away(job: DrillJob, dice: random.Random) -> Hurt:
    at_s = time.monotonic()
    job.kill_lighthouse(job.away_s)
    return Hurt(f"the lighthouse, {job.away_s:g} s", at_s=at_s, repaired_s=time.monotonic())


def capacity(job: DrillJob, dice: random.Random) -> Hurt:
    """All groups but one are gone, and fewer are left than min_replica_size."""
    stays = job.pick(dice)
    names = sorted(set(job.live) - {stays}, key=int)
    job.away |= set(names)
    at_s = job.kill(*names)
    job.hold(job.away_s)
    job.away.clear()
    return Hurt(f"all but group {stays}, {job.away_s:g} s", names, at_s, time.monotonic())


def full(job: DrillJob, dice: random.Random, *, state: bool) -> Hurt:
    """Fills the disk of figures, samples and checkpoints, or that of the lighthouse's state, the groups' logs and TMPDIR."""
    assert job.disk
    place, what = (job.disk.groups, "state, logs, TMPDIR") if state else (job.disk.run, "the run's folder")
    at_s = time.monotonic()
    while time.monotonic() < at_s + job.full_s:
        Disk.fill(place)
        job.hold(REFILL_S)
    Disk.free(place)
    return Hurt(f"{what}, {job.full_s:g} s", at_s=at_s, repaired_s=time.monotonic())


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


def pair(job: DrillJob, dice: random.Random, *, forming: bool, at_store: bool) -> Hurt:
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
    return Hurt(f"groups {one} and {other}, store at {store}", hit, at_s, repaired_s)


# ------------------------------------------------------------------------------------------------ members that come, go or are wrong


def corrupt(job: DrillJob, dice: random.Random) -> Hurt:
    """A bit of a weight flips, which only a comparison with the others shows. The group must heal, or end and come back."""
    name, rank = job.pick(dice), dice.randrange(job.ranks)
    _order(job, name, ORDER, rank)
    flipped_s = time.monotonic()
    job.until("that it is noticed", lambda: job.diaries[name].since(flipped_s, "healed", "start", rank=rank))
    return Hurt(f"a bit of rank {rank} of group {name}", {name})


def drain(job: DrillJob, name: str) -> None:
    """A group leaves on purpose, for good."""
    job.drain(name)
    job.until(f"the end of group {name}", lambda: job.groups[name].code == 0)


def add(job: DrillJob, dice: random.Random) -> Hurt:
    name = job.add()
    return Hurt(f"group {name}", {name})


def wrong(job: DrillJob, dice: random.Random) -> Hurt:
    """The lighthouse starts again, and then a group comes whose model has other layers. It must be refused, without an effect on others."""
    job.kill_lighthouse()
    other = job.config.model.hidden_dim * 2 or 96
    stray = job.group("wrong", f"--model.hidden_dim={other}", f"--job.dump_folder={Path(job.folder, 'wrong')}")
    at_s = time.monotonic()
    stray.start()
    try:
        job.until("the end of a group with another model", lambda: stray.ended() is not None, WRONG_S)
        if stray.ended() != BAD_INPUT:
            raise job.failure(f"a group with another model ended with exit code {stray.ended()}, not {BAD_INPUT}")
    finally:
        stray.end()
    return Hurt(f"hidden_dim {other}", at_s=at_s)


SERVER = "the server of group {}"
STOPS = {  # in one case the group's server still sends heartbeats
    "stop": on_group(lambda job, name: _stopped(job, job.processes(name))),
    "stop trainer": on_group(lambda job, name: _stopped(job, job.ranks_of(name)), "the ranks of group {}"),
}
SERVERS = {
    "server killed": on_group(lambda job, name: signal_all(job.server(name), signal.SIGKILL), SERVER),
    "server stopped": on_group(lambda job, name: _stopped(job, job.server(name)), SERVER),
}
PARTITIONS = {
    "partition": on_group(partial(parted, part=Network.cut)),
    "partition, one way": on_group(partial(parted, part=Network.blind)),
}
FULL: dict[str, Harm] = {"full disk": partial(full, state=False), "full state": partial(full, state=True)}
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
    "stop": Kind(STOPS),
    "slow": Kind({"slow": on_group(slow, lost=False)}),
    "lighthouse": Kind({"lighthouse killed": lighthouse, "lighthouse stopped": stop_lighthouse}, least=1),
    "partition": Kind(PARTITIONS, network=True),
    "link": Kind({"link": on_group(link, f"group {{}}, {LINK_MEGABITS:g} Mbit/s", lost=False)}, network=True),
    "corrupt": Kind({"corrupt": corrupt}, least=3),
    "drain": Kind({"drain": on_group(drain)}),
    "add": Kind({"add": add}, least=1),
    "hang": Kind({"hang": hang}),
    "half": Kind({"half": half}, least=3),
    "server": Kind(SERVERS),
    "joiner": Kind({"joiner": on_group(joiner, f"group {{}}, {JOINERS} times")}),
    "writer": Kind({"writer": writer}),
    "wrong": Kind({"wrong": wrong}, least=1),
    "pair": Kind(PAIRS, least=3, network=True, once=True),
    "away": Kind({"lighthouse away": lighthouse_away}, least=1, once=True),
    "capacity": Kind({"capacity": capacity}, once=True),
    "full": Kind(FULL, least=1, disk=True, once=True),
}
HARMS = {name: harm for kind in KINDS.values() for name, harm in kind.variants.items()}


# ------------------------------------------------------------------------------------------------ in which order


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
    hurt = HARMS[variant](job, dice)
    job.together()
    hit, at_s = frozenset(hurt.hit), at_s if math.isnan(hurt.at_s) else hurt.at_s
    live = frozenset(job.live)
    return Incident(variant, hurt.target, hit, before - hit, at_s, step, time.monotonic(), live, hurt.repaired_s)
