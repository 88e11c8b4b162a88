"""models/moe.py in one process, and its errors. Layouts: tests/multiproc/test_expert.py; logits: tests/scripts/test_hf.py."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import moe, moe_hf, ops
from models.contract import Router, set_dtype
from models.llama import FeedForward
from parallelisms.activation_checkpoint import ActivationCheckpointConfig, apply_activation_checkpoint
from parallelisms.expert import check_experts
from parallelisms.float8 import layers_to_convert
from parallelisms.mesh import ParallelismConfig, degrees
from training.optimizer import OptimizerConfig, ShardedAdam, build_optimizer

SMALL = moe.Config(
    name="moe", dim=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48, expert_hidden_dim=16, n_experts=6,
    experts_per_token=2, dense_layers=1, balance_rate=0.25, router_init_std=0.5,
)  # fmt: skip
V, B, T = 61, 2, 12


def built(config: moe.Config = SMALL) -> moe.MoEModel:
    model = moe.build(config, vocab_size=V, max_seq_len=T)
    model.init_weights(0)
    return model


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


def mixture(config: moe.Config = SMALL) -> tuple[Any, Tensor]:
    model = built(config)
    x = torch.randn(B, T, config.dim, generator=torch.Generator().manual_seed(2))
    return model.layers["2"].feed_forward, x


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_token_is_the_weighted_sum_of_its_experts(score: Any, normalize: bool):
    config = replace(
        SMALL,
        router_score=score,
        normalize_weights=normalize,
        route_scale=1.5,
        shared_hidden_dim=24,
        experts_per_token=3,
    )
    layer, x = mixture(config)
    nn.init.normal_(layer.router.bias, std=0.2, generator=torch.Generator().manual_seed(3))
    out = layer(x)
    for token, found in zip(x.flatten(0, 1), out.flatten(0, 1), strict=True):
        logits = layer.router.weight @ token
        scores = logits.softmax(0) if score == "softmax" else logits.sigmoid()
        chosen = (scores + layer.router.bias).topk(3).indices  # the bias chooses, but does not weigh
        weights = scores[chosen] / (scores[chosen].sum() if normalize else 1)
        experts = layer.experts
        outputs = [experts.w2[e] @ (F.silu(experts.w1[e] @ token) * (experts.w3[e] @ token)) for e in chosen]
        wanted = sum(1.5 * weight * output for weight, output in zip(weights, outputs, strict=True)) + layer.shared(
            token
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_the_first_blocks_are_dense():
    kinds = [type(block.feed_forward) for block in built().layers.values()]
    assert kinds == [FeedForward, moe.MoE, moe.MoE]


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_the_load_is_counted_once_for_what_is_trained_on(mode: Any):
    model = built()
    apply_activation_checkpoint(model, ActivationCheckpointConfig(mode, "op" if mode == "selective" else "2"))
    with torch.no_grad():
        model(tokens(9))  # a validation
    for seed in (1, 2):  # two batches of a step
        model(tokens(seed)).sum().backward()
    layer = cast(Any, model.layers["1"].feed_forward)
    chosen = []
    layer.router.register_forward_hook(lambda _, args, output: chosen.append(output[1].flatten()))
    with torch.no_grad():
        for seed in (1, 2):
            model(tokens(seed))
    counts = torch.cat(chosen).bincount(minlength=6)
    assert counts.sum() == 2 * B * T * 2 and counts.min() != counts.max()
    torch.testing.assert_close(layer.router.bias.grad, counts - counts.sum() / 6)


def test_the_bias_moves_against_the_load_by_the_rate_and_the_optimizer_leaves_it_alone():
    model = built()
    optimizer = build_optimizer(OptimizerConfig(lr=0.1), [model])
    assert isinstance(optimizer, ShardedAdam)
    model(tokens()).logsumexp(-1).sum().backward()
    biases = {name: p for name, p in model.named_parameters() if name.endswith("router.bias")}
    loads = {name: bias.grad.clone() for name, bias in biases.items() if bias.grad is not None}
    assert len(loads) == 2
    weight = model.layers["1"].feed_forward.router.weight.detach().clone()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    for bias in biases.values():
        bias.grad = torch.full_like(bias, torch.nan)
    optimizer.step()  # a gradient is not finite: nothing moves
    for name, bias in biases.items():
        bias.grad = loads[name].clone()
    assert not any(bias.any() for bias in biases.values()) and torch.equal(
        model.layers["1"].feed_forward.router.weight, weight
    )
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    for name, bias in biases.items():
        torch.testing.assert_close(bias.detach(), -0.25 * loads[name].sign())
        assert bias not in optimizer.state
    assert not torch.equal(model.layers["1"].feed_forward.router.weight, weight)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_balance_without_a_bias_has_no_parameter():
    model = built(replace(SMALL, balance_rate=0.0))
    assert not model.own_updates and not any("bias" in name for name, _ in model.named_parameters())


def test_the_auxiliary_loss_is_that_of_the_paper():
    """DeepSeek-V3, equations 17 to 20, for each sequence, times its tokens."""
    config = replace(SMALL, balance_loss=0.3, router_score="sigmoid")
    layer, x = mixture(config)
    weights, chosen = layer.router(x)
    [found] = torch.autograd.grad(weights.sum(), [layer.router.weight])
    plain, plain_x = mixture(replace(config, balance_loss=0.0))
    weights, _ = plain.router(plain_x)
    scores = (plain_x @ plain.router.weight.T).sigmoid()
    loss = torch.zeros(())
    for sequence in range(B):
        f = F.one_hot(chosen[sequence], 6).sum((0, 1)) * (6 / (2 * T))
        p = (scores[sequence] / scores[sequence].sum(-1, keepdim=True)).mean(0)
        loss = loss + T * 0.3 * (f * p).sum()
    [wanted] = torch.autograd.grad(weights.sum() + loss, [plain.router.weight])
    torch.testing.assert_close(found, wanted)


def test_the_router_is_fp32_whatever_the_rest_computes_in():
    layer, x = mixture()
    weights, _ = layer.router(x.bfloat16())
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, layer.router(x.bfloat16().float())[0], rtol=0, atol=0)


def test_a_linear_layer_of_a_router_is_of_the_router():
    """A router that is written with nn.Linear stays fp32, too, and is not converted to float8."""

    class LinearRouter(Router):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 16, bias=False)

    model = built(replace(SMALL, shared_hidden_dim=16))
    layer = cast(Any, model.layers["1"].feed_forward)
    layer.router = LinearRouter()
    found = layers_to_convert(model, ())
    assert "layers.1.feed_forward.shared.w1" in found and "layers.1.feed_forward.router.gate" not in found
    set_dtype(model, torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert (parameter.dtype == torch.float32) == ("router" in name), name


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 10, 0]])
def test_the_grouped_kernel_and_the_loop_give_the_same(counts: list[int]):
    x = torch.randn(10, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    sizes = torch.tensor(counts)
    torch.testing.assert_close(ops.grouped_kernel(x, weight, sizes), ops.grouped_linear(x, weight, sizes))


def test_flops_are_those_of_the_experts_that_a_token_sees():
    model = built()
    dense = sum(
        p.numel() for n, p in model.named_parameters() if ".experts." not in n and not n.startswith("tok_embeddings")
    )
    seen = 2 * 2 * 3 * 32 * 16  # two layers, two experts, three matrices
    assert model.flops_per_token(T) == 6 * (dense + seen) + 12 * 3 * 4 * 8 * T


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts_per_token": 7}, "model.experts_per_token = 7: must be at most model.n_experts = 6; nearest: 6"),
        ({"dense_layers": 3}, "model.dense_layers = 3: must be below model.n_layers = 3; nearest: 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int], message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        replace(SMALL, **cast(Any, change)).check()


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (
            4,
            {"expert_parallel_degree": 4},
            "= 4: must divide the 6 experts of layers.1.feed_forward.experts; nearest: 2",
        ),
        (4, {"expert_parallel_degree": 3}, "= 3: must divide the 4 ranks of dp_shard x cp x tp; nearest: 2"),
        (
            4,
            {"expert_parallel_degree": 4, "data_parallel_replicate_degree": 4},
            "= 4: must divide the 1 ranks of dp_shard x cp x tp; nearest: 1",
        ),
    ],
)
def test_layouts_that_cannot_divide_the_experts_are_refused(ranks: int, options: dict[str, int], message: str):
    config = ParallelismConfig(**cast(Any, options))
    with pytest.raises(ValueError, match=f"^parallelism.expert_parallel_degree {re.escape(message)}$"):
        check_experts(built(), degrees(config, ranks), config)


def test_a_dense_model_has_no_experts_to_divide():
    from models import qwen3

    with torch.device("meta"):
        dense = qwen3.build(qwen3.Config(), vocab_size=V, max_seq_len=T)
    config = ParallelismConfig(expert_parallel_degree=2)
    with pytest.raises(ValueError, match=r"^parallelism.expert_parallel_degree = 2: Llama has no experts; nearest: 1$"):
        check_experts(dense, degrees(config, 2), config)


def test_what_qwen3_moe_does_not_have_is_not_exported():
    plain = replace(SMALL, balance_rate=0.0)
    named = {entry.ours: entry.shape for entry in moe_hf.Format().entries(plain, vocab_size=V)}
    assert named == {name: tuple(p.shape) for name, p in built(plain).named_parameters()}
    with pytest.raises(ValueError, match=r"^model.balance_rate = 0.25: Qwen3MoeForCausalLM has only 0.0$"):
        moe_hf.Format().entries(SMALL, vocab_size=V)
