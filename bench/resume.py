"""Checks that a run that is killed and restarted ends with the same bits as a run that is not.

    python bench/resume.py                 n = 40 steps, float32 and bfloat16, two consecutive kills, three times
    python bench/resume.py --quick         n = 6, bfloat16, one kill: half a minute, quick enough for every commit

The run has 2n steps, once without a kill. Then the same run under a different name: a random time after its checkpoint of step n its
process gets SIGKILL, and the same command restarts it; with a second kill the resumed process is killed, too. The SHA-256 of every entry in
the checkpoint of step 2n must be equal, and so must the logged loss, gradient norm, learning rate and token count of all 2n steps. Finally,
a checkpoint of step n is resumed in a different layout: one process, FSDP 2, TP 2, PP 2, each from the previous one. The data position must
be equal, and weights and losses must match those of one process within float32 rounding. Exit code: 0 if all checks pass, else 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from bench.job import ROOT, rows, until
from bench.pairs import parser, table

START_TIMEOUT_S = 300.0  # for a process to reach its first checkpoint, or its end
# A different layout adds gradients in a different order, and AdamW amplifies the difference where a gradient is near 0, as the sign of a
# rounding error determines a whole step. Hence the bound for weights (relative to the largest change of a weight) is wider than that for
# losses. Observed: 7e-6 and 9e-8 after 40 steps.
WEIGHT_BOUND = 1e-3
LOSS_BOUND = 1e-5
LOGGED = ("loss", "grad_norm", "lr", "tokens")
TINY = """
--model.dim 64 --model.n_layers 2 --model.n_heads 4 --model.n_kv_heads 2 --model.hidden_dim 128
--training.seq_len 64 --training.global_batch_size 4 --training.local_batch_size 2 --lr_scheduler.warmup_steps 3
--validation.enable false --sample.tokens 0 --metrics.enable_tensorboard false --checkpoint.keep_latest_k 0
"""
# All but the first have two ranks; a checkpoint of each layout is resumed by the next one.
LAYOUTS = {
    "1 rank": (),
    "fsdp 2": (),
    "tp 2": ("--parallelism.tensor_parallel_degree=2",),
    "pp 2": ("--parallelism.pipeline_parallel_degree=2",),
}
EQUAL, NEAR = "equal", "within rounding"  # results without a problem
Row = tuple[str, str, str, str]  # what, history, compared, result


class Runs:
    """Runs in one folder, started by the same command with different names."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps  # n: the runs have 2n
        # A copy, so that an edit meanwhile does not change the runs.
        config = str(shutil.copy(ROOT / "configs" / "llama.toml", folder))
        self._command = [sys.executable, str(ROOT / "scripts" / "launch.py"), config, "--job.dump_folder", str(folder)]
        self._command += [f"--training.steps={2 * steps}", f"--checkpoint.interval={steps}", *TINY.split()]

    @contextmanager
    def started(self, name: str, precision: str, layout: str = "1 rank") -> Iterator[subprocess.Popen[bytes]]:
        """Yields the run's process, which is killed when the context ends."""
        command = [*self._command, "--job.name", name, "--training.mixed_precision_param", precision, *LAYOUTS[layout]]
        # Sums have the same bits only with the same number of threads.
        environment = {**os.environ, "NPROC": "1" if layout == "1 rank" else "2", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def finish(self, name: str, precision: str, layout: str = "1 rank") -> float:
        """Runs it to its end. Returns the seconds of the steps after n. Raises RuntimeError."""
        with self.started(name, precision, layout) as process:
            code = process.wait(START_TIMEOUT_S)
        if code:
            raise RuntimeError(f"{name}: exit code {code}; its last output:\n{self.output(name)}")
        times = {line["step"]: line["time"] for line in rows(self.folder / name)}
        return float(times[2 * self.steps] - times[self.steps])

    def kill_after_checkpoint(self, name: str, precision: str, delay_s: float, layout: str = "1 rank") -> bool:
        """Starts the run and kills it `delay_s` after the first step beyond checkpoint n. Returns False if it had finished."""
        before = self.last_step(name)
        with self.started(name, precision, layout) as process:

            def saved() -> bool:
                if process.poll() is not None:
                    raise RuntimeError(f"{name}: no checkpoint; its last output:\n{self.output(name)}")
                new = self.last_step(name) not in (before, None)
                return new and checkpoint(self.folder / name, self.steps).exists()

            until(f"{name}: a checkpoint", saved, START_TIMEOUT_S, poll_s=0.002)
            time.sleep(delay_s)
        return process.returncode == -signal.SIGKILL and not checkpoint(self.folder / name, 2 * self.steps).exists()

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def last_step(self, name: str) -> int | None:
        lines = rows(self.folder / name)
        return int(lines[-1]["step"]) if lines else None


def logged(run: Path, keys: Sequence[str] = LOGGED) -> dict[int, tuple[float, ...]]:
    """Returns the values of each step that must be equal."""
    return {line["step"]: tuple(line[key] for key in keys) for line in rows(run) if "loss" in line}


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoint" / f"step-{step}"


def checkpoint_values(folder: Path) -> dict[str, Any]:
    """Returns every entry of a DCP checkpoint by name, unsharded; read by DCP in this process."""
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    values: dict[str, Any] = {
        name: torch.empty(e.size, dtype=e.properties.dtype) if isinstance(e, TensorStorageMetadata) else None
        for name, e in saved.items()
    }
    load(values, storage_reader=FileSystemReader(folder), no_dist=True)
    return values


def checkpoint_digests(folder: Path, kinds: tuple[str, ...] = ("",)) -> dict[str, str]:
    """Returns the SHA-256 of every entry of a DCP checkpoint, by name: a tensor's dtype, shape, bytes; else repr(). `kinds`: prefixes."""
    return {name: _digest(value) for name, value in checkpoint_values(folder).items() if name.startswith(kinds)}


def kill_and_resume(runs: Runs, precision: str, name: str, *, kills: int, seconds: float, dice: random.Random) -> Row:
    """Kills a run `kills` times, and compares it with the one without a kill, which took `seconds` from step n to its end."""
    history: list[str] = []
    while len(history) < kills:
        if runs.kill_after_checkpoint(name, precision, dice.uniform(0, seconds)):
            history.append(f"killed in step {(runs.last_step(name) or 0) + 1}")
        else:  # it had finished before the kill
            shutil.rmtree(runs.folder / name)
            history.clear()
    runs.finish(name, precision)
    compared, differing = compare(runs.folder / precision, runs.folder / name, 2 * runs.steps)
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return precision, ", ".join(history), compared, ", ".join(differing[:3]) + more or EQUAL


def compare(
    one: Path, other: Path, step: int, kinds: tuple[str, ...] = ("",), keys: Sequence[str] = LOGGED
) -> tuple[str, list[str]]:
    """Compares two runs at that step. Returns how much, and the names that differ. `kinds`: of checkpoint_digests; `keys`: of values."""
    digests = [checkpoint_digests(checkpoint(run, step), kinds) for run in (one, other)]
    lines = [{at: row for at, row in logged(run, keys).items() if at <= step} for run in (one, other)]
    entries = sorted({name for name, _ in digests[0].items() ^ digests[1].items()})
    steps = sorted({at for at, _ in lines[0].items() ^ lines[1].items()})
    return f"{len(digests[0])} entries, {len(lines[0])} steps", [*entries, *(f"logged step {at}" for at in steps)]


def apart(values: Mapping[str, Any], others: Mapping[str, Any]) -> float:
    """Returns the largest absolute difference of a weight."""
    weights = [name for name, value in values.items() if name.startswith("model.") and value.is_floating_point()]
    return max((values[name] - others[name]).abs().max().item() for name in weights)


def change_layout(runs: Runs, before: str, after: str) -> Row:
    """Runs one layout to step n and resumes with a second one; compares with one process, in float32."""
    name, what = f"{before} then {after}".replace(" ", "-"), f"float32, {before} then {after}"
    while not runs.kill_after_checkpoint(name, "float32", 0, before):
        shutil.rmtree(runs.folder / name)
    history = f"killed in step {(runs.last_step(name) or 0) + 1}"
    runs.finish(name, "float32", after)
    places = (("float32", runs.steps), ("float32", 2 * runs.steps), (name, 2 * runs.steps))
    start, expected, found = (checkpoint_values(checkpoint(runs.folder / run, step)) for run, step in places)
    problems = [key for key in expected if key.startswith("ledger.") and found.get(key) != expected[key]]
    cursor = "different" if problems else "equal"
    far = apart(expected, found) / apart(expected, start)
    alone, others = (logged(runs.folder / run) for run in ("float32", name))
    loss = max(abs(alone[step][0] - others[step][0]) / abs(alone[step][0]) for step in alone)
    problems += [f"weights differ by {far:.1e} of their change, bound {WEIGHT_BOUND:.0e}"] if far > WEIGHT_BOUND else []
    problems += [f"losses differ by {loss:.1e}, bound {LOSS_BOUND:.0e}"] if loss > LOSS_BOUND else []
    compared = f"cursor {cursor}, weights {far:.0e} and losses {loss:.0e} apart"
    return what, history, compared, ", ".join(problems) or NEAR


@contextmanager
def asked(doc: str, argv: Sequence[str], **flags: Any) -> Iterator[tuple[argparse.Namespace, Path]]:
    """Parses the command line of a check. Yields the options, and the folder of its runs."""
    options = parser(doc.splitlines()[0], keep=(Path, "folder in which the runs are kept"), **flags).parse_args(argv)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process reads the checkpoints
    with tempfile.TemporaryDirectory(prefix="pharos-runs-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield options, folder


def main(argv: Sequence[str]) -> int:
    with asked(__doc__ or "", argv, quick=(False, "n = 6, bfloat16 only, one kill")) as (options, folder):
        lines = prove(Runs(folder, 6 if options.quick else 40), quick=options.quick)
    print(table(("what", "history", "compared", "result"), lines))
    return 0 if all(result in (EQUAL, NEAR) for *_, result in lines) else 1


def prove(runs: Runs, *, quick: bool) -> list[Row]:
    lines, dice, kills = list[Row](), random.Random(0), 1 if quick else 2
    for precision in ("bfloat16",) if quick else ("bfloat16", "float32"):
        seconds = runs.finish(precision, precision)
        for instant in range(1 if quick else 3):
            name = f"{precision}-{instant + 1}"
            lines.append(kill_and_resume(runs, precision, name, kills=kills, seconds=seconds, dice=dice))
    return lines if quick else [*lines, *(change_layout(runs, before, after) for before, after in pairwise(LAYOUTS))]


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    head = f"{value.dtype} {list(value.shape)}".encode()
    content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return hashlib.sha256(head + content).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
