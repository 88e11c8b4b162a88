"""A lighthouse and N replica groups on this machine, started again when they die: what run_replicas.sh becomes.

    run_replicas.sh -> here -> ft.rpc.lighthouse_main                     one, on loopback
                            -> launch.py, once for each group             REPLICA_GROUP_ID = 0 ... N-1

The groups' lines are shown as they come, each with its group and rank in front; each group's own are in <run>/groups/ID.log.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "scripts"))]

from scripts.launch import LogFile, check, ranks_here, threads_per_rank  # noqa: E402 (our packages first)
from scripts.plan import RESTARTS_WITHIN_S, LaunchSettings, forget_old, how_ended, say  # noqa: E402

if TYPE_CHECKING:
    from configs.schema import RunConfig

RESTART_S = 1.0  # before a group starts again; twice as long after each life that was short
SHORT_LIFE_S, SHORT_LIVES = 30.0, 6  # so many of them in a row are no accident
POLL_S = 0.1
ANY_PORT = "127.0.0.1:0"  # of this machine alone
OPEN = "--open"  # the live page, in a browser
SHARED = "SHARE_GPUS"  # 1: groups may have ranks on one GPU; slow, for trying things out
ENABLED = "--fault_tolerance.enable=true"


@dataclass
class ReplicaSupervisor:
    """One replica group over all its starts: its process, its output, and when it may start again."""

    name: str
    command: list[str]
    env: dict[str, str]
    log: Path
    restarts: int  # within any RESTARTS_WITHIN_S
    shown: bool = True  # on the console
    process: subprocess.Popen[str] | None = None
    code: int | None = None  # of its end, for good
    started_s: float = 0.0
    again_at_s: float = 0.0
    short_lives: int = 0
    restarted_at_s: list[float] = field(default_factory=list)
    reader: threading.Thread | None = None

    @staticmethod
    def here(
        name: str, argv: Sequence[str], env: Mapping[str, str], folder: Path, restarts: int, devices: Sequence[str] = ()
    ) -> ReplicaSupervisor:
        """A group of this machine, yet to be started. `argv`: of launch.py; `folder`: for its log; `devices`: all that it may see. NCCL
        refuses two ranks of one machine on one device, so groups that share theirs look like machines of their own to it."""
        command, own = [sys.executable, str(ROOT / "scripts" / "launch.py"), *argv], {**env, "REPLICA_GROUP_ID": name}
        if devices:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
            if os.environ.get(SHARED) == "1":
                own["NCCL_HOSTID"] = os.environ.get("NCCL_HOSTID", f"pharos-{name}")
        return ReplicaSupervisor(name, command, own, folder / f"{name}.log", restarts)

    def start(self) -> int:
        """Returns the process number."""
        self.started_s = time.monotonic()
        self.process = process = _started(self.command, self.env, subprocess.STDOUT)
        assert process.stdout
        self.reader = threading.Thread(target=self._show, args=(process.stdout,), daemon=True)
        self.reader.start()
        return process.pid

    def _show(self, lines: IO[str]) -> None:
        """Writes each line at once, so that lines of several groups do not mix. With a full disk the pipe is still read."""
        with lines, closing(LogFile(self.log)) as log:
            for line in lines:
                if self.shown:
                    with suppress(OSError):
                        sys.stdout.write(line)
                        sys.stdout.flush()
                log.write(line)

    def poll(self, now_s: float) -> str:
        """Starts the group again where that is due. Returns a line for the user, or nothing."""
        if self.code is not None:
            return ""
        if self.process is None:
            if not self.restarts:  # it was told to leave between two lives
                self.code = 0
                return ""
            due = now_s >= self.again_at_s
            return f"group {self.name} starts again (process {self.start()})" if due else ""
        if (code := self.ended()) is None:
            return ""
        how = how_ended(code)
        self.short_lives = self.short_lives + 1 if now_s - self.started_s < SHORT_LIFE_S else 0
        forget_old(self.restarted_at_s, now_s)
        too_often = len(self.restarted_at_s) >= self.restarts
        if code in (0, 2) or too_often or self.short_lives == SHORT_LIVES:
            self.code = 1 if code < 0 else code
            if too_often and self.restarts:
                how += f"; {self.restarts} restarts within {RESTARTS_WITHIN_S / 3600:g} h, MAX_RESTARTS allows no more"
            return "" if code == 0 else f"group {self.name} failed for good ({how})"
        self.restarted_at_s.append(now_s)
        self.process, self.again_at_s = None, now_s + RESTART_S * 2 ** max(0, self.short_lives - 1)
        return f"group {self.name} died ({how})"

    def ended(self) -> int | None:
        """Returns the exit code of the process; None: it runs."""
        assert self.process is not None
        return self.process.poll()

    def tell(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def end(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.reader is not None:
            self.reader.join(5)


class LighthouseSupervisor:
    """The job's lighthouse over all its starts: it comes again at the same address, and goes on with its state file."""

    def __init__(
        self, config: RunConfig, env: dict[str, str], *, opens: bool = False, bind: str = ANY_PORT, http: str = ANY_PORT
    ) -> None:
        """`opens`: its page, in a browser. Raises RuntimeError where it does not start."""
        self._config, self._env, self._opens = config, env, opens
        self._addresses = {"bind": bind, "http": http}
        self._page = ""
        self.address = self._start()
        self.port = int(self.address.rpartition(":")[2])
        self._keep_port("bind", self.address)
        self._failures, self._again_at_s = 0, 0.0

    def _start(self) -> str:
        self.process, address = start_lighthouse(self._config, self._env, **self._addresses)
        threading.Thread(target=self._show_page, args=(self.process,), daemon=True).start()
        return address

    def poll(self, now_s: float) -> str:
        if self.process.poll() is None or now_s < self._again_at_s:
            return ""
        self._failures += 1
        self._again_at_s = now_s + RESTART_S * 2 ** min(self._failures, SHORT_LIVES - 1)
        try:
            self._start()
        except RuntimeError as error:
            return str(error)
        return f"the lighthouse died, and is there again (process {self.process.pid})"

    def _keep_port(self, name: str, address: str) -> None:
        self._addresses[name] = f"{self._addresses[name].rpartition(':')[0]}:{address.rpartition(':')[2]}"

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _show_page(self, process: subprocess.Popen[str]) -> None:
        """Says where the page is as soon as it is there; the next life has it at the same place. The token is in no address."""
        assert process.stdout
        page = process.stdout.readline().strip()
        if not page or page == self._page:
            return
        self._page = page
        if self._addresses["http"]:
            self._keep_port("http", page)
        say(f"live page: {page}/ (it asks for the token in {self._env['PHAROS_TOKEN_FILE']})")
        if self._opens and not webbrowser.open(f"{page}/"):
            say("there is no browser to open it with")


def collect_signals(*numbers: signal.Signals) -> list[tuple[int, float]]:
    """From now on these signals, which ask for the end, are appended to the list, each with its moment."""
    came: list[tuple[int, float]] = []
    for number in numbers:
        signal.signal(number, lambda number, _: came.append((number, time.monotonic())))
    return came


def main(argv: list[str]) -> int:
    from training.appended import RunLock

    try:
        number, rest = read_groups([word for word in argv if word != OPEN])
        devices = devices_of_groups(number)
        config, restarts, grace_s = prepare([*rest, ENABLED], number, ranks=len(devices[0]) or None)
        # Else a job that goes on lost its token, and its groups their way back
        lock = RunLock(config.run_folder / "groups")
    except ValueError as error:
        say(str(error))
        return 2
    with closing(lock):
        env = environment(config.run_folder, number)
        env.setdefault("OMP_NUM_THREADS", threads_per_rank(number))
        lighthouse = LighthouseSupervisor(config, env, opens=OPEN in argv)
        env["TORCHFT_LIGHTHOUSE"], folder = lighthouse.address, config.run_folder / "groups"
        groups = [
            ReplicaSupervisor.here(str(name), [*rest, ENABLED], env, folder, restarts, visible)
            for name, visible in enumerate(devices)
        ]
        return run(groups, lighthouse, collect_signals(signal.SIGTERM, signal.SIGINT), grace_s)


def run(
    groups: Sequence[ReplicaSupervisor],
    lighthouse: LighthouseSupervisor,
    asked: list[tuple[int, float]],
    grace_s: float,
    stop: Sequence[str] = (),
) -> int:
    """Starts the groups and returns when all have ended for good; leaves no process. On the first signal in `asked` they are asked to save
    and leave, by the command `stop` if there is one; a second one, or the end of the grace, kills."""
    parts: list[LighthouseSupervisor | ReplicaSupervisor] = [lighthouse, *groups]
    told = False
    try:
        started = ", ".join(f"{group.name} (process {group.start()})" for group in groups)
        say(f"lighthouse at {lighthouse.address}; groups: {started}")
        while any(group.code is None for group in groups):
            if asked and not told:
                told = True
                for group in groups:
                    group.restarts = 0
                    if not stop:
                        group.tell(signal.SIGTERM)
                if stop:
                    subprocess.run(stop, check=False)
            if told and (len(asked) > 1 or time.monotonic() > asked[0][1] + grace_s):
                say("the groups did not end in time")
                return 1
            for part in parts:
                if line := part.poll(time.monotonic()):
                    say(line)
            if any(group.code == 2 for group in groups):
                return 2  # bad input is the same in all of them, and has been said
            time.sleep(POLL_S)
        return max(group.code or 0 for group in groups)
    finally:
        for group in groups:
            group.end()
        lighthouse.close()


def read_groups(argv: Sequence[str]) -> tuple[int, list[str]]:
    """N of --groups, and the other arguments. Raises ValueError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--groups", nargs="?", default="", const="")
    words, rest = parser.parse_known_args(argv)
    text: str = words.groups
    if not text.isdecimal() or int(text) < 1:
        given = f"--groups {text}" if text else "--groups is missing"
        raise ValueError(f"{given}: how many replica groups, a whole number from 1; such as --groups 3")
    return int(text), rest


def devices_of_groups(groups: int) -> list[list[str]]:
    """The CUDA devices of each group, as CUDA_VISIBLE_DEVICES names them; none each: this machine trains on CPUs. Raises ValueError."""
    import torch

    visible = visible_devices(os.environ, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return assign_devices(visible, groups, LaunchSettings.read(os.environ).nproc, os.environ.get(SHARED) == "1")


def visible_devices(env: Mapping[str, str], count: int) -> list[str]:
    """Names of the `count` devices that CUDA sees: numbers, or what CUDA_VISIBLE_DEVICES calls them (it reads up to the first unknown)."""
    named = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (named or [str(number) for number in range(count)])[:count]


def assign_devices(visible: Sequence[str], groups: int, nproc: int | None, shared: bool) -> list[list[str]]:
    """`nproc` devices for each group, one for each of its ranks, in order; None: as many as there are for all. `shared`: where there are
    too few a device serves ranks of several groups, never two of one. Raises ValueError: too few."""
    if not visible:
        return [[] for _ in range(groups)]
    each = nproc or max(1, len(visible) // groups)
    if each > len(visible):
        raise ValueError(f"NPROC={each}: more ranks than the {len(visible)} GPUs that are visible here")
    if each * groups > len(visible) and not shared:
        raise ValueError(
            f"--groups {groups}: {each} GPU{'s' * (each > 1)} each are more than the {len(visible)} that are visible here; nearest: "
            f"--groups {len(visible) // each}; {SHARED}=1 lets groups share them"
        )
    return [[visible[(group * each + rank) % len(visible)] for rank in range(each)] for group in range(groups)]


def prepare(argv: list[str], groups: int, *, nodes: int = 1, ranks: int | None = None) -> tuple[RunConfig, int, float]:
    """Checks all that can be before a start. `ranks`: of a group, on each of its nodes; None: as one group alone has. Raises ValueError."""
    from configs.load import load

    env = {**os.environ, "NUM_REPLICA_GROUPS": str(groups), "TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1"}
    launch_settings, config = LaunchSettings.read(os.environ), load(argv)
    check(config, world_size=(ranks or ranks_here(launch_settings)) * nodes, environ=env)
    return config, launch_settings.max_restarts if "MAX_RESTARTS" in os.environ else 100, launch_settings.grace_s


def environment(run_folder: Path, groups: int) -> dict[str, str]:
    """The environment of a job's lighthouse and groups. A rank that dies is started again with its whole group. PHAROS_TOKEN or a random
    token is in a file that only this user may read, never on a command line, where all users see it."""
    token = (run_folder / "groups").resolve() / "token"
    token.unlink(missing_ok=True)
    with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write((os.environ.get("PHAROS_TOKEN") or secrets.token_urlsafe(24)) + "\n")
    own = {"NUM_REPLICA_GROUPS": str(groups), "PHAROS_TOKEN_FILE": str(token), "MAX_RESTARTS": "0"}
    return {name: value for name, value in os.environ.items() if name != "PHAROS_TOKEN"} | own


def start_lighthouse(
    config: RunConfig, env: dict[str, str], *, bind: str = ANY_PORT, http: str = ANY_PORT, through: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], str]:
    """`http` "": on the port after its own. `through`: a command that becomes the one behind it. Raises RuntimeError: it did not start."""
    settings = config.fault_tolerance
    flags = {
        "--bind": bind,
        **({"--http": http} if http else {}),
        "--min_replicas": str(settings.min_replica_size),
        "--join_timeout_ms": "5000",
        "--heartbeat_timeout_ms": str(round(settings.heartbeat_timeout_s * 1000)),
        "--takeover_s": f"{settings.takeover_s:g}" if settings.takeover_s else "never",
        "--stall_s": f"{settings.stall_s:g}",
        **({"--num_replica_groups": env["NUM_REPLICA_GROUPS"]} if "NUM_REPLICA_GROUPS" in env else {}),
        "--state_file": str(config.run_folder / "groups" / "lighthouse.json"),
        "--token_file": env["PHAROS_TOKEN_FILE"],
    }
    # A start of all groups anew may lower what the last ones were promised.
    words = [*(word for flag in flags.items() for word in flag), "--lower_terms"]
    command = [*through, sys.executable, "-m", "ft.rpc.lighthouse_main", *words]
    paths = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    with (config.run_folder / "groups" / "lighthouse.log").open("a") as log:
        process = _started(command, {**env, "PYTHONPATH": paths}, log)
    assert process.stdout
    address = process.stdout.readline().strip()
    if not address:
        raise RuntimeError(f"the lighthouse did not start; its words are in {log.name}")
    return process, address


def _started(command: Sequence[str], env: Mapping[str, str], stderr: int | IO[str]) -> subprocess.Popen[str]:
    """A process in a session of its own; its standard output is to be read."""
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen(
        command, env=env, stdin=nothing, stdout=pipe, stderr=stderr, text=True, errors="replace", start_new_session=True
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
