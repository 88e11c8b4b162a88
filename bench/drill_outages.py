"""Faults of the drill that last: something that a job needs is away for minutes, or goes again and again.

Flow: as drill_faults.py, which knows them by name. Each goes on until it is over; what the others did meanwhile is judged by
drill_rules.py, and only what the harm itself shows to be wrong is told here (Failed).
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from bench.drill_disk import Disk
from bench.drill_job import DrillJob, Hurt, pick

QUIET_S = 10.0  # who has committed nothing for so long sits out
SAVE_S = 60.0  # for what a dead writer was about to save
JOINERS = 3  # deaths of one group, each while it heals
WRONG_S = 60.0  # for a start that is refused
REFILL_S = 0.2
BAD_INPUT = 2  # exit code


def lighthouse_away(job: DrillJob, dice: random.Random) -> Hurt:
    job.lighthouse.kill()
    job.lighthouse.communicate()
    at_s = time.monotonic()
    job.hold(job.away_s)
    job.start_lighthouse()
    return Hurt(f"the lighthouse, {job.away_s:g} s", at_s=at_s, repaired_s=time.monotonic())


def capacity(job: DrillJob, dice: random.Random) -> Hurt:
    """All but one are gone, and fewer are left than min_replica_size."""
    stays = pick(dice, job.live)
    names = sorted(set(job.live) - {stays}, key=int)
    at_s = time.monotonic()
    job.away |= set(names)
    job.signal([pid for name in names for pid in job.processes(name)], signal.SIGKILL)
    job.hold(job.away_s)
    job.away.clear()
    return Hurt(f"all but group {stays}, {job.away_s:g} s", names, at_s, time.monotonic())


# ------------------------------------------------------------------------------------------------ storage


def full_disk(job: DrillJob, dice: random.Random) -> Hurt:
    """Fills the disk of figures, samples and checkpoints."""
    assert job.disk
    return _filled(job, job.disk.run, "the run's folder")


def full_state(job: DrillJob, dice: random.Random) -> Hurt:
    """Fills the disk of the lighthouse's state, the groups' logs and TMPDIR."""
    assert job.disk
    return _filled(job, job.disk.groups, "state, logs, TMPDIR")


def _filled(job: DrillJob, place: Path, what: str) -> Hurt:
    at_s = time.monotonic()
    end_s = at_s + job.full_s
    while time.monotonic() < end_s:
        Disk.fill(place)
        job.hold(REFILL_S)
    Disk.free(place)
    return Hurt(f"{what}, {job.full_s:g} s", at_s=at_s, repaired_s=time.monotonic())


# ------------------------------------------------------------------------------------------------ a death at a bad moment


def joiner(job: DrillJob, dice: random.Random) -> Hurt:
    """A group dies, and again each time that its state begins to arrive."""
    name = pick(dice, job.live)
    diary, since_s = job.diaries[name], time.monotonic()
    job.signal(job.processes(name), signal.SIGKILL)
    for _ in range(JOINERS):
        job.until(f"a heal of group {name}", lambda s=since_s: any(x.heals for x in diary.since(s, "quorum")))
        since_s = time.monotonic()
        job.signal(job.processes(name), signal.SIGKILL)
    return Hurt(f"group {name}, {JOINERS} times", {name})


def writer(job: DrillJob, dice: random.Random) -> Hurt:
    """The group that saves dies while it does. Whoever takes the role over has to save what was due."""
    while True:
        name = job.writer
        at_s, step = killed_in_a_save(job, name)
        if not job.has(step):
            break
        job.together(time.monotonic())  # it was too late: the checkpoint stood
    before_the_next = range(step, step + job.config.checkpoint.interval)
    words = f"a checkpoint in place of that of step {step}, which group {name} died in"
    job.until(words, lambda: any(map(job.has, before_the_next)), SAVE_S)
    return Hurt(f"group {name}, step {step}", {name}, at_s)


def killed_in_a_save(job: DrillJob, name: str, after: int = -1) -> tuple[float, int]:
    """Kills that group as soon as it writes a checkpoint of a step behind `after`. When it did, and which step."""
    pids, stands = job.processes(name), {path.name for path in job.checkpoints.glob("step-*")}
    while True:
        job.look()
        for _ in range(20):  # a look takes longer than a small checkpoint
            for path in job.checkpoints.glob("step-*.partial-*"):
                step = int(path.name.partition(".")[0].removeprefix("step-"))
                if path.name not in stands and step > after:
                    job.signal(pids, signal.SIGKILL)
                    return time.monotonic(), step
            time.sleep(0.001)


# ------------------------------------------------------------------------------------------------ wrong peers


def wrong(job: DrillJob, dice: random.Random) -> Hurt:
    """The lighthouse starts again, and then a group comes whose model has other layers. It is to be refused, and nobody else to notice."""
    job.lighthouse.kill()
    job.lighthouse.communicate()
    job.start_lighthouse()
    other = job.config.model.hidden_dim * 2 or 96
    stray = job.group("wrong", f"--model.hidden_dim={other}", f"--job.dump_folder={job.folder / 'wrong'}")
    at_s = time.monotonic()
    stray.start()
    try:
        job.until("the end of a group with another model", lambda: stray.ended() is not None, WRONG_S)
        if stray.ended() != BAD_INPUT:
            raise job.failure(f"a group with another model ended with exit code {stray.ended()}, not {BAD_INPUT}")
    finally:
        stray.end()
    return Hurt(f"hidden_dim {other}", at_s=at_s)


# ------------------------------------------------------------------------------------------------ a cable between two groups


def pair_in_a_sum(job: DrillJob, dice: random.Random) -> Hurt:
    """The next rendezvous is at a third group, which both of them reach."""
    return _pair(job, dice, forming=False, at_store=False)


def pair_at_the_store(job: DrillJob, dice: random.Random) -> Hurt:
    return _pair(job, dice, forming=False, at_store=True)


def pair_forming(job: DrillJob, dice: random.Random) -> Hurt:
    return _pair(job, dice, forming=True, at_store=False)


def pair_forming_at_the_store(job: DrillJob, dice: random.Random) -> Hurt:
    return _pair(job, dice, forming=True, at_store=True)


def _pair(job: DrillJob, dice: random.Random, *, forming: bool, at_store: bool) -> Hurt:
    """Two groups lose each other's packets, and hear nothing of it, for job.pair_s. `forming`: just before a third one comes back, so that
    they connect anew; else in the steps that they make. `at_store`: one of the two is where the others meet first."""
    assert job.network
    names, hit = sorted(job.live, key=int), set[str]()
    quorum = max((job.diaries[name].quorum for name in names), key=lambda line: line.quorum_id)
    holders, number = list(quorum.participants), quorum.quorum_id + 1
    if forming:
        comes = pick(dice, names)
        holders, number, hit = [name for name in holders if name != comes], number + 1, {comes}
        killed_s = time.monotonic()
        job.signal(job.processes(comes), signal.SIGKILL)
        job.until(f"a start of group {comes}", lambda: job.diaries[comes].since(killed_s, "start"))
    store = holders[number % len(holders)]  # as ft/protocol/plan.py has it for rank 0
    others = [name for name in names if name != store]
    one, other = (store, pick(dice, others)) if at_store else sorted(dice.sample(others, 2), key=int)
    at_s = time.monotonic()
    job.network.part(one, other, True)
    job.hold(job.pair_s)
    job.network.part(one, other, False)
    repaired_s = time.monotonic()
    hit |= {name for name in (one, other) if not job.diaries[name].since(repaired_s - QUIET_S, "commit")}
    return Hurt(f"groups {one} and {other}, store at {store}", hit, at_s, repaired_s)
