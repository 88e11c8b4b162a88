"""The order in which a model becomes a parallel program: compile each block, shard, take memory, draw the initial values.

`parallelize` always returns the same thing, so the training loop never asks how the model is laid out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.contract import Model
from parallelisms.precision import Precision

LossFunction = Callable[
    [Tensor, Tensor], Tensor
]  # logits [B, T, V], labels [B, T] -> sum over valid tokens, fp32 scalar


@dataclass(frozen=True)
class CompileConfig:
    """[compile]: torch.compile of each block and of the loss."""

    enable: Annotated[bool, "compile; needs a C++ compiler on a CPU, Triton on a GPU"] = False
    components: Annotated[tuple[str, ...], "what is compiled: model (block by block), loss"] = ("model", "loss")
    backend: Annotated[str, "a backend that torch.compile knows"] = "inductor"

    def check(self) -> None:
        for component in self.components:
            if component not in ("model", "loss"):
                raise ValueError(
                    f'compile.components = {list(self.components)}: "{component}" is neither "model" nor "loss"'
                )


@dataclass(frozen=True)
class Parallelized:
    parts: list[Model]  # the pieces of the model that this rank holds
    forward_backward: Callable[
        [Tensor, Tensor], Tensor
    ]  # inputs, labels [B, T] -> loss sum, detached; gradients are added
    evaluate: Callable[[Tensor, Tensor], Tensor]  # the same without gradients


def parallelize(
    model: Model,
    mesh: DeviceMesh,
    loss: LossFunction,
    *,
    precision: Precision,
    reshard_after_forward: Literal["default", "always", "never"],
    compile: CompileConfig,
    device: torch.device,
    seed: int,
) -> Parallelized:
    """Takes a model built on the meta device; afterwards its parameters are this rank's shards, initialised."""
    if compile.enable and "model" in compile.components:
        for block in model.layers.values():
            block.compile(backend=compile.backend, fullgraph=True)  # in place: names stay as they are
    if compile.enable and "loss" in compile.components:
        loss = torch.compile(loss, backend=compile.backend)
    # Here and not above: it takes half as long to import as torch, and checking the settings needs none of it.
    from parallelisms.fsdp import apply_fsdp

    model.to(precision.master)
    apply_fsdp(
        model,
        mesh,
        param_dtype=precision.compute,
        reduce_dtype=precision.reduce,
        reshard_after_forward=reshard_after_forward,
    )
    model.to_empty(device=device)
    model.init_weights(seed)

    def forward_backward(inputs: Tensor, labels: Tensor) -> Tensor:
        loss_sum = loss(model(inputs), labels)
        loss_sum.backward()
        return loss_sum.detach()

    @torch.no_grad()
    def evaluate(inputs: Tensor, labels: Tensor) -> Tensor:
        return loss(model(inputs), labels)

    return Parallelized([model], forward_backward, evaluate)
