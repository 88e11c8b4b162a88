"""Training that does not stop: a real job of replica groups is harmed in every way there is, and must come out as if nothing had been.

    python proofs/drill.py CONFIG [--groups 4] [--minutes 3] [--faults kill,stop,...] [--seed 1] [--brief] [--no-twin] [overrides]
    NPROC=4 python proofs/drill.py CONFIG --groups 2 --parallelism.tensor_parallel_degree 2        each group has four ranks

Starts a lighthouse and the groups, as run_replicas.sh does, and injects each fault of each kind (drill_faults.py) in an order and on
targets that the seed alone decides; the next one comes when all groups are together again. Rounds follow each other until the time is
over. Then:

- survivors went on: no group that a fault did not hit died, threw a step away or passed over one;
- replicas are bitwise equal: the weights of every rank after every step that two groups have in common;
- the ledger is exact: every sample is in exactly one step (scripts/samples.py);
- the loss on held-out text is within 0.02 nats of that of a twin that nothing happened to, after as many tokens.

Exit code: 0 all of that holds; 2 bad input; 1 the rest. Leaves <run>/drill.svg, the loss with the faults on it, and <run>/drill.json. Kinds
that need a network of their own are left out, and named, where there is no root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from benchmarks.pairs import table
from proofs import drill_net, drill_rules
from proofs.drill_faults import KINDS, Incident, inject, plan
from proofs.drill_job import Failed, Job
from proofs.drill_rules import Verdict
from scripts.plot_loss import draw, read
from scripts.replicas import say

FOR_EVER = 1_000_000  # steps
LOOK_STEPS = 50
DEFAULTS = {  # overrides on the command line come after these
    "training.steps": FOR_EVER,
    "lr_scheduler.total_steps": FOR_EVER,  # the same for the twin, which ends
    "validation.enable": "true",
    "validation.freq": LOOK_STEPS,
    "checkpoint.interval": 50,
    "fault_tolerance.digest_interval": 10,
    "metrics.enable_tensorboard": "false",
}
KEEP = "fault_tolerance.keep_global_batch"  # the run and its twin make the same steps, whoever is there: equal things are compared


@dataclass(frozen=True)
class Asked:
    config: str
    overrides: list[str]
    groups: int
    minutes: float
    kinds: list[str]
    seed: int
    brief: bool
    twin: bool

    @property
    def most_groups(self) -> int:
        """That there are at any time: each of them is dealt a slot in every step."""
        return self.groups + ("add" in self.kinds)

    def argv(self, name: str, **last: int) -> list[str]:
        """Of a job: our defaults, unless something else was asked for; no key may be given twice."""
        asked = {word.partition("=")[0].removeprefix("--") for word in self.overrides}
        ours = DEFAULTS | {key.replace("__", "."): value for key, value in last.items()}
        if KEEP not in asked:
            ours |= {KEEP: "true", "fault_tolerance.slots_per_step": self.most_groups}
        defaults = [f"--{key}={value}" for key, value in ours.items() if key not in asked]
        return [self.config, *defaults, *self.overrides, f"--job.name={Path(self.config).stem}-{name}-{self.seed}"]


def main(argv: Sequence[str]) -> int:
    try:
        asked = read_arguments(argv)
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # whatever was started ends, too
        with ExitStack() as cleanup:
            return drill(asked, cleanup)
    except ValueError as error:
        print(f"pharos: {error}", file=sys.stderr)
        return 2
    except RuntimeError as failed:  # of the job, or of this machine
        print(f"drill: {failed}", file=sys.stderr)
        return 1


def read_arguments(argv: Sequence[str]) -> Asked:
    """Raises ValueError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="rounds of faults are begun for so long; one round at least"
    )
    parser.add_argument("--faults", default=",".join(KINDS), help=f"default: {','.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--brief", action="store_true", help="one fault of each kind, where there are several")
    parser.add_argument("--no-twin", action="store_true", help="no job without faults to compare the loss with")
    given, overrides = parser.parse_known_args(argv)
    kinds = given.faults.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"--faults {','.join(unknown)}: there are {', '.join(KINDS)}")
    if given.groups < 1:
        raise ValueError(f"--groups {given.groups}: a whole number from 1")
    return Asked(
        given.config, overrides, given.groups, given.minutes, kinds, given.seed, given.brief, not given.no_twin
    )


def leave_out(asked: Asked, cleanup: ExitStack) -> tuple[drill_net.Network | None, dict[str, str]]:
    """A network, where one is asked for and can be had; the kinds that cannot be injected here, and why."""
    out = {kind: f"needs {KINDS[kind].least} groups" for kind in asked.kinds if asked.groups < KINDS[kind].least}
    wanting = [kind for kind in asked.kinds if KINDS[kind].network and kind not in out]
    if not wanting:
        return None, out
    try:
        network = drill_net.Network()
    except RuntimeError as why:
        return None, out | dict.fromkeys(wanting, str(why))
    cleanup.callback(network.close)
    return network, out


# ------------------------------------------------------------------------------------------------ the job and its twin


def drill(asked: Asked, cleanup: ExitStack) -> int:
    began_s, incidents = time.monotonic(), list[Incident]()
    network, left_out = leave_out(asked, cleanup)
    kinds = [kind for kind in asked.kinds if kind not in left_out]
    if not kinds:
        raise ValueError(f"no fault is left: {'; '.join(f'{kind}, {why}' for kind, why in left_out.items())}")
    job, failed = open_job(asked, "drill", network), ""
    with job:
        try:
            harm(job, asked, kinds, incidents, began_s)
        except Failed as why:
            failed = str(why)
    verdicts = [Verdict("all groups came together after every fault", not failed, failed or f"{len(incidents)} faults")]
    if incidents:
        verdicts.append(drill_rules.survivors_went_on(job.diaries, incidents, drill_rules.trained_by(job.run)))
        verdicts.append(drill_rules.bitwise_equal(job.diaries, incidents))
        verdicts.append(drill_rules.ledger_exact(job.run))
    if asked.twin and not failed:
        slots = job.config.fault_tolerance.slots_per_step or asked.groups  # of a step
        try:
            verdicts.append(drill_rules.loss_of_twin(job.run, run_twin(asked, job.run, slots)))
        except Failed as why:
            verdicts.append(Verdict(drill_rules.AS_GOOD, False, f"the twin: {why}"))
    report(asked, job, incidents, left_out, verdicts, began_s)
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def harm(job: Job, asked: Asked, kinds: Sequence[str], incidents: list[Incident], began_s: float) -> None:
    """One fault after the other, then the end. Raises Failed; `incidents` are those until then."""
    dice = random.Random(asked.seed)
    job.together(began_s)
    say(f"{len(job.live)} groups of {job.ranks} train together after {time.monotonic() - began_s:.0f} s")
    variants = plan(kinds, dice, brief=asked.brief)
    while variants:
        incidents.append(inject(job, variants.pop(0), dice))
        tell(job, incidents[-1], began_s)
        if not variants and time.monotonic() - began_s < 60 * asked.minutes:
            variants = plan(kinds, dice, first=False, brief=asked.brief)
    before = len(drill_rules.looks(job.run))
    job.until("a look at held-out text after the last fault", lambda: len(drill_rules.looks(job.run)) > before)
    job.end()
    job.look()


def open_job(asked: Asked, name: str, network: drill_net.Network | None, **last: int) -> Job:
    """In a folder of its own, of which nothing was before. Raises ValueError."""
    from configs.load import load

    argv = asked.argv(name, **last)
    shutil.rmtree(load(argv).run_folder, ignore_errors=True)
    return Job(argv, asked.groups, network=network)


def run_twin(asked: Asked, run: Path, slots: int) -> Path:
    """A job that nothing happens to, until it has seen as many tokens; its folder."""
    tokens = drill_rules.looks(run)[-1][0]
    steps = drill_rules.steps_for(run, tokens, slots) + 2 * LOOK_STEPS
    with open_job(asked, "twin", None, training__steps=steps) as job:
        job.ended()
    return job.run


# ------------------------------------------------------------------------------------------------ what is said


def tell(job: Job, incident: Incident, began_s: float) -> None:
    next_s, gap_s = drill_rules.next_commit_s(job.diaries, incident), drill_rules.longest_gap_s(job.diaries, incident)
    say(
        f"{incident.at_s - began_s:6.1f} s, step {incident.step}: {incident.kind}, {incident.target}: next commit after {next_s:.2f} s, "
        f"longest gap {gap_s:.2f} s, all back after {incident.back_s - incident.at_s:.1f} s"
    )


def report(
    asked: Asked,
    job: Job,
    incidents: Sequence[Incident],
    left_out: dict[str, str],
    verdicts: Sequence[Verdict],
    began_s: float,
) -> None:
    header = ["fault", "target", "at s", "step", "next commit s", "longest gap s", "all back s"]
    lines = [
        [
            incident.kind,
            incident.target,
            f"{incident.at_s - began_s:.1f}",
            str(incident.step),
            f"{drill_rules.next_commit_s(job.diaries, incident):.2f}",
            f"{drill_rules.longest_gap_s(job.diaries, incident):.2f}",
            f"{incident.back_s - incident.at_s:.1f}",
        ]
        for incident in incidents
    ]
    print(table(header, lines))
    for kind, why in left_out.items():
        print(f"left out: {kind}, {why}")
    cores, load = os.cpu_count(), os.getloadavg()[0]
    steps = max(diary.step for diary in job.diaries.values())
    print(
        f"{asked.groups} groups of {job.ranks}, seed {asked.seed}: {len(incidents)} faults in {steps} steps; {cores} cores, load {load:.1f}"
    )
    for verdict in verdicts:
        print(verdict)
    told = {"rows": [dict(zip(header, line, strict=True)) for line in lines], "verdicts": [vars(v) for v in verdicts]}
    (job.run / "drill.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    if len(drill_rules.rows(job.run)) > 1:
        marks = [(incident.step, incident.kind) for incident in incidents]
        curve = draw(f"{job.run.name}: {len(incidents)} faults", *read(job.run / "metrics.jsonl"), marks)
        (job.run / "drill.svg").write_text(curve, encoding="utf-8")
        print(f"picture: {job.run / 'drill.svg'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
