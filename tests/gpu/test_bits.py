"""The same bits after a stop, and the host's gradients: what a device computes beside what is known."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from torch import Tensor

from bench.resume import TINY, compare
from models import llama
from tests.gpu.devices import one_device
from tests.scripts.tiny_job import ROOT, finished
from training.loss import cross_entropy_sum

pytestmark = one_device

N = 4  # steps before the stop, and after it
SIZES = llama.Config(dim=256, n_layers=4, n_heads=8, n_kv_heads=4, hidden_dim=704)
VOCAB_SIZE, T = 512, 128


def train(folder: Path, steps: int, *settings: str) -> None:
    command = [
        sys.executable, "train.py", "configs/llama.toml", f"--job.dump_folder={folder}", "--job.name=run", *TINY.split(),
        f"--training.steps={steps}", f"--lr_scheduler.total_steps={2 * N}", f"--checkpoint.interval={N}",
        "--training.deterministic=true", *settings,
    ]  # fmt: skip
    finished(command, cwd=ROOT)


def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    """A resumed bf16 run over fp32 weights, with deterministic kernels, has the same checkpoint entries and step lines."""
    train(tmp_path / "whole", 2 * N)
    for steps in (N, 2 * N):
        train(tmp_path / "stopped", steps)
    compared, differing = compare(tmp_path / "whole" / "run", tmp_path / "stopped" / "run", 2 * N)
    assert not differing, (compared, differing)


def test_gradients_in_fp32_are_those_of_the_host() -> None:
    host = llama.build(SIZES, vocab_size=VOCAB_SIZE, max_seq_len=T)
    host.init_weights(0)
    device = copy.deepcopy(host).cuda()
    tokens = torch.randint(0, VOCAB_SIZE, (2, T + 1), generator=torch.Generator().manual_seed(1))

    def gradients(model: llama.Llama) -> dict[str, Tensor]:
        inputs = tokens.to(next(model.parameters()).device)
        cross_entropy_sum(model(inputs[:, :-1]), inputs[:, 1:]).backward()
        return {name: parameter.grad.double().cpu() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]

    known, found = gradients(host), gradients(device)
    errors = {name: float((found[name] - known[name]).norm() / known[name].norm()) for name in known}
    assert max(errors.values()) < 1e-5, errors
