"""contrib/kubernetes/jobset.yaml: its pods' commands and environments, in processes of this machine. Not covered: the API server's handling
of the manifest (schema of a JobSet, restarts, names, volumes)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ft.rpc.lighthouse_flags import DEFAULT_PORT
from tests.scripts.slurm_cluster import free_ports
from tests.scripts.tiny_job import CONFIG, ROOT, assert_exact, newest, write_job

WAIT_S = 240.0
JOB_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-index']"
pytestmark = pytest.mark.timeout(3 * WAIT_S)


class Pods:
    """Acts for the cluster: maps names, ports, volumes and labels of the manifest to those of this machine and test."""

    def __init__(self, folder: Path) -> None:
        (folder / "secret").mkdir()
        (folder / "secret" / "token").write_text("t" * 32)
        (folder / "outputs").mkdir()
        config = CONFIG.replace("text/*.txt", f"{folder}/text/*.txt")
        write_job(folder, config.replace("[training]", "[training]\nsteps = 100000"))
        text = (ROOT / "contrib" / "kubernetes" / "jobset.yaml").read_text()
        grpc, http = free_ports(2)
        for there, here in {
            f"{DEFAULT_PORT}": str(grpc),
            f"{DEFAULT_PORT + 1}": str(http),
            "http://pharos-lighthouse:": "http://127.0.0.1:",
            "/etc/pharos": f"{folder}/secret",
            "/outputs": f"{folder}/outputs",
            "configs/llama.toml": f"{folder}/tiny.toml",
            "workingDir: /pharos": f"workingDir: {ROOT}",
        }.items():
            assert there in text, f"the manifest no longer has {there}"
            text = text.replace(there, here)
        self.parts = {part["kind"]: part for part in yaml.safe_load_all(text)}
        self.folder, self.run, self.started = folder, folder / "outputs" / "tiny", list[subprocess.Popen[bytes]]()

    @property
    def job(self) -> dict[str, Any]:
        [job] = self.parts["JobSet"]["spec"]["replicatedJobs"]
        return job

    def start(self, pod: dict[str, Any], name: str, index: int = 0) -> subprocess.Popen[bytes]:
        [container] = pod["spec"]["containers"]
        env = {}
        for variable in container["env"]:
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            assert field in (None, JOB_INDEX)
            env[variable["name"]] = str(index) if field else variable["value"]
        with (self.folder / f"{name}.txt").open("a") as out:
            process = subprocess.Popen(
                [*container["command"], *container["args"]],
                cwd=container["workingDir"],
                env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **env},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def lighthouse(self) -> subprocess.Popen[bytes]:
        """Starts the lighthouse on the manifest's port, which is replaced by a free one."""
        pod = self.parts["Deployment"]["spec"]["template"]
        [container] = pod["spec"]["containers"]
        container["args"] += ["--bind", f"127.0.0.1:{container['ports'][0]['containerPort']}"]
        return self.start(pod, "lighthouse")

    def group(self, index: int) -> subprocess.Popen[bytes]:
        return self.start(self.job["template"]["spec"]["template"], str(index), index)

    def text(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def until(self, what: str, holds: Callable[[], object]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not holds():
            ended = [process.args for process in self.started if process.poll() not in (None, -signal.SIGKILL)]
            assert not ended, f"{what}: {ended} has ended\n{self.text('lighthouse')[-1000:]}\n{self.text('0')[-2000:]}"
            assert time.monotonic() < end_s, "\n".join(
                [what, *(self.text(name)[-2000:] for name in ("lighthouse", "0", "1"))]
            )
            time.sleep(0.05)

    def steps(self, index: int) -> int:
        return len(re.findall(r"\] step \d+/", self.text(str(index))))

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    made = Pods(tmp_path)
    yield made
    made.close()


def test_the_parts_name_each_other(pods: Pods):
    """Detects inconsistent names, which an API server accepts, but with which nothing works."""
    service, deployment, spec = pods.parts["Service"], pods.parts["Deployment"]["spec"], pods.parts["JobSet"]["spec"]
    assert service["spec"]["selector"].items() <= deployment["template"]["metadata"]["labels"].items()
    assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    [server] = deployment["template"]["spec"]["containers"]
    assert ports == {port["name"]: port["containerPort"] for port in server["ports"]}
    assert "--bind" not in server["args"], "the default: all interfaces, with or without IPv6"
    [trainer] = pods.job["template"]["spec"]["template"]["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in trainer["env"]}
    assert env["TORCHFT_LIGHTHOUSE"] == f"http://127.0.0.1:{ports['grpc']}"
    assert int(env["NUM_REPLICA_GROUPS"]) == pods.job["replicas"]
    assert spec["successPolicy"]["targetReplicatedJobs"] == [pods.job["name"]]
    grace_s = pods.job["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int(env["STOP_GRACE"]) < grace_s
    for pod in (deployment["template"], pods.job["template"]["spec"]["template"]):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]} == set(volumes)
        assert volumes["token"]["secret"] == {"secretName": "pharos-token", "defaultMode": 0o440}
    assert "t" * 32 not in yaml.safe_dump_all(pods.parts.values())


def test_a_group_dies_and_one_is_evicted_and_both_come_back(pods: Pods):
    server, groups = pods.lighthouse(), [pods.group(index) for index in range(pods.job["replicas"])]
    pods.until("both train", lambda: pods.steps(0) > 2 < pods.steps(1))
    os.killpg(groups[1].pid, signal.SIGKILL)
    assert groups[1].wait() == -signal.SIGKILL  # restartPolicy: Never: the Job makes another pod
    before, groups[1] = len(pods.text("1")), pods.group(1)
    pods.until("its heal", lambda: "is healed" in pods.text("1")[before:])
    assert "loaded from" not in pods.text("1")

    for group in groups:  # the nodes are drained
        group.terminate()
    assert [group.wait(WAIT_S) for group in groups] == [143, 143]
    assert all("SIGTERM: saving after this step" in pods.text(name) for name in "01")
    saved = newest(pods.run)
    config = pods.folder / "tiny.toml"
    config.write_text(config.read_text().replace("steps = 100000", f"steps = {saved + 20}"))
    groups = [pods.group(index) for index in range(2)]
    assert [group.wait(WAIT_S) for group in groups] == [0, 0]
    assert_exact(pods.run, saved + 20)
    assert server.poll() is None


def test_bad_input_ends_with_the_code_that_the_job_is_not_started_again_for(pods: Pods):
    """podFailurePolicy: exit code 2 fails the Job without a retry."""
    rules = pods.job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0] == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    pods.job["template"]["spec"]["template"]["spec"]["containers"][0]["args"] += ["--training.stpes", "3"]
    assert pods.group(0).wait(WAIT_S) == 2 and "did you mean training.steps?" in pods.text("0")
