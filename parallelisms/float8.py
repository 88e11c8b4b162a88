"""float8: the matmuls of linear layers in 8-bit floats, by torchao (the extra `float8`). For CUDA devices that multiply them.

parallelize() applies it before any sharding. Parameters, optimizer, the head and all between the matmuls keep their dtype."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Annotated, Literal

from torch import nn

from models.contract import Model
from parallelisms.device import cuda_capability

CAPABILITY = (8, 9)  # Ada and Hopper: the first whose matrix units take float8


@dataclass(frozen=True)
class Float8Config:
    """[float8]: linear layers in 8-bit floats."""

    enable: Annotated[bool, "needs torchao and a CUDA device of compute capability 8.9"] = False
    recipe_name: Annotated[
        Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"],
        "what shares a scale: a tensor, or a row; gw_hp: gradients of weights in high precision",
    ] = "tensorwise"
    filter_fqns: Annotated[tuple[str, ...], "parts of names: layers whose name has one stay as they are"] = ()
    enable_fsdp_float8_all_gather: Annotated[bool, "weights travel in float8; for tensorwise"] = False
    precompute_float8_dynamic_scale_for_fsdp: Annotated[
        bool, "one collective for the scales of all weights; for enable_fsdp_float8_all_gather"
    ] = False
    emulate: Annotated[bool, "the roundings without the hardware, slowly, for tests; on any device"] = False

    def check(self) -> None:
        if self.enable_fsdp_float8_all_gather and self.recipe_name != "tensorwise":
            raise ValueError(
                f'float8.enable_fsdp_float8_all_gather = true: float8.recipe_name = "{self.recipe_name}" has no scale before rows '
                "are gathered; set it to false"
            )
        if self.precompute_float8_dynamic_scale_for_fsdp and not self.enable_fsdp_float8_all_gather:
            raise ValueError(
                "float8.precompute_float8_dynamic_scale_for_fsdp = true: is for float8.enable_fsdp_float8_all_gather; set it to false"
            )
        if not self.enable:
            return
        capability, reason = cuda_capability(), ""
        if find_spec("torchao") is None:
            reason = f'needs the package torchao, which is not installed: {sys.executable} -m pip install ".[float8]"'
        elif not self.emulate and capability < CAPABILITY:
            least, own = (".".join(map(str, version)) for version in (CAPABILITY, capability))
            has = f"its compute capability is {own}" if any(capability) else "there is none here"
            reason = f"needs a CUDA device of compute capability {least} or more, {has}"
        if reason:
            raise ValueError(f"float8.enable = true: {reason}; set it to false")


def apply_float8(part: Model, config: Float8Config) -> None:
    """Swaps the linear layers of the blocks whose sizes the kernels take (multiples of 16); names stay."""
    if not config.enable:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    def swaps(module: nn.Module, name: str) -> bool:
        fits = type(module) is nn.Linear and module.in_features % 16 == module.out_features % 16 == 0
        return fits and not any(word in name for word in config.filter_fqns)

    recipe = replace(
        Float8LinearConfig.from_recipe_name(config.recipe_name),
        enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
        emulate=config.emulate,
    )
    convert_to_float8_training(part, config=recipe, module_filter_fn=swaps)
    if config.precompute_float8_dynamic_scale_for_fsdp:
        part.register_forward_pre_hook(lambda part, _: precompute_float8_dynamic_scale_for_fsdp(part))
