"""FSDP2: parameters, gradients and optimizer state sharded over dp_shard, bf16 compute over fp32 shards.

It is applied with one rank too: it is then the mixed-precision wrapper (one cast of the weights per step), and every tensor of
every run is a DTensor, so checkpoints and clipping know one case only.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from models.contract import Model
from parallelisms.mesh import DP_SHARD


def apply_fsdp(
    model: Model,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: str,
) -> None:
    """Communication groups: the embedding, each block, [norm + output], and the root for what is left.

    Gradients come out as the plain sum over ranks: no division here, whoever commits the step divides once, by the global count of
    valid tokens.
    """
    mesh = mesh[DP_SHARD]
    several = mesh.size() > 1
    # inputs stay as they are: the embedding's output has the compute dtype already, and freqs_cis must keep fp32
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    reshard = {"default": several, "always": True, "never": False}[reshard_after_forward]
    for group in communication_groups(model):
        # the last group is needed again as soon as the backward starts
        is_last = model.output is not None and model.output in group
        fully_shard(
            group,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard and (not is_last or reshard_after_forward == "always"),
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _sum_only(module)


def communication_groups(model: Model) -> Iterable[list[nn.Module]]:
    """The modules whose parameters travel together, in the order of the forward pass; the root takes what is in none."""
    if model.tok_embeddings is not None:
        yield [model.tok_embeddings]
    for block in model.layers.values():
        yield [block]
    if head := [m for m in (model.norm, model.output) if m is not None]:
        yield head


def _sum_only(module: FSDPModule) -> None:
    """SUM without a factor. A factor of 1 alone would select PREMUL_SUM, which gloo refuses."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
