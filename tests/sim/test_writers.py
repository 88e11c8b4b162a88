"""The role of the writer, by seeds: who saves, and tells the figures, whoever dies and whatever storage does (writers.py).

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
from training import checkpoint, checkpoint_files, saver, scribe
from training import metrics_writer as relay

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
# Seeds that failed once, and why.
REGRESSIONS = {
    11: "rows were missing, for the role moved after the last one",
    67: "a save waited twice for rows, over slow storage, and an async one read the lease in the step's own thread",
}


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


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_seeds_that_failed_once(seed: int, tmp_path: Path):
    played = writers.play(seed, tmp_path)
    assert not played.failure, played.tell()


def test_one_seed_is_one_run(tmp_path: Path):
    first, again, other = (writers.play(seed, tmp_path).lines for seed in (7, 7, 25))
    assert len(first) > 10 and first == again != other


# ------------------------------------------------------------------------------------------------ planted bugs


def finishes_without_a_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint.Checkpointer, "has", lambda self, step: True)


def tries_no_more(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "RETRY_S", float("inf"))


def makes_up_for_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint.Checkpointer, "_find_newest", lambda self: None)


def names_it_before_its_manifest(patch: pytest.MonkeyPatch) -> None:
    def publish(folder: Path, manifest: checkpoint_files.Manifest, name: str = "") -> Path:
        final = checkpoint_files.step_folder(folder, manifest.step)
        (folder / f"step-{manifest.step}.partial{name}").rename(final)
        with (final / checkpoint_files.MANIFEST).open("w") as stream:
            stream.write(manifest.to_json())
        return final

    patch.setattr(checkpoint_files, "publish", publish)


def makes_room_first(patch: pytest.MonkeyPatch) -> None:
    real = checkpoint_files.begin

    def begin(folder: Path, step: int, name: str = "") -> Path:
        for older in checkpoint_files.list_steps(folder):
            shutil.rmtree(checkpoint_files.step_folder(folder, older))
        return real(folder, step, name)

    patch.setattr(checkpoint_files, "begin", begin)


def drops_rows(patch: pytest.MonkeyPatch) -> None:
    real = scribe.Scribe.serve

    def serve(self: scribe.Scribe, name: str, do: Any, *args: Any) -> None:
        def drops() -> None:
            try:
                do()
            except OSError:
                do.__self__.load_state_dict(
                    do.__self__.state_dict()
                )  # rows that came with a state are another's to write
                raise

        real(self, name, drops, *args)

    patch.setattr(scribe.Scribe, "serve", serve)


def raises_into_the_loop(patch: pytest.MonkeyPatch) -> None:
    def save(self: saver.Saver) -> None:
        if self._manager.writes:
            with self._progress.phase("checkpoint"):
                self.write()

    patch.setattr(saver.Saver, "save", save)


def looks_in_the_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writers.Trainer, "in_thread", lambda self, work: work())


def settles_nothing_anew(patch: pytest.MonkeyPatch) -> None:
    real = checkpoint.Checkpointer.agree

    def agree(self: checkpoint.Checkpointer, *args: Any) -> Any:
        found = real(self, *args)
        return "wait" if found == "regroup" else found

    patch.setattr(checkpoint.Checkpointer, "agree", agree)


def hears_by_rows_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(relay.LeaderMetricsWriter, "_check_role", lambda self: None)


def syncs_each_kind(patch: pytest.MonkeyPatch) -> None:
    sync = relay.LeaderMetricsWriter.sync

    def each(self: relay.LeaderMetricsWriter) -> None:
        for _ in ("journals", "records"):
            sync(self)

    patch.setattr(relay.LeaderMetricsWriter, "sync", each)


def acquires_in_the_step(patch: pytest.MonkeyPatch) -> None:
    real = checkpoint.Checkpointer.save

    def save(self: checkpoint.Checkpointer, *args: Any, **named: Any) -> float:
        self._lease.acquire()
        return real(self, *args, **named)

    patch.setattr(checkpoint.Checkpointer, "save", save)


class Bug(NamedTuple):
    plant: Callable[[pytest.MonkeyPatch], None]
    seed: int
    found: str


BUGS = (
    Bug(finishes_without_a_look, 0, "has finished, and step"),
    Bug(tries_no_more, 135, "a save was due"),
    Bug(makes_up_for_nobody, 56, "a save was due"),
    Bug(names_it_before_its_manifest, 3, "is torn"),
    Bug(makes_room_first, 5, "is gone"),
    Bug(drops_rows, 45, "steps are committed"),
    Bug(raises_into_the_loop, 62, "ends in its loop"),
    Bug(looks_in_the_step, 0, "in the step's own thread"),
    Bug(settles_nothing_anew, 6, "not over after"),
    Bug(hears_by_rows_only, 11, "steps are committed"),
    Bug(syncs_each_kind, 67, "held up the step"),
    Bug(acquires_in_the_step, 67, "held up the step"),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.plant.__name__)
def test_the_bug_is_found(bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        bug.plant(patch)
        assert bug.found in writers.play(bug.seed, tmp_path).failure
    assert not writers.play(bug.seed, tmp_path).failure  # it is the bug that was found
