"""A hang is reported once, by one rank, before it is ended; on a clock that the test moves and a store in memory."""

import errno
import io
import json
import math
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.unit.fakes import Clock
from training.log import Log
from training.progress import Progress
from training.watchdog import Watchdog, describe, flight_recorder_env


class FakeAbort:
    def __init__(self) -> None:
        self.after_s: float | None = None

    def arm(self, after_s: float) -> None:
        self.after_s = after_s

    def cancel(self) -> None:
        self.after_s = None


class Rank:
    """A rank's watchdog with its fakes."""

    def __init__(self, cluster: "Cluster", global_rank: int) -> None:
        self.progress, self.abort, self.out, self.recorded = Progress(cluster.clock), FakeAbort(), io.StringIO(), 0
        self.confirmed_s, self.record_fails = -math.inf, lambda: None
        self.watchdog = Watchdog(
            self.progress,
            cluster.store,
            global_rank=global_rank,
            world_size=cluster.world_size,
            timeout_s=100,
            long_timeout_s=300,
            log=Log(global_rank=global_rank, stream=self.out),
            clock=cluster.clock,
            arm=self.abort.arm,
            disarm=self.abort.cancel,
            record=self.record,
            last_waiting_for_others_at_s=lambda: self.confirmed_s,
        )
        self.phases: list[AbstractContextManager[None]] = []

    def record(self) -> None:
        self.recorded += 1
        self.record_fails()

    def enter(self, phase: str) -> None:
        self.phases.append(self.progress.phase(phase))
        self.phases[-1].__enter__()

    def leave(self) -> None:
        self.phases.pop().__exit__(None, None, None)


class Cluster:
    def __init__(self, world_size: int, store: Any = None) -> None:
        self.clock, self.store, self.world_size = Clock(), store or HashStore(), world_size
        self.ranks = [Rank(self, rank) for rank in range(world_size)]

    def wait(self, seconds: int, *, frozen: Collection[int] = (), step: bool = False) -> None:
        """Advances second by second; `frozen` ranks do not run at all, the others finish steps only on request."""
        for _ in range(seconds):
            self.clock.now += 1
            for number, rank in enumerate(self.ranks):
                if number not in frozen:
                    if step:
                        rank.watchdog.step_done()
                    rank.watchdog.poll()

    def wait_for_others(self, seconds: int) -> None:
        """Waits while the group's server confirms to all ranks once a second that the group waits for others."""
        for _ in range(seconds):
            for rank in self.ranks:
                rank.confirmed_s = self.clock.now
            self.wait(1)

    def said(self) -> list[str]:
        return [line for rank in self.ranks for line in rank.out.getvalue().splitlines()]

    def armed(self) -> list[float | None]:
        return [rank.abort.after_s for rank in self.ranks]


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster(4)
    made.wait(3, step=True)
    return made


def test_steps_that_finish_are_left_in_peace(cluster: Cluster) -> None:
    cluster.wait(1000, step=True)
    assert cluster.said() == [] and cluster.armed() == [None] * 4


def test_one_line_says_who_is_where(cluster: Cluster) -> None:
    cluster.wait(56)
    cluster.ranks[3].enter("data")
    cluster.wait(2)
    for rank in (0, 1):
        cluster.ranks[rank].enter("compute")
        cluster.ranks[rank].enter("reduce")
    cluster.wait(60, frozen={2})
    (line,) = cluster.said()
    assert line == (
        "[0] error: no step for 106 s: rank 3: data loading for 49 s; ranks 0-1: gradient reduction for 48 s; "
        "rank 2 does not answer; stack dumps and exit in 25 s"
    )
    assert cluster.armed() == [30, 30, None, 30]
    assert [rank.recorded for rank in cluster.ranks] == [1, 1, 0, 1]


def test_it_is_told_at_once_when_all_have_answered(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        rank.enter("data")
    cluster.wait(102)
    assert [line.split(";")[0] for line in cluster.said()] == [
        "[3] error: no step for 101 s: ranks 0-3: data loading for 101 s"
    ]


def test_another_rank_speaks_when_rank_0_is_gone(cluster: Cluster) -> None:
    cluster.wait(120, frozen={0})
    (line,) = cluster.said()
    assert line == (
        "[1] error: no step for 111 s: ranks 1-3: between phases for 111 s; rank 0 does not answer; "
        "stack dumps and exit in 20 s"
    )


def test_a_step_in_the_nick_of_time_calls_it_off_and_the_next_hang_is_told_anew(cluster: Cluster) -> None:
    cluster.wait(110, frozen={2})
    assert cluster.armed() == [30, 30, None, 30] and len(cluster.said()) == 1
    cluster.wait(1, step=True)
    assert cluster.armed() == [None] * 4
    assert [line for line in cluster.said() if "continuing" in line] == [
        f"[{rank}] warning: continuing: a step finished 10 s after a hang was suspected" for rank in (0, 1, 3)
    ]
    cluster.wait(110, frozen={3})
    assert [line for line in cluster.said() if "rank 3 does not answer" in line]
    assert cluster.armed() == [30, 30, 30, None]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("[Errno 28] is not all that can be")]
)
def test_a_flight_recorder_that_finds_the_disk_full_leaves_the_watch_alive(cluster: Cluster, error: Exception) -> None:
    def full() -> None:
        raise error

    cluster.ranks[0].record_fails = full
    cluster.wait(110, frozen={2})
    assert cluster.armed()[0] == 30 and "cannot be saved: [Errno 28]" in cluster.ranks[0].out.getvalue()
    cluster.wait(1, step=True)
    assert cluster.armed() == [None] * 4


def test_an_answer_of_an_earlier_hang_is_no_answer(cluster: Cluster) -> None:
    cluster.store.set("watchdog/rank/2", json.dumps({"step": 1, "where": "data loading", "seconds": 150}))
    cluster.wait(107, frozen={2})
    (line,) = cluster.said()
    assert "rank 2 does not answer" in line


def test_the_first_step_has_the_long_timeout() -> None:
    cluster = Cluster(1)
    cluster.wait(300)
    assert cluster.said() == []
    cluster.wait(2)
    assert cluster.said()[0].startswith("[0] error: no step for 301 s: rank 0: between phases for 301 s")


@pytest.mark.parametrize("phase", ["checkpoint", "validation"])
def test_long_phases_have_the_long_timeout_and_their_time_is_not_the_steps(cluster: Cluster, phase: str) -> None:
    cluster.wait(90)
    for rank in cluster.ranks:
        rank.enter(phase)
    cluster.wait(290)
    for rank in cluster.ranks:
        rank.leave()
    cluster.wait(99)
    assert cluster.said() == [] and cluster.armed() == [None] * 4


def test_a_long_phase_can_hang_too_and_the_line_says_what_it_does_inside(cluster: Cluster) -> None:
    for rank in cluster.ranks:
        rank.enter("validation")
        rank.enter("data")
    cluster.wait(302)
    assert "no step for 301 s: ranks 0-3: data loading in validation for 301 s" in cluster.said()[0]


def test_a_machine_that_slept_is_no_hang(cluster: Cluster) -> None:
    cluster.clock.now += 5000
    cluster.wait(90)
    assert cluster.said() == []


@pytest.mark.parametrize("phase", ["checkpoint", "validation"])
def test_a_machine_that_slept_in_a_long_phase_is_no_hang(cluster: Cluster, phase: str) -> None:
    """Slurm suspends a job for hours (PreemptMode=SUSPEND), and a checkpoint may take longer than GRACE_S to end."""
    for rank in cluster.ranks:
        rank.enter(phase)
    cluster.wait(200)
    cluster.clock.now += 5000
    cluster.wait(290)
    assert cluster.said() == [] and cluster.armed() == [None] * 4
    cluster.wait(20)
    assert cluster.armed() == [30] * 4


def test_a_dead_store_leaves_what_this_rank_knows() -> None:
    class DeadStore:
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("connection reset by peer\nand a stack of C++ frames")

    cluster = Cluster(2, DeadStore())
    cluster.wait(1, step=True)
    cluster.ranks[1].enter("data")
    cluster.wait(101)
    warning, error = cluster.said()[2:]
    assert warning == "[1] warning: the phases of the other ranks are unknown: connection reset by peer"
    assert error.startswith("[1] error: no step for 101 s: rank 1: data loading for 101 s; rank 0 does not answer;")
    assert cluster.armed() == [30, 30]


def test_close_calls_everything_off(cluster: Cluster) -> None:
    cluster.wait(103)
    assert cluster.armed() == [30] * 4
    for rank in cluster.ranks:
        rank.watchdog.close()
    assert cluster.armed() == [None] * 4


def test_ranks_that_are_in_the_same_place_are_named_together() -> None:
    answers = {rank: {"where": "gradient reduction", "seconds": 39.0} for rank in (0, 1, 2, 4)}
    answers[6] = {"where": "data loading", "seconds": 41.2}
    assert describe(answers, 9) == (
        "rank 6: data loading for 41 s; ranks 0-2, 4: gradient reduction for 39 s; ranks 3, 5, 7-8 do not answer"
    )


def test_a_hang_ends_with_stacks_in_the_log_and_exit_1() -> None:
    program = """
import sys, threading
from training.watchdog import dump_stacks
def stuck_in_the_loader():
    threading.Event().wait()
dump_stacks(0.05)
stuck_in_the_loader()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "stuck_in_the_loader" in done.stderr


@pytest.mark.parametrize("room", [0, 4096])
def test_a_hang_of_which_nobody_reads_the_output_ends_too(room: int) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with os.fdopen(reader, "rb", buffering=0) as unread, os.fdopen(writer, "wb", buffering=0) as full:
        while full.write(b"x" * 4096):  # None: the pipe is full
            pass
        unread.read(room)
        os.set_blocking(writer, True)
        deep = f"def {'f' * 200}(n): return {'f' * 200}(n - 1) if n else time.sleep(600)"  # a dump of 20 KB
        program = f"import time\nfrom training.watchdog import dump_stacks\n{deep}\ndump_stacks(0.05)\n{'f' * 200}(99)"
        process = subprocess.Popen([sys.executable, "-c", program], stdout=full, stderr=full)
        try:
            assert process.wait(60) == 1
        finally:
            process.kill()


def test_the_flight_recorder_is_asked_for_in_torchs_own_words(tmp_path: Path) -> None:
    asked = flight_recorder_env(trace_buf_size=20_000, folder=tmp_path)
    assert asked["TORCH_FR_BUFFER_SIZE"] == "20000"
    library = Path(dist.__file__).parent.parent / "lib" / "libtorch_cpu.so"
    if library.exists():  # Linux; other builds keep the names in other files
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            assert all(content.find(name) >= 0 for name in (b"TORCH_FR_BUFFER_SIZE", b"TORCH_FR_DUMP_TEMP_FILE"))


RECORD = """
import sys
from pathlib import Path
import torch.distributed as dist
from training.watchdog import dump_flight_recorder
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
print(dump_flight_recorder(Path(sys.argv[1]), 3))
"""


def test_the_flight_recorder_is_saved_with_the_collectives_so_far(tmp_path: Path) -> None:
    """Runs in a separate process, as the first process group of a process sets up its recorder."""
    folder = tmp_path / "comm_traces"
    environment = {**os.environ, **flight_recorder_env(trace_buf_size=100, folder=folder)}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", RECORD, str(folder)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    if done.stdout.strip() == "None":
        pytest.skip("this torch gives no access to its flight recorder")
    path = folder / "rank_3"
    names = json.dumps([entry["profiling_name"] for entry in pickle.loads(path.read_bytes())["entries"]])
    assert "gloo:" in names


def test_a_group_that_waits_for_others_is_left_in_peace_as_long_as_its_server_says_so(cluster: Cluster) -> None:
    cluster.wait(60)
    cluster.wait_for_others(4000)
    assert cluster.said() == [] and cluster.armed() == [None] * 4
    cluster.wait(99)
    assert cluster.armed() == [None] * 4
    cluster.wait(3)
    assert cluster.armed() == [30] * 4, "its words ended: whoever hangs now, hangs in the group"


def test_a_word_that_others_are_waited_for_calls_a_suspicion_off(cluster: Cluster) -> None:
    cluster.wait(101)
    assert cluster.armed() == [30] * 4
    cluster.clock.now += 1
    cluster.wait_for_others(2)
    assert cluster.armed() == [None] * 4
    assert "continuing: the group waits for others, " in cluster.said()[-1]
    cluster.wait(120)
    assert sum("no step for" in line for line in cluster.said()) == 2, "the next hang in the same step is told, too"


def test_a_rank_that_hangs_is_ended_however_long_others_were_waited_for_before(cluster: Cluster) -> None:
    cluster.wait_for_others(500)
    for rank in cluster.ranks[1:]:
        rank.enter("reduce")
    cluster.ranks[0].enter("data")
    cluster.wait(101)
    assert cluster.armed() == [30] * 4
