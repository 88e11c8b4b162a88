"""Shows that who was alive does not reach the weights: a job of groups that were killed ends with the bits of one that was left alone.

    python bench/bits.py                   without the options and with them; groups of one process and of two (FSDP); up to four kills
    python bench/bits.py --quick           two groups, one kill: for every change
    python bench/bits.py --write FILE      keeps the table, with its date
    python bench/bits.py ... -- --model.dim 512       further words are settings of the runs

With keep_global_batch and deterministic_reduce each step trains on the same slots, and adds their gradients in the same order, whoever
computed them. A job of real processes runs by scripts/replicas.py; at a seeded step, once all groups take part, a seeded group gets
SIGKILL, comes back and heals; so often. The checkpoint that follows is compared with that of a job without faults: SHA-256 of every tensor
of weights and of the optimizer, gradient norm, rate and tokens of every step, position and holes of the ledger. The same kills without
the options, or with keep_global_batch alone, must give other bits, else this proof says nothing.

float32 on the CPU, one thread a process: sums inside one process are the same bits only with the same threads. The loss that is logged is
not compared: its last bits depend on which of a group's losses were added first. Exit code 0 if all is as it must be, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

import torch

from bench.resume import TINY, checkpoint_digests, checkpoint_values

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 300.0  # for a next step
INTERVAL = 20  # steps between checkpoints: one follows the last kill
KEEP, REDUCE = "--fault_tolerance.keep_global_batch=true", "--fault_tolerance.deterministic_reduce=true"
QUORUM = re.compile(r"quorum (\d+) at step (\d+): (\d+) groups")
STARTED = re.compile(
    r"\b(\d+)(?: starts again)? \(process (\d+)\)"
)  # "groups: 0 (process 71), 1 (...", "group 0 starts again (process 93)"


@dataclass(frozen=True)
class BitsCase:
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


class BitsJob:
    """Groups of one run, as run_replicas.sh starts them."""

    def __init__(self, folder: Path, config: str, name: str, case: BitsCase, settings: Sequence[str]) -> None:
        self._case, self._run, self._out = case, folder / name, folder / f"{name}.log"
        self._words = [config, "--groups", str(case.groups), "--job.dump_folder", str(folder), "--job.name", name]
        self._words += ["--training.mixed_precision_param=float32", "--training.steps=100000", *TINY.split()]
        self._words += [f"--checkpoint.interval={INTERVAL}", *case.options, *settings]
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        environment = {**os.environ, "NPROC": str(self._case.ranks), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "scripts" / "replicas.py"), *self._words]
        with self._out.open("wb") as out:
            self._process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield
        finally:  # the figures that count are on disk by then
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(WAIT_S)

    @property
    def text(self) -> str:
        return self._out.read_text(errors="replace")

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        assert self._process is not None
        step, end_s = self.step, time.monotonic() + WAIT_S
        while not holds():
            if self.step > step:
                step, end_s = self.step, time.monotonic() + WAIT_S
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"{what} did not come; the last output:\n{self.text[-3000:]}")
            time.sleep(0.02)

    def figures(self) -> dict[int, tuple[float, ...]]:
        """The values of each logged step that must be equal."""
        path = self._run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: (row["grad_norm"], row["lr"], row["tokens"]) for row in rows if "loss" in row}

    @property
    def step(self) -> int:
        """The last that is logged."""
        path = self._run / "metrics.jsonl"
        steps = re.findall(rb'"step": (\d+)', path.read_bytes()[-4000:]) if path.exists() else []
        return max(map(int, steps), default=0)

    def checkpoint(self, step: int) -> Path:
        return self._run / "checkpoint" / f"step-{step}"

    @property
    def quorum(self) -> tuple[int, ...]:
        """The newest: its id, step, and number of groups."""
        return max((tuple(map(int, found)) for found in QUORUM.findall(self.text)), default=(0, 0, 0))

    def all_take_part(self) -> bool:
        """In the newest quorum, and in steps since."""
        _, step, groups = self.quorum
        return groups == self._case.groups and self.step >= step + 3

    def kill(self, victim: str, dice: random.Random) -> str:
        """All processes of a group, a few steps from now, or from the first checkpoint; returns when the others have gone on."""
        self.until("a job of all groups", self.all_take_part)
        at_step = max(self.step, INTERVAL) + dice.randrange(8)
        self.until(f"step {at_step}", lambda: self.step >= at_step)
        pids = dict(STARTED.findall(self.text))  # of each group's newest life
        lost_in, before = self.step + 1, self.quorum[0]
        os.killpg(int(pids[victim]), signal.SIGKILL)
        self.until(f"a quorum without group {victim}", lambda: self.quorum[0] > before)
        return f"{victim} in step {lost_in}"


def prove(case: BitsCase, folder: Path, config: str, seed: int, settings: Sequence[str]) -> tuple[str, str, str, bool]:
    """(what happened, what was compared, what came of it, whether it is what must come of it)"""
    dice, name = random.Random(seed), case.what.replace(" ", "-").replace(",", "")
    killed, calm = (BitsJob(folder, config, f"{name}-{history}", case, settings) for history in ("killed", "calm"))
    with killed.running():
        victims = dice.sample(range(case.groups), case.groups)
        kills = [killed.kill(str(victims[number % case.groups]), dice) for number in range(case.kills)]
        if not case.quick:
            killed.until("a job of all groups", killed.all_take_part)
        last = (killed.step // INTERVAL + 1) * INTERVAL
        killed.until(f"checkpoint {last}", killed.checkpoint(last).exists)
    with calm.running():
        calm.until(f"checkpoint {last}", calm.checkpoint(last).exists)
    compared, differing = compare(killed, calm, last)
    result = (
        f"weights differ by up to {apart(killed, calm, last):.0e}, {len(differing)} differences in all"
        if differing
        else "equal"
    )
    return f"killed: {', '.join(kills)}; {last} steps", compared, result, case.equal is not bool(differing)


def compare(one: BitsJob, other: BitsJob, step: int) -> tuple[str, list[str]]:
    """The comparison at that step: names that were compared, and those that differ."""
    digests = [
        {
            name: digest
            for name, digest in checkpoint_digests(job.checkpoint(step)).items()
            if name.startswith(("model.", "optimizer."))
        }
        for job in (one, other)
    ]
    rows = [{s: figures for s, figures in job.figures().items() if s <= step} for job in (one, other)]
    ledgers = [json.loads(checkpoint_values(job.checkpoint(step))["ledger.ledger"]) for job in (one, other)]
    differing = [name for name in sorted(digests[0] | digests[1]) if digests[0].get(name) != digests[1].get(name)]
    differing += [f"logged step {s}" for s in sorted(rows[0] | rows[1]) if rows[0].get(s) != rows[1].get(s)]
    differing += [f"ledger.{key}" for key in ("position", "holes", "skipped") if ledgers[0][key] != ledgers[1][key]]
    return f"{len(digests[0])} tensors and entries, {len(rows[0])} steps, ledger", differing


def apart(one: BitsJob, other: BitsJob, step: int) -> float:
    """The largest difference of a weight."""
    values, others = (checkpoint_values(job.checkpoint(step)) for job in (one, other))
    weights = [name for name, value in values.items() if name.startswith("model.") and value.is_floating_point()]
    return max((values[name] - others[name]).abs().max().item() for name in weights)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default=str(ROOT / "configs" / "llama.toml"))
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--quick", action="store_true", help="two groups, one kill, both options alone")
    parser.add_argument("--keep", type=Path, help="a folder to leave the runs in")
    parser.add_argument("--write", type=Path, help="a file for the table")
    parser.add_argument("settings", nargs="*", help="settings of the runs, after --")
    chosen = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # checkpoints are read by one process
    rows, right = [("options", "groups x ranks", "history", "compared", "result")], True
    with tempfile.TemporaryDirectory(prefix="pharos-bits-") as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for case in QUICK if chosen.quick else CASES:
            history, compared, result, as_it_must = prove(case, folder, chosen.config, chosen.seed, chosen.settings)
            verdict = result if as_it_must else f"WRONG: {result}"
            rows.append((case.what, f"{case.groups} x {case.ranks}", history, compared, verdict))
            print(" | ".join(rows[-1]), flush=True)
            right = right and as_it_must
    if chosen.write and right:
        chosen.write.write_text(page(rows), encoding="utf-8")
    return 0 if right else 1


def page(rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    head, *lines = ["| " + " | ".join(row) + " |" for row in rows]
    table = "\n".join([head, "|---" * len(rows[0]) + "|", *lines])
    return PAGE.format(date=date.today().isoformat(), torch=torch.__version__, table=table)


PAGE = """# The same bits for any membership

`make bits` (python bench/bits.py --write docs/bits.md), {date}, torch {torch}, float32 on the CPU, gloo, real processes, real SIGKILLs.

{table}

*killed*: the group and the step; it returned and healed before the next kill. *equal*: every bit. Without the options the bits must
differ, which shows that the comparison is sensitive.

## The options

`fault_tolerance.keep_global_batch`: each step trains on `slots_per_step` = S slots (a slot is one group's batch), assigned to the groups
in turns. If a group dies in a step, the others keep their results and compute its slots in the same step. Groups beyond S are spares; a
joining group is assigned slots from the step after it has healed. So a step's data does not depend on the membership, but its time does:
with g groups it takes as long as ceil(S / g) slots. Set S for a job that is to grow, since NUM_REPLICA_GROUPS may differ between groups
that start at different times, and groups with another S are refused.

`fault_tolerance.deterministic_reduce`: each slot's gradients are reduced separately and added in the order of the slots, in the
gradients' own precision. Let G be the bytes of a rank's gradients. Groups then exchange S G instead of G. Beside the gradients of
autograd, 2 S G are allocated for sums (2 G without the option), S G more while an abandoned process group has not ended and for each step
that is held for a healing group, and G for each slot of the group until the step is committed.

Not covered: an unusable slot (a loss of NaN or Inf) removes the other slots of its group from the step, too, since without
deterministic_reduce they are one sum; they are assigned again first, and the job stops at the third time. The logged loss may differ in
its last bits. Machines or numbers of threads that compute other bits for the same slot give other bits.
"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
