"""Conversion of Llama from and to Hugging Face's format: parameter names, order of rows, config.json. "Theirs" is Hugging Face's.

Flow: scripts/hf.py -> contrib/interchange/ (files) -> `Format` of models/<name>_hf.py, found on import by its `model_type`, that of
config.json, and on export by model.name.

Rotary positions rotate pairs of features. Ours are neighbours, (2i, 2i + 1), as in Meta's files; theirs are (i, i + D/2). So the rows
of each head of the query and key projections have a different order in their files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.llama import Config, rotary_table


@dataclass(frozen=True)
class Entry:
    """One parameter under both names. `heads`: number of heads of queries or keys in its rows; 0 for all others. Experts are one
    parameter [E, ...] here and E there: `theirs` has {} for the expert."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    heads: int = 0

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Their names and shapes."""
        if "{}" not in self.theirs:
            return {self.theirs: self.shape}
        return {self.theirs.format(expert): self.shape[1:] for expert in range(self.shape[0])}

    def to_theirs(self, weight: Tensor) -> Iterable[Tensor]:
        """Returns the values of each part with the rows in Hugging Face's order: each head's even rows, then its odd rows."""
        if "{}" in self.theirs:
            return weight.unbind()
        return [self._reordered(weight, -1, 2)]  # [H, D/2, 2, C] -> [H * D, C]

    def to_ours(self, parts: Iterable[Tensor]) -> Tensor:
        if "{}" in self.theirs:
            return torch.stack(list(parts))
        [weight] = parts
        return self._reordered(weight, 2, -1)  # [H, 2, D/2, C] -> [H * D, C]

    def _reordered(self, weight: Tensor, *sizes: int) -> Tensor:
        return weight.unflatten(0, (self.heads, *sizes)).transpose(1, 2).flatten(0, 2) if self.heads else weight


@dataclass(frozen=True)
class Published:
    """The settings of a config.json."""

    config: Config  # [model], without tokenizer_path
    dtype: str  # "bfloat16", ...; "": not given
    max_positions: int  # 0: not given
    unknown: tuple[str, ...]  # keys with a value that are in none of Format's tables


class Format:
    """Llama's format. A model whose files differ in some names or settings extends it, as models/qwen3_hf.py does."""

    model_type, architecture = "llama", "LlamaForCausalLM"
    config: type[Config] = Config
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    derived = ".self_attn.rotary_emb.inv_freq"  # in files of 2023: frequencies, which follow from rope_theta
    sizes: Mapping[str, str] = {  # ours -> theirs, in config.json
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
    }
    layer: Mapping[str, str] = {  # ours -> theirs, in each layer
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
    # Keys of config.json of which only these values are implemented, and why
    supported_values: Mapping[str, tuple[tuple[Any, ...], str]] = {
        "hidden_act": (("silu", "swish"), "the feed-forward here is SwiGLU"),
        "attention_bias": ((False, None), "projections here have no bias"),
        "mlp_bias": ((False, None), "projections here have no bias"),
        "attention_dropout": ((0, None), "there is no dropout here"),
        "partial_rotary_factor": ((1, None), "here all features of a head are rotated"),
        "rope_interleaved": ((False, None), "transformers' Llama pairs a feature with the one half a head away"),
        "sliding_window": ((None, False), "attention here is over all earlier tokens"),
        "use_sliding_window": ((False, None), "attention here is over all earlier tokens"),
        "quantization_config": ((None,), "quantized weights are not supported; save the model without them first"),
        "auto_map": ((None, {}), "the model has code of its own, which is not run"),
        "add_cross_attention": ((False, None), "there is no encoder here"),
        "is_encoder_decoder": ((False, None), "there is no encoder here"),
    }
    # Keys that do not change logits (origin, training, sampling, implementation), or that are read by name
    ignored_keys = frozenset((
        "architectures", "model_type", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
        "rope_parameters", "tie_word_embeddings", "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
        "initializer_range", "use_cache", "pretraining_tp", "transformers_version", "_name_or_path", "_attn_implementation_autoset",
        "_commit_hash",
    ))  # fmt: skip

    @property
    def name(self) -> str:
        """The model's name, from the file of the class: models/<name>_hf.py."""
        return type(self).__module__.removeprefix("models.").removesuffix("_hf")

    def shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a layer's parameters, except those of norms of the model's width."""
        # Without building a model, for which torch would load its compiler (30 MB) even on the meta device.
        dim, hidden_dim = config.dim, config.hidden_dim
        q_dim, kv_dim = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        return {
            "attention.wq": (q_dim, dim),
            "attention.wk": (kv_dim, dim),
            "attention.wv": (kv_dim, dim),
            "attention.wo": (dim, q_dim),
            "feed_forward.w1": (hidden_dim, dim),
            "feed_forward.w3": (hidden_dim, dim),
            "feed_forward.w2": (dim, hidden_dim),
        }

    def names(self, config: Any, layer: int) -> Mapping[str, str]:
        """Returns ours -> theirs of one layer."""
        return self.layer

    def heads(self, config: Any) -> dict[str, int]:
        """Returns the number of heads in the rows of the parameters that rotary positions are applied to."""
        return {"attention.wq": config.n_heads, "attention.wk": config.n_kv_heads}

    def entries(self, config: Any, *, vocab_size: int) -> Iterator[Entry]:
        """Yields every parameter of the model, in the order of the forward; a tied one once."""
        shapes, heads = self.shapes(config), self.heads(config)
        yield Entry("tok_embeddings.weight", self.embedding, (vocab_size, config.dim))
        for layer in range(config.n_layers):
            for ours, theirs in self.names(config, layer).items():
                is_parameter = ".experts." in ours or ours.endswith(".bias")  # else a module
                leaf = "" if is_parameter else ".weight"
                names = f"layers.{layer}.{ours}{leaf}", f"model.layers.{layer}.{theirs}{leaf}"
                yield Entry(*names, shapes.get(ours, (config.dim,)), heads.get(ours, 0))
        yield Entry("norm.weight", "model.norm.weight", (config.dim,))
        if not config.enable_weight_tying:
            yield Entry("output.weight", self.head, (vocab_size, config.dim))

    def buffers(self, config: Any, length: int) -> dict[str, Tensor]:
        """Returns the persistent buffers, which are computed, for sequences of up to `length` tokens."""
        return {"freqs_cis": rotary_table(config, length)}

    def read_config(self, body: Mapping[str, Any]) -> Published:
        """Converts the settings of config.json. Raises ValueError ("key = value: ...") for settings that this model does not support."""
        if body.get("architectures") not in (None, [self.architecture]):
            raise ValueError(
                f'architectures = {shown(body["architectures"])}: another head; supported: ["{self.architecture}"]'
            )
        for key, (allowed, cause) in self.supported_values.items():
            if key in body and body[key] not in allowed:
                raise ValueError(f"{key} = {shown(body[key])}: {cause}; supported: {shown(allowed[0])}")
        own = self.own_settings(body)
        heads = number(body, "num_attention_heads")
        sizes = {ours: number(body, key, heads if ours == "n_kv_heads" else None) for ours, key in self.sizes.items()}
        tied = body.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise ValueError(f"tie_word_embeddings = {shown(tied)}: must be true or false")
        eps = number(body, "rms_norm_eps", 1e-6)
        settings = {
            "name": self.name,
            "norm_eps": eps,
            "enable_weight_tying": tied,
            **sizes,
            **_rope(body),
            **own,
        }
        dtype = str(body.get("dtype") or body.get("torch_dtype") or "").removeprefix("torch.")
        known = {*self.supported_values, *self.sizes.values(), *self.ignored_keys}
        unknown = sorted(key for key, value in body.items() if key not in known and value not in (None, False))
        max_positions = number(body, "max_position_embeddings", 0)
        return Published(self.config(**settings), dtype, max_positions, tuple(unknown))

    def own_settings(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Checks and returns the settings that only this model has. Raises ValueError."""
        dim, heads = number(body, "hidden_size"), number(body, "num_attention_heads")
        if dim % heads:
            raise ValueError(f"num_attention_heads = {heads}: must divide hidden_size = {dim}")
        head_dim = number(body, "head_dim", dim // heads)
        if head_dim * heads != dim:
            raise ValueError(
                f"head_dim = {head_dim}: here a head has hidden_size / num_attention_heads = {dim} / {heads} = {dim // heads} features"
            )
        return {}

    def write_config(
        self, config: Any, *, vocab_size: int, dtype: str, max_positions: int, special: Mapping[str, int]
    ) -> dict[str, Any]:
        """Returns config.json for these settings, with keys that transformers 4.43 and later read. `special`: bos_token_id and so on."""
        scaling = {"rope_type": "llama3", **{theirs: getattr(config, ours) for theirs, ours in _LLAMA3.items()}}
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for ours, theirs in self.sizes.items()},
            "vocab_size": vocab_size,  # not config.vocab_size, which may be 0
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": max_positions,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "rope_scaling": scaling if config.rope_scaling > 1 else None,
            **{key: False for key in ("attention_bias", "mlp_bias") if key in self.supported_values},
            "attention_dropout": 0.0,
            "tie_word_embeddings": config.enable_weight_tying,
            "torch_dtype": dtype,
            **special,
        }


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
            raise ValueError(f"{key} = {shown(table)}: must be a table, or null")
        for name, value in table.items():
            name = "rope_type" if name == "type" else name
            if given.setdefault(name, value) != value:
                raise ValueError(f"{key}.{name} = {shown(value)}: elsewhere in the file it is {shown(given[name])}")
    outer = number(body, "rope_theta", 10_000.0)
    theta = number(given, "rope_theta", outer)
    if "rope_theta" in body and theta != outer:
        raise ValueError(f"rope_parameters.rope_theta = {theta}: elsewhere in the file it is {outer}")
    kind = given.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise ValueError(
            f'rope_scaling.rope_type = {shown(kind)}: another scaling of positions; supported: "llama3", or none'
        )
    wanted = _LLAMA3 if kind == "llama3" else {}
    if given.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"rope_parameters.partial_rotary_factor = {given['partial_rotary_factor']}: must be 1")
    others = sorted(given.keys() - wanted.keys() - {"rope_type", "rope_theta", "partial_rotary_factor"})
    if others:
        raise ValueError(
            f'rope_scaling.{others[0]} = {shown(given[others[0]])}: has no meaning with rope_type = "{kind}"'
        )
    kinds: dict[str, type] = {"original_max_position_embeddings": int}
    found = {ours: number(given, theirs, kind=kinds.get(theirs, float)) for theirs, ours in wanted.items()}
    if found.get("rope_scaling", 1) < 1:
        raise ValueError(f"rope_scaling.factor = {found['rope_scaling']}: must be at least 1")
    return {"rope_theta": float(theta), **found}


def number(body: Mapping[str, Any], key: str, default: Any = None, *, kind: type | None = None) -> Any:
    """Returns body[key] as a positive number: an integer if the default is one or is missing. Null counts as absent."""
    value = body.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key}: missing")
        return default
    kind = kind or (float if isinstance(default, float) or key == "rope_theta" else int)
    legal = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, legal) or not 0 < value < float("inf"):
        raise ValueError(f"{key} = {shown(value)}: must be a positive {'number' if kind is float else 'integer'}")
    return kind(value)


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
