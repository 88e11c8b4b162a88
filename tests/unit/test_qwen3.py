"""models/qwen3.py: differences from Llama, and tied weights. Its logits are compared in tests/scripts/test_hf.py."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from models import llama, qwen3, qwen3_hf
from parallelisms.fsdp import fsdp_param_groups
from parallelisms.mesh import ParallelismConfig
from parallelisms.pipeline_plan import check_pipeline
from training.states import ModelState

SMALL = qwen3.Config(name="qwen3", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, head_dim=12)
TIED = replace(SMALL, enable_weight_tying=True)
V, T = 61, 24
# By Hugging Face's pages of the models.
PUBLISHED = {
    "0.6B": 596_049_920, "1.7B": 1_720_574_976, "4B": 4_022_468_096, "8B": 8_190_735_360, "14B": 14_768_307_200, "32B": 32_762_123_264
}  # fmt: skip


def built(config: llama.Config = SMALL) -> llama.Llama:
    build: Any = qwen3.build if isinstance(config, qwen3.Config) else llama.build
    with torch.device("meta"):
        model: llama.Llama = build(config, vocab_size=V, max_seq_len=T)
    model.to_empty(device="cpu")
    model.init_weights(0)
    return model


def test_the_table_of_sizes_has_the_published_numbers_of_parameters():
    rows = re.findall(
        r"^    (\S+B) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(true|false)$", qwen3.__doc__ or "", re.MULTILINE
    )
    keys = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim")
    found = {}
    for size, *numbers, tied in rows:
        sizes: dict[str, Any] = dict(zip(keys, map(int, numbers), strict=True))
        config = qwen3.Config(**sizes, head_dim=128, enable_weight_tying=tied == "true")
        with torch.device("meta"):
            found[size] = sum(p.numel() for p in qwen3.build(config, vocab_size=151936, max_seq_len=8).parameters())
    assert found == PUBLISHED


@pytest.mark.parametrize("config", [SMALL, TIED], ids=["untied", "tied"])
def test_width_of_heads_is_the_models_own(config: qwen3.Config):
    model = built(config)
    assert model.layers["0"].attention.wq.weight.shape == (48, 32) and model.freqs_cis.shape == (T, 6, 2)
    embedding = V * 32  # a lookup, but as the head's weight a product
    weights = sum(p.numel() for p in model.parameters()) - (0 if model.tied else embedding)
    assert model.flops_per_token(T) == 6 * weights + 12 * 2 * (4 * 12) * T
    x = torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(2, T)
    pieces = [model(x[:, a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, T))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(x), rtol=1e-5, atol=1e-5)


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match=re.escape("model.head_dim = 13: must be even (")):
        replace(SMALL, head_dim=13).check()
    replace(SMALL, dim=33, n_heads=6).check()  # the model's width may be anything
    with pytest.raises(ValueError, match=r"model.n_kv_heads = 3: must divide model.n_heads = 4"):
        replace(SMALL, n_kv_heads=3).check()


@pytest.mark.parametrize(
    "config", [TIED, llama.Config(dim=32, n_heads=4, enable_weight_tying=True)], ids=["qwen3", "llama"]
)
def test_tied_weights_are_one_parameter_that_is_saved_once(config: llama.Config):
    model = built(config)
    for each in (model, copy.deepcopy(model)):
        assert each.output.weight is each.tok_embeddings.weight
        assert not any("output" in name for name, _ in each.named_parameters())
        assert not any("output" in name for name in ModelState([each]).state_dict())
        [ends] = [group for group in fsdp_param_groups(each, 1) if each.output in group]
        assert ends == [each.tok_embeddings, each.norm, each.output]  # FSDP shards a parameter in one group
    state = {name: torch.full_like(value, 0.5) for name, value in ModelState([model]).state_dict().items()}
    ModelState([model]).load_state_dict(state)
    assert model.output.weight is model.tok_embeddings.weight and (model.output.weight == 0.5).all()
    # as the head's, since logits of a normal embedding would be as large as the root of the width
    assert built(config).tok_embeddings.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)


def test_a_pipeline_of_tied_ends_is_refused_by_name():
    pipeline = ParallelismConfig(pipeline_parallel_degree=2)
    sizes: dict[str, Any] = {"layers": ["0", "1"], "local_batch_size": 8, "compiled_blocks": False}
    check_pipeline(pipeline, **sizes)
    check_pipeline(ParallelismConfig(), **sizes, tied=True)
    with pytest.raises(ValueError) as raised:
        check_pipeline(pipeline, **sizes, tied=True)
    assert str(raised.value) == (
        "parallelism.pipeline_parallel_degree = 2: the embedding, in the first stage, and the output, in the last, share one matrix by "
        "model.enable_weight_tying = true; nearest: 1, or model.enable_weight_tying = false"
    )


# As published for Qwen3 0.6B, in the keys of transformers 5.
BODY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936, "layer_types": ["full_attention"] * 28,
}  # fmt: skip


def test_hugging_face_names_and_settings():
    format = qwen3_hf.Format()
    found = format.read_config(BODY)
    assert found.unknown == () and found.config == qwen3.Config(
        name="qwen3", vocab_size=151936, dim=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, hidden_dim=3072, norm_eps=1e-6,
        rope_theta=1e6, enable_weight_tying=True,
    )  # fmt: skip
    written = format.write_config(found.config, vocab_size=151936, dtype="float32", max_positions=7, special={})
    assert format.read_config(written).config == found.config
    for config in (SMALL, TIED):
        named = {entry.ours: entry.shape for entry in format.entries(config, vocab_size=V)}
        assert named == {name: tuple(p.shape) for name, p in built(config).named_parameters()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, 'layer_types = ["sliding_attention"]: attention here is over all'),
        ({"layer_types": 1}, "layer_types = 1: attention here is over all earlier tokens"),
        ({"use_sliding_window": True}, "use_sliding_window = true: attention here is over all earlier tokens"),
        ({"num_key_value_heads": None}, "num_key_value_heads: missing"),
        ({"head_dim": 0}, "head_dim = 0: must be a positive integer"),
    ],
)
def test_settings_that_the_model_does_not_have_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        qwen3_hf.Format().read_config({**BODY, **change})
