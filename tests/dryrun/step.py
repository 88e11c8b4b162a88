"""train.py's own step on a device that computes nothing, for the cases on stdin (tests/dryrun/cases.py); each says in a line of JSON what
it saw, with its number.

echo '[{"config": "llama3_8b", "degrees": [1, 1, 2, 1, 1]}]' | python -m tests.dryrun.step
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from configs.check import check_settings
from configs.load import load
from ft.buckets import to_local
from ft.compat.process_groups import ProcessGroupDummy
from ft.config import Environment
from ft.digest import digest
from ft.manager import Manager
from ft.seam import DataAssignment
from ft.start import SoloManager, open_manager
from models import llama, ops
from parallelisms.execution import Precision
from parallelisms.mesh import TP, build_mesh
from parallelisms.parallelize import parallelize
from tests.dryrun import accelerator
from tests.dryrun.cases import CONFIGS, Case, settings
from tools.explain import rank as explained_rank
from training.data.loader import Batch
from training.loss import cross_entropy_sum
from training.optimizer import OptimizerStep, build_optimizer
from training.progress import Progress
from training.states import ModelState, OptimizerState

drop = lambda *_, **__: None  # noqa: E731


class FakeCollectives(explained_rank.FakeCollectives):
    @classmethod
    def is_infra_mode(cls) -> bool:
        """Returns True, as accelerator.Traffic does."""
        return True


class Run(train.Run):
    """A step, without data or files."""

    optimizer_state: type[OptimizerState] = OptimizerState

    def __init__(self, case: Case, cleanup: ExitStack) -> None:
        config = load([str(CONFIGS / f"{case.config}.toml"), *settings(case)])
        # An error in the backward ends the process without a word: torch's guard for such a device raises while it is unwound.
        check_settings(config, world_size=case.sizes.world_size)
        self.cleanup, self.config, self.device = cleanup, config, torch.device(accelerator.NAME, 0)
        vocab, length, batch = config.model.vocab_size or 384, config.training.seq_len, config.training.local_batch_size
        with torch.device("meta"):
            model = llama.build(config.model, vocab_size=vocab, max_seq_len=length)
        layout = config.execution_config(
            Precision(compute=torch.bfloat16), vocab_size=vocab, device_type=accelerator.NAME
        )
        compiled = replace(config.compile, backend="aot_eager")
        self.fake = explained_rank.without_memory(model)
        self.model = parallelize(
            model,
            build_mesh(case.sizes, accelerator.NAME),
            cross_entropy_sum,
            replace(layout, compile=compiled),
            local_batch_size=batch,
            seq_len=length,
            device=self.device,
            seed=0,
        )
        self.parameters = [parameter for part in self.model.parts for parameter in part.parameters()]
        self.coordinate, self.progress, self.pending_requests = case.sizes.coordinate(case.rank), Progress(), 0
        fakes: Any = SimpleNamespace
        self.signals, self.save_overdue, self.budgets_end = fakes(pending=0), False, False
        self.world, self.data = fakes(world_size=case.sizes.world_size), fakes(end=None)
        self.log, self.events, self.metrics_processor = fakes(), fakes(heals=0), fakes(step=drop)
        self.slot_size = self.inner_steps = 1
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        starts = tokens if case.documents else None
        batches = [
            Batch(tokens, tokens, 0, (0,), number == case.passes, starts) for number in range(1, case.passes + 1)
        ]
        self.loader = fakes(load=lambda slots: iter(batches))
        self.manager: Any = SoloManager(batch) if not case.groups else self.among_groups(batch)

    def among_groups(self, slot_size: int) -> Manager:
        """Opens a manager with a real lighthouse and a real group server; other groups' ranks do not exist."""
        from ft.compat.lighthouse import LighthouseServer

        lighthouse = LighthouseServer("127.0.0.1:0", 1)
        self.cleanup.callback(lighthouse.shutdown)
        folder = self.cleanup.enter_context(TemporaryDirectory())
        with mock.patch("ft.start.make_process_group", lambda *_: ProcessGroupDummy()):
            manager = open_manager(
                replace(self.config.fault_tolerance, enable=True, min_replica_size=1),
                Environment(lighthouse=lighthouse.address(), num_replica_groups=1),
                slot_size=slot_size,
                folder=Path(folder),
                device_type=accelerator.NAME,
            )
        assert isinstance(manager, Manager)
        self.cleanup.callback(manager.close)
        manager.attach(self.model.parts)
        gradients, said = manager.gradients, list[tuple[float, ...]]()
        launch, wait = gradients.launch_remaining, gradients.wait

        def launch_and_keep(tail: Sequence[float], **options: bool) -> None:
            said.append(tuple(tail))
            launch(tail, **options)

        def wait_and_tell() -> tuple[float, ...]:
            """Returns this group's own tail as the sum, since no value is computed."""
            wait()
            return said[-1]

        gradients.launch_remaining, gradients.wait = launch_and_keep, wait_and_tell  # type: ignore[method-assign]
        return manager

    def compute_step(self, assignment: DataAssignment, batches: Iterator[Batch] | None = None) -> train.LocalStep:
        """Reports the loss as finite: the values, which nobody computed, could look like a loss that is not a number."""
        return super().compute_step(assignment, batches)._replace(finite=True)

    def step(self, plant: str) -> dict[str, Any]:
        with self.fake, FakeCollectives(), accelerator.Traffic(self.whole_weights()) as traffic:
            config = self.config
            self.optimizer = build_optimizer(config.optimizer, self.model.parts)
            self.optimizer_step = OptimizerStep(
                self.optimizer, self.parameters, config.optimizer, config.lr_scheduler, config.training, self.progress
            )
            if plant:
                PLANTS[plant](self)
            assert self.train_step()
            held = [to_local(x) for x in (*self.parameters, *self.states())]
            digest(self.parameters)
        return {
            "reads": dict(traffic.reads),
            "from_host": dict(traffic.from_host),
            "waits": dict(accelerator.WAITS),
            "gathered": traffic.gathered,
            "wide": traffic.wide,
            "products": dict(traffic.products),
            "on_host": sum(x.device.type == "cpu" for x in held),
            "dtypes": sorted({str(x.dtype) for x in held}),
            "held": sum(
                to_local(x).nbytes
                for x in [*{k: v for p in self.model.parts for k, v in p.state_dict().items()}.values(), *self.states()]
            ),
            "planned": self.planned(),
            "graphs": counters["stats"]["unique_graphs"],
        }

    def states(self) -> list[Tensor]:
        return [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]

    def whole_weights(self) -> set[tuple[int, ...]]:
        """The shapes of matrices of blocks, as tensor parallelism leaves them, that FSDP has cut. The embedding's and the head's are not
        among them: the chunks of the loss add up to a gradient of that shape, in fp32."""
        shapes, own = set(), {tuple(to_local(parameter).shape) for parameter in self.parameters}
        for part in self.model.parts:
            for parameter in part.layers.parameters():
                shape = list(parameter.shape)
                mesh = parameter.device_mesh
                for axis, placement in zip(mesh.mesh_dim_names, parameter.placements, strict=True):
                    if axis == TP and placement.is_shard():
                        shape[placement.dim] //= mesh[TP].size()
                if len(shape) > 1:
                    shapes.add(tuple(shape))
        return shapes - own

    def planned(self) -> int:
        """Bytes of tensors that a checkpoint would write."""
        states = {
            "model": ModelState(self.model.parts).state_dict(),
            "optimizer": self.optimizer_state(self.model.parts, self.optimizer).state_dict(),
        }
        planner = DefaultSavePlanner()
        planner.set_up_planner(states, is_coordinator=True)
        tensors = [item.tensor_data for item in planner.create_local_plan().items if item.tensor_data is not None]
        return sum(prod(data.chunk.sizes) * data.properties.dtype.itemsize for data in tensors)


def _weight(run: Run) -> Tensor:
    """Returns a weight of the first block, as FSDP has sharded it."""
    weight: Tensor = run.model.parts[0].layers["0"].feed_forward.w2.weight.detach()
    return weight


def _state(run: Run) -> dict[str, Tensor]:
    """Returns the optimizer's state of the first parameter."""
    return run.optimizer.state[run.parameters[0]]


def _in_update(before: Callable[[Run], object] = drop, after: Callable[[Run], object] = drop) -> Callable[[Run], None]:
    """Returns a plant that does harm right before or right after the optimizer's step."""

    def plant(run: Run) -> None:
        step = run.optimizer.step

        def with_harm(*_: Any) -> None:
            before(run)
            step()
            after(run)

        run.optimizer.step = with_harm  # type: ignore[method-assign, assignment]

    return plant


def _multiply_in_fp32(run: Run) -> None:
    linear = run.model.parts[0].layers["0"].feed_forward.w2
    linear.forward = lambda x: (x.float() @ linear.weight.t().float()).to(x.dtype)


def _unsaved(run: Run) -> None:
    """Makes an optimizer's checkpoint without the running means."""

    class Less(OptimizerState):
        def state_dict(self) -> dict[str, Any]:
            return {key: value for key, value in super().state_dict().items() if not key.endswith("exp_avg")}

    run.optimizer_state = Less


PLANTS: dict[str, Callable[[Run], None]] = {
    "a copy to the host": _in_update(lambda run: to_local(_weight(run)).cpu()),
    "a second read": _in_update(lambda run: to_local(_weight(run)).sum().cpu()),
    "a read by itself": _in_update(lambda run: to_local(_weight(run)).sum().item()),
    "a copy from the host": _in_update(lambda run: torch.zeros(1).to(run.device)),
    "a full gather": _in_update(lambda run: _weight(run).full_tensor()),  # type: ignore[attr-defined]
    "a whole weight in fp32": _in_update(lambda run: _weight(run).bfloat16().full_tensor().float()),
    "a state on the host": _in_update(after=lambda run: _state(run).update(exp_avg=torch.zeros(1))),
    "a state in another dtype": _in_update(
        after=lambda run: _state(run).update(exp_avg=torch.zeros(1, dtype=torch.bfloat16, device=run.device))
    ),
    "a product in fp32": _multiply_in_fp32,
    "a wait for the device": _in_update(lambda run: torch.get_device_module(run.device).current_stream().synchronize()),
    "a state that is not saved": _unsaved,
    "blocks that differ": lambda run: setattr(run.model.parts[0].layers["1"].attention_norm, "eps", 1e-3),
}


def flex_attention(q: Tensor, k: Tensor, v: Tensor, *documents: Tensor) -> Tensor:
    """Replaces FlexAttention, which is compiled for the device, and builds the mask that it would get."""
    ops.block_mask(*documents)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def see(case: Case) -> dict[str, Any]:
    accelerator.WAITS.clear()
    try:
        backends, ranks = f"cpu:fake,{accelerator.NAME}:fake", case.sizes.world_size
        dist.init_process_group(backends, rank=case.rank, world_size=ranks, store=FakeStore())
        with ExitStack() as cleanup, mock.patch.object(ops, "flex_attention", flex_attention):
            return Run(case, cleanup).step(case.plant)
    except Exception:  # noqa: BLE001 - said, and the others go on
        return {"error": traceback.format_exc()[-3000:]}
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
        torch._dynamo.reset()
        counters.clear()


def see_all(cases: Sequence[Case]) -> None:
    """Sees each in a process of its own, which says what it saw; as many run at once as there are cores. After several cases in a process
    torch's engine may end a backward without a result, or a word."""
    running = 0
    for number, case in enumerate(cases):
        if running == len(os.sched_getaffinity(0)):
            os.wait()
            running -= 1
        running += 1
        if os.fork() == 0:
            sys.stdout.write(json.dumps({"case": number, **see(case)}) + "\n")
            sys.stdout.flush()
            os._exit(0)
    for _ in range(running):
        os.wait()


if __name__ == "__main__":
    accelerator.register()
    see_all([Case(**each) for each in json.load(sys.stdin)])
