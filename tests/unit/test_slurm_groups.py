"""Behaviour of groups in a Slurm job that would need many real nodes: the assignment of nodes, and requeued jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.launch_settings import MAX_SHORT_RUNS
from scripts.slurm import groups
from scripts.slurm.groups import Nodes, SlurmStep
from training.durable_files import RunLock


class Slurm:
    """Answers as Slurm's programs do."""

    def __init__(self, names: str) -> None:
        self.of_the_job, self.silent, self.away = names.split(), set[str](), False
        self.env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": names.replace(" ", ",")}

    def nodes(self, **env: str) -> Nodes:
        return Nodes.read({**self.env, **env}, self.ask)

    def ask(self, *command: str) -> str:
        if self.away:
            raise RuntimeError(f"{command[0]}: Unable to contact slurm controller")
        if command[0] == "squeue":
            return ",".join(self.of_the_job) + "\n"
        if command[0] == "sinfo":
            return "down*\n" if command[3] in self.silent else "allocated\n"
        if "hostnames" in command:
            return "\n".join(command[-1].split(",")) + "\n"
        return "".join(
            f"NodeName={node} Arch=x86_64 NodeAddr=10.0.0.{node[1:]} State=x\n" for node in command[-1].split(",")
        )


def test_nodes_are_dealt_in_their_order_and_the_rest_are_spares():
    slurm = Slurm("n1 n2 n3 n4 n5")
    nodes = slurm.nodes(NODES_PER_GROUP="2", NUM_REPLICA_GROUPS="2")
    assert (nodes.of, nodes.spares) == ({"0": ["n1", "n2"], "1": ["n3", "n4"]}, ["n5"])
    assert nodes.addresses["n3"] == "10.0.0.3"


def test_a_job_of_thousands_of_nodes_needs_no_argument_that_linux_refuses():
    """One argument of a program may have 128 KiB (MAX_ARG_STRLEN of execve(2))."""
    names, asked = [f"gpu-rack-{number // 16:04}-node-{number % 16:02}" for number in range(8000)], list[str]()

    def ask(*command: str) -> str:
        asked.extend(command)
        if "hostnames" in command:
            return "\n".join(names)
        return "\n".join(f"NodeName={name} NodeAddr={name}.cluster" for name in names)

    listed = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu-rack-[0000-0499]-node-[00-15]", "NODES_PER_GROUP": "8"}
    nodes = Nodes.read(listed, ask)
    assert len(nodes.of) == 1000 and nodes.addresses[names[-1]] == f"{names[-1]}.cluster"
    assert max(map(len, asked)) < 128 << 10 < len(",".join(names))


def test_a_spare_takes_the_place_of_a_lost_node_and_the_first_of_them_is_where_ranks_meet(tmp_path: Path):
    slurm = Slurm("n1 n2 n3 n4 n5")
    nodes = slurm.nodes(NODES_PER_GROUP="2", NUM_REPLICA_GROUPS="2")
    assert nodes.renew("1") == "" and not nodes.lost("1")
    slurm.of_the_job.remove("n3")
    assert nodes.lost("1") and not nodes.lost("0")
    assert nodes.renew("1") == "n5 replaces n3" and nodes.renew("1") == ""
    assert (nodes.of["1"], nodes.spares) == (["n4", "n5"], [])
    program(tmp_path / "srun", "echo $*")
    step = SlurmStep("1", ["a.toml"], {"PATH": str(tmp_path)}, tmp_path / "log", 1, nodes)
    step.start()
    assert step.process and step.process.wait(30) == 0
    step.end()
    assert "--nodes=2 " in (words := (tmp_path / "log").read_text()) and "--nodelist=n4,n5 " in words
    assert step.env["RDZV_ENDPOINT"].startswith("10.0.0.4:") and step.env["NNODES"] == "2"
    slurm.of_the_job.remove("n5")
    with pytest.raises(LookupError, match=r"the job has lost n5, and has no spare node"):
        nodes.renew("1")


def test_each_start_of_a_group_has_a_port_of_its_own(tmp_path: Path):
    """The first one may belong to a program of the node. Of a thousand groups, several would never start."""
    program(tmp_path / "srun", "exit 1")
    nodes, endpoints = Slurm("n1 n2").nodes(NODES_PER_GROUP="2"), list[str]()
    step = SlurmStep("0", ["a.toml"], {"PATH": str(tmp_path)}, tmp_path / "log", 100, nodes)
    step.start()
    while step.code is None:
        endpoints.append(step.env["RDZV_ENDPOINT"])
        assert step.process and step.process.wait(30) == 1
        assert step.poll(0.0) != "" and (step.code is not None or "restarts" in step.poll(step.restart_at_s))
    step.end()
    assert len(set(endpoints)) == len(endpoints) == MAX_SHORT_RUNS
    assert all(20000 <= int(endpoint.removeprefix("10.0.0.1:")) < 32000 for endpoint in endpoints)


@pytest.mark.parametrize("needs_all", [False, True])
def test_a_node_that_lacks_a_gpu_ends_its_group_and_no_other(tmp_path: Path, needs_all: bool):
    """launch.py takes more ranks than GPUs as bad input, which on one machine would be that of all groups. Where min_replica_size requires
    each group, the others would wait for it until the job's time is over."""
    program(tmp_path / "srun", "exit 2")
    nodes = Slurm("n1 n2").nodes()
    step = SlurmStep("0", ["a.toml"], {"PATH": str(tmp_path)}, tmp_path / "log", 100, nodes, 1 + needs_all)
    step.start()
    assert step.process and step.process.wait(30) == 2
    assert step.poll(0.0) == "group 0 failed and is not restarted (exit code 2)" and step.code == 2
    assert step.is_refused is needs_all
    step.end()


def test_a_node_that_does_not_answer_is_left_for_a_spare_and_else_tried_again():
    slurm = Slurm("n1 n2 n3")
    nodes = slurm.nodes(NUM_REPLICA_GROUPS="2")
    slurm.silent = {"n1", "n2"}
    assert nodes.renew("0") == "n3 replaces n1"
    assert nodes.renew("1") == "" and nodes.of["1"] == ["n2"]


def test_a_controller_that_is_away_ends_no_group(capsys: pytest.CaptureFixture[str]):
    slurm = Slurm("n1 n2")
    nodes = slurm.nodes()
    slurm.away = True
    assert not nodes.lost("0") and nodes.renew("0") == ""
    assert "Unable to contact slurm controller" in capsys.readouterr().err


def test_a_node_without_room_for_a_process_ends_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The error is that of a program that cannot be started."""
    slurm, started = Slurm("n1 n2"), ["squeue", "sinfo"]
    nodes = slurm.nodes()
    monkeypatch.setenv("PATH", str(tmp_path))
    nodes.ask = lambda *command: slurm.ask(*command) if command[0] in started else groups.ask(*command)
    assert not nodes.lost("0") and nodes.renew("0") == ""
    started.clear()
    assert not nodes.lost("0") and nodes.renew("0") == ""
    assert set(capsys.readouterr().err.splitlines()) == {
        f"pharos: {command}: [Errno 2] No such file or directory: '{command}'"
        for command in ("scontrol", "squeue", "sinfo")
    }


def program(path: Path, does: str) -> None:
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)


def test_a_job_is_queued_again_only_if_it_came_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    program(tmp_path / "scontrol", f"echo $* >>{tmp_path}/asked")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert groups.requeue("7", before=20, now=20) == 1 and not (tmp_path / "asked").exists()
    assert "it has saved no checkpoint since it began at step 20" in capsys.readouterr().err
    assert groups.requeue("7", before=20, now=21) == 0 and (tmp_path / "asked").read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("does", "signals", "codes"),
    [
        ("echo JobId=7 PreemptEligibleTime=2026-11-29T10:00:00 PreemptTime=None", (), ()),
        ("echo JobId=7 PreemptEligibleTime=2026-11-29T10:00:00 PreemptTime=2026-11-29T11:00:00", (), (0, 1, 2)),
        ("exit 1", (), (0,)),  # requeued in vain rather than never
        ("exit 1", (signal.SIGUSR1,), (0, 1, 2)),  # the time limit: a group may have failed before
        ("exit 1", (signal.SIGUSR1, signal.SIGTERM), ()),  # scancel
        ("exit 1", (signal.SIGTERM,), ()),
    ],
)
def test_groups_that_slurm_has_ended_are_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, signals: tuple[int, ...], codes: tuple[int, ...]
):
    """`codes`: exit codes of the groups with which the job is queued again."""
    program(tmp_path / "scontrol", does)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tuple(code for code in range(3) if groups.was_interrupted("7", set(signals), code)) == codes


@pytest.mark.parametrize(("rows", "done"), [("", False), ("9\n", False), ("9\n10\n", True), ("9\n10", False)])
def test_a_run_is_finished_when_its_last_step_is_written(tmp_path: Path, rows: str, done: bool):
    config: Any = SimpleNamespace(run_folder=tmp_path, training=SimpleNamespace(steps=10))
    assert not groups.finished(config)
    text = "".join(json.dumps({"step": int(row)}) + row[len(row.rstrip()) :] for row in rows.splitlines(keepends=True))
    (tmp_path / "samples.jsonl").write_text(text)
    assert groups.finished(config) == done


def test_a_run_without_groups_is_not_joined(tmp_path: Path):
    """Stubs of Slurm's programs describe a job on one node."""
    program(
        tmp_path / "scontrol", 'case $* in *hostnames*) echo n1 ;; *) echo "NodeName=n1 NodeAddr=127.0.0.1" ;; esac'
    )
    (tmp_path / "a.toml").write_text("[model]\ndim = 32\nn_heads = 2\nn_kv_heads = 2\n")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    with closing(RunLock(tmp_path / "outputs" / "a")):
        ended = subprocess.run(
            [sys.executable, groups.__file__, "a.toml"], cwd=tmp_path, env=env, capture_output=True, text=True
        )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(r"pharos: job.name: outputs/a is in use by process \d+ on .+\n", ended.stderr)
