"""The work that a job of three processes gets done while one of them is killed every now and then: tokens committed per second, three ways.

    make goodput PEER=PYTHON                                    all of it (1 hour 20 minutes); renews docs/goodput.md
    python bench/goodput.py [--mb 4,100] [--every 20] [--minutes 2] [--rounds 2] [--startup-s 0] [--peer PYTHON] [--write FILE]
    python bench/goodput.py --no-kills [--rounds 9]        a step of configs/llama.toml with fault tolerance, beside one without

Ways: ours, replica groups that go on; restart, DistributedDataParallel whose ranks all start again from the last checkpoint when one dies,
with a checkpoint every 1, 2, 5 or 10 seconds (after the first round, the two best of these); torchft, where PEER has torchft-nightly.
Each step "computes" for --step-ms on TOKENS tokens a process and sums a gradient as large as the model. They take turns (--rounds), with
the same kills: one SIGKILL every --every seconds (the first after half of it, so that a turn has its share) of one that runs, by --seed,
but never of the only one that does.

Nothing is held against a restart but what it takes: the other ranks are killed at once, as if they knew. In every way a killed process is
started again at once, or after --startup-s: what a cluster takes to find a machine and start a container. So is one that ends by itself.
The clock starts when all have committed some steps together. Steps that a restart took back do not count. Everything runs on this machine,
to be idle otherwise (Linux).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.job import LOOPBACK, ROOT, JobSide, RecoveryJob, ReplicaGroup
from bench.pairs import Failed, Worker, ask_all, in_turns, parser, ratio, serve, spread, table

PROCESSES, STEADY = 3, 20
TOKENS = 1000  # of a process in a step
CHECKPOINTS_S = (1, 2, 5, 10)
SETTINGS = {
    "ft": ["--fault_tolerance.enable=true", f"--fault_tolerance.min_replica_size={PROCESSES}"],
    "ddp": [f"--parallelism.data_parallel_replicate_degree={PROCESSES}", "--parallelism.data_parallel_shard_degree=1"],
}
GOALS = {"restart": {4: 1.3, 100: 2.0}, "torchft": {4: 1.35, 100: 2.0}}  # ours by theirs, by megabytes
STARTUP_GOAL, CALM_GOAL = 2.0, 1.02


Ways = dict[str, JobSide]  # how the job goes on after a kill


@dataclass
class GoodputRun:
    """The result of one turn of a way."""

    seconds: float
    tokens: float
    kills: int
    ended: int = 0  # processes that ended by themselves
    redone: int = 0  # steps that were taken back, or whose gradients were thrown away

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Storm:
    """A job that runs, and those of its processes that are to be started again. With checkpoints, every `checkpoint_s`, all of them end
    with one that is killed, and start again from the last; without, the others go on."""

    job: RecoveryJob
    startup_s: float
    checkpoint_s: float = 0.0
    due: list[tuple[float, ReplicaGroup]] = field(default_factory=list)
    starts: int = 0

    def start(self) -> None:
        self.due = [(time.monotonic(), group) for group in self.job.groups]
        self.restart()

    def kill(self, victim: ReplicaGroup) -> None:
        killed = self.job.groups if self.checkpoint_s else [victim]
        for group in killed:
            group.kill()
        due_s = time.monotonic() + self.startup_s
        self.due += [(due_s, group) for group in killed]

    def ended(self) -> list[ReplicaGroup]:
        """Processes that nobody killed, and that do not run."""
        waiting = [group for _, group in self.due]
        return [group for group in self.job.groups if group not in waiting and group.ended]

    def restart(self) -> None:
        """Starts again the groups whose time has come."""
        now_s, env, folder = time.monotonic(), dict[str, str](), self.job.folder
        ready = [group for due_s, group in self.due if due_s <= now_s]
        self.due = [waits for waits in self.due if waits[0] > now_s]
        if ready and self.checkpoint_s:
            self.starts += 1
            env = {"RENDEZVOUS": str(folder / f"start-{self.starts}"), "CHECKPOINT": str(folder / "checkpoint.pt")}
            env["CHECKPOINT_S"] = str(self.checkpoint_s)
        for group in ready:
            group.start(**env)

    def tokens(self, step: int) -> float:
        """Tokens of the steps after this one; each once, however many have logged it, and however often."""
        steps = {line.step: line.contributors for group in self.job.groups for line in group.since(0.0, "commit")}
        return TOKENS * sum(groups for number, groups in steps.items() if number > step)

    def redone(self, from_s: float) -> int:
        """Steps whose gradients were thrown away, or that the rank that saves has committed more than once."""
        steps = [line.step for line in self.job.groups[0].since(from_s, "commit")]
        aborts = (len(group.since(from_s, "abort")) for group in self.job.groups)
        return len(steps) - len(set(steps)) if self.checkpoint_s else max(aborts)


def storm(side: JobSide, megabytes: float, options: argparse.Namespace) -> GoodputRun:
    """Raises Failed."""
    draw = random.Random(options.seed)
    with RecoveryJob(side, PROCESSES, megabytes=megabytes, step_ms=options.step_ms) as job:
        made = Storm(job, options.startup_s, side.checkpoint_s)
        made.start()
        job.steps(STEADY, PROCESSES)
        began_s, kills, own, step = time.monotonic(), 0, 0, max(group.step for group in job.groups)
        end_s, next_s = began_s + 60 * options.minutes, began_s + options.every / 2
        while (now_s := time.monotonic()) < end_s:
            if now_s >= next_s:
                next_s += options.every
                running = [group for group in job.groups if group.runs]
                if len(running) > 1:
                    made.kill(draw.choice(running))
                    kills += 1
            for group in made.ended()[:1]:  # of a restart all begin again
                made.kill(group)
                own += 1
            made.restart()
            job.wait(0.02)
        return GoodputRun(time.monotonic() - began_s, made.tokens(step), kills, own, made.redone(began_s))


def storms(ways: Ways, megabytes: float, options: argparse.Namespace) -> tuple[list[list[str]], list[str]]:
    """Rows of a table, and the goals in words. Every other round runs backwards; of the restarts, the two best of the first go on."""
    runs: dict[str, list[GoodputRun]] = {name: [] for name in ways}
    turns = list(ways)
    for _ in range(options.rounds):
        for name in turns:
            try:
                runs[name].append(storm(ways[name], megabytes, options))
                said = str(runs[name][-1])
            except Failed as error:
                said = str(error)
            print(f"{megabytes:g} MB, {name}: {said}", file=sys.stderr)
        rates = {name: max((run.rate for run in of), default=0.0) for name, of in runs.items()}
        best = sorted((name for name in turns if ways[name].checkpoint_s), key=rates.__getitem__, reverse=True)[:2]
        turns = [name for name in reversed(turns) if not ways[name].checkpoint_s or name in best]
    due = {name: options.rounds if name in turns else 1 for name in ways}
    rows = [[f"{megabytes:g} MB", name, *figures(runs[name], due[name])] for name in ways]
    return rows, verdicts(runs, megabytes, startup=options.startup_s > 0)


def figures(runs: Sequence[GoodputRun], rounds: int) -> list[str]:
    """Cells of a way's row."""
    if not runs:
        return ["", "", "", "", f"{rounds} failed"]
    counts = ["/".join(str(getattr(run, what)) for run in runs) for what in ("kills", "ended", "redone")]
    failed = f"{rounds - len(runs)} failed" if len(runs) < rounds else ""
    return [spread([run.rate for run in runs], ",.0f"), *counts, failed]


def verdicts(runs: dict[str, list[GoodputRun]], megabytes: float, *, startup: bool) -> list[str]:
    """Ours beside the best restart and torchft, round by round, and whether it is as much as was to be reached."""
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
            words = f"; at least {goal:g}x was to be reached: " if goal else ""
            verdict = reached(goal / seen.low, goal / seen.median) if goal else ""
            said.append(f"{megabytes:g} MB, ours by {name}: {seen}{words}{verdict}")
    return said


def reached(worst: float, median: float) -> str:
    """The verdict on the bound: at most 1 is to be. One that lies inside the range of the rounds is not shown to be reached."""
    return "reached" if worst <= 1 else "not shown, for it lies within the range" if median <= 1 else "missed"


@contextmanager
def calm_job(side: str) -> Iterator[list[Worker]]:
    """The default job in three processes: with ft three groups of one rank and a lighthouse, with ddp one group of three."""
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder, ExitStack() as cleanup:
        env = {**LOOPBACK, "NUM_REPLICA_GROUPS": str(PROCESSES), "CUDA_VISIBLE_DEVICES": ""}
        if side == "ft":
            from ft.compat.lighthouse_server import LighthouseServer

            lighthouse = LighthouseServer("127.0.0.1:0", PROCESSES)
            cleanup.callback(lighthouse.shutdown)
            env["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
            places = [{"REPLICA_GROUP_ID": str(number)} for number in range(PROCESSES)]
        else:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = str(free.getsockname()[1])
            env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(PROCESSES)}
            places = [{"RANK": str(number), "LOCAL_RANK": str(number)} for number in range(PROCESSES)]
        command = [sys.executable, __file__, "--worker", side, folder]
        team = [cleanup.enter_context(closing(Worker(side, command, {**env, **place}))) for place in places]
        for worker in team:
            worker.answer()
        yield team


def calm_rank(side: str, folder: str) -> None:
    from configs.load import load
    from ft.config import Environment
    from parallelisms.distributed import launched_rank, process_group
    from train import Run
    from training.log import Log
    from training.signals import Signals

    # as long as it takes, without a pause: validation and checkpoints are not in train_step
    settings = [f"--job.dump_folder={folder}", "--training.steps=1000000", *SETTINGS[side]]
    config = load([str(ROOT / "configs" / "llama.toml"), *settings])
    log = Log(global_rank=launched_rank(), stream=sys.stderr)
    log.attach_to("pharos")
    with closing(Signals(log=log)) as signals, process_group(config.comm) as world, ExitStack() as cleanup:
        step = Run(config, Environment.read(os.environ), world, signals, log, cleanup).train_step

        def steps(count: int, rank: int = 0) -> dict[str, float]:
            """Seconds of one."""
            began = time.perf_counter()
            for _ in range(count):
                while not step():
                    pass
            return {"s": (time.perf_counter() - began) / count}

        serve(SimpleNamespace(steps=steps), steps(1))


def calm(options: argparse.Namespace) -> list[str]:
    """Steps of the default job in three processes, with and without fault tolerance, in turns; of each the slowest process'."""
    with calm_job("ft") as ft, calm_job("ddp") as ddp:

        def slowest(team: list[Worker]) -> float:
            return max(answer["s"] for answer in ask_all(team, "steps", count=options.steps))

        seconds = in_turns({"ft": partial(slowest, ft), "ddp": partial(slowest, ddp)}, options.rounds, warm=2)
    seen = ratio(seconds["ft"], seconds["ddp"])
    steps = ", ".join(f"{name} {1e3 * statistics.median(of):.1f} ms" for name, of in seconds.items())
    verdict = reached(seen.high / CALM_GOAL, seen.median / CALM_GOAL)
    text = f"{seen.median:.3f}x ({seen.low:.3f}-{seen.high:.3f})"
    return [
        f"a step: {steps}",
        f"with fault tolerance by without: {text}; at most {CALM_GOAL}x was to be reached: {verdict}",
    ]


def main() -> None:
    options = parser(
        __doc__,
        peer=(str, "a Python that has torchft"),
        mb=("4,100", "sizes of the model"),
        every=(20.0, "seconds between kills"),
        minutes=(2.0, "of each turn"),
        rounds=(int, "turns of each way, default 2; --no-kills: 9"),
        seed=(1, "of the victims"),
        step_ms=50.0,
        startup_s=(0.0, "until a killed process is started again"),
        no_kills=False,
        steps=(20, "of a turn, with --no-kills"),
        write=(Path, "adds the figures to this page"),
    ).parse_args()
    options.rounds = options.rounds or (9 if options.no_kills else 2)
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(machine, file=sys.stderr)
    if options.no_kills:
        text, heading = "\n".join(calm(options)), "Without kills"
        what = f"{machine}, {options.rounds} rounds of {options.steps} steps"
    else:
        ways = {"ours": JobSide("ours")}
        ways |= {f"restart, every {s} s": JobSide("restart", checkpoint_s=s) for s in CHECKPOINTS_S}
        ways |= {"torchft": JobSide("torchft", options.peer)} if options.peer else {}
        rows, said = list[list[str]](), list[str]()
        for megabytes in map(float, options.mb.split(",")):
            more, words = storms(ways, megabytes, options)
            rows, said = rows + more, said + words
        header = ["model", "way", "tokens/s", "kills", "ended", "steps redone", ""]
        text = table(header, rows) + "\n\n" + "\n".join(said)
        heading = f"With a start-up of {options.startup_s:g} s" if options.startup_s else "With kills"
        kills = f"a kill every {options.every:g} s, turns of {options.minutes:g} min, {options.rounds} rounds"
        what = f"{machine}, {kills}, steps of {options.step_ms:g} ms"
    print(text)
    if options.write:
        write(options.write, heading, what, text)


def write(path: Path, heading: str, what: str, text: str) -> None:
    """Puts the figures, with the date, in the place of those that stand under this heading of the page, or at its end."""
    today = datetime.now(timezone.utc).date()
    new = f"## {heading}\n\n{today}, {what}:\n\n```\n{text}\n```\n"
    parts = re.split(r"(?m)^(?=## )", path.read_text(encoding="utf-8"))
    there = [index for index, part in enumerate(parts) if part.startswith(f"## {heading}\n")]
    parts[there[0] if there else len(parts) :] = [new, *(parts[there[0] + 1 :] if there else [])]
    path.write_text("\n".join(part.strip("\n") + "\n" for part in parts), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        calm_rank(*sys.argv[2:])
    else:
        main()
