"""Compares the fp32 loss curve of Qwen3 with torchtitan's, from the same initial weights, on the same batches of Python's source text.

    PYTHON bench/curve.py [--steps 50]

PYTHON has torchtitan 0.2 and what this repository needs: both models are trained in one process, one step each in turn, by the steps of
step.py, with the same clipping and AdamW. Exit code 1 if the losses of a step differ by more than 1e-4; 2: no torchtitan.
"""

from __future__ import annotations

import sys
import sysconfig
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from bench.pairs import parser, table
from bench.step import MODELS, our_config, pharos, torchtitan
from models.qwen3_hf import Format

BOUND = 1e-4
SHOWN = (1, 2, 5, 10, 20, 30, 40, 50)


def main(argv: list[str]) -> None:
    flags = parser(__doc__, steps=(50, "optimizer steps"))
    options = flags.parse_args(argv)
    if find_spec("torchtitan") is None:
        flags.error(
            f"{sys.executable} has no torchtitan; run this with a Python that has it, and what this repository needs"
        )
    sizes = MODELS["qwen3"]
    with ExitStack() as cleanup:
        our_step, ours = pharos(sizes, "fp32", torch.device("cpu"), cleanup)
        their_step, theirs = torchtitan(sizes, "fp32", torch.device("cpu"), cleanup)
        copy(sizes, ours, theirs)
        losses = [(float(our_step(*batch)), float(their_step(*batch))) for batch in batches(sizes, options.steps)]
    rows = [
        (str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
        for step, (a, b) in enumerate(losses, 1)
        if step in SHOWN
    ]
    print(table(("step", "pharos", "torchtitan", "difference"), rows))
    largest = max(abs(a - b) for a, b in losses)
    held = "reached" if largest <= BOUND else "NOT reached"
    print(f"largest difference in {len(losses)} steps {largest:.1e}; bound {BOUND:g} {held}")
    sys.exit(largest > BOUND)


def copy(sizes: dict[str, int], ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Copies the weights. torchtitan's names are ours, and the order of the rows is Hugging Face's."""
    weights = {key: p.full_tensor() if isinstance(p, DTensor) else p for key, p in ours.named_parameters()}
    targets = dict(theirs.named_parameters())
    assert targets.keys() == weights.keys(), targets.keys() ^ weights.keys()
    with torch.no_grad():
        for entry in Format().entries(our_config(sizes), vocab_size=sizes["vocab"]):
            [weight] = entry.to_theirs(weights[entry.ours])
            targets[entry.ours].copy_(weight)


def batches(sizes: dict[str, int], steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns inputs and labels of each step, [B, T]; a token is a byte."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    at = np.random.default_rng(0).integers(len(text) - sizes["seq"], size=(steps, sizes["batch"]))
    tokens = torch.from_numpy(text[at[..., None] + np.arange(sizes["seq"] + 1)].astype(np.int64))
    return [(batch[:, :-1], batch[:, 1:]) for batch in tokens]


if __name__ == "__main__":
    main(sys.argv[1:])
