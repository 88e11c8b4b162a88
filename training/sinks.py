"""Destinations of metrics: metrics.jsonl, samples.jsonl, TensorBoard, Weights & Biases. One interface, so that metrics.py knows none.

Floor 3, under metrics_writer.py, whose thread alone calls what is here. A run has one folder over all its starts: what a resumed start will
write again is taken out first, so every reader sees each step once. Files are read and cut from their end: what that costs goes by what is
new in them, not by what the run has come to."""

from __future__ import annotations

import importlib
import json
import math
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from training.appended import AppendedFile, lines_from_end, replace_by_copy

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"  # in the run's folder
EVENTS = "events.out.tfevents."  # how TensorBoard knows its files
BEHIND = 32  # lines before one that are looked at

# Journals get every step, with the keys of metrics.jsonl; charts get logging steps, with TensorBoard's tags; records get what every step
# was trained on, with the keys of samples.jsonl.
Kind = Literal["journals", "charts", "records"]
ResumedStep = Callable[[], int | None]


class JournalSink(AppendedFile):
    """One JSON object per line, `step` first. NaN and inf become null."""

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        row = {"step": step, **scalars}
        for name, value in scalars.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[name] = None
        self.append(json.dumps(row, allow_nan=False).encode() + b"\n")

    def cut_after(self, step: int, *, is_locked: bool) -> None:
        """Takes out the lines past `step`, and what a kill or a full disk has left of a line at the end. A former writer, which may not
        know that it is one, looks whose the file is while it holds the lock. So if the lock was free, that look is still to come. If not
        (it was stopped in a write, or its storage hangs, or the file system has no locks), the file is replaced by a copy in one step: what
        comes of that write goes into the old file, which nobody reads."""
        self.look()
        kept = (start + len(line) for start, line, found in _steps_from_end(self) if found <= step)
        end = next(kept, None) if step >= 0 else None
        is_whole = end is None or end < self.size_bytes
        size_bytes = 0 if end is None else min(end + 1, self.size_bytes)
        if is_locked:
            self.cut(size_bytes)
        else:
            self.close()
            replace_by_copy(self.path, size_bytes)
            self._open()
        if not is_whole:
            self.append(b"\n")


class Sinks:
    """The open sinks of a run. Raises OSError; a sink whose `write` raised has taken nothing."""

    def __init__(
        self, metrics: JournalSink, samples: JournalSink, charts: Sequence[TensorBoardSink | WandbSink]
    ) -> None:
        self._files, self._charts = {"journals": metrics, "records": samples}, charts

    def write(self, kind: Kind, step: int, scalars: Mapping[str, Any]) -> None:
        for sink in self._charts if kind == "charts" else [self._files[kind]]:
            sink.write(step, scalars)

    def replaced(self) -> bool:
        """True when another process has replaced the files since it could not lock them: what is written here reaches nobody."""
        return any(file.replaced() for file in self._files.values())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around a look at whose the files are, and a write: whoever takes them over comes before it or after it."""
        with self._files["journals"].held(), self._files["records"].held():
            yield

    def sync(self) -> None:
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        for sink in (*self._files.values(), *self._charts):
            with suppress(OSError):  # nothing waits in it: what could not be written has been said
                sink.close()


def open_sinks(
    run_folder: Path,
    resumed_step: ResumedStep | int | None = None,
    *,
    tensorboard_folder: str = "",
    wandb: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Sinks:
    """Cuts what lies past `resumed_step` (None: a fresh start, all of it) and opens the sinks asked for. Where `resumed_step` is to be
    called, that is while the files are held, so that nobody changes them between what it finds there and the cut; where it raises, they are
    left alone. `tensorboard_folder` is relative to the run's; "": none. `settings` (the config as plain values) is shown by W&B. Call on
    one rank only. Raises OSError where the folder cannot be written."""
    run_folder.mkdir(parents=True, exist_ok=True)
    charts, locked = list[TensorBoardSink | WandbSink](), list[JournalSink]()
    with ExitStack() as opened:
        files = [opened.enter_context(closing(JournalSink(run_folder / name))) for name in (METRICS, SAMPLES)]
        for file in files:
            with suppress(BlockingIOError):
                if file.hold():
                    locked.append(file)
        resumed = resumed_step() if callable(resumed_step) else resumed_step
        keep_until = -1 if resumed is None else resumed
        for file in files:
            file.cut_after(keep_until, is_locked=file in locked)
        if tensorboard_folder:
            tensorboard = TensorBoardSink(run_folder / tensorboard_folder, resumed_step=resumed)
            charts.append(opened.enter_context(closing(tensorboard)))
        if wandb:
            charts.append(WandbSink(run_folder, fresh=resumed is None, settings=settings or {}))
        opened.pop_all()
    for file in locked:
        file.let_go()
    return Sinks(files[0], files[1], charts)


class TensorBoardSink:
    """Scalars in an event file of its own per start, all in one folder. Readers of TensorBoard's drop from earlier files what lies past
    `resumed_step` (tensorboard/backend/event_processing/event_accumulator.py, _Purge); None: a fresh start, which removes those files."""

    def __init__(self, folder: Path, *, resumed_step: int | None = None) -> None:
        # Here, not at the head: 0.2 s that ranks other than 0 need not spend.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(folder.glob(f"{EVENTS}*"))
        for path in earlier if resumed_step is None else ():
            path.unlink()
        # Files are read in the order of their names: another host's clock, or this second's earlier start, may be ahead.
        at_s = max(
            [int(time.time()), *(1 + int(path.name.removeprefix(EVENTS).split(".")[0]) for path in earlier[-1:])]
        )
        self._file = AppendedFile(folder / f"{EVENTS}{at_s:010d}.{socket.gethostname()}.{os.getpid()}.0")
        self._records = RecordWriter(SimpleNamespace(write=self._file.append))  # in TensorFlow's framing
        try:
            self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
            if resumed_step is not None:
                restart = SessionLog(status=SessionLog.START)
                self._add(Event(wall_time=time.time(), step=resumed_step + 1, session_log=restart))
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
    """The same scalars in Weights & Biases; its id is kept in the run's folder, so a resumed run is the same there. W&B takes nothing back:
    after a resume the steps done again appear a second time. Charts are drawn over `step`. Project and account are W&B's own to find
    (WANDB_PROJECT, WANDB_MODE, `wandb login`)."""

    def __init__(self, run_folder: Path, *, fresh: bool, settings: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")  # an extra: it need not be there for type checks
        id_file = run_folder / "wandb-id"
        if fresh or not id_file.exists():
            id_file.write_text(uuid.uuid4().hex, encoding="ascii")
        self._run = wandb.init(
            name=run_folder.name,
            id=id_file.read_text(encoding="ascii").strip(),
            resume="allow",
            dir=str(run_folder),
            config=dict(settings),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **scalars})

    def close(self) -> None:
        self._run.finish()


def last_rows(path: Path, *, since: int, until: int) -> list[dict[str, Any]]:
    """Returns a journal's whole lines of the steps from `since` to `until`, the last first."""
    if not path.exists():
        return []
    file, rows = AppendedFile(path), list[dict[str, Any]]()
    try:
        for _, line, step in _steps_from_end(file):
            if step < since:
                break
            if step <= until:
                rows.append(json.loads(line))
    finally:
        file.close()
    return rows


def _steps_from_end(file: AppendedFile) -> Iterator[tuple[int, bytes, float]]:
    """Start, text and step of each line that is one, the last first. Not those that lie behind a later step: somebody wrote them whose the
    file was no more, on a file system whose locks are each machine's own."""
    found = ((start, line, _journal_step(line)) for start, line in lines_from_end(file))
    lines = (entry for entry in found if entry[2] < math.inf)
    ahead = deque(islice(lines, BEHIND))
    while ahead:
        entry = ahead.popleft()
        ahead.extend(islice(lines, 1))
        if all(before <= entry[2] for _, _, before in ahead):
            yield entry


def _journal_step(line: bytes) -> float:
    """The step of a line; infinity for what is none, so that it is past every step."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf
