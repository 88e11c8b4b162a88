"""Traces are written to the right files and contain the step; garbage is collected at its interval."""

import errno
import gc
import gzip
import io
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from training.log import Log
from training.profiling import GarbageCollection, Profiler, ProfilingConfig


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def test_every_profile_freq_steps_a_trace_of_profiler_active_steps(tmp_path: Path, out: io.StringIO) -> None:
    config = ProfilingConfig(enable_profiling=True, profile_freq=4, profiler_warmup=1, profiler_active=2)
    with Profiler(config, tmp_path, global_rank=1, log=Log(stream=out)) as profiler:
        for step in range(11, 21):  # resumed at 10
            torch.ones(4, 4) @ torch.ones(4, 4)
            profiler.step(step)
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.gz"))
    assert files == ["profile_traces/step-14/rank-1.json.gz", "profile_traces/step-18/rank-1.json.gz"]
    assert [line.split("/")[-2] for line in out.getvalue().splitlines()] == ["step-14", "step-18"]
    with gzip.open(tmp_path / files[0]) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::mm") == 2


def test_nothing_enabled_writes_nothing(tmp_path: Path, out: io.StringIO) -> None:
    with Profiler(ProfilingConfig(), tmp_path, global_rank=0, log=Log(stream=out)) as profiler:
        profiler.step(1)
    assert list(tmp_path.iterdir()) == [] and out.getvalue() == ""


def test_memory_snapshots_without_cuda_are_refused_in_one_line(tmp_path: Path, out: io.StringIO) -> None:
    config = ProfilingConfig(enable_memory_snapshot=True, profile_freq=1)
    with Profiler(config, tmp_path, global_rank=0, log=Log(stream=out)) as profiler:
        profiler.step(1)
    assert out.getvalue() == "[0] profiling.enable_memory_snapshot: no CUDA device, no memory snapshots\n"
    assert list(tmp_path.iterdir()) == []


class Allocator:
    """A stand-in for torch.cuda.memory that records its calls."""

    def __init__(self, fails: bool = False) -> None:
        self.asked, self.fails = list[Any](), fails

    def _record_memory_history(self, **settings: Any) -> None:
        self.asked.append(settings)

    def _dump_snapshot(self, path: str) -> None:
        self.asked.append(path)
        if self.fails:
            Path(path).write_bytes(b"the first bytes")
            raise OSError(errno.ENOSPC, "No space left on device", path)


def test_memory_snapshots_on_cuda_every_profile_freq_steps_and_when_out_of_memory(
    tmp_path: Path, out: io.StringIO
) -> None:
    config, allocator = ProfilingConfig(enable_memory_snapshot=True, profile_freq=2), Allocator()
    profiler = Profiler(config, tmp_path, global_rank=3, log=Log(stream=out), allocator=allocator)
    with pytest.raises(torch.OutOfMemoryError), profiler:
        for step in range(1, 4):
            profiler.step(step)
        raise torch.OutOfMemoryError
    folder = tmp_path / "memory_snapshot"
    assert allocator.asked == [
        {"max_entries": 100_000},
        str(folder / "step-2" / "rank-3.pickle"),
        str(folder / "step-3-out-of-memory" / "rank-3.pickle"),
        {"enabled": None},
    ]


def test_storage_that_fails_costs_the_trace_and_not_the_run(tmp_path: Path, out: io.StringIO) -> None:
    (tmp_path / "t").write_text("a file where the folder should be")
    config = ProfilingConfig(
        enable_profiling=True, profile_freq=2, profiler_warmup=1, enable_memory_snapshot=True, save_traces_folder="t"
    )
    full = Allocator(fails=True)
    with Profiler(config, tmp_path, global_rank=0, log=Log(stream=out), allocator=full) as profiler:
        for step in range(1, 4):
            profiler.step(step)
    said = sorted(line for line in out.getvalue().splitlines() if "is not written: [Errno " in line)
    assert [line.split(": ")[1] for line in said] == ["memory snapshot", "profile"], out.getvalue()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["t"]


def test_a_period_must_hold_warmup_and_trace() -> None:
    message = "^profiling.profile_freq = 3: .*profiler_warmup = 3 .*profiler_active = 1; nearest: 4$"
    with pytest.raises(ValueError, match=message):
        ProfilingConfig(enable_profiling=True, profile_freq=3).check()
    ProfilingConfig(profile_freq=3).check()
    ProfilingConfig(enable_profiling=True, profile_freq=4).check()


class Node:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_is_collected_on_its_turn_and_only_then() -> None:
    collection = GarbageCollection(10)
    try:
        assert gc.get_freeze_count() > 0  # what lives long is not looked at again and again
        for step in range(1, 20):
            gone = weakref.ref(Node())
            for _ in range(2000):  # more than any generation's threshold
                Node()
            collection.step(step)
            assert (gone() is None) == (step == 10)
    finally:
        collection.close()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_its_turn_comes_between_two_calls_that_are_several_steps_apart(tmp_path: Path) -> None:
    """Semi-synchronous training calls it once per round of several steps."""
    collection, allocator = GarbageCollection(50), Allocator()
    config = ProfilingConfig(enable_memory_snapshot=True, profile_freq=50)
    profiler = Profiler(config, tmp_path, global_rank=0, log=Log(stream=io.StringIO()), allocator=allocator)
    collected, written = list[int](), list[int]()
    try:
        for step in (64, 96, 128, 140, 160, 70, 90, 110):  # in the end back at an earlier checkpoint
            gone, before = weakref.ref(Node()), len(allocator.asked)
            collection.step(step)
            profiler.step(step)
            collected += [step] * (gone() is None)
            written += [step] * (len(allocator.asked) > before)
    finally:
        collection.close()
    assert collected == written == [128, 160, 110]


def test_frequency_0_leaves_it_to_python() -> None:
    gc.disable()  # as train.py does while it imports
    frozen = gc.get_freeze_count()
    collection = GarbageCollection(0)
    collection.step(1)
    assert gc.isenabled() and gc.get_freeze_count() == frozen
    collection.close()
