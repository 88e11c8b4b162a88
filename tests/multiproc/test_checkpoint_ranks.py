"""Checkpoints of several ranks: any number of them loads what any other number saved, and all fail alike."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.multiproc.pool import Pool
from tests.unit.checkpoint_job import Ledger, Trains, flip_a_bit, steps_in
from tests.unit.fakes import Lines
from tests.unit.storage import SlowStore
from training.checkpoint import Checkpointer, CheckpointFailed
from training.checkpoint_config import CheckpointConfig
from training.checkpoint_files import ROWS_STATE
from training.rank_collectives import RankCollectives
from training.states import ModelState, OptimizerState

EVERY_MODE = pytest.mark.parametrize("async_mode", ["disabled", "async"])


def network() -> nn.Sequential:
    """Rows that do not divide: 7, 5, 3 and 1 over two ranks, which leaves the second without any of the last."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 1, bias=False))


class Run(Trains):
    """A sharded model on this rank, trained by a batch that does not depend on the number of ranks."""

    def __init__(
        self,
        run_folder: Path,
        *,
        blank: bool = False,
        ranks: RankCollectives | None = None,
        on_bytes: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = network()
        if blank:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(torch.nan)
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.ledger, self.log = Ledger(), Lines()
        states: dict[str, Any] = {
            "model": ModelState([self.model]),
            "optimizer": OptimizerState([self.model], self.optimizer),
            "ledger": self.ledger,
        }
        self.stages = dict[str, Callable[[], None]]()
        self.checkpointer = Checkpointer(
            CheckpointConfig(**settings),
            run_folder,
            states,
            log=self.log,
            ranks=ranks,
            on_stage=lambda stage: self.stages.get(stage, lambda: None)(),
            on_bytes=on_bytes,
        )

    def everything(self) -> dict[str, Any]:
        entries = ModelState([self.model]).state_dict()
        entries.update(OptimizerState([self.model], self.optimizer).state_dict(), **self.ledger.state)
        return {name: whole(value) for name, value in entries.items()}


def whole(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.numpy().copy().tolist() if isinstance(value, Tensor) else value


def save_after(folder: Path, steps: int, more: int, settings: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """Everything at the save, and the losses of `more` steps beyond it."""
    run = Run(folder, **settings)
    assert run.checkpointer.load() is None
    run.train(steps)
    run.checkpointer.save(steps)
    there = run.everything()
    losses = run.train(more)
    run.checkpointer.close()
    return there, losses


def load_and_go_on(
    folder: Path, more: int, settings: dict[str, Any]
) -> tuple[int | None, dict[str, Any], list[float], Lines]:
    run = Run(folder, blank=True, **settings)
    step = run.checkpointer.load()
    return step, run.everything(), run.train(more), run.log


@EVERY_MODE
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 2), (2, 1), (1, 2), (1, 3)])
def test_any_number_of_ranks_loads_it(
    pool: Pool, tmp_path: Path, saved_by: int, loaded_by: int, async_mode: str
) -> None:
    settings = {"async_mode": async_mode}
    there, losses = pool.run(saved_by, save_after, tmp_path, 2, 2, settings)[0]
    for step, loaded, more, log in pool.run(loaded_by, load_and_go_on, tmp_path, 2, settings):
        assert step == 2 and loaded == there and log.warnings == []
        assert more == losses if saved_by == loaded_by else more == pytest.approx(losses, rel=1e-5)
    assert len(list((tmp_path / "checkpoint/step-2").glob("*.distcp"))) == saved_by


def test_a_plain_process_begins_with_exported_weights(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_after, tmp_path, 2, 0, {})
    there = pool.run(2, export_after_load, tmp_path)[0]
    model = network()
    config = CheckpointConfig(initial_load_path=str(tmp_path / "checkpoint/step-2"))
    Checkpointer(config, tmp_path / "other", {"model": ModelState([model])}, log=Lines()).load()
    for name, value in model.state_dict().items():
        assert value.tolist() == there[name]


def export_after_load(folder: Path) -> dict[str, Any]:
    run = Run(folder, last_save_model_only=True)
    run.checkpointer.load()
    run.checkpointer.save(2, last=True)
    assert run.checkpointer.newest_step("model") == 2
    return run.everything()


class Stages(nn.Module):
    """A model of which each rank keeps one layer, by its full name, as a pipeline's stages do."""

    def __init__(self, keep: range) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = {str(index): nn.Linear(3, 3) for index in range(4)}
        self.layers = nn.ModuleDict({name: layer for name, layer in layers.items() if int(name) in keep})


def save_stages(folder: Path) -> None:
    rank = dist.get_rank()
    states = {"model": ModelState([Stages(range(rank, rank + 1)), Stages(range(rank + 2, rank + 3))])}
    Checkpointer(CheckpointConfig(), folder, states, log=Lines()).save(3)


def load_stages(folder: Path, keep: list[range]) -> int | None:
    part = Stages(keep[dist.get_rank()])
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.zero_()
    step = Checkpointer(CheckpointConfig(), folder, {"model": ModelState([part])}, log=Lines()).load()
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter, Stages(range(4)).get_parameter(name))
    return step


def test_model_parts_are_joined_by_name(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_stages, tmp_path)
    assert pool.run(1, load_stages, tmp_path, [range(4)]) == [3]
    assert pool.run(2, load_stages, tmp_path, [range(3), range(3, 4)]) == [3, 3]
    with pytest.raises(
        AssertionError, match=r"ValueError: .*model\.layers\.3\.bias is in the checkpoint but not in this run"
    ):
        pool.run(2, load_stages, tmp_path, [range(2), range(1, 3)])


class Rows:
    """Metric rows, which rank 0 alone has (training/components.py)."""

    rows = ""

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


def rows_of_rank0(folder: Path, saved: str) -> str:
    rank, rows = dist.get_rank(), Rows()
    states: dict[str, Any] = {"model": ModelState([Stages(range(rank, rank + 1))])}
    if rank == 0:
        rows.rows = saved
        states[ROWS_STATE] = rows
    checkpointer = Checkpointer(CheckpointConfig(), folder, states, log=Lines())
    if saved:
        checkpointer.save(3)
    else:
        assert checkpointer.load() == 3
    return rows.rows


def test_the_rows_of_a_checkpoint_are_rank_0s(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, rows_of_rank0, tmp_path, "[1]")
    assert pool.run(2, rows_of_rank0, tmp_path, "") == ["[1]", ""]


def load_with_more_on_the_last_rank(folder: Path) -> str:
    parts: list[nn.Module] = [Stages(range(4))]
    parts += [nn.Linear(2, 2, bias=False)] if dist.get_rank() == 1 else []
    with pytest.raises(ValueError) as error:
        Checkpointer(CheckpointConfig(), folder, {"model": ModelState(parts)}, log=Lines()).load()
    return str(error.value).split(": ")[-1]


def test_what_does_not_fit_one_rank_is_refused_by_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_stages, tmp_path)
    line = "model.weight is in this run but not in the checkpoint"
    assert pool.run(2, load_with_more_on_the_last_rank, tmp_path) == [line] * 2


def test_damage_is_told_once_and_all_ranks_use_the_one_before(pool: Pool, tmp_path: Path) -> None:
    there, _ = pool.run(2, save_after, tmp_path, 2, 0, {})[0]
    pool.run(2, save_after_load, tmp_path, 4)
    flip_a_bit(tmp_path / "checkpoint/step-4/__1_0.distcp")
    first, second = pool.run(2, load_and_go_on, tmp_path, 0, {})
    for step, loaded, _, _ in (first, second):
        assert step == 2 and loaded == there
    assert [line.split(": bytes")[0] for line in first[3].warnings] == [
        "checkpoint: step 4 is damaged and not used: __1_0.distcp"
    ]
    assert second[3].warnings == []


def save_after_load(folder: Path, step: int) -> None:
    run = Run(folder)
    run.checkpointer.load()
    run.train(step - run.ledger.state["step"])
    run.checkpointer.save(step)


def messages_of_load(folder: Path, settings: dict[str, Any]) -> str:
    try:
        Run(folder, **settings).checkpointer.load()
    except (ValueError, CheckpointFailed) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_all_ranks_refuse_alike(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_after, tmp_path, 2, 0, {})
    (message,) = set(pool.run(2, messages_of_load, tmp_path, {"load_step": 3}))
    assert message.startswith("ValueError: checkpoint.load_step = 3: not in ")
    (tmp_path / "checkpoint/step-2/__0_0.distcp").unlink()
    (message,) = set(pool.run(2, messages_of_load, tmp_path, {}))
    assert message.startswith("CheckpointFailed: ") and "(step 2: __0_0.distcp: missing)" in message


def copied_from_a_store(folder: Path) -> tuple[int | None, bool, int]:
    """Step, equality and calls of on_bytes on this rank, for a launch on another machine; rank 0 has the store."""
    run = Run(folder / "1" / "run", folder="memory://checkpoints")
    run.train(2)
    run.checkpointer.save(2)
    while not run.checkpointer.wait_uploaded(50.0):
        pass
    calls = list[None]()

    def on_bytes() -> None:
        calls.append(None)
        SlowStore.lets_go.set()

    SlowStore.lets_go.clear()
    other = Run(folder / "2" / "run", blank=True, folder="slow://checkpoints", on_bytes=on_bytes)
    step = other.checkpointer.load()
    run.checkpointer.close()
    other.checkpointer.close()
    return step, other.everything() == run.everything(), len(calls)


def test_all_ranks_wait_for_a_long_copy(pool: Pool, tmp_path: Path) -> None:
    """No rank waits in one collective, whose time is limited, for longer than until the next bytes."""
    (first, second) = pool.run(2, copied_from_a_store, tmp_path)
    assert first == second and first[:2] == (2, True) and first[2] >= 1


def one_rank_cannot_write(folder: Path, broken_rank: int, async_mode: str) -> tuple[str, bool]:
    """The failure's message on this rank, and whether the next save works."""
    run = Run(folder, async_mode=async_mode)
    run.train(1)
    run.checkpointer.save(1)
    run.checkpointer.wait()
    run.train(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == broken_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    message = ""
    try:
        run.checkpointer.save(2)
        run.checkpointer.wait()
    except CheckpointFailed as failure:
        message = str(failure)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run.checkpointer.close()
    assert steps_in(folder) == [1]
    dist.barrier()
    run.checkpointer.save(3, last=True)
    return message, steps_in(folder) == [1, 3]


@EVERY_MODE
@pytest.mark.parametrize("broken_rank", [0, 1])
def test_one_ranks_disk_is_full(pool: Pool, tmp_path: Path, broken_rank: int, async_mode: str) -> None:
    answers = pool.run(2, one_rank_cannot_write, tmp_path, broken_rank, async_mode)
    file = tmp_path / f"checkpoint/step-2.partial/__{broken_rank}_0.distcp"
    line = f"checkpoint: step 2 not saved: File too large ({file}); step 1 is the last good one"
    assert answers == [(line, True)] * 2


def no_folder(folder: Path) -> str:
    run = Run(folder)

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk")

    run.stages["begin"] = full
    with pytest.raises(CheckpointFailed) as failure:
        run.checkpointer.save(1)
    return str(failure.value)


def test_the_first_rank_cannot_begin(pool: Pool, tmp_path: Path) -> None:
    line = "checkpoint: step 1 not saved: No space left on device (disk); there is no earlier one"
    assert pool.run(2, no_folder, tmp_path) == [line] * 2


def nodes_without_a_shared_folder(folder: Path) -> str:
    """Each rank has a disk of its own under the same path, as if on another machine."""
    here = folder / str(dist.get_rank())

    class Apart(RankCollectives):
        def on_rank0(self, work: Callable[[], Any]) -> Any:
            outcome = super().on_rank0(work)
            return here / "checkpoint" / outcome.name if isinstance(outcome, Path) else outcome

    run = Run(here, ranks=Apart())
    with pytest.raises(CheckpointFailed) as failure:
        run.checkpointer.save(1)
    return str(failure.value)


def test_a_folder_that_the_nodes_do_not_share_is_noticed(pool: Pool, tmp_path: Path) -> None:
    (line,) = set(pool.run(2, nodes_without_a_shared_folder, tmp_path))
    assert "__1_0.distcp, which another rank wrote, is not in" in line
    assert steps_in(tmp_path / "0") == []
