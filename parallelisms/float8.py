"""float8: matmuls of linear layers in 8-bit floats by torchao (the extra `float8`), for CUDA devices that support them.

parallelize() applies it before sharding. Parameters, optimizer, the head and the operations between matmuls keep their dtype."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Annotated, Literal

from torch import nn

from models.contract import Model, Router
from parallelisms.device import cuda_capability

CAPABILITY = (8, 9)  # Ada; the first compute capability with float8 matmuls
MULTIPLE = 16  # float8 kernels need sizes that are multiples of it, which torch._scaled_mm checks


@dataclass(frozen=True)
class Float8Config:
    """[float8]: linear layers in 8-bit floats."""

    enable: Annotated[
        bool,
        "float8 matmuls of the linear layers whose sizes are multiples of 16, not of the head, routers and experts; requires torchao "
        "and CUDA compute capability >= 8.9",
    ] = False
    recipe_name: Annotated[
        Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"],
        "granularity of the scales; gw_hp: gradients of weights in high precision",
    ] = "tensorwise"
    filter_fqns: Annotated[tuple[str, ...], "layers whose name contains one of these are not converted"] = ()
    enable_fsdp_float8_all_gather: Annotated[bool, "all-gather weights in float8; tensorwise only"] = False
    precompute_float8_dynamic_scale_for_fsdp: Annotated[
        bool, "one all-reduce for the scales of all weights; with enable_fsdp_float8_all_gather"
    ] = False
    emulate: Annotated[bool, "emulate the rounding on any device, slowly, for tests"] = False

    def check(self) -> None:
        if self.enable_fsdp_float8_all_gather and self.recipe_name != "tensorwise":
            raise ValueError(
                f'float8.enable_fsdp_float8_all_gather = true: float8.recipe_name = "{self.recipe_name}" is not supported; '
                'nearest: false, or float8.recipe_name = "tensorwise"'
            )
        if self.precompute_float8_dynamic_scale_for_fsdp and not self.enable_fsdp_float8_all_gather:
            raise ValueError(
                "float8.precompute_float8_dynamic_scale_for_fsdp = true: needs float8.enable_fsdp_float8_all_gather; set it to false"
            )
        if not self.enable:
            return
        capability, reason = cuda_capability(), ""
        if find_spec("torchao") is None:
            reason = (
                f'needs the package torchao, which is not installed: {sys.executable} -m pip install -e ".[float8]"'
            )
        elif not self.emulate and capability < CAPABILITY:
            minimum, own = (".".join(map(str, version)) for version in (CAPABILITY, capability))
            has = f"its compute capability is {own}" if any(capability) else "there is none here"
            reason = f"needs a CUDA device of compute capability {minimum} or more, {has}"
        if reason:
            raise ValueError(f"float8.enable = true: {reason}; set it to false")


def layers_to_convert(model: nn.Module, filter_fqns: tuple[str, ...]) -> list[str]:
    """Returns the names of the linear layers whose sizes the kernels support, except filtered ones, routers' and the head, a subclass."""
    named = list(model.named_modules(remove_duplicate=False))
    routers = tuple(f"{name}." for name, module in named if isinstance(module, Router))
    return [
        name
        for name, module in named
        if type(module) is nn.Linear
        and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
        and not name.startswith(routers)
        and not any(word in name for word in filter_fqns)
    ]


def check_float8(model: nn.Module, config: Float8Config) -> None:
    """Raises ValueError if no layer of a whole `model` would be converted, and for a filter that is in no name, such as a typo."""
    if not config.enable:
        return
    layers = layers_to_convert(model, ())
    if not layers:
        raise ValueError(
            f"float8.enable = true: {type(model).__name__} has no linear layer whose sizes are multiples of {MULTIPLE}; set it to false"
        )
    for index, word in enumerate(config.filter_fqns):
        if not any(word in name for name, _ in model.named_modules()):
            kinds = sorted({".".join("*" if part.isdigit() else part for part in name.split(".")) for name in layers})
            [near] = get_close_matches(word, sorted({part for name in layers for part in name.split(".")}), 1, 0)
            raise ValueError(
                f'float8.filter_fqns[{index}] = "{word}": no name contains it; the names are {", ".join(kinds)}; nearest: "{near}"'
            )
    if not layers_to_convert(model, config.filter_fqns):
        raise ValueError(
            "float8.filter_fqns: no layer is left to convert; remove some, or nearest: float8.enable = false"
        )


def apply_float8(part: Model, config: Float8Config) -> None:
    """Converts the linear layers whose sizes the kernels support, except the head; names do not change."""
    if not config.enable:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    names = set(layers_to_convert(part, config.filter_fqns))
    recipe = replace(
        Float8LinearConfig.from_recipe_name(config.recipe_name),
        enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
        emulate=config.emulate,
    )
    convert_to_float8_training(part, config=recipe, module_filter_fn=lambda _, name: name in names)
    if config.precompute_float8_dynamic_scale_for_fsdp:
        part.register_forward_pre_hook(lambda part, _: precompute_float8_dynamic_scale_for_fsdp(part))
