"""Applies the parallel techniques to a model, in this order: pipeline split, loss, float8, tensor, expert and context parallel, activation
checkpointing, compile, master dtype, FSDP, materialisation, initial values.

A transform without a mesh axis, such as float8, is a call in parallelize(): before tensor parallelism it sees whole parameters, later
DTensors; what it writes into them before to_empty is lost. Its settings are a field of ExecutionConfig.

A technique with a mesh axis of its own also needs
- in mesh.py the axis in AXES, its size in ParallelDims, this rank's place in `coordinate` and MeshCoordinate, its degree in
  ParallelismConfig and `degrees`, and a place in `data_parallel_mesh`, if its ranks have different tokens;
- checks in configs/check.py;
- nothing in training/optimizer.py, if its parameters become DTensors on the axis: gradient_norm reads their placements;
- the prediction in tools/explain;
- layouts in bench/parity.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.contract import Model, has_experts, no_loss_error, set_dtype
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.execution import ExecutionConfig, LossFunction
from parallelisms.float8 import apply_float8
from parallelisms.mesh import CP, PP, TP, expert_mesh

if TYPE_CHECKING:
    from parallelisms.pipeline import Pipeline

Parallelized: TypeAlias = "NoPipeline | Pipeline"  # the training loop uses the methods of NoPipeline


def parallelize(
    model: Model,
    mesh: DeviceMesh,
    loss: LossFunction,
    execution: ExecutionConfig,
    *,
    local_batch_size: int,
    seq_len: int,
    device: torch.device,
    seed: int,
) -> Parallelized:
    """Parallelizes a model built on the meta device, in place, or, with a pipeline, copies of it; the parameters become this rank's shards,
    initialised from `seed`."""
    # Imported here, since it takes half as long as importing torch, and checking a configuration does not need it.
    from parallelisms.context import apply_context_parallel
    from parallelisms.expert import apply_expert_parallel
    from parallelisms.fsdp import alias_unsharded_to_sharded, apply_fsdp
    from parallelisms.loss import head_loss
    from parallelisms.pipeline import Pipeline, split
    from parallelisms.tensor import apply_tensor_parallel

    config, compile = execution.parallelism, execution.compile
    experts_mesh = expert_mesh(mesh, config.expert_parallel_degree) if has_experts(model) else None
    parts = split(model, mesh[PP].get_local_rank(), config) if mesh[PP].size() > 1 else [model]
    shard_sequence: Callable[[Tensor], Tensor] = nn.Identity()  # without context parallelism
    for part in parts:
        if part.output is not None:
            loss_parallel = not config.disable_loss_parallel
            part.output.loss = head_loss(
                loss, chunk_tokens=execution.loss_chunk_tokens, loss_parallel=loss_parallel, compile=compile
            )
        apply_float8(part, execution.float8)
        frozen = [name for name, parameter in part.named_parameters() if not parameter.requires_grad]
        if mesh[TP].size() > 1:
            apply_tensor_parallel(part, mesh[TP], overlap=config.enable_async_tensor_parallel)
            part.tie_weights()
        if experts_mesh is not None:
            apply_expert_parallel(part, mesh, experts_mesh)
        for name in frozen:  # TP and EP, torch's styles too, replace parameters by new ones
            part.get_parameter(name).requires_grad_(False)
        if mesh[CP].size() > 1:
            shard_sequence = apply_context_parallel(part, mesh[CP], config, seq_len=seq_len)
        apply_activation_checkpoint(part, execution.activation_checkpoint)
        if compile.enable and "model" in compile.components:
            for block in part.layers.values():
                # in place, so that names do not change; the sizes of the messages between experts are only known as the block runs
                block.compile(backend=compile.backend, fullgraph=not has_experts(block))
        set_dtype(part, execution.precision.master)
        apply_fsdp(part, mesh, experts_mesh, config, precision=execution.precision, cpu_offload=execution.cpu_offload)
        part.to_empty(device=torch.device("cpu") if execution.cpu_offload else device)
        alias_unsharded_to_sharded(part)
        part.checked_init_weights(seed)
        for buffer in part.buffers():  # only parameters are offloaded
            buffer.data = buffer.data.to(device)
    reports_loss = mesh[TP].get_local_rank() == 0  # tensor-parallel ranks compute the same loss
    if mesh[PP].size() > 1:
        return Pipeline(
            parts,
            mesh[PP],
            config,
            shard_sequence,
            reports_loss=reports_loss,
            local_batch_size=local_batch_size,
            hidden_tokens=seq_len // (mesh[CP].size() * mesh[TP].size()),
            dtype=execution.precision.compute,
            device=device,
        )
    return NoPipeline(parts, shard_sequence, reports_loss=reports_loss)


class NoPipeline:
    """A model without a pipeline: every rank holds all layers."""

    def __init__(self, parts: list[Model], shard_sequence: Callable[[Tensor], Tensor], *, reports_loss: bool) -> None:
        """`parts`: the model on this rank. `shard_sequence`: selects this rank's tokens of [B, T]. Without `reports_loss` the loss is 0."""
        self.parts, self.reports_loss, self._shard_sequence = parts, reports_loss, shard_sequence

    def forward_backward(self, inputs: Tensor, labels: Tensor, document_starts: Tensor | None = None) -> Tensor:
        """Runs forward and backward on tokens and labels [B, T] of this rank's sequences, adding to gradients. Returns this rank's term of
        the loss sum; the terms of all ranks add up to it. document_starts [B, T]: see models.contract.Model.forward. Raises ModelFault."""
        [model] = self.parts
        more = {} if document_starts is None else {"document_starts": self._shard_sequence(document_starts)}
        loss_sum = model(self._shard_sequence(inputs), labels=self._shard_sequence(labels), **more)
        if loss_sum.ndim:
            raise no_loss_error(loss_sum)
        loss_sum.backward()
        return loss_sum.detach() if self.reports_loss else torch.zeros_like(loss_sum)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor, document_starts: Tensor | None = None) -> Tensor:
        """Returns this rank's term of the loss sum, as forward_backward does, without gradients and in eval mode (without dropout)."""
        [model] = self.parts
        more = {} if document_starts is None else {"document_starts": self._shard_sequence(document_starts)}
        model.eval()
        loss_sum = model(self._shard_sequence(inputs), labels=self._shard_sequence(labels), **more)
        model.train()
        return loss_sum if self.reports_loss else torch.zeros_like(loss_sum)
