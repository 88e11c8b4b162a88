"""The faults of the drill: each is done to a running job, lasts, and is taken back; then all groups have to come together again.

Flow: drill.py and tests/e2e ask `plan` what comes in which order, and `inject` one after the other. What the job did meanwhile is judged
by drill_rules.py.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proofs.drill_job import Job, pick
from training.drill import ORDER

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


Harm = Callable[
    [Job, random.Random], tuple[str, set[str]]
]  # does it and takes it back; the target in words, and who is hit


@dataclass(frozen=True)
class Kind:
    """`variants`: each is one fault; the first is the one that tells most. `least`: groups that there must be."""

    variants: dict[str, Harm]
    least: int = 2
    network: bool = False


# ------------------------------------------------------------------------------------------------ what is done


def kill(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    """A machine is lost: launcher, ranks and server at once."""
    name = pick(dice, job.live)
    job.signal(job.processes(name), signal.SIGKILL)
    return f"group {name}", {name}


def kill_rank(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    """The others of its group have to notice."""
    name = pick(dice, job.live)
    rank = dice.randrange(job.ranks)
    job.signal([job.diaries[name].pids[rank]], signal.SIGKILL)
    return f"rank {rank} of group {name}", {name}


def kill_all(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    """All state is lost but the newest checkpoint."""
    checkpoints = job.run / job.config.checkpoint.folder
    job.until("a checkpoint", lambda: any(checkpoints.glob("step-*")))
    job.signal([pid for name in job.live for pid in job.processes(name)], signal.SIGKILL)
    return "all groups", set(job.live)


def stop(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    """Longer than the heartbeat timeout."""
    name = pick(dice, job.live)
    return f"group {name}", _stopped(job, name, job.processes(name))


def stop_trainer(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    """The group's server still beats."""
    name = pick(dice, job.live)
    return f"the ranks of group {name}", _stopped(job, name, job.diaries[name].pids)


def _stopped(job: Job, name: str, pids: Sequence[int]) -> set[str]:
    job.signal(pids, signal.SIGSTOP)
    job.hold(STOP_S)
    job.signal(pids, signal.SIGCONT)
    return {name}


def slow(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    """A machine with a quarter of its speed: nobody is lost."""
    name = pick(dice, job.live)
    pids, end_s = job.processes(name), time.monotonic() + SLOW_S
    while time.monotonic() < end_s:
        job.signal(pids, signal.SIGSTOP)
        job.hold(0.75 * BEAT_S)
        job.signal(pids, signal.SIGCONT)
        job.hold(0.25 * BEAT_S)
    return f"group {name}", set()


def lighthouse(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    job.lighthouse.kill()
    job.lighthouse.communicate()
    job.hold(LIGHTHOUSE_AWAY_S)
    job.start_lighthouse()
    return "the lighthouse", set()


def stop_lighthouse(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    job.signal([job.lighthouse.pid], signal.SIGSTOP)
    job.hold(LIGHTHOUSE_STOPPED_S)
    job.signal([job.lighthouse.pid], signal.SIGCONT)
    return "the lighthouse", set()


def partition(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    """Nothing gets through, either way, and nobody is told."""
    assert job.network
    return _parted(job, dice, job.network.cut)


def one_way(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    """What it sends is lost."""
    assert job.network
    return _parted(job, dice, job.network.blind)


def _parted(job: Job, dice: random.Random, part: Callable[[str, bool], None]) -> tuple[str, set[str]]:
    name = pick(dice, job.live)
    part(name, True)
    job.hold(PARTITION_S)
    part(name, False)
    return f"group {name}", {name}


def link(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    """A bad cable: slower for all, and nobody is lost."""
    assert job.network
    name = pick(dice, job.live)
    job.network.narrow(name, LINK_MEGABITS)
    job.hold(LINK_S)
    job.network.narrow(name, None)
    return f"group {name}, {LINK_MEGABITS:g} Mbit/s", set()


def corrupt(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    """Nothing but a comparison with the others tells it. The group must heal, or end and come back."""
    name = pick(dice, job.live)
    rank = dice.randrange(job.ranks)
    diary, order = job.diaries[name], job.diaries[name].folder / ORDER
    order.with_suffix(".new").write_text(str(rank))
    order.with_suffix(".new").replace(order)
    job.until("a flipped bit", lambda: not order.exists())
    flipped_s = time.monotonic()
    job.until("that it is noticed", lambda: diary.since(flipped_s, "healed", "start", rank=rank))
    return f"a bit of rank {rank} of group {name}", {name}


def drain(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    """It leaves on purpose, for good."""
    name = pick(dice, job.live)
    job.drain(name)
    job.until(f"the end of group {name}", lambda: job.groups[name].code == 0)
    return f"group {name}", {name}


def add(job: Job, dice: random.Random) -> tuple[str, set[str]]:
    name = job.add()
    return f"group {name}", {name}


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
}
HARMS = {name: harm for kind in KINDS.values() for name, harm in kind.variants.items()}


# ------------------------------------------------------------------------------------------------ in which order


def plan(kinds: Sequence[str], dice: random.Random, *, first: bool = True, brief: bool = False) -> list[str]:
    """Every variant of these kinds once, shuffled; a group comes before one goes. Not the first round: who only comes, or only goes, would
    leave ever more groups, or none. brief: of each kind its first variant alone."""
    if not first and ("add" in kinds) != ("drain" in kinds):
        kinds = [kind for kind in kinds if kind not in ("add", "drain")]
    variants = sorted(variant for kind in kinds for variant in list(KINDS[kind].variants)[: 1 if brief else None])
    dice.shuffle(variants)
    if "drain" in variants:
        came, went = variants.index("add") if "add" in variants else len(variants) - 1, variants.index("drain")
        if went < came:
            variants[came], variants[went] = variants[went], variants[came]
    return variants


def inject(job: Job, variant: str, dice: random.Random) -> Incident:
    """One fault, until all groups are together again. Raises Failed."""
    if variant == "corrupt":
        job.compared()
    before, at_s = frozenset(job.live), time.monotonic()
    step = max(job.diaries[name].step for name in before)
    target, hit = HARMS[variant](job, dice)
    job.together(time.monotonic())
    return Incident(variant, target, frozenset(hit), before - hit, at_s, step, time.monotonic(), frozenset(job.live))
