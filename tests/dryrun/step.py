"""train.py's own step on a device that computes nothing, for the cases in argv; each says in a line of JSON what it saw.

python -m tests.dryrun.step '[{"config": "llama3_8b", "ranks": 8, "layers": 2, "parallelism": {}, "compile": false, "plant": ""}]'
"""

from __future__ import annotations

import json
import sys
import traceback
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from configs.load import load
from ft.digest import _sum
from models import llama
from parallelisms import explain_memory
from parallelisms.mesh import build_mesh, degrees
from parallelisms.parallelize import parallelize
from parallelisms.precision import Precision
from tests.dryrun import accelerator
from training.checkpoint import ModelState, OptimizerState
from training.data.loader import Batch
from training.loss import cross_entropy_sum
from training.optimizer import build_optimizer
from training.progress import Progress


class Run(train.Run):
    """A step of one microbatch, without data, other groups or files."""

    def __init__(self, case: dict[str, Any]) -> None:
        config = load([f"configs/{case['config']}.toml", *case.get("settings", [])])
        parallelism = replace(config.parallelism, **case["parallelism"])
        model_config = replace(config.model, n_layers=case["layers"] or config.model.n_layers)
        self.config, self.device = config, torch.device(accelerator.NAME, 0)
        vocab, length, batch = model_config.vocab_size, config.training.seq_len, config.training.local_batch_size
        chosen = degrees(parallelism, case["ranks"])
        with torch.device("meta"):
            model = llama.build(model_config, vocab_size=vocab, max_seq_len=length)
        layout = config.layout(Precision(compute=torch.bfloat16), vocab_size=vocab, device_type=accelerator.NAME)
        compiled = replace(config.compile, enable=case["compile"], backend="aot_eager")
        self.fake = explain_memory.without_memory(model)
        self.model = parallelize(
            model,
            build_mesh(chosen, accelerator.NAME),
            cross_entropy_sum,
            replace(layout, parallelism=parallelism, compile=compiled),
            local_batch_size=batch,
            seq_len=length,
            device=self.device,
            seed=0,
        )
        self.seat, self.progress, self.wishes, self.plant = chosen.seat(0), Progress(), 0, case.get("plant", "")
        self.shape = batch, length
        fakes: Any = SimpleNamespace
        self.signals, self.checkpointer = fakes(take=lambda: 0), fakes(overdue=lambda step: False)
        self.loader = fakes(load=lambda slots: iter([self.batch]))
        self.manager = fakes(
            step=1,
            begin_step=lambda until: fakes(step=0, slots=[0]),
            last_pass=lambda slot: nullcontext(),
            reduce=lambda *sums: sums,
            commit=lambda sums: fakes(divisor=1.0, mean_loss=1.0),
        )

    def tell(self, *_: Any) -> None: ...

    def step(self) -> dict[str, Any]:
        with self.fake, explain_memory.Others(), accelerator.Traffic() as traffic:
            self.optimizer = build_optimizer(self.config.optimizer, self.model.parts)
            tokens = torch.zeros(self.shape, dtype=torch.int64)
            self.batch = Batch(tokens, tokens, 0, (0,))
            if self.plant:
                PLANTS[self.plant](self)
            assert self.train_step()
            states = [*self.states(), *(x for p in self.parameters() for x in [p])]
            for parameter in self.parameters():
                _sum(
                    parameter.to_local() if isinstance(parameter, DTensor) else parameter
                )  # of the digest, before it is read
        local = [x.to_local() if isinstance(x, DTensor) else x for x in states]
        plan = {
            **ModelState(self.model.parts).state_dict(),
            **OptimizerState(self.model.parts, self.optimizer).state_dict(),
        }
        return {
            "to_host": dict(traffic.to_host),
            "waits": dict(accelerator.WAITS),
            "gathered": traffic.gathered,
            "on_host": sum(x.device.type == "cpu" for x in local),
            "dtypes": sorted({str(x.dtype) for x in local}),
            "planned": sum(isinstance(x, Tensor) for x in plan.values()),
        }

    def states(self) -> list[Tensor]:
        return [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]


def _in_update(run: Run, harm: Any) -> None:
    update = run.update

    def with_harm(*args: Any) -> float:
        harm()
        return update(*args)

    run.update = with_harm  # type: ignore[method-assign]


def _with_state(run: Run, state: Tensor) -> None:
    step = run.optimizer.step

    def with_state(*_: Any) -> None:
        step()
        run.optimizer.state[run.parameters()[0]]["exp_avg"] = state

    run.optimizer.step = with_state  # type: ignore[method-assign, assignment]


PLANTS: dict[str, Any] = {
    "a copy to the host": lambda run: _in_update(run, lambda: run.parameters()[0].detach().to_local().cpu()),
    "a second read": lambda run: _in_update(run, lambda: run.parameters()[0].detach().to_local().sum().item()),
    "a full gather": lambda run: _in_update(run, lambda: run.parameters()[0].detach().full_tensor()),
    "a state on the host": lambda run: _with_state(run, torch.zeros(1)),
    "a wrong dtype": lambda run: _with_state(run, torch.zeros(1, dtype=torch.bfloat16, device=run.device)),
}


def see(case: dict[str, Any]) -> dict[str, Any]:
    accelerator.WAITS.clear()
    dist.init_process_group(f"cpu:fake,{accelerator.NAME}:fake", rank=0, world_size=case["ranks"], store=FakeStore())
    try:
        return Run(case).step()
    except Exception:  # noqa: BLE001 - said, and the others go on
        return {"error": traceback.format_exc()[-3000:]}
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
        torch._dynamo.reset()


if __name__ == "__main__":
    accelerator.register()
    for each in json.loads(sys.argv[1]):
        print(json.dumps(see(each)), flush=True)
