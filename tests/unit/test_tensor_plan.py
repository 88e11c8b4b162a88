"""What a plan of tensor parallelism may say of a model, told before a start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import llama
from parallelisms.mesh import Degrees
from parallelisms.tensor import check_plan


def meta(vocab: int = 61, changes: dict[str, str | None] | None = None) -> llama.Llama:
    """A small model whose plan has these entries too; None: not even the one it has."""
    with torch.device("meta"):
        config = llama.Config(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=40)
        model = llama.build(config, vocab_size=vocab, max_seq_len=8)
    plan = {**llama.TP_PLAN, **(changes or {})}
    model.tp_plan = {name: kind for name, kind in plan.items() if kind is not None}
    return model


def degrees(tp: int, *, shards: int = 1, cp: int = 1) -> Degrees:
    return Degrees(pp=1, dp_replicate=1, dp_shard=shards, cp=cp, tp=tp)


@pytest.mark.parametrize(("tp", "shards", "cp"), [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 2), (2, 3, 1)])
@pytest.mark.parametrize("vocab", [61, 64, 259])
def test_the_plan_of_llama_is_whole(tp: int, shards: int, cp: int, vocab: int) -> None:
    check_plan(meta(vocab), degrees(tp, shards=shards, cp=cp))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": None}, r"the TP_PLAN of models.llama has no entry for norm \(RMSNorm\); kinds: embedding, .*"),
        ({"layers.*.attention.wq": None}, r".* no entry for layers.0.attention.wq \(Linear\); .*"),
        ({"layers.*.attention.wz": "column"}, ".* entries that match no module: layers.*.attention.wz"),
        ({"layers.*": "gather", "*.norm": "sequence"}, r".* match no module: \*.norm"),
        ({"*": "sequence"}, ".* several entries for .*: .*"),
        ({"norm": "sequences"}, '.* says "sequences" of norm; kinds: .*'),
        ({"norm": "column"}, '.* says "column" of norm, which is no kind for a RMSNorm'),
        ({"norm": "gather"}, '.* says "gather" of norm, which is no kind for a RMSNorm'),
        ({"output": "embedding"}, '.* says "embedding" of output, which is no kind for a Head'),
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


def test_pieces_that_torch_would_lay_out_wrong_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"tok_embeddings.weight \[61, 24\] has neither rows that 10 ranks can share .* that 5 can"
    ):
        check_plan(meta(), degrees(2, shards=5))
    with pytest.raises(ValueError, match=r"tok_embeddings.weight \[61, 24\] has neither rows that 32 ranks can share"):
        check_plan(meta(), degrees(2, shards=4, cp=4))


def test_a_vocabulary_too_small_for_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tok_embeddings.weight \[5, 24\] is too small to give every rank a part"):
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
