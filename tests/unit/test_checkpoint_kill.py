"""SIGKILL at every instant of a save: the next start finds the last complete checkpoint, reports it, and continues."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.checkpoint_job import Job, same, steps_in


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, object]]:
    """Returns the state of the job after each step."""
    job = Job(tmp_path_factory.mktemp("expected"))
    states = {}
    for step in range(1, 7):
        job.train(1)
        states[step] = job.everything()
    return states


def killed(folder: Path, scenario: str) -> int:
    root = Path(__file__).parents[2]
    program = [sys.executable, str(Path(__file__).with_name("kill_while_saving.py")), str(folder), scenario]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_kill_leaves_the_last_good_checkpoint(tmp_path: Path, expected: dict[int, dict[str, object]]) -> None:
    kills = killed(tmp_path, "new")
    found: list[int] = []
    for instant in range(1, kills + 2):
        folder = tmp_path / str(instant)
        published = 6 in steps_in(folder)
        left_over = sorted(path.name for path in (folder / "checkpoint").iterdir() if "." in path.name)
        job = Job(folder, seed=1)
        step = job.checkpointer.load()
        assert step == (6 if published else 4)
        found.append(step)
        assert same(job.everything(), expected[step])
        told = ", ".join(f"removed {name}" for name in left_over)
        assert job.log.warnings == ([f"checkpoint: a save was interrupted by a kill: {told}"] if left_over else [])
        assert not any("." in path.name for path in (folder / "checkpoint").iterdir())
        assert {4, step} <= set(steps_in(folder))
    assert found == sorted(found) and found.count(4) > 5 and found.count(6) > 3
    job.train(1)
    job.checkpointer.save(7)
    assert Job(folder).checkpointer.load() == 7


def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new(
    tmp_path: Path, expected: dict[int, dict[str, object]]
) -> None:
    kills = killed(tmp_path, "again")
    found = []
    for instant in range(1, kills + 2):
        job = Job(tmp_path / str(instant), seed=1)
        assert job.checkpointer.load() == 4
        steps_taken = job.ledger.state["step"]  # 4: what was there; 5: what was saved in its place
        found.append(steps_taken)
        assert same(job.everything(), expected[steps_taken])
        assert len(job.log.warnings) <= 1
        assert steps_in(tmp_path / str(instant)) == [2, 4]
    assert found == sorted(found) and {4, 5} == set(found)
