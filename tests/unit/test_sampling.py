"""Text generation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from models import llama
from models.contract import Model
from training.sampling import SampleConfig, draw, generate, sample_text, why_no_text
from training.tokenizer import ByteTokenizer, build_tokenizer


def small_model(vocab_size: int = 11) -> llama.Llama:
    model = llama.build(
        llama.Config(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, hidden_dim=24), vocab_size=vocab_size, max_seq_len=40
    )
    model.init_weights(0)
    return model


def test_a_cache_is_optional():
    """The default new_cache of the contract means that a model has no cache."""
    assert why_no_text(small_model()) == ""
    assert why_no_text(Model()).startswith("the model has no new_cache")


def test_the_same_seed_gives_the_same_text():
    model, prompt = small_model(), torch.tensor([1, 2, 3])
    texts = [list(generate(model, prompt, SampleConfig(seed=seed), length=20)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2] and len(texts[0]) == 20


def test_the_sample_of_a_run_has_no_dropout():
    model, cpu = small_model(ByteTokenizer().vocab_size), torch.device("cpu")
    plain = sample_text(model, ByteTokenizer(), SampleConfig(prompt="ab"), 40, cpu)
    model.layers["0"].register_forward_hook(lambda block, _, hidden: F.dropout(hidden, 0.9, block.training))
    assert plain == sample_text(model, ByteTokenizer(), SampleConfig(prompt="ab"), 40, cpu)
    assert plain.startswith("text sample:\nab") and model.layers["0"].training


def test_a_continuation_keeps_its_first_space(tmp_path: Path):
    """A tokenizer as SentencePiece makes them: U+2581 is a space, which is left out at the beginning of a text."""
    pytest.importorskip("tokenizers")
    spaces = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True}
    vocabulary = {"\u2581b": 0, "\u2581a": 1, "<s>": 2, "</s>": 3}
    words = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "</s>"}
    parts = {"version": "1.0", "added_tokens": [], "pre_tokenizer": spaces, "decoder": spaces, "model": words}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    model = small_model(len(vocabulary))
    torch.nn.init.zeros_(model.output.weight)  # the most likely token is the first
    sample = sample_text(
        model,
        build_tokenizer(str(tmp_path)),
        SampleConfig(tokens=2, prompt="a", temperature=0),
        40,
        torch.device("cpu"),
    )
    assert sample == "text sample:\na b b"


def test_a_prompt_that_leaves_no_room_is_named():
    model, prompt, cpu = small_model(), "abcdefg", torch.device("cpu")
    assert sample_text(model, ByteTokenizer(), SampleConfig(prompt=prompt), 8, cpu) == (
        "no text sample: sample.prompt has 8 tokens with BOS, training.seq_len is 8"
    )
    assert sample_text(model, ByteTokenizer(), SampleConfig(tokens=0, prompt=prompt), 8, cpu) == ""


def test_greedy_text_is_what_uncached_forwards_give():
    model, read = small_model(), [1, 2, 3]
    drawn = list(generate(model, torch.tensor(read), SampleConfig(temperature=0), length=12))
    for token in drawn:
        assert token == int(model(torch.tensor([read]))[0, -1].argmax())
        read.append(token)


def test_top_k_draws_among_the_likeliest():
    logits, generator = torch.tensor([0.0, 3.0, 1.0, 2.9]), torch.Generator().manual_seed(0)
    drawn = {draw(logits, SampleConfig(top_k=2, temperature=5.0), generator) for _ in range(200)}
    assert drawn == {1, 3}
    assert {draw(logits, SampleConfig(top_k=0, temperature=5.0), generator) for _ in range(200)} == {0, 1, 2, 3}
    assert torch.equal(logits, torch.tensor([0.0, 3.0, 1.0, 2.9]))  # the caller's logits are left alone
