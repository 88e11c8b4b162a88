"""Injects faults into a real job of replica groups, and checks that it trains on as a job without faults does.

    python bench/drill.py CONFIG [--groups 4] [--minutes 3] [--faults kill,stop,...] [--seed 1] [--brief] [--no-twin] [overrides]
    NPROC=4 python bench/drill.py CONFIG --groups 2 --parallelism.tensor_parallel_degree 2        each group has four ranks

Starts a lighthouse and the groups, as run_replicas.sh does, and injects each fault of each kind (drill_faults.py); the seed determines
order and targets. The next fault comes when all groups train together again. Rounds are repeated until the time is over. Then the event
logs are checked, and the loss is compared with that of a twin: the same job without faults.

Exit code: 0 all checks pass; 2 bad input; 1 other errors. Writes <run>/drill.svg, the loss with the faults marked, and <run>/drill.json.
Fault kinds that require network namespaces are left out, and named, if the user is not root.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench import drill_faults as faults
from bench.drill_faults import KINDS, Incident, Verdict, inject, killed_in_a_save, plan
from bench.drill_job import AWAY_S, FULL_S, PAIR_S, Disk, DrillJob, Network, no_disk
from bench.job import rows
from bench.pairs import Failed, machine, parser, table
from configs.load import load
from scripts.launch_settings import say
from scripts.plot_loss import draw, read

FOR_EVER = 1_000_000  # steps
FINISH, LAST = "finish", 60  # a kind with a separate job, whose writer dies in its last save; the steps of that job
UNDER = {  # command prefixes that limit a resource
    "files": ["sh", "-c", 'ulimit -n 256; exec "$0" "$@"'],
    "shm": ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" "$@"'],
}
VALIDATION_STEPS = 50
DEFAULTS = {  # overrides on the command line come after these
    "training.steps": FOR_EVER,
    "lr_scheduler.total_steps": FOR_EVER,  # also of the twin, which has fewer steps
    "validation.enable": "true",
    "validation.freq": VALIDATION_STEPS,
    "checkpoint.interval": 50,
    "fault_tolerance.digest_interval": 10,
    "metrics.enable_tensorboard": "false",
}
KEEP = "fault_tolerance.keep_global_batch"  # makes steps of the run and of its twin equal, whichever groups are alive


class DrillRequest(argparse.Namespace):
    """The command line, and `overrides`, `kinds`, and `under`, a command prefix."""

    def argv(self, name: str, **last: int) -> list[str]:
        """Returns the arguments of a job: DEFAULTS and `last`, except keys that the user has given, as no key may be given twice."""
        asked = {word.partition("=")[0].removeprefix("--") for word in self.overrides}
        fewest = {"fault_tolerance.min_replica_size": 2} if "capacity" in self.kinds else {}
        ours = DEFAULTS | fewest | {key.replace("__", "."): value for key, value in last.items()}
        if KEEP not in asked:
            most = self.groups + ("add" in self.kinds)  # maximum number of groups at any time, a slot for each
            ours |= {KEEP: "true", "fault_tolerance.slots_per_step": most}
        defaults = [f"--{key}={value}" for key, value in ours.items() if key not in asked]
        return [self.config, *defaults, *self.overrides, f"--job.name={Path(self.config).stem}-{name}-{self.seed}"]


def main(argv: Sequence[str]) -> int:
    try:
        asked = read_arguments(argv)
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # cleanup ends all processes
        with ExitStack() as cleanup:
            return drill(asked, cleanup)
    except ValueError as error:
        print(f"pharos: {error}", file=sys.stderr)
        return 2
    except RuntimeError as failed:  # of the job, or of this machine
        print(f"drill: {failed}", file=sys.stderr)
        return 1


def read_arguments(argv: Sequence[str]) -> DrillRequest:
    """Raises ValueError."""
    all_kinds = [*KINDS, FINISH]
    flags = parser(
        __doc__,
        groups=4,
        minutes=(3.0, "new rounds of faults begin within this time; at least one round"),
        faults=(",".join(all_kinds), f"default: {','.join(all_kinds)}"),
        seed=1,
        brief=(False, "only the first variant of each kind"),
        no_twin=(False, "no twin: do not compare the loss with a job without faults"),
        away=(AWAY_S, "seconds without lighthouse, or below min_replica_size"),
        full=(FULL_S, "seconds with a full disk"),
        pair=(PAIR_S, "seconds in which packets between two groups are dropped"),
    )
    flags.allow_abbrev = False
    flags.add_argument("config")
    text = "files: 256 file descriptors per process; shm: baby_gloo with 64 MB of shared memory per group"
    flags.add_argument("--under", choices=UNDER, help=text)
    asked, overrides = flags.parse_known_args(argv, DrillRequest())
    asked.overrides = overrides
    asked.kinds = asked.faults.split(",")
    if unknown := [kind for kind in asked.kinds if kind not in all_kinds]:
        raise ValueError(f"--faults {','.join(unknown)}: must be among {', '.join(all_kinds)}")
    if asked.groups < 1:
        raise ValueError(f"--groups {asked.groups}: must be a whole number from 1")
    if asked.under == "shm":
        asked.overrides.append("--fault_tolerance.process_group=baby_gloo")
    asked.under = UNDER.get(asked.under, [])
    return asked


def leave_out(asked: DrillRequest, cleanup: ExitStack) -> tuple[Network | None, bool, dict[str, str]]:
    """Returns a network (None: not needed, or not possible), whether disks are needed, and kinds that cannot be injected, with reasons."""
    kinds = {kind: KINDS[kind] for kind in asked.kinds if kind != FINISH}
    out = {name: f"needs {kind.least} groups" for name, kind in kinds.items() if asked.groups < kind.least}
    wanting = [name for name, kind in kinds.items() if kind.network and name not in out]
    disk, network = [name for name, kind in kinds.items() if kind.disk and name not in out], None
    try:
        network = cleanup.enter_context(closing(Network())) if wanting else None
    except RuntimeError as why:
        out |= dict.fromkeys(wanting, str(why))
    if disk and (why_not := no_disk()):
        out |= dict.fromkeys(disk, why_not)
    return network, any(name not in out for name in disk), out


def drill(asked: DrillRequest, cleanup: ExitStack) -> int:
    began_s, incidents = time.monotonic(), list[Incident]()
    network, disk, left_out = leave_out(asked, cleanup)
    kinds = [kind for kind in asked.kinds if kind not in left_out]
    if not kinds:
        raise ValueError(f"no fault can be injected: {'; '.join(f'{kind}, {why}' for kind, why in left_out.items())}")
    if kinds == [FINISH]:
        print(verdict := finish(asked))
        return 0 if verdict.holds else 1
    job, failed = open_job(asked, "drill", network, cleanup if disk else None), ""
    with job:
        try:
            harm(job, asked, [kind for kind in kinds if kind != FINISH], incidents, began_s)
        except Failed as why:
            failed = str(why)
    verdicts = [Verdict("all groups were together after every fault", not failed, failed or f"{len(incidents)} faults")]
    if incidents:
        verdicts += faults.judge(job.run, job.event_logs, incidents, job.config.fault_tolerance)
    if disk:
        verdicts.append(faults.figures_complete(job.run))
    if not asked.no_twin and not failed:
        slots = job.config.fault_tolerance.slots_per_step or asked.groups  # of a step
        steps = faults.steps_for(job.run, faults.validations(job.run)[-1][0], slots) + 2 * VALIDATION_STEPS
        try:
            with open_job(asked, "twin", training__steps=steps) as twin:
                twin.ended()
            verdicts.append(faults.loss_of_twin(job.run, twin.run))
        except Failed as why:
            verdicts.append(Verdict(faults.AS_GOOD, False, f"the twin: {why}"))
    if FINISH in kinds:
        verdicts.append(finish(asked))
    report(asked, job, incidents, left_out, verdicts, began_s)
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def harm(job: DrillJob, asked: DrillRequest, kinds: Sequence[str], incidents: list[Incident], began_s: float) -> None:
    """Injects one fault after the other, then ends the job. Appends to `incidents`, also if it raises Failed."""
    dice = random.Random(asked.seed)
    job.together(began_s)
    say(f"{len(job.live)} groups of {job.ranks} train together after {time.monotonic() - began_s:.0f} s")
    variants = plan(kinds, dice, brief=asked.brief)
    while variants:
        variant = variants.pop(0)
        try:
            incidents.append(inject(job, variant, dice))
        except Failed as why:
            raise Failed(f"{variant}: {why}") from None
        kind, target, at, step, next_, gap, back = figures(job, incidents[-1], began_s)
        where = f"{at:>6} s, step {step}: {kind}, {target}"
        say(f"{where}: next commit after {next_} s, longest gap {gap} s, all back after {back} s")
        if not variants and time.monotonic() - began_s < 60 * asked.minutes:
            variants = plan(kinds, dice, first=False, brief=asked.brief)
    if job.config.validation.enable:
        before = len(faults.validations(job.run))
        job.until("a validation after the last fault", lambda: len(faults.validations(job.run)) > before)
    job.end()
    job.look()


def open_job(
    asked: DrillRequest, name: str, network: Network | None = None, disk: ExitStack | None = None, **last: int
) -> DrillJob:
    """Starts a job in an empty run folder. `disk`: the stack that closes the job's disks; None: no disks. Raises ValueError."""
    argv = asked.argv(name, **last)
    run = load(argv).run_folder
    shutil.rmtree(run, ignore_errors=True)
    own = disk.enter_context(closing(Disk(run))) if disk else None
    job = DrillJob(argv, asked.groups, network=network, disk=own, under=asked.under)
    job.away_s, job.full_s, job.pair_s = asked.away, asked.full, asked.pair
    return job


def finish(asked: DrillRequest) -> Verdict:
    """Runs a job whose writer dies in its last save: no group may finish before that checkpoint is complete."""
    name = "no group finished before the last checkpoint was complete"
    with open_job(asked, FINISH, training__steps=LAST, checkpoint__interval=LAST) as job:
        job.together()
        _, _, step = killed_in_a_save(job)

        def over() -> bool:
            for group, one in job.groups.items():
                finished = one.code == 0 or "finished" in one.log.read_text(errors="replace")
                if finished and not job.has(step):
                    raise Failed(f"group {group} reports that it has finished, without a checkpoint of step {step}")
            return job.over

        try:
            if job.has(step):  # the kill was too late
                raise Failed("the checkpoint was complete before its writer was killed: try again")
            job.gone |= set(job.groups)  # groups that may end
            job.until("the end of all groups", over)
        except Failed as why:
            return Verdict(name, False, str(why))
    return Verdict(name, True, f"that of step {step} was saved by a different group than the killed one")


def figures(job: DrillJob, incident: Incident, began_s: float) -> list[str]:
    """Returns the cells of the incident's row: kind, target and step, otherwise seconds."""
    next_s, gap_s = faults.next_commit_s(job.event_logs, incident), faults.longest_gap_s(job.event_logs, incident)
    at_s, back_s = f"{incident.at_s - began_s:.1f}", f"{incident.back_s - incident.at_s:.1f}"
    return [incident.kind, incident.target, at_s, str(incident.step), f"{next_s:.2f}", f"{gap_s:.2f}", back_s]


def report(
    asked: DrillRequest, job: DrillJob, incidents: Sequence[Incident], left_out: dict[str, str],
    verdicts: Sequence[Verdict], began_s: float,
) -> None:  # fmt: skip
    header = ["fault", "target", "at s", "step", "next commit s", "longest gap s", "all back s"]
    lines = [figures(job, incident, began_s) for incident in incidents]
    print(table(header, lines))
    for kind, why in left_out.items():
        print(f"left out: {kind}, {why}")
    seen = f"{len(incidents)} faults in {job.step} steps; {machine()}"
    print(f"{asked.groups} groups of {job.ranks}, seed {asked.seed}: {seen}")
    for verdict in verdicts:
        print(verdict)
    result = {"rows": [dict(zip(header, line, strict=True)) for line in lines], "verdicts": [vars(v) for v in verdicts]}
    (job.run / "drill.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    if len(rows(job.run)) > 1:
        marks = [(incident.step, incident.kind) for incident in incidents]
        curve = draw(f"{job.run.name}: {len(incidents)} faults", *read(job.run / "metrics.jsonl"), marks)
        (job.run / "drill.svg").write_text(curve, encoding="utf-8")
        print(f"picture: {job.run / 'drill.svg'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
