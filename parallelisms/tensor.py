"""Tensor parallelism: the matrices of a block sharded over ranks, and between them the sequence (Shoeybi et al. 2019, arXiv 1909.08053;
Korthikanti et al. 2022, arXiv 2205.05198). How each module is sharded is data beside the model: its `tp_plan` of name -> kind, where
`*` stands for one part of a dotted name.

    kind        its parameters                          it is called with               it returns
    embedding   nn.Embedding: each rank has some rows   all tokens                      this rank's tokens [B, T/tp, C]
    sequence    whole on every rank, such as a norm's   this rank's tokens              this rank's tokens
    gather      none of its own                         this rank's tokens              whatever its children make of all tokens
    column      nn.Linear: some of the output features  all tokens, from a `gather`     all tokens, this rank's features
    row         nn.Linear: some of the input features   all tokens, this rank's features    this rank's tokens
    head        Head: each rank has some rows           this rank's tokens, labels of all   the loss: parallelisms/loss.py

Parameters become DTensors on the tp axis; FSDP adds its own axes later. Plain tensors go from a module to the next, so attention and gate
run as on one process, on some of the heads and features."""

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

from models.contract import Head, Model
from parallelisms.fsdp import shard_dim
from parallelisms.mesh import ParallelDims


class _Embedding(RowwiseParallel):
    """As torch's, but waits for its output: a compiled block silently loses the gradient of a tensor that is still in flight (torch 2.13).
    And returns no view, for FSDP, which registers a hook on it, would warn."""

    @staticmethod
    def _prepare_output_fn(layouts: Any, _local: Any, _module: Any, outputs: Any, _mesh: Any) -> Tensor:
        return outputs.redistribute(placements=layouts).to_local().clone()


class _Gather(ParallelStyle):
    """The first argument arrives as [Shard(1)] and is seen as [Replicate()], still a DTensor: so the matmuls of the children know
    that their gradients are terms of a sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: (_all_tokens(args[0], device_mesh), *args[1:]))
        return module


class _Head(ParallelStyle):
    """The hidden state arrives as [Shard(1)]; the loss is given all tokens as a plain tensor, and the weight as [Shard(0)]."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut))

        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return _all_tokens(args[0], device_mesh).to_local(grad_placements=[Partial()]), *args[1:]

        module.register_forward_pre_hook(gather)
        return module


def _all_tokens(x: Tensor, mesh: DeviceMesh) -> DTensor:  # [B, T/tp, C] -> [B, T, C]
    return DTensor.from_local(x, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])


# kind -> the style, what may be of it, and which dim of its weight is cut
_KINDS: dict[str, tuple[ParallelStyle, type[nn.Module], int | None]] = {
    "embedding": (_Embedding(input_layouts=Replicate(), output_layouts=Shard(1)), nn.Embedding, 0),
    "sequence": (SequenceParallel(sequence_dim=1, use_local_output=True), nn.Module, None),
    "gather": (_Gather(), nn.Module, None),
    "column": (ColwiseParallel(), nn.Linear, 0),
    "row": (RowwiseParallel(output_layouts=Shard(1)), nn.Linear, 1),
    "head": (_Head(), Head, 0),
}


def apply_tensor_parallel(part: Model, mesh: DeviceMesh, *, overlap: bool) -> None:
    """Cuts the modules of `part`, a model or a stage of one on the meta device, over the tp axis `mesh`. `overlap`: the compiler may fuse
    matmuls with the collectives beside them (async tensor parallelism, Wang et al. 2023, doi 10.1145/3567955.3567959); RuntimeError where
    the devices cannot reach each other's memory."""
    for name, module in list(part.named_modules()):
        for _, kind in _entries(part, name):
            style, _, _ = _KINDS[kind]
            parallelize_module(module, mesh, style, src_data_rank=None)  # meta: there are no values to send around
    forgotten = [name for name, parameter in part.named_parameters() if not isinstance(parameter, DTensor)]
    assert not forgotten, f"check_plan refuses a plan that leaves out {forgotten}"
    if not overlap:
        return
    from torch._inductor import config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    here, cuda = torch.cuda.current_device(), torch.cuda
    apart = [d for d in range(cuda.device_count()) if d != here and not cuda.can_device_access_peer(here, d)]
    if apart:
        raise RuntimeError(
            f"parallelism.enable_async_tensor_parallel: device {here} cannot reach the memory of devices {apart}; it needs NVLink"
        )
    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def check_plan(model: Model, degrees: ParallelDims) -> None:
    """Raises ValueError where the plan of a whole `model` forgets a module or has an idle entry, or a parameter cannot be cut so often."""
    cause = f"parallelism.tensor_parallel_degree = {degrees.tp}: "
    plan = f"the TP_PLAN of {type(model).__module__} "
    unused = set(model.tp_plan)
    for name, module in model.named_modules():
        entries, parameters = _entries(model, name), dict(module.named_parameters(recurse=False))
        unused.difference_update(pattern for pattern, _ in entries)
        if len(entries) > 1:
            raise ValueError(f"{cause}{plan}has several entries for {name}: {', '.join(p for p, _ in entries)}")
        if not entries:
            if parameters:
                raise ValueError(
                    f"{cause}{plan}has no entry for {name} ({type(module).__name__}); kinds: {', '.join(_KINDS)}"
                )
            continue
        [(pattern, kind)] = entries
        if kind not in _KINDS:
            raise ValueError(f'{cause}{plan}says "{kind}" of {pattern}; kinds: {", ".join(_KINDS)}')
        _, wanted, dim = _KINDS[kind]
        if not isinstance(module, wanted) or (kind == "gather" and parameters):
            raise ValueError(f'{cause}{plan}says "{kind}" of {pattern}, which is no kind for a {type(module).__name__}')
        for leaf, parameter in parameters.items():
            if dim is None or dim >= parameter.ndim:  # the bias of a "row" stays whole
                continue
            tp, shards, shape = degrees.tp, degrees.dp_shard * degrees.cp, parameter.shape
            place = f"{cause}{name}.{leaf} {list(shape)} "
            if -(-shape[dim] // tp) * (tp - 1) >= shape[dim]:
                raise ValueError(f"{place}is too small to give every rank a part")
            if dim == 0 and shard_dim(shape, tp=tp, shards=shards) is None:
                raise ValueError(
                    f"{place}has neither rows that {tp} ranks can share evenly nor columns that {shards} shards can; nearest: rows in "
                    f"multiples of {tp}, or parallelism.data_parallel_replicate_degree = {degrees.dp_shard} in place of shards"
                )
    if unused:
        raise ValueError(f"{cause}{plan}has entries that match no module: {', '.join(sorted(unused))}")


def _entries(model: Model, name: str) -> list[tuple[str, str]]:
    """(pattern, kind) of the plan for the module of that name."""
    parts = name.split(".")
    return [
        (pattern, kind)
        for pattern, kind in model.tp_plan.items()
        if pattern.count(".") == name.count(".") and all(map(fnmatchcase, parts, pattern.split(".")))
    ]
