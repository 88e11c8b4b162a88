"""resume.allow: a run whose update rule changes continues from its state, says so, and equals a copy that has the new settings."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from bench.resume import checkpoint_digests
from scripts.samples import Range, join, prove, read
from tests.scripts.tiny_job import CONFIG, ENV, ROOT, WAIT_S, Started, write_job

pytestmark = pytest.mark.timeout(3 * WAIT_S)  # several jobs, each rank with an import of torch
CHANGED = [
    "--optimizer.lr=0.0002",
    "--optimizer.weight_decay=0.3",
    "--training.max_norm=0.5",
    "--lr_scheduler.warmup_steps=3",
]
ALLOW = "--resume.allow=optimizer.lr,optimizer.weight_decay,training.max_norm,lr_scheduler.warmup_steps"
# a new epoch of other, longer sequences, in larger batches
SKIP = "--training.skip=[{first = 40, end = 43}]"
NEW_DATA = ["--training.seq_len=48", "--training.seed=7", "--training.local_batch_size=3"]
OTHER_TEXT = "--training.dataset_path=more.txt"
ALLOW_DATA = (
    "--resume.allow=training.seq_len,training.seed,training.global_batch_size,training.dataset_path,training.skip,optimizer.lr,"
    "optimizer.weight_decay,training.max_norm,lr_scheduler.warmup_steps"
)
RUN = Path("outputs/tiny")


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # one schedule, however many steps a launch makes
    write_job(tmp_path, CONFIG.replace("warmup_steps = 2", "warmup_steps = 2\ntotal_steps = 1000000"))
    monkeypatch.chdir(tmp_path)


def train(*arguments: str, name: str = "tiny", code: int = 0) -> str:
    command = [f"{ROOT}/scripts/run_train.sh", "tiny.toml", f"--job.name={name}", *arguments]
    done = subprocess.run(command, env={**os.environ, **ENV}, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(run: Path, file: str = "metrics.jsonl") -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / file).read_text().splitlines()]


def test_one_group():
    train("--training.steps=10")
    shutil.copytree(RUN, "outputs/copy")

    before = (RUN / "config.toml").read_text()
    said = train("--training.steps=20", *CHANGED, code=2)
    assert "optimizer.lr: saved 0.0008, now 0.0002" in said.replace("--optimizer", "optimizer")
    assert "from the next step on: --resume.allow=" in said and "optimizer.weight_decay" in said
    said = train("--training.steps=20", "--resume.allow=model.dim", code=2)
    assert "model.dim: cannot change in a run; legal: training.dataset, " in said and ", training.max_norm, " in said
    said = train("--training.steps=20", "--resume.allow=optimizer.l", code=2)
    assert "optimizer.l: no such key; legal: " in said and "nearest: optimizer.lr" in said
    assert (RUN / "config.toml").read_text() == before and len(rows(RUN)) == 10

    said = train("--training.steps=20", *CHANGED, ALLOW)
    assert "branch: from the next step on" in said and "optimizer.lr 0.0008 -> 0.0002" in said
    [branch] = [row for row in rows(RUN) if "branch" in row]
    assert branch["step"] == 11 and 0 < branch["lr"] <= 0.0002
    assert [row["step"] for row in rows(RUN, "samples.jsonl") if "branch" in row] == [11]
    said = train("--training.steps=30", *CHANGED, ALLOW)  # the same command is no second branch
    assert "branch:" not in said and sum("branch" in row for row in rows(RUN)) == 1
    assert prove(read(RUN / "samples.jsonl")).exact
    printed = subprocess.run([f"{ROOT}/scripts/samples.py", RUN], capture_output=True, text=True, check=True).stdout
    assert "branch: from step 11 on " in printed and "optimizer.weight_decay 0.1 -> 0.3" in printed

    # a copy that was cut at the checkpoint and has the new settings in its config.toml
    text = (RUN / "config.toml").read_text().replace('name = "tiny"', 'name = "copy"')
    Path("outputs/copy/config.toml").write_text(text)
    train("--training.steps=30", *CHANGED, name="copy")
    kinds = ("model.", "optimizer.state")
    mine, theirs = (checkpoint_digests(Path(f"outputs/{name}/checkpoint/step-30"), kinds) for name in ("tiny", "copy"))
    assert len(mine) > 20 and mine == theirs
    unchanged = checkpoint_digests(Path("outputs/copy/checkpoint/step-20"), kinds)
    assert unchanged != mine


def test_one_group_with_other_data():
    train("--training.steps=10")
    shutil.copytree(RUN, "outputs/copy")

    said = train("--training.steps=20", *NEW_DATA, code=2)
    cure = "--resume.allow=training.global_batch_size,training.seq_len,training.seed"
    assert "training.local_batch_size = 3 on 1 data-parallel rank" in said and "--training.seed: saved 0, now 7" in said
    assert all(key in said.partition("--resume.allow=")[2] for key in cure.partition("=")[2].split(","))
    said = train("--training.steps=20", *NEW_DATA, SKIP, ALLOW_DATA)
    assert "training.global_batch_size 2 sequences of a step -> 3" in said
    assert "data: a new epoch begins at sequence 20; " in said and "of the one before are left over" in said
    said = train("--training.steps=30", *NEW_DATA, SKIP, ALLOW_DATA)
    assert "branch:" not in said and "a new epoch" not in said
    samples = read(RUN / "samples.jsonl")
    proof = prove(samples)
    assert [row.slot_size for row in samples] == [2] * 10 + [3] * 20 and proof.exact
    assert proof.skipped == [Range(38, 44)]  # the slots of three from position 20 on that have one of 40 to 42
    assert [row.step for row in samples if row.branch] == [11]

    text = (RUN / "config.toml").read_text().replace('name = "tiny"', 'name = "copy"')
    Path("outputs/copy/config.toml").write_text(text)
    train("--training.steps=30", *NEW_DATA, SKIP, name="copy")
    kinds = ("model.", "optimizer.state")
    mine, theirs = (checkpoint_digests(Path(f"outputs/{name}/checkpoint/step-30"), kinds) for name in ("tiny", "copy"))
    assert len(mine) > 20 and mine == theirs


@pytest.mark.parametrize(
    ("changed", "allow"), [(CHANGED, ALLOW), ([*CHANGED, *NEW_DATA, OTHER_TEXT, SKIP], ALLOW_DATA)]
)
def test_two_groups_one_killed(tmp_path: Path, cleanup: ExitStack, changed: list[str], allow: str):
    def start(*arguments: str) -> Started:
        command = [f"{ROOT}/scripts/run_replicas.sh", "tiny.toml", "--groups=2", *arguments]
        out = tmp_path / f"{len(list(tmp_path.glob('*.out')))}.out"
        return cleanup.enter_context(closing(Started(command, out, cwd=tmp_path, **ENV)))

    Path("more.txt").write_text("and no work and all play\n" * 3000)
    assert start("--training.steps=10").end() == 0
    job = start("--training.steps=100000", *changed, allow)
    [pid] = re.findall(r"1 \(pid (\d+)\)", job.until_all_train(2))
    os.kill(int(pid), signal.SIGKILL)
    job.until("its second life", lambda text: "group 1 restarts" in text)
    job.until_all_train(2, after="group 1 restarts")
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0
    branches = [row for row in rows(RUN) if "branch" in row]
    assert [row["step"] for row in branches] == [11]
    assert all((row["lr"] <= 0.0002) == (row["step"] > 10) for row in rows(RUN) if row["step"] > 5)
    samples = read(RUN / "samples.jsonl")
    proof = prove(samples)
    assert proof.exact and samples[-1].step > 12
    # the slots of three that have one of the positions; the branch is at the frontier of the step before
    first = max(span.end for row in samples[:10] for span in row.positions)
    left_out = [slot for slot in range(first, first + 60, 3) if slot < 43 and slot + 3 > 40] if SKIP in changed else []
    assert proof.skipped == join(Range(slot, slot + 3) for slot in left_out)
