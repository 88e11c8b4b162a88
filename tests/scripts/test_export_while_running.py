"""scripts/hf.py export and generate.py beside a run that removes and replaces checkpoints: a read covers one whole checkpoint, or fails."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from scripts import generate, make_seed_checkpoint
from tests.scripts.hf_world import run, same, tensors
from tests.scripts.tiny_job import python
from training import checkpoint_files

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("in_the_folder")]
RUN, MADE = Path("outputs/tiny"), Path("made")
CHECKPOINTS = RUN / "checkpoint"


@pytest.fixture(autouse=True)
def made(in_the_folder: None) -> dict[int, dict[str, Tensor]]:
    """Makes checkpoints of steps 1 to 3, each with other weights, in a folder beside the run, which gets steps 1 and 2. Returns the
    export of each."""
    MADE.mkdir()
    for step in (1, 2, 3):
        shutil.rmtree(RUN, ignore_errors=True)
        assert make_seed_checkpoint.main(["tiny.toml", f"--training.seed={step}"]) == 0
        shutil.move(CHECKPOINTS / "step-0", put(step, MADE))
        manifest = replace(checkpoint_files.read_manifest(put(step, MADE)), step=step)
        (put(step, MADE) / checkpoint_files.MANIFEST).write_text(manifest.to_json())
    exports = {}
    for step in (1, 2, 3):
        publish(step)
        assert run("export", RUN, f"export-{step}") == 0
        exports[step] = tensors(Path(f"export-{step}"))
    assert not same(exports[1], exports[2]) and not same(exports[2], exports[3])
    shutil.rmtree(put(3))
    return exports


def put(step: int, folder: Path = CHECKPOINTS) -> Path:
    return checkpoint_files.step_folder(folder, step)


def publish(step: int, under: int = 0) -> None:
    """Publishes a checkpoint by one rename, like a run. `under`: the step that it gets, whose checkpoint it replaces."""
    target = put(under or step)
    partial = shutil.copytree(put(step, MADE), target.with_name(f"{target.name}.partial"))
    if under:
        (partial / checkpoint_files.MANIFEST).write_text(
            replace(checkpoint_files.read_manifest(partial), step=under).to_json()
        )
        shutil.rmtree(target)
    partial.rename(target)


def prune(step: int) -> None:
    """Removes a checkpoint like a run: renames, then deletes it."""
    shutil.rmtree(put(step).rename(put(step).with_name(f"step-{step}.partial")))


class Opens:
    """Counts the opened files of a checkpoint; calls `then` before one of them is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.at, self.then = 0, -1, lambda: None
        original = Path.open

        def opened(path: Path, *arguments: Any, **settings: Any) -> Any:
            if path.parent == put(2):
                self.count += 1
                if self.count == self.at:
                    self.then()
            return original(path, *arguments, **settings)

        monkeypatch.setattr(Path, "open", opened)  # read_bytes and DCP call it, too


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opens]:
    opened = Opens(monkeypatch)
    assert run("export", RUN, "undisturbed") == 0
    assert opened.count > 10  # manifest, digests, metadata, tensors
    yield opened


def export(opens: Opens, at: int, then: Callable[[], None], *arguments: object) -> int:
    """Runs an export that calls `then` before the `at`-th opened file of step 2. Returns the exit code."""
    shutil.rmtree("out", ignore_errors=True)
    opens.count, opens.at, opens.then = 0, at, then
    return run("export", RUN, "out", *arguments)


def test_a_checkpoint_that_is_removed_at_any_read_is_followed_by_the_next_newest(
    opens: Opens, made: dict[int, dict[str, Tensor]], capsys: pytest.CaptureFixture[str]
):
    def newer() -> None:
        publish(3)
        prune(2)

    for at in range(1, opens.count + 1):
        for then, step in ((newer, 3), (lambda: prune(2), 1)):
            capsys.readouterr()
            assert export(opens, at, then) == 0
            assert same(tensors(Path("out")), made[step]), (at, step)
            assert not Path("out.partial").exists()
            said = capsys.readouterr().out
            assert "step-2 was removed or replaced while it was read; beginning again with the newest" in said
            shutil.rmtree(put(3), ignore_errors=True)
            publish(2)


def test_a_checkpoint_that_is_replaced_at_any_read_is_not_mixed_with_the_other(
    opens: Opens, made: dict[int, dict[str, Tensor]]
):
    for at in range(1, opens.count + 1):
        assert export(opens, at, lambda: publish(3, under=2)) == 0
        assert same(tensors(Path("out")), made[3]), at
        publish(2, under=2)


def test_it_gives_up_after_some_attempts_and_leaves_nothing(opens: Opens, capsys: pytest.CaptureFixture[str]):
    attempts, per_attempt = [0], opens.count

    def always() -> None:
        attempts[0] += 1
        publish(2 + attempts[0] % 2, under=2)
        opens.at = opens.count + per_attempt  # the last file of the next attempt

    assert export(opens, opens.count, always) == 1
    said = capsys.readouterr()
    assert said.out.count("beginning again") == generate.ATTEMPTS - 1
    assert "5 times in a row; a larger checkpoint.keep_latest_k or interval keeps checkpoints" in said.err
    assert not Path("out").exists() and not Path("out.partial").exists()


def test_a_named_step_that_is_removed_is_not_exchanged_for_another(opens: Opens, capsys: pytest.CaptureFixture[str]):
    assert export(opens, opens.count - 1, lambda: prune(2), "--step", "2") == 1  # a named step is not searched for
    assert (
        "step-2 was removed or replaced while it was read; without --step the newest is exported"
        in capsys.readouterr().err
    )
    assert not Path("out").exists() and not Path("out.partial").exists()


def drawn(capsys: pytest.CaptureFixture[str], opens: Opens, at: int, then: Callable[[], None], *more: str) -> str:
    """Returns the output of generate.py, with exit code 0; before the `at`-th opened file of step 2 `then` is called."""
    opens.count, opens.at, opens.then = 0, at, then
    capsys.readouterr()
    assert generate.main([str(RUN), "--tokens=8", "--temperature=0", *more]) == 0
    said = capsys.readouterr()
    return said.err + said.out


def test_a_text_is_of_one_checkpoint(opens: Opens, capsys: pytest.CaptureFixture[str]):
    texts = {2: drawn(capsys, opens, -1, lambda: None).splitlines()[1:]}
    files_opened = opens.count
    for at in range(1, files_opened + 1):
        said = drawn(capsys, opens, at, lambda: prune(2))
        assert (
            "step-2 was removed or replaced while it was read; beginning again" in said and "step-1: 8 tokens" in said
        )
        publish(2)
    publish(3)
    texts[3] = drawn(capsys, opens, -1, lambda: None).splitlines()[1:]
    prune(3)
    assert texts[2] != texts[3]
    for at in range(3, files_opened + 1):  # the first are its manifest: to find the newest, and to read it
        said = drawn(capsys, opens, at, lambda: publish(3, under=2))
        assert said.splitlines()[2:] == texts[3], at
        publish(2, under=2)
    opens.count, opens.at, opens.then = 0, files_opened - 1, lambda: prune(2)  # a named step is not searched for
    assert generate.main([str(RUN), "--step=2"]) == 1
    assert "step-2 was removed or replaced while it was read; without --step the newest" in capsys.readouterr().err


KILL = """
import os, signal, sys
from pathlib import Path
from scripts import hf

rename = Path.rename
Path.rename = lambda self, to: os.kill(os.getpid(), signal.SIGKILL) if self.name == "out.partial" else rename(self, to)
hf.main(["export", "outputs/tiny", "out"])
"""


def test_a_kill_before_the_rename_leaves_no_export(made: dict[int, dict[str, Tensor]]):
    python("-c", KILL, code=-signal.SIGKILL)
    assert not Path("out").exists()
    assert json.loads(Path("out.partial/config.json").read_text())["model_type"] == "llama"
    assert run("export", RUN, "out") == 0
    assert same(tensors(Path("out")), made[2]) and not Path("out.partial").exists()
