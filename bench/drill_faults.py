"""The faults of the drill: each is done to a running job, lasts, and is taken back; then all groups have to come together again.

Flow: drill.py and tests/e2e ask `plan` what comes in which order, and `inject` one after the other. What the job did meanwhile is judged
by drill_rules.py.
"""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import drill_outages as outages
from bench.drill_job import DrillJob, Hurt, pick
from training.drill import HANG, ORDER

STOP_S, SLOW_S, LIGHTHOUSE_AWAY_S, LIGHTHOUSE_STOPPED_S = 12.0, 6.0, 2.0, 8.0
PARTITION_S, LINK_S = 10.0, 6.0
BEAT_S = 1.0  # of a slow group: three quarters of it stopped
LINK_MEGABITS = 8.0


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


# ------------------------------------------------------------------------------------------------ what is done


def kill(job: DrillJob, dice: random.Random) -> Hurt:
    """A machine is lost: launcher, ranks and server at once."""
    name = pick(dice, job.live)
    job.signal(job.processes(name), signal.SIGKILL)
    return Hurt(f"group {name}", {name})


def kill_rank(job: DrillJob, dice: random.Random) -> Hurt:
    """The others of its group have to notice."""
    name = pick(dice, job.live)
    rank = dice.randrange(job.ranks)
    job.signal([job.diaries[name].pids[rank]], signal.SIGKILL)
    return Hurt(f"rank {rank} of group {name}", {name})


def kill_all(job: DrillJob, dice: random.Random) -> Hurt:
    """All state is lost but the newest checkpoint."""
    job.until("a checkpoint", lambda: any(job.checkpoints.glob("step-*/manifest.json")))
    at_s = time.monotonic()
    job.signal([pid for name in job.live for pid in job.processes(name)], signal.SIGKILL)
    return Hurt("all groups", set(job.live), at_s)


def half(job: DrillJob, dice: random.Random) -> Hurt:
    """A switch fails, with all machines behind it."""
    names = sorted(dice.sample(sorted(job.live, key=int), len(job.live) // 2), key=int)
    job.signal([pid for name in names for pid in job.processes(name)], signal.SIGKILL)
    return Hurt(f"groups {', '.join(names)}", set(names))


def kill_server(job: DrillJob, dice: random.Random) -> Hurt:
    """Its ranks end with it, and come back."""
    name = pick(dice, job.live)
    job.signal([job.server(name)], signal.SIGKILL)
    return Hurt(f"the server of group {name}", {name})


def stop_server(job: DrillJob, dice: random.Random) -> Hurt:
    name = pick(dice, job.live)
    return Hurt(f"the server of group {name}", _stopped(job, name, [job.server(name)]))


def hang(job: DrillJob, dice: random.Random) -> Hurt:
    """The main thread of one rank sleeps for ever; until the others go on without it, and it is killed."""
    name, rank, count = pick(dice, job.live), dice.randrange(job.ranks), len(job.live)
    _order(job, name, HANG, rank)
    at_s = time.monotonic()
    others = [job.diaries[other] for other in job.live if other != name]

    def go_on() -> bool:
        return all(any(x.contributors < count for x in diary.since(at_s, "commit")) for diary in others)

    job.until(f"a step of the others while rank {rank} of group {name} hangs", go_on)
    job.signal(job.processes(name), signal.SIGKILL)
    return Hurt(f"rank {rank} of group {name}", {name}, at_s, time.monotonic())


def _order(job: DrillJob, name: str, what: str, rank: int) -> None:
    """Gives an order to a trainer, which obeys at the next step's boundary (training/drill.py)."""
    order = job.diaries[name].folder / what
    order.with_suffix(".new").write_text(str(rank))
    order.with_suffix(".new").replace(order)
    job.until(f"a {what}", lambda: not order.exists())


def stop(job: DrillJob, dice: random.Random) -> Hurt:
    """Longer than the heartbeat timeout."""
    name = pick(dice, job.live)
    return Hurt(f"group {name}", _stopped(job, name, job.processes(name)))


def stop_trainer(job: DrillJob, dice: random.Random) -> Hurt:
    """The group's server still beats."""
    name = pick(dice, job.live)
    return Hurt(f"the ranks of group {name}", _stopped(job, name, job.diaries[name].pids))


def _stopped(job: DrillJob, name: str, pids: Sequence[int]) -> set[str]:
    job.signal(pids, signal.SIGSTOP)
    job.hold(STOP_S)
    job.signal(pids, signal.SIGCONT)
    return {name}


def slow(job: DrillJob, dice: random.Random) -> Hurt:
    """A machine with a quarter of its speed: nobody is lost."""
    name = pick(dice, job.live)
    pids, end_s = job.processes(name), time.monotonic() + SLOW_S
    while time.monotonic() < end_s:
        job.signal(pids, signal.SIGSTOP)
        job.hold(0.75 * BEAT_S)
        job.signal(pids, signal.SIGCONT)
        job.hold(0.25 * BEAT_S)
    return Hurt(f"group {name}")


def lighthouse(job: DrillJob, dice: random.Random) -> Hurt:
    job.lighthouse.kill()
    job.lighthouse.communicate()
    job.hold(LIGHTHOUSE_AWAY_S)
    job.start_lighthouse()
    return Hurt("the lighthouse")


def stop_lighthouse(job: DrillJob, dice: random.Random) -> Hurt:
    job.signal([job.lighthouse.pid], signal.SIGSTOP)
    job.hold(LIGHTHOUSE_STOPPED_S)
    job.signal([job.lighthouse.pid], signal.SIGCONT)
    return Hurt("the lighthouse")


def partition(job: DrillJob, dice: random.Random) -> Hurt:
    """Nothing gets through, either way, and nobody is told."""
    assert job.network
    return _parted(job, dice, job.network.cut)


def one_way(job: DrillJob, dice: random.Random) -> Hurt:
    """Cuts the direction away from the group: all that it sends is lost."""
    assert job.network
    return _parted(job, dice, job.network.blind)


def _parted(job: DrillJob, dice: random.Random, part: Callable[[str, bool], None]) -> Hurt:
    name = pick(dice, job.live)
    part(name, True)
    job.hold(PARTITION_S)
    part(name, False)
    return Hurt(f"group {name}", {name})


def link(job: DrillJob, dice: random.Random) -> Hurt:
    """A bad cable: slower for all, and nobody is lost."""
    assert job.network
    name = pick(dice, job.live)
    job.network.narrow(name, LINK_MEGABITS)
    job.hold(LINK_S)
    job.network.narrow(name, None)
    return Hurt(f"group {name}, {LINK_MEGABITS:g} Mbit/s")


def corrupt(job: DrillJob, dice: random.Random) -> Hurt:
    """Nothing but a comparison with the others tells it. The group must heal, or end and come back."""
    name = pick(dice, job.live)
    rank = dice.randrange(job.ranks)
    diary = job.diaries[name]
    _order(job, name, ORDER, rank)
    flipped_s = time.monotonic()
    job.until("that it is noticed", lambda: diary.since(flipped_s, "healed", "start", rank=rank))
    return Hurt(f"a bit of rank {rank} of group {name}", {name})


def drain(job: DrillJob, dice: random.Random) -> Hurt:
    """It leaves on purpose, for good."""
    name = pick(dice, job.live)
    job.drain(name)
    job.until(f"the end of group {name}", lambda: job.groups[name].code == 0)
    return Hurt(f"group {name}", {name})


def add(job: DrillJob, dice: random.Random) -> Hurt:
    name = job.add()
    return Hurt(f"group {name}", {name})


KINDS = {
    "kill": Kind({"kill": kill}),
    "kill_rank": Kind({"kill_rank": kill_rank}),
    "all": Kind({"all": kill_all}, least=1),
    "stop": Kind({"stop": stop, "stop trainer": stop_trainer}),
    "slow": Kind({"slow": slow}),
    "lighthouse": Kind({"lighthouse killed": lighthouse, "lighthouse stopped": stop_lighthouse}, least=1),
    "partition": Kind({"partition": partition, "partition, one way": one_way}, network=True),
    "link": Kind({"link": link}, network=True),
    "corrupt": Kind({"corrupt": corrupt}, least=3),
    "drain": Kind({"drain": drain}),
    "add": Kind({"add": add}, least=1),
    "hang": Kind({"hang": hang}),
    "half": Kind({"half": half}, least=3),
    "server": Kind({"server killed": kill_server, "server stopped": stop_server}),
    "joiner": Kind({"joiner": outages.joiner}),
    "writer": Kind({"writer": outages.writer}),
    "wrong": Kind({"wrong": outages.wrong}, least=1),
    "pair": Kind(
        {
            "pair, in a sum": outages.pair_in_a_sum,
            "pair, store at an end": outages.pair_at_the_store,
            "pair, while forming": outages.pair_forming,
            "pair, forming, store at an end": outages.pair_forming_at_the_store,
        },
        least=3,
        network=True,
        once=True,
    ),
    "away": Kind({"lighthouse away": outages.lighthouse_away}, least=1, once=True),
    "capacity": Kind({"capacity": outages.capacity}, once=True),
    "full": Kind({"full disk": outages.full_disk, "full state": outages.full_state}, least=1, disk=True, once=True),
}
HARMS = {name: harm for kind in KINDS.values() for name, harm in kind.variants.items()}


# ------------------------------------------------------------------------------------------------ in which order


def plan(kinds: Sequence[str], dice: random.Random, *, first: bool = True, brief: bool = False) -> list[str]:
    """Every variant of these kinds once, shuffled; a group comes before one goes. Not the first round: who only comes, or only goes, would
    leave ever more groups, or none. brief: of each kind its first variant alone."""
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
    job.together(time.monotonic())
    hit, at_s = frozenset(hurt.hit), at_s if math.isnan(hurt.at_s) else hurt.at_s
    live = frozenset(job.live)
    return Incident(variant, hurt.target, hit, before - hit, at_s, step, time.monotonic(), live, hurt.repaired_s)
