"""A tiny job of replica groups for tests that start one, and the proof that each sequence was trained on exactly once."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from scripts.samples import SampleProof, SampleRow, prove, read

ROOT = Path(__file__).resolve().parents[2]
# Of run_train.sh and those that become it
ENV = {"PYTHON": sys.executable, "PHAROS_NO_INSTALL": "1", "OMP_NUM_THREADS": "1"}
WAIT_S = 240.0  # for what must come, on a busy machine
FILES = 'dataset = "files"\ndataset_path = "text/*.txt"'
CONFIG = f"""
[model]
dim = 32
n_layers = 2
n_heads = 2
n_kv_heads = 1
hidden_dim = 64

[training]
{FILES}
local_batch_size = 2
seq_len = 32

[lr_scheduler]
warmup_steps = 2
total_steps = 1000000  # one schedule, however many steps a launch makes

[metrics]
log_freq = 1
enable_tensorboard = false

[checkpoint]
interval = 10
keep_latest_k = 2
"""
# Its batches differ: with one line repeated, each loss is below the one before
VARIED = " ".join("".join(chr(97 + (7 * a * b + a) % 26) for b in range(a % 11 + 2)) for a in range(1, 9000))


class Started:
    """A process whose output is appended to a file."""

    def __init__(self, command: Sequence[str | Path], out: Path, *, cwd: Path, **env: str) -> None:
        self._out = out
        with out.open("a") as file:
            environ = {**os.environ, "OMP_NUM_THREADS": "1", **env}
            self.process = subprocess.Popen(command, cwd=cwd, env=environ, stdout=file, stderr=file)

    @property
    def text(self) -> str:
        return self._out.read_text()

    def until(self, what: str, holds: Callable[[str], object]) -> str:
        """Waits until `holds` is true for the output, and returns the output."""
        end_s = time.monotonic() + WAIT_S
        while not holds(self.text):
            ended = self.process.poll() is not None
            assert time.monotonic() < end_s, f"{what} does not come:\n{self.text[-3000:]}"
            assert not ended or holds(self.text), f"it ended before {what}:\n{self.text[-3000:]}"
            time.sleep(0.02)
        return self.text

    def until_all_train(self, groups: int, after: str = "") -> str:
        """Waits until each of `groups` groups has made a step after the last `after` of the output, and returns the output.

        A job of a fixed number of steps may reach its end while a group still starts.
        """
        return self.until(
            f"a step of each of {groups} groups",
            lambda text: all(
                re.search(rf"\[{group}/0 \d+\] step \d+/", text.rpartition(after)[2] if after else text)
                for group in range(groups)
            ),
        )

    def end(self) -> int:
        """Waits for the end. Returns the exit code."""
        self.until("its end", lambda _: self.process.poll() is not None)
        return self.process.returncode

    def kill(self) -> None:
        """Kills the process; may be called twice."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(WAIT_S)


def finished(
    command: Sequence[str | Path], *, code: int = 0, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command that must end with `code`; pytest's timeout ends it, too."""
    environ = {**os.environ, **ENV, **env}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def python(*arguments: str | Path, code: int = 0, **env: str) -> str:
    """Returns the output of a new Python process that imports this repository and must end with `code`."""
    return finished([sys.executable, *arguments], code=code, PYTHONPATH=str(ROOT), **env).stdout


PEAK = """
import sys
from importlib import import_module
assert import_module(sys.argv[1]).main(sys.argv[2:]) == 0
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
print("peak", peak)
"""


def peak_bytes(module: str, *arguments: object) -> int:
    """Returns the peak resident memory of a process that runs a script, including its mapped tensor files."""
    return int(python("-c", PEAK, module, *map(str, arguments)).split("peak ")[-1]) << 10


def struck(function: Callable[..., Any], at: int, number: signal.Signals) -> Callable[..., Any]:
    """Returns `function`, of which the `at`-th call sends the signal to this process."""
    calls = count(1)

    def called(*arguments: Any) -> Any:
        if next(calls) == at:
            os.kill(os.getpid(), number)
        return function(*arguments)

    return called


def write_job(folder: Path, config: str = CONFIG, text: str = "all work and no play\n" * 3000) -> None:
    """Writes tiny.toml and its text."""
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "a.txt").write_text(text)
    (folder / "tiny.toml").write_text(config)


def copy_repository(to: Path) -> None:
    """Copies everything that the commands of the pages use."""
    packages = ("configs", "contrib", "ft", "models", "parallelisms", "scripts", "tools", "training")
    for part in (*packages, "train.py", "requirements.lock", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
        copy(ROOT / part, to / part)


def newest(run: Path) -> int:
    """Returns the step of the newest checkpoint."""
    return max(int(path.name.removeprefix("step-")) for path in (run / "checkpoint").iterdir())


def assert_exact(run: Path, steps: int) -> list[SampleRow]:
    """Checks the run's record against `steps` steps, and returns it."""
    rows = read(run / "samples.jsonl")
    assert [row.step for row in rows] == list(range(1, steps + 1))
    assert prove(rows) == SampleProof(steps=steps, sequences=rows[-1].positions[-1].end)
    return rows
