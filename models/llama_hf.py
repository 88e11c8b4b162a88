"""Conversion of Llama from and to Hugging Face's format: parameter names, order of rows, config.json. "Theirs" is Hugging Face's.

Flow: scripts/hf.py -> contrib/interchange/ (files) -> this. A fork that changes models/llama.py changes what is rejected here.

Rotary positions rotate pairs of features. Ours are neighbours, (2i, 2i + 1), as in Meta's files; theirs are (i, i + D/2). So the rows
of each head of the query and key projections have a different order in their files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from models.llama import Config

ARCHITECTURE = "LlamaForCausalLM"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DERIVED = ".self_attn.rotary_emb.inv_freq"  # in files of 2023: frequencies, which follow from rope_theta

_SIZES = {  # ours -> theirs, in config.json
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
}
_LAYER = {  # ours -> theirs, in each layer
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


@dataclass(frozen=True)
class Entry:
    """One parameter under both names. `heads`: number of heads of a query or key projection; 0 for all others."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    heads: int = 0

    def to_theirs(self, weight: Tensor) -> Tensor:
        """Returns the values with the rows in Hugging Face's order: each head's even rows, then its odd rows."""
        return self._reordered(weight, -1, 2)  # [H, D/2, 2, C] -> [H * D, C]

    def to_ours(self, weight: Tensor) -> Tensor:
        return self._reordered(weight, 2, -1)  # [H, 2, D/2, C] -> [H * D, C]

    def _reordered(self, weight: Tensor, *sizes: int) -> Tensor:
        return weight.unflatten(0, (self.heads, *sizes)).transpose(1, 2).flatten(0, 2) if self.heads else weight


def entries(config: Config, *, vocab_size: int, tied: bool) -> Iterator[Entry]:
    """Yields every parameter of the model, in the order of the forward. `tied`: their files have one matrix for embedding and head."""
    # Without building a model, for which torch would load its compiler (30 MB) even on the meta device.
    dim, kv_dim = config.dim, config.dim // config.n_heads * config.n_kv_heads
    shapes = {
        "attention.wq": (dim, dim),
        "attention.wk": (kv_dim, dim),
        "attention.wv": (kv_dim, dim),
        "attention.wo": (dim, dim),
        "feed_forward.w1": (config.hidden_dim, dim),
        "feed_forward.w3": (config.hidden_dim, dim),
        "feed_forward.w2": (dim, config.hidden_dim),
    }
    heads = {"attention.wq": config.n_heads, "attention.wk": config.n_kv_heads}
    yield Entry("tok_embeddings.weight", EMBEDDING, (vocab_size, dim))
    for layer in range(config.n_layers):
        for ours, theirs in _LAYER.items():
            names = f"layers.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight"
            yield Entry(*names, shapes.get(ours, (dim,)), heads.get(ours, 0))
    yield Entry("norm.weight", "model.norm.weight", (dim,))
    yield Entry("output.weight", EMBEDDING if tied else HEAD, (vocab_size, dim))


@dataclass(frozen=True)
class Published:
    """The settings of a config.json."""

    config: Config  # [model], without tokenizer_path
    tied: bool
    dtype: str  # "bfloat16", ...; "": not given
    max_positions: int  # 0: not given
    unknown: tuple[str, ...]  # keys that are known neither here nor to transformers' Llama


def read_config(body: Mapping[str, Any]) -> Published:
    """Converts the settings of config.json. Raises ValueError ("key = value: ...") for settings that this model does not support."""
    kind, architectures = body.get("model_type"), body.get("architectures")
    if kind != "llama":
        raise ValueError(f'model_type = {_shown(kind)}: another architecture; supported: "llama"')
    if architectures not in (None, [ARCHITECTURE]):
        raise ValueError(f'architectures = {_shown(architectures)}: another head; supported: ["{ARCHITECTURE}"]')
    for key, (allowed, cause) in _NEUTRAL.items():
        if key in body and body[key] not in allowed:
            raise ValueError(f"{key} = {_shown(body[key])}: {cause}; supported: {_shown(allowed[0])}")
    dim, heads = _number(body, "hidden_size"), _number(body, "num_attention_heads")
    if dim % heads:
        raise ValueError(f"num_attention_heads = {heads}: must divide hidden_size = {dim}")
    head_dim = _number(body, "head_dim", dim // heads)
    if head_dim * heads != dim:
        raise ValueError(
            f"head_dim = {head_dim}: here a head has hidden_size / num_attention_heads = {dim} / {heads} = {dim // heads} features"
        )
    sizes = {ours: _number(body, key, heads if ours == "n_kv_heads" else None) for ours, key in _SIZES.items()}
    config = Config(**sizes, norm_eps=_number(body, "rms_norm_eps", 1e-6), **_rope(body))
    tied = body.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ValueError(f"tie_word_embeddings = {_shown(tied)}: must be true or false")
    dtype = str(body.get("dtype") or body.get("torch_dtype") or "").removeprefix("torch.")
    unknown = sorted(key for key, value in body.items() if key not in _KNOWN and value not in (None, False))
    return Published(config, tied, dtype, _number(body, "max_position_embeddings", 0), tuple(unknown))


def write_config(
    config: Config, *, vocab_size: int, tied: bool, dtype: str, max_positions: int, special: Mapping[str, int]
) -> dict[str, Any]:
    """Returns config.json for these settings, with keys that transformers 4.43 and later read. `special`: bos_token_id and so on."""
    scaling = {"rope_type": "llama3", **{theirs: getattr(config, ours) for theirs, ours in _LLAMA3.items()}}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "vocab_size": vocab_size,  # not config.vocab_size, which may be 0
        "head_dim": config.dim // config.n_heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if config.rope_scaling > 1 else None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        **special,
    }


_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {  # keys that can change logits: supported values, and the reason
    "hidden_act": (("silu", "swish"), "the feed-forward here is SwiGLU"),
    "attention_bias": ((False, None), "projections here have no bias"),
    "mlp_bias": ((False, None), "projections here have no bias"),
    "attention_dropout": ((0, None), "there is no dropout here"),
    "partial_rotary_factor": ((1, None), "here all features of a head are rotated"),
    "rope_interleaved": ((False, None), "transformers' Llama pairs a feature with the one half a head away"),
    "sliding_window": ((None, False), "attention here is over all earlier tokens"),
    "use_sliding_window": ((False, None), "attention here is over all earlier tokens"),
    "quantization_config": ((None,), "quantised weights are not supported; save the model without quantisation first"),
    "auto_map": ((None, {}), "the model has code of its own, which is not run"),
    "add_cross_attention": ((False, None), "there is no encoder here"),
    "is_encoder_decoder": ((False, None), "there is no encoder here"),
}
# Keys that do not change logits: origin, training, sampling, implementation.
_KNOWN = frozenset(_NEUTRAL) | frozenset(_SIZES.values()) | {
    "architectures", "model_type", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "tie_word_embeddings", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "initializer_range",
    "use_cache", "pretraining_tp", "transformers_version", "_name_or_path", "_attn_implementation_autoset", "_commit_hash",
}  # fmt: skip
_LLAMA3 = {
    "factor": "rope_scaling",
    "low_freq_factor": "rope_low_freq",
    "high_freq_factor": "rope_high_freq",
    "original_max_position_embeddings": "rope_original_seq_len",
}


def _rope(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary settings from `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
    given: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        table = body.get(key) or {}
        if not isinstance(table, dict):
            raise ValueError(f"{key} = {_shown(table)}: must be a table, or null")
        for name, value in table.items():
            name = "rope_type" if name == "type" else name
            if given.setdefault(name, value) != value:
                raise ValueError(f"{key}.{name} = {_shown(value)}: elsewhere in the file it is {_shown(given[name])}")
    outer = _number(body, "rope_theta", 10_000.0)
    theta = _number(given, "rope_theta", outer)
    if "rope_theta" in body and theta != outer:
        raise ValueError(f"rope_parameters.rope_theta = {theta}: elsewhere in the file it is {outer}")
    kind = given.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise ValueError(
            f'rope_scaling.rope_type = {_shown(kind)}: another scaling of positions; supported: "llama3", or none'
        )
    wanted = _LLAMA3 if kind == "llama3" else {}
    if given.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"rope_parameters.partial_rotary_factor = {given['partial_rotary_factor']}: must be 1")
    others = sorted(given.keys() - wanted.keys() - {"rope_type", "rope_theta", "partial_rotary_factor"})
    if others:
        raise ValueError(
            f'rope_scaling.{others[0]} = {_shown(given[others[0]])}: has no meaning with rope_type = "{kind}"'
        )
    kinds: dict[str, type] = {"original_max_position_embeddings": int}
    found = {ours: _number(given, theirs, kind=kinds.get(theirs, float)) for theirs, ours in wanted.items()}
    if found.get("rope_scaling", 1) < 1:
        raise ValueError(f"rope_scaling.factor = {found['rope_scaling']}: must be at least 1")
    return {"rope_theta": float(theta), **found}


def _number(body: Mapping[str, Any], key: str, default: Any = None, *, kind: type | None = None) -> Any:
    """Returns body[key] as a positive number: an integer if the default is one or is missing. Null counts as absent."""
    value = body.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key}: missing")
        return default
    kind = kind or (float if isinstance(default, float) or key == "rope_theta" else int)
    legal = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, legal) or not 0 < value < float("inf"):
        raise ValueError(f"{key} = {_shown(value)}: must be a positive {'number' if kind is float else 'integer'}")
    return kind(value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
