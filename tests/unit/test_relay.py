"""One of several groups writes the metrics; when the writer changes, each step is still there exactly once."""

from __future__ import annotations

import json
import subprocess
import threading
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from ft.config import MAX_SLOTS
from ft.healing.format import MAX_HEADER_BYTES, StateManifest
from ft.protocol.step import Ledger
from scripts.samples import prove, read
from tests.unit.fakes import replace_system_call
from tests.unit.storage import AtOnce, Disk, until_written
from training import metrics_writer as relay
from training.background_writer import BackgroundWriter
from training.metrics_writer import ROWS_KEPT, MetricsWriter
from training.sinks import LastKeptStep, Sinks


class Group:
    def __init__(
        self, folder: Path, *, writes: bool, background_writer: BackgroundWriter | None = None, **settings: Any
    ) -> None:
        self.folder, self.writes, self.quorum = folder, writes, ("epoch", 1)
        self.background_writer = AtOnce()
        self.opens = lambda: None
        self.relay = MetricsWriter(
            folder,
            lambda: self.quorum if self.writes else None,
            self.open,
            background_writer or self.background_writer,
            **settings,
        )

    def open(self, kept_step: LastKeptStep) -> Sinks:
        self.opens()
        return Sinks(self.folder, tensorboard_folder="tb", kept_step=kept_step)

    def commits(self, step: int, *, looks: bool = False, of: str = "ab") -> None:
        self.relay.write("metrics", step, {"loss": float(step)})
        self.relay.write("charts", step, {"loss_metrics/global_avg_loss": float(step)})
        self.relay.write("samples", step, {"slots": {str(2 * step + n): owner for n, owner in enumerate(of)}})
        if looks:
            self.relay.write("metrics", step, {"validation_loss": float(step)})


def two(folder: Path, last: int = 0) -> tuple[Group, Group]:
    """Returns a group that writes and one that does not, after `last` steps."""
    a, b = Group(folder, writes=True), Group(folder, writes=False)
    for step in range(1, last + 1):
        a.commits(step)
        b.commits(step)
    return a, b


def rows(folder: Path) -> list[tuple[int, bool]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [(row["step"], "validation_loss" in row) for row in map(json.loads, lines)]
    assert [step for step, look in found if not look] == list(owners(folder)), "both files have the same steps"
    return found


def owners(folder: Path) -> dict[int, str]:
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    found = {row["step"]: "".join(row["slots"].values()) for row in lines}
    assert len(found) == len(lines), "a step is there twice"
    return found


def test_the_writer_dies_before_it_wrote_and_another_fills_in(tmp_path: Path):
    _, b = two(tmp_path, 3)
    for step in (4, 5):  # committed by both, but a was killed before a line of it was written
        b.commits(step, looks=step == 5)
    b.writes = True
    b.commits(6)
    assert rows(tmp_path) == [(1, False), (2, False), (3, False), (4, False), (5, False), (5, True), (6, False)]


def test_the_role_comes_and_goes(tmp_path: Path):
    groups = [Group(tmp_path, writes=False), Group(tmp_path, writes=False)]
    for step in range(1, 13):
        for number, group in enumerate(groups):
            group.writes = step // 3 % 2 == number
        for group in groups:
            group.commits(step)
    assert rows(tmp_path) == [(step, False) for step in range(1, 13)]


def test_what_lies_past_the_first_step_is_of_a_life_that_ended(tmp_path: Path):
    before = Group(tmp_path, writes=True)
    for step in range(1, 9):
        before.commits(step)
    before.relay.close()
    after = Group(tmp_path, writes=True)  # all groups began again at the checkpoint of step 5
    after.commits(6)
    assert rows(tmp_path) == [(step, False) for step in range(1, 7)]


def test_a_step_that_the_others_did_without_its_writer_is_taken_back(tmp_path: Path):
    """The writer had all sums of step 4 and died; the others repeated that step."""
    a, b = two(tmp_path, 3)
    a.commits(4)
    b.commits(4, of="b")
    b.writes = True
    b.commits(5, of="b")
    assert owners(tmp_path) == {1: "ab", 2: "ab", 3: "ab", 4: "b", 5: "b"}


def test_one_that_was_stopped_in_a_write_and_wakes_writes_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The stopped group had checked that it owns the files, and holds their lock."""
    a, b = two(tmp_path, 2)
    b.writes = True
    assert a.relay.sinks is not None
    with a.relay.sinks.locked():
        b.commits(3)
        b.relay.close()  # the job is over
        rows_of_b = rows(tmp_path)
        a.relay.sinks.write("metrics", 3, {"loss": 3.0})
    assert rows(tmp_path) == rows_of_b == [(1, False), (2, False), (3, False)]


def test_one_that_was_stopped_as_it_took_over_takes_nothing_back(tmp_path: Path):
    """A group is stopped after it claimed the files; two others write since, and it resumes after the second looked for missing rows."""
    a, b, c = (Group(tmp_path, writes=False) for _ in "abc")
    for step in (1, 2):
        for group in (a, b, c):
            group.writes = group is a
            group.commits(step)
    a.writes, b.writes, b.quorum = False, True, ("epoch", 2)
    stopped, wakes = threading.Event(), threading.Event()
    b.opens = lambda: (stopped.set(), wakes.wait())[0]
    late = threading.Thread(target=b.commits, args=(3,))  # and goes
    late.start()
    stopped.wait()
    c.writes, c.quorum = True, ("epoch", 3)
    for step in (3, 4, 5):
        a.commits(step)
        c.commits(step)
    a.writes, a.quorum, c.writes = True, ("epoch", 4), False
    a.opens = lambda: (wakes.set(), late.join())[0]
    a.commits(6)
    assert rows(tmp_path) == [(step, False) for step in (1, 2, 3, 4, 5, 6)]


def test_a_write_that_came_in_between_is_taken_back(tmp_path: Path):
    """A group that was stopped may write once more if locks are local to a machine."""
    a, b = two(tmp_path, 2)
    b.writes, b.quorum = True, ("epoch", 2)
    b.commits(3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 3, "slots": {}, "loss": 0}\n')
    for step in (4, 5):
        b.commits(step)
    a.commits(5)
    assert rows(tmp_path) == [(step, False) for step in (1, 2, 3, 4, 5)]
    assert "nothing is lost" in b.background_writer.said[-1]


def test_one_that_was_stopped_for_long_takes_nothing_back(tmp_path: Path):
    """The group resumes between a step and its metrics, as the writer of an old quorum; the others are ahead by more rows than are kept."""
    a, b = two(tmp_path)
    for step in range(1, ROWS_KEPT + 3):
        if step <= 2:
            a.commits(step)
        else:
            b.writes, b.quorum = True, ("epoch", 2)
        b.commits(step)
    a.commits(3)
    b.commits(ROWS_KEPT + 3)
    assert rows(tmp_path) == [(step, False) for step in range(1, ROWS_KEPT + 4)]


def test_a_new_job_writes_whatever_the_last_one_claimed(tmp_path: Path):
    """The new lighthouse counts quorums from the start."""
    a = Group(tmp_path, writes=True)
    a.quorum = ("epoch", 7)
    a.commits(1)
    a.relay.close()
    b = Group(tmp_path, writes=True)
    b.quorum = ("another", 1)
    b.commits(2)
    assert rows(tmp_path) == [(1, False), (2, False)]


def test_a_job_that_goes_back_to_a_checkpoint_has_each_step_once(tmp_path: Path):
    """The groups live on, and only their state is rewound."""
    a, b = two(tmp_path)
    for first in (1, 4):
        for step in range(first, 8):
            a.commits(step)
            b.commits(step, looks=step == 5)
    b.writes = True
    b.commits(8, of="b")
    assert rows(tmp_path) == [(step, look) for step in range(1, 9) for look in ({False, step == 5})]


def test_a_heal_while_the_files_are_repaired_is_no_failure(tmp_path: Path):
    """The training thread replaces all rows between two reads by the background writer."""
    a, b = two(tmp_path, 2)
    b.commits(3)
    sinks = a.relay.sinks
    assert sinks is not None
    close = sinks.close
    sinks.close = lambda: (close(), a.relay.load_state_dict(b.relay.state_dict()))[0]  # type: ignore[method-assign]
    a.relay.write("metrics", 2, {"loss": 2.0})  # once more, since it goes back to a checkpoint
    a.commits(4)
    assert rows(tmp_path) == [(step, False) for step in (1, 2, 3, 4)]
    assert not a.background_writer.said


def test_a_row_that_comes_while_another_is_written_is_durable_after_sync(tmp_path: Path):
    """The thread writes the first row of a step when the second one and `sync` come, before a checkpoint."""
    began, goes_on, calls = threading.Event(), threading.Event(), list[str]()

    class Watched(Sinks):
        def write(self, kind: Any, step: int, scalars: Any) -> None:
            super().write(kind, step, scalars)
            calls.append(kind)
            if kind == "metrics":
                began.set()
                assert goes_on.wait(50.0)

        def sync(self) -> None:
            super().sync()
            calls.append("sync")

    class Flushes(BackgroundWriter):
        def flush(self, timeout_s: float) -> bool:
            goes_on.set()
            return super().flush(50.0)

    background_writer = Flushes(list[str]().append)
    writer = MetricsWriter(
        tmp_path, lambda: ("epoch", 1), lambda kept_step: Watched(tmp_path, kept_step), background_writer
    )
    writer.write("metrics", 1, {"loss": 1.0})
    assert began.wait(50.0)
    writer.write("samples", 1, {"slots": {}})
    writer.sync()
    assert calls == ["metrics", "samples", "sync"]
    background_writer.close()


def test_a_group_that_heals_can_fill_in_what_it_never_saw(tmp_path: Path):
    """Two groups die: the writer before rows of steps 2 and 3 were written, then the group that had them."""
    a, b, healed = (Group(tmp_path, writes=writes) for writes in (True, False, True))
    a.commits(1)
    for step in (1, 2, 3):
        b.commits(step)
    state = b.relay.state_dict()
    assert '"metrics"' in state["rows"]
    earlier = state["rows"].replace('"metrics"', '"journals"')
    healed.relay.load_state_dict({"rows": earlier})  # a former name, in checkpoints
    healed.commits(4)
    assert rows(tmp_path) == [(step, False) for step in (1, 2, 3, 4)]


# ------------------------------------------------------------------------------------------------ all die; a checkpoint goes on


LAST = ROWS_KEPT // 2 + 10  # step of the checkpoint; the first ones, and half of another, nobody remembers
LOOKS = 5


class History:
    """The training history of a job: its ledger, and a row for each step."""

    def __init__(self) -> None:
        self.ledger, self.rows = Ledger(slot_size=2), dict[int, dict[str, Any]]()

    def step(self, number: int, *assignment: str, dead: str = "") -> None:
        """Commits a step assigned to these groups, without a contribution of `dead`."""
        assigned = self.ledger.assign(assignment)
        self.ledger.commit([float(owner != dead) for owner in assigned.values()])
        slots = {str(slot): owner for slot, owner in assigned.items() if owner != dead}
        self.rows[number] = {"slot_size": 2, "slots": slots, "holes": list(self.ledger.holes)}

    def tell(self, group: Group, *steps: int) -> None:
        for step in steps:
            group.relay.write("metrics", step, {"loss": float(step)})
            group.relay.write("samples", step, self.rows[step])
            if step == LOOKS:
                group.relay.write("metrics", step, {"validation_loss": float(step)})


def lose(path: Path, lines: int) -> None:
    """Simulates a power failure: removes the last lines, and appends an incomplete one."""
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[: len(whole) - lines]) + b'{"step": 9')


def test_the_rows_that_are_sent_fit_into_a_heal(tmp_path: Path):
    """With the most slots of a step, and names as long as those of pods: else no group could heal after some fifty steps."""
    one = Group(tmp_path, writes=False)
    slots = {str(position): f"{position % 1000}-of-the-groups-of-a-long-name:01234567" for position in range(MAX_SLOTS)}
    for step in range(1, ROWS_KEPT // 2 + 1):
        one.relay.write("metrics", step, {"loss": float(step)})
        one.relay.write("samples", step, {"slots": slots})
    state = one.relay.state_dict()
    assert len(StateManifest.describe({"figures": state}).encode()) < MAX_HEADER_BYTES / 2
    kinds_and_steps = [(kind, step) for kind, step, _ in json.loads(state["rows"])]
    assert kinds_and_steps[-3:] == [
        ("samples", ROWS_KEPT // 2 - 1),
        ("metrics", ROWS_KEPT // 2),
        ("samples", ROWS_KEPT // 2),
    ]


@pytest.mark.parametrize("lost", [(0, 0), (1, 0), (0, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("further", [-1, 0, 1, 3, 2 * ROWS_KEPT])
@pytest.mark.parametrize("of", ["one", "others"])
def test_a_checkpoint_brings_the_rows_of_its_steps(tmp_path: Path, of: str, further: int, lost: tuple[int, int]):
    """Group a alone commits the last step, writes it and dies; the others repeat it and make `further` steps, or do not. Then all die, and
    the files lose `lost` lines. Each group loads the newest checkpoint, of a or of the others, and the writer changes with each step."""
    a, b = two(tmp_path)
    alone = History()
    for step in range(1, LAST):
        alone.step(step, "a", "b", "c")
    others = deepcopy(alone)
    alone.step(LAST, "a", "b", "c")
    others.step(LAST, "a", "b", "c", dead="a")
    alone.tell(a, *range(1, LAST + 1))
    others.tell(b, *range(1, LAST))
    figures, history = a.relay.state_dict(), deepcopy(alone)
    if further >= 0:
        b.writes, b.quorum = True, ("epoch", 2)
        others.tell(b, LAST)
        if of == "others":
            figures, history = b.relay.state_dict(), deepcopy(others)
        for step in range(LAST + 1, LAST + 1 + further):
            others.step(step, "b", "c")
            others.tell(b, step)
    lose(tmp_path / "metrics.jsonl", lost[0])
    lose(tmp_path / "samples.jsonl", lost[1])

    groups = [Group(tmp_path, writes=False), Group(tmp_path, writes=False)]
    for group in groups:
        group.relay.load_state_dict(json.loads(json.dumps(figures)))
    steps = range(1, LAST + 4)
    for step in steps[LAST:]:
        history.step(step, "d", "e")
        for number, group in enumerate(groups):
            group.quorum, group.writes = ("another", step), number == step % 2
            history.tell(group, step)
    assert rows(tmp_path) == [(step, look) for step in steps for look in ({False, step == LOOKS})]
    written = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert written == [{"step": step, **history.rows[step]} for step in steps]
    assert prove(read(tmp_path / "samples.jsonl")).exact


def test_figures_are_on_disk_where_a_checkpoint_is_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[str] = []
    replace_system_call(monkeypatch, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink().name))
    a, b = two(tmp_path)
    for group in (a, b):
        group.commits(1)
        synced.clear()
        group.relay.sync()
        assert set(synced) == ({"metrics.jsonl", "samples.jsonl"} if group is a else set())


# ------------------------------------------------------------------------------------------------ storage fails


def charted(folder: Path) -> list[int]:
    """Returns the steps of all event files, as TensorBoard's own reader finds them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    reader = EventAccumulator(str(folder / "tb"))
    reader.Reload()
    return [event.step for event in reader.Scalars("loss_metrics/global_avg_loss")]


@pytest.mark.parametrize("room", [0, 5, 30, 120, 200, 330], ids=str)
@pytest.mark.parametrize("failing", ["full", "read_only"])
def test_storage_that_fails_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, room: int):
    """Wherever a write is cut short, its incomplete line or record is removed."""
    disk = Disk(tmp_path, monkeypatch)
    a = Group(tmp_path, writes=True)
    a.commits(1)
    a.commits(2)
    with disk.full(room) if failing == "full" else disk.read_only():
        if failing == "read_only":
            a.relay.close()  # a file system that was mounted anew
        for step in (3, 4, 5, 6):
            a.commits(step, looks=step == 4)
        a.relay.sync()  # as before a checkpoint: raises nothing
        reader = (tmp_path / "metrics.jsonl").read_text()
        assert all(json.loads(line) for line in reader.splitlines()), "nobody sees a part of a line"
    a.commits(7)
    assert rows(tmp_path) == [(step, look) for step in range(1, 8) for look in ({False, step == 4})]
    assert charted(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    trouble, end = a.background_writer.said
    why = "No space left on device" if failing == "full" else "Read-only file system"
    assert trouble.startswith(f"metrics cannot be written: {why} (") and str(tmp_path) in trouble
    assert trouble.endswith("; kept in memory and retried")
    assert end.startswith("metrics can be written again, after ") and end.endswith("; nothing is lost")


@pytest.mark.parametrize("shared", [False, True])
def test_a_job_that_goes_back_while_storage_fails_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
):
    """The rows before the loaded checkpoint are still pending."""
    disk = Disk(tmp_path, monkeypatch)
    a = Group(tmp_path, writes=True, shared=shared)
    a.commits(1)
    with disk.full(room=30):
        for step in (2, 3, 4, 5, 4):
            a.commits(step, looks=step == 3)
    a.commits(5, of="b")
    assert rows(tmp_path) == [(1, False), (2, False), (3, False), (3, True), (4, False), (5, False)]
    assert owners(tmp_path)[5] == "b"
    assert charted(tmp_path) == [1, 2, 3, 4, 5]
    assert "nothing is lost" in a.background_writer.said[-1]


def test_the_role_moves_while_storage_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The former writer leaves with its pending rows: the other group has them as well, however long the failure lasts."""
    disk = Disk(tmp_path, monkeypatch)
    a, b = two(tmp_path, 2)
    last = 3 * ROWS_KEPT
    with disk.full(room=50):
        for step in range(3, last):
            if step < 10:
                a.commits(step)
            b.writes, b.quorum = step > ROWS_KEPT, ("epoch", 2)
            b.commits(step)
    b.commits(last)
    assert rows(tmp_path) == [(step, False) for step in range(1, last + 1)]
    assert charted(tmp_path) == list(range(1, last + 1))


def test_who_does_not_write_forgets_what_is_written(tmp_path: Path):
    """Otherwise each of many groups would keep the metrics of an hour."""
    a, b = two(tmp_path)
    for step in range(1, 4 * ROWS_KEPT):
        a.commits(step)
        b.commits(step)
        assert len(a.relay.kept) <= ROWS_KEPT + 3 and len(b.relay.kept) <= 3 * ROWS_KEPT


@pytest.mark.parametrize("bound", ["bytes", "time"])
def test_what_there_is_no_room_for_is_counted_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str):
    now = [0.0]
    disk = Disk(tmp_path, monkeypatch)
    a = Group(tmp_path, writes=True, clock=lambda: now[0], kept_bytes=1 if bound == "bytes" else 1 << 30)
    a.commits(1)
    with disk.full():
        for step in range(2, 2 * ROWS_KEPT):
            now[0] += relay.KEPT_S if bound == "time" else 0
            a.commits(step)
    a.commits(2 * ROWS_KEPT)
    there = [step for step, _ in rows(tmp_path)]
    gone = 2 * ROWS_KEPT - len(there)
    assert there == [1, *range(2 + gone, 2 * ROWS_KEPT + 1)] and gone > ROWS_KEPT
    assert f"{a.relay.lost} rows are lost, since there was no room to keep them" in a.background_writer.said[-1]
    assert 3 * (gone - 1) < a.relay.lost <= 3 * gone + 3


def test_a_tmpfs_that_fills_up_and_a_scribe_of_its_own(tmp_path: Path):
    """A real full disk and a background thread: no step waits or fails, and all rows are written once there is space."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "pharos", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    said: list[str] = []
    background_writer = BackgroundWriter(said.append, retry_s=0.01)
    try:
        a = Group(tmp_path, writes=True, background_writer=background_writer)
        a.commits(1)
        assert background_writer.flush(50)
        ballast = tmp_path / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1000)):
                pass
        for step in range(2, 300):
            a.commits(step)
        assert not background_writer.flush(50) and "No space left on device" in said[0]
        ballast.unlink()
        subprocess.run(["mount", "-o", "remount,size=10m", str(tmp_path)], check=True)
        background_writer.wake()
        until_written(background_writer)
        assert rows(tmp_path) == [(step, False) for step in range(1, 300)]
        assert [*charted(tmp_path)] == [*range(1, 300)]
        assert len(said) == 2 and "nothing is lost" in said[1]
    finally:
        background_writer.close()
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_disk_that_is_full_in_the_middle_of_a_step_costs_no_row_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The step's first row is written, and much later rewritten with the step's other rows."""
    disk = Disk(tmp_path, monkeypatch)
    a = Group(tmp_path, writes=True)
    a.commits(1)
    with disk.full(room=30):
        for step in range(2, 2 + ROWS_KEPT):
            a.commits(step)
    a.commits(2 + ROWS_KEPT)
    assert rows(tmp_path) == [(step, False) for step in range(1, 3 + ROWS_KEPT)]


@pytest.mark.parametrize("torn", [False, True])
def test_the_role_that_comes_after_the_last_row_brings_what_is_not_written(tmp_path: Path, torn: bool):
    """The former writer died in its last save: no later row names a new writer."""
    _, b = two(tmp_path, 2)
    b.commits(3)
    if torn:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "lo')
    b.writes, b.quorum = True, ("epoch", 2)
    b.relay.sync()
    assert rows(tmp_path) == [(1, False), (2, False), (3, False)]
    b.relay.close()
    assert rows(tmp_path) == [(1, False), (2, False), (3, False)]


def test_slow_storage_is_waited_for_once(tmp_path: Path):
    """All kinds of rows share one thread, so one wait covers all of them."""

    class Noting(AtOnce):
        def flush(self, timeout_s: float) -> bool:
            waits.append(timeout_s)
            return True

    waits = list[float]()
    a = Group(tmp_path, writes=True, background_writer=Noting())
    a.commits(1)
    a.relay.sync()
    a.relay.close()
    assert waits == [relay.SYNC_S, relay.CLOSE_S]


def test_an_end_while_storage_fails_says_that_rows_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = Disk(tmp_path, monkeypatch)
    a = Group(tmp_path, writes=True)
    a.commits(1)
    with disk.full():
        a.commits(2)
        a.relay.close()
        a.background_writer.close()
    assert len(a.background_writer.said) == 2 and "metrics: the newest rows are lost" in a.background_writer.said[1]
