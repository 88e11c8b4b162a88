"""scripts/hf.py needs memory for a tensor, not for the model: at most the size of the largest file and 300 MB."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from contrib.interchange.files import INDEX, index_json, shards, write_file
from models import llama, llama_hf
from tests.scripts.tiny_job import peak_bytes

pytestmark = [
    pytest.mark.timeout(900),  # the large one, on a slow disk
    pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc"),
]
MB = 10**6


def publish(folder: Path, config: llama.Config, *, vocab_size: int, file_bytes: int) -> int:
    """Writes a model of random bits in fp32. Returns the bytes of its largest file."""
    folder.mkdir(parents=True)
    planned = {
        entry.theirs: torch.empty(entry.shape, dtype=torch.float32, device="meta")
        for entry in llama_hf.Format().entries(config, vocab_size=vocab_size)
    }
    parts = list(shards(planned, file_bytes))
    for file, tensors in parts:
        write_file(folder / file, tensors, lambda name: torch.rand(planned[name].shape), lambda count: None)
    (folder / INDEX).write_text(index_json(parts))
    body = llama_hf.Format().write_config(config, vocab_size=vocab_size, dtype="float32", max_positions=64, special={})
    (folder / "config.json").write_text(json.dumps(body))
    return max((folder / file).stat().st_size for file, _ in parts)


def both_ways(folder: Path, config: llama.Config, *, vocab_size: int, file_bytes: int) -> tuple[int, list[int]]:
    """Returns the bytes of the largest file and the peaks of import and export. The exported weights equal the imported ones."""
    largest = publish(folder / "source", config, vocab_size=vocab_size, file_bytes=file_bytes)
    peaks = [
        peak_bytes("scripts.hf", "import", folder / "source", folder / "ours", "--tokenizer", ""),
        peak_bytes("scripts.hf", "export", folder / "ours", folder / "back", "--shard-gb", file_bytes / 1e9),
    ]
    for file in (folder / "source").glob("*.safetensors"):
        assert (folder / "back" / file.name).read_bytes() == file.read_bytes()
    shutil.rmtree(folder)
    return largest, peaks


def test_a_small_model_in_smaller_files(tmp_path: Path):
    config = llama.Config(dim=512, n_layers=12, n_heads=8, n_kv_heads=2, hidden_dim=2048)  # 12 layers of 15 MB
    largest, peaks = both_ways(tmp_path / "small", config, vocab_size=4096, file_bytes=60 * MB)
    assert max(peaks) <= largest + 300 * MB  # loading all of it would take 200 MB more


@pytest.mark.skipif(os.environ.get("PHAROS_LARGE") != "1", reason="writes 6 GB: PHAROS_LARGE=1 runs it")
def test_a_model_of_2_gb(tmp_path: Path):
    config = llama.Config(dim=2048, n_layers=8, n_heads=16, n_kv_heads=4, hidden_dim=5632)
    largest, peaks = both_ways(tmp_path / "large", config, vocab_size=32000, file_bytes=500 * MB)
    print(f"largest file {largest / 1e6:.0f} MB; peaks {[round(peak / 1e6) for peak in peaks]} MB")
    assert max(peaks) <= largest + 300 * MB
