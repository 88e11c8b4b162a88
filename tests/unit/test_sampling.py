"""Drawing text."""

from __future__ import annotations

import torch

from models import llama
from models.contract import Model
from training.sampling import SampleConfig, draw, generate, why_no_text


def small_model() -> llama.Llama:
    model = llama.build(
        llama.Config(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, hidden_dim=24), vocab_size=11, max_seq_len=40
    )
    model.init_weights(0)
    return model


def test_a_cache_is_optional():
    """The contract's own new_cache means that there is none."""
    assert why_no_text(small_model()) == ""
    assert why_no_text(Model()).startswith("the model has no new_cache")


def test_the_same_seed_gives_the_same_text():
    model, prompt = small_model(), torch.tensor([1, 2, 3])
    texts = [list(generate(model, prompt, SampleConfig(seed=seed), length=20)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2] and len(texts[0]) == 20


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
