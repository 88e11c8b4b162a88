"""The tokens of a sequence that a context-parallel rank holds, and the models that can shard sequences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import llama
from models.contract import Model
from parallelisms.context import attentions, check_attentions, pieces_of_ranks, positions

BALANCERS = pytest.mark.parametrize("load_balancer", ["headtail", "none"])


@BALANCERS
@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_every_position_is_with_one_rank_and_all_have_as_many(cp: int, load_balancer: str) -> None:
    held = positions(pieces_of_ranks(cp, load_balancer), 48)
    assert torch.equal(torch.cat(held).sort().values, torch.arange(48))
    assert {len(mine) for mine in held} == {48 // cp}
    assert all(torch.equal(mine, mine.sort().values) for mine in held)


def test_head_and_tail_give_every_rank_the_same_work() -> None:
    assert [mine.tolist() for mine in positions(pieces_of_ranks(2, "none"), 4)] == [[0, 1], [2, 3]]
    held = positions(pieces_of_ranks(4, "headtail"), 32)
    assert held[1].tolist() == [4, 5, 6, 7, 24, 25, 26, 27]
    assert len({int((mine + 1).sum()) for mine in held}) == 1  # a query at position p attends to p + 1 keys


def test_pieces_lie_as_those_of_torchs_ring_attention() -> None:
    """The pieces have the order of torch's load balancer, which its ring attention assumes."""
    from torch.distributed.tensor.experimental._context_parallel import _HeadTailLoadBalancer

    theirs = _HeadTailLoadBalancer(24, 3, "cpu")._generate_indices()
    assert theirs is not None
    assert torch.equal(torch.cat(positions(pieces_of_ranks(3, "headtail"), 24)), theirs.flatten())


class Opaque(Model):
    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(n_layers)})


def test_a_model_without_attend_is_refused_by_name() -> None:
    model = llama.build(llama.Config(dim=8, n_layers=3, n_heads=2, n_kv_heads=1), vocab_size=7, max_seq_len=8)
    assert attentions(model, 2) == [block.attention for block in model.layers.values()]
    assert attentions(Opaque(0), 2) == []  # a stage that holds the embedding alone
    with pytest.raises(
        ValueError, match=r"^parallelism\.context_parallel_degree = 2: Opaque computes attention without"
    ):
        attentions(Opaque(1), 2)


def test_an_attention_that_would_be_lost_is_refused_by_name() -> None:
    """Context parallelism puts causal attention in the place of a window."""
    model = llama.build(llama.Config(dim=8, n_layers=2, n_heads=2, n_kv_heads=1), vocab_size=7, max_seq_len=8)
    model.layers["1"].attention.attend = lambda q, k, v, document_starts=None: v
    assert len(attentions(model, 2)) == 2
    with pytest.raises(
        ValueError, match=r"^parallelism\.context_parallel_degree = 2: Attention has a `self\.attend` of"
    ):
        check_attentions(model, 2)
    check_attentions(llama.build(model.config, vocab_size=7, max_seq_len=8), 2)
