"""The cost of the fp32 upcast of the logits outside of the loss (as models used to do it) and inside, eager and compiled; and what it
costs to have logits at all.

    python bench/loss.py [--rows 4096] [--vocab 32000] [--width 128] [--chunk 512] [--rounds 7] [--device cpu|cuda]

Bytes are the most that forward and backward of the loss hold beside its bf16 inputs, their gradients included; time is that of
both. Inputs are the logits, or, of the variants "with the head", hidden state and weight. Each variant is one process that lives
through all rounds; they take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.pairs import Worker, in_turns, ratio, table
from parallelisms.layout import CompileConfig
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
# Large tensors come from the kernel and go back to it at once, so the resident size is what is held
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
REUSED_MEMORY = dict.fromkeys(EXACT_MEMORY, str(1 << 30))  # as parallelisms/device.py sets it for a run


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="tokens of a batch")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--width", type=int, default=128, help="of the hidden state")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)  # set in the processes of the variants
    options = parser.parse_args(argv)
    if options.variant:
        return _serve(options)
    env = {"OMP_NUM_THREADS": str(options.threads)}
    megabytes = {name: answers[-1]["mib"] for name, answers in _measure(argv, env | EXACT_MEMORY, rounds=1).items()}
    seconds = {
        name: [answer["seconds"] for answer in answers]
        for name, answers in _measure(argv, env | REUSED_MEMORY, rounds=options.rounds).items()
    }
    rows = [
        (
            name,
            f"{1e3 * statistics.median(seconds[name]):.1f}",
            str(ratio(seconds[name], seconds[VARIANTS[0]])),
            f"{megabytes[name]:,.0f}",
        )
        for name in VARIANTS
    ]
    print(
        f"{options.rows} tokens, vocabulary of {options.vocab}, width {options.width}, chunks of {options.chunk} tokens: "
        f"the logits are {options.rows * options.vocab / 2**19:,.0f} MiB"
    )
    print(table(("loss", "ms", "time to the first", "MiB held at most"), rows))
    return 0


def _measure(argv: Sequence[str], env: dict[str, str], *, rounds: int) -> dict[str, list[dict[str, float]]]:
    workers = [Worker(name, [sys.executable, __file__, *argv, "--variant", name], env) for name in VARIANTS]
    try:
        in_turns(workers, {}, rounds=2)  # compiles, and touches the memory
        return in_turns(workers, {}, rounds=rounds)
    finally:
        for worker in workers:
            worker.close()


def _serve(options: argparse.Namespace) -> int:
    """Answers each line with the seconds and the memory of one forward and backward."""
    loss = _loss(options.variant, chunk_tokens=options.chunk)
    head = "head" in options.variant
    shapes = (
        [(1, options.rows, options.width), (options.vocab, options.width)] if head else [(options.rows, options.vocab)]
    )
    inputs = [torch.randn(shape).to(options.device, torch.bfloat16).requires_grad_() for shape in shapes]
    labels = torch.randint(0, options.vocab, inputs[0].shape[:-1], device=options.device)
    memory = CudaMemory() if labels.is_cuda else ResidentMemory()
    for _ in sys.stdin:
        held = memory.start()
        began = time.perf_counter()
        torch.autograd.grad(loss(*inputs, labels), inputs)
        peak = memory.peak()  # on a GPU this waits for it
        print(json.dumps({"seconds": time.perf_counter() - began, "mib": (peak - held) / 2**20}), flush=True)
    return 0


def _loss(variant: str, *, chunk_tokens: int) -> Callable[..., Tensor]:
    """A function of bf16 logits, or hidden state and weight, and labels. Outside: the model's output is cast, and the loss (compiled
    or not) is given fp32."""
    if "head" in variant:
        tokens = chunk_tokens if "chunks" in variant else 0
        return head_loss(cross_entropy_sum, chunk_tokens=tokens, loss_parallel=False, compile=CompileConfig())
    if variant.startswith("torch"):
        return lambda logits, labels: torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
    loss = torch.compile(cross_entropy_sum) if "compiled" in variant else cross_entropy_sum
    return loss if "inside" in variant else lambda logits, labels: loss(logits.float(), labels)


class CudaMemory:
    def start(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


class ResidentMemory:
    """Peak memory of this process, by the kernel's own counter (Linux, proc_pid_clear_refs(5))."""

    def start(self) -> int:
        Path("/proc/self/clear_refs").write_text("5")
        return self._bytes("VmRSS")

    def peak(self) -> int:
        return self._bytes("VmHWM")

    def _bytes(self, field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
