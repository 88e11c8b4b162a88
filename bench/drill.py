"""Training that does not stop: a real job of replica groups is harmed in every way there is, and must come out as if nothing had been.

    python bench/drill.py CONFIG [--groups 4] [--minutes 3] [--faults kill,stop,...] [--seed 1] [--brief] [--no-twin] [overrides]
    NPROC=4 python bench/drill.py CONFIG --groups 2 --parallelism.tensor_parallel_degree 2        each group has four ranks

Starts a lighthouse and the groups, as run_replicas.sh does, and injects each fault of each kind (drill_faults.py) in an order and on
targets that the seed alone decides; the next one comes when all groups are together again. Rounds follow each other until the time is
over. Then the job is judged, and its loss compared with that of a twin that nothing happened to.

Exit code: 0 all holds; 2 bad input; 1 the rest. Leaves <run>/drill.svg, the loss with the faults on it, and <run>/drill.json. Kinds that
need a network of their own are left out, and named, where there is no root.
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
from scripts.plan import say
from scripts.plot_loss import draw, read

FOR_EVER = 1_000_000  # steps
FINISH, LAST = "finish", 60  # a job of its own; steps of a job whose writer dies in its last save
UNDER = {  # commands that become the one behind them
    "files": ["sh", "-c", 'ulimit -n 256; exec "$0" "$@"'],
    "shm": ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" "$@"'],
}
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
KEEP = "fault_tolerance.keep_global_batch"  # the run and its twin make the same steps, whichever groups are there


class DrillRequest(argparse.Namespace):
    """The command line, and `overrides`, `kinds`, `under`: a command that becomes the one behind it."""

    def argv(self, name: str, **last: int) -> list[str]:
        """Arguments of a job: our defaults, unless something else was asked for; no key may be given twice."""
        asked = {word.partition("=")[0].removeprefix("--") for word in self.overrides}
        fewest = {"fault_tolerance.min_replica_size": 2} if "capacity" in self.kinds else {}
        ours = DEFAULTS | fewest | {key.replace("__", "."): value for key, value in last.items()}
        if KEEP not in asked:
            most = self.groups + ("add" in self.kinds)  # groups that there are at any time: a slot for each
            ours |= {KEEP: "true", "fault_tolerance.slots_per_step": most}
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


def read_arguments(argv: Sequence[str]) -> DrillRequest:
    """Raises ValueError."""
    all_kinds = [*KINDS, FINISH]
    flags = parser(
        __doc__,
        groups=4,
        minutes=(3.0, "rounds of faults are begun for so long; one round at least"),
        faults=(",".join(all_kinds), f"default: {','.join(all_kinds)}"),
        seed=1,
        brief=(False, "one fault of each kind, where there are several"),
        no_twin=(False, "no job without faults to compare the loss with"),
        away=(AWAY_S, "seconds without a lighthouse, or capacity"),
        full=(FULL_S, "seconds that a disk is full"),
        pair=(PAIR_S, "seconds that two groups lose each other's packets"),
    )
    flags.allow_abbrev = False
    flags.add_argument("config")
    words = "groups and lighthouse have 256 descriptors; groups of child processes share 64 MB"
    flags.add_argument("--under", choices=UNDER, help=words)
    asked, overrides = flags.parse_known_args(argv, DrillRequest())
    asked.overrides = overrides
    asked.kinds = asked.faults.split(",")
    if unknown := [kind for kind in asked.kinds if kind not in all_kinds]:
        raise ValueError(f"--faults {','.join(unknown)}: there are {', '.join(all_kinds)}")
    if asked.groups < 1:
        raise ValueError(f"--groups {asked.groups}: a whole number from 1")
    if asked.under == "shm":
        asked.overrides.append("--fault_tolerance.process_group=baby_gloo")
    asked.under = UNDER.get(asked.under, [])
    return asked


def leave_out(asked: DrillRequest, cleanup: ExitStack) -> tuple[Network | None, bool, dict[str, str]]:
    """A network, where one is asked for and can be had; whether a disk is; the kinds that cannot be injected here, and why."""
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
        raise ValueError(f"no fault is left: {'; '.join(f'{kind}, {why}' for kind, why in left_out.items())}")
    if kinds == [FINISH]:
        print(verdict := finish(asked))
        return 0 if verdict.holds else 1
    job, failed = open_job(asked, "drill", network, cleanup if disk else None), ""
    with job:
        try:
            harm(job, asked, [kind for kind in kinds if kind != FINISH], incidents, began_s)
        except Failed as why:
            failed = str(why)
    verdicts = [Verdict("all groups came together after every fault", not failed, failed or f"{len(incidents)} faults")]
    if incidents:
        verdicts += faults.judge(job.run, job.diaries, incidents, job.config.fault_tolerance)
    if disk:
        verdicts.append(faults.figures_complete(job.run))
    if not asked.no_twin and not failed:
        slots = job.config.fault_tolerance.slots_per_step or asked.groups  # of a step
        steps = faults.steps_for(job.run, faults.looks(job.run)[-1][0], slots) + 2 * LOOK_STEPS
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
    """One fault after the other, then the end. Raises Failed; `incidents` are those until then."""
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
        before = len(faults.looks(job.run))
        job.until("a look at held-out text after the last fault", lambda: len(faults.looks(job.run)) > before)
    job.end()
    job.look()


def open_job(
    asked: DrillRequest, name: str, network: Network | None = None, disk: ExitStack | None = None, **last: int
) -> DrillJob:
    """A job in a new, empty run folder. `disk`: closes the job's own disks. Raises ValueError."""
    argv = asked.argv(name, **last)
    run = load(argv).run_folder
    shutil.rmtree(run, ignore_errors=True)
    own = disk.enter_context(closing(Disk(run))) if disk else None
    job = DrillJob(argv, asked.groups, network=network, disk=own, under=asked.under)
    job.away_s, job.full_s, job.pair_s = asked.away, asked.full, asked.pair
    return job


def finish(asked: DrillRequest) -> Verdict:
    """A job whose writer dies in its last save: nobody says that it has finished before that checkpoint stands."""
    name = "nobody finished before the last checkpoint stood"
    with open_job(asked, FINISH, training__steps=LAST, checkpoint__interval=LAST) as job:
        job.together()
        _, _, step = killed_in_a_save(job)

        def over() -> bool:
            for group, one in job.groups.items():
                finished = one.code == 0 or "finished" in one.log.read_text(errors="replace")
                if finished and not job.has(step):
                    raise Failed(f"group {group} says that it has finished, and there is no checkpoint of step {step}")
            return job.over

        try:
            if job.has(step):  # it was too late, and shows nothing
                raise Failed("the checkpoint stood before its writer was killed: try again")
            job.gone |= set(job.groups)  # they may end
            job.until("the end of all groups", over)
        except Failed as why:
            return Verdict(name, False, str(why))
    return Verdict(name, True, f"of step {step}, by another group than the one that was killed in it")


def figures(job: DrillJob, incident: Incident, began_s: float) -> list[str]:
    """Cells of its row, seconds but for the first two and the step."""
    next_s, gap_s = faults.next_commit_s(job.diaries, incident), faults.longest_gap_s(job.diaries, incident)
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
    told = {"rows": [dict(zip(header, line, strict=True)) for line in lines], "verdicts": [vars(v) for v in verdicts]}
    (job.run / "drill.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    if len(rows(job.run)) > 1:
        marks = [(incident.step, incident.kind) for incident in incidents]
        curve = draw(f"{job.run.name}: {len(incidents)} faults", *read(job.run / "metrics.jsonl"), marks)
        (job.run / "drill.svg").write_text(curve, encoding="utf-8")
        print(f"picture: {job.run / 'drill.svg'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
