"""scripts/slurm/train.sbatch under a real Slurm: a step and a node die, a job is preempted, its time runs out; the ledger is exact."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.scripts.slurm_cluster import ROOT, Cluster, fetch, free_ports, until
from tests.scripts.tiny_job import CONFIG, ENV, assert_exact, newest, write_job
from tests.system_packages import Unavailable

SBATCH = ROOT / "scripts" / "slurm" / "train.sbatch"
ENDLESS = 100_000
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    try:
        made = Cluster(folder, ["n0", "n1", "n2"])
    except Unavailable as error:
        pytest.skip(f"no Slurm: {error}")
    yield made
    made.close()


@pytest.mark.parametrize("env", [{}, {"CI": "true", "PHAROS_NO_INSTALL": "1"}], ids=["not asked for", "forbidden"])
def test_nothing_is_fetched_that_nobody_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str]):
    """Nothing is downloaded without permission, as on a user's own machine."""
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name in ("CI", "PHAROS_NO_INSTALL", "PHAROS_TEST_INSTALL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Unavailable, match=r"PHAROS_TEST_INSTALL=1 or CI=true lets|PHAROS_NO_INSTALL=1|no dpkg-deb"):
        fetch(tmp_path / "cache")
    assert not (tmp_path / "called").exists()


class Job:
    """A submitted job, in its own folder."""

    def __init__(
        self, cluster: Cluster, folder: Path, *sbatch: str, more: str = "", words: Sequence[str] = (), **env: str
    ) -> None:
        self.cluster, self.folder, self.run, self._more = cluster, folder, folder / "outputs" / "tiny", more
        self.ends_at(ENDLESS)
        command = ("sbatch", "--parsable", "--output=out", *sbatch, str(SBATCH), "tiny.toml", *words)
        self.id = cluster.ask(*command, cwd=folder, **{"PHAROS_ROOT": str(ROOT), **ENV, **env}).strip()
        assert self.id, "sbatch has not taken it"

    def ends_at(self, step: int) -> None:
        config = CONFIG.replace("[training]", f"[training]\nsteps = {step}").replace("interval = 10", "interval = 1000")
        write_job(self.folder, config + self._more)

    @property
    def text(self) -> str:
        with suppress(FileNotFoundError):
            return (self.folder / "out").read_text(errors="replace")
        return ""

    def until(self, pattern: str) -> None:
        until(pattern, lambda: re.search(pattern, self.text), self.words)

    def words(self) -> str:
        """Returns the state and output without step lines, for error messages."""
        lines = (line for line in self.text.splitlines() if not re.search(r" loss | saved: ", line))
        return "\n".join([self.state, *lines])

    @property
    def state(self) -> str:
        return self.cluster.state(self.id)

    def both_train(self) -> None:
        """Waits until both groups have printed a new step."""
        seen, line = len(self.text), r"\[(\d)/0 \d+\] step \d+/"
        until("both", lambda: set(re.findall(line, self.text[seen:])) == {"0", "1"}, lambda: self.text)

    def finish(self, restarts: int) -> None:
        """Requeues the job with a last step 20 after the newest checkpoint; the run resumes from that and completes."""
        saved = newest(self.run)
        self.ends_at(last := saved + 20)
        ended = ("COMPLETED", "FAILED", "CANCELLED")
        until("its end", lambda: self.state.startswith(ended), lambda: self.state + self.text)
        assert self.state == f"COMPLETED restarts {restarts} exit 0:0", self.words()[-4000:]
        assert f"loaded from outputs/tiny/checkpoint/step-{saved}" in self.text
        assert_exact(self.run, last)


def test_a_job_loses_a_step_and_a_node_and_is_preempted_and_its_time_runs_out_and_it_finishes(
    cluster: Cluster, tmp_path: Path
):
    """One job with three lives. Each signal reaches every process of a step: data workers, and children of process groups."""
    more = '[training.dataloader]\nnum_workers = 1\n[fault_tolerance]\nprocess_group = "baby_gloo"\n'
    job = Job(cluster, tmp_path, "--nodes=3", more=more, NUM_REPLICA_GROUPS="2")
    job.both_train()
    assert "group 0 on n0; group 1 on n1" in job.text
    for pid in cluster.processes("n1"):  # as whoever looks for memory does
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.until(r"group 1 died \(exit code 137\)")
    job.until(r"group 1 restarts[\s\S]*\[1/0\] step \d+ is healed")
    assert "loaded from" not in job.text, "who finds others alive has it from them"
    job.both_train()

    cluster.crash("n1")
    job.until(r"group 1: n2 replaces n1[\s\S]*\[1/0\] step \d+ is healed")
    job.both_train()
    assert "loaded from" not in job.text and "group 0 died" not in job.text
    token = job.run / "groups" / "token"
    assert token.stat().st_mode & 0o777 == 0o600 and not readable_anywhere(token.read_text().strip())
    cluster.boot("n1")
    until("n1", lambda: cluster.states()["n1"] == "idle")

    other = cluster.ask("sbatch", "--parsable", "-p", "high", "--nodes=3", "--output=/dev/null", "--wrap=true").strip()
    job.until(rf"job {job.id} is requeued")
    assert job.text.count("SIGTERM: saving after this step") == 2
    assert "exited unexpectedly" not in job.text and job.text.count("died") == 2
    before = len(job.text)
    job.both_train()
    assert cluster.state(other) == "COMPLETED restarts 0 exit 0:0" and "loaded from" in job.text[before:]

    cluster.ask("scancel", "--batch", "--signal=USR1", job.id)  # as --signal=B:USR1@300 does, 300 s before the end
    until("the third life", lambda: job.text.count(f"job {job.id} is requeued") == 2, job.words)
    job.finish(restarts=2)


def readable_anywhere(secret: str) -> bool:
    """Returns True if the secret is on a command line."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(path.read_bytes())
    return any(secret.encode() in line for line in lines)


def test_a_cluster_is_checked_by_ranks_of_srun(cluster: Cluster, tmp_path: Path):
    [port] = free_ports(1)
    flags = ("--sizes", "1KiB", "--disk_mib", "0.1", "--slow", "0.02", "--init_method", f"tcp://127.0.0.1:{port}")
    command = (sys.executable, str(ROOT / "scripts" / "check_cluster.py"), *flags, "--folder", str(tmp_path))
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1", "--mpi=none", *command)
    said = cluster.ask(*srun, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "2 ranks" in said and "no findings" in said, said


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        ((), {"NODES_PER_GROUP": "4"}, "NODES_PER_GROUP=4: the job has 3 nodes; nearest: 3"),
        ((), {"NODES_PER_GROUP": "2"}, "NODES_PER_GROUP=2: does not divide the job's 3 nodes; NUM_REPLICA_GROUPS=1 leaves"),
        ((), {"NUM_REPLICA_GROUPS": "4"}, "NUM_REPLICA_GROUPS=4: the job's 3 nodes are enough for only 3 groups of NODES_PER_GROUP=1;"),
        (("--model.dmi=3",), {}, "model.dmi: no such key"),
        ((), {"PHAROS_ROOT": "/nowhere"}, "PHAROS_ROOT=/nowhere: must be the repository; or submit from the repository"),
    ],
)  # fmt: skip
def test_bad_input_ends_the_job(
    cluster: Cluster, tmp_path: Path, words: tuple[str, ...], env: dict[str, str], said: str
):
    job = Job(cluster, tmp_path, "--nodes=3", words=words, **env)
    until("its end", lambda: job.state.startswith("FAILED"), job.words)
    assert job.state == "FAILED restarts 0 exit 2:0" and said in job.text and job.text.count("\n") == 1
    assert not (tmp_path / "outputs").exists()
