"""The states of a run that a checkpoint contains, and a group that joins receives."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import JobConfig, RunConfig
from train import Run, SemiSyncRun


def registered(kind: type[Run], folder: Path, names: list[str]) -> list[str]:
    """Returns the states of `names` that a run of this kind registers at its manager."""
    found, silent = list[str](), lambda *_: None

    class Fork(kind):  # type: ignore[valid-type,misc]
        def __init__(self) -> None:
            self.config = RunConfig(job=JobConfig(name="fork", dump_folder=str(folder)))
            self.world, self.log = SimpleNamespace(global_rank=1), SimpleNamespace(info=silent, warning=silent)
            self.manager = SimpleNamespace(register_state=lambda name, *_: found.append(name), writer_quorum=None)
            self.progress, self.group_folder = SimpleNamespace(renew=silent), folder
            self.cleanup, self.writes_rows = stack, False

        def checkpoint_states(self, rows: Any) -> dict[str, Any]:
            return {name: SimpleNamespace(state_dict=dict, load_state_dict=silent) for name in names}

        def computed_buffers(self) -> set[str]:
            return set()

    with ExitStack() as stack:
        Fork().build_checkpointer(SimpleNamespace(sync=silent))
    return found


@pytest.mark.parametrize(
    ("kind", "own"), [(Run, ()), (SemiSyncRun, ("model", "optimizer", "outer_optimizer", "local_model"))]
)
def test_a_state_that_a_fork_adds_to_checkpoints_is_healed_too(kind: type[Run], own: tuple[str, ...], tmp_path: Path):
    shared = ["model", "optimizer", "meter", "data", "ema", "spikes", "figures", "router_history"]
    names = [*shared, "outer_optimizer", "local_model"] if own else shared
    assert registered(kind, tmp_path, [*names, "ledger", "loader"]) == [name for name in names if name not in own]
