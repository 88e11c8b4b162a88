"""Prints, from a process of its own, the predicted peak memory of a step and the peak that it reaches.

python -m tests.gpu.explained_step none|selective|full
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch

from models import llama
from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.distributed import CommConfig, process_group
from parallelisms.execution import ExecutionConfig, Precision
from parallelisms.mesh import build_mesh
from parallelisms.parallelize import parallelize
from tests.multiproc.test_explain import explained
from tools.explain.rank import ranks
from training.loss import cross_entropy_sum

SIZES = {  # GPU: 0.2 B parameters, so that weights, gradients, states and activations all count
    "cuda": (llama.Config(dim=1024, n_layers=12, n_heads=16, n_kv_heads=8, hidden_dim=2816), 32000, 4, 2048),
    "cpu": (llama.Config(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=160), 96, 4, 64),
}


def main(argv: Sequence[str]) -> int:
    checkpoint = ActivationCheckpointConfig(cast(Any, argv[0]))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, vocab_size, batch, seq_len = SIZES[kind]
    execution = ExecutionConfig(activation_checkpoint=checkpoint, precision=Precision(compute=torch.bfloat16))
    job = explained(
        sizes, execution, 1, vocab_size=vocab_size, seq_len=seq_len, batch=batch, device_type=cast(Any, kind)
    )
    [said] = ranks(job)
    with process_group(CommConfig()) as world:
        device = world.device.torch_device
        mesh, shapes = build_mesh(job.degrees, kind), {"local_batch_size": batch, "seq_len": seq_len}
        parallel = parallelize(job.model(), mesh, cross_entropy_sum, execution, **shapes, device=device, seed=0)
        optimizer = job.optimizer(parallel.parts)
        tokens = torch.randint(0, vocab_size, (batch, seq_len), device=device)
        for _ in range(3):  # the optimizer's state comes with the first
            parallel.forward_backward(tokens, tokens)
            optimizer.step()
            optimizer.zero_grad()
        took = torch.cuda.max_memory_allocated() if kind == "cuda" else 0
    print(json.dumps({"said": said.peak, "took": took}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
