"""Conversion of a mixture of experts from and to Hugging Face's Qwen3-MoE: what differs from Qwen3's (models/qwen3_hf.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from models import qwen3_hf
from models.llama_hf import Entry, Published, number, shown
from models.moe import Config

EXPERTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class Format(qwen3_hf.Format):
    model_type, architecture = "qwen3_moe", "Qwen3MoeForCausalLM"
    config = Config
    sizes: Mapping[str, str] = {
        **qwen3_hf.Format.sizes,
        "n_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_hidden_dim": "moe_intermediate_size",
    }
    supported_values: Mapping[str, Any] = {
        **qwen3_hf.Format.supported_values,
        "decoder_sparse_step": ((1,), "here every block is sparse after the first dense ones"),
    }
    ignored_keys = qwen3_hf.Format.ignored_keys | {
        "norm_topk_prob",
        "mlp_only_layers",
        "num_local_experts",
        "router_aux_loss_coef",
        "output_router_logits",
    }

    def names(self, config: Any, layer: int) -> Mapping[str, str]:
        if layer < config.dense_layers:
            return self.layer
        kept = {ours: theirs for ours, theirs in self.layer.items() if not ours.startswith("feed_forward.")}
        experts = {
            f"feed_forward.experts.{ours}": f"mlp.experts.{{}}.{theirs}.weight" for ours, theirs in EXPERTS.items()
        }
        return {**kept, "feed_forward.router": "mlp.gate", **experts}

    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        experts, dim, width = config.n_experts, config.dim, config.expert_hidden_dim
        return {
            **super().shapes(config),
            "feed_forward.router": (experts, dim),
            "feed_forward.experts.w1": (experts, width, dim),
            "feed_forward.experts.w3": (experts, width, dim),
            "feed_forward.experts.w2": (experts, dim, width),
        }

    def own_settings(self, body: Mapping[str, Any]) -> dict[str, Any]:
        dense = body.get("mlp_only_layers") or []
        if not isinstance(dense, list) or dense != list(range(len(dense))):
            raise ValueError(f"mlp_only_layers = {shown(dense)}: here only the first blocks can be dense")
        normalize = body.get("norm_topk_prob", False)
        if not isinstance(normalize, bool):
            raise ValueError(f"norm_topk_prob = {shown(normalize)}: must be true or false")
        coefficient = body.get("router_aux_loss_coef", 0.001)  # transformers' default
        if isinstance(coefficient, bool) or not isinstance(coefficient, int | float) or coefficient < 0:
            raise ValueError(f"router_aux_loss_coef = {shown(coefficient)}: must be a number from 0")
        width = number(body, "head_dim", number(body, "hidden_size") // number(body, "num_attention_heads"))
        sparse = max(1, number(body, "num_hidden_layers") - len(dense))  # 0 is refused by Config.check
        balance_loss = coefficient * number(body, "num_experts_per_tok") / sparse  # see write_config
        own = {"dense_layers": len(dense), "normalize_weights": normalize, "balance_loss": balance_loss}
        return {**super().own_settings(body), **own, "head_dim": width}

    def read_config(self, body: Mapping[str, Any]) -> Published:
        count = {"num_experts": body.get("num_local_experts")}  # so named by transformers 5
        return super().read_config({**count, **body})

    def entries(self, config: Any, *, vocab_size: int) -> Iterator[Entry]:
        """Yields the entries, as for Llama. Raises ValueError for settings that Qwen3-MoE does not have."""
        absent = {"router_score": "softmax", "shared_hidden_dim": 0, "route_scale": 1.0, "balance_rate": 0.0}
        for key, legal in absent.items():
            if (value := getattr(config, key)) != legal:
                raise ValueError(f"model.{key} = {shown(value)}: {self.architecture} has only {shown(legal)}")
        return super().entries(config, vocab_size=vocab_size)

    def write_config(self, config: Any, **settings: Any) -> dict[str, Any]:
        # With balanced experts, Hugging Face's auxiliary loss is the coefficient times k, a mean over sparse blocks; ours is the
        # coefficient times the number of these blocks, a sum over them. Rounded, so that an imported coefficient comes back as it was.
        coefficient = config.balance_loss * (config.n_layers - config.dense_layers) / config.experts_per_token
        return {
            **super().write_config(config, **settings),
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(config.dense_layers)),
            "norm_topk_prob": config.normalize_weights,
            "router_aux_loss_coef": float(f"{coefficient:.12g}"),
        }
