"""Where figures go: metrics.jsonl, samples.jsonl, TensorBoard, Weights & Biases. One face, so that metrics.py knows none of them.

Floor 3, under metrics.py. Opened on global rank 0 only. A run has one folder over all its starts: what a resumed start
will write again is taken out first, so every reader sees each step once.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import socket
import struct
import time
import uuid
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"  # in the run's folder


class Sink(Protocol):
    """Takes the figures of one step; nothing it was given is lost when the process is killed after `write` returns."""

    def write(self, step: int, scalars: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Journal(Sink, Protocol):
    """A sink that is read back."""

    def sync(self) -> None:
        """What was written outlives the machine, too, when this returns."""
        ...


class Sinks(NamedTuple):
    """Journals get every step, with the keys of metrics.jsonl; charts get logging steps, with TensorBoard's tags; records get what every
    step was trained on, with the keys of samples.jsonl."""

    journals: tuple[Journal, ...] = ()
    charts: tuple[Sink, ...] = ()
    records: tuple[Journal, ...] = ()

    def replaced(self) -> bool:
        """Somebody else has opened the files of this folder since: what is written here reaches nobody."""
        return any(isinstance(sink, JournalSink) and sink.replaced() for sink in (*self.journals, *self.records))

    def sync(self) -> None:
        for sink in (*self.journals, *self.records):
            sink.sync()

    def close(self) -> None:
        for sink in (*self.journals, *self.charts, *self.records):
            sink.close()


def open_sinks(
    run_folder: Path,
    *,
    tensorboard_folder: str = "",
    wandb: bool = False,
    resumed_step: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Sinks:
    """Cuts what lies past `resumed_step` (None: a fresh start, all of it) and opens the sinks asked for.

    `tensorboard_folder` is relative to the run's; "": none. `settings` (the config as plain values) is shown by W&B.
    Call on one rank only. Raises OSError where the folder cannot be written.
    """
    keep_until = -1 if resumed_step is None else resumed_step
    run_folder.mkdir(parents=True, exist_ok=True)
    journal, record = run_folder / METRICS, run_folder / SAMPLES
    cut_journal(journal, keep_until)
    cut_journal(record, keep_until)
    charts: list[Sink] = []
    if tensorboard_folder:
        folder = run_folder / tensorboard_folder
        cut_events(folder, keep_until)
        charts.append(TensorBoardSink(folder, resumed_step=resumed_step))
    if wandb:
        charts.append(WandbSink(run_folder, fresh=resumed_step is None, settings=settings or {}))
    return Sinks((JournalSink(journal),), tuple(charts), (JournalSink(record),))


class JournalSink:
    """One JSON object per line, `step` first, in the system's hands when `write` returns. NaN and inf become null."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("a", encoding="utf-8")

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        row = {"step": step, **{name: _or_null(value) for name, value in scalars.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def replaced(self) -> bool:
        """By `cut_journal`, of another process."""
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return True

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars in an event file of its own per start, all in one folder."""

    def __init__(self, folder: Path, *, resumed_step: int | None = None) -> None:
        # Here, not at the head: 0.2 s that ranks other than 0 need not spend.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        if resumed_step is not None:
            # For a TensorBoard that is open while we resume: it has read the steps that cut_events took out, and drops
            # them on this event (tensorboard/backend/event_processing/event_accumulator.py, _Purge).
            restart = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=resumed_step + 1, session_log=restart))
            self._writer.flush()

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """The same scalars in Weights & Biases; its id is kept in the run's folder, so a resumed run is the same there.

    W&B takes nothing back: after a resume the steps done again appear a second time. Charts are drawn over `step`.
    Project and account are W&B's own to find (WANDB_PROJECT, WANDB_MODE, `wandb login`).
    """

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


def cut_journal(path: Path, keep_until: int) -> None:
    """Drops the lines of steps past `keep_until` and whatever is no JSON object (a line that a kill cut short).

    The file is replaced in one step, also where there is nothing to drop: a process that was stopped and has lost its role may wake and
    write once more, into the old file, which nobody reads.
    """
    if not path.exists():
        return
    lines = (line for line in path.read_bytes().split(b"\n") if line)
    replace_file(path, b"".join(line + b"\n" for line in lines if _journal_step(line) <= keep_until))


def last_rows(path: Path, count: int, *, until: int) -> list[dict[str, Any]]:
    """Of a journal's whole lines, those of steps past `until` left out, the last `count`, in no order."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    whole = (line for line in reversed(lines) if _journal_step(line) <= until)
    return [json.loads(line) for line in islice(whole, count)]


def cut_events(folder: Path, keep_until: int) -> None:
    """Drops from the event files in `folder` what lies past `keep_until`, and records that a kill cut short.

    Each file is replaced in one step, removed where no figures are left, or left alone where there is nothing to drop.
    """
    for path in sorted(folder.glob("events.out.tfevents.*")):
        before = path.read_bytes()
        kept = [(step, record) for step, record in _records(before) if step <= keep_until]
        after = b"".join(record for _, record in kept)
        if len(kept) <= 1:  # the first record of a file is its version
            path.unlink()
        elif after != before:
            replace_file(path, after)


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _journal_step(line: bytes) -> float:
    """The step of a line; infinity for what is none, so that it is past every step."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _records(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Step and bytes of each whole record of an event file, the file's version first.

    Framing (TensorFlow's tensorflow/core/lib/io/record_writer.h): length as u64, its checksum as u32, the data, the
    data's checksum as u32, little-endian. Checksums are left to readers, who skip what does not match.
    """
    from tensorboard.compat.proto.event_pb2 import Event

    at = 0
    while at + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        end = at + 12 + length + 4
        if end > len(content):
            return
        yield Event.FromString(content[at + 12 : end - 4]).step, content[at:end]
        at = end


def replace_file(path: Path, content: bytes) -> None:
    """Whoever opens `path` finds the old content or all of the new; not even a power cut leaves a part."""
    temporary = path.with_name(
        f".{path.name}.{socket.gethostname()}.{os.getpid()}"
    )  # in containers all have the same number
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
