"""A mixture of experts: in a block a router sends every token to k of E feed-forwards, as in Qwen3-MoE (arXiv 2505.09388) or DeepSeek-V3
(arXiv 2412.19437). No token is dropped; attention and norms are those of models/qwen3.py.

Letters as in models/llama.py, and E experts, k experts of a token, M rows, one for each token of this rank and each of its k experts.

By default nothing balances the load of the experts. With balance_loss the gradients are those of a loss with an auxiliary term; the
reported losses do not contain it. With balance_rate the router has a bias that takes part in the choice only, and after each step the bias
of an expert above the mean load falls by that rate; below it, it rises. Here the gradient of the bias is the load above the mean, so
reductions, retries, comparisons and heals, which exist for parameters and gradients, also cover the bias and the load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from models import llama, ops, qwen3
from models.contract import Experts, Router
from models.init import normal_

SPARSE_PLAN = {  # of a sparse block's feed_forward, in place of a dense one's: parallelisms/tensor.py
    "router": "local",
    "shared": "gather",
    "shared.w1": "column",
    "shared.w3": "column",
    "shared.w2": "row",
}


@dataclass(frozen=True)
class Config(qwen3.Config):
    """[model] for a mixture of experts: Qwen3's keys, where hidden_dim is the width of a dense block's feed-forward."""

    dense_layers: Annotated[int, "first blocks, whose feed-forward is dense", ">= 0"] = 0
    expert_hidden_dim: Annotated[int, "feed-forward width F of an expert", ">= 1"] = 192
    n_experts: Annotated[int, "experts E of a block", ">= 1"] = 8
    experts_per_token: Annotated[int, "experts k of a token", ">= 1"] = 2
    shared_hidden_dim: Annotated[int, "width of a feed-forward that sees every token; 0: none", ">= 0"] = 0
    router_score: Annotated[
        Literal["softmax", "sigmoid"], "score of an expert: Qwen3's softmax or DeepSeek-V3's sigmoid"
    ] = "softmax"
    normalize_weights: Annotated[bool, "divide the k weights of a token by their sum"] = True
    route_scale: Annotated[float, "factor of the weights", "> 0"] = 1.0
    router_init_std: Annotated[float, "standard deviation of the router's initial weights", "> 0"] = 0.02
    balance_rate: Annotated[float, "change of an expert's bias in a step; 0: no bias; DeepSeek-V3: 0.001", ">= 0"] = 0.0
    balance_loss: Annotated[float, "coefficient of the sequence-wise auxiliary loss; 0: none", ">= 0"] = 0.0

    def check(self) -> None:
        super().check()
        if self.experts_per_token > self.n_experts:
            raise ValueError(
                f"model.experts_per_token = {self.experts_per_token}: must be at most model.n_experts = {self.n_experts}; "
                f"nearest: {self.n_experts}"
            )
        if self.experts_per_token == 1 and self.normalize_weights:
            raise ValueError(
                "model.experts_per_token = 1: with model.normalize_weights = true every weight is 1, and the router has no gradient; "
                f"nearest: {'2, or ' if self.n_experts > 1 else ''}model.normalize_weights = false"
            )
        if self.dense_layers >= self.n_layers:
            raise ValueError(
                f"model.dense_layers = {self.dense_layers}: must be below model.n_layers = {self.n_layers}; nearest: {self.n_layers - 1}"
            )

    def tensor_parallel_sizes(self) -> dict[str, int]:
        sizes = {**super().tensor_parallel_sizes(), "shared_hidden_dim": self.shared_hidden_dim}
        return sizes if self.dense_layers else {key: size for key, size in sizes.items() if key != "hidden_dim"}


def build(config: Config, *, vocab_size: int, max_seq_len: int) -> MoEModel:
    """Returns the whole model, uninitialised."""
    return MoEModel(config, vocab_size, max_seq_len)


class MoEModel(llama.Llama):
    config: Config

    def __init__(self, config: Config, vocab_size: int, max_seq_len: int) -> None:
        super().__init__(config, vocab_size, max_seq_len)
        dense = {name: kind for name, kind in qwen3.TP_PLAN.items() if name.startswith("layers.*.feed_forward")}
        self.tp_plan = {name: kind for name, kind in qwen3.TP_PLAN.items() if name not in dense}
        for name, block in self.layers.items():
            block.attention = qwen3.Qwen3Attention(config)
            if int(name) < config.dense_layers:
                self.tp_plan |= {pattern.replace("*", name): kind for pattern, kind in dense.items()}
                continue
            block.feed_forward = MoE(config)
            here = {leaf: kind for leaf, kind in SPARSE_PLAN.items() if config.shared_hidden_dim or leaf == "router"}
            self.tp_plan |= {f"layers.{name}.feed_forward.{leaf}": kind for leaf, kind in here.items()}
        if config.balance_rate:
            self.own_updates = {"*.router.bias": partial(descend, rate=config.balance_rate)}

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialises as the dense model does, an expert as a feed-forward, the router with router_init_std, its bias with 0."""
        super().init_weights(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("router.bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("router.weight"):
                normal_(parameter, name, seed, std=self.config.router_init_std)

    def flops_per_token(self, seq_len: int) -> int:
        """Returns the dense model's count, with k of E experts."""
        unused = self.config.n_experts - self.config.experts_per_token
        experts = sum(llama.matmul_flops(p) for name, p in self.named_parameters() if ".experts." in name)
        return super().flops_per_token(seq_len) - experts * unused // self.config.n_experts


class MoE(nn.Module):
    """Sends each token to k experts and returns the sum of their outputs, weighted by the router, and of the shared feed-forward's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = TopKRouter(config)
        self.experts = SwiGLUExperts(config.n_experts, config.dim, config.expert_hidden_dim)
        width = config.shared_hidden_dim
        self.shared = llama.FeedForward(replace(config, hidden_dim=width)) if width else None

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C]
        weights, chosen = self.router(x)  # [B, T, k] fp32 and int64
        flat = chosen.flatten()  # [N * k]
        order = flat.argsort(stable=True)  # by expert, then by token
        counts = flat.new_zeros(self.router.weight.shape[0])
        counts.scatter_add_(0, flat, torch.ones_like(flat))  # bincount would sync
        rows = x.flatten(0, 1).repeat_interleave(chosen.shape[-1], 0)[order]  # [M, C], M = N * k
        rows = self.experts.dispatch_and_combine(rows, counts)  # [M, C]
        rows = rows[order.argsort()].unflatten(0, chosen.shape)  # [B, T, k, C]
        out = (rows.float() * weights.unsqueeze(-1)).sum(2).to(x.dtype)  # [B, T, C]
        return out if self.shared is None else out + self.shared(x)


class TopKRouter(Router):
    """Chooses the k experts of a token by score + bias, and weighs them by score, in fp32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))  # [E, C]
        self.bias = nn.Parameter(torch.empty(config.n_experts)) if config.balance_rate else None  # [E]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights fp32 and experts int64, both [B, T, k], for x [B, T, C]."""
        config, scores = self.config, self.scores(x)
        chosen = self.biased(scores).topk(config.experts_per_token).indices
        weights = scores.gather(-1, chosen)
        if config.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * config.route_scale
        if self.bias is not None:
            weights = cast(Tensor, _Load.apply(weights, local(self.bias), chosen))
        if config.balance_loss:
            weights = cast(Tensor, _AddLoss.apply(weights, self.auxiliary_loss(scores, chosen)))
        return weights, chosen

    def scores(self, x: Tensor) -> Tensor:  # [B, T, C] -> [B, T, E]
        logits = F.linear(x.float(), local(self.weight).float())
        return logits.softmax(-1) if self.config.router_score == "softmax" else logits.sigmoid()

    def biased(self, scores: Tensor) -> Tensor:  # [B, T, E]
        return scores if self.bias is None else scores + local(self.bias)

    def selection(self, x: Tensor) -> Tensor:
        return self.biased(self.scores(x))

    def auxiliary_loss(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Returns the auxiliary loss of these sequences times all their tokens, as the loss is a sum over tokens (DeepSeek-V3, equations 17
        to 20); the optimizer divides by the tokens with a label only. The share of an expert is that of the whole sequence, also where
        ranks hold parts of it."""
        config = self.config
        counts = scores.new_zeros(len(scores), config.n_experts)  # [B, E]
        counts.scatter_add_(1, chosen.flatten(1), torch.ones_like(chosen.flatten(1), dtype=counts.dtype))
        counts = self.sum_over_sequence(counts)
        share = counts * (config.n_experts / counts.sum(1, keepdim=True))  # 1 where balanced
        means = (scores / scores.sum(-1, keepdim=True)).sum(1)  # [B, E]
        return config.balance_loss * (share * means).sum()


class SwiGLUExperts(Experts):
    """E feed-forwards of SwiGLU, without biases."""

    def __init__(self, count: int, dim: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(count, width, dim))  # [E, F, C]
        self.w2 = nn.Parameter(torch.empty(count, dim, width))  # [E, C, F]
        self.w3 = nn.Parameter(torch.empty(count, width, dim))  # [E, F, C]

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:  # [M, C], [E]
        w1, w2, w3 = local(self.w1), local(self.w2), local(self.w3)
        gated = F.silu(ops.grouped_linear(rows, w1, counts)) * ops.grouped_linear(rows, w3, counts)  # [M, F]
        return ops.grouped_linear(gated, w2, counts)


class _Load(Function):
    """Passes weights [B, T, k]; its backward gives the bias [E] the load of each expert less the mean load. A backward runs once for each
    batch that is trained on: neither a validation nor the recomputation of activation checkpointing is counted."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, bias: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(bias, chosen)
        return weights.clone()  # FSDP's hooks warn about views

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        bias, chosen = ctx.saved_tensors
        flat = chosen.flatten()
        load = torch.zeros_like(bias).scatter_add_(0, flat, torch.ones_like(flat, dtype=bias.dtype))
        return grad, load - flat.numel() / len(load), None


class _AddLoss(Function):
    """Passes x; its backward adds the gradient of a scalar loss, which the reported loss does not contain. The backward must start from
    1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        [loss] = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def descend(bias: Tensor, excess: Tensor, *, rate: float) -> None:
    """Lowers the bias of experts with more than the mean load by `rate`, and raises that of those with less."""
    bias.sub_(excess.sign(), alpha=rate)


def local(parameter: Tensor) -> Tensor:
    """Returns this rank's part of a parameter as a tensor. Where it is replicated, its gradient is Partial: ranks have different tokens."""
    from torch.distributed.tensor import DTensor, Partial, Replicate  # its import takes half as long as torch's

    if not isinstance(parameter, DTensor):
        return parameter
    kinds = [Partial() if isinstance(kind, Replicate) else kind for kind in parameter.placements]
    return parameter.to_local(grad_placements=kinds)
