"""What is decided by the kind of device: as functions of its name, since no test here has a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallelisms.device import DIFFERENCES, Device
from parallelisms.loss import add_product, equal_chunks
from training.config import TrainingConfig
from training.loss import chunk_tokens

LLAMA3 = 128_256


def test_the_kinds_of_devices() -> None:
    cuda, cpu = Device(torch.device("cuda", 3)), Device(torch.device("cpu"))
    assert (cuda.type, cuda.backend, cpu.backend) == ("cuda", "nccl", "gloo")
    assert cuda.differences.pins_batches and not cpu.differences.pins_batches
    assert cuda.differences.has_allocator and not cpu.differences.has_allocator


@pytest.mark.parametrize(
    ("device", "vocab_size", "asked", "tokens"),
    [
        ("cpu", LLAMA3, -1, 1046),
        ("cuda", LLAMA3, -1, 4096),
        ("cuda", 32_000, -1, 4096),  # 4,194 fit
        ("cuda", 16_384, -1, 8192),
        ("cuda", 16_383, -1, 0),
        ("cpu", 16_383, -1, 0),
        ("cuda", LLAMA3, 1000, 1000),  # the user's word
        ("cuda", LLAMA3, 0, 0),
    ],
)
def test_tokens_of_a_chunk_of_the_loss(device: str, vocab_size: int, asked: int, tokens: int) -> None:
    assert chunk_tokens(TrainingConfig(loss_chunk_tokens=asked), vocab_size, device) == tokens


@pytest.mark.parametrize(
    ("tokens", "most", "chunk"),
    [
        (32_768, 4096, 4096),
        (16_384, 1046, 1024),  # 16, and no seventeenth of 342
        (6000, 4096, 3000),
        (24_576, 4096, 4096),
        (33, 4, 3),
        (4099, 4096, 4096),  # a prime
        (10, 20, 10),
    ],
)
def test_chunks_have_one_shape(tokens: int, most: int, chunk: int) -> None:
    assert equal_chunks(tokens, most) == chunk


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


def test_a_gpu_adds_a_product_to_the_gradient_of_the_weight_in_one_operation() -> None:
    """Traced without a device; tests/gpu has the values."""
    total = torch.empty(64, 16, device="meta")
    a, b = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in ((64, 32), (32, 16)))
    with Names() as one:
        add_product(total, a, b, in_fp32=DIFFERENCES["cuda"].adds_products_in_fp32)
    with Names() as two:
        add_product(total, a, b, in_fp32=DIFFERENCES["cpu"].adds_products_in_fp32)
    assert one.seen == ["aten.addmm.dtype_out"] and two.seen == ["aten.mm.default", "aten.add_.Tensor"]
