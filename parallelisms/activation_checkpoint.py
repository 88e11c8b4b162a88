"""Activation checkpointing: activations are recomputed in the backward instead of being kept.

parallelize() applies it before compilation and sharding. It replaces a block's forward instead of wrapping the module: names do not change,
and FSDP's hooks around the block gather its weights once for both backward and recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models import ops
from models.contract import Model, has_experts

_ATEN = torch.ops.aten
MATMULS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN._scaled_mm.default}  # of activations with weights
KEPT = {
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    ops.cpu_kernels.CPU_ATTENTION,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    _ATEN.max.default,  # for the scales of float8
}


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """[activation_checkpoint]: recomputation of activations, which saves memory and costs time."""

    mode: Annotated[
        Literal["none", "full", "selective", "memory_budget"],
        "none: keep all activations; full: keep the input of each block; selective: see selective_ac_option; memory_budget: "
        "the compiler chooses",
    ] = "none"
    selective_ac_option: Annotated[
        str,
        'n: recompute every n-th block; "op": in each block, recompute all but attention and every second matmul (a mixture of '
        "experts as a whole)",
    ] = "2"
    memory_budget: Annotated[
        float, "share of the activations that may be kept; requires compile.enable", ">= 0", "<= 1"
    ] = 0.5

    def check(self) -> None:
        option = self.selective_ac_option
        if option != "op" and not (option.isascii() and option.isdigit() and int(option) > 0):
            raise ValueError(
                f'activation_checkpoint.selective_ac_option = "{option}": must be "op" or a number >= 1 as a string; nearest: "1"'
            )


def check_blocks(config: ActivationCheckpointConfig, blocks: int) -> None:
    """Raises ValueError if the whole model has fewer than n blocks, so that "every n-th block" is none."""
    option = config.selective_ac_option
    if config.mode == "selective" and option != "op" and int(option) > blocks:
        raise ValueError(
            f'activation_checkpoint.selective_ac_option = "{option}": of the model\'s {blocks} blocks none would be recomputed; '
            f'nearest: "{blocks}", or activation_checkpoint.mode = "none"'
        )


def apply_activation_checkpoint(part: Model, config: ActivationCheckpointConfig) -> None:
    """Replaces the forward of blocks; gradients do not change. Pipeline stages choose the same blocks as the whole model, by name."""
    if config.mode == "none":
        return
    if config.mode == "memory_budget":
        import torch._functorch.config as compiler

        compiler.activation_memory_budget = config.memory_budget
        return
    by_operation = config.mode == "selective" and config.selective_ac_option == "op"
    every = int(config.selective_ac_option) if config.mode == "selective" and not by_operation else 1
    options: dict[str, Any] = {"context_fn": _keep_expensive_results} if by_operation else {}
    for name, block in part.layers.items():
        if (int(name) + 1) % every:
            continue
        # With "op", torch (2.13) counts all operations, also those of FSDP's gather of the experts inside the block, which differ between
        # forward and recomputation: so a child with experts is recomputed as a whole.
        recomputed = [block]
        if options and has_experts(block):
            recomputed = [child for child in block.children() if list(child.children())]
        for module in recomputed:
            chosen = {} if has_experts(module) else options
            module.forward = _with_checkpointing(module.forward, chosen)


def _with_checkpointing(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    # a Python function, not a functools.partial: torch.compile compiles Python frames
    def with_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # no recomputation; and a block that appends to a cache cannot be traced
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return with_checkpoint


def _keep_expensive_results() -> tuple[Any, Any]:
    """Returns the contexts of a block's forward and recomputation. Kept are every second matmul (all would need about as much memory as no
    checkpointing), attention and collectives that shrink tensors; the rest is recomputed."""
    matmuls = {False: count(), True: count()}  # some versions of torch call the policy in the recomputation again

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = next(matmuls[context.is_recompute]) % 2 == 1 if operation in MATMULS else operation in KEPT
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
