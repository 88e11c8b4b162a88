"""The role of the writer, by seeds: the group that saves, and reports the figures, whatever dies or fails (writers.py).

PHAROS_SEEDS=40 plays fewer. docs/sim.md has the counts.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.sim import writers
from training import background_writer, checkpoint, checkpoint_files, saver
from training.checkpoint import Checkpointer
from training.metrics_writer import MetricsWriter

SEEDS = range(min(300, int(os.environ.get("PHAROS_SEEDS", "300"))))
SEEN = (
    *writers.CLASSES,
    *("ENOSPC", "EROFS", "EIO", "slow", "saves", "deaths"),
    *("a commit of one", "a group heals", "goes on from a checkpoint"),
    *(f"a group ends: {how}" for how in ("finished", "finished already", "stopped at", "failed")),
    *(
        f"dies in {what}"
        for what in ("mkdir step.partial", "open step.partial/manifest.json", "rename step", "write a file")
    ),
)


@pytest.mark.timeout(300)  # 12 s of CPU
def test_many_seeds(tmp_path: Path):
    played = [writers.play(seed, tmp_path) for seed in SEEDS]
    failed = [one for one in played if one.failure]
    assert not failed, f"{len(failed)} of {len(played)} seeds failed" + "".join(
        f"\n\n{one.tell()}" for one in failed[:2]
    )
    seen = sum((one.seen for one in played), Counter[str]())
    never = [what for what in SEEN if not seen[what]] if len(SEEDS) == 300 else []
    assert not never, f"never seen: {never}"


def test_one_seed_is_one_run(tmp_path: Path):
    first, again, other = (writers.play(seed, tmp_path).lines for seed in (7, 7, 25))
    assert len(first) > 10 and first == again != other


# ------------------------------------------------------------------------------------------------ planted bugs


# Each makes of a function another one.


def names_it_before_its_manifest(real: Any) -> Any:
    def publish(folder: Path, manifest: checkpoint_files.Manifest, suffix: str = "") -> Path:
        final = checkpoint_files.step_folder(folder, manifest.step)
        (folder / f"step-{manifest.step}.partial{suffix}").rename(final)
        with (final / checkpoint_files.MANIFEST).open("w") as stream:
            stream.write(manifest.to_json())
        return final

    return publish


def makes_room_first(real: Any) -> Any:
    def begin(folder: Path, step: int, suffix: str = "") -> Path:
        for older in checkpoint_files.list_steps(folder):
            shutil.rmtree(checkpoint_files.step_folder(folder, older))
        return real(folder, step, suffix)

    return begin


def drops_rows(real: Any) -> Any:
    def register(self: background_writer.BackgroundWriter, name: str, do: Any, *args: Any) -> None:
        def drops() -> None:
            try:
                do()
            except OSError:
                metrics = do.__self__
                metrics.load_state_dict(metrics.state_dict())  # rows that came with a state are another's to write
                raise

        real(self, name, drops, *args)

    return register


def raises_into_the_loop(real: Any) -> Any:
    def save_due(self: saver.Saver) -> None:
        if self.manager.writer_quorum:
            with self.progress.phase("checkpoint"):
                self.save_now()

    return save_due


def acquires_in_the_step(real: Any) -> Any:
    def save(self: checkpoint.Checkpointer, *args: Any, **named: Any) -> None:
        self._lease.acquire()
        real(self, *args, **named)

    return save


def instead_of_regrouping_waits(real: Any) -> Any:
    return lambda self, *args: "wait" if (found := real(self, *args)) == "regroup" else found


class Bug(NamedTuple):
    where: Any
    name: str
    planted: Callable[[Any], Any]
    seed: int
    found: str


BUGS = {
    "finishes without a look": Bug(
        Checkpointer, "last_save_exists", lambda _: lambda self, step: True, 0, "has finished, and step"
    ),
    "tries no more": Bug(checkpoint, "SAVE_RETRY_S", lambda _: float("inf"), 135, "a save was due"),
    "makes up for nobody": Bug(Checkpointer, "_find_newest", lambda _: lambda self: None, 56, "a save was due"),
    "names it too early": Bug(checkpoint_files, "publish", names_it_before_its_manifest, 3, "is torn"),
    "makes room first": Bug(checkpoint_files, "begin", makes_room_first, 5, "is gone"),
    "drops rows": Bug(background_writer.BackgroundWriter, "register", drops_rows, 45, "steps are committed"),
    "raises into the loop": Bug(saver.Saver, "save_due", raises_into_the_loop, 62, "ends in its loop"),
    "looks in the step": Bug(
        writers.Trainer, "in_thread", lambda _: lambda self, work: work(), 0, "in the step's own thread"
    ),
    "settles nothing anew": Bug(Checkpointer, "agree", instead_of_regrouping_waits, 6, "not over after"),
    "hears by rows only": Bug(MetricsWriter, "_check_role", lambda _: lambda self: None, 11, "steps are committed"),
    "syncs each kind": Bug(
        MetricsWriter, "sync", lambda real: lambda self: (real(self), real(self)), 67, "held up the step"
    ),
    "acquires in the step": Bug(Checkpointer, "save", acquires_in_the_step, 67, "held up the step"),
}


@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bug = BUGS[name]
    with monkeypatch.context() as patch:
        patch.setattr(bug.where, bug.name, bug.planted(getattr(bug.where, bug.name)))
        assert bug.found in writers.play(bug.seed, tmp_path).failure
    assert not writers.play(bug.seed, tmp_path).failure  # it is the bug that was found
