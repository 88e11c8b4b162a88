"""metrics.jsonl and the charts after kills and resumes: every reader sees each step once."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.saved import as_tables
from configs.schema import RunConfig
from tests.unit.fakes import set_package
from training.sinks import JsonlSink, Sinks, TensorBoardSink

TAG = "loss_metrics/global_avg_loss"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path) -> list[tuple[int, float]]:
    """Returns (step, value) of TAG as TensorBoard's own reader finds them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    events = accumulator.Scalars(TAG) if TAG in accumulator.Tags()["scalars"] else []
    return [(event.step, event.value) for event in events]


def write(sinks: Sinks, first: int, last: int, value: float = 1.0) -> None:
    for step in range(first, last + 1):
        sinks.write("metrics", step, {TAG: value})
        sinks.write("charts", step, {TAG: value})


def test_a_line_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    loss = 1.2345678901234567
    sink.write(1, {"loss": loss, "grad_norm": float("nan")})
    assert rows(tmp_path) == [{"step": 1, "loss": loss, "grad_norm": None}]  # the loss to the last bit


def test_a_killed_and_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    killed = Sinks(tmp_path, tensorboard_folder="tb")  # never closed
    write(killed, 1, 7, value=1.0)
    resumed = Sinks(tmp_path, tensorboard_folder="tb", kept_step=4)
    write(resumed, 5, 9, value=2.0)
    again = Sinks(tmp_path, tensorboard_folder="tb", kept_step=6)
    write(again, 7, 8, value=3.0)
    again.close()
    expected = [(step, 1.0 if step <= 4 else 2.0 if step <= 6 else 3.0) for step in range(1, 9)]
    assert [(row["step"], row[TAG]) for row in rows(tmp_path)] == expected
    assert events(tmp_path / "tb") == expected


def test_a_tensorboard_that_was_open_all_along_sees_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(Sinks(tmp_path, tensorboard_folder="tb"), 1, 7)
    reader = EventAccumulator(str(tmp_path / "tb"))
    reader.Reload()
    write(Sinks(tmp_path, tensorboard_folder="tb", kept_step=4), 5, 6, value=2.0)
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars(TAG)] == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)
    ]  # fmt: skip


def test_a_fresh_start_in_a_used_folder_begins_from_nothing(tmp_path: Path) -> None:
    write(Sinks(tmp_path, tensorboard_folder="tb"), 0, 3)
    write(Sinks(tmp_path, tensorboard_folder="tb"), 0, 1, value=2.0)
    assert [(row["step"], row[TAG]) for row in rows(tmp_path)] == [(0, 2.0), (1, 2.0)]
    assert events(tmp_path / "tb") == [(0, 2.0), (1, 2.0)]
    assert len(list((tmp_path / "tb").iterdir())) == 1


def test_a_resume_at_step_0_keeps_what_was_measured_before_the_first_step(tmp_path: Path) -> None:
    write(Sinks(tmp_path, tensorboard_folder="tb"), 0, 3)
    write(Sinks(tmp_path, tensorboard_folder="tb", kept_step=0), 1, 1, value=2.0)
    assert events(tmp_path / "tb") == [(0, 1.0), (1, 2.0)]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ('{"step": 1}\n{"step": 2}\n{"step": 3}\n', '{"step": 1}\n{"step": 2}\n'),
        ('{"step": 1}\n{"step": 2, "lo', '{"step": 1}\n'),
        ('{"step": 1}\n{"step": 2}', '{"step": 1}\n{"step": 2}\n'),  # whole, but for its end of line
        ('{"step": 1}\n\n\0\0\0\n[1]\nnull\n{"time": 1}\n{"step": "x"}\n', '{"step": 1}\n'),
        ("", ""),
    ],
)
@pytest.mark.parametrize("is_locked", [True, False])
def test_cutting_the_journal(tmp_path: Path, content: str, kept: str, is_locked: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    file = JsonlSink(path)
    file.truncate_after(2, is_locked=is_locked)
    file.close()
    assert path.read_text() == kept
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_who_had_the_journal_open_in_a_write_writes_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Sinks(tmp_path)
    write(before, 1, 3)
    with before.locked():
        write(after := Sinks(tmp_path, kept_step=3), 4, 4)
        assert before.is_replaced() and not after.is_replaced()
        write(before, 4, 5)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_who_had_the_journal_open_before_finds_it_changed(tmp_path: Path) -> None:
    before = Sinks(tmp_path)
    write(before, 1, 3)
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    write(Sinks(tmp_path, kept_step=3), 4, 4)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == inode, "a change of writer copies nothing"
    with pytest.raises(OSError, match="bytes, but"):
        write(before, 4, 5)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", ["cut 1", "cut 4", "cut 20", "overwritten"])
def test_a_record_that_a_kill_or_a_disk_has_damaged_ends_only_its_file(tmp_path: Path, damage: str) -> None:
    sink = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        sink.write(step, {TAG: 1.0})
    sink.close()
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    kept = content[: -int(damage.split()[1])] if damage != "overwritten" else content[:-12] + b"\xff" * 8 + content[-4:]
    path.write_bytes(kept)
    later = path.with_name(path.name.replace(path.name.split(".")[3], "9999999998"))
    path.rename(later)  # by a clock that is ahead
    sink = TensorBoardSink(tmp_path, kept_step=2)
    sink.write(3, {TAG: 2.0})
    sink.close()
    assert events(tmp_path) == [(1, 1.0), (2, 1.0), (3, 2.0)]


@pytest.mark.parametrize("kept_step", [None, 4])
def test_a_copy_that_is_named_like_an_event_file_takes_nothing_from_the_run(
    tmp_path: Path, kept_step: int | None
) -> None:
    copy = tmp_path / "tb" / "events.out.tfevents.old"
    copy.parent.mkdir()
    copy.write_bytes(b"")
    sinks = Sinks(tmp_path, tensorboard_folder="tb", kept_step=kept_step)
    write(sinks, 5, 6)
    sinks.close()
    assert [row["step"] for row in rows(tmp_path)] == [5, 6] == [step for step, _ in events(tmp_path / "tb")]
    assert copy.exists()


def test_wandb_continues_its_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class FakeRun:
        def define_metric(self, *args: str, **kwargs: str) -> None:
            calls.append(("define_metric", args, kwargs))

        def log(self, scalars: dict[str, float]) -> None:
            calls.append(("log", scalars))

        def finish(self) -> None:
            calls.append(("finish",))

    def init(**kwargs: Any) -> FakeRun:
        json.dumps(kwargs["config"])  # as the package does
        calls.append(("init", kwargs))
        return FakeRun()

    set_package(monkeypatch, "wandb", {"init": init})
    folder, settings = tmp_path / "llama", as_tables(RunConfig())
    for kept_step in (None, 5, None):
        sinks = Sinks(folder, wandb=True, kept_step=kept_step, settings=settings)
        sinks.write("charts", 6, {TAG: 1.0})
        sinks.close()
    starts = [call[1] for call in calls if call[0] == "init"]
    assert starts[0]["id"] == starts[1]["id"] != starts[2]["id"]
    assert starts[0]["name"] == "llama" and starts[0]["config"]["optimizer"]["lr"] == RunConfig().optimizer.lr
    assert calls[1:4] == [
        ("define_metric", ("*",), {"step_metric": "step"}), ("log", {"step": 6, TAG: 1.0}), ("finish",)
    ]  # fmt: skip


def test_wandb_that_fails_is_told_once_and_holds_up_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**kwargs: Any) -> None:
        raise RuntimeError("api_key not configured")

    set_package(monkeypatch, "wandb", {"init": init})
    told: list[str] = []
    sinks = Sinks(tmp_path, wandb=True, tensorboard_folder="tb", report=told.append)
    write(sinks, 1, 2)
    sinks.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2] and events(tmp_path / "tb") == [(1, 1.0), (2, 1.0)]
    assert told == [
        "Weights & Biases gets no more charts of this launch: RuntimeError: api_key not configured; the run's folder has the record"
    ]
