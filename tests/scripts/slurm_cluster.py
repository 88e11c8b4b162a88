"""A Slurm of one machine: munged, slurmctld and a slurmd for each "node", all from Debian's packages and all on loopback.

Nothing is installed. The packages are fetched once, with lists of their own, and unpacked into .venv-slurm, which needs no root; slurmd
does, as it starts the steps. Files, keys and sockets are in the test's folder, ports are free ones, and `close` ends every process.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.system_packages import Unavailable, once, refusal

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("munge", "slurm-client", "slurmctld", "slurmd")
FETCH_S = 120
WAIT_S = 120.0
PLUGINS = "usr/lib/*/slurm-wlm"


class Cluster:
    """A running cluster. Raises Unavailable, or TimeoutError if the nodes do not start."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        if os.geteuid() != 0:
            raise Unavailable("slurmd starts steps, for which it must be root")
        self.folder, self.nodes = folder, nodes
        self._usr = usr = fetch()
        [plugins] = usr.parent.glob(PLUGINS)
        self.env = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{usr}/bin:{usr}/sbin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, [plugins.parent, plugins])),
        }
        self.programs: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "slurm.conf").write_text(self._configuration(plugins))
        (folder / "key-file").write_bytes(os.urandom(1024))
        (folder / "key-file").chmod(0o600)
        try:
            flags = ("key-file", "socket", "pid-file", "log-file", "seed-file")
            self._start("munged", "-F", "--force", *(f"--{flag}={folder / flag}" for flag in flags))
            until("munged", lambda: (folder / "socket").exists())
            self._start("slurmctld", "-D", "-c")
            for node in nodes:
                self.boot(node)
            until("the nodes", lambda: self.states() == dict.fromkeys(nodes, "idle"))
        except BaseException:
            self.close()
            raise

    def boot(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, "-d", str(_program(self._usr, "slurmstepd")), name=node)

    def crash(self, node: str) -> None:
        """Simulates a power failure of a node: kills slurmd and all its processes."""
        self.programs[node].kill()
        self.programs.pop(node).wait()
        tasks = self.processes(node)
        for pid in {*filter(None, map(_stepd, tasks)), *tasks}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, node: str) -> list[int]:
        """Returns the pids of the tasks on that node."""
        found = []
        for pid in ours(self.env["SLURM_CONF"]):
            with suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"SLURMD_NODENAME={node}".encode() in environ:
                    found.append(pid)
        return found

    def states(self) -> dict[str, str]:
        lines = self.ask("sinfo", "-h", "-N", "-p", "low", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)  # type: ignore[misc]

    def ask(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        """Returns the command's output; empty if the controller does not answer."""
        ran = subprocess.run(command, env={**self.env, **env}, cwd=cwd, capture_output=True, text=True, timeout=WAIT_S)
        return ran.stdout

    def state(self, job: str) -> str:
        """Returns the state, such as "RUNNING restarts 0 exit 0:0"."""
        said = self.ask("scontrol", "show", "job", job)
        words = dict(re.findall(r"\b(JobState|Restarts|ExitCode)=(\S+)", said))
        return "{JobState} restarts {Restarts} exit {ExitCode}".format_map(words) if words else "unknown"

    def close(self) -> None:
        """Kills all processes by pid, and waits for their end."""
        with suppress(subprocess.TimeoutExpired):
            self.ask("scancel", "--full", "--signal=KILL", "--state=RUNNING")
        for process in self.programs.values():
            process.kill()
            process.wait()
        for pid in ours(self.env["SLURM_CONF"]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until("the end of all", lambda: not ours(self.env["SLURM_CONF"]))

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        with (self.folder / f"{name or program}.out").open("a") as out:
            self.programs[name or program] = subprocess.Popen(
                [_program(self._usr, program), *arguments],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _configuration(self, plugins: Path) -> str:
        folder, host, user = self.folder, socket.gethostname(), "root"
        controller, *ports = free_ports(1 + len(self.nodes))
        nodes = "".join(
            f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=1\n"
            for node, port in zip(self.nodes, ports, strict=True)
        )
        names = ",".join(self.nodes)
        return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
AuthType=auth/munge
CredType=cred/munge
# A job that was queued again waits for cred_expire, lest a message of its last life be taken for one of this
AuthInfo=socket={folder}/socket,cred_expire=5
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
# The strictest there is: a signal for a step reaches every descendant, sessions of their own or not
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SwitchType=switch/none
MpiDefault=none
KillWait=5
ReturnToService=2
SlurmdTimeout=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes={names} Default=YES PriorityTier=1 GraceTime=100 State=UP
PartitionName=high Nodes={names} PriorityTier=2 PreemptMode=OFF State=UP
"""


def ours(conf: str) -> list[int]:
    """Returns the pids of all live processes that were started with this configuration."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            if alive and f"SLURM_CONF={conf}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _stepd(task: int) -> int:
    """Returns the pid of the slurmstepd that is a task's parent; 0: none is."""
    with suppress(OSError):
        parent = int(Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()[1])
        return parent if "slurmstepd" in Path(f"/proc/{parent}/cmdline").read_text() else 0
    return 0


def until(what: str, holds: Callable[[], object], said: Callable[[], str] = str) -> None:
    """Waits until `holds` returns a true value. Raises TimeoutError."""
    end_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what}: has not come within {WAIT_S:g} s\n{said()[-4000:]}")
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        return [held.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(count)]


def fetch(cache: Path = ROOT / ".venv-slurm") -> Path:
    """Returns the folder `usr` with Slurm's and munge's programs; the first call fills it, atomically. Raises Unavailable."""
    for tool in ("apt-get", "dpkg-deb"):
        if not shutil.which(tool):
            raise Unavailable(f"no {tool} here: this takes Debian's packages")
    return once(cache / "root", lambda: _fill(cache)) / "usr"


def _fill(cache: Path) -> None:
    if why := refusal():
        raise Unavailable(f"it was not fetched before: {why}")
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        folder = Path(temporary)
        (folder / "lists").mkdir()
        places = [f"Dir::State::Lists={folder / 'lists'}", f"Dir::Cache={folder}"]
        places += ["Debug::NoLocking=1", "APT::Sandbox::User="]
        options = [word for place in places for word in ("-o", place)]
        _apt(folder, *options, "update")
        plan = _apt(folder, *options, "install", "--simulate", "--no-install-recommends", *PACKAGES)
        missing = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
        _apt(folder, *options, "download", *{*missing, *PACKAGES})
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", package, folder / "root"], check=True)
        (folder / "root").rename(cache / "root")


def _apt(folder: Path, *arguments: str) -> str:
    ran = subprocess.run(["apt-get", "-q", *arguments], cwd=folder, capture_output=True, text=True, timeout=FETCH_S)
    if ran.returncode:
        last = next((line for line in reversed(ran.stderr.splitlines()) if line.strip()), "no message")
        raise Unavailable(f"apt-get {arguments[-1]}: {last}")
    return ran.stdout


def _program(usr: Path, name: str) -> Path:
    """Returns a program's path: Debian names it slurmd-wlm, and links slurmd to it on installation."""
    return next(path for path in (usr / "sbin" / f"{name}-wlm", usr / "sbin" / name) if path.exists())
