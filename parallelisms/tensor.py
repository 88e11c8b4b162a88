"""Tensor parallelism: the matrices of a block are sharded over ranks, and the sequence between blocks (Shoeybi et al. 2019, arXiv
1909.08053; Korthikanti et al. 2022, arXiv 2205.05198). The model's `tp_plan` maps module names to kinds of sharding; `*` matches one
component of a dotted name.

    kind        parameters                              inputs                              outputs
    embedding   nn.Embedding, sharded by rows           all tokens                          this rank's tokens [B, T/tp, C]
    sequence    replicated, such as a norm's            this rank's tokens                  this rank's tokens
    heads       replicated, such as a query norm's      this rank's heads [B, T, H/tp, D]   this rank's heads
    gather      none of its own                         this rank's tokens                  that of its last child, such as a `row`
    column      nn.Linear, sharded by output features   all tokens, from a `gather`         all tokens, this rank's features
    row         nn.Linear, sharded by input features    all tokens, this rank's features    this rank's tokens
    local       replicated; a plain tensor in use       this rank's tokens                  this rank's tokens
    head        Head, sharded by rows                   this rank's tokens, all labels      the loss: parallelisms/loss.py

Parameters become DTensors on the tp axis; FSDP adds its axes later. Modules exchange plain tensors, so attention and gate run as on one
process, on some of the heads and features."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models.contract import Experts, Head, Model, shared_parameters
from parallelisms.fsdp import shard_dim
from parallelisms.mesh import ParallelDims


class _Embedding(RowwiseParallel):
    """torch's style, but waits for the output: a compiled block silently loses the gradient of an asynchronous tensor (torch 2.13). It
    clones the output, since FSDP, which registers a hook on it, warns about views."""

    @staticmethod
    def _prepare_output_fn(layouts: Any, _local: Any, _module: Any, outputs: Any, _mesh: Any) -> Tensor:
        return outputs.redistribute(placements=layouts).to_local().clone()


class _Gather(ParallelStyle):
    """Redistributes the first argument from [Shard(1)] to [Replicate()]. It stays a DTensor, which sums the gradients of all uses."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: (_all_tokens(args[0], device_mesh), *args[1:]))
        return module


class _Local(ParallelStyle):
    """Replicates the parameters. The module computes on plain tensors, and takes its parameters by DTensor.to_local."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            replicated = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(replicated))
        return module


class _Head(ParallelStyle):
    """Shards the weight as [Shard(0)], and gathers the hidden state from [Shard(1)] to a plain tensor of all tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded))

        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return _all_tokens(args[0], device_mesh).to_local(grad_placements=[Partial()]), *args[1:]

        module.register_forward_pre_hook(gather)
        return module


def _all_tokens(x: Tensor, mesh: DeviceMesh) -> DTensor:  # [B, T/tp, C] -> [B, T, C]
    return DTensor.from_local(x, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])


# kind -> (style, module type, sharded dim of its weight)
_KINDS: dict[str, tuple[ParallelStyle, type[nn.Module], int | None]] = {
    "embedding": (_Embedding(input_layouts=Replicate(), output_layouts=Shard(1)), nn.Embedding, 0),
    "sequence": (SequenceParallel(sequence_dim=1, use_local_output=True), nn.Module, None),
    "heads": (SequenceParallel(sequence_dim=2, use_local_output=True), nn.Module, None),
    "gather": (_Gather(), nn.Module, None),
    "column": (ColwiseParallel(), nn.Linear, 0),
    "row": (RowwiseParallel(output_layouts=Shard(1)), nn.Linear, 1),
    "local": (_Local(), nn.Module, None),
    "head": (_Head(), Head, 0),
}


def apply_tensor_parallel(part: Model, mesh: DeviceMesh, *, overlap: bool) -> None:
    """Shards the modules of `part`, a model or pipeline stage on the meta device, over the tp axis `mesh`. `overlap`: the compiler may fuse
    matmuls with adjacent collectives (Wang et al. 2023, doi 10.1145/3567955.3567959); raises RuntimeError without peer access."""
    for name, module in list(part.named_modules()):
        for _, kind in _entries(part, name):
            style, _, _ = _KINDS[kind]
            parallelize_module(module, mesh, style, src_data_rank=None)  # meta tensors have no values to broadcast
    missing = [
        name
        for name, module in part.named_modules()
        for parameter in module.parameters(recurse=False)
        if not isinstance(parameter, DTensor) and not isinstance(module, Experts)
    ]
    assert not missing, f"check_plan() rejects a plan without {missing}"
    if not overlap:
        return
    from torch._inductor import config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    own, cuda = torch.cuda.current_device(), torch.cuda
    others = [d for d in range(cuda.device_count()) if d != own and not cuda.can_device_access_peer(own, d)]
    if others:
        raise RuntimeError(
            f"parallelism.enable_async_tensor_parallel: device {own} has no peer access to devices {others}; it requires NVLink"
        )
    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def check_plan(model: Model, degrees: ParallelDims) -> None:
    """Raises ValueError if the plan of a whole `model` misses a module or has an unused entry, or a parameter cannot be sharded evenly."""
    cause = f"parallelism.tensor_parallel_degree = {degrees.tp}: "
    plan = f"the tp_plan of {type(model).__module__} "
    unused = set(model.tp_plan)
    if type(model).tie_weights is Model.tie_weights:
        for one, other in shared_parameters(model):
            raise ValueError(
                f"{cause}{one} is {other}, and would be a parameter of its own: tie_weights must join them again"
            )
    for name, module in model.named_modules():
        entries, parameters = _entries(model, name), dict(module.named_parameters(recurse=False))
        unused.difference_update(pattern for pattern, _ in entries)
        if len(entries) > 1:
            raise ValueError(f"{cause}{plan}has several entries for {name}: {', '.join(p for p, _ in entries)}")
        if not entries:
            if parameters and not isinstance(module, Experts):  # parallelisms/expert.py
                raise ValueError(
                    f"{cause}{plan}has no entry for {name} ({type(module).__name__}); kinds: {', '.join(_KINDS)}"
                )
            continue
        [(pattern, kind)] = entries
        if kind not in _KINDS:
            raise ValueError(f'{cause}{plan}has kind "{kind}" for {pattern}; kinds: {", ".join(_KINDS)}')
        _, wanted, dim = _KINDS[kind]
        if not isinstance(module, wanted) or (kind == "gather" and parameters):
            raise ValueError(f'{cause}{plan}has kind "{kind}" for {pattern}, not legal for {type(module).__name__}')
        for leaf, parameter in parameters.items():
            if dim is None or dim >= parameter.ndim:  # the bias of a "row" is replicated
                continue
            tp, shards, shape = degrees.tp, degrees.dp_shard * degrees.cp, parameter.shape
            subject = f"{cause}{name}.{leaf} {list(shape)} "
            if -(-shape[dim] // tp) * (tp - 1) >= shape[dim]:
                raise ValueError(f"{subject}is too small for a shard on every rank")
            if dim == 0 and shard_dim(shape, tp=tp, shards=shards) is None:
                raise ValueError(
                    f"{subject}has neither rows divisible by {tp} ranks nor columns divisible by {shards} shards; nearest: rows in "
                    f"multiples of {tp}, or parallelism.data_parallel_replicate_degree = {degrees.dp_shard} in place of shards"
                )
    if unused:
        raise ValueError(f"{cause}{plan}has entries that match no module: {', '.join(sorted(unused))}")


def _entries(model: Model, name: str) -> list[tuple[str, str]]:
    """Returns the (pattern, kind) entries of the plan that match the module name."""
    parts = name.split(".")
    return [
        (pattern, kind)
        for pattern, kind in model.tp_plan.items()
        if pattern.count(".") == name.count(".") and all(map(fnmatchcase, parts, pattern.split(".")))
    ]
