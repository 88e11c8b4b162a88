"""Fixtures for scripts that run in the process of the test: a folder with a tiny job, and models written by transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.test_train import folder  # noqa: F401 (a fixture)


@pytest.fixture
def in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: F811
    """Changes into a folder with tiny.toml and its text."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield


@pytest.fixture(scope="session")
def transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported: nothing is to be fetched
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="session")
def published(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of each kind of model, with weights large enough that a wrong row changes the logits."""
    import torch  # not above: every test of this folder would wait for it

    from tests.scripts.hf_world import KINDS, V
    from tests.unit import test_tokenizer as tokenizers

    root = tmp_path_factory.mktemp("published")
    for number, (kind, (settings, largest)) in enumerate(KINDS.items()):
        torch.manual_seed(number)
        sizes = dict(
            vocab_size=V,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            max_position_embeddings=128,
            bos_token_id=1,
            eos_token_id=2,
        )
        config = transformers.AutoConfig.for_model(**{"model_type": "llama", **sizes, **settings})
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0, 0.7 * parameter.shape[1] ** -0.5)
        model.save_pretrained(root / kind, max_shard_size=largest)
        tokenizers.write(root / kind, "<s>", "</s>")
    return root
