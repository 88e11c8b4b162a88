"""A job with checkpoints in an object store is killed, its disk is lost, and another machine's launch continues exactly."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from bench.job import rows
from bench.resume import checkpoint_digests
from scripts.samples import RunBegin, read
from tests.e2e.kill_while_putting import PART_BYTES
from tests.s3_server import BUCKET, S3Server, use
from tests.scripts.tiny_job import CONFIG, ENV, ROOT, WAIT_S, Started, finished, python, write_job
from tests.unit.test_object_store import checkpoint
from training.checkpoint_files import read_verified
from training.checkpoint_load import step_and_ledger
from training.object_store import ObjectStore

pytestmark = pytest.mark.timeout(3 * WAIT_S)
COMMAND = [str(ROOT / "scripts" / "run_train.sh"), "tiny.toml", f"--checkpoint.folder=s3://{BUCKET}/runs"]
RUN = Path("outputs/tiny")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    write_job(tmp_path, CONFIG.replace("enable_tensorboard = false", "enable_tensorboard = true"))
    monkeypatch.chdir(tmp_path)
    with closing(S3Server()) as server:
        use(server, monkeypatch)
        yield server


def train(*arguments: str, code: int = 0, command: Sequence[str] = COMMAND) -> str:
    done = finished([*command, *arguments], code=code)
    return done.stdout + done.stderr


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(run)}


def samples(run: Path) -> list[str]:
    return (run / "samples.jsonl").read_text().splitlines()


def test_a_run_outlives_its_machine(server: S3Server):
    store = ObjectStore(f"s3://{BUCKET}/runs/tiny")
    with closing(Started([*COMMAND, "--training.steps=100000"], Path("log"), cwd=Path.cwd(), **ENV)) as job:
        job.until("a checkpoint in the store", lambda text: "step 10 put into s3://bucket/runs/tiny" in text)
        job.process.send_signal(signal.SIGKILL)
        job.kill()
    newest = store.steps()[-1]
    shutil.rmtree(RUN)
    end = newest + 15
    said = train(f"--training.steps={end}")
    assert f"outputs/tiny/checkpoint/step-{newest}" in said and "checkpoint: s3://bucket/runs/tiny" in said
    assert store.steps()[-1] == end
    fetched = store.fetch(end, Path("fetched"))

    train(f"--training.steps={end}", "--job.name=calm")
    calm = Path("outputs/calm")
    assert checkpoint_digests(fetched) == checkpoint_digests(calm / "checkpoint" / f"step-{end}")
    assert samples(RUN) == samples(calm) and losses(RUN) == losses(calm)
    assert len([*(RUN / "tb").iterdir()]) == 2, "the charts of both launches"
    assert "steps" in python(ROOT / "scripts" / "samples.py", RUN)
    python(ROOT / "scripts" / "generate.py", store.url, "--tokens=3")

    initial = f"--checkpoint.initial_load_path={store.url}/step-{end}"
    train(initial, "--checkpoint.initial_load_model_only=false", f"--training.steps={end + 2}", "--job.name=next")
    first = read(Path("outputs/next/samples.jsonl"))[0]
    assert first.step == end + 1 and first.begin == RunBegin(step_and_ledger(fetched)[1]["position"])

    shutil.rmtree(RUN)
    assert "--resume.allow=optimizer.lr" in train(f"--training.steps={end + 1}", "--optimizer.lr=1e-5", code=2)


def test_a_run_ends_only_when_the_store_has_its_last_step(server: S3Server):
    """A run trains to its end while the store refuses all writes, then retries until the last step is stored."""
    server.fault = "full"
    with closing(Started([*COMMAND, "--training.steps=20"], Path("log"), cwd=Path.cwd(), **ENV)) as job:
        job.until(
            "the last step", lambda text: "step 20/20" in text and "this is the last step: tried again until" in text
        )
        assert "storage: checkpoint: step 10 is not in s3://bucket/runs/tiny yet: " in job.text
        server.fault = ""
        assert job.end() == 0
    assert ObjectStore(f"s3://{BUCKET}/runs/tiny").steps() == [20]


@pytest.mark.long
def test_a_stop_says_what_the_store_lacks(server: S3Server):
    """A stopped run exits with code 1, and the next launch puts its steps into the store."""
    server.fault = "denied"
    assert "cannot be read: " in train("--training.steps=20", code=1)
    server.fault = "full"
    with closing(Started([*COMMAND, "--training.steps=100000"], Path("log"), cwd=Path.cwd(), **ENV)) as job:
        job.until("a step", lambda text: "step 3/" in text)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 1
        assert "; it is in outputs/tiny/checkpoint/step-" in job.text
    server.fault = ""
    [step] = [int(path.name.removeprefix("step-")) for path in (RUN / "checkpoint").iterdir()]
    train(f"--training.steps={step + 1}")
    assert ObjectStore(f"s3://{BUCKET}/runs/tiny").steps()[-1] == step + 1


def test_a_kill_at_any_request_leaves_the_newest_checkpoint(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """SIGKILL of a process that puts step 6 and removes step 4, also between the parts of an upload."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    checkpoint(tmp_path / "here", 4)
    checkpoint(tmp_path / "here", 6, size_bytes=2 * PART_BYTES)
    url = f"s3://{BUCKET}/kills"
    kills = python(Path(__file__).with_name("kill_while_putting.py"), tmp_path / "here", url)
    found, unfinished = [], 0
    for instant in range(1, int(kills) + 2):
        store, there = ObjectStore(f"{url}/{instant}"), tmp_path / str(instant)
        found.append(max(read_verified(store.fetch(step, there)).step for step in store.steps()))
        unfinished += len(store.unfinished())
        store.remove_leftovers()  # of the next start
        assert store.unfinished() == [] and sorted(store.objects()) == store.steps()
    assert unfinished and found == sorted(found) and {*found} == {4, 6}


@pytest.mark.parametrize("fault", [pytest.param("slow", marks=pytest.mark.long), "broken"])
def test_steps_go_on_without_the_store(server: S3Server, fault: str):
    """Steps continue while the store fails, and the last save is in the store once it answers again."""
    with closing(Started([*COMMAND, "--training.steps=100000"], Path("log"), cwd=Path.cwd(), **ENV)) as job:
        job.until("a step", lambda text: "step 1/" in text)
        server.fault = fault
        before = job.text.count(" saved: ")
        job.until("three more checkpoints on the disk", lambda text: text.count(" saved: ") >= before + 3)
        assert server.met.wait(WAIT_S)
        server.fault = ""
        server.lets_go.set()
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 0
    assert f"step {ObjectStore(f's3://{BUCKET}/runs/tiny').steps()[-1]} put into" in job.text


def test_groups_go_on_from_the_store(server: S3Server):
    """Both groups are stopped, their disk is lost, and they resume from the store."""
    store, log = ObjectStore(f"s3://{BUCKET}/runs/tiny"), Path("log")
    command = [str(ROOT / "scripts" / "run_replicas.sh"), *COMMAND[1:], "--groups=2"]
    with closing(Started([*command, "--training.steps=100000"], log, cwd=Path.cwd(), **ENV)) as job:
        job.until_all_train(2)
        job.until("a checkpoint in the store", lambda text: "put into s3://bucket/runs/tiny" in text)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 0
    newest = store.steps()[-1]
    shutil.rmtree("outputs")
    said = train(f"--training.steps={newest + 10}", command=command)
    assert f"checkpoint/step-{newest}" in said and store.steps()[-1] == newest + 10
