"""Settings of parallelize(): parallelism, compilation, dtypes, activation checkpointing; the type of the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.device import Device
from parallelisms.float8 import Float8Config
from parallelisms.mesh import ParallelismConfig

# Logits [B, T, V], labels [B, T] -> sum over valid tokens, fp32. It may have a method `vocab_parallel` as CrossEntropySum of
# training/loss.py has, which computes from shards of the vocabulary; without it parallelisms/loss.py gathers the logits.
LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class CompileConfig:
    """[compile]: compilation of each block and of the loss by torch.compile."""

    enable: Annotated[bool, "compile; needs a C++ compiler on a CPU, Triton on a GPU"] = False
    components: Annotated[tuple[str, ...], "compiled components: model (block by block), loss"] = ("model", "loss")
    backend: Annotated[str, "backend of torch.compile"] = "inductor"

    def check(self) -> None:
        for component in self.components:
            if component not in ("model", "loss"):
                raise ValueError(
                    f'compile.components = {list(self.components)}: "{component}" is neither "model" nor "loss"'
                )


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run, the same for every layout."""

    master: torch.dtype = torch.float32  # the parameters that the optimizer updates, and its state
    compute: torch.dtype = torch.float32  # weights and activations in forward and backward
    # reduction of gradients over ranks; FSDP accumulates the gradients of several passes in the master dtype
    reduce: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtypes = self.master, self.compute, self.reduce
        master, compute, reduce = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return (
            f"master weights and optimizer {master}; forward and backward {compute}; norms, softmax and loss float32; "
            f"gradients reduced over data- and context-parallel ranks in {reduce}"
        )


def choose_precision(master: str, compute: str, reduce: str, device: Device) -> Precision:
    """Resolves names as in [training]; `compute` "auto" is bfloat16 if the matmuls of `device` are faster in it, else float32."""
    if compute == "auto":
        compute = "bfloat16" if device.fast_bfloat16() else "float32"
    return Precision(getattr(torch, master), getattr(torch, compute), getattr(torch, reduce))


@dataclass(frozen=True)
class ExecutionConfig:
    """Settings of parallelize(). precision and float8 choose the dtypes; all others change at most roundings and their order."""

    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    precision: Precision = field(default_factory=Precision)
    cpu_offload: bool = False  # keep parameters and optimizer state in host memory
    loss_chunk_tokens: int = 0  # tokens per chunk of the loss; 0: no chunks
