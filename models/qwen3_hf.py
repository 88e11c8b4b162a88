"""Conversion of Qwen3 from and to Hugging Face's format: what differs from Llama's (models/llama_hf.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models import llama_hf
from models.llama_hf import number, shown
from models.qwen3 import Config


class Format(llama_hf.Format):
    model_type, architecture = "qwen3", "Qwen3ForCausalLM"
    config = Config
    layer: Mapping[str, str] = {
        **llama_hf.Format.layer, "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"
    }  # fmt: skip
    # transformers reads sliding_window only if use_sliding_window is true
    supported_values: Mapping[str, Any] = {
        key: rule for key, rule in llama_hf.Format.supported_values.items() if key not in ("mlp_bias", "sliding_window")
    }
    ignored_keys = llama_hf.Format.ignored_keys | {"sliding_window", "max_window_layers", "layer_types"}

    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(config), **dict.fromkeys(("attention.q_norm", "attention.k_norm"), (config.head_dim,))}

    def heads(self, config: Any) -> dict[str, int]:
        return {**super().heads(config), "attention.q_norm": 1, "attention.k_norm": 1}

    def own_settings(self, body: Mapping[str, Any]) -> dict[str, Any]:
        kinds = body.get("layer_types") or ["full_attention"]
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise ValueError(
                f'layer_types = {shown(kinds)}: attention here is over all earlier tokens; supported: "full_attention"'
            )
        number(body, "num_key_value_heads")  # must be given: transformers' default is not the number of heads
        return {"head_dim": number(body, "head_dim", 128)}
