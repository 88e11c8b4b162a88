"""The replica groups of a Slurm job: a lighthouse on its first node, and a step for each group. What train.sbatch becomes.

    train.sbatch -> here -> ft.rpc.lighthouse_main                   here, on the first node
                         -> srun ... run_train.sh, once a group      REPLICA_GROUP_ID = 0 ... N-1, on nodes of its own

A step that ends other than well is started again: on its own nodes or, where Slurm has lost one of them, on a spare. Who asks for the end:

    SIGUSR1 (--signal=B:USR1, the time limit is near)       save, leave, and queue the job again
    SIGTERM to the steps alone (preemption with GraceTime)  the same: the groups have left, and the last step is not reached
    SIGTERM (scancel)                                       save and leave

A life in which nothing was saved is not followed by another one. Exit code: 0 finished, saved or queued again; 2 bad input; 1 the rest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "scripts" / "slurm"))]

from scripts import replicas  # noqa: E402 (our packages first)
from scripts.plan import say, whole  # noqa: E402

if TYPE_CHECKING:
    from configs.schema import RunConfig

PORTS = range(20000, 32000)  # below those that Linux gives away by itself
# As run_train.sh is started on each node of a step; Slurm alone knows which of them this is.
RUN_TRAIN = ("bash", "-c", 'NODE_RANK=$SLURM_NODEID exec "$0" "$@"', str(ROOT / "scripts" / "run_train.sh"))


@dataclass
class Nodes:
    job: str
    addresses: dict[str, str]  # by which Slurm reaches them, by name, in the job's order
    per_group: int
    of: dict[str, list[str]]  # by group
    ask: Callable[..., str]  # of a program of Slurm's, by its command
    spares: list[str] = field(default_factory=list)

    @staticmethod
    def read(env: Mapping[str, str], ask: Callable[..., str]) -> Nodes:
        """Raises ValueError: they cannot be assigned to that many groups. RuntimeError: Slurm does not answer."""
        job, per_group = env["SLURM_JOB_ID"], whole(env, "NODES_PER_GROUP", least=1, default=1)
        names = ask("scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]).split()
        most = len(names) // per_group
        if not most:
            raise ValueError(f"NODES_PER_GROUP={per_group}: the job has {len(names)} nodes; nearest: {len(names)}")
        groups = whole(env, "NUM_REPLICA_GROUPS", least=1, default=most)
        if groups > most:
            raise ValueError(
                f"NUM_REPLICA_GROUPS={groups}: the job's {len(names)} nodes are enough for {most} groups of "
                f"NODES_PER_GROUP={per_group}; nearest: {most}"
            )
        if len(names) % per_group and "NUM_REPLICA_GROUPS" not in env:
            raise ValueError(
                f"NODES_PER_GROUP={per_group}: does not divide the job's {len(names)} nodes; NUM_REPLICA_GROUPS={most} "
                "leaves the others as spares"
            )
        of = {str(group): names[group * per_group : (group + 1) * per_group] for group in range(groups)}
        addresses = {}
        for line in ask("scontrol", "--oneliner", "show", "node", ",".join(names)).splitlines():
            words = dict(word.partition("=")[::2] for word in line.split())
            addresses[words["NodeName"]] = words.get("NodeAddr", words["NodeName"])
        return Nodes(job, {name: addresses[name] for name in names}, per_group, of, ask, names[groups * per_group :])

    def renew(self, group: str) -> str:
        """Puts spares in the place of nodes that are lost. What has happened; nothing where its nodes are all there."""
        mine, job = self.of[group], self._of_the_job()
        # A star: it does not respond
        silent = {node for node in mine if "*" in self._ask_again("sinfo", "-h", "-n", node, "-o", "%T")}
        lost = [node for node in mine if node not in job or node in silent]
        self.spares = [spare for spare in self.spares if spare in job]
        if len(lost) <= len(self.spares):
            taken = {node: self.spares.pop(0) for node in lost}
            # In the job's order: the first is the step's node 0, where its ranks meet
            self.of[group] = sorted((taken.get(node, node) for node in mine), key=list(self.addresses).index)
            return ", ".join(f"{spare} takes the place of {node}" for node, spare in taken.items())
        gone = [node for node in mine if node not in job]
        if gone:
            raise LookupError(f"the job has lost {', '.join(gone)}, and has no spare node")
        return ""

    def lost(self, group: str) -> bool:
        """True when Slurm has taken one of its nodes from the job, as dead."""
        return not self._of_the_job().issuperset(self.of[group])

    def _of_the_job(self) -> set[str]:
        listed = self._ask_again("squeue", "-h", "-j", self.job, "-o", "%N").strip()
        return set(self.ask("scontrol", "show", "hostnames", listed).split()) if listed else set(self.addresses)

    def _ask_again(self, *command: str) -> str:
        """Slurm's answer; empty where its controller is away, which ends no job: the question is asked again."""
        try:
            return self.ask(*command)
        except RuntimeError as error:
            say(str(error))
            return ""


class SlurmStep(replicas.ReplicaSupervisor):
    """A group, and the srun that runs it: a step of the job."""

    def __init__(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, restarts: int, nodes: Nodes
    ) -> None:
        super().__init__(name, [], {**env, "REPLICA_GROUP_ID": name}, log, restarts)
        self._argv, self._nodes = argv, nodes

    def start(self) -> int:
        mine, per_group = self._nodes.of[self.name], str(self._nodes.per_group)
        port = PORTS[(int(self._nodes.job) * 64 + int(self.name)) % len(PORTS)]
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
            "--cpu-bind=none",  # a task alone on its node would be bound to one core of it
            "--kill-on-bad-exit=1",
            "--no-kill=off",  # the job's outlives a node (train.sbatch); a step that did would be waited for for ever
            *RUN_TRAIN,
            *self._argv,
        ]
        return super().start()

    def ended(self) -> int | None:
        code = super().ended()
        # Of a node that died, srun says an error, and ends with 0 (22.05)
        return 1 if code == 0 and self._nodes.lost(self.name) else code

    def poll(self, now_s: float) -> str:
        if self.code is None and self.process is None and self.restarts and now_s >= self.again_at_s:
            try:
                moved = self._nodes.renew(self.name)
            except LookupError as error:
                self.code = 1
                return f"group {self.name} failed for good ({error})"
            if moved:
                return f"group {self.name}: {moved}\n" + super().poll(now_s)
        return super().poll(now_s)


def main(argv: list[str]) -> int:
    from training.appended import RunLock

    came = replicas.collect_signals(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    argv = [*argv, replicas.ENABLED]
    try:
        nodes = Nodes.read(os.environ, ask)
        port = whole(os.environ, "LIGHTHOUSE_PORT", least=0)
        config, restarts, grace_s = replicas.prepare(argv, len(nodes.of), nodes=nodes.per_group)
        lock = RunLock(config.run_folder / "groups")
        folder, before = config.run_folder / "groups", saved(config)
        env = replicas.environment(config.run_folder, len(nodes.of))
        lighthouse = replicas.LighthouseSupervisor(config, env, bind=f"[::]:{port}", http="")
    except (ValueError, RuntimeError) as error:
        say(str(error))
        return 2 if isinstance(error, ValueError) else 1
    # By the name that Slurm reaches this node by, which other nodes know; a host name need not be one.
    here = next(iter(nodes.addresses.values()))
    lighthouse.address = f"http://{f'[{here}]' if ':' in here else here}:{lighthouse.port}"
    env["TORCHFT_LIGHTHOUSE"] = lighthouse.address
    steps = [SlurmStep(name, argv, env, folder / f"{name}.log", restarts, nodes) for name in nodes.of]
    say(f"job {nodes.job}: " + "; ".join(f"group {name} on {' '.join(mine)}" for name, mine in nodes.of.items()))
    with closing(lock):
        # By Slurm to all steps: an srun that gets a SIGTERM kills its step
        stop = ("scancel", "--signal=TERM", nodes.job)
        code = replicas.run(steps, lighthouse, came, grace_s, stop)
    asked = {number for number, _ in came}
    if asked - {signal.SIGUSR1} or code == 2 or (code and not asked) or finished(config):
        return code
    return again(nodes.job, before, saved(config))


def again(job: str, before: int, now: int) -> int:
    """Has Slurm queue this job again, unless it would do so for ever."""
    if now <= before:
        say(
            f"job {job} is not queued again: since it began at step {before}, no step was saved; give it more time to save"
        )
        return 1
    say(f"saved at step {now}: job {job} is queued again, and goes on from there")
    return 1 if subprocess.run(["scontrol", "requeue", job], check=False).returncode else 0


def saved(config: RunConfig) -> int:
    """The step of the newest checkpoint; 0: there is none."""
    from training.checkpoint_files import newest

    return newest(config.run_folder / config.checkpoint.folder) or 0


def finished(config: RunConfig) -> bool:
    """True when the last step is made, by the samples that the groups say they trained on."""
    from scripts.samples import FILE_NAME

    try:
        with (config.run_folder / FILE_NAME).open() as file:
            last = deque((line for line in file if line.endswith("\n")), maxlen=1)
    except FileNotFoundError:
        return False
    return bool(last) and json.loads(last[0])["step"] >= config.training.steps


def ask(*command: str) -> str:
    """Slurm's answer. Raises RuntimeError."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ran.stderr.strip() or f'exit code {ran.returncode}'}")
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
