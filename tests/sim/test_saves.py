"""Saves and their faults, seed by seed: what was due is there, nothing is torn, and nobody says "finished" before the last one stands."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sim import saves
from training import checkpoint_dcp, checkpoint_files
from training.checkpoint_dues import Dues
from training.last_save import LastSave

SEEDS = 60
OCCURS = [
    *(f"the writer died: {moment}" for moment in saves.MOMENTS),
    "slow: a save took its time",
    "full: an operation was refused",
    "read-only: an operation was refused",
    "a save failed",
    "who writes was settled anew at the end",
    "asked to leave while it waits",
]


def test_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen.update(saves.play(tmp_path / str(seed), seed, monkeypatch))
        shutil.rmtree(tmp_path / str(seed))
    assert [what for what in OCCURS if not seen[what]] == []


def finishes_unseen(patch: pytest.MonkeyPatch) -> None:
    """Whoever does not write has nothing to wait for."""
    word = LastSave._word

    def blind(self: Any, step: int, asked: bool) -> Any:
        return word(self, step, asked) if self._manager.writes else "stands"

    patch.setattr(LastSave, "_word", blind)


def never_again(patch: pytest.MonkeyPatch) -> None:
    """A save that failed is left to the next interval."""
    patch.setattr(Dues, "failed", lambda self: None)


def looks_at_nothing(patch: pytest.MonkeyPatch) -> None:
    """Whoever takes the role over does not ask what was due."""
    patch.setattr(Dues, "_look", lambda self: None)


def writes_in_place(patch: pytest.MonkeyPatch) -> None:
    """Files appear under the final name, the manifest before the data."""
    write = checkpoint_dcp.write

    def early(states: Any, path: Path, **more: Any) -> Any:
        final = path.with_name(path.name.partition(".")[0])
        path.rename(final)
        try:
            return write(states, final, **more)
        finally:
            if final.exists() and not path.exists():
                shutil.copytree(final, path)
                (final / checkpoint_files.MANIFEST).write_text("{")

    patch.setattr(checkpoint_dcp, "write", early)


def makes_room_first(patch: pytest.MonkeyPatch) -> None:
    """Older checkpoints are removed before the new one is written."""
    begin = checkpoint_files.begin

    def empties(folder: Path, step: int, name: str = "") -> Path:
        for older in checkpoint_files.list_steps(folder):
            checkpoint_files.remove(folder, older)
        return begin(folder, step, name)

    patch.setattr(checkpoint_files, "begin", empties)


def regroups_never(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the last save of one that has died waits for ever."""
    word = LastSave._word

    def waits(self: Any, step: int, asked: bool) -> Any:
        said = word(self, step, asked)
        return "wait" if said == "regroup" else said

    patch.setattr(LastSave, "_word", waits)


def looks_in_the_step(patch: pytest.MonkeyPatch) -> None:
    """The look for what was due is the trainer's."""
    missed = Dues.missed

    def asks(self: Any, step: int) -> bool:
        if self._claim.has_role:
            (self._folder / "probe").mkdir(exist_ok=True)
        return missed(self, step)

    patch.setattr(Dues, "missed", asks)


PLANTED: dict[
    Callable[[pytest.MonkeyPatch], None], tuple[int, str]
] = {  # the seed that shows it, and what the world says
    finishes_unseen: (0, "says that the run is finished"),
    never_again: (27, "8 was due, 0 is the newest"),
    looks_at_nothing: (7, "16 was due, 8 is the newest"),
    writes_in_place: (11, "manifest.json: missing"),
    makes_room_first: (7, "step 8 was saved, and now 0 is the newest"),
    regroups_never: (0, "not over"),
    looks_in_the_step: (0, "held up by storage"),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_each_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, found = PLANTED[plant]
    plant(monkeypatch)
    with pytest.raises(Exception, match=found):
        saves.play(tmp_path, seed, monkeypatch)
