"""Valid plans of tensor parallelism, and errors in them that are reported before a start."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from models import llama
from parallelisms.fsdp import shard_dim
from parallelisms.mesh import ParallelDims
from parallelisms.tensor import check_plan


def meta(vocab: int = 61, changes: dict[str, str | None] | None = None) -> llama.Llama:
    """Returns a small model on the meta device, with `changes` to its plan; None removes an entry."""
    with torch.device("meta"):
        config = llama.Config(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=40)
        model = llama.build(config, vocab_size=vocab, max_seq_len=8)
    plan = {**llama.TP_PLAN, **(changes or {})}
    model.tp_plan = {name: kind for name, kind in plan.items() if kind is not None}
    return model


def degrees(tp: int, *, shards: int = 1, cp: int = 1) -> ParallelDims:
    return ParallelDims(pp=1, dp_replicate=1, dp_shard=shards, cp=cp, tp=tp)


@pytest.mark.parametrize(("tp", "shards", "cp"), [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 2), (2, 3, 1)])
@pytest.mark.parametrize("vocab", [61, 64, 259])
def test_the_plan_of_llama_is_whole(tp: int, shards: int, cp: int, vocab: int) -> None:
    check_plan(meta(vocab), degrees(tp, shards=shards, cp=cp))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": None}, r"the tp_plan of models.llama has no entry for norm \(RMSNorm\); kinds: embedding, .*"),
        ({"layers.*.attention.wq": None}, r".* no entry for layers.0.attention.wq \(Linear\); .*"),
        ({"layers.*.attention.wz": "column"}, ".* entries that match no module: layers.*.attention.wz"),
        ({"layers.*": "gather", "*.norm": "sequence"}, r".* match no module: \*.norm"),
        ({"*": "sequence"}, ".* several entries for .*: .*"),
        ({"norm": "sequences"}, '.* has kind "sequences" for norm; kinds: .*'),
        ({"norm": "column"}, '.* has kind "column" for norm, not legal for RMSNorm'),
        ({"norm": "gather"}, '.* has kind "gather" for norm, not legal for RMSNorm'),
        ({"output": "embedding"}, '.* has kind "embedding" for output, not legal for Head'),
    ],
)
def test_an_entry_that_does_not_fit_is_refused_by_name(changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(ValueError, match=f"^parallelism.tensor_parallel_degree = 2: {message}$"):
        check_plan(meta(changes=changes), degrees(2))


def test_a_module_that_a_fork_adds_is_refused_by_name() -> None:
    model = meta()
    model.layers["1"].extra = nn.Linear(24, 24, device="meta")
    with pytest.raises(ValueError, match=r"has no entry for layers.1.extra \(Linear\)"):
        check_plan(model, degrees(2))


def test_a_shared_parameter_that_would_become_two_is_refused_by_name() -> None:
    """Tensor parallelism makes new parameters, module by module; afterwards `tie_weights` joins them."""

    class Joined(llama.Llama):
        def tie_weights(self) -> None:
            self.layers["0"].attention.wv.weight = self.layers["0"].attention.wk.weight

    model = meta()
    Joined.tie_weights(model)
    with pytest.raises(ValueError, match=r"layers.0.attention.wv.weight is layers.0.attention.wk.weight, and would be"):
        check_plan(model, degrees(2))
    model.__class__ = Joined
    check_plan(model, degrees(2))


def test_rows_that_torch_would_mistake_are_not_cut_twice() -> None:
    """Shapes for which shard_dim returns 0 have the rows of torch's layout on each rank; some others do not."""
    right, wrong = 0, 0
    for rows, shards, tp in product((*range(8, 40), 61, 259), (1, 2, 3, 4), (2, 3, 4)):
        same = all(
            held_rows(rows, tp, shards, tp_rank, shard) == torchs_rows(rows, tp, shards, tp_rank, shard)
            for tp_rank, shard in product(range(tp), range(shards))
        )
        if shard_dim((rows, 12), tp=tp, shards=shards) == 0:
            assert same, (rows, tp, shards)
            right += 1
        wrong += not same
    assert right and wrong


def held_rows(rows: int, tp: int, shards: int, tp_rank: int, shard: int) -> list[int]:
    """Returns the rows that a rank holds: split for tensor parallelism first, then for FSDP, each time as by torch.chunk."""
    piece = torch.arange(rows).split(-(-rows // tp))[tp_rank:][:1]
    return [x for part in piece for pieces in part.chunk(shards)[shard : shard + 1] for x in pieces.tolist()]


def torchs_rows(rows: int, tp: int, shards: int, tp_rank: int, shard: int) -> list[int]:
    placements = (_StridedShard(0, split_factor=tp), Shard(0))
    [length], [first] = _compute_local_shape_and_global_offset((rows,), (shards, tp), [shard, tp_rank], placements)
    return list(range(first, first + length))


def test_what_can_be_cut_neither_by_rows_nor_by_columns_is_refused() -> None:
    message = (
        r"tok_embeddings.weight \[61, 24\] has neither rows divisible by 2 ranks nor columns divisible by {} shards"
    )
    for shards, cp in ((5, 1), (4, 4)):
        with pytest.raises(ValueError, match=message.format(shards * cp)):
            check_plan(meta(), degrees(2, shards=shards, cp=cp))
        check_plan(meta(vocab=62), degrees(2, shards=shards, cp=cp))


def test_a_vocabulary_too_small_for_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tok_embeddings.weight \[5, 24\] is too small for a shard on every rank"):
        check_plan(meta(vocab=5), degrees(4))


@pytest.mark.parametrize(
    ("degree", "message"),
    [
        (3, "must divide model.n_heads = 4 and model.n_kv_heads = 2 and model.hidden_dim = 40; nearest: 2"),
        (4, "must divide model.n_kv_heads = 2; nearest: 2"),
    ],
)
def test_heads_and_features_are_shared_evenly(degree: int, message: str) -> None:
    config = meta().config
    config.check_tensor_parallel(2)
    with pytest.raises(ValueError, match=f"^parallelism.tensor_parallel_degree = {degree}: {message}$"):
        config.check_tensor_parallel(degree)
