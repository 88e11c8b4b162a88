"""Helpers for tests of scripts/hf.py: the script in this process, the content of files, and the logits of both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from configs.load import load
from contrib.interchange.hf import TensorByTensor
from scripts import hf
from scripts.generate import load_model
from tests.unit import test_tokenizer as tokenizers
from training.tokenizer import ByteTokenizer

V, T = 300, 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,  # so that within T tokens all three kinds of frequencies turn
}
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe", "head_dim": 24, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}  # fmt: skip
# Of transformers' own models: settings that differ from a small Llama's, and the largest file.
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "grouped": ({}, "5GB"),
    "sharded": ({"rope_parameters": LLAMA3}, "60KB"),
    "tied": ({"tie_word_embeddings": True, "num_key_value_heads": 4}, "5GB"),
    "tied_sharded": ({"tie_word_embeddings": True, "num_key_value_heads": 1, "rope_parameters": LLAMA3}, "60KB"),
    "qwen3": ({"model_type": "qwen3", "head_dim": 24}, "5GB"),
    "qwen3_moe": ({**MIXTURE, "mlp_only_layers": [0]}, "5GB"),
    "qwen3_moe_of_other_heads": ({key: value for key, value in MIXTURE.items() if key != "head_dim"}, "5GB"),
    "qwen3_moe_sharded": ({**MIXTURE, "norm_topk_prob": False}, "60KB"),
    "qwen3_tied_sharded": ({"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}, "60KB"),
}


def run(*arguments: object) -> int:
    """Runs the script in this process. Returns the exit code."""
    return hf.main([str(argument) for argument in arguments])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Returns the error message of a refused call, after checking that nothing was written."""
    capsys.readouterr()
    there = sorted(Path.cwd().iterdir())
    assert run(*arguments) == 2
    assert sorted(Path.cwd().iterdir()) == there
    [line] = capsys.readouterr().err.splitlines()
    return line


def tensors(published: Path) -> dict[str, Tensor]:
    return {name: value for file in published.glob("*.safetensors") for name, value in load_file(file).items()}


def saved(checkpoint: Path) -> dict[str, Tensor]:
    reader = TensorByTensor(checkpoint)
    return {name: reader.read(name) for name in reader.tensors}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Returns True if both have the same names, dtypes and bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def tokens() -> Tensor:
    return torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def our_logits(out: Path, step: Path | None = None) -> Tensor:
    config = load([str(out / "config.toml")])
    model = load_model(config, step or out / "checkpoint" / "step-0", ByteTokenizer(), length=T, dtype="float32")
    return model(tokens())


@torch.no_grad()
def their_logits(transformers: Any, published: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(published)
    assert model.dtype == torch.float32
    return model(tokens()).logits


def tokenizers_of(published: Path) -> dict[str, str]:
    """Writes tokenizer files there. Returns name -> text."""
    tokenizers.write(published, "<s>", "</s>", config={"bos_token": "<s>", "eos_token": "</s>"})
    (published / "special_tokens_map.json").write_text("{}")
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    return {name: (published / name).read_text() for name in names}
