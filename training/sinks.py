"""Destinations of metrics: metrics.jsonl, samples.jsonl, TensorBoard, Weights & Biases.

Only the thread of background_writer.py calls these. All launches of a run share a folder: rows that a resumed launch will write
again are removed first, so that each step is in the files once. Files are read and truncated from the end, at a cost that does not grow."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from training.durable_files import AppendedFile, lines_from_end, replace_by_copy

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"  # in the run's folder
EVENTS = "events.out.tfevents."  # prefix by which TensorBoard finds its files
BEHIND = 32  # preceding lines whose steps a line is compared with

# metrics: every step, with the keys of metrics.jsonl; charts: logging steps, with TensorBoard's tags; samples: the training data of every
# step, with the keys of samples.jsonl.
Kind = Literal["metrics", "charts", "samples"]
LastKeptStep = Callable[[], int | None]  # returns the last step whose rows are kept; None: no rows are kept


class JsonlSink(AppendedFile):
    """One JSON object per line, `step` first. NaN and inf become null."""

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        nulls = {name: None for name, v in scalars.items() if isinstance(v, float) and not math.isfinite(v)}
        self.append(json.dumps({"step": step, **scalars, **nulls}, allow_nan=False).encode() + b"\n")

    def truncate_after(self, step: int, *, is_locked: bool) -> None:
        """Removes the lines after `step`, and an incomplete line at the end. A previous writer that does not know of its successor checks
        its lease while it holds the lock, so with `is_locked` it notices. Otherwise (it was stopped in a write, its storage hangs, or the
        file system has no locks) the file is replaced by a copy, and a late write of the previous writer goes to the old, unlinked file."""
        self.read_size()
        kept = (start + len(line) for start, line, found in _steps_from_end(self) if found <= step)
        end = next(kept, None) if step >= 0 else None
        is_complete = end is None or end < self.size_bytes
        size_bytes = 0 if end is None else min(end + 1, self.size_bytes)
        if is_locked:
            self.truncate(size_bytes)
        else:
            self.close()
            replace_by_copy(self.path, size_bytes)
            self.open()
        if not is_complete:
            self.append(b"\n")


class Sinks:
    """The open sinks of a run, on one rank. Methods raise OSError; a `write` that raised has written nothing to that sink."""

    def __init__(
        self,
        run_folder: Path,
        kept_step: LastKeptStep | int | None = None,
        *,
        tensorboard_folder: str = "",
        wandb: bool = False,
        settings: Mapping[str, Any] | None = None,
        report: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Removes rows after `kept_step` (None: all rows, for a new run) and opens the sinks. A callable `kept_step` is called while
        the files are locked, so that they do not change before the truncation; if it raises, they stay unchanged. `tensorboard_folder`:
        relative to the run's folder; "": none. `settings`: the config as plain values, for W&B. `report`: reports that W&B fails."""
        run_folder.mkdir(parents=True, exist_ok=True)
        self._charts, locked = list[TensorBoardSink | WandbSink](), list[JsonlSink]()
        with ExitStack() as locks, ExitStack() as opened:
            files = [opened.enter_context(closing(JsonlSink(run_folder / name))) for name in (METRICS, SAMPLES)]
            for file in files:
                with suppress(BlockingIOError):
                    if locks.enter_context(file.locked()):
                        locked.append(file)
            resumed = kept_step() if callable(kept_step) else kept_step
            for file in files:
                file.truncate_after(-1 if resumed is None else resumed, is_locked=file in locked)
            if tensorboard_folder:
                tensorboard = TensorBoardSink(run_folder / tensorboard_folder, kept_step=resumed)
                self._charts.append(opened.enter_context(closing(tensorboard)))
            if wandb:
                self._charts.append(
                    WandbSink(run_folder, fresh=resumed is None, settings=settings or {}, report=report)
                )
            opened.pop_all()
        self._files = dict(zip(("metrics", "samples"), files, strict=True))

    def write(self, kind: Kind, step: int, scalars: Mapping[str, Any]) -> None:
        for sink in self._charts if kind == "charts" else [self._files[kind]]:
            sink.write(step, scalars)

    def is_replaced(self) -> bool:
        """Returns True if another process, which could not lock the files, has replaced them: rows written here would be lost."""
        return any(file.is_replaced() for file in self._files.values())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the files, so that a check of the lease and a write are atomic for the next writer."""
        with self._files["metrics"].locked(), self._files["samples"].locked():
            yield

    def sync(self) -> None:
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        for sink in (*self._files.values(), *self._charts):
            with suppress(OSError):  # nothing is buffered, and failed writes were reported
                sink.close()


class TensorBoardSink:
    """Scalars in one event file per launch. TensorBoard ignores what earlier files have after `kept_step`
    (tensorboard/backend/event_processing/event_accumulator.py, _Purge); None: a new run, which removes those files."""

    def __init__(self, folder: Path, *, kept_step: int | None = None) -> None:
        # Imported here, since other ranks do not need these 0.2 s.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        at_s = int(time.time())
        for path in sorted(folder.glob(f"{EVENTS}*")):
            # TensorBoard reads files in the order of their names; a different host's clock, or a launch in the same second, may be ahead.
            if not (number := re.match(r"\d+", path.name.removeprefix(EVENTS))):
                continue  # written by no launch: a copy under another name
            at_s = max(at_s, 1 + int(number[0]))
            if kept_step is None:
                path.unlink()
        self._file = AppendedFile(folder / f"{EVENTS}{at_s:010d}.{socket.gethostname()}.{os.getpid()}.0")
        self._records = RecordWriter(SimpleNamespace(write=self._file.append))  # TensorFlow's record format
        try:
            self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
            if kept_step is not None:
                restart = SessionLog(status=SessionLog.START)
                self._add(Event(wall_time=time.time(), step=kept_step + 1, session_log=restart))
        except OSError:
            self._file.close()
            with suppress(OSError):
                self._file.path.unlink()
            raise

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


class WandbSink:
    """Scalars in Weights & Biases. The W&B id is stored in the run's folder, so that a resumed run continues there. W&B removes no
    data: after a resume, repeated steps appear twice. Project and account: WANDB_PROJECT, WANDB_MODE, `wandb login`. Methods raise
    nothing: after a failure (no login, no network), which is reported once, no charts are sent until the sinks are opened again."""

    def __init__(
        self, run_folder: Path, *, fresh: bool, settings: Mapping[str, Any], report: Callable[[str], None]
    ) -> None:
        self._report = report
        self._run: Any = None  # of the package, while it works
        with self._failures_reported():
            wandb = importlib.import_module("wandb")  # an optional package, not needed for type checks
            id_file = run_folder / "wandb-id"
            if fresh or not id_file.exists():
                id_file.write_text(uuid.uuid4().hex, encoding="ascii")
            run_id = id_file.read_text(encoding="ascii").strip()
            run = wandb.init(
                name=run_folder.name, id=run_id, resume="allow", dir=str(run_folder), config=dict(settings)
            )
            run.define_metric("*", step_metric="step")
            self._run = run

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        if self._run is not None:
            with self._failures_reported():
                self._run.log({"step": step, **scalars})

    def close(self) -> None:
        if self._run is not None:
            with self._failures_reported():
                self._run.finish()

    @contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 (the package can raise anything, and the record must not wait for it)
            self._run = None
            cause = f"{type(error).__name__}: {error}"
            self._report(
                f"Weights & Biases gets no more charts of this launch: {cause}; the run's folder has the record"
            )


def last_rows(path: Path, *, since: int, until: int) -> list[dict[str, Any]]:
    """Returns a JSONL file's complete rows of the steps from `since` to `until`, last row first."""
    if not path.exists():
        return []
    with closing(AppendedFile(path, read_only=True)) as file:
        newest = takewhile(lambda entry: entry[2] >= since, _steps_from_end(file))
        return [json.loads(line) for _, line, step in newest if step <= until]


def _steps_from_end(file: AppendedFile) -> Iterator[tuple[int, bytes, float]]:
    """Yields offset, text and step of each valid line, last first, except lines that a previous writer appended late, out of order."""

    def parsed() -> Iterator[tuple[int, bytes, float]]:
        for start, line in lines_from_end(file):
            with suppress(ValueError, TypeError, KeyError):
                yield start, line, float(json.loads(line)["step"])

    lines = parsed()
    ahead = deque(islice(lines, BEHIND))
    while ahead:
        entry = ahead.popleft()
        ahead.extend(islice(lines, 1))
        if all(before <= entry[2] for _, _, before in ahead):
            yield entry
