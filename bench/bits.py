"""Shows that deaths do not reach the weights: a job of groups that were killed ends with the bits of a job without faults.

    python bench/bits.py                   without the options and with them; groups of one process and of two (FSDP); up to four kills
    python bench/bits.py --quick           two groups, one kill: for every change
    python bench/bits.py --write FILE      renews the table of that page

With keep_global_batch and deterministic_reduce each step trains on the same slots, and adds their gradients in the same order,
whichever group computed them. In a job of real processes, once all groups take part, a random group gets SIGKILL, comes back and heals, so
many times. The checkpoint that follows is compared with that of a job without faults: SHA-256 of every tensor of weights and of the
optimizer, gradient norm, rate and tokens of every step, position and holes of the ledger. The same kills without the options, or with
keep_global_batch alone, must give other bits, else this proof says nothing.

float32 on the CPU, one thread a process: sums inside one process are the same bits only with the same threads. The loss that is logged is
not compared: its last bits depend on which of a group's losses were added first. Exit code 0 if all is as it must be, 1 if not.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

import torch

from bench.drill_job import DrillJob
from bench.job import ROOT
from bench.pairs import markdown, renew
from bench.resume import LOGGED, TINY, apart, asked, checkpoint, checkpoint_values, logged
from bench.resume import compare as compare_runs

INTERVAL = 20  # steps between checkpoints: one follows the last kill
WRONG = "WRONG"  # a result
KEEP, REDUCE = "--fault_tolerance.keep_global_batch=true", "--fault_tolerance.deterministic_reduce=true"


class BitsCase(NamedTuple):
    """A job that is run with kills and without. `equal`: what must come of it."""

    what: str
    groups: int
    ranks: int
    kills: int
    options: tuple[str, ...]
    equal: bool = True
    quick: bool = False  # it ends before the last one that was killed is back


THREE_SLOTS = "--fault_tolerance.slots_per_step=3"  # of two groups one has two, and adds them before it sends
CASES = (
    BitsCase("neither", 3, 1, 1, (), equal=False, quick=True),
    BitsCase("keep_global_batch", 3, 1, 1, (KEEP,), equal=False, quick=True),
    BitsCase("keep_global_batch, FSDP 2", 2, 2, 1, (KEEP, THREE_SLOTS), equal=False, quick=True),
    BitsCase("both, FSDP 2", 2, 2, 1, (KEEP, REDUCE, THREE_SLOTS), quick=True),
    BitsCase("both", 3, 1, 4, (KEEP, REDUCE)),
)
QUICK = (BitsCase("both", 2, 1, 1, (KEEP, REDUCE), quick=True),)


def kill(job: DrillJob, victim: str, dice: random.Random) -> str:
    """Kills all processes of a group, a few steps from now or from the first checkpoint; returns when the others have gone on."""
    job.together()
    at_step = max(job.step, INTERVAL) + dice.randrange(8)
    job.until(f"step {at_step}", lambda: job.step >= at_step)
    lost_in, before = job.step + 1, job.quorum.quorum_id
    job.kill(victim)
    job.until(f"a quorum without group {victim}", lambda: job.quorum.quorum_id > before)
    return f"{victim} in step {lost_in}"


def prove(case: BitsCase, folder: Path) -> tuple[str, str, str]:
    """Returns the history, how much was compared, and the result, marked where it is not the one that must come of the case."""
    dice, name = random.Random(0), case.what.replace(" ", "-").replace(",", "")
    os.environ.update(NPROC=str(case.ranks), OMP_NUM_THREADS="1")
    argv = [str(ROOT / "configs" / "llama.toml"), f"--job.dump_folder={folder}", *TINY.split(), *case.options]
    argv += ["--training.mixed_precision_param=float32", "--training.steps=100000", f"--checkpoint.interval={INTERVAL}"]

    def until_saved(job: DrillJob, step: int) -> Path:
        job.until(f"checkpoint {step}", lambda: job.has(step) and step in logged(job.run))
        return job.run

    with DrillJob([*argv, f"--job.name={name}-killed"], case.groups) as job:
        victims = dice.sample(range(case.groups), case.groups)
        kills = [kill(job, str(victims[number % case.groups]), dice) for number in range(case.kills)]
        if not case.quick:
            job.together()
        last = (job.step // INTERVAL + 1) * INTERVAL
        killed = until_saved(job, last)
    with DrillJob([*argv, f"--job.name={name}-calm"], case.groups) as job:
        calm = until_saved(job, last)
    compared, differing = compare(killed, calm, last)
    result = "equal"
    if differing:
        far = apart(*(checkpoint_values(checkpoint(run, last)) for run in (killed, calm)))
        result = f"weights differ by up to {far:.0e}, {len(differing)} differences in all"
    if case.equal is bool(differing):
        result = f"{WRONG}: {result}"
    return f"killed: {', '.join(kills)}; {last} steps", compared, result


def compare(one: Path, other: Path, step: int) -> tuple[str, list[str]]:
    """The comparison of two runs at that step, but for their losses: how much was compared, and the names that differ."""
    compared, differing = compare_runs(one, other, step, ("model.", "optimizer."), LOGGED[1:])
    mine, others = (json.loads(checkpoint_values(checkpoint(run, step))["ledger.ledger"]) for run in (one, other))
    differing += [f"ledger.{key}" for key in ("position", "holes", "skipped") if mine[key] != others[key]]
    return f"{compared.replace('entries', 'tensors and entries')}, ledger", differing


def main(argv: Sequence[str]) -> int:
    rows = []
    flags = {"quick": (False, "two groups, one kill, both options alone"), "write": (Path, "the page of the table")}
    with asked(__doc__ or "", argv, **flags) as (options, folder):
        for case in QUICK if options.quick else CASES:
            rows.append((case.what, f"{case.groups} x {case.ranks}", *prove(case, folder)))
            print(" | ".join(rows[-1]), flush=True)
    right = not any(row[-1].startswith(WRONG) for row in rows)
    if options.write and right:
        what = f"`make bits`, torch {torch.__version__}, float32 on the CPU, gloo, real processes, real SIGKILLs"
        header = ("options", "groups x ranks", "history", "compared", "result")
        renew(options.write, "Killed groups beside calm ones", what, markdown(header, rows))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
