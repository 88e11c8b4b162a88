"""Several replica groups as a user starts them: one dies, the others continue, it returns, and the metrics have every step once."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from bench.job import rows
from scripts.samples import SampleRow, read
from tests.scripts.tiny_job import ENV, ROOT, WAIT_S, Started, assert_exact, newest, write_job

SCRIPT = ROOT / "scripts" / "run_replicas.sh"


class Job(Started):
    def __init__(self, folder: Path, *arguments: str) -> None:
        write_job(folder)
        self.run = folder / "outputs" / "tiny"
        super().__init__([SCRIPT, "tiny.toml", *arguments], folder / f"{time.monotonic_ns()}.txt", cwd=folder, **ENV)

    def steps(self) -> list[int]:
        return [row["step"] for row in rows(self.run)]

    def samples(self) -> list[SampleRow]:
        return read(self.run / "samples.jsonl")

    def make_anew(self, step: int) -> None:
        """Rewrites a step's row as other groups, dead since, would have written it; the saving group had committed the step alone."""
        path = self.run / "samples.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        row = lines[step - 1]
        slot, _ = row["slots"].popitem()
        if row["slots"]:
            row["holes"] = [int(slot)]
        else:  # one group was there alone, as when they leave a step apart
            row["slots"][slot] = "9:gone"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.timeout(3 * WAIT_S)
def test_a_group_dies_and_comes_back_and_all_dead_go_on_from_the_checkpoint(cleanup: ExitStack, tmp_path: Path):
    # the lighthouse has them, too
    timeouts = ["--fault_tolerance.heartbeat_timeout_s=6", "--fault_tolerance.heal_grace_s=29.000125"]
    job = cleanup.enter_context(closing(Job(tmp_path, "--groups=2", "--training.steps=100000", *timeouts)))
    text = job.until(
        "both take part", lambda text: all(re.search(rf"\[{group}/0 \d+\] step \d+/", text) for group in (0, 1))
    )
    job.until("a checkpoint that it could load", lambda text: "saved" in text)
    [pid] = re.findall(r"1 \(pid (\d+)\)", text)
    os.kill(int(pid), signal.SIGKILL)
    job.until("its second life", lambda text: re.search(r"group 1 restarts", text))
    job.until("its heal", lambda text: text.count("is healed") > text.partition("restarts")[0].count("is healed"))
    assert "group 1 died (ended by SIGKILL)" in job.text
    assert re.search(r"dashboard: http://127\.0\.0\.1:\d+/ \(it asks for the token in \S+/groups/token\)", job.text)
    assert "loaded from" not in job.text  # who finds others alive has it from them
    job.until("a checkpoint after it", lambda text: "saved" in text.rpartition("is healed")[2])
    job.process.send_signal(signal.SIGUSR1)
    job.until("both groups have the request", lambda text: text.count("SIGUSR1: saving after this step") == 2)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0
    steps = job.steps()
    assert steps == list(range(1, len(steps) + 1))
    assert (job.run / "groups" / "token").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in (job.run / "groups").glob("*.log")} == {"0.log", "1.log", "lighthouse.log"}

    before, last = job.samples(), steps[-1] + 20
    saved = newest(job.run)
    job.make_anew(saved)
    assert job.samples() != before
    again = cleanup.enter_context(closing(Job(tmp_path, "--groups=2", f"--training.steps={last}")))
    assert again.end() == 0, again.text[-3000:]
    assert again.steps() == list(range(1, last + 1))
    assert assert_exact(again.run, last)[:saved] == before[:saved]
    assert "loaded from" in again.text.partition("] step ")[0] and again.text.count(f"finished step {last}") >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "pharos: --groups is missing: must be the number of replica groups, a whole number from 1; such as --groups 3",
        ),
        (
            ["--groups", "0"],
            "pharos: --groups 0: must be the number of replica groups, a whole number from 1; such as --groups 3",
        ),
        (
            ["--groups=2", "--fault_tolerance.min_replica_size=3"],
            "pharos: fault_tolerance.min_replica_size = 3: there are NUM_REPLICA_GROUPS = 2; nearest: 2",
        ),
        (
            ["--groups=2", "--fault_tolerance.heartbeat_timeout_s=0.5"],
            (
                "fault_tolerance.beat_s = 1: must be below fault_tolerance.heartbeat_timeout_s = 0.5: "
                "the longer timeout relies on a result of the shorter one"
            ),
        ),
    ],
)
def test_bad_settings_start_nothing(tmp_path: Path, arguments: list[str], message: str):
    with closing(Job(tmp_path, *arguments)) as job:
        assert job.end() == 2
    assert message in job.text and job.text.count("\n") == 1
    assert not (tmp_path / "outputs").exists()
