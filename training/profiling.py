"""Traces and memory snapshots of a running job, per rank, in the run's folder.

Floor 3. train.py holds one Profiler around the loop and calls `step` after each step; disabled, that costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from training.log import Log

_SNAPSHOT_ENTRIES = 100_000  # allocations remembered by the ring


@dataclass(frozen=True)
class ProfilingConfig:
    """Traces (any device) and memory snapshots (CUDA)."""

    enable_profiling: Annotated[bool, "write a trace of profiler_active steps every profile_freq steps"] = False
    save_traces_folder: Annotated[str, "folder of the traces inside the run's"] = "profile_traces"
    profile_freq: Annotated[int, "steps from one trace (or memory snapshot) to the next", ">= 1"] = 10
    profiler_warmup: Annotated[int, "steps before each trace that the profiler runs without recording", ">= 0"] = 3
    profiler_active: Annotated[int, "steps in one trace", ">= 1"] = 1
    enable_memory_snapshot: Annotated[
        bool, "write CUDA's allocations every profile_freq steps, and when out of memory"
    ] = False
    save_memory_snapshot_folder: Annotated[str, "folder of the memory snapshots inside the run's"] = "memory_snapshot"

    def check(self) -> None:
        needed = self.profiler_warmup + self.profiler_active
        if self.enable_profiling and self.profile_freq < needed:
            raise ValueError(
                f"profiling.profile_freq = {self.profile_freq}: must leave room for profiling.profiler_warmup = "
                f"{self.profiler_warmup} and profiling.profiler_active = {self.profiler_active}; nearest: {needed}"
            )


class Profiler:
    """A context around the loop. Files: <run>/<folder>/step-N/rank-R.json.gz (open in Perfetto) and rank-R.pickle
    (open at pytorch.org/memory_viz), N being the last step in them."""

    def __init__(
        self, config: ProfilingConfig, run_folder: Path, *, global_rank: int, log: Log, cuda: bool = False
    ) -> None:
        """`cuda`: the job runs on CUDA devices. Memory snapshots exist there alone; elsewhere one line says so."""
        self._config, self._run_folder, self._global_rank, self._log = config, run_folder, global_rank, log
        self._step = 0
        self._cuda = cuda
        self._snapshots = config.enable_memory_snapshot and cuda
        self._profile: Any = None
        if config.enable_memory_snapshot and not cuda:
            log.info("profiling.enable_memory_snapshot: no CUDA device, no memory snapshots")

    def __enter__(self) -> Profiler:
        if self._config.enable_profiling:
            self._profile = self._start_profile()
        if self._snapshots:
            import torch

            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)
        return self

    def step(self, step: int) -> None:
        """Step `step` is done."""
        self._step = step
        if self._profile is not None:
            self._profile.step()
        if self._snapshots and step % self._config.profile_freq == 0:
            self._save_snapshot(f"step-{step}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch

        if self._snapshots:
            if kind is not None and issubclass(kind, torch.OutOfMemoryError):
                self._save_snapshot(f"step-{self._step}-out-of-memory")
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._profile is not None:
            finished, self._profile = self._profile, None
            finished.stop()

    def _start_profile(self) -> Any:
        from torch.profiler import ProfilerActivity, profile, schedule

        config = self._config
        waits = config.profile_freq - config.profiler_warmup - config.profiler_active
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._cuda else [])
        started = profile(
            activities=activities,
            schedule=schedule(wait=waits, warmup=config.profiler_warmup, active=config.profiler_active),
            on_trace_ready=self._save_trace,
            record_shapes=True,
        )
        started.start()
        return started

    def _save_trace(self, finished: Any) -> None:
        if self._profile is None:
            return  # stopped inside a trace: fewer steps than asked for are no trace
        self._write(
            "profile", self._config.save_traces_folder, f"step-{self._step}", "json.gz", finished.export_chrome_trace
        )

    def _save_snapshot(self, name: str) -> None:
        import torch

        folder = self._config.save_memory_snapshot_folder
        self._write("memory snapshot", folder, name, "pickle", torch.cuda.memory._dump_snapshot)

    def _write(self, kind: str, folder: str, name: str, ending: str, write: Callable[[str], object]) -> None:
        path = self._run_folder / folder / name / f"rank-{self._global_rank}.{ending}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(path))
        except (OSError, RuntimeError) as error:  # a disk that is full costs a trace, not the run
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self._log.warning("%s: %s is not written: %s", kind, path, error)
        else:
            self._log.info(f"{kind}: {path}")
