"""models/llama_hf.py: both sets of names, the order of rows, config.json, and errors that name the unsupported part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from models import llama
from models.llama_hf import Entry, Format, Published

FORMAT = Format()
SMALL = llama.Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61)
TIED = replace(SMALL, enable_weight_tying=True)
# As published for Llama 3.2 1B.
PUBLISHED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}


def test_every_parameter_has_one_name_on_each_side_and_its_shape():
    with torch.device("meta"):
        model = llama.build(SMALL, vocab_size=61, max_seq_len=8)
    found = list(FORMAT.entries(SMALL, vocab_size=61))
    assert {e.ours: e.shape for e in found} == {name: tuple(p.shape) for name, p in model.named_parameters()}
    theirs = [entry.theirs for entry in found]
    assert len(set(theirs)) == len(theirs)
    assert theirs[0] == "model.embed_tokens.weight" and theirs[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert "model.layers.1.self_attn.q_proj.weight" in theirs and "model.layers.0.mlp.gate_proj.weight" in theirs
    tied = [entry.theirs for entry in FORMAT.entries(TIED, vocab_size=61)]
    assert tied == theirs[:-1]


def test_rows_of_a_head_stand_even_ones_first_in_their_files():
    entry = Entry("", "", (16, 1), heads=2)
    ours = torch.arange(16).unsqueeze(1)
    [theirs] = entry.to_theirs(ours)
    assert theirs.flatten().tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert torch.equal(entry.to_ours([theirs]), ours)
    kept = Entry("", "", (16, 1))
    assert kept.to_theirs(ours) == [ours] and kept.to_ours([ours]) is ours
    heads = {e.ours: e.heads for e in FORMAT.entries(SMALL, vocab_size=61) if e.heads}
    assert heads == {f"layers.{i}.attention.{w}.weight": n for i in (0, 1) for w, n in (("wq", 4), ("wk", 2))}


def test_a_published_config_is_read():
    found = FORMAT.read_config(PUBLISHED)
    assert found.config == llama.Config(
        vocab_size=128256,
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=8192,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=32.0,
        rope_low_freq=1.0,
        rope_high_freq=4.0,
        rope_original_seq_len=8192,
        enable_weight_tying=True,
    )
    assert (found.dtype, found.max_positions, found.unknown) == ("bfloat16", 131072, ())


def test_what_it_does_not_say_is_as_transformers_has_it():
    least = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    found = FORMAT.read_config({key: PUBLISHED[key] for key in least})
    assert (found.config.n_kv_heads, found.config.norm_eps, found.config.rope_theta) == (32, 1e-6, 10_000.0)
    assert (found.config.rope_scaling, found.config.enable_weight_tying, found.dtype) == (1.0, False, "")


def test_the_keys_of_transformers_5_say_the_same():
    newer = {key: value for key, value in PUBLISHED.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")}
    newer["rope_parameters"] = {**PUBLISHED["rope_scaling"], "rope_theta": 500000.0}
    newer["dtype"] = "bfloat16"
    assert FORMAT.read_config(newer) == FORMAT.read_config(PUBLISHED)
    older = {**PUBLISHED, "rope_scaling": {"type": "default"}}
    assert FORMAT.read_config(older) == FORMAT.read_config({**PUBLISHED, "rope_scaling": None})


@pytest.mark.parametrize("scaling", [1.0, 8.0])
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_written_is_read_back(scaling: float, tied: bool):
    # rope_low_freq and the others of rope_scaling = 1 mean nothing, and are not written
    stretched = {"rope_scaling": scaling, "rope_low_freq": 2.0, "rope_original_seq_len": 99}
    config = replace(SMALL, enable_weight_tying=tied, **({} if scaling == 1 else stretched))
    said: dict[str, Any] = {"dtype": "float32", "max_positions": 77}
    body = FORMAT.write_config(config, vocab_size=61, special={"bos_token_id": 3}, **said)
    assert body["bos_token_id"] == 3
    assert FORMAT.read_config(body) == Published(config, **said, unknown=())


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        'architectures = ["LlamaForSequenceClassification"]: another head; supported: ["LlamaForCausalLM"]',
    ),
    ({"hidden_act": "gelu"}, 'hidden_act = "gelu": the feed-forward here is SwiGLU; supported: "silu"'),
    ({"attention_bias": True}, "attention_bias = true: projections here have no bias; supported: false"),
    ({"mlp_bias": True}, "mlp_bias = true: projections here have no bias; supported: false"),
    ({"attention_dropout": 0.1}, "attention_dropout = 0.1: there is no dropout here; supported: 0"),
    ({"sliding_window": 4096}, "sliding_window = 4096: attention here is over all earlier tokens; supported: null"),
    (
        {"auto_map": {"AutoModel": "x.Y"}},
        'auto_map = {"AutoModel": "x.Y"}: the model has code of its own, which is not run',
    ),
    ({"quantization_config": {"bits": 4}}, 'quantization_config = {"bits": 4}: quantized weights are not supported'),
    ({"head_dim": 128}, "head_dim = 128: here a head has hidden_size / num_attention_heads = 2048 / 32 = 64 features"),
    ({"num_attention_heads": 30}, "num_attention_heads = 30: must divide hidden_size = 2048"),
    ({"vocab_size": None}, "vocab_size: missing"),
    ({"vocab_size": 1.5}, "vocab_size = 1.5: must be a positive integer"),
    ({"num_hidden_layers": True}, "num_hidden_layers = true: must be a positive integer"),
    ({"num_hidden_layers": 0}, "num_hidden_layers = 0: must be a positive integer"),
    ({"rms_norm_eps": "1e-5"}, 'rms_norm_eps = "1e-5": must be a positive number'),
    ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings = "yes": must be true or false'),
    ({"rope_scaling": "llama3"}, 'rope_scaling = "llama3": must be a table, or null'),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        'rope_scaling.rope_type = "linear": another scaling of positions; supported: "llama3"',
    ),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_scaling.rope_type = "yarn": another scaling'),
    ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "rope_scaling.factor = 2.0: has no meaning with"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor: missing"),
    ({"rope_scaling": {**PUBLISHED["rope_scaling"], "factor": 0.5}}, "rope_scaling.factor = 0.5: must be at least 1"),
    (
        {"rope_scaling": {**PUBLISHED["rope_scaling"], "beta_fast": 32}},
        "rope_scaling.beta_fast = 32: has no meaning with",
    ),
    ({"rope_parameters": {"factor": 8.0}}, "rope_parameters.factor = 8.0: elsewhere in the file it is 32.0"),
    (
        {"rope_parameters": {"rope_theta": 1e4}},
        "rope_parameters.rope_theta = 10000.0: elsewhere in the file it is 500000.0",
    ),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor = 0.5: must be 1"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: here all features of a head are rotated"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_the_model_cannot_express_is_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as raised:
        FORMAT.read_config({**PUBLISHED, **change})
    assert str(raised.value).startswith(message)


def test_keys_that_nobody_knows_are_named_unless_they_say_no():
    body = {**PUBLISHED, "unsloth_fixed": True, "is_llama_config": True, "kept_off": False, "empty": None}
    assert FORMAT.read_config(body).unknown == ("is_llama_config", "unsloth_fixed")
