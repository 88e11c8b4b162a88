"""Measures committed tokens per second of a job of three processes while processes are killed regularly, for three ways of recovery.

    make goodput PEER=PYTHON                                    all; updates docs/goodput.md
    python bench/goodput.py [--mb 4,100] [--minutes 2] [--rounds 2] [--startup-s 0] [--peer PYTHON] [--write FILE]
    python bench/goodput.py --no-kills [--rounds 9]        step time of configs/llama.toml with and without fault tolerance

Ways: ours, replica groups that continue; restart, DistributedDataParallel whose ranks all restart from the last checkpoint when one dies,
with a checkpoint every 1, 2, 5 or 10 seconds (after the first round only the two best of these); torchft, if PEER has torchft-nightly. Each
step "computes" for 50 ms on TOKENS tokens per process and all-reduces a gradient of the model's size. The ways alternate and get the same
kills: one SIGKILL every 20 seconds (the first after 10) of a process that has committed, unless it is the only one.

A restart is charged only for its own time: the other ranks are killed at once, without a failure detection. In all ways a killed process,
or one that exits by itself, is restarted at once, or after --startup-s, the time of a cluster to find a machine and start a container. The
clock starts when all have committed some steps together. Steps that a restart repeats count once. Everything runs on this machine, which
should be idle otherwise (Linux).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.drill_job import DrillJob
from bench.job import LOOPBACK, ROOT, JobSide, RecoveryJob, ReplicaGroup, rows
from bench.pairs import Failed, in_turns, machine, parser, ratio, renew, spread, table

PROCESSES, STEADY = 3, 20
EVERY_S, SEED = 20.0, 1  # seconds between kills; seed of the victims
WARM, STEPS = 5, 40  # steps of a turn without kills: warmup, and measured
TOKENS = 1000  # per process and step
CHECKPOINTS_S = (1, 2, 5, 10)
SETTINGS = {
    "ft": [f"--fault_tolerance.min_replica_size={PROCESSES}"],
    "ddp": [f"--parallelism.data_parallel_replicate_degree={PROCESSES}", "--parallelism.data_parallel_shard_degree=1"],
}
GOALS = {"restart": {4.0: 1.3, 100.0: 2.0}, "torchft": {4.0: 1.35, 100.0: 2.0}}  # ours / theirs, by megabytes
STARTUP_GOAL, CALM_GOAL = 2.0, 1.02

Ways = dict[str, JobSide]  # by name: ways of recovery
Victims = Callable[[list[ReplicaGroup]], list[ReplicaGroup]]  # returns the groups that may be killed


@dataclass
class GoodputRun:
    """Result of one turn."""

    seconds: float
    tokens: float
    kills: int
    ended: int = 0  # processes that exited by themselves
    redone: int = 0  # steps that a restart repeats, or whose gradients were dropped
    steps: int = field(default=0, repr=False)
    began_s: float = field(default=0.0, repr=False)  # when all had committed some steps together

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class KilledJob:
    """A running job whose processes are killed and restarted. With `checkpoint_s` all processes are killed with the victim, and restart
    from the last checkpoint; without it the others continue. `restart_at_s`: group -> time of its restart."""

    job: RecoveryJob
    startup_s: float = 0.0
    checkpoint_s: float = 0.0
    restart_at_s: dict[ReplicaGroup, float] = field(default_factory=dict)
    starts: int = 0

    def start(self) -> None:
        self.restart_at_s = dict.fromkeys(self.job.groups, 0.0)
        self.restart()

    def run(self, seconds: float, every_s: float, first_s: float, victims: Victims) -> GoodputRun:
        """Starts all groups; kills a victim every `every_s`, the first after `first_s`, the last at least `every_s` / 2 before the end."""
        self.start()
        groups = self.job.groups
        self.job.steps(STEADY, len(groups))
        began_s, first = time.monotonic(), max(group.step for group in groups)
        draw, due_s, kills, ended = random.Random(SEED), first_s, 0, 0
        while (now_s := time.monotonic() - began_s) < seconds:
            if due_s <= min(now_s, seconds - every_s / 2):
                due_s += every_s
                if candidates := victims(groups):
                    self.kill(draw.choice(candidates))
                    kills += 1
            for group in self.ended()[:1]:  # with checkpoints all are restarted
                self.kill(group)
                ended += 1
            self.restart()
            self.job.wait(0.02)
        steps, seconds = max(group.step for group in groups) - first, time.monotonic() - began_s
        return GoodputRun(seconds, self.tokens(first), kills, ended, self.redone(began_s), steps, began_s)

    def kill(self, victim: ReplicaGroup) -> None:
        killed = self.job.groups if self.checkpoint_s else [victim]
        for group in killed:
            group.kill()
        self.restart_at_s |= dict.fromkeys(killed, time.monotonic() + self.startup_s)

    def ended(self) -> list[ReplicaGroup]:
        """Returns the groups whose process has exited by itself."""
        return [group for group in self.job.groups if group not in self.restart_at_s and group.ended]

    def restart(self) -> None:
        """Restarts the groups whose time has come."""
        env, folder = dict[str, str](), self.job.folder
        ready = [group for group, due_s in self.restart_at_s.items() if due_s <= time.monotonic()]
        if ready and self.checkpoint_s:
            self.starts += 1
            env = {"RENDEZVOUS": str(folder / f"start-{self.starts}"), "CHECKPOINT": str(folder / "checkpoint.pt")}
            env["CHECKPOINT_S"] = str(self.checkpoint_s)
        for group in ready:
            del self.restart_at_s[group]
            group.start(**env)

    def tokens(self, step: int) -> float:
        """Returns the tokens of all steps after `step`; each step counts once, however often it was committed."""
        steps = {line.step: line.contributors for group in self.job.groups for line in group.since(0.0, "commit")}
        return TOKENS * sum(groups for number, groups in steps.items() if number > step)

    def redone(self, from_s: float) -> int:
        """Returns the number of steps whose gradients were dropped, or that the saving rank committed more than once."""
        steps = [line.step for line in self.job.groups[0].since(from_s, "commit")]
        aborts = (len(group.since(from_s, "abort")) for group in self.job.groups)
        return len(steps) - len(set(steps)) if self.checkpoint_s else max(aborts)


def running(groups: list[ReplicaGroup]) -> list[ReplicaGroup]:
    """Returns the groups that have committed since their start; [] if there is only one."""
    runs = [group for group in groups if group.runs]
    return runs if len(runs) > 1 else []


def storms(ways: Ways, megabytes: float, options: argparse.Namespace) -> tuple[list[list[str]], list[str]]:
    """Returns table rows and verdicts. Every other round is in reverse order; after the first only the two best restart ways are run."""
    runs: dict[str, list[GoodputRun]] = {name: [] for name in ways}
    turns = list(ways)
    for _ in range(options.rounds):
        for name in turns:
            try:
                with RecoveryJob(ways[name], PROCESSES, megabytes=megabytes) as job:
                    killed_job = KilledJob(job, options.startup_s, ways[name].checkpoint_s)
                    runs[name].append(killed_job.run(60 * options.minutes, EVERY_S, EVERY_S / 2, running))
                text = str(runs[name][-1])
            except Failed as error:
                text = str(error)
            print(f"{megabytes:g} MB, {name}: {text}", file=sys.stderr)
        rates = {name: max((run.rate for run in of), default=0.0) for name, of in runs.items()}
        best = sorted((name for name in turns if ways[name].checkpoint_s), key=rates.__getitem__, reverse=True)[:2]
        turns = [name for name in reversed(turns) if not ways[name].checkpoint_s or name in best]
    due = {name: options.rounds if name in turns else 1 for name in ways}
    cells = [[f"{megabytes:g} MB", name, *figures(runs[name], due[name])] for name in ways]
    return cells, verdicts(runs, megabytes, startup=options.startup_s > 0)


def figures(runs: Sequence[GoodputRun], rounds: int) -> list[str]:
    """Returns the cells of a way's row."""
    if not runs:
        return ["", "", "", "", f"{rounds} failed"]
    counts = ["/".join(str(getattr(run, what)) for run in runs) for what in ("kills", "ended", "redone")]
    failed = f"{rounds - len(runs)} failed" if len(runs) < rounds else ""
    return [spread([run.rate for run in runs], ",.0f"), *counts, failed]


def verdicts(runs: dict[str, list[GoodputRun]], megabytes: float, *, startup: bool) -> list[str]:
    """Compares ours with the best restart and with torchft, round by round, and with the goals."""
    rates = {name: [run.rate for run in of] for name, of in runs.items()}
    whole = len(rates["ours"])
    restarts = [name for name in rates if name.startswith("restart") and len(rates[name]) == whole > 0]
    best = max(restarts, key=lambda name: statistics.median(rates[name]), default="")
    goals = {best: STARTUP_GOAL if startup else GOALS["restart"].get(megabytes)}
    goals["torchft"] = None if startup else GOALS["torchft"].get(megabytes)
    said = []
    for name, goal in goals.items():
        if rates.get(name) and len(rates[name]) == whole:
            seen = ratio(rates["ours"], rates[name])
            words = f"; goal: at least {goal:g}x, " if goal else ""
            verdict = reached(goal / seen.low, goal / seen.median) if goal else ""
            said.append(f"{megabytes:g} MB, ours / {name}: {seen}{words}{verdict}")
    return said


def reached(worst: float, median: float) -> str:
    """Returns the verdict on a ratio with the bound 1. A bound inside the range of the rounds is not shown to be reached."""
    return "reached" if worst <= 1 else "not shown (within the range)" if median <= 1 else "missed"


def calm_step_s(way: str) -> float:
    """Returns the step time of the default job in three processes, seconds: three groups of one rank, or one without fault tolerance."""
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        argv = [str(ROOT / "configs" / "llama.toml"), f"--job.dump_folder={folder}", f"--training.steps={WARM + STEPS}"]
        argv += ["--validation.enable=false", "--checkpoint.enable=false", "--sample.tokens=0", *SETTINGS[way]]
        if way == "ft":
            with DrillJob(argv, PROCESSES, drilled=False) as job:
                job.ended()
        else:
            launch, env = [sys.executable, str(ROOT / "scripts" / "launch.py")], {**os.environ, "NPROC": str(PROCESSES)}
            subprocess.run([*launch, *argv], env=env, stdout=subprocess.DEVNULL, check=True)
        times = [row["time"] for row in rows(Path(folder, "llama")) if "loss" in row]
    return float(times[-1] - times[WARM - 1]) / STEPS


def calm(rounds: int) -> str:
    """Compares steps of the default job with and without fault tolerance, alternating."""
    os.environ.update(LOOPBACK, NPROC="1", CUDA_VISIBLE_DEVICES="")
    seconds = in_turns({way: partial(calm_step_s, way) for way in SETTINGS}, rounds)
    seen = ratio(seconds["ft"], seconds["ddp"])
    steps = ", ".join(f"{name} {1e3 * statistics.median(of):.1f} ms" for name, of in seconds.items())
    verdict = reached(seen.high / CALM_GOAL, seen.median / CALM_GOAL)
    text = f"{seen.median:.3f}x ({seen.low:.3f}-{seen.high:.3f})"
    return f"a step: {steps}\nwith / without fault tolerance: {text}; goal: at most {CALM_GOAL}x, {verdict}"


def main() -> None:
    options = parser(
        __doc__,
        peer=(str, "a Python that has torchft"),
        mb=("4,100", "sizes of the model"),
        minutes=(2.0, "of each turn"),
        rounds=(int, "measurements of each way; default 2, with --no-kills 9"),
        startup_s=(0.0, "seconds until a killed process is restarted"),
        no_kills=False,
        write=(Path, "page to update"),
    ).parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # cleanup ends all processes
    options.rounds = options.rounds or (9 if options.no_kills else 2)
    print(here := machine(), file=sys.stderr)
    if options.no_kills:
        text, heading = calm(options.rounds), "Without kills"
        what = f"{options.rounds} rounds of {STEPS} steps"
    else:
        ways = {"ours": JobSide("ours")}
        ways |= {f"restart, every {s} s": JobSide("restart", checkpoint_s=s) for s in CHECKPOINTS_S}
        ways |= {"torchft": JobSide("torchft", options.peer)} if options.peer else {}
        cells, said = list[list[str]](), list[str]()
        for megabytes in map(float, options.mb.split(",")):
            more, words = storms(ways, megabytes, options)
            cells, said = cells + more, said + words
        header = ["model", "method", "tokens/s", "kills", "ended", "steps redone", ""]
        text = table(header, cells) + "\n\n" + "\n".join(said)
        heading = f"With a start-up of {options.startup_s:g} s" if options.startup_s else "With kills"
        what = f"a kill every {EVERY_S:g} s, turns of {options.minutes:g} min, {options.rounds} rounds, steps of 50 ms"
    print(text)
    if options.write:
        renew(options.write, heading, f"{here}, {what}", f"```\n{text}\n```")


if __name__ == "__main__":
    main()
