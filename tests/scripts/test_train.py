"""Training through ./scripts/run_train.sh as a user does it: a complete run and its continuation, signals, a loss that is NaN."""

from __future__ import annotations

import re
import signal
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bench.job import rows as all_rows
from bench.job import until
from tests.scripts.tiny_job import ENV, ROOT, WAIT_S, Started
from tests.unit.data_corpus import write_jsonl

pytestmark = pytest.mark.timeout(300)  # several starts in one test, each with an import of torch
TOML = """\
[model]
dim = 16
n_layers = 1
n_heads = 2
n_kv_heads = 1
hidden_dim = 24

[training]
dataset = "files"
dataset_path = "text/*.txt"
dataset_held_out = 0.3
seq_len = 32
local_batch_size = 2
global_batch_size = 4
steps = 6

[lr_scheduler]
warmup_steps = 2

[checkpoint]
interval = 4

[validation]
enable = true
freq = 3
steps = 1

[metrics]
log_freq = 1

[sample]
tokens = 8
prompt = "ab"
"""


class Job(Started):
    """One start of the script in its own folder. Its processes carry a mark, so that leftover ones can be found."""

    def __init__(self, folder: Path, *overrides: str, nproc: int = 1) -> None:
        self.mark = uuid.uuid4().hex
        command = [ROOT / "scripts" / "run_train.sh", "tiny.toml", *overrides]
        env = {**ENV, "NPROC": str(nproc), "PHAROS_TEST_MARK": self.mark}
        super().__init__(command, folder / f"{self.mark}.txt", cwd=folder, **env)

    def end(self) -> int:
        """Waits until no process of the job is left. Returns the exit code. A process may notice late that its parent has ended."""
        code = super().end()
        until(f"the end of all processes:\n{self.text}", lambda: not list(self._left_over()), WAIT_S)
        return code

    def _left_over(self) -> Iterator[str]:
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # ended meanwhile
                if self.mark.encode() in environment.read_bytes():
                    yield environment.parent.name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TOML)
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"abc {number} " * 20)
    return tmp_path


def rows(folder: Path, key: str) -> dict[int, float]:
    """Returns the values of `key` in metrics.jsonl by step; each step must occur once."""
    found = [(row["step"], row[key]) for row in all_rows(folder / "outputs" / "tiny") if key in row]
    assert len(dict(found)) == len(found)
    return dict(found)


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "outputs" / "tiny" / "checkpoint").iterdir()}


def test_a_run_ends_says_so_and_goes_on_when_it_may(folder: Path):
    first = Job(folder)
    assert first.end() == 0, first.text
    assert "the remaining 3 steps take about " in first.text
    assert "text sample:\nab" in first.text and "finished step 6: 768 tokens" in first.text
    assert list(rows(folder, "loss")) == [1, 2, 3, 4, 5, 6] and list(rows(folder, "validation_loss")) == [3, 6]
    assert checkpoints(folder) == {"step-4", "step-6"}

    again = Job(folder)
    assert again.end() == 0 and "finished already: 6 of 6 steps; raise training.steps to continue" in again.text

    other = Job(folder, "--training.seed=1")
    assert other.end() == 2 and "training.seed" in other.text and "saved 0, now 1" in other.text

    weights = "--checkpoint.last_save_model_only"
    # on two ranks, at the same place in the data
    more = Job(folder, "--training.steps", "7", weights, "--validation.steps=20", nproc=2)
    assert more.end() == 0, more.text
    assert "finished step 7 (resumed at 6): 128 tokens" in more.text
    assert "checkpoint: model, optimizer, ledger, meter, data loaded from outputs/tiny/checkpoint/step-6, " in more.text
    assert more.text.count("validation: 80 sequences are read, and the held-out text has ") == 1
    assert "validation: " not in first.text
    assert list(rows(folder, "loss")) == [1, 2, 3, 4, 5, 6, 7]
    assert len(list((folder / "outputs" / "tiny" / "tb").iterdir())) == 2  # one folder, an event file of each start

    again = Job(folder, "--training.steps", "7")
    assert again.end() == 0 and "finished already: 7 of 7 steps" in again.text
    assert "only the weights: with more training.steps the run continues from step 6" in again.text


@pytest.mark.parametrize("nproc", [1, 2])
def test_signals_save(folder: Path, nproc: int):
    endless = ("--training.steps=100000", "--checkpoint.interval=100000", "--validation.freq=1", "--validation.steps=1")
    job = Job(folder, *endless, nproc=nproc)
    job.until("step 2", lambda text: " step 2/" in text)
    job.process.send_signal(signal.SIGUSR1)
    job.until("the checkpoint, and it goes on", lambda text: "checkpoint: step" in text)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0, job.text
    assert "stopped at step" in job.text and "next: the same command resumes the run" in job.text
    assert len(checkpoints(folder)) == 2
    assert f"step-{max(rows(folder, 'loss'))}" in checkpoints(folder)
    assert max(rows(folder, "validation_loss")) == max(rows(folder, "loss")) - 1, (
        "it saves at once, and validates nothing"
    )


def test_data_that_cannot_be_read_is_told_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    (folder / "stream").mkdir()
    write_jsonl(folder / "stream" / "1.jsonl", ["one"])
    stream = ("--training.dataset=huggingface", "--training.dataset_path=stream", "--training.dataset_text_key=body")
    job = Job(folder, *stream)
    assert job.end() == 1, job.text
    cause = 'training.dataset_path = "stream": a record of the stream has no "body", only \'text\''
    assert f"reading data failed: {cause}; nearest: training.dataset_text_key" in job.text.splitlines()[-1]
    assert not re.search("Traceback|Warning", job.text)


def test_a_loss_that_is_not_a_number_ends_the_run_before_it_does_harm(folder: Path):
    job = Job(folder, "--optimizer.lr=1e38", "--lr_scheduler.warmup_steps=0", nproc=2)
    assert job.end() == 1, job.text
    line = next(line for line in job.text.splitlines() if "not applied" in line)
    assert "rank 0: loss nan at slot" in line and "rank 1: loss nan at slot" in line and "position" in line
    assert "Traceback" not in job.text
    taken = max(rows(folder, "loss"))
    assert f"step {taken + 1} not applied" in line
