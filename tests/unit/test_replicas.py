"""run_replicas.sh restarts a group that dies, but not without limit."""

from __future__ import annotations

import errno
import io
import itertools
import locale
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousGracefulExitError

from bench.drill_job import DevicePool
from bench.job import until
from ft.config import FaultTolerance
from scripts.agent import Agent, LocalRanks, Output, rendezvous_id, run_ranks
from scripts.launch import LINES_KEPT, LogFile, cores_here
from scripts.launch_settings import MAX_SHORT_RUNS, RESTARTS_WITHIN_S, SHORT_RUN_S, STOPPED_EARLY, LaunchSettings
from scripts.replicas import (
    ENABLED,
    ROOT,
    TRY_AGAIN_S,
    Console,
    LighthouseSupervisor,
    ReplicaSupervisor,
    assign_devices,
    enabled,
    environment,
    main,
    read_groups,
    run,
    visible_devices,
)
from tests.unit.fakes import replace_system_call
from training.durable_files import RunLock


def group(tmp_path: Path, program: str, env: dict[str, str] | None = None) -> ReplicaSupervisor:
    made = ReplicaSupervisor("0", [sys.executable, "-c", program], env or {}, tmp_path / "0.log", restarts=100)
    made.start()
    return made


def ended(one: ReplicaSupervisor, now_s: float) -> str:
    """Waits for the end of the group's process. Returns the message of the next poll."""
    assert one.process is not None
    one.process.wait()
    return one.poll(now_s)


def test_a_group_that_dies_at_once_is_tried_later_and_later_and_then_given_up(tmp_path: Path):
    one, now_s, pauses = group(tmp_path, "raise SystemExit(1)"), time.monotonic(), []
    while one.code is None:
        said = ended(one, now_s)
        if one.code is None:
            assert said == "group 0 died (exit code 1)"
            pauses.append(one.restart_at_s - now_s)
            assert one.poll(now_s) == "", "not yet"
            assert one.poll(one.restart_at_s).startswith("group 0 restarts (pid ")
    assert said == "group 0 failed and is not restarted (exit code 1)" and one.code == 1
    assert [round(pause) for pause in pauses] == [1, 2, 4, 8, 16] and len(pauses) == MAX_SHORT_RUNS - 1


def test_a_group_that_is_stopped_before_it_has_a_handler_has_nothing_to_save(tmp_path: Path):
    one = group(tmp_path, "import signal; signal.pause()")
    one.restarts = 0  # as `run` does at a stop
    one.send_signal(signal.SIGTERM)
    assert ended(one, time.monotonic()) == "group 0: stopped by SIGTERM while no step was under way"
    assert one.code == STOPPED_EARLY


def test_a_long_life_forgives_the_short_ones(tmp_path: Path):
    one, now_s = group(tmp_path, "raise SystemExit(1)"), time.monotonic()
    ended(one, now_s)
    one.poll(one.restart_at_s)
    assert ended(one, now_s + SHORT_RUN_S + 60) == "group 0 died (exit code 1)"
    assert one.short_runs == 0


class Dies(ReplicaSupervisor):
    """A group whose process is always dead."""

    def start(self) -> int:
        self.process = cast(Any, self)
        return 7

    def ended(self) -> int:
        return -9

    def kill(self) -> None:
        self.process = None


def test_a_group_that_is_preempted_once_a_day_stays_for_years(tmp_path: Path):
    """MAX_RESTARTS is a rate: restarts of the day before do not count."""
    one, now_s = Dies("0", [], {}, tmp_path / "0.log", restarts=2), 0.0
    one.start()
    for _ in range(1000):
        now_s += RESTARTS_WITHIN_S
        assert one.poll(now_s) == "group 0 died (ended by SIGKILL)"
        assert one.poll(one.restart_at_s) == "group 0 restarts (pid 7)"
    one.poll(now_s + 3600)
    one.poll(one.restart_at_s)
    assert one.poll(now_s + 7200) == (
        "group 0 failed and is not restarted (ended by SIGKILL; 2 restarts within 24 h, MAX_RESTARTS reached)"
    )


@pytest.mark.parametrize(
    "error", [BlockingIOError(errno.EAGAIN, "no process is left"), RuntimeError("can't start new thread")], ids=str
)
def test_a_group_for_which_there_is_no_process_now_is_restarted_later_and_ends_no_other(
    tmp_path: Path, error: Exception
):
    class Lacks(Dies):
        lacks = False

        def start(self) -> int:
            if self.lacks:
                raise error
            return super().start()

    one = Lacks("0", [], {}, tmp_path / "0.log", restarts=2)
    one.start()
    one.lacks = True
    assert one.poll(0.0) == "group 0 died (ended by SIGKILL)"
    for _ in range(MAX_SHORT_RUNS):
        at_s = one.restart_at_s
        assert one.poll(at_s) == f"group 0 cannot be started: {error}; tried again in 10 s"
        assert one.poll(at_s + TRY_AGAIN_S / 2) == ""
    one.lacks = False
    assert one.poll(one.restart_at_s) == "group 0 restarts (pid 7)"


@pytest.mark.parametrize(("restarts", "code"), [(2, 0), (0, 1)])
def test_a_group_for_which_there_is_no_process_at_the_begin_starts_later_and_ends_no_other(
    restarts: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    class Lacks(Leaves):
        told = True

        def start(self) -> int:
            if self.name == "1" and not self.started_s:
                self.started_s = 1.0
                raise BlockingIOError(errno.EAGAIN, "no process is left")
            return super().start()

        def poll(self, now_s: float) -> str:
            return super().poll(now_s + TRY_AGAIN_S)

    groups = [Lacks(str(name), [], {}, tmp_path / "log", restarts=restarts) for name in range(2)]
    assert run(groups, cast(Any, NoLighthouse()), [], grace_s=120.0) == code
    said = capsys.readouterr().err
    assert "groups: 0 (pid 7), 1 (cannot be started: [Errno 11] no process is left" in said
    assert ("group 1 restarts (pid 7)" in said) == (restarts > 0)


@pytest.mark.parametrize(("program", "why"), [("scancel", "[Errno 2] No such file"), ("sh", "exit code 1")])
def test_a_stop_that_slurm_does_not_take_is_told_and_ends_no_group(
    program: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The groups may have heard it all the same, as with a timeout of the controller, and save."""

    class Saves(Leaves):
        polls = 0

        def ended(self) -> int | None:  # type: ignore[override]
            self.polls += 1
            return 0 if self.polls > 1 else None

    one, received = Saves("0", [], {}, tmp_path / "log", restarts=2), [(signal.SIGTERM, time.monotonic())]
    stop = (program, "-c", "exit 1") if program == "sh" else (str(tmp_path / program),)
    assert run([one], cast(Any, NoLighthouse()), cast(Any, received), grace_s=120.0, stop=stop) == 0
    said = capsys.readouterr().err
    assert said.count(why) == 1 and "perhaps the groups do not save" in said


@pytest.mark.parametrize(("apart_s", "starts"), [(RESTARTS_WITHIN_S, [0, 1, 2, 3]), (RESTARTS_WITHIN_S / 2, [0, 1])])
def test_ranks_that_die_once_a_day_are_started_again_for_years(tmp_path: Path, apart_s: float, starts: list[int]):
    """Each start has a separate count, which torch derives from the limit and the remaining restarts."""
    program = "import os; n = int(os.environ['TORCHELASTIC_RESTART_COUNT']); print(n); raise SystemExit(n < 3)"
    plan, days = LaunchSettings.read({"MAX_RESTARTS": "1"}), itertools.count(0.0, apart_s / 2)  # read at start and end
    command, pauses = [sys.executable, "-c", program], list[float]()
    code = run_ranks(
        command, plan, nproc=1, logs=tmp_path / "run" / "logs", clock=lambda: next(days), pause=pauses.append
    )
    assert pauses == [0.0] * (len(starts) - 1)
    assert code == (0 if len(starts) == 4 else 1)
    assert (tmp_path / "run" / "logs" / "rank0.log").read_text().split() == list(map(str, starts))


@pytest.mark.parametrize(
    ("exit_code", "pauses"), [(1, [1.0, 2.0, 4.0, 8.0, 16.0]), (2, [])], ids=["a crash at once", "bad input"]
)
def test_ranks_for_which_a_restart_is_useless_are_not_restarted_for_ever(
    tmp_path: Path, exit_code: int, pauses: list[float]
):
    program, settings = f"print('a line'); raise SystemExit({exit_code})", LaunchSettings.read({"MAX_RESTARTS": "100"})
    made, logs, command = list[float](), tmp_path / "run" / "logs", [sys.executable, "-c", program]
    assert run_ranks(command, settings, nproc=1, logs=logs, clock=lambda: 0.0, pause=made.append) == exit_code
    assert made == pauses
    assert (logs / "rank0.log").read_text() == "a line\n" * (len(pauses) + 1)


@pytest.mark.parametrize(("program", "code"), [("pass", 0), ("raise SystemExit(2)", 2)])
def test_who_has_finished_or_was_told_wrong_does_not_come_again(tmp_path: Path, program: str, code: int):
    one = group(tmp_path, program)
    ended(one, time.monotonic())
    assert one.code == code


@pytest.mark.skipif(sys.platform != "linux", reason="a signal at the death of the parent, of Linux")
def test_a_group_whose_supervisor_is_killed_is_told_to_save(tmp_path: Path):
    os.mkfifo(tmp_path / "said")
    trains = f"""
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with open({str(tmp_path / "said")!r}, "w") as said:
    print("ready", file=said, flush=True)
    print(signal.sigtimedwait([signal.SIGTERM], 60) and "saved", file=said)
"""
    supervises = f"""
import signal, sys
from pathlib import Path
from scripts.replicas import ReplicaSupervisor
ReplicaSupervisor("0", [sys.executable, "-c", {trains!r}], {{}}, Path({str(tmp_path)!r}, "0.log"), 1).start()
signal.pause()
"""
    supervisor = subprocess.Popen([sys.executable, "-c", supervises], cwd=ROOT)
    try:
        with (tmp_path / "said").open() as said:
            assert said.readline() == "ready\n"
            supervisor.kill()
            assert said.read() == "saved\n"
    finally:
        supervisor.kill()
        supervisor.wait()


def test_what_a_group_leaves_behind_is_ended_with_it(tmp_path: Path):
    """Leftover processes are killed at once: when the job ends, their ids may belong to other processes."""
    one = group(tmp_path, "import subprocess; subprocess.Popen(['sleep', '300'])")
    ended(one, time.monotonic())
    assert one.code == 0 and one.process is None and one.output_thread is not None
    one.output_thread.join(60)
    assert not one.output_thread.is_alive(), "a process has its output still"


def test_what_a_rank_leaves_behind_is_ended_before_the_ranks_are_restarted(tmp_path: Path):
    """Leftover processes are killed before the restart: when the job ends, their ids may belong to other processes."""
    program = f"""
import fcntl, os, signal, subprocess
first, file = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", open({str(tmp_path / "lock")!r}, "w")
signal.alarm(60)
fcntl.flock(file, fcntl.LOCK_EX)  # held for as long as the child lives
if first:
    subprocess.Popen(["sleep", "1000"], pass_fds=[file.fileno()])
raise SystemExit(first)
"""
    settings = LaunchSettings.read({"MAX_RESTARTS": "1"})
    assert run_ranks([sys.executable, "-c", program], settings, nproc=1, logs=tmp_path / "run" / "logs") == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full, of Linux")
def test_output_that_cannot_be_shown_is_in_the_log(tmp_path: Path):
    settings, program, full = LaunchSettings.read({}), "print('a line')", Path("/dev/full").open("w")  # noqa: SIM115
    with redirect_stdout(full):
        assert run_ranks([sys.executable, "-c", program], settings, nproc=1, logs=tmp_path / "run" / "logs") == 0
    with suppress(OSError):  # what is left in its buffer
        full.close()
    assert (tmp_path / "run" / "logs" / "rank0.log").read_text() == "a line\n"


def test_a_line_that_comes_in_the_middle_of_another_stops_no_log(tmp_path: Path):
    """Garbage collection may call a __del__ anywhere, and Python prints its error, in the same thread."""

    class Interrupts(type(Path())):  # type: ignore[misc]
        has = False

        def open(self, *arguments: Any, **named: Any) -> Any:
            if not Interrupts.has:
                Interrupts.has = True
                log.write("Exception ignored in a __del__\n")
            return super().open(*arguments, **named)

    log, path = LogFile(Interrupts(tmp_path / "run" / "logs" / "rank0.log")), tmp_path / "run" / "logs" / "rank0.log"
    (tmp_path / "run").mkdir()
    writes = threading.Thread(target=log.write, args=("step 1\n",), daemon=True)
    writes.start()
    writes.join(20)
    assert not writes.is_alive()
    assert path.read_text() == "step 1\nException ignored in a __del__\n"


def test_a_line_is_written_once_if_another_comes_in_the_middle_of_its_write(tmp_path: Path):
    class Interrupted(io.FileIO):
        has = False

        def write(self, data: Any) -> int:
            if not Interrupted.has:
                Interrupted.has = True
                log.write("Exception ignored in a __del__\n")
            return super().write(data)

    class OfLog(type(Path())):  # type: ignore[misc]
        def open(self, *_: Any, **__: Any) -> Any:
            return Interrupted(self, "ab")

    log, path = LogFile(OfLog(tmp_path / "run" / "logs" / "rank0.log")), tmp_path / "run" / "logs" / "rank0.log"
    (tmp_path / "run").mkdir()
    log.write("step 1\n")
    log.close()
    assert path.read_text() == "Exception ignored in a __del__\nstep 1\n"


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_console_that_takes_nothing_stops_no_group(tmp_path: Path, kind: str):
    """After Ctrl-S, or over a connection that hangs: the group would wait for room in its pipe, and its watchdog would end it."""
    program = f"for number in range({2 * LINES_KEPT}): print(f'{{number:8}}')"
    one = ReplicaSupervisor("0", [sys.executable, "-c", program], {}, tmp_path / "0.log", restarts=0)
    read, write = os.pipe() if kind == "pipe" else os.openpty()
    with os.fdopen(read, "rb", 0), redirect_stdout(os.fdopen(write, "w")):
        try:
            one.start()
            assert one.process is not None and one.process.wait(30) == 0
        finally:
            one.end()
    assert (tmp_path / "0.log").read_text().split() == [str(number) for number in range(2 * LINES_KEPT)]


def test_a_console_that_takes_lines_again_gets_the_number_of_those_that_it_lacks():
    is_stopped, takes, shown = threading.Event(), threading.Event(), list[str]()

    class Stops(io.StringIO):
        def write(self, text: str) -> int:
            is_stopped.set()
            assert takes.wait(50)
            shown.append(text)
            return len(text)

    with redirect_stdout(Stops()):
        console = Console(Path("0.log"))
    console.write("0\n")
    assert is_stopped.wait(50)
    for number in range(1, LINES_KEPT + 3):  # the last two do not fit
        console.write(f"{number}\n")
    takes.set()
    console.close()
    lines = [f"{number}\n" for number in range(LINES_KEPT + 1)]
    assert shown == [*lines, "pharos: 2 lines are missing here, and are in 0.log\n"]


STUCK = """
import io, os, sys, threading
from scripts.launch_settings import end_program
full, blocked = os.dup(1), threading.Event()
os.set_blocking(full, False)
try:
    while True:
        os.write(full, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(full, True)

class Blocks(io.FileIO):
    def write(self, data):
        blocked.set()
        return super().write(data)

sys.stdout = io.TextIOWrapper(io.BufferedWriter(Blocks(1, "w", closefd=False)))
threading.Thread(target=lambda: print("a line", flush=True), daemon=True).start()
assert blocked.wait(50)
end_program(3)
"""


def test_a_launcher_ends_while_a_thread_waits_for_its_console():
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write) as full:
        done = subprocess.run([sys.executable, "-c", STUCK], cwd=ROOT, stdout=full, check=False, timeout=50)
    assert done.returncode == 3


STOPPED_LATE = """
import atexit, os, signal
from scripts.launch_settings import end_program, handle_early_stop
handle_early_stop()
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
end_program(0)
"""


def test_a_stop_signal_after_the_end_of_all_ranks_does_not_change_the_code_of_the_launcher():
    done = subprocess.run([sys.executable, "-c", STOPPED_LATE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("script", ["launch.py", "replicas.py"])
def test_whoever_has_stopped_reading_changes_no_exit_code(script: str):
    """`| head`, or `| tee` after a Ctrl-C: Python flushes its streams at the end, fails, and ends with 120."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, str(ROOT / "scripts" / script), "no such file.toml", "--groups", "2"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with os.fdopen(write, "w") as nobody:
        assert subprocess.run(command, stdout=nobody, stderr=nobody, env=env, check=False).returncode == 2


class Leaves(Dies):
    """A group that ends after a signal, unless it is `deaf`."""

    told = deaf = False

    def ended(self) -> int | None:  # type: ignore[override]
        return 0 if self.told and not self.deaf else None

    def send_signal(self, number: signal.Signals) -> None:
        self.told = True


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full, of Linux")
def test_a_job_goes_on_where_nothing_can_be_said(tmp_path: Path):
    one = Dies("0", [], {}, tmp_path / "0.log", restarts=1, restarted_at_s=[time.monotonic()])
    one.start()
    codes = list[int]()
    with suppress(OSError), Path("/dev/full").open("w", buffering=1) as full, redirect_stderr(full):
        codes.append(run([one], cast(Any, NoLighthouse()), [], grace_s=120.0))
    assert codes == [1]


def test_a_launcher_may_open_a_pipe_and_a_log_for_each_of_a_thousand_groups(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        one = Leaves("0", [], {}, tmp_path / "0.log", restarts=0)
        one.told = True
        assert run([one], cast(Any, NoLighthouse()), [], grace_s=120.0) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > min(1024, hard - 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("codes", "code"), [((143, 143), 143), ((0, 143), 0), ((1, 143), 1)])
def test_groups_that_are_stopped_early_have_not_failed(
    codes: tuple[int, int], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    class Early(Leaves):
        def ended(self) -> int | None:  # type: ignore[override]
            return codes[int(self.name)] if self.told else None

    groups = [Early(str(name), [], {}, tmp_path / "log", restarts=2) for name in range(2)]
    received = [(signal.SIGTERM, time.monotonic())]
    assert run(groups, cast(Any, NoLighthouse()), cast(Any, received), grace_s=120.0) == code
    assert capsys.readouterr().err.count("failed") == (code == 1)


class NoLighthouse:
    address = ""

    def poll(self, now_s: float) -> str:
        return ""

    def close(self) -> None: ...


def test_a_second_signal_kills_where_the_console_takes_nothing(tmp_path: Path):
    takes, killed = threading.Event(), list[str]()

    class Blocks(io.StringIO):
        def write(self, _: str) -> int:
            assert takes.wait(50)
            return 0

    class Deaf(Leaves):
        deaf = True

        def end(self) -> None:
            killed.append(self.name)

    one, now_s = Deaf("0", [], {}, tmp_path / "0.log", restarts=2), time.monotonic()
    received = [(signal.SIGINT, now_s - 5.0), (signal.SIGINT, now_s)]
    with redirect_stderr(Blocks()):
        assert run([one], cast(Any, NoLighthouse()), cast(Any, received), grace_s=120.0) == 1
    takes.set()
    assert killed == ["0"]


@pytest.mark.parametrize(
    ("seconds", "deaf", "code", "said"),
    [
        ((0.0, 0.01), False, 0, ""),  # a terminal and a scheduler, say
        ((-5.0, 0.0), True, 1, "SIGINT again: killing the groups"),
        ((-200.0,), True, 1, "not saved within 120 s: killing the groups"),
    ],
)
def test_a_second_signal_to_stop_kills_and_a_repeated_one_does_not(
    seconds: tuple[float, ...], deaf: bool, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    one, lighthouse = Leaves("0", [], {}, tmp_path / "0.log", restarts=2), cast(Any, NoLighthouse())
    one.deaf = deaf
    received = [(signal.SIGINT, time.monotonic() + second) for second in seconds]
    assert run([one], lighthouse, cast(Any, received), grace_s=120.0) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ran_s", "restarts", "ends_all"), [(1.0, 0, True), (SHORT_RUN_S + 60, 0, False), (1.0, 1, False)]
)
def test_bad_input_ends_the_other_groups_only_at_the_first_launch(
    ran_s: float, restarts: int, ends_all: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A configuration file edited during the run affects only the restarted group."""

    class Refused(Leaves):
        def ended(self) -> int | None:
            return 2

    class Trains(Leaves):
        def ended(self) -> int | None:
            return 0 if refused.code == 2 else None

    now_s = time.monotonic()
    refused = Refused("1", [], {}, tmp_path / "1.log", restarts=9, restarted_at_s=[now_s] * restarts)
    refused.started_s = now_s - ran_s
    trains = Trains("0", [], {}, tmp_path / "0.log", restarts=9)
    assert run([trains, refused], cast(Any, NoLighthouse()), [], grace_s=120.0) == 2
    assert trains.code == (None if ends_all else 0)
    assert "group 1 failed and is not restarted (exit code 2)" in capsys.readouterr().err


class Config:
    """The part of a configuration that a lighthouse needs."""

    def __init__(self, folder: Path) -> None:
        (folder / "groups").mkdir(parents=True)
        self.run_folder, self.fault_tolerance = folder, FaultTolerance()


def test_a_lighthouse_that_dies_comes_again_at_the_same_address(tmp_path: Path):
    config: Any = Config(tmp_path)
    with closing(LighthouseSupervisor(config, environment(tmp_path, 2))) as one:
        assert one.poll(0.0) == ""
        first = one.process
        first.kill()
        first.wait()
        assert re.fullmatch(r"the lighthouse died and was restarted \(pid \d+\)", one.poll(10.0))
        assert one.process.pid != first.pid
        until("the lighthouse listens", lambda: listens(one.port), 50.0)
        one.process.kill()
        one.process.wait()
        assert one.poll(10.5) == "", "not at once"


def listens(port: int) -> bool:
    with closing(socket.socket()) as connection:
        return not connection.connect_ex(("127.0.0.1", port))


def test_a_lighthouse_that_hangs_at_its_restart_stops_no_loop(tmp_path: Path):
    """Its state file is a FIFO without a writer."""
    config: Any = Config(tmp_path)
    with closing(LighthouseSupervisor(config, environment(tmp_path, 2))) as one:
        one.process.kill()
        one.process.wait()
        (tmp_path / "groups" / "lighthouse.json").unlink(missing_ok=True)
        os.mkfifo(tmp_path / "groups" / "lighthouse.json")
        assert "was restarted" in one.poll(10.0)
        assert one.process.poll() is None


def test_a_lighthouse_that_does_not_end_is_killed(cleanup: ExitStack, tmp_path: Path):
    """The lighthouse is stopped (SIGSTOP)."""
    config: Any = Config(tmp_path)
    one = LighthouseSupervisor(config, environment(tmp_path, 2))
    cleanup.callback(one.process.kill)
    one.process.send_signal(signal.SIGSTOP)
    one.close()
    assert one.process.returncode == -signal.SIGKILL


def test_a_character_that_the_terminal_lacks_costs_its_line_on_it_and_no_more(tmp_path: Path):
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as stdout, redirect_stdout(stdout):
        one = group(tmp_path, r"print('\xe9'); print('all')", {"PYTHONIOENCODING": locale.getpreferredencoding()})
        ended(one, time.monotonic())
        one.end()
        assert (tmp_path / "0.log").read_text() == "\xe9\nall\n"
        assert stdout.buffer.getvalue() == b"all\n"  # type: ignore[attr-defined]


def test_its_words_are_in_its_log_without_colours(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = group(tmp_path, r"print('\x1b[31mred\x1b[0m step 1')")
    ended(one, time.monotonic())
    one.end()
    assert (tmp_path / "0.log").read_text() == "red step 1\n"
    assert capsys.readouterr().out == "\x1b[31mred\x1b[0m step 1\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full, of Linux")
def test_a_full_disk_costs_it_lines_of_its_log_and_no_more(tmp_path: Path):
    (tmp_path / "0.log").symlink_to("/dev/full")
    one = group(tmp_path, "for _ in range(100): print('x' * 4096)")  # more than a pipe holds
    ended(one, time.monotonic())
    assert one.code == 0, "its lines were read to the end"
    one.end()


@pytest.mark.parametrize("given", [[], ["--fault_tolerance.enable"], ["--fault_tolerance.enable", "true"], [ENABLED]])
def test_groups_are_enabled_once(given: list[str]):
    assert enabled(["a.toml", *given, "--training.steps=2"]) == ["a.toml", "--training.steps=2", ENABLED]
    with pytest.raises(
        ValueError, match=r"^--fault_tolerance.enable=false: replica groups need true, which this script"
    ):
        enabled(["a.toml", "--fault_tolerance.enable", "false"])


@pytest.mark.parametrize(
    ("no_file", "said"),
    [
        ("lighthouse.json", "the lighthouse did not start; see outputs/a/groups/lighthouse.log"),
        ("token", "[Errno 21] Is a directory: '{folder}/outputs/a/groups/token'"),
        ("lock", "[Errno 21] Is a directory: 'outputs/a/groups/lock'"),
    ],
)
def test_what_cannot_be_written_before_the_groups_start_is_one_line(
    no_file: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ft").mkdir()
    (tmp_path / "ft" / "__init__.py").write_text("raise SystemExit('the ft of the working folder')\n")
    (tmp_path / "outputs" / "a" / "groups" / no_file).mkdir(parents=True)
    (tmp_path / "a.toml").write_text("[model]\ndim = 32\nn_heads = 2\nn_kv_heads = 2\n")
    assert main(["a.toml", "--groups=2"]) == 1
    assert capsys.readouterr().err == f"pharos: {said.format(folder=tmp_path)}\n"
    if no_file == "lighthouse.json":  # of the lighthouse's state
        assert f"{no_file}: is a folder" in (tmp_path / "outputs" / "a" / "groups" / "lighthouse.log").read_text()


def test_the_number_of_groups_may_stand_anywhere():
    assert read_groups(["a.toml", "--groups", "3", "--training.steps=2"]) == (3, ["a.toml", "--training.steps=2"])
    assert read_groups(["--groups=2", "a.toml"]) == (2, ["a.toml"])


@pytest.mark.parametrize(
    "running", ["", "/groups", "/groups/1"], ids=["a launch without groups", "the launch", "a group that outlives it"]
)
def test_a_second_start_of_a_job_that_goes_on_takes_nothing_from_it(
    running: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The running job's groups read the token at each restart."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("[model]\ndim = 32\nn_heads = 2\nn_kv_heads = 2\n")
    groups = tmp_path / "outputs" / "a" / "groups"
    groups.mkdir(parents=True)
    with closing(RunLock(Path(f"{groups.parent}{running}"))):
        token = Path(environment(groups.parent, 2)["PHAROS_TOKEN_FILE"]).read_text()
        assert main(["a.toml", "--groups=2"]) == 2
        assert (groups / "token").read_text() == token
    said = capsys.readouterr().err
    assert re.fullmatch(rf"pharos: job.name: outputs/a{running} is in use by process \d+ on .+\n", said)


def test_the_cores_are_divided_among_the_ranks_of_all_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "groups").mkdir()

    def threads(groups: int, ranks: int | None) -> str:
        return environment(tmp_path, groups, ranks).get("OMP_NUM_THREADS", "")

    halves, quarters = (str(max(1, cores_here() // parts)) for parts in (2, 4))
    assert [threads(1, 1), threads(2, 1), threads(1, 2), threads(2, 2)] == [str(cores_here()), halves, halves, quarters]
    assert threads(2, None) == "", "groups on nodes of their own: launch.py sets it there"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads(2, 1) == "7", "the user's"


def test_a_lighthouse_elsewhere_that_has_tls_is_no_matter_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("[model]\ndim = 32\nn_heads = 2\nn_kv_heads = 2\n")
    (tmp_path / "groups").mkdir()
    monkeypatch.setenv("PHAROS_TLS_CA", "ca.pem")
    assert main(["a.toml", "--groups=2", "--check"]) == 0
    assert "PHAROS_TLS_CA" not in environment(tmp_path, 2)


def test_nodes_of_another_launch_are_no_matter_of_groups_on_one_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("NNODES", "2")
    assert main(["a.toml", "--groups=2", "--check"]) == 2
    assert capsys.readouterr().err == "pharos: NNODES=2: this script runs all groups on this machine; unset it\n"


def test_a_request_to_save_before_a_rank_has_a_handler_ends_it_not(tmp_path: Path):
    program = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"
    assert run_ranks([sys.executable, "-c", program], LaunchSettings.read({}), nproc=1, logs=tmp_path / "logs") == 0


def test_a_rank_has_the_arguments_of_its_launcher(tmp_path: Path):
    program, logs = "import sys; print(*sys.argv[1:])", tmp_path / "logs"
    command = [sys.executable, "-c", program, "a$$b", "${local_rank}"]
    assert run_ranks(command, LaunchSettings.read({}), nproc=1, logs=logs) == 0
    assert (logs / "rank0.log").read_text() == "a$$b ${local_rank}\n"


def test_ranks_whose_log_cannot_be_written_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "logs").touch()
    assert run_ranks([sys.executable, "-c", ""], LaunchSettings.read({}), nproc=1, logs=tmp_path / "logs") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("pharos: the ranks were not started: [Errno 17] File exists: ")


class Late:
    """The rendezvous of a node that arrives after NNODES others, once these have ended."""

    use_agent_store = False

    def get_run_id(self) -> str:
        return "late"

    def get_backend(self) -> str:
        return "c10d"

    def next_rendezvous(self) -> None:
        raise RendezvousGracefulExitError

    def shutdown(self) -> bool:
        return True


def test_a_node_too_many_is_a_failed_rendezvous(tmp_path: Path):
    spec = WorkerSpec("train", 1, cast(Any, Late()), entrypoint=sys.executable)
    with (
        closing(Output(tmp_path, None)) as output,
        closing(LocalRanks(120.0)) as ranks,
        pytest.raises(RendezvousClosedError, match="NNODES nodes had joined before this one"),
    ):
        Agent(spec, output, ranks, time.monotonic, time.sleep).run()


def test_a_log_that_is_cut_for_room_is_shown_from_its_new_beginning(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
):
    """logrotate's copytruncate does so, or a person, after weeks."""
    log = tmp_path / "rank0.log"
    log.write_text("of an earlier launch, which is not shown\n")
    with closing(Output(tmp_path, None)) as output:
        output.reify({0: {"RANK": "0"}})
        log.write_text("step 1\n")
    assert capsysbinary.readouterr().out == b"step 1\n"


def test_a_log_that_a_file_server_has_forgotten_for_a_moment_is_shown_on(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
):
    """The thread that shows it must live: torch's agent calls `reify` at each restart, which starts one that has ended."""
    is_read = threading.Event()

    class Stale(io.BufferedRandom):
        calls = 0

        def fileno(self) -> int:
            self.calls += 1
            if self.calls == 1:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            is_read.set()
            return super().fileno()

    class OfServer(type(Path())):  # type: ignore[misc]
        def open(self, *_: Any, **__: Any) -> Any:
            return Stale(io.FileIO(self, "ab+"))

    class Shown(Output):
        def path(self, rank: int) -> Path:
            return OfServer(super().path(rank))

    with closing(Shown(tmp_path, None)) as output:
        output.reify({0: {"RANK": "0"}})
        assert is_read.wait(20)
        output.reify({0: {"RANK": "0"}})  # a restart
        with (tmp_path / "rank0.log").open("a") as log:
            log.write("step 1\n")
    assert capsysbinary.readouterr().out == b"step 1\n"


def test_the_rendezvous_of_each_run_and_group_has_a_name_of_its_own():
    folders = ("outputs/a/logs", "outputs/b/logs", "outputs/a/groups/0", "outputs/a/groups/1", "outputs/b/groups/0")
    assert len({rendezvous_id(Path(folder)) for folder in folders}) == len(folders)


def test_a_stop_while_no_rank_runs_says_whether_there_were_any(capsys: pytest.CaptureFixture[str]):
    codes = list[int]()
    with closing(LocalRanks(120.0, codes.append)) as ranks:
        ranks.handle(signal.SIGTERM)
        ranks.started = True
        ranks.handle(signal.SIGINT)
        ranks.end_if_stopping()
        ranks.stopping = signal.SIGTERM  # it came before the ranks had ended
        ranks.end_if_stopping()
    assert codes == [143, 130, 143]
    assert [line.removeprefix("pharos: ") for line in capsys.readouterr().err.splitlines()] == [
        "stopped by SIGTERM before any rank was started",
        "stopped by SIGINT while the ranks were restarted",
        "stopped by SIGTERM while the ranks were restarted",
    ]


def test_a_stop_before_any_rank_ends_the_launcher_where_no_thread_is_left_to_say_so(monkeypatch: pytest.MonkeyPatch):
    def lacks(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    codes = list[int]()
    with closing(LocalRanks(120.0, codes.append)) as ranks:
        replace_system_call(monkeypatch, "threading.Thread.start", lacks)
        ranks.handle(signal.SIGTERM)
    assert codes == [128 + signal.SIGTERM]


@pytest.mark.parametrize("code", [0, 1])
def test_the_rendezvous_is_closed_only_after_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int):
    """The node with the store may be gone after a success, and torch would print a stack trace."""
    program, settings = f"raise SystemExit({code})", LaunchSettings.read({})
    log = logging.getLogger("torch.distributed.elastic.rendezvous.dynamic_rendezvous")  # it does not reach the root
    log.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, log.name):
        assert run_ranks([sys.executable, "-c", program], settings, nproc=1, logs=tmp_path / "run" / "logs") == code
    log.removeHandler(caplog.handler)
    assert ("has closed the rendezvous" in caplog.text) == bool(code)


def test_ranks_that_are_stopped_before_they_can_save_are_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    program = "import os, signal; os.kill(os.getppid(), signal.SIGINT); signal.pause()"
    settings, logs = LaunchSettings.read({}), tmp_path / "run" / "logs"
    assert run_ranks([sys.executable, "-c", program], settings, nproc=1, logs=logs) == 130
    assert capsys.readouterr().err == "pharos: stopped by SIGINT while no step was under way\n"


def test_deaf_ranks_are_killed_though_nobody_reads_why(tmp_path: Path):
    """Standard error is a pipe without a reader, as in `run_train.sh ... 2>&1 | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    program = (
        "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(os.getppid(), 15); signal.pause()"
    )
    settings, codes = LaunchSettings.read({"STOP_GRACE": "0"}), list[int]()
    with suppress(BrokenPipeError), os.fdopen(writer, "w", buffering=1) as stderr, redirect_stderr(stderr):
        codes.append(run_ranks([sys.executable, "-c", program], settings, nproc=1, logs=tmp_path / "run" / "logs"))
    assert codes == [1]


@pytest.mark.parametrize(
    ("named", "count", "names"),
    [
        (None, 3, ["0", "1", "2"]),
        ("", 0, []),
        ("-1", 0, []),
        ("4,6", 2, ["4", "6"]),
        ("GPU-a, MIG-b", 2, ["GPU-a", "MIG-b"]),
        ("2,1,-1,0", 2, ["2", "1"]),  # CUDA reads up to the first that it does not know
    ],
)
def test_devices_have_the_names_that_the_user_gave_them(named: str | None, count: int, names: list[str]):
    assert visible_devices({} if named is None else {"CUDA_VISIBLE_DEVICES": named}, count) == names


def test_the_visible_devices_are_dealt_out_among_the_groups():
    eight = [str(number) for number in range(8)]
    assert assign_devices(eight, 2, None, False) == [eight[:4], eight[4:]]
    assert assign_devices(eight, 3, None, False) == [eight[:2], eight[2:4], eight[4:6]]
    assert assign_devices(eight, 2, 1, False) == [["0"], ["1"]]
    assert assign_devices([], 2, 4, False) == [[], []], "CPUs"


@pytest.mark.parametrize(
    ("nproc", "said"),
    [
        (
            None,
            "--groups 3: with 1 GPU each, more than the 2 that are visible here; nearest: --groups 2; SHARE_GPUS=1 lets groups share them",
        ),
        (4, "NPROC=4: more ranks than the 2 GPUs that are visible here"),
    ],
)
def test_too_few_devices_are_one_line(nproc: int | None, said: str):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        assign_devices(["0", "1"], 3, nproc, False)


def test_devices_are_shared_where_the_user_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert assign_devices(["0", "1"], 3, None, True) == [["0"], ["1"], ["0"]]
    assert assign_devices(["5"], 2, None, True) == [["5"], ["5"]]
    monkeypatch.delenv("SHARE_GPUS", raising=False)
    one = ReplicaSupervisor.local("1", ["a.toml"], {"A": "b"}, tmp_path, 1, ["6", "7"])
    assert one.env == {"A": "b", "CUDA_VISIBLE_DEVICES": "6,7", "REPLICA_GROUP_ID": "1"}, "its own devices alone"
    assert ReplicaSupervisor.local("1", [], {}, tmp_path, 1).env == {"REPLICA_GROUP_ID": "1"}
    monkeypatch.setenv("SHARE_GPUS", "1")
    assert ReplicaSupervisor.local("1", [], {}, tmp_path, 1, ["5"]).env["NCCL_HOSTID"] == "pharos-1"


def test_a_drills_groups_have_devices_of_their_own():
    """A later group gets the devices of one that has left."""
    pool = DevicePool(assign_devices(list("0123"), 2, None, False))
    assert [pool.of("0"), pool.of("1"), pool.of("2", gone={"1"})] == [["0", "1"], ["2", "3"], ["2", "3"]]
    assert pool.of("2") == ["2", "3"], "its next life"
