"""Runs the replica groups of a Slurm job: a lighthouse on the first node, and a job step per group. train.sbatch execs this program.

    train.sbatch -> groups.py -> ft/rpc/lighthouse_main.py           on the first node
                              -> srun ... run_train.sh, per group    REPLICA_GROUP_ID = 0 ... N-1, on its own nodes

A job step that fails is restarted on its nodes or, if Slurm has lost one of them, with a spare node instead. Signals that stop the job:

    SIGUSR1 (--signal=B:USR1, the time limit is near)         save, leave, and requeue the job
    SIGTERM only to the steps (preemption with GraceTime)     the same: the groups have left before the last training step
    SIGTERM (scancel)                                         save and leave

The job is not requeued if it has saved no checkpoint since it began, or if the groups have ended without a signal. Exit code: 0 finished,
saved or requeued; 2 bad input; 143 stopped while no step was under way; 1 other errors.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "scripts" / "slurm"))]

from ft.rpc.access import Endpoint, all_interfaces  # noqa: E402 (our packages first)
from scripts import replicas  # noqa: E402
from scripts.launch_settings import end_program, say, whole  # noqa: E402

if TYPE_CHECKING:
    from configs.schema import RunConfig

PORTS, NEXT_PORT = range(20000, 32000), 1009  # below Linux's ephemeral ports; a restart takes another one
# The command on each node of a job step; only Slurm knows the node's rank in the step.
RUN_TRAIN = ("bash", "-c", 'NODE_RANK=$SLURM_NODEID exec "$0" "$@"', str(ROOT / "scripts" / "run_train.sh"))


@dataclass
class Nodes:
    job: str
    addresses: dict[str, str]  # node name -> address that Slurm uses, in the job's order
    per_group: int
    of: dict[str, list[str]]  # replica group -> its nodes
    ask: Callable[..., str]  # runs a Slurm command and returns its output
    spares: list[str] = field(default_factory=list)

    @staticmethod
    def read(env: Mapping[str, str], ask: Callable[..., str]) -> Nodes:
        """Assigns the job's nodes to groups. Raises ValueError: too few, or not divisible. RuntimeError: a Slurm command failed."""
        job, per_group = env["SLURM_JOB_ID"], whole(env, "NODES_PER_GROUP", least=1, default=1)
        names = ask("scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]).split()
        most = len(names) // per_group
        if not most:
            raise ValueError(f"NODES_PER_GROUP={per_group}: the job has {len(names)} nodes; nearest: {len(names)}")
        groups = whole(env, "NUM_REPLICA_GROUPS", least=1, default=most)
        if groups > most:
            raise ValueError(
                f"NUM_REPLICA_GROUPS={groups}: the job's {len(names)} nodes are enough for only {most} groups of "
                f"NODES_PER_GROUP={per_group}; nearest: {most}"
            )
        if len(names) % per_group and "NUM_REPLICA_GROUPS" not in env:
            raise ValueError(
                f"NODES_PER_GROUP={per_group}: does not divide the job's {len(names)} nodes; NUM_REPLICA_GROUPS={most} "
                "leaves the others as spares"
            )
        of = {str(group): names[group * per_group : (group + 1) * per_group] for group in range(groups)}
        addresses = {}
        # the list as Slurm writes it, n[1-8000]: the names of so many nodes are longer than Linux lets an argument be (128 KiB)
        for line in ask("scontrol", "--oneliner", "show", "node", env["SLURM_JOB_NODELIST"]).splitlines():
            words = dict(word.partition("=")[::2] for word in line.split())
            addresses[words["NodeName"]] = words.get("NodeAddr", words["NodeName"])
        return Nodes(job, {name: addresses[name] for name in names}, per_group, of, ask, names[groups * per_group :])

    def renew(self, group: str) -> str:
        """Replaces lost nodes of a group by spares. Returns a line for the user, or "" without a change. Raises LookupError: no spare."""
        mine, job = self.of[group], self._of_the_job()
        # a * after the state: the node does not respond
        silent = {node for node in mine if "*" in self._ask_again("sinfo", "-h", "-n", node, "-o", "%T")}
        lost = [node for node in mine if node not in job or node in silent]
        self.spares = [spare for spare in self.spares if spare in job]
        if len(lost) <= len(self.spares):
            taken = {node: self.spares.pop(0) for node in lost}
            # In the job's order: the first is node 0 of the step, which hosts the rendezvous
            self.of[group] = sorted((taken.get(node, node) for node in mine), key=list(self.addresses).index)
            return ", ".join(f"{spare} replaces {node}" for node, spare in taken.items())
        gone = [node for node in mine if node not in job]
        if gone:
            raise LookupError(f"the job has lost {', '.join(gone)}, and has no spare node")
        return ""

    def lost(self, group: str) -> bool:
        """Returns True if Slurm has removed one of the group's nodes from the job."""
        return not self._of_the_job().issuperset(self.of[group])

    def _of_the_job(self) -> set[str]:
        listed = self._ask_again("squeue", "-h", "-j", self.job, "-o", "%N").strip()
        names = self._ask_again("scontrol", "show", "hostnames", listed) if listed else ""
        return set(names.split() or self.addresses)

    def _ask_again(self, *command: str) -> str:
        """Returns the output; "" if the controller does not answer, or this node has no room for a further process, which must not end a
        job: the caller asks again later."""
        try:
            return self.ask(*command)
        except RuntimeError as error:
            say(str(error))
            return ""


class SlurmStep(replicas.ReplicaSupervisor):
    """A replica group and its srun, which runs it as a job step."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        restarts: int,
        nodes: Nodes,
        min_groups: int = 1,
    ) -> None:
        super().__init__(name, [], {**env, "REPLICA_GROUP_ID": name}, log, restarts)
        self._argv, self._nodes, self._min_groups = argv, nodes, min_groups

    def start(self) -> int:
        mine, per_group = self._nodes.of[self.name], str(self._nodes.per_group)
        # a program of the first node may have the port, and a group is not restarted after six failures at once
        tried = len(self.restarted_at_s)
        port = PORTS[(int(self._nodes.job) * 64 + int(self.name) + NEXT_PORT * tried) % len(PORTS)]
        self.env = {**self.env, "NNODES": per_group, "RDZV_ENDPOINT": f"{self._nodes.addresses[mine[0]]}:{port}"}
        self.command = [
            "srun",
            f"--job-name=group-{self.name}",
            f"--nodes={per_group}",
            f"--ntasks={per_group}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(mine)}",
            "--export=ALL",
            "--mem=0",
            "--mpi=none",
            "--cpu-bind=none",  # default: a single task on a node is bound to one core
            "--kill-on-bad-exit=1",
            "--no-kill=off",  # the job survives the loss of a node (train.sbatch); the step must not, or srun waits forever
            *RUN_TRAIN,
            *self._argv,
        ]
        return super().start()

    @property
    def is_refused(self) -> bool:
        """Returns True if the job cannot go on without this group. Else bad input may be that of its nodes alone, such as a GPU that is
        missing, and is that of all groups only if all end with it: the settings were checked before."""
        return len(self._nodes.of) <= self._min_groups and super().is_refused

    def ended(self) -> int | None:
        code = super().ended()
        # When a node has died, srun prints an error and exits with 0 (Slurm 22.05)
        return 1 if code == 0 and self._nodes.lost(self.name) else code

    def poll(self, now_s: float) -> str:
        if self.code is None and self.process is None and self.restarts and now_s >= self.restart_at_s:
            try:
                replaced = self._nodes.renew(self.name)
            except LookupError as error:
                self.code = 1
                return f"group {self.name} failed and is not restarted ({error})"
            if replaced:
                return f"group {self.name}: {replaced}\n" + super().poll(now_s)
        return super().poll(now_s)


def main(argv: list[str]) -> int:
    received = replicas.collect_signals(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    try:
        argv = replicas.enabled(argv)
        nodes = Nodes.read(os.environ, ask)
        port = whole(os.environ, "LIGHTHOUSE_PORT", least=0)
        config, restarts, grace_s = replicas.prepare(argv, len(nodes.of), nodes=nodes.per_group)
        lock = replicas.lock_groups(config.run_folder / "groups")
        folder, before = config.run_folder / "groups", saved(config)
        env = replicas.environment(config.run_folder, len(nodes.of))
        lighthouse = replicas.LighthouseSupervisor(config, env, bind=str(Endpoint(all_interfaces(), port)), http="")
    except (ValueError, RuntimeError, OSError) as error:
        say(str(error))
        return 2 if isinstance(error, ValueError) else 1
    # The address that Slurm uses for this node, which other nodes can resolve; the host name may not be.
    here = next(iter(nodes.addresses.values()))
    lighthouse.address = f"http://{f'[{here}]' if ':' in here else here}:{lighthouse.port}"
    env["TORCHFT_LIGHTHOUSE"] = lighthouse.address
    least = config.fault_tolerance.min_replica_size
    steps = [SlurmStep(name, argv, env, folder / f"{name}.log", restarts, nodes, least) for name in nodes.of]
    say(f"job {nodes.job}: " + "; ".join(f"group {name} on {' '.join(mine)}" for name, mine in nodes.of.items()))
    with lock:
        # scancel signals all job steps; SIGTERM to srun would kill its step
        stop = ("scancel", "--signal=TERM", nodes.job)
        code = replicas.run(steps, lighthouse, received, grace_s, stop)
    if finished(config) or not was_interrupted(nodes.job, {number for number, _ in received}, code):
        return code
    return requeue(nodes.job, before, saved(config))


def was_interrupted(job: str, signals: set[int], code: int) -> bool:
    """Returns True if Slurm has ended the groups; False if they ended by themselves, as when the budgets of all data end, or by a failure
    or scancel. `signals`: those that this process has received; `code`: of the groups."""
    if signals:
        return signals == {signal.SIGUSR1}
    was_preempted = preempted(job)  # then some groups may have failed, as SIGKILL follows, or before
    return code == 0 if was_preempted is None else was_preempted


def requeue(job: str, before: int, now: int) -> int:
    """Requeues this job, unless it made no progress. Returns the exit code. `before`, `now`: last saved step at its begin and now."""
    if now <= before:
        say(
            f"job {job} is not requeued: it has saved no checkpoint since it began at step {before}; give it more time to save"
        )
        return 1
    say(f"job {job} is requeued and resumes from step {now}")
    return 1 if subprocess.run(["scontrol", "requeue", job], check=False).returncode else 0


def preempted(job: str) -> bool | None:
    """Returns True if Slurm has told the job's steps to leave, which it does not tell this process; None if Slurm does not say."""
    try:
        return not re.search(r"\bPreemptTime=None\b", ask("scontrol", "--oneliner", "show", "job", job))
    except RuntimeError as error:
        say(str(error))
        return None


def saved(config: RunConfig) -> int:
    """Returns the step of the newest checkpoint, or 0."""
    from training.checkpoint_files import newest

    return newest(config.run_folder / config.checkpoint.local_folder) or 0


def finished(config: RunConfig) -> bool:
    """Returns True if the last training step is committed, according to samples.jsonl."""
    from scripts.samples import SAMPLES_FILE

    try:
        with (config.run_folder / SAMPLES_FILE).open() as file:
            last = deque((line for line in file if line.endswith("\n")), maxlen=1)
    except FileNotFoundError:
        return False
    return bool(last) and json.loads(last[0])["step"] >= config.training.steps


def ask(*command: str) -> str:
    """Runs a Slurm command and returns its output. Raises RuntimeError."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{command[0]}: {error}") from None
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ran.stderr.strip() or f'exit code {ran.returncode}'}")
    return ran.stdout


if __name__ == "__main__":
    end_program(main(sys.argv[1:]))
