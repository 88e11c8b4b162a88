"""Pipeline parallelism: layers are divided into stages on several ranks, through which microbatches pass.

`split` returns the stages of this rank; after all other parallel techniques (parallelisms/parallelize.py), `Pipeline` runs the schedule's
table (parallelisms/pipeline_schedule.py) on them by torch.distributed.pipelining. The head, in the last stage, computes the loss, so that
only hidden states [B, T, C] and their gradients are sent, in the compute dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed import P2POp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
)
from torch.torch_version import TorchVersion

from models.contract import Model, no_loss_error
from parallelisms.mesh import ParallelismConfig
from parallelisms.pipeline_plan import placement, schedule_of, stage_modules
from parallelisms.pipeline_schedule import Action, Table, cell_text, table


def split(model: Model, pp_rank: int, config: ParallelismConfig) -> list[Model]:
    """Returns the stages of a pipeline rank, in the order of the layers: copies of `model` (on the meta device, without memory) with some
    modules, under their names in the whole model."""
    modules = stage_modules(config, list(model.layers))
    stages = []
    for stage in placement(config, len(modules))[pp_rank]:
        part = copy.deepcopy(model)
        for name in list(part.layers):
            if f"layers.{name}" not in modules[stage]:
                del part.layers[name]
        for name in ("tok_embeddings", "norm", "output"):
            if name not in modules[stage]:
                setattr(part, name, None)
        stages.append(part)
    return stages


class Pipeline:
    """A parallelized model that runs by a pipeline schedule; has the interface of NoPipeline."""

    def __init__(
        self,
        parts: list[Model],
        mesh: DeviceMesh,
        config: ParallelismConfig,
        shard_sequence: Callable[[Tensor], Tensor],
        *,
        reports_loss: bool,
        local_batch_size: int,
        hidden_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`hidden_tokens` and `dtype`: T and dtype of the hidden state [B, T, C] that is sent between stages."""
        self.parts = parts
        self._mesh, self._shard_sequence, self._reports_loss, self._device = mesh, shard_sequence, reports_loss, device
        self._microbatch_size = config.pipeline_parallel_microbatch_size
        self._hidden = torch.empty(
            self._microbatch_size, hidden_tokens, parts[0].dim, dtype=dtype, device="meta", requires_grad=True
        )
        self._stages_by_rank = placement(config, len(parts) * mesh.size())
        self._n_stages = sum(map(len, self._stages_by_rank))
        n_microbatches = local_batch_size // self._microbatch_size
        self._table = table(schedule_of(config), mesh.size(), self._n_stages, n_microbatches)
        self._training: _PipelineScheduleRuntime | None = None

    def forward_backward(self, inputs: Tensor, labels: Tensor, document_starts: Tensor | None = None) -> Tensor:
        if self._training is None:
            self._training = self._runtime(self._shard_sequence(inputs), self._table)
        return self._loss_sum(self._training.step, inputs, labels, document_starts)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor, document_starts: Tensor | None = None) -> Tensor:
        """Runs any number of microbatches on the same modules in eval mode, with a runtime of its own."""
        microbatches = range(inputs.shape[0] // self._microbatch_size)
        rows: Table = [
            [(Action(stage, "F", m),) for stage in stages for m in microbatches] for stages in self._stages_by_rank
        ]
        runtime = self._runtime(self._shard_sequence(inputs), rows, backward=False)
        for part in self.parts:
            part.eval()
        loss_sum = self._loss_sum(runtime.eval, inputs, labels, document_starts)
        for part in self.parts:
            part.train()
        return loss_sum

    def _loss_sum(
        self, run: Callable[..., Any], inputs: Tensor, labels: Tensor, document_starts: Tensor | None
    ) -> Tensor:
        """Returns this rank's term of the loss sum; `run` is a method of a runtime."""
        losses: list[Tensor] = []  # one per microbatch on the rank of the last stage, else none
        inputs, labels = self._shard_sequence(inputs), self._shard_sequence(labels)
        named = {"labels": labels}
        if document_starts is not None:
            named["document_starts"] = self._shard_sequence(document_starts)
        run(inputs, target=labels, losses=losses, return_outputs=False, **named)
        if not (losses and self._reports_loss):
            return torch.zeros((), device=self._device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _runtime(self, tokens: Tensor, rows: Table, *, backward: bool = True) -> _PipelineScheduleRuntime:
        """Builds torch's runtime for the table on this rank, for batches shaped as `tokens` [B, T], with the shapes of all stages."""
        microbatch = torch.empty(self._microbatch_size, tokens.shape[1], dtype=tokens.dtype, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = [
            _Stage(
                part,
                index,
                self._n_stages,
                self._device,
                input_args=microbatch if index == 0 else self._hidden,
                output_args=loss if index == self._n_stages - 1 else self._hidden,
                group=self._mesh.get_group(),
            )
            for part, index in zip(self.parts, self._stages_by_rank[self._mesh.get_local_rank()], strict=True)
        ]

        def loss_of(loss_sum: Tensor, _: Tensor) -> Tensor:
            if loss_sum.ndim:
                raise no_loss_error(loss_sum)
            return loss_sum

        # the output of the last stage is the loss; scale_grads would divide by the number of microbatches, where gradients are sums
        runtime = _PipelineScheduleRuntime(
            stages, tokens.shape[0] // self._microbatch_size, loss_fn=loss_of, scale_grads=False
        )
        order: dict[int, list[Any]] = {
            rank: [_Action.from_str(cell_text(cell)) for cell in row] for rank, row in enumerate(rows)
        }
        if backward:
            runtime._prepare_schedule_with_comms(order)
        else:  # torch's method requires backwards
            owner = {stage: rank for rank, stages in enumerate(self._stages_by_rank) for stage in stages}
            runtime.stage_index_to_group_rank = owner
            for own in stages:
                own.stage_index_to_group_rank = owner
            order = {rank: _add_unshard_reshard(row) for rank, row in order.items()}
            runtime.pipeline_order_with_comms = _add_send_recv(order, owner.__getitem__, self._n_stages)
        return runtime


class _Stage(PipelineStage):
    """torch's stage, with overrides."""

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *more: Any, **named: Any) -> Any:
        """Passes labels to the last stage only."""
        kwargs = {key: value for key, value in (kwargs or {}).items() if self.is_last or key != "labels"}
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, *more, **named)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Clones views, since torch detaches outputs in place: a norm at the end of a stage returns a view."""
        out = super().forward_maybe_with_nosync(*args, **kwargs)
        return out.clone() if out._is_view() else out

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, *more: Any, **named: Any) -> Any:
        """Keeps the graph from the backward of the inputs to that of the weights, where the latter begins at an autograd.Function at the
        end of a stage, such as a chunked loss or a compiled block: torch before 2.13 frees it in between."""
        if backward_type != "input" or TorchVersion(torch.__version__) >= "2.13":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *more, **named)
        graph = [get_gradient_edge(out) for out in bwd_kwargs["stage_output"]]
        gradients, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *more, **named)
        for group in groups or ():
            if any(isinstance(node, torch._C._FunctionBase) for node in group["intermediates"]):
                group["graph"] = graph
        return gradients, groups

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Does nothing: torch 2.11 compares shapes here, before `loss_of` can name what a model breaks; later versions do not."""

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        """Excludes the connection of this rank to itself, which torch 2.11 would open for the two innermost stages of a V."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _post_metadata_inference_cleanup(self) -> None:
        """Does nothing, as no shapes were inferred; torch's method would drop the gradients of earlier calls."""
