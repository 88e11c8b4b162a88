"""scripts/generate.py: generates text from a run, whatever layout trained it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor

from configs.load import load
from configs.schema import model_module
from scripts.generate import load_model
from tests.scripts.test_train import Job, folder  # noqa: F401 (a fixture)
from tests.scripts.tiny_job import ROOT, finished
from tests.unit.fakes import add_models
from training import checkpoint_dcp
from training.tokenizer import ByteTokenizer

pytestmark = pytest.mark.timeout(300)  # several starts in one test, each with an import of torch


def generate(run: Path, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return finished([sys.executable, ROOT / "scripts" / "generate.py", run, *options], code=code)


FORK = """
from torch import full, nn
from models import llama

class Config(llama.Config): ...

class Fork(llama.Llama):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("seen", full((3,), 1.0))

def build(config, *, vocab_size, max_seq_len):
    return Fork(config, vocab_size, max_seq_len)
"""


@pytest.mark.parametrize("state", ["model", "ema"])
def test_persistent_buffers_are_read_unless_they_are_computed(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "fork.py").write_text(FORK)
    add_models(monkeypatch, tmp_path / "models")
    (tmp_path / "a.toml").write_text('[model]\nname = "fork"\nn_layers = 1\ndim = 32\nn_heads = 2\nn_kv_heads = 2\n')
    config, wider = (load([str(tmp_path / "a.toml"), f"--model.dim={dim}"]) for dim in (32, 64))
    model = model_module("fork").build(config.model, vocab_size=259, max_seq_len=64)
    model.init_weights(0)
    model.seen.fill_(3.0)
    saved = {"model": model.state_dict(), "ema": dict(model.named_parameters())}
    checkpoint_dcp.write(saved, tmp_path / "step-1", group=None)
    read = partial(
        load_model, path=tmp_path / "step-1", tokenizer=ByteTokenizer(), length=8, dtype="float32", state=state
    )
    seen = read(config).seen
    assert isinstance(seen, Tensor) and seen.tolist() == [3.0] * 3
    with pytest.raises(OSError, match=r"step-1: .*Size mismatch"):
        read(wider)


def test_generate_reads_the_newest_whole_checkpoint(folder: Path):  # noqa: F811
    job = Job(folder, "--training.steps=4", "--checkpoint.interval=2", "--validation.enable=false", nproc=2)
    assert job.end() == 0, job.text
    run = folder / "outputs" / "tiny"

    drawn = generate(run, "--prompt", "ab", "--tokens", "40", "--temperature", "0")
    assert drawn.stdout.startswith("ab") and "step-4: " in drawn.stderr
    own_prompt = generate(run, "--tokens", "40", "--temperature", "0")
    assert own_prompt.stdout == drawn.stdout, "the run's own prompt is the same"

    command = [sys.executable, ROOT / "scripts" / "generate.py", run, "--prompt", "é", "--tokens", "40"]
    assert finished(command, PYTHONIOENCODING="ascii").stdout.startswith("\\xe9")
    reads, writes = os.pipe()
    os.close(reads)  # as `| head` after its last line
    with os.fdopen(writes) as pipe:
        gone = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert gone.returncode == 128 + signal.SIGPIPE and "Traceback" not in gone.stderr

    damaged = next((run / "checkpoint" / "step-4").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    earlier = generate(run, "--tokens", "4")
    assert "step-4 is damaged" in earlier.stderr and "step-2: " in earlier.stderr

    for options, message in [
        (("--step", "3"), f"generate: --step 3: {run}/checkpoint has 2, 4"),
        (("--tokens", "-1"), "generate: --sample.tokens = -1: must be an integer >= 0"),
    ]:
        assert generate(run, *options, code=2).stderr.strip() == message
