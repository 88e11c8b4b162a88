"""A state saved by one layout is loaded by every other one, weights and optimizer, bit for bit by name; training continues as if alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ft import SoloManager
from models import llama
from models.init import draw
from parallelisms.execution import ExecutionConfig
from parallelisms.mesh import MeshCoordinate, ParallelismConfig, degrees
from tests.multiproc.pool import Pool
from tests.multiproc.test_layouts import on_cpu
from tests.unit.fakes import Lines
from training.checkpoint import Checkpointer
from training.checkpoint_config import CheckpointConfig
from training.checkpoint_dcp import StreamingPlanner
from training.checkpoint_files import EMA_STATE
from training.config import TrainingConfig
from training.ema import EMA
from training.optimizer import LRSchedulerConfig, OptimizerConfig, OptimizerStep, ParameterGroup, build_optimizer
from training.progress import Progress
from training.states import ModelState, OptimizerState

pytestmark = pytest.mark.timeout(300)  # a chain is many runs of the pool, each with its own time limit
T, BATCH = 16, 4
SEED, NOT_LOADED = 7, 8  # of the seed checkpoint, and of the values that a load must replace
SIZES = llama.Config(dim=32, n_heads=4, n_kv_heads=2, hidden_dim=40)
OPTIMIZER = OptimizerConfig(lr=1e-2, groups=(ParameterGroup("*norm.weight", weight_decay=0.0),))
MUON = replace(OPTIMIZER, name="Muon", ema_decay=0.5)
LAYOUTS = {
    "one": ParallelismConfig(data_parallel_shard_degree=1),
    "fsdp2": ParallelismConfig(data_parallel_shard_degree=2),
    "fsdp4": ParallelismConfig(data_parallel_shard_degree=4),
    "ddp2": ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=1),
    "hsdp4": ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=2),
    "cp2": ParallelismConfig(context_parallel_degree=2, data_parallel_shard_degree=1),
    "fsdp2 cp2": ParallelismConfig(context_parallel_degree=2, data_parallel_shard_degree=2),
    "tp2": ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=1),
    "fsdp2 tp2": ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=2),
    "ddp2 tp2": ParallelismConfig(
        tensor_parallel_degree=2, data_parallel_replicate_degree=2, data_parallel_shard_degree=1
    ),
    "tp2 cp2": ParallelismConfig(tensor_parallel_degree=2, context_parallel_degree=2, data_parallel_shard_degree=1),
    "pp2": ParallelismConfig(pipeline_parallel_degree=2, data_parallel_shard_degree=1),
    "pp2 fsdp2": ParallelismConfig(pipeline_parallel_degree=2, data_parallel_shard_degree=2),
    "pp2 tp2": ParallelismConfig(pipeline_parallel_degree=2, tensor_parallel_degree=2, data_parallel_shard_degree=1),
    "pp2 looped": ParallelismConfig(  # ranks hold several stages that are not neighbours
        pipeline_parallel_degree=2, pipeline_parallel_schedule="Interleaved1F1B", data_parallel_shard_degree=1
    ),
}


def ranks_of(layout: ParallelismConfig) -> int:
    return prod(value for name, value in vars(layout).items() if name.endswith("_degree"))


def meta_model(vocab_size: int, n_layers: int = 2) -> llama.Llama:
    with torch.device("meta"):
        return llama.build(replace(SIZES, n_layers=n_layers), vocab_size=vocab_size, max_seq_len=T)


class Place:
    """The state of a loader of a stream: the place in this rank's share, known to all ranks that see the same sequences."""

    def __init__(self, coordinate: MeshCoordinate, of: int) -> None:
        self.key, self.place = f"rank {coordinate.dp_rank} of {of}", ""

    def state_dict(self) -> dict[str, Any]:
        return {self.key: self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state[self.key]


class Run:
    """The model under one layout, with all that a checkpoint of train.py holds of a run, but for the data's own name."""

    def __init__(
        self,
        folder: Path,
        parallelism: ParallelismConfig,
        vocab_size: int,
        n_layers: int = 2,
        streamed: bool = False,
        optimizer: OptimizerConfig = OPTIMIZER,
        **settings: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.degrees = degrees(parallelism, dist.get_world_size())
        self.coordinate = self.degrees.coordinate(dist.get_rank())
        self.rows = BATCH // self.degrees.data_parallel
        model = meta_model(vocab_size, n_layers)
        self.model = on_cpu(model, ExecutionConfig(parallelism), seed=NOT_LOADED, batch=self.rows, seq_len=T)
        self.optimizer = build_optimizer(optimizer, self.model.parts)
        ema = EMA(self.model.parts, optimizer.ema_decay) if optimizer.ema_decay else None
        parameters = [p for part in self.model.parts for p in part.parameters()]
        flat, unclipped = LRSchedulerConfig(warmup_steps=0, decay_ratio=0.0), TrainingConfig(max_norm=0.0)
        self.optimizer_step = OptimizerStep(self.optimizer, parameters, optimizer, flat, unclipped, Progress(), ema=ema)
        self.manager, self.log = SoloManager(BATCH), Lines()
        self.states: dict[str, Any] = {
            "model": ModelState(self.model.parts),
            "optimizer": OptimizerState(self.model.parts, self.optimizer),
            "ledger": self.manager,
        }
        if ema is not None:
            self.states[EMA_STATE] = ema
        self.place = Place(self.coordinate, self.degrees.data_parallel)
        if streamed:
            self.states["loader"] = self.place
        self.checkpointer = Checkpointer(CheckpointConfig(**settings), folder, self.states, log=self.log)

    def train(self, steps: int) -> list[float]:
        """Trains, and returns the mean losses. The batch is that of the cursor, in every layout."""
        losses = []
        for _ in range(steps):
            [position] = self.manager.begin_step().slots
            draws = torch.Generator().manual_seed(position)
            tokens = torch.randint(0, self.vocab_size, (BATCH, T + 1), generator=draws)
            tokens = tokens[self.coordinate.dp_rank * self.rows :][: self.rows]
            loss = self.model.forward_backward(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            dist.all_reduce(loss)
            self.optimizer_step.step(0, BATCH * T)
            commit = self.manager.commit(self.manager.reduce([BATCH * T], loss.item(), True))
            assert commit is not None
            losses.append(commit.mean_loss)
        return losses

    def everything(self) -> dict[str, Any]:
        """Returns all values of which this rank holds a part, unsharded, by name."""
        return {
            f"{state}.{name}": value.full_tensor().clone()
            if isinstance(value, DTensor)
            else (value.clone() if isinstance(value, Tensor) else value)
            for state, stateful in self.states.items()
            for name, value in stateful.state_dict().items()
        }


def link(
    folder: Path, parallelism: ParallelismConfig, vocab_size: int, steps: int, optimizer: OptimizerConfig
) -> tuple[Any, ...]:
    """Loads, trains, saves: returns (step, everything as it was loaded, losses, everything as it was saved)."""
    run = Run(folder, parallelism, vocab_size, optimizer=optimizer)
    step = run.checkpointer.load()
    loaded = run.everything()
    losses = run.train(steps)
    run.checkpointer.save(run.manager.step)
    return step, loaded, losses, run.everything()


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns all ranks' parts as one; raises AssertionError where ranks differ."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            assert same(whole.setdefault(name, value), value), f"{name} differs between ranks"
    return whole


def same(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, Tensor) else first == second


def make_seed(folder: Path, vocab_size: int, n_layers: int = 2) -> dict[str, Tensor]:
    """Writes a seed checkpoint as scripts/make_seed_checkpoint.py does, in chunks of few rows; returns its tensors."""
    model = meta_model(vocab_size, n_layers)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    config = CheckpointConfig(create_seed_checkpoint=True)
    checkpointer = Checkpointer(config, folder, {"model": ModelState([model])}, log=Lines())
    checkpointer.save_seed(StreamingPlanner(lambda name: draw(model, tensors[name], SEED), chunk_bytes=1000))
    return {name: draw(model, tensor, SEED) for name, tensor in tensors.items()}


def follow(
    pool: Pool, folder: Path, chain: list[str], vocab_size: int, optimizer: OptimizerConfig, *, each: int = 1
) -> list[float]:
    """Trains one layout after the other for `each` steps, from the seed on; returns the losses."""
    before: dict[str, Any] = make_seed(folder, vocab_size)
    losses: list[float] = []
    for count, name in enumerate(chain):
        layout = LAYOUTS[name]
        ranks = pool.run(ranks_of(layout), link, folder, layout, vocab_size, each, optimizer, timeout_s=120.0)
        steps, loaded, (first, *others), saved = zip(*ranks, strict=True)
        assert set(steps) == {count * each}, name
        there = joined(loaded)
        for key, value in before.items():
            assert same(there[key], value), f"{key} is not what was saved before {name}"
        assert count == 0 or there.keys() == before.keys(), name
        assert all(other == first for other in others), f"{name}: the ranks do not agree on the losses"
        losses += first
        before = joined(saved)
    return losses


# 61 and 259 rows are divided by no layout: FSDP over TP cuts 31 and 30 rows again.
CHAINS = [
    pytest.param("fsdp4 > one > hsdp4 > ddp2 > fsdp2", 61, OPTIMIZER, marks=pytest.mark.long),
    ("fsdp2 tp2 > tp2 cp2 > one > ddp2 tp2 > fsdp2 cp2 > tp2", 259, OPTIMIZER),
    ("pp2 fsdp2 > fsdp2 tp2 > pp2 tp2 > cp2 > pp2 looped > hsdp4", 61, OPTIMIZER),
    ("fsdp2 tp2 > hsdp4 > pp2", 61, MUON),
]


@pytest.mark.parametrize(("chain", "vocab_size", "optimizer"), CHAINS)
def test_each_layout_goes_on_where_the_one_before_it_stopped(
    pool: Pool, tmp_path: Path, chain: str, vocab_size: int, optimizer: OptimizerConfig
):
    layouts = chain.split(" > ")
    losses = follow(pool, tmp_path / "several", layouts, vocab_size, optimizer)
    alone = follow(pool, tmp_path / "alone", ["one"], vocab_size, optimizer, each=len(losses))
    assert losses == pytest.approx(alone, rel=1e-5)
    assert max(losses) - min(losses) > 0.01  # it learns: the losses say something


def begin_with(seed: Path, parallelism: ParallelismConfig, exclude: tuple[str, ...]) -> dict[str, Any]:
    settings: dict[str, Any] = {"initial_load_path": str(seed / "checkpoint/step-0"), "exclude_from_loading": exclude}
    run = Run(seed.parent / "other", parallelism, 61, **settings)
    assert run.checkpointer.load() is None
    return run.everything()


@pytest.mark.parametrize("n_layers", [2, 1])  # of the seed: a layer that only this run has may be excluded, too
def test_what_is_excluded_may_be_on_one_rank_alone(pool: Pool, tmp_path: Path, n_layers: int):
    seed = make_seed(tmp_path / "seed", 61, n_layers)
    excluded = ("model.layers.1", "model.output", "model.tok_embeddings.weight")
    there = joined(pool.run(2, begin_with, tmp_path / "seed", LAYOUTS["pp2"], excluded))
    model = meta_model(61)
    for name, tensor in model.state_dict(keep_vars=True).items():
        expected = draw(model, tensor, NOT_LOADED) if f"model.{name}".startswith(excluded) else seed[f"model.{name}"]
        assert torch.equal(there[f"model.{name}"], expected), name


def refusal(folder: Path, parallelism: ParallelismConfig, vocab_size: int, n_layers: int) -> str:
    """Returns the message of the refusal, without the folder's name."""
    with pytest.raises(ValueError) as error:
        Run(folder, parallelism, vocab_size, n_layers).checkpointer.load()
    return str(error.value).partition("does not fit this run: ")[2]


@pytest.mark.parametrize("layout", ["pp2", "fsdp2"])
@pytest.mark.parametrize(
    ("vocab_size", "n_layers", "names", "said"),
    [
        (61, 1, ("1.attention.wk", "1.attention.wo", "1.attention.wq"), "is in the checkpoint but not in this run"),
        (61, 3, ("2.attention_norm", "2.attention.wq", "2.attention.wk"), "is in this run but not in the checkpoint"),
        (60, 2, (), "[61, 32] there and [60, 32] here"),
    ],
)
def test_a_name_that_no_rank_holds_or_that_is_missing_is_told_once(
    pool: Pool, tmp_path: Path, layout: str, vocab_size: int, n_layers: int, names: tuple[str, ...], said: str
):
    make_seed(tmp_path, 61)
    text = "; ".join(f"model.layers.{name}.weight {said}" for name in names) + " (and 6 more)"
    if not names:
        text = f"model.tok_embeddings.weight is {said}; model.output.weight is {said}"
    assert pool.run(2, refusal, tmp_path, LAYOUTS[layout], vocab_size, n_layers) == [text] * 2


def create_state_on_rank_0(folder: Path) -> list[str]:
    """Returns the names. The other rank sends nothing until this one has them."""
    run = Run(folder, LAYOUTS["fsdp2"], 61, optimizer=MUON)
    names = list(run.states["optimizer"].state_dict()) if dist.get_rank() == 0 else []
    dist.barrier()
    return names


def test_a_rank_creates_the_state_of_muon_alone(pool: Pool, tmp_path: Path):
    """A rank needs no other one, as in a heal, in which each rank takes the state of its own shards, at its own time."""
    names, none = pool.run(2, create_state_on_rank_0, tmp_path)
    assert "state.layers.0.attention.wq.weight.momentum_buffer" in names and not none


def save_places(folder: Path, parallelism: ParallelismConfig) -> None:
    run = Run(folder, parallelism, 61, streamed=True)
    run.place.place = f"record {run.coordinate.dp_rank}"
    run.checkpointer.save(1)


def load_place(folder: Path, parallelism: ParallelismConfig) -> tuple[int, str]:
    """Returns this rank's dp_rank, and its place in the stream or the reason of the refusal."""
    run = Run(folder, parallelism, 61, streamed=True)
    try:
        run.checkpointer.load()
    except ValueError as error:
        return run.coordinate.dp_rank, str(error).partition("does not fit this run: ")[2]
    return run.coordinate.dp_rank, run.place.place


def test_a_stream_is_taken_up_by_as_many_data_parallel_ranks_in_any_layout(pool: Pool, tmp_path: Path):
    pool.run(4, save_places, tmp_path, LAYOUTS["pp2 fsdp2"])
    for layout in (LAYOUTS["fsdp2"], LAYOUTS["fsdp2 tp2"]):
        for dp_rank, place in pool.run(ranks_of(layout), load_place, tmp_path, layout):
            assert place == f"record {dp_rank}"
    text = "loader.rank 0 of 4 is in this run but not in the checkpoint; loader.rank 1 of 4 is in this run but not in the checkpoint; "
    for _, place in pool.run(4, load_place, tmp_path, LAYOUTS["hsdp4"]):
        assert place.startswith(text) and place.endswith(
            "; a stream is resumed by the same number of data-parallel ranks"
        )
