"""training.on_spike: what a job of one group and of two does with a step that is a spike, killed and resumed in the middle.

The window is short and the factor small, so that the loss of an ordinary run rises above the bound in some steps."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from bench.job import rows
from bench.resume import checkpoint_digests
from scripts.samples import SampleRow, prove, read
from tests.scripts.tiny_job import CONFIG, ENV, ROOT, VARIED, WAIT_S, Started, finished, write_job

pytestmark = pytest.mark.timeout(3 * WAIT_S)  # several jobs, each rank with an import of torch
RULE = ["--training.spike_window=4", "--training.spike_factor=1.5"]
SKIP = ["--training.on_spike=skip", *RULE]


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(tmp_path, CONFIG.replace("enable_tensorboard = false", "enable_tensorboard = true"), VARIED)
    monkeypatch.chdir(tmp_path)


def train(*arguments: str, name: str = "tiny", code: int = 0) -> str:
    command = [f"{ROOT}/scripts/run_train.sh", "tiny.toml", f"--job.name={name}", *arguments]
    done = finished(command, code=code)
    return done.stdout + done.stderr


def spikes(run: Path) -> list[SampleRow]:
    """The steps that the record has as not applied; the record must be exact."""
    samples = read(run / "samples.jsonl")
    assert [row.step for row in samples] == list(range(1, len(samples) + 1)) and prove(samples).exact
    assert [(row["step"], row["spike"]) for row in rows(run) if "spike" in row] == [
        (row.step, row.spike) for row in samples if row.spike
    ]
    assert all((row["lr"] == 0) == ("spike" in row) for row in rows(run))
    return [row for row in samples if row.spike]


def test_one_group():
    calm, cut = Path("outputs/calm"), Path("outputs/cut")
    said = train("--training.steps=40", *SKIP, name="calm")
    skipped = spikes(calm)
    assert any(row.step <= 20 for row in skipped) and any(row.step > 20 for row in skipped)
    first = skipped[0]
    assert f"spike: step {first.step} not applied: {first.spike}; positions " in said and first.spike in said
    assert first.spike.startswith("loss ") or first.spike.startswith("gradient norm ")
    assert prove(read(calm / "samples.jsonl")).skipped and not first.slots and first.skipped
    for steps in (7, 20, 23, 40):  # 7 and 23: within a window
        train(f"--training.steps={steps}", *SKIP, name="cut")
    kinds = ("model.", "optimizer.state", "spikes.", "ledger.", "meter.")
    mine, theirs = (checkpoint_digests(run / "checkpoint" / "step-40", kinds) for run in (calm, cut))
    assert len(mine) > 20 and "spikes.window" in mine and mine == theirs
    assert spikes(cut) == skipped

    # the default ends the run there, and keeps what it has; the rule is no part of an earlier run
    said = train("--training.steps=40", *RULE, name="stopped", code=1)
    assert f"step {first.step} not applied: {first.spike}; positions " in said
    assert len(rows(Path("outputs/stopped"))) == first.step - 1
    said = train("--training.steps=40", *SKIP, name="stopped", code=2)
    assert "--resume.allow=training.on_spike" in said
    said = train("--training.steps=40", *SKIP, "--resume.allow=training.on_spike", name="stopped")
    assert 'training.on_spike "stop" -> "skip"' in said and spikes(Path("outputs/stopped")) == skipped


def test_a_run_of_nothing_but_nan_ends():
    said = train(
        "--training.steps=40", "--optimizer.lr=1e30", "--training.on_spike=skip", "--training.spike_max_skips=3", code=1
    )
    assert "training.spike_max_skips allows 3 such steps in a row" in said
    samples = read(Path("outputs/tiny/samples.jsonl"))
    assert all(re.search("nan|inf", row.spike) for row in samples[-3:]) and prove(samples).exact
    assert len([row for row in samples if row.spike]) == 3


def test_two_groups_one_killed(tmp_path: Path, cleanup: ExitStack):
    command = [
        f"{ROOT}/scripts/run_replicas.sh",
        "tiny.toml",
        "--groups=2",
        "--training.steps=100000",
        "--training.on_spike=skip",
    ]
    command += ["--training.spike_window=12", "--training.spike_factor=2", "--training.spike_max_skips=1000"]
    command.append("--fault_tolerance.digest_interval=1")  # weights are compared in every step
    job = cleanup.enter_context(closing(Started(command, tmp_path / "out", cwd=tmp_path, **ENV)))
    [pid] = re.findall(r"1 \(pid (\d+)\)", job.until_all_train(2))
    job.until("a spike", lambda text: "not applied" in text)
    os.kill(int(pid), signal.SIGKILL)
    job.until("its second life", lambda text: "group 1 restarts" in text)
    job.until_all_train(2, after="group 1 restarts")

    def alike(text: str) -> bool:
        return len(re.findall(r"\[1/0 \d+\] .*not applied", text.rpartition("group 1 restarts")[2])) >= 3

    job.until("three spikes of both groups", alike)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0
    events = [
        [json.loads(line) for line in Path(f"outputs/tiny/groups/{group}/events.jsonl").read_text().splitlines()]
        for group in (0, 1)
    ]
    healed = max(event["step"] for event in events[1] if event["event"] == "healed")
    theirs, mine = (
        {event["step"]: event["words"] for event in listed if event["event"] == "spike" and event["step"] > healed}
        for listed in events
    )
    last = min(max(mine), max(theirs))  # one of them may leave first
    mine, theirs = ({step: words for step, words in each.items() if step <= last} for each in (mine, theirs))
    assert len(mine) >= 2 and mine == theirs
    assert not [event for listed in events for event in listed if event["event"] == "weights differ"]
    found = spikes(Path("outputs/tiny"))
    assert {row.step for row in found if healed < row.step <= last} == mine.keys()
