"""Runs a lighthouse and N replica groups on this machine, and restarts those that die. run_replicas.sh execs this program.

    run_replicas.sh -> replicas.py -> ft/rpc/lighthouse_main.py           one, on loopback
                                   -> launch.py, once per group           REPLICA_GROUP_ID = 0 ... N-1

If this program is killed, Linux sends SIGTERM to the lighthouse and to the groups, which save and leave.
Prints the lines of all groups as they come, each with its group and rank; <run>/groups/ID.log has those of one group.
"""

from __future__ import annotations

import argparse
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "scripts"))]

from ft.descriptors import raise_limit  # noqa: E402 (our packages first)
from scripts.launch import LINES_KEPT, LogFile, check, ranks_here, threads_per_rank  # noqa: E402
from scripts.launch_settings import (  # noqa: E402
    MAX_SHORT_RUNS,
    RESTARTS_WITHIN_S,
    SHORT_RUN_S,
    STOPPED_EARLY,
    LaunchSettings,
    end_program,
    forget_old,
    handle_early_stop,
    how_ended,
    open_closed_streams,
    restart_delay_s,
    say,
    stopped_early,
    under_lifeline,
    whole,
)
from training.signals import LOG_JOIN_S, SAME_SIGNAL_S, stop_signals  # noqa: E402

if TYPE_CHECKING:
    from configs.schema import RunConfig

POLL_S = 0.1
CONSOLE_S = 2.0  # for the console to take the last lines of a group
LIGHTHOUSE_STOP_S = 5.0  # for the lighthouse to end, when the groups have
TRY_AGAIN_S = 10.0  # to the next try of a start for which the machine had no process, thread or descriptor
ANY_PORT = "127.0.0.1:0"  # reachable only from this machine
OPEN_FLAG = "--open"  # opens the dashboard in a browser
CHECK_FLAG = "--check"  # only checks the settings, for run_replicas.sh before it installs the lighthouse
SHARE_GPUS = "SHARE_GPUS"  # 1: groups may share GPUs; slow, for trials
ENABLED = "--fault_tolerance.enable=true"


@dataclass
class ReplicaSupervisor:
    """One replica group across its restarts: its process, its output, and the time of the next restart."""

    name: str
    command: list[str]
    env: dict[str, str]
    log: Path
    restarts: int  # within any RESTARTS_WITHIN_S
    shown: bool = True  # its output is copied to the console
    process: subprocess.Popen[str] | None = None
    code: int | None = None  # exit code once it is not restarted any more
    started_s: float = 0.0
    restart_at_s: float = 0.0
    short_runs: int = 0
    restarted_at_s: list[float] = field(default_factory=list)
    output_thread: threading.Thread | None = None

    @staticmethod
    def local(
        name: str, argv: Sequence[str], env: Mapping[str, str], folder: Path, restarts: int, devices: Sequence[str] = ()
    ) -> ReplicaSupervisor:
        """Returns a group on this machine, not started. `argv`: of launch.py; `folder`: of its log; `devices`: CUDA_VISIBLE_DEVICES. NCCL
        refuses two ranks of one host on one device, so groups that share devices get different NCCL host IDs."""
        command, own = [sys.executable, str(ROOT / "scripts" / "launch.py"), *argv], {**env, "REPLICA_GROUP_ID": name}
        if devices:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
            if os.environ.get(SHARE_GPUS) == "1":
                own["NCCL_HOSTID"] = os.environ.get("NCCL_HOSTID", f"pharos-{name}")
        return ReplicaSupervisor(name, command, own, folder / f"{name}.log", restarts)

    def start(self) -> int:
        """Starts the process. Returns its pid."""
        self.started_s = time.monotonic()
        self.process = process = _start_process(self.command, self.env, subprocess.STDOUT)
        assert process.stdout
        output_thread = threading.Thread(target=self._show, args=(process.stdout,), daemon=True)
        output_thread.start()
        self.output_thread = output_thread
        return process.pid

    def _show(self, lines: IO[str]) -> None:
        """Copies output line by line, so that lines of groups do not mix. Reads the pipe even if the disk is full, or the console takes
        nothing: a group whose pipe is full waits in its log, which counts as a hang."""
        with lines, closing(LogFile(self.log)) as log, closing(Console(self.log)) as console:
            for line in lines:
                log.write(line)
                if self.shown:
                    console.write(line)

    def poll(self, now_s: float) -> str:
        """Restarts the group if that is due. Returns a line for the user, or ""."""
        if self.code is not None:
            return ""
        if self.process is None:
            if not self.restarts:  # told to leave while no process ran
                self.code = 0
                return ""
            if now_s < self.restart_at_s:
                return ""
            how = self.try_to_start(now_s)
            return f"group {self.name} restarts ({how})" if self.process else f"group {self.name} {how}"
        if (code := self.ended()) is None:
            return ""
        self.kill()
        if code == -signal.SIGTERM and not self.restarts:  # its program had no handler yet
            self.code = STOPPED_EARLY
            return f"group {self.name}: {stopped_early(signal.SIGTERM)}"
        how = how_ended(code)
        self.short_runs = self.short_runs + 1 if now_s - self.started_s < SHORT_RUN_S else 0
        forget_old(self.restarted_at_s, now_s)
        too_often = len(self.restarted_at_s) >= self.restarts
        if code in (0, 2) or too_often or self.short_runs == MAX_SHORT_RUNS:
            self.code = 1 if code < 0 else code
            if too_often and self.restarts:
                how += f"; {self.restarts} restarts within {RESTARTS_WITHIN_S / 3600:g} h, MAX_RESTARTS reached"
            said_stopped = not self.restarts and code == STOPPED_EARLY  # and its own log says so
            return "" if code == 0 or said_stopped else f"group {self.name} failed and is not restarted ({how})"
        self.restarted_at_s.append(now_s)
        self.restart_at_s = now_s + restart_delay_s(self.short_runs)
        return f"group {self.name} died ({how})"

    def try_to_start(self, now_s: float) -> str:
        """Starts the process or, if the machine lacks one for it, sets the time of the next try. Returns the pid or the reason in words."""
        try:
            return f"pid {self.start()}"
        except (OSError, RuntimeError) as error:  # which would end all other groups
            self.kill()
            if not self.restarts:
                self.code = 1
                return f"cannot be started: {error}"
            self.restart_at_s = now_s + TRY_AGAIN_S
            return f"cannot be started: {error}; tried again in {TRY_AGAIN_S:g} s"

    @property
    def is_refused(self) -> bool:
        """Returns True if its first launch has ended at once with bad input, which all groups then have."""
        return self.code == 2 and self.short_runs > 0 and not self.restarted_at_s

    def ended(self) -> int | None:
        """Returns the exit code of the process, or None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kills the Unix process group, also what an ended process left in it, and forgets the process, whose number another may get."""
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def end(self) -> None:
        self.kill()
        if self.output_thread is not None:
            self.output_thread.join(5)


class Console:
    """Standard output, written by a thread, since a write may block (Ctrl-S, a connection that hangs), on a terminal even if poll says that
    it would not. Keeps LINES_KEPT lines; a further line says how many did not fit. `log`: the file that has all of them."""

    def __init__(self, log: Path) -> None:
        self._log, self._stream, self._missing = log, sys.stdout, 0
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        with suppress(RuntimeError):  # no thread is left: the lines are only in the log
            self._thread.start()

    def write(self, line: str) -> None:
        if self._lines.qsize() >= LINES_KEPT:
            self._missing += 1
            return
        self._report_missing()
        self._lines.put(line)

    def close(self) -> None:
        """Waits up to CONSOLE_S until the console has taken all lines."""
        self._report_missing()
        self._lines.put("")
        if self._thread.is_alive():
            self._thread.join(CONSOLE_S)

    def _report_missing(self) -> None:
        if self._missing:
            self._lines.put(f"pharos: {self._missing} lines are missing here, and are in {self._log}\n")
            self._missing = 0

    def _run(self) -> None:
        while line := self._lines.get():
            with suppress(OSError, ValueError):  # ValueError: a character that the encoding lacks
                self._stream.write(line)
                self._stream.flush()


class LighthouseSupervisor:
    """The job's lighthouse across its restarts, which keep its address and its state file."""

    def __init__(
        self, config: RunConfig, env: dict[str, str], *, opens: bool = False, bind: str = ANY_PORT, http: str = ANY_PORT
    ) -> None:
        """`opens`: open the dashboard in a browser. Raises RuntimeError if the lighthouse does not start."""
        self._config, self._env, self._opens = config, env, opens
        self._addresses = {"bind": bind, "http": http}
        self._dashboard = ""
        self.process, self.address = start_lighthouse(config, env, **self._addresses)
        self._follow(self.process, is_restart=False)
        self.port = int(self.address.rpartition(":")[2])
        self._keep_port("bind", self.address)
        self._failures, self._restart_at_s = 0, 0.0

    def _follow(self, process: subprocess.Popen[str], *, is_restart: bool) -> None:
        threading.Thread(target=self._show_dashboard, args=(process, is_restart), daemon=True).start()

    def poll(self, now_s: float) -> str:
        """Restarts the lighthouse if that is due. Returns a line for the user, or "". Waits for no answer, as its disk may hang."""
        if self.process.poll() is None or now_s < self._restart_at_s:
            return ""
        self._failures += 1
        self._restart_at_s = now_s + restart_delay_s(min(self._failures + 1, MAX_SHORT_RUNS))
        try:
            self.process = spawn_lighthouse(self._config, self._env, **self._addresses)
            self._follow(self.process, is_restart=True)
        except (OSError, RuntimeError) as error:
            return str(error)
        return f"the lighthouse died and was restarted (pid {self.process.pid})"

    def _keep_port(self, name: str, address: str) -> None:
        self._addresses[name] = f"{self._addresses[name].rpartition(':')[0]}:{address.rpartition(':')[2]}"

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=LIGHTHOUSE_STOP_S)
        except subprocess.TimeoutExpired:  # it is stopped (SIGSTOP), or its disk hangs
            self.process.kill()
            self.process.wait()

    def _show_dashboard(self, process: subprocess.Popen[str], is_restart: bool) -> None:
        """Prints the address of the dashboard when the lighthouse serves it; a restart keeps it. The token is not part of the address."""
        assert process.stdout
        if is_restart:
            process.stdout.readline()  # its own address, which it keeps, too
        address = process.stdout.readline().strip()
        if not address or address == self._dashboard:
            return
        self._dashboard = address
        if self._addresses["http"]:
            self._keep_port("http", address)
        say(f"dashboard: {address}/ (it asks for the token in {self._env['PHAROS_TOKEN_FILE']})")
        if self._opens and not webbrowser.open(f"{address}/"):
            say("no browser found; open the dashboard yourself")


def collect_signals(*numbers: signal.Signals) -> list[tuple[int, float]]:
    """Installs handlers. Returns a list to which each of these signals is appended with its time (monotonic)."""
    received: list[tuple[int, float]] = []
    for number in numbers:
        signal.signal(number, lambda number, _: received.append((number, time.monotonic())))
    return received


def main(argv: list[str]) -> int:
    try:
        number, rest = read_groups([word for word in argv if word not in (OPEN_FLAG, CHECK_FLAG)])
        if whole(os.environ, "NNODES", least=1, default=1) > 1:
            raise ValueError(f"NNODES={os.environ['NNODES']}: this script runs all groups on this machine; unset it")
        rest = enabled(rest)
        devices = devices_of_groups(number)
        config, restarts, grace_s = prepare(rest, number, ranks=len(devices[0]) or None)
        if CHECK_FLAG in argv:
            return 0
        lock = lock_groups(config.run_folder / "groups")
    except ValueError as error:
        say(str(error))
        return 2
    except OSError as error:
        say(str(error))
        return 1
    with lock:
        ranks = len(devices[0]) or LaunchSettings.read(os.environ).nproc or 1
        try:
            env = environment(config.run_folder, number, ranks)
            lighthouse = LighthouseSupervisor(config, env, opens=OPEN_FLAG in argv)
        except (OSError, RuntimeError) as error:
            say(str(error))
            return 1
        env["TORCHFT_LIGHTHOUSE"], folder = lighthouse.address, config.run_folder / "groups"
        groups = [
            ReplicaSupervisor.local(str(name), rest, env, folder, restarts, visible)
            for name, visible in enumerate(devices)
        ]
        # only now: until here a stop ends this process at once, even if the lighthouse hangs, which then gets SIGTERM (lifeline.py)
        received = collect_signals(*stop_signals())

        def pass_on(number: int, frame: object) -> None:
            for group in groups:
                group.send_signal(signal.Signals(number))

        signal.signal(signal.SIGUSR1, pass_on)
        code = run(groups, lighthouse, received, grace_s)
        return 128 + received[0][0] if code == STOPPED_EARLY and received else code


def lock_groups(folder: Path) -> ExitStack:
    """Locks a job's folder of groups, and its run's folder against launches without groups, also while all groups start again. A second
    launch would replace the token of a running job, whose groups could not rejoin; so groups that outlive their launch count, too. Raises
    ValueError: one is running."""
    from training.durable_files import RunLock

    locks = ExitStack()
    try:
        locks.enter_context(closing(RunLock(folder.parent, shared=True, log=say)))
        locks.enter_context(closing(RunLock(folder, log=say)))
        for group in sorted(folder.glob("*/lock")):
            RunLock(group.parent, log=say).close()
    except ValueError:
        locks.close()
        raise
    return locks


def say_briefly(text: str) -> None:
    """Prints a line for the user. Waits LOG_JOIN_S at most for a console that takes nothing: groups must be restarted and stopped."""
    saying = threading.Thread(target=say, args=(text,), daemon=True)
    try:
        saying.start()
    except RuntimeError:  # no thread is left, which may be what the line says
        say(text)
    else:
        saying.join(LOG_JOIN_S)


def run(
    groups: Sequence[ReplicaSupervisor],
    lighthouse: LighthouseSupervisor,
    stop_signals: list[tuple[int, float]],
    grace_s: float,
    stop: Sequence[str] = (),
) -> int:
    """Starts the groups and returns the exit code when all have ended; leaves no process. On the first of `stop_signals` they save and
    leave, through the command `stop` if given; a second one SAME_SIGNAL_S or more later, or the end of `grace_s`, kills them."""
    raise_limit()  # a pipe and a log for each group
    parts: list[LighthouseSupervisor | ReplicaSupervisor] = [lighthouse, *groups]
    stopping = False
    try:
        started = ", ".join(f"{group.name} ({group.try_to_start(time.monotonic())})" for group in groups)
        say_briefly(f"lighthouse at {lighthouse.address}; groups: {started}")
        while any(group.code is None for group in groups):
            if stop_signals and not stopping:
                stopping = True
                for group in groups:
                    group.restarts = 0
                    if not stop:
                        group.send_signal(signal.SIGTERM)
                if stop:
                    try:
                        failed = "" if (code := subprocess.run(stop, check=False).returncode) == 0 else how_ended(code)
                    except OSError as error:
                        failed = str(error)
                    if failed:  # not tried again: groups that heard it all the same would end without saving
                        say_briefly(f"{' '.join(stop)}: {failed}; perhaps the groups do not save")
            first_s = stop_signals[0][1] if stopping else 0.0
            again = [number for number, at_s in stop_signals if at_s >= first_s + SAME_SIGNAL_S]
            if stopping and (again or time.monotonic() > first_s + grace_s):
                why = f"{signal.Signals(again[0]).name} again" if again else f"not saved within {grace_s:g} s"
                say_briefly(f"{why}: killing the groups")
                return 1
            for part in parts:
                if line := part.poll(time.monotonic()):
                    say_briefly(line)
            if any(group.is_refused for group in groups):
                return 2  # the message has been printed; if a group is refused later, the others go on
            time.sleep(POLL_S)
        codes = {group.code or 0 for group in groups}
        return max(codes - {STOPPED_EARLY} or codes)  # one stopped early had nothing to save: others' codes count
    finally:
        for group in groups:
            group.end()
        lighthouse.close()


def read_groups(argv: Sequence[str]) -> tuple[int, list[str]]:
    """Returns N of --groups N, and the other arguments. Raises ValueError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--groups", nargs="?", default="", const="")
    options, rest = parser.parse_known_args(argv)
    text: str = options.groups
    if not text.isdecimal() or int(text) < 1:
        given = f"--groups {text}" if text else "--groups is missing"
        raise ValueError(f"{given}: must be the number of replica groups, a whole number from 1; such as --groups 3")
    return int(text), rest


def enabled(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with fault_tolerance.enable = true, given once. Raises ValueError if they set it to another value."""
    flag = ENABLED.removesuffix("=true")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value", nargs="?", default="true", const="true")
    options, rest = parser.parse_known_args(argv)
    if options.value != "true":
        raise ValueError(f"{flag}={options.value}: replica groups need true, which this script sets; leave it out")
    return [*rest, ENABLED]


def devices_of_groups(groups: int) -> list[list[str]]:
    """Returns the CUDA devices of each group, as named in CUDA_VISIBLE_DEVICES; empty lists without GPUs. Raises ValueError."""
    import torch

    visible = visible_devices(os.environ, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return assign_devices(visible, groups, LaunchSettings.read(os.environ).nproc, os.environ.get(SHARE_GPUS) == "1")


def visible_devices(env: Mapping[str, str], count: int) -> list[str]:
    """Returns the names of the `count` visible devices: from CUDA_VISIBLE_DEVICES (CUDA stops at the first unknown name), else numbers."""
    named = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (named or [str(number) for number in range(count)])[:count]


def assign_devices(visible: Sequence[str], groups: int, nproc: int | None, shared: bool) -> list[list[str]]:
    """Returns `nproc` devices per group, one per rank, in order; None: an equal share of all. `shared`: if there are too few, groups share
    devices, but never two ranks of one group. Raises ValueError: too few devices."""
    if not visible:
        return [[] for _ in range(groups)]
    each = nproc or max(1, len(visible) // groups)
    if each > len(visible):
        raise ValueError(f"NPROC={each}: more ranks than the {len(visible)} GPUs that are visible here")
    if each * groups > len(visible) and not shared:
        raise ValueError(
            f"--groups {groups}: with {each} GPU{'s' * (each > 1)} each, more than the {len(visible)} that are visible here; nearest: "
            f"--groups {len(visible) // each}; {SHARE_GPUS}=1 lets groups share them"
        )
    return [[visible[(group * each + rank) % len(visible)] for rank in range(each)] for group in range(groups)]


def prepare(argv: list[str], groups: int, *, nodes: int = 1, ranks: int | None = None) -> tuple[RunConfig, int, float]:
    """Checks settings; returns (config, MAX_RESTARTS, grace_s). `ranks`: per node of a group; None: as launch.py. Raises ValueError."""
    from configs.load import load

    env = {**_inherited(), "NUM_REPLICA_GROUPS": str(groups), "TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1"}
    launch_settings, config = LaunchSettings.read(os.environ), load(argv)
    check(config, world_size=(ranks or ranks_here(launch_settings)) * nodes, environ=env)
    return config, launch_settings.max_restarts if "MAX_RESTARTS" in os.environ else 100, launch_settings.grace_s


def environment(run_folder: Path, groups: int, ranks: int | None = None) -> dict[str, str]:
    """Returns the environment of a job's lighthouse and groups. MAX_RESTARTS=0: a group is restarted as a whole. The token (PHAROS_TOKEN
    or random) is in a file that only this user may read, never on a command line, which all users see. `ranks`: of each group, where all
    groups share this machine's cores."""
    token = (run_folder / "groups").resolve() / "token"
    token.unlink(missing_ok=True)
    with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write((os.environ.get("PHAROS_TOKEN") or secrets.token_urlsafe(24)) + "\n")
    own = {"NUM_REPLICA_GROUPS": str(groups), "PHAROS_TOKEN_FILE": str(token), "MAX_RESTARTS": "0"}
    threads = {"OMP_NUM_THREADS": threads_per_rank(groups * ranks)} if ranks else {}
    return threads | {name: value for name, value in _inherited().items() if name != "PHAROS_TOKEN"} | own


def _inherited() -> dict[str, str]:
    """Returns this process's environment without the files for TLS: the lighthouse that is started here has none."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PHAROS_TLS_")}


def start_lighthouse(
    config: RunConfig, env: dict[str, str], *, bind: str = ANY_PORT, http: str = ANY_PORT, through: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], str]:
    """Returns the process of `spawn_lighthouse` and its address, once it listens. Raises RuntimeError."""
    process = spawn_lighthouse(config, env, bind=bind, http=http, through=through)
    assert process.stdout
    address = process.stdout.readline().strip()
    if not address:
        raise RuntimeError(f"the lighthouse did not start; see {config.run_folder / 'groups' / 'lighthouse.log'}")
    return process, address


def spawn_lighthouse(
    config: RunConfig, env: dict[str, str], *, bind: str, http: str, through: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Starts a lighthouse and returns its process, which prints its address, then that of the dashboard. `http` "": the port after that of
    `bind`. `through`: a command prefix."""
    settings = config.fault_tolerance
    flags = {
        "--bind": bind,
        **({"--http": http} if http else {}),
        "--min_replicas": str(settings.min_replica_size),
        "--join_timeout_ms": "5000",
        "--heartbeat_timeout_ms": str(round(settings.heartbeat_timeout_s * 1000)),
        "--heal_grace_s": str(settings.heal_grace_s),  # to the last digit, which groups compare
        "--takeover_s": str(settings.takeover_s) if settings.takeover_s else "never",
        "--stall_s": f"{settings.stall_s:g}",
        **({"--num_replica_groups": env["NUM_REPLICA_GROUPS"]} if "NUM_REPLICA_GROUPS" in env else {}),
        "--state_file": str(config.run_folder / "groups" / "lighthouse.json"),
        "--token_file": env["PHAROS_TOKEN_FILE"],
    }
    # --lower_limits: a new launch may have lower settings than the state file of the previous one.
    words = [*(word for flag in flags.items() for word in flag), "--lower_limits"]
    command = [*through, sys.executable, str(ROOT / "ft" / "rpc" / "lighthouse_main.py"), *words]
    with (config.run_folder / "groups" / "lighthouse.log").open("a") as log:
        return _start_process(command, env, log)


def _start_process(command: Sequence[str], env: Mapping[str, str], stderr: int | IO[str]) -> subprocess.Popen[str]:
    """Starts a process in its own session, with a pipe as standard output. It gets SIGTERM if this program dies."""
    nothing, pipe, command = subprocess.DEVNULL, subprocess.PIPE, under_lifeline(command, signal.SIGTERM)
    return subprocess.Popen(
        command, env=env, stdin=nothing, stdout=pipe, stderr=stderr, text=True, errors="replace", start_new_session=True
    )


if __name__ == "__main__":
    open_closed_streams()
    handle_early_stop()
    end_program(main(sys.argv[1:]))
