"""Log lines: prefix, rank, colour, and readers that disappear."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from training.log import Log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_prefix_names_the_rank_the_last_step_and_the_group_once_there_are_several() -> None:
    """A percent sign in a message without arguments is unchanged."""
    out = io.StringIO()
    log, grouped = Log(stream=out), Log(global_rank=1, group="b", stream=out)
    log.info("100% of it")
    log.step = grouped.step = 12
    log.info("%d of %d", 3, 4)
    grouped.warning("late")
    assert out.getvalue() == "[0] 100% of it\n[0 12] 3 of 4\n[b/1 12] warning: late\n"


def test_only_rank_0_informs_and_every_rank_warns() -> None:
    out = io.StringIO()
    log = Log(global_rank=3, stream=out)
    log.info("for rank 0 to say")
    log.warning("disk is slow")
    log.error("disk is full")
    assert out.getvalue() == "[3] warning: disk is slow\n[3] error: disk is full\n"


@pytest.mark.parametrize(("stream", "colour"), [(io.StringIO(), True), (Terminal(), False)])
def test_no_colour_outside_a_terminal_or_when_switched_off(stream: io.StringIO, colour: bool) -> None:
    log = Log(stream=stream, colour=colour)
    log.warning(log.paint("x", "bold", "red"))
    assert "\x1b" not in stream.getvalue()


def test_no_colour_where_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Log(stream=Terminal()).colour
    monkeypatch.setenv("NO_COLOR", "")
    assert Log(stream=Terminal()).colour


def test_colour_on_a_terminal_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Log(stream=Terminal()).paint("x", "bold", "red") == "\x1b[1;31mx\x1b[0m"


def test_overwriting_is_for_terminals() -> None:
    terminal, pipe, other_rank = Terminal(), io.StringIO(), Terminal()
    Log(stream=terminal).overwrite("50%")
    Log(stream=pipe).overwrite("50%")
    Log(stream=other_rank, global_rank=1).overwrite("50%")
    assert (terminal.getvalue(), pipe.getvalue(), other_rank.getvalue()) == ("\r\x1b[K50%", "", "")


def test_a_line_leaves_in_one_write_and_is_flushed() -> None:
    class Pipe(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def write(self, text: str) -> int:
            self.calls.append(text)
            return len(text)

        def flush(self) -> None:
            self.calls.append("flush")

    pipe = Pipe()
    Log(stream=pipe).info("one\ntwo")
    assert pipe.calls == ["[0] one\ntwo\n", "flush"]


def test_training_goes_on_when_the_reader_has_gone() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Log(stream=Gone()).info("anybody?")


class FullDisk(io.StringIO):
    full = False

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_full_disk_under_the_log_ends_nothing_and_is_told_when_there_is_room() -> None:
    out = FullDisk()
    log = Log(stream=out)
    log.info("one")
    out.full = True
    log.info("two")
    log.warning("three")
    out.full = False
    log.info("four")
    log.info("five")
    assert out.getvalue() == (
        "[0] one\n[0] warning: lines of this log are missing here: No space left on device\n[0] four\n[0] five\n"
    )


def test_a_log_that_takes_nothing_is_no_failure_at_the_end() -> None:
    code = "from training.log import Log, end_process; Log().info('x'); end_process(0)"
    with Path("/dev/full").open("w") as full:  # every write of it finds no room
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, env={**os.environ}, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")


LATE = """
import atexit, threading, time
import torch.distributed as dist
from training.log import end_process

class Last:  # Python lets go of it in the middle of its own end, which the daemon thread then meets
    def __del__(self, sleep=time.sleep):
        master.set("key", "")
        sleep(30)

master = dist.TCPStore("127.0.0.1", 0, None, True)
asking = dist.TCPStore("127.0.0.1", master.port, None, False)
threading.Thread(target=asking.get, args=("key",), daemon=True).start()
threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread"))).start()
atexit.register(print, "a handler")
last = Last()
end_process(3)
"""


def test_a_process_ends_with_its_code_whatever_threads_of_torch_do_then() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "a thread\na handler\n"), done.stderr


STOPPED_LATE = """
import atexit, os, signal
from training.log import end_process
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # as the launcher's, from before the run
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
end_process(0)
"""


def test_a_stop_signal_after_the_end_of_a_run_does_not_change_its_code() -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED_LATE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


BROKEN = """
import runpy, sys
import configs.load
configs.load.load = lambda argv: 1 / 0
sys.argv = ["train.py", "any.toml"]
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_fault_of_ours_is_told_as_python_tells_it() -> None:
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ZeroDivisionError: division by zero"), done.stderr


def test_letters_that_the_output_does_not_know_end_no_run() -> None:
    written = io.BytesIO()
    log = Log(stream=io.TextIOWrapper(written, encoding="latin-1"))
    log.info("text sample:\n%s", "caf\u00e9 \ufffd")
    assert written.getvalue() == b"[0] text sample:\ncaf\\xe9 \\ufffd\n"
