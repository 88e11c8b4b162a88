"""How a model runs: the settings that parallelize reads, and the loss that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor

from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.float8 import Float8Config
from parallelisms.mesh import ParallelismConfig
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
class Layout:
    """How a model runs. Whatever is in here, it computes the same, up to the rounding of the dtypes."""

    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    precision: Precision = field(default_factory=Precision)
    cpu_offload: bool = False  # parameters and optimizer state in host memory
    loss_chunk_tokens: int = 0  # tokens whose logits exist at once; 0: all
