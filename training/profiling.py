"""Profiler traces and memory snapshots, per rank, in the run's folder; scheduling of Python's garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from training.log import Log

_SNAPSHOT_ENTRIES = 100_000  # allocations in the ring buffer of the recorded history


@dataclass(frozen=True)
class ProfilingConfig:
    """[profiling]: traces (any device) and memory snapshots (CUDA)."""

    enable_profiling: Annotated[
        bool,
        "write a trace of profiler_active steps every profile_freq steps; with a semi_sync_method both, and profiler_warmup, count rounds",
    ] = False
    save_traces_folder: Annotated[
        str, "folder of the traces inside the run's (with replica groups: the group's) folder"
    ] = "profile_traces"
    profile_freq: Annotated[int, "steps from one trace (or memory snapshot) to the next", ">= 1"] = 10
    profiler_warmup: Annotated[int, "steps before each trace in which the profiler runs without recording", ">= 0"] = 3
    profiler_active: Annotated[int, "steps in one trace", ">= 1"] = 1
    enable_memory_snapshot: Annotated[
        bool, "write a snapshot of CUDA's allocations every profile_freq steps, and when out of memory"
    ] = False
    save_memory_snapshot_folder: Annotated[
        str, "folder of the snapshots inside the run's (with replica groups: the group's) folder"
    ] = "memory_snapshot"

    def check(self) -> None:
        needed = self.profiler_warmup + self.profiler_active
        if self.enable_profiling and self.profile_freq < needed:
            raise ValueError(
                f"profiling.profile_freq = {self.profile_freq}: must leave room for profiling.profiler_warmup = "
                f"{self.profiler_warmup} and profiling.profiler_active = {self.profiler_active}; nearest: {needed}"
            )


class Profiler:
    """A context manager for the training loop. Files: <run>/<folder>/step-N/rank-R.json.gz (with replica groups below <run>/groups/<id>;
    open in Perfetto) and rank-R.pickle (open at pytorch.org/memory_viz), where N is their last step. Without overhead if disabled."""

    def __init__(
        self, config: ProfilingConfig, run_folder: Path, *, global_rank: int, log: Log, allocator: Any = None
    ) -> None:
        """`allocator`: torch.cuda.memory if the job runs on CUDA; None: no memory snapshots, which is logged."""
        self._config, self._run_folder, self._global_rank, self._log = config, run_folder, global_rank, log
        self._step = 0
        self._allocator: Any = allocator if config.enable_memory_snapshot else None
        self._profile: Any = None
        if config.enable_memory_snapshot and allocator is None:
            log.info("profiling.enable_memory_snapshot: no CUDA device, no memory snapshots")

    def __enter__(self) -> Profiler:
        config = self._config
        if config.enable_profiling:
            from torch.profiler import profile, schedule

            wait = config.profile_freq - config.profiler_warmup - config.profiler_active
            plan = schedule(wait=wait, warmup=config.profiler_warmup, active=config.profiler_active)
            self._profile = profile(schedule=plan, on_trace_ready=self._save_trace, record_shapes=True)
            self._profile.start()
        if self._allocator is not None:
            self._allocator._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)
        return self

    def step(self, step: int) -> None:
        last, self._step = self._step or step - 1, step  # several steps apart in semi-synchronous training
        if self._profile is not None:
            self._profile.step()
        if self._allocator is not None and step // self._config.profile_freq > last // self._config.profile_freq:
            self._save_snapshot()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._allocator is not None:
            if kind is not None and issubclass(kind, torch.OutOfMemoryError):
                self._save_snapshot("-out-of-memory")
            self._allocator._record_memory_history(enabled=None)
        if self._profile is not None:
            finished, self._profile = self._profile, None
            finished.stop()

    def _save_trace(self, finished: Any) -> None:
        if self._profile is not None:  # None: stopped in the middle of a trace, which is not written
            self._write("profile", self._config.save_traces_folder, "", "json.gz", finished.export_chrome_trace)

    def _save_snapshot(self, why: str = "") -> None:
        folder = self._config.save_memory_snapshot_folder
        self._write("memory snapshot", folder, why, "pickle", self._allocator._dump_snapshot)

    def _write(self, kind: str, folder: str, why: str, ending: str, write: Callable[[str], object]) -> None:
        path = self._run_folder / folder / f"step-{self._step}{why}" / f"rank-{self._global_rank}.{ending}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(path))
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self._log.warning("%s: %s is not written: %s", kind, path, error)
        else:
            self._log.info(f"{kind}: {path}")


class GarbageCollection:
    """Scheduler of garbage collection: with `freq` > 0 all ranks collect together, every `freq` steps; with 0 collection is automatic.
    Objects that exist at construction are frozen, which reduces a full collection from some 100 ms to a few ms."""

    def __init__(self, freq: int) -> None:
        self._freq, self._step = freq, 0
        if freq:
            gc.disable()
            gc.collect()
            gc.freeze()
        else:
            gc.enable()  # train.py has disabled it

    def step(self, step: int) -> None:
        last, self._step = self._step or step - 1, step  # several steps apart in semi-synchronous training
        if self._freq and step // self._freq > last // self._freq:
            gc.collect()  # all generations, since automatic collection is disabled

    def close(self) -> None:
        if self._freq:
            gc.unfreeze()
            gc.enable()
