"""Code broken on purpose must make bench/parity.py fail: one break at a time, inside the workers, judged by the proof itself.

A break is a context in which a rank runs its case; it replaces something for as long and reaches no file. Each is named after the
mistake that it stands for, with words that the verdict must then contain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor, Partial

from bench import parity, parity_worker
from bench.parity_worker import ParityCase, Seen, Task, beside
from ft.buckets import to_local
from models import contract, llama, moe, ops
from parallelisms import context, expert, parallelize, pipeline
from parallelisms.mesh import MeshCoordinate
from tests.multiproc.pool import Pool
from tests.multiproc.test_expert import SIZES as MIXTURE
from tests.multiproc.test_parity import SIZES, case, task
from training import muon

Patch = Callable[[pytest.MonkeyPatch], None]


def nothing(patch: pytest.MonkeyPatch) -> None:
    pass


def one_division_skipped(patch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    divide = parity_worker.scale_gradients

    def scale(parameters: Any, factor: float) -> None:
        calls.append(None)
        if len(calls) != 2:
            divide(parameters, factor)

    patch.setattr(parity_worker, "scale_gradients", scale)


def reduce_scatter_dropped(patch: pytest.MonkeyPatch) -> None:
    def own_part(_: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, *args: Any, **kwargs: Any) -> None:
        output_tensor.copy_(input_tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    patch.setattr(_fsdp_collectives.DefaultReduceScatter, "__call__", own_part)


def all_reduce_of_copies_dropped(patch: pytest.MonkeyPatch) -> None:
    without = SimpleNamespace(**{**vars(dist), "all_reduce": lambda *args, **kwargs: None})
    patch.setattr(_fsdp_collectives, "dist", without)


def sum_over_tp_dropped(patch: pytest.MonkeyPatch) -> None:
    """Drops the sum over TP of the norms' gradients: each rank keeps that of its own tokens."""
    patch.setattr(Partial, "_reduce_value", lambda self, tensor, mesh, mesh_dim: tensor)


def one_gradient_doubled(patch: pytest.MonkeyPatch) -> None:
    def double(model: Any) -> None:
        to_local(model.layers["1"].attention.wk.weight.grad).mul_(2)

    _after_backward(patch, double)


def one_gradient_lost(patch: pytest.MonkeyPatch) -> None:
    def lose(model: Any) -> None:
        model.norm.weight.grad = None

    _after_backward(patch, lose)


def _after_backward(patch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    whole = parallelize.NoPipeline.forward_backward

    def forward_backward(self: Any, *microbatch: Tensor) -> Tensor:
        loss = whole(self, *microbatch)
        change(self.parts[0])
        return loss

    patch.setattr(parallelize.NoPipeline, "forward_backward", forward_backward)


def shares_of_the_loss_not_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        parallelize.NoPipeline, "reports_loss", property(lambda self: True, lambda self, value: None), raising=False
    )


def every_rank_counts_its_targets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MeshCoordinate, "counts_tokens", True)


def norm_of_copies_counted_on_each(patch: pytest.MonkeyPatch) -> None:
    """Counts the norm on each rank as if it were the first on every axis."""
    right = parity_worker.gradient_norm

    def gradient_norm(parameters: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(DeviceMesh, "get_coordinate", lambda mesh: [0] * mesh.ndim)
            return right(parameters)

    patch.setattr(parity_worker, "gradient_norm", gradient_norm)


def queries_aligned_with_the_first_keys(patch: pytest.MonkeyPatch) -> None:
    """Aligns the causal mask of a piece as if the keys began at its queries."""

    def attend(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None) -> Tensor:
        return ops.causal_attention(q, k[:, : q.shape[1]], v[:, : q.shape[1]], document_starts)

    patch.setattr(context, "ops", SimpleNamespace(causal_attention=attend))


def positions_of_each_rank_from_zero(patch: pytest.MonkeyPatch) -> None:
    right = context.positions

    def positions(pieces: Any, seq_len: int, *device: Any) -> list[Tensor]:
        first, *others = right(pieces, seq_len, *device)
        return [first, *(other - other.min() for other in others)]

    patch.setattr(context, "positions", positions)


def mask_leaking_one_document(patch: pytest.MonkeyPatch) -> None:
    """Lets the second document of each sequence attend to the first."""
    for name in ("causal_attention", "attention_to_part"):

        def leaking(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor, *more: Tensor, right: Any) -> Any:
            later = document_starts.where(document_starts > 0, document_starts.max() + 1).amin(1, keepdim=True)
            return right(q, k, v, document_starts.where(document_starts != later, 0), *more)

        patch.setattr(ops, name, partial(leaking, right=getattr(ops, name)))


def documents_of_the_last_stage_only(patch: pytest.MonkeyPatch) -> None:
    right = pipeline.PipelineStage.forward_one_chunk

    def forward_one_chunk(self: Any, chunk: int, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        return right(self, chunk, args, kwargs if self.is_last else {}, *more, **named)

    patch.setattr(pipeline.PipelineStage, "forward_one_chunk", forward_one_chunk)


def gradients_divided_by_microbatches(patch: pytest.MonkeyPatch) -> None:
    right = pipeline._PipelineScheduleRuntime

    def runtime(*args: Any, **options: Any) -> Any:
        return right(*args, **{**options, "scale_grads": True})

    patch.setattr(pipeline, "_PipelineScheduleRuntime", runtime)


def a_block_in_two_stages(patch: pytest.MonkeyPatch) -> None:
    _staged(patch, lambda first, last: [first, ["layers.1", *last]])


def a_block_in_no_stage(patch: pytest.MonkeyPatch) -> None:
    _staged(patch, lambda first, last: [[name for name in first if name != "layers.1"], last])


def _staged(patch: pytest.MonkeyPatch, change: Callable[[list[str], list[str]], list[list[str]]]) -> None:
    right = pipeline.stage_modules
    patch.setattr(pipeline, "stage_modules", lambda config, layers: change(*right(config, layers)))


def drawn_by_rank(patch: pytest.MonkeyPatch) -> None:
    right = llama.normal_

    def normal(parameter: Any, name: str, seed: int, **options: Any) -> None:
        right(parameter, name, seed + dist.get_rank(), **options)

    patch.setattr(llama, "normal_", normal)


def a_weight_never_updated(patch: pytest.MonkeyPatch) -> None:
    right = parity_worker.build_optimizer

    def build(config: Any, parts: Any) -> Any:
        optimizer = right(config, parts)
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not parts[0].layers["2"].ffn_norm.weight]
        return optimizer

    patch.setattr(parity_worker, "build_optimizer", build)


def each_shard_orthogonalised_for_itself(patch: pytest.MonkeyPatch) -> None:
    def shard(update: Tensor, parameter: Tensor, *, steps: int, dtype: torch.dtype) -> Tensor:
        return muon.orthogonalize(update, steps=steps)

    patch.setattr(muon, "orthogonal_shard", shard)


def tied_gradient_counted_twice(patch: pytest.MonkeyPatch) -> None:
    _after_backward(patch, lambda model: to_local(model.tok_embeddings.weight.grad).mul_(2))


def tied_weight_counted_twice_in_the_norm(patch: pytest.MonkeyPatch) -> None:
    """Counts the tied weight in the norm under each of its names."""
    right = parity_worker.gradient_norm
    patch.setattr(parity_worker, "gradient_norm", lambda parameters: right([*parameters, parameters[0]]))


def tied_weights_come_apart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(contract.Model, "tie_weights", lambda model: None)


def a_row_to_the_wrong_expert(patch: pytest.MonkeyPatch) -> None:
    """Sends the first token of a rank to the expert after the chosen one."""
    right = moe.TopKRouter.forward

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = right(self, x)
        chosen = chosen.clone()
        chosen[0, 0, 0] = (chosen[0, 0, 0] + 1) % self.config.n_experts
        return weights, chosen

    patch.setattr(moe.TopKRouter, "forward", forward)


def rows_in_the_order_of_the_ranks(patch: pytest.MonkeyPatch) -> None:
    """The rows that arrive are not put into the order of the experts."""
    without = SimpleNamespace(
        **{**vars(torch), "arange": lambda count, **options: torch.zeros(count, dtype=torch.int64)}
    )
    patch.setattr(expert, "torch", without)


def an_experts_gradient_dropped(patch: pytest.MonkeyPatch) -> None:
    def drop(model: Any) -> None:
        to_local(model.layers["3"].feed_forward.experts.w2.grad)[0].zero_()

    _after_backward(patch, drop)


def load_of_each_rank_for_itself(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the bias is not summed over the ranks of tp."""
    right = moe.local

    def local(parameter: Tensor) -> Tensor:
        return right(parameter) if parameter.ndim > 1 or not isinstance(parameter, DTensor) else parameter.to_local()

    patch.setattr(moe, "local", local)


BREAKS = [  # what, in which layout, under which optimizer, what the verdict must say
    (one_division_skipped, "fsdp 2", "SGD", "step 2: tok_embeddings.weight"),
    (reduce_scatter_dropped, "fsdp 2", "SGD", "step 1: output.weight"),
    (all_reduce_of_copies_dropped, "ddp 2", "SGD", "step 1: output.weight"),
    (all_reduce_of_copies_dropped, "hsdp 2x2", "SGD", "step 1: output.weight"),
    (sum_over_tp_dropped, "tp 2", "SGD", "step 1: layers.0.attention_norm.weight"),
    (one_gradient_doubled, "fsdp 2", "SGD", "step 1: layers.1.attention.wk.weight"),
    (one_gradient_doubled, "fsdp 2", "AdamW", "step 1: layers.1.attention.wk.weight"),
    (one_gradient_lost, "fsdp 2", "SGD", "step 1: missing: norm.weight [32]"),
    (shares_of_the_loss_not_taken, "tp 2", "SGD", "step 1: loss"),
    (every_rank_counts_its_targets, "tp 2", "SGD", "targets, not"),
    (norm_of_copies_counted_on_each, "tp 2", "SGD", "step 1: gradient norm"),
    (queries_aligned_with_the_first_keys, "cp 2", "SGD", "step 1: layers.1.attention_norm.weight"),
    (positions_of_each_rank_from_zero, "cp 2", "SGD", "step 1: layers.0.attention.wq.weight"),
    (gradients_divided_by_microbatches, "pp 2", "SGD", "step 1: output.weight"),
    (a_block_in_two_stages, "pp 2", "SGD", "step 1: surplus: layers.1.attention.wq.weight [32, 32]"),
    (a_block_in_no_stage, "pp 2", "SGD", "step 1: missing: layers.1.attention.wq.weight [32, 32]"),
    (drawn_by_rank, "fsdp 2", "SGD", "layers.0.attention.wq.weight: initial values are not those of one process"),
    (a_weight_never_updated, "fsdp 2", "AdamW", "move of layers.2.ffn_norm.weight"),
    (each_shard_orthogonalised_for_itself, "fsdp 2", "Muon", "weights: layers.0.attention.wq.weight"),
]


@pytest.fixture(scope="module")
def proof(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> parity.Proof:
    return parity.Proof(task(tmp_path_factory.mktemp("mutations")), pool)


@pytest.mark.parametrize(("wrong", "layout", "optimizer", "said"), BREAKS)
def test_a_break_fails(proof: parity.Proof, pool: Pool, wrong: Patch, layout: str, optimizer: str, said: str):
    assert_found(said, proof, pool, wrong, layout, optimizer)


@pytest.mark.parametrize(("layout", "optimizer"), sorted({(layout, optimizer) for _, layout, optimizer, _ in BREAKS}))
def test_without_a_break_it_holds(proof: parity.Proof, pool: Pool, layout: str, optimizer: str):
    assert not found(proof, pool, nothing, layout, optimizer)


@pytest.mark.parametrize(
    ("wrong", "layout"),
    [
        (mask_leaking_one_document, "fsdp 2"),
        (mask_leaking_one_document, "cp 2"),
        (mask_leaking_one_document, "cp 2, cp ring"),
        (documents_of_the_last_stage_only, "pp 2"),
    ],
)
def test_a_break_of_the_mask_of_documents_fails(proof: parity.Proof, pool: Pool, wrong: Patch, layout: str):
    assert not found(proof, pool, nothing, layout, "SGD", document_mask=True)
    said = "step 1: layers.0.attention.wq.weight"
    assert_found(said, proof, pool, wrong, layout, "SGD", document_mask=True)


@pytest.mark.parametrize(
    ("wrong", "layout", "said"),
    [
        (tied_gradient_counted_twice, "fsdp 2", "step 1: tok_embeddings.weight"),
        (tied_weight_counted_twice_in_the_norm, "tp 2", "step 1: gradient norm"),
        (tied_weights_come_apart, "tp 2", "step 1: surplus: output.weight"),
    ],
)
def test_a_tied_weight_that_is_taken_for_two_fails(pool: Pool, tmp_path: Path, wrong: Patch, layout: str, said: str):
    proof = parity.Proof(task(tmp_path, replace(SIZES, enable_weight_tying=True)), pool)
    assert not found(proof, pool, nothing, layout, "SGD")
    assert_found(said, proof, pool, wrong, layout, "SGD")


@pytest.mark.parametrize(
    ("wrong", "layout", "said"),
    [
        (a_row_to_the_wrong_expert, "fsdp 2, ep 2", "router chooses other experts"),
        (rows_in_the_order_of_the_ranks, "fsdp 2, ep 2", "step 1: layers.2.feed_forward.experts.w1"),
        (an_experts_gradient_dropped, "fsdp 2, ep 2", "step 1: layers.3.feed_forward.experts.w2"),
        (load_of_each_rank_for_itself, "tp 2, ep 2", "step 1: layers.2.feed_forward.router.bias"),
    ],
)
def test_a_break_of_a_mixture_of_experts_fails(pool: Pool, mixture: parity.Proof, wrong: Patch, layout: str, said: str):
    assert_found(said, mixture, pool, wrong, layout, "SGD")


@pytest.fixture(scope="module")
def mixture(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> parity.Proof:
    return parity.Proof(task(tmp_path_factory.mktemp("mixtures"), MIXTURE), pool)


def assert_found(said: str, *of: Any, **change: bool) -> None:
    """`of`: the arguments of `found`."""
    problems = found(*of, **change)
    assert [problem for problem in problems if said in problem], problems[:5]


def found(
    proof: parity.Proof, pool: Pool, wrong: Patch, layout: str, optimizer: str, *, document_mask: bool = False
) -> tuple[str, ...]:
    chosen = replace(case(proof.task, layout, optimizer), document_mask=document_mask)
    truth = proof.truth(chosen)
    seen = pool.run(chosen.world_size, broken, wrong.__name__, proof.task, chosen)
    return parity.judge(chosen, truth, seen).problems


def broken(wrong: str, task: Task, chosen: ParityCase) -> Seen:
    """Runs a case with a mutation, on a rank."""
    with pytest.MonkeyPatch.context() as patch:
        globals()[wrong](patch)
        return beside(task, chosen)
