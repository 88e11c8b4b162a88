"""Checks that killed replica groups do not change the weights: the job ends with the same bits as a job without faults.

    python bench/bits.py                   with and without the options; groups of one process and of two (FSDP); up to four kills
    python bench/bits.py --quick           two groups, one kill; quick enough for every commit
    python bench/bits.py --write FILE      updates the table in that page

With keep_global_batch and deterministic_reduce each step trains on the same slots and reduces their gradients in the same order, whichever
group computed them. In a job of real processes, once all groups take part, a random group gets SIGKILL, is restarted and heals, several
times. The next checkpoint is compared with that of a job without faults: SHA-256 of every tensor of weights and of the optimizer; gradient
norm, learning rate and tokens of every step; position and holes of the ledger. The same kills without the options, or only with
keep_global_batch, must give different bits, as otherwise the comparison shows nothing.

float32 on the CPU, one thread per process, as sums have the same bits only with the same number of threads. The logged loss is not
compared: its last bits depend on the order in which a group's losses were added. Exit code: 0 if all results are as expected, else 1.
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
WRONG = "WRONG"  # marks a result that differs from the expected one
KEEP, REDUCE = "--fault_tolerance.keep_global_batch=true", "--fault_tolerance.deterministic_reduce=true"


class BitsCase(NamedTuple):
    """A job that is run with kills and without. `equal`: whether the bits must be equal."""

    what: str
    groups: int
    ranks: int
    kills: int
    options: tuple[str, ...]
    equal: bool = True
    quick: bool = False  # end the job before the last killed group is back


THREE_SLOTS = "--fault_tolerance.slots_per_step=3"  # of two groups one has two slots, and adds their gradients before the all-reduce
CASES = (
    BitsCase("neither", 3, 1, 1, (), equal=False, quick=True),
    BitsCase("keep_global_batch", 3, 1, 1, (KEEP,), equal=False, quick=True),
    BitsCase("keep_global_batch, FSDP 2", 2, 2, 1, (KEEP, THREE_SLOTS), equal=False, quick=True),
    BitsCase("both, FSDP 2", 2, 2, 1, (KEEP, REDUCE, THREE_SLOTS), quick=True),
    BitsCase("both", 3, 1, 4, (KEEP, REDUCE)),
)
QUICK = (BitsCase("both", 2, 1, 1, (KEEP, REDUCE), quick=True),)


def kill(job: DrillJob, victim: str, dice: random.Random) -> str:
    """Kills all processes of a group, a few steps from now or after the first checkpoint; returns when the others have continued."""
    job.together()
    at_step = max(job.step, INTERVAL) + dice.randrange(8)
    job.until(f"step {at_step}", lambda: job.step >= at_step)
    lost_in, before = job.step + 1, job.quorum.quorum_id
    job.kill(victim)
    job.until(f"a quorum without group {victim}", lambda: job.quorum.quorum_id > before)
    return f"{victim} in step {lost_in}"


def prove(case: BitsCase, folder: Path) -> tuple[str, str, str]:
    """Returns the history, how much was compared, and the result, marked WRONG if it is not the expected one."""
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
    """Compares two runs at that step, without their losses. Returns how much was compared, and the names that differ."""
    compared, differing = compare_runs(one, other, step, ("model.", "optimizer."), LOGGED[1:])
    mine, others = (json.loads(checkpoint_values(checkpoint(run, step))["ledger.ledger"]) for run in (one, other))
    differing += [f"ledger.{key}" for key in ("position", "holes", "skipped") if mine[key] != others[key]]
    return f"{compared.replace('entries', 'tensors and entries')}, ledger", differing


def main(argv: Sequence[str]) -> int:
    rows = []
    flags = {"quick": (False, "two groups, one kill, only with both options"), "write": (Path, "page to update")}
    with asked(__doc__ or "", argv, **flags) as (options, folder):
        for case in QUICK if options.quick else CASES:
            rows.append((case.what, f"{case.groups} x {case.ranks}", *prove(case, folder)))
            print(" | ".join(rows[-1]), flush=True)
    right = not any(row[-1].startswith(WRONG) for row in rows)
    if options.write and right:
        what = f"`make bits`, torch {torch.__version__}, float32 on the CPU, gloo, real processes, real SIGKILLs"
        header = ("options", "groups x ranks", "history", "compared", "result")
        renew(options.write, "Jobs with kills compared with jobs without", what, markdown(header, rows))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
