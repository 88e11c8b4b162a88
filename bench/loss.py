"""Measures the fp32 upcast of the logits outside and inside of the loss, eager and compiled, and the loss in chunks without all logits.

    python bench/loss.py

Memory is the peak of forward and backward above the bf16 inputs, including their gradients; time is that of both. Inputs are the logits or,
in the variants "with the head", hidden state and weight. Each variant is one process for all rounds; the variants alternate.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.job import KEEP_MEMORY, memory_bytes, reset_peak
from bench.pairs import asking, in_turns, parser, ratio, serve, table, workers
from parallelisms.execution import CompileConfig
from parallelisms.loss import head_loss
from training.loss import cross_entropy_sum

VARIANTS = (
    "torch, upcast outside",
    "upcast outside",
    "upcast inside",
    "compiled, upcast outside",
    "compiled, upcast inside",
    "with the head, whole",
    "with the head, in chunks",
)
ROWS, CHUNK = 4096, 512  # tokens of a batch, and of a chunk
VOCAB, WIDTH, ROUNDS = 32_000, 128, 7
# Large tensors are mapped and unmapped at once, so that the resident size is the memory in use
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def main() -> None:
    if sys.argv[1:2] == ["--variant"]:
        return serve(LossSide(sys.argv[2]))
    parser(__doc__).parse_args()
    exact, reused = _measure(EXACT_MEMORY, 1), _measure(KEEP_MEMORY, ROUNDS)
    seconds = {name: [answer["seconds"] for answer in answers] for name, answers in reused.items()}
    rows = []
    for name, spent in seconds.items():
        ms, beside = f"{1e3 * statistics.median(spent):.1f}", str(ratio(spent, seconds[VARIANTS[0]]))
        rows.append((name, ms, beside, f"{exact[name][-1]['mib']:,.0f}"))
    sizes = f"{ROWS} tokens, vocabulary of {VOCAB}, width {WIDTH}, chunks of {CHUNK} tokens"
    print(f"{sizes}: the logits are {ROWS * VOCAB / 2**19:,.0f} MiB")
    print(table(("loss", "ms", "relative to the first", "peak MiB"), rows))


def _measure(env: dict[str, str], rounds: int) -> dict[str, list[dict[str, float]]]:
    commands = {name: [sys.executable, __file__, "--variant", name] for name in VARIANTS}
    with workers(commands, OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))), **env) as sides:
        return in_turns(asking(sides, do="turn"), rounds, warm=2)  # warmup: compilation, and first use of the memory


class LossSide:
    """A variant in its own process; the peak is the kernel's counter of resident memory."""

    def __init__(self, variant: str) -> None:
        self.loss = _loss(variant)
        shapes = [(1, ROWS, WIDTH), (VOCAB, WIDTH)] if "head" in variant else [(ROWS, VOCAB)]
        self.inputs = [torch.randn(shape).to(torch.bfloat16).requires_grad_() for shape in shapes]
        self.labels = torch.randint(0, VOCAB, self.inputs[0].shape[:-1])

    def turn(self) -> dict[str, float]:
        """Seconds and memory of one forward and backward."""
        held, began = reset_peak(), time.perf_counter()
        torch.autograd.grad(self.loss(*self.inputs, self.labels), self.inputs)
        return {"seconds": time.perf_counter() - began, "mib": (memory_bytes("VmHWM") - held) / 2**20}


def _loss(variant: str) -> Callable[..., Tensor]:
    """Returns a function of bf16 logits, or hidden state and weight, and labels. "upcast outside": the cast is before the compiled loss."""
    if "head" in variant:
        tokens = CHUNK if "chunks" in variant else 0
        return head_loss(cross_entropy_sum, chunk_tokens=tokens, loss_parallel=False, compile=CompileConfig())
    if variant.startswith("torch"):
        return lambda logits, labels: torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
    loss = torch.compile(cross_entropy_sum) if "compiled" in variant else cross_entropy_sum
    return loss if "inside" in variant else lambda logits, labels: loss(logits.float(), labels)


if __name__ == "__main__":
    main()
